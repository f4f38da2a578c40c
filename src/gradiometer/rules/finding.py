"""Findings: observations of a rule about a run, and their severity."""

from __future__ import annotations

import enum
import numbers
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor

from gradiometer.terminal import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


# Parquet and most readers of JSON have no larger integers
MOST: Final = 2**63 - 1


class Severity(enum.IntEnum):
    """How much a finding matters: worth knowing, probably a problem, or harmful to the run."""

    INFO = 10
    WARNING = 20
    ERROR = 30

    def __str__(self) -> str:
        """Return the word: ``warning``."""
        return self.name.lower()


@dataclass(frozen=True)
class Finding:
    """What one rule found about one tensor, or about the run, over some steps.

    Attributes:
        rule: the rule's name, such as ``"nonfinite"``.
        severity: how much it matters.
        first_step: the step at which it began.
        last_step: the step at which it was last seen.
        count: number of steps in which the rule reported it.
        kind: the kind of the tensors, such as ``"grads"``; None if it is not about tensors.
        tensor: the name of the parameter or tap; None if it is about all of them, or about a scalar.
        value: the most extreme value seen.
        worst_step: the step of that value; None if it is the value with which the finding began.
        threshold: the limit that the value is compared with.
        message: one self-contained line.
        advice: what to try, one line.
    """

    rule: str
    severity: Severity
    first_step: int
    last_step: int
    kind: str | None
    tensor: str | None
    value: float
    threshold: float
    message: str
    advice: str
    count: int = 1
    worst_step: int | None = None

    @property
    def key(self) -> tuple[str, str | None, str | None]:
        """The key that all findings about the same condition share."""
        return self.rule, self.kind, self.tensor

    def __str__(self) -> str:
        """Return one line: ``warning  step 12 to 40, worst at 31: ...``."""
        steps = f"step {self.first_step}"
        if self.last_step != self.first_step:
            steps += f" to {self.last_step}"
        if self.worst_step is not None:
            steps += f", worst at {self.worst_step}"
        return printable(f"{self.severity!s:7}  {steps}: {self.message}")

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; the severity as a word."""
        return asdict(self) | {"severity": str(self.severity)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Finding:
        """Return the finding that `to_dict` converted to these values."""
        return cls(**{**values, "severity": Severity[values["severity"].upper()]})


def checked(found: object) -> Finding:
    """Return a finding whose fields have the types of `Finding`.

    Tensors on the CPU and NumPy arrays of one element, and other real numbers, are converted to float or
    int. A value or threshold may be NaN or infinite.

    Raises:
        TypeError: for an object that is not a finding, or for a field that cannot be converted; the message
            names the field.
    """
    if not isinstance(found, Finding):
        raise TypeError(f"it is {_text(found)}, not a gm.Finding")
    fields: dict[str, Any] = {}
    for name, (convert, wanted) in _FIELDS.items():
        value = getattr(found, name)
        try:
            fields[name] = convert(value)
        except Exception:  # noqa: BLE001 a value of an unknown type may raise anything
            away = isinstance(value, Tensor) and value.device.type != "cpu"
            text = f"a tensor on {value.device.type}" if away else _text(value)
            raise TypeError(f"its {name} is {text}, not {wanted}") from None
    return Finding(**fields)


def times(ratio: float) -> str:
    """Return a factor as text.

    >>> times(2.43), times(41.7), times(12345.6), times(3e20)
    ('2.4 times', '42 times', '12,346 times', '3e+20 times')
    """
    if ratio < 10.0:
        return f"{ratio:.1f} times"
    return f"{ratio:,.0f} times" if ratio < 1e6 else f"{ratio:.0e} times"


def modules_text(names: Sequence[str], places: Sequence[int], most: int = 3) -> str:
    """Return a text that names a group of tensors by the largest modules that lie in it.

    >>> modules_text(["a.0.weight", "a.0.bias", "a.1.weight", "b.weight"], [0, 1, 2])
    'a (3 tensors)'
    >>> modules_text(["a.0.weight", "a.0.bias", "a.1.weight", "b.weight"], [0, 1, 3])
    'a.0, b (3 tensors)'
    >>> modules_text(["a.0.weight", "a.0.bias", "a.1.weight", "b.weight"], [2])
    'a.1.weight'
    """
    if len(places) == 1:
        return names[places[0]]
    if len(places) == len(names):
        return f"all {len(names):,} tensors"
    inside = {names[place] for place in places}
    outside = set()
    for name in names:
        if name not in inside:
            outside.update(_prefixes(name))
    found = dict.fromkeys(
        next((prefix for prefix in _prefixes(name) if prefix not in outside), name)
        for name in (names[place] for place in places)
    )
    text = ", ".join(list(found)[:most]) + (f" and {len(found) - most} more" if len(found) > most else "")
    return f"{text} ({len(places):,} tensors)"


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def _number(value: Any) -> Any:
    """Return a number; raise if the value is not one, or if it would have to be copied from a device."""
    if isinstance(value, Tensor):
        if value.device.type != "cpu":
            raise TypeError
        value = value.detach()
    if not isinstance(value, numbers.Real):
        value = value.item()
        if not isinstance(value, numbers.Real):
            raise TypeError
    return value


def _float(value: Any) -> float:
    return float(_number(value))


def _count(value: Any) -> int:
    number = _number(value)
    whole = int(number)
    if whole != number or not 0 <= whole <= MOST:
        raise ValueError
    return whole


def _severity(value: Any) -> Severity:
    return Severity[value.upper()] if isinstance(value, str) else Severity(_count(value))


def _str(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _or_none(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else convert(value)


_INTEGER: Final = "an integer from 0 to 2**63 - 1"
# of each field: the function that converts it or raises, and what it should be
_FIELDS: Final[Mapping[str, tuple[Callable[[Any], Any], str]]] = {
    "rule": (_str, "a str"),
    "severity": (_severity, "a Severity"),
    "first_step": (_count, _INTEGER),
    "last_step": (_count, _INTEGER),
    "kind": (_or_none(_str), "a str or None"),
    "tensor": (_or_none(_str), "a str or None"),
    "value": (_float, "a number"),
    "threshold": (_float, "a number"),
    "message": (_str, "a str"),
    "advice": (_str, "a str"),
    "count": (_count, _INTEGER),
    "worst_step": (_or_none(_count), f"{_INTEGER}, or None"),
}


def _text(value: object) -> str:
    """Return a short text of a value and its type, for a message."""
    try:
        text = f"{value!r:.60}"
    except Exception:  # noqa: BLE001 `__repr__` may raise anything
        text = "an object"
    return f"{text} ({type(value).__name__})"
