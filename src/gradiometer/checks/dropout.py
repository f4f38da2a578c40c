"""Contracts of randomness: two forwards agree without dropout, and with it differ as dropout should."""

from __future__ import annotations

import re
from collections import defaultdict
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten

from gradiometer.checks.contract import contract
from gradiometer.checks.dropped import Drop, drops_in
from gradiometer.checks.operators import MOVES
from gradiometer.checks.probe import DROPOUTS
from gradiometer.checks.report import Evidence, NotApplicable, percent
from gradiometer.checks.trace import traced
from gradiometer.control import random_state, restore_random_state
from gradiometer.rules import Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gradiometer.checks.probe import Probe

REPEAT: Final = "draw random numbers only if self.training, and pass training=self.training to dropout"
EMPTY: Final = "write all elements of a tensor from torch.empty, or use torch.zeros"
BRANCH: Final = "drop the branch before it is added to the residual stream: x + dropout(f(norm(x)))"
# models that draw random numbers on purpose
_SAMPLES: Final = re.compile(
    r"VAE|LSH|Variational|Sampl|Gumbel|Noise|Diffusion|MAE|Reparam|Bayes|Vits|Mask(ed)?Auto|Stochastic"
)
# elements that must have been dropped on average before it counts that none was
_EXPECTED: Final = 30.0
# a share of dropped elements that looks like that of the kept ones, and how many tell it
_KEEP, _MANY = 0.8, 200
# roundings by which forwards of the same values may differ
_ROUNDINGS: Final = 8.0


@contract("behaviour", "two forward passes without dropout agree")
def repeatable(probe: Probe) -> Iterator[Evidence]:
    """Compare forward passes with different seeds, with one seed, and with other uninitialized memory."""
    # not the measured rounding error, which such differences are part of
    limit = _limit(probe)
    filled = []
    for value in (1.0, 1.0, -3.0):
        with _Filled(value):
            filled.append(probe.output())
    size = _distance(probe, filled[1], filled[2])
    # otherwise forwards differ also with the same values
    if size > limit >= _distance(probe, filled[0], filled[1]):
        text = f"uninitialized memory changes the output by {percent(size)}"
        yield Evidence(text, None, size, limit, EMPTY)
        return
    first, other = (probe.output(seed=seed) for seed in (0, 1))
    # what a model keeps of other inputs
    probe.output(probe.other_inputs())
    again = probe.output(seed=0)
    change, same = _distance(probe, other, first), _distance(probe, again, first)
    if max(change, same) > limit:
        name, kind = _first_that_differs(probe)
        why = "random numbers" if same <= limit else "non-torch random numbers, or kept state"
        where = f"; first in {name or 'the model itself'} ({kind})"
        text = f"two forwards in evaluation mode differ by {percent(max(change, same))}, due to {why}{where}"
        is_meant = same <= limit and _is_random_by_design(probe, kind)
        severity = Severity.INFO if is_meant else Severity.WARNING
        yield Evidence(text, name, max(change, same), limit, REPEAT, severity)


@contract("behaviour", "dropout changes the output, and drops branches, not the residual stream")
def dropout(probe: Probe) -> Iterator[Evidence]:
    """Record a forward pass in training mode, and find the elements that are set to 0 at random."""
    named = probe.model.named_modules()
    modules: dict[nn.Module, str] = {x: name for name, x in named if isinstance(x, DROPOUTS) and x.p > 0}
    calls = _Calls(probe.model, modules)
    with calls:
        trace = traced(probe, training=True)
    drops = drops_in(trace)
    if not drops and not calls.counts:
        raise NotApplicable("the model calls no dropout with p > 0")
    yield from calls.evidence(probe)
    all_gone = [name for x, name in modules.items() if getattr(x, "p", 0.0) >= 1 and calls.counts.get(x)]
    all_gone += [drop.name(probe) for drop in drops if drop.share >= 1]
    if all_gone:
        yield Evidence(f"dropout in {all_gone[0]} drops everything", all_gone[0], 1.0, 1.0, "use p below 1")
    high = {
        drop.name(probe): drop.share for drop in drops if _KEEP - 0.03 < drop.share < 1 and drop.count > 200
    }
    for name, share in list(high.items())[:1]:
        text = f"dropout in {name} drops {100 * share:.0f} %: is p meant as the fraction that is kept?"
        yield Evidence(
            text, name, share, _KEEP, "p of nn.Dropout is the fraction that is dropped", Severity.INFO
        )
    yield from _misplaced(probe, drops)
    if sum(drop.count for drop in drops) < _EXPECTED:
        return
    others = drops_in(traced(probe, training=True, seed=1))
    if len(others) == len(drops) and all(a.is_same(b) for a, b in zip(drops, others, strict=True)):
        text = "every forward pass drops the same elements, whatever the seed"
        yield Evidence(text, advice="draw a new dropout mask in each forward pass")
    # of other generators than torch's, such as NumPy's for the masks of spectrograms
    state, runs = random_state(), []
    for _ in range(2):
        restore_random_state(state)
        runs.append(probe.output(training=True))
    size = _distance(probe, *runs)
    if size > _limit(probe):
        text = f"two forward passes with the same seed differ by {percent(size)} in training mode"
        advice = "draw random numbers from torch's generator, and keep no state"
        yield Evidence(text, advice=advice, severity=Severity.INFO)


def _misplaced(probe: Probe, drops: list[Drop]) -> Iterator[Evidence]:
    """Yield dropout of scores, of the logits and of the residual stream, the first of each."""
    told = set()
    for kind, text, advice in (
        ("scores", "drops attention scores before the softmax", "drop weights after the softmax"),
        ("logits", "drops the output of the model", "do not apply dropout to the logits"),
        ("stream", "drops the residual stream itself, not a branch", BRANCH),
    ):
        several = [drop for drop in drops if kind in drop.kinds]
        if several and kind not in told:
            told.add(kind)
            name = several[0].name(probe)
            more = f" (and {len(several) - 1} more)" if len(several) > 1 else ""
            yield Evidence(f"dropout in {name}{more} {text}", name, several[0].share, 0.0, advice)


class _Calls:
    """Notes which modules of dropout are called in a forward, and whether they drop anything."""

    def __init__(self, model: nn.Module, modules: dict[nn.Module, str]) -> None:
        self.modules = modules
        self._parents = {model.get_submodule(name.rpartition(".")[0]) for name in modules.values()}
        self._called: set[nn.Module] = set()
        self.counts: dict[nn.Module, int] = defaultdict(int)
        self.idle: dict[nn.Module, float] = {}
        self._stack = ExitStack()

    def __enter__(self) -> None:
        for module in self.modules:
            self._stack.callback(module.register_forward_hook(self._note).remove)
        for module in self._parents:
            self._stack.callback(module.register_forward_hook(self._enter).remove)

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _enter(self, module: nn.Module, *_: object) -> None:
        self._called.add(module)

    def _note(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        with _disable_current_modes():
            self._compare(module, args, output)

    def _compare(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.counts[module] += 1
        if args and isinstance(args[0], Tensor) and isinstance(output, Tensor):
            x, p = args[0], float(module.p)  # type: ignore[arg-type]
            # those of whole channels drop few
            per = x.numel() if isinstance(module, nn.Dropout) else x.shape[0] * x.shape[min(1, x.dim() - 1)]
            share = float((x != 0).double().mean()) * per * p
            is_in_place = bool(getattr(module, "inplace", False))
            if share > _EXPECTED and not is_in_place and x.shape == output.shape and torch.equal(x, output):
                self.idle[module] = p

    def evidence(self, probe: Probe) -> Iterator[Evidence]:
        """Yield modules that drop nothing, and those that are not called though others like them are."""
        if self.idle:
            module, p = next(iter(self.idle.items()))
            name = self.modules[module]
            more = f" (and {len(self.idle) - 1} more)" if len(self.idle) > 1 else ""
            text = f"{name}{more} has p={p:g}, but drops nothing in training mode"
            yield Evidence(text, name, p, 0.0, "use nn.Dropout, and let train() set the mode of all modules")
        alike: dict[tuple[str, str], list[nn.Module]] = defaultdict(list)
        for module, name in self.modules.items():
            path, _, own = name.rpartition(".")
            parent = probe.model.get_submodule(path)
            if parent in self._called:
                alike[type(parent).__name__, own].append(module)
        for several in alike.values():
            missing = [x for x in several if not self.counts.get(x)]
            if missing and 2 * len(missing) <= len(several):
                name = self.modules[missing[0]]
                text = f"{name} is never called, although similar modules are"
                yield Evidence(text, name, advice="call it in forward, or remove it", severity=Severity.INFO)
                return


class _Filled(TorchDispatchMode):
    """Fills uninitialized memory with multiples of a value."""

    def __init__(self, value: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.value = value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]  # noqa: SLF001 it has no public name
        is_empty = name in {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
        if is_empty and isinstance(result, Tensor) and result.is_floating_point() and not result.is_meta:
            # not all the same, as a norm would subtract that
            values = self.value * (torch.arange(result.numel(), device=result.device) % 7 - 3)
            result.copy_(values.view(result.shape))
        return result


def _first_that_differs(probe: Probe) -> tuple[str | None, str]:
    """Return the name and class of the innermost module whose output differs though its input does not."""
    runs: list[list[tuple[nn.Module, list[Tensor], list[Tensor]]]] = []
    for seed in (0, 1):
        calls: list[tuple[nn.Module, list[Tensor], list[Tensor]]] = []
        given: list[list[Tensor]] = []

        def enter(_: nn.Module, args: Any, kwargs: Any, given: list[list[Tensor]] = given) -> None:
            given.append(_copies((args, kwargs)))

        def leave(
            module: nn.Module,
            _: Any,
            output: Any,
            given: list[list[Tensor]] = given,
            calls: list[tuple[nn.Module, list[Tensor], list[Tensor]]] = calls,
        ) -> None:
            calls.append((module, given.pop(), _copies(output)))

        with ExitStack() as stack:
            for module in probe.model.modules():
                stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True).remove)
                stack.callback(module.register_forward_hook(leave).remove)
            probe.output(seed=seed)
        runs.append(calls)
    for (module, given_a, a), (other, given_b, b) in zip(*runs, strict=False):
        if module is not other:
            break
        if _agree(given_a, given_b) and not _agree(a, b):
            return probe.names.get(module), type(module).__name__
    return None, type(probe.model).__name__


def _limit(probe: Probe) -> float:
    return _ROUNDINGS * max(torch.finfo(torch.float32).eps, torch.finfo(probe.dtype).eps)


def _distance(probe: Probe, a: Tensor, b: Tensor) -> float:
    return probe.distance(a, b) if a.shape == b.shape else 1.0


def _copies(value: Any) -> list[Tensor]:
    # of results that are not tuples or dicts, such as a ModelOutput, the values
    if hasattr(value, "to_tuple"):
        value = value.to_tuple()
    return [x.detach().clone() for x in tree_flatten(value)[0] if isinstance(x, Tensor)]


def _agree(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(
        x.shape == y.shape and torch.allclose(x.double(), y.double(), 1e-9, 1e-12, equal_nan=True)
        for x, y in zip(a, b, strict=True)
    )


def _is_random_by_design(probe: Probe, kind: str) -> bool:
    """Return whether random numbers are drawn on purpose: by the name of the model, or as of a distribution.

    Those that ``forward=`` draws are no part of the model. Normal ones that are multiplied by something that
    was computed are samples with that standard deviation.
    """
    config = probe.config
    names = [kind, type(probe.model).__name__]
    if any(_SAMPLES.search(name) for name in names):
        return True
    if getattr(config, "mask_ratio", 0) or getattr(config, "noise_scale", 0):
        return True
    trace = traced(probe)
    drawn = [node for node in trace.nodes if node.is_random and node.module is not None]
    if any("norm" not in node.name and "randn" not in node.name for node in drawn):
        return False
    samples: set[int] = set()
    is_scaled = False
    for index, node in enumerate(trace.nodes):
        sources = [source for source, _ in node.inputs.values()]
        if node.is_random or (sources and node.name in MOVES and samples.issuperset(sources)):
            samples.add(index)
        is_scaled |= node.name in {"mul", "addcmul"} and len(sources) > 1 and not samples.isdisjoint(sources)
    return is_scaled or not drawn
