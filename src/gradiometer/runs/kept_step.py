"""What it takes to repeat a step, as a file beside the black box: its random numbers, batch and weights."""

from __future__ import annotations

import io
import random
import warnings
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from gradiometer.control import restore_random_state
from gradiometer.inputs import is_dtensor, local_shard, named_buffers, named_parameters, unwrapped
from gradiometer.runs.directory import prepare
from gradiometer.runs.files import RunError, open_file, stamp, summary

if TYPE_CHECKING:
    from collections.abc import Sequence

_FORMAT: Final = "gradiometer kept steps"
_VERSION: Final = 1
_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None))


@dataclass(frozen=True)
class KeptStep:
    """A step that a `Monitor` has kept, as `gradiometer.load_kept_step` returns it.

    Attributes:
        step: its number.
        random: the states of the random number generators at its start.
        args, kwargs: what `Monitor.keep` was called with; tensors are on the CPU.
        weights: parameters and buffers by name; empty without ``keep_weights=True``. For a DTensor, this
            rank's shard.
        weights_step: the step at whose start the weights had these values; None without weights.
        note: why something is missing; otherwise empty.
    """

    step: int
    random: Mapping[str, Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    weights_step: int | None = None
    note: str = ""

    def restore(self, model: nn.Module | None = None) -> None:
        """Restore the random numbers, and the weights of a model, if they were kept.

        The random numbers of a device are left out if this machine has no device of its type.

        Raises:
            ValueError: if a kept weight is not in the model, or has another shape or a dtype that does not
                fit, or if the state of a generator cannot be restored here; nothing has changed then.
        """
        states = _restorable(self.random)
        if model is not None and self.weights:
            inner = unwrapped(model)
            own = dict(zip(*named_parameters(inner, "KeptStep.restore"), strict=True))
            own |= dict(named_buffers(inner))
            pairs = []
            for name, value in self.weights.items():
                tensor = own.get(name)
                if tensor is not None and is_dtensor(type(tensor)):
                    tensor = local_shard(tensor)
                if tensor is None or tensor.shape != value.shape:
                    what = "is not in the model" if tensor is None else f"has the shape {list(tensor.shape)}"
                    msg = f"KeptStep.restore: {name!r}, kept with the shape {list(value.shape)}, {what}; "
                    raise ValueError(msg + "pass the model that was trained")
                if not torch.can_cast(value.dtype, tensor.dtype):
                    msg = (
                        f"KeptStep.restore: {name!r}, kept as {value.dtype}, is {tensor.dtype} in the model; "
                    )
                    raise ValueError(msg + "pass the model that was trained")
                pairs.append((tensor, value))
            if self.weights_step != self.step:
                text = f"the weights are those at the start of step {self.weights_step}, not of {self.step}"
                warnings.warn(text, stacklevel=2)
            with torch.no_grad():
                for tensor, value in pairs:
                    tensor.copy_(value)
        restore_random_state(states)


def load_kept_step(run_dir: str | Path, *, current: bool = False) -> KeptStep:
    """Load the step that a `Monitor` has kept when its run failed.

    By default that is the first non-finite step, if there was one: the one that the black box names.
    Otherwise, and with ``current=True``, it is the step in which the run ended.

    Args:
        run_dir: the folder of the run record, or a file ``blackbox.rank-00005.pt`` in it, of another rank.
        current: whether to load the step in which the run ended.

    Raises:
        RunError: if there is no such file, or it cannot be read.

    >>> import tempfile, torch, gradiometer as gm
    >>> model, run_dir = torch.nn.Linear(2, 1), tempfile.mkdtemp()
    >>> def step(x):
    ...     loss = (model(x) * 0).log().sum()
    ...     loss.backward()
    ...     return loss
    >>> with gm.Monitor(model, run_dir=run_dir, rules=(), keep_weights=True) as monitor:
    ...     x = torch.ones(1, 2)
    ...     monitor.keep(x)
    ...     loss = step(x)
    ...     monitor.record()
    ...     monitor.advance(loss=loss)
    >>> kept = gm.load_kept_step(run_dir)
    >>> kept.restore(model)
    >>> kept.step, gm.locate_nonfinite(step, *kept.args).operation
    (0, 'aten.log')
    """
    path = Path(run_dir)
    path = kept_path(path) if path.is_dir() else path
    try:
        with open_file(path) as file:
            _check_archive(file)
            content = torch.load(file, map_location="cpu", weights_only=True)
        if content["format"] != _FORMAT or content["version"] > _VERSION:
            raise ValueError("it has another format")  # noqa: TRY301 with the same advice
        entry = content["current"] if current or content["first"] is None else content["first"]
        weights = content["weights"] or {}
        kept = KeptStep(**entry, weights=weights, weights_step=content["weights_step"])
        _check(kept)
    except FileNotFoundError:
        msg = f"{path} does not exist: it is written by a Monitor with a run_dir, when an exception or a "
        raise RunError(msg + "non-finite loss ends the run, unless redact=True") from None
    except Exception as error:
        msg = f"{path} cannot be read ({summary(error)}): it was not written by a Monitor, or is damaged"
        raise RunError(msg) from error
    return kept


def _check_archive(file: IO[bytes]) -> None:
    """Refuse a file that would take more memory than it has bytes, before anything is read."""
    size = file.seek(0, 2)
    with zipfile.ZipFile(file) as archive:
        if sum([entry.file_size for entry in archive.infolist()]) > size:
            raise ValueError("its parts are larger than the file")
    file.seek(0)


def _check(kept: KeptStep) -> None:
    """Raise a ValueError unless everything in a step has the type that it is written with."""
    steps = [kept.step] if kept.weights_step is None else [kept.step, kept.weights_step]
    fits = {
        "step": all([type(x) is int and 0 <= x < 2**63 for x in steps]),
        "args": isinstance(kept.args, tuple),
        "kwargs": isinstance(kept.kwargs, dict) and all([isinstance(x, str) for x in kept.kwargs]),
        "weights": isinstance(kept.weights, dict)
        and all([isinstance(x, str) and _is_dense(y) for x, y in kept.weights.items()]),
        "note": isinstance(kept.note, str),
        "random": isinstance(kept.random, dict) and all([_is_state(*item) for item in kept.random.items()]),
    }
    if wrong := [name for name, fit in fits.items() if not fit]:
        raise ValueError(f"it has no valid {' and '.join(wrong)}")


def _is_dense(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and value.device.type == "cpu"


def _restorable(states: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of the generators that are here, after trying each on a generator of its own."""
    found = {}
    for name, value in states.items():
        try:
            if name == "python":
                version, keys, gauss = value
                random.Random().setstate((version, tuple(keys), gauss))  # noqa: S311 not for secrets
            elif name == "numpy":
                import numpy as np  # noqa: PLC0415 optional

                kind, keys, *rest = value
                np.random.RandomState().set_state((kind, np.frombuffer(keys, dtype=np.uint32), *rest))
            elif name == "torch":
                torch.Generator("cpu").set_state(value)
            else:
                module = torch.get_device_module(name)
                module.set_rng_state  # noqa: B018 there is none of the CPU
                if not module.is_available():
                    continue
                torch.Generator(name).set_state(value)
            found[name] = value
        except (
            ArithmeticError,
            AttributeError,
            ImportError,
            LookupError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            msg = f"KeptStep.restore: the state of the random numbers of {name!r} cannot be restored here "
            advice = "restore it where the run was trained, or use args, kwargs and weights without restore"
            raise ValueError(f"{msg}({summary(error)}); {advice}") from None
    return found


def _is_state(name: Any, value: Any) -> bool:
    if name == "python":
        return isinstance(value, tuple) and len(value) == 3 and isinstance(value[1], tuple)
    if name == "numpy":
        # NumPy does not check the position, and would read beyond the keys
        fits = isinstance(value, tuple) and len(value) == 5 and isinstance(value[1], bytes)
        return fits and len(value[1]) == 4 * 624 and type(value[2]) is int and 0 <= value[2] <= 624
    return isinstance(name, str) and isinstance(value, Tensor) and value.dtype == torch.uint8


def kept_path(run_dir: Path, rank: int | None = None) -> Path:
    """Return the path of the file; ``rank`` as for the black box."""
    return run_dir / ("blackbox.pt" if rank is None else f"blackbox.rank-{rank:05d}.pt")


def move_kept(run_dir: Path, seen: object, attempt: int) -> None:
    """Give the file of an earlier attempt its own name, and no other readers; not one that is newer.

    ``seen``: the `stamp` of the file before this attempt; None if there was none.
    """
    path = kept_path(run_dir)
    if seen is None or stamp(path) != seen:
        return
    if not path.is_symlink():
        with suppress(OSError):  # it may belong to another user
            path.chmod(0o600)
    path.replace(run_dir / f"blackbox-{attempt:04d}.pt")


def write_kept_steps(
    path: Path,
    first: Mapping[str, Any] | None,
    current: Mapping[str, Any],
    weights: Mapping[str, Tensor] | None,
    weights_step: int | None,
) -> None:
    """Write the file, which only its owner may read; it is replaced at once, or not at all."""
    content = {"format": _FORMAT, "version": _VERSION, "first": first, "current": current}
    data = io.BytesIO()
    torch.save(content | {"weights": weights, "weights_step": weights_step}, data)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        prepare(path.parent, path, data.getvalue(), sync=True, private=True)()
    except FileNotFoundError:
        # a run record that has just started has removed what looked like a leftover; it does so once
        prepare(path.parent, path, data.getvalue(), sync=True, private=True)()


def plain_batch(value: Any, name: str = "the batch") -> Any:
    """Return a batch with plain containers, which can be read without unpickling objects.

    Raises:
        TypeError: for an object that is neither a tensor, a plain value, nor a container of these.
    """
    if isinstance(value, Tensor):
        value = local_shard(value) if is_dtensor(type(value)) else value
        return value if type(value) is Tensor else value.detach().as_subclass(Tensor)
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Mapping):
        return {key: plain_batch(x, f"{name}[{key!r}]") for key, x in value.items()}
    if type(value) in {list, tuple}:
        parts: Sequence[Any] = [plain_batch(x, f"{name}[{i}]") for i, x in enumerate(value)]
        return type(value)(parts)
    msg = f"keep: {name} has the type {type(value).__name__}; pass tensors, numbers, strings, and lists, "
    raise TypeError(msg + "tuples and dicts of these")
