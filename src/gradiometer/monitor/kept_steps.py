"""Keep the data to repeat the last steps, until the rules have seen that they were finite."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from gradiometer.columns import Cursor
from gradiometer.control import random_state
from gradiometer.inputs import is_dtensor, local_shard, named_buffers, unwrapped
from gradiometer.monitor.capture_mode import beside_captures
from gradiometer.runs import plain_batch, write_kept_steps

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from gradiometer.monitor.failures import Failures
    from gradiometer.recorder import Recorder

# steps whose random numbers, and whose batches, wait for the rules
_STEPS: Final = 256
_BATCHES: Final = 32
# faults that a repetition of the step may explain
_REASONS: Final = frozenset({"exception", "non-finite loss"})


class _Step(NamedTuple):
    """The start of a step; of its batch the tensors and their versions, which change if they are written."""

    step: int
    random: dict[str, Any]
    batch: tuple[tuple[Any, ...], dict[str, Any]] | None
    versions: list[int]


class KeptSteps:
    """Keeps the starts of the last steps, and writes those of the current and the first non-finite one.

    Random numbers are kept for all steps that the rules have not seen, batches for at most 32. Weights are
    copied at the start of each step, into the same memory, unless the last recorded step was not finite: the
    device decides, so the host does not wait.

    Args:
        path: the file to write.
        recorder, model: of the weights and buffers, which are kept only with ``weights``.
        weights: whether to keep them.
    """

    def __init__(
        self, path: Path, recorder: Recorder, model: Any, *, weights: bool, failures: Failures
    ) -> None:
        # absolute, in case the working directory changes
        self._path = path.absolute()
        self._recorder = recorder
        self._failures = failures
        self._lock = threading.Lock()
        self._waiting: deque[_Step] = deque(maxlen=_STEPS)
        self._first: _Step | None = None
        self._is_broken = False
        self._python: Any = None
        # whether `keep` is called
        self._has_keep = False
        self._devices = list(dict.fromkeys(p.device for p in [recorder.ring, *recorder.parameters_tracked]))
        self._sources = _weights_of(recorder, model) if weights else {}
        self._copies: dict[str, Tensor] = {}
        self._copied_step: Tensor | None = None

    def begin(self, step: int) -> None:
        """Keep the start of a step; a later `keep` replaces it."""
        self._add(step, None)

    def keep(self, step: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Keep the start of a step, and its batch.

        Raises:
            TypeError: for a batch that cannot be written; nothing is kept then.
        """
        self._has_keep = True
        self._add(step, (plain_batch(args), plain_batch(dict(kwargs))))

    def _add(self, step: int, batch: tuple[tuple[Any, ...], dict[str, Any]] | None) -> None:
        random = random_state(self._devices)
        if random["python"] == self._python:
            random["python"] = self._python  # one object of 20 kB for all steps
        self._python = random["python"]
        kept = _Step(step, random, batch, _versions(batch))
        with self._lock:
            if self._waiting and self._waiting[-1].step == step:
                self._waiting.pop()
            self._waiting.append(kept)
            if batch is not None and len(self._waiting) > _BATCHES:
                i = len(self._waiting) - 1 - _BATCHES
                self._waiting[i] = self._waiting[i]._replace(batch=None)
            # once per step
            if self._sources and (batch is not None or not self._has_keep):
                self._copy_weights(step)

    @torch.no_grad()
    def _copy_weights(self, step: int) -> None:
        recorder = self._recorder
        with recorder.in_order():
            keeps = recorder.cursor[Cursor.SKIP] > 0
            if self._copied_step is None:
                self._copied_step = torch.full_like(recorder.cursor[0], step)
                self._copies = {name: x.detach().clone() for name, x in self._sources.items()}
                return
            self._copied_step.copy_(torch.where(keeps, self._copied_step, step))
            for name, source in self._sources.items():
                copy = self._copies[name]
                flag = keeps if keeps.device == copy.device else keeps.to(copy.device, non_blocking=True)
                torch.where(flag, copy, source, out=copy)

    def see(self, step: int, *, is_bad: bool) -> None:
        """Note that the rules have seen a step; called on their thread."""
        with self._lock:
            while self._waiting and self._waiting[0].step <= step:
                kept = self._waiting.popleft()
                if is_bad and not self._is_broken and kept.step == step:
                    self._first = kept
            self._is_broken = is_bad

    def write(self, reason: str) -> None:
        """Write the file, for a fault with this reason; never raises."""
        try:
            with self._lock, beside_captures(self._recorder.ring.device) as may:
                current = self._waiting[-1] if self._waiting else self._first
                if current is None or (reason not in _REASONS and self._first is None):
                    return
                weights, step = self._weights() if may else (None, None)
                first = None if self._first is None else _entry(self._first)
                entry = _entry(current)
            write_kept_steps(self._path, first, entry, weights, step)
        except Exception as error:  # noqa: BLE001 the fault must still be written
            self._failures.add("keep", error)

    def _weights(self) -> tuple[dict[str, Tensor] | None, int | None]:
        if self._copied_step is None:
            return None, None
        with self._recorder.in_order():
            # copies on the CPU, too: the next step may begin while they are written
            copies = {name: x.to("cpu", copy=True) for name, x in self._copies.items()}
            return copies, int(self._copied_step)


def _weights_of(recorder: Recorder, model: Any) -> dict[str, Tensor]:
    """Return the parameters, and the buffers of modules, by name; of DTensors the local shards."""
    found = dict(zip(recorder.catalog.names, recorder.parameters_tracked, strict=True))
    parts = model.items() if isinstance(model, dict) else [("", model)]
    for prefix, part in parts:
        if isinstance(part, nn.Module):
            start = f"{prefix}." if prefix else ""
            found |= {start + name: x for name, x in named_buffers(unwrapped(part))}
    return {name: local_shard(x) if is_dtensor(type(x)) else x.detach() for name, x in found.items()}


def _entry(kept: _Step) -> dict[str, Any]:
    """Return a step as it is in the file."""
    entry: dict[str, Any] = {"step": kept.step, "random": kept.random}
    if kept.batch is None:
        return entry
    if _versions(kept.batch) != kept.versions:
        return entry | {"note": "the batch was overwritten after Monitor.keep: pass a copy of it"}
    args, kwargs = tree_map_only(Tensor, lambda x: x.detach().cpu(), kept.batch)
    return entry | {"args": args, "kwargs": kwargs}


def _versions(batch: Any) -> list[int]:
    tensors = [x for x in tree_leaves(batch) if isinstance(x, Tensor)]
    # inference tensors have none
    return [0 if x.is_inference() else x._version for x in tensors]  # noqa: SLF001
