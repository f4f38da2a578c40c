"""A `Monitor` for the Trainer of torchtitan, and a metrics processor that installs it by configuration."""

from __future__ import annotations

import logging
import sys
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradiometer.inputs import is_dtensor
from gradiometer.integrations.frameworks import Watching, is_first
from gradiometer.integrations.session import Session, while_running
from gradiometer.stats import Taps

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor, nn

    from gradiometer.monitor import Monitor

__all__ = ["MonitorOptions", "MonitoredMetrics", "TrainerMonitor", "monitor", "watch"]

MetricsProcessor: Any = import_module("torchtitan.components.metrics").MetricsProcessor
_override: Any = import_module("torchtitan.config.override")
# trainers look `clip_grad_norm_` up in it at each call
_dist_utils: Any = import_module("torchtitan.distributed.utils")


class TrainerMonitor(Watching):
    """Watches the training of a torchtitan Trainer with a `Monitor`, from its first step to its end.

    Gradients are measured right before torchtitan clips them: accumulated, as shards. A step ends with the
    update of the weights. Its loss is the sum over the micro-batches; averaged over the ranks that have one,
    it is torchtitan's ``global_avg_loss``, in every step. Other scalars are ``lr``, with ``lr_1``, … for
    further optimizers, and ``clip_max_norm`` and ``clip_factor``, by which the gradients were multiplied.
    Steps are counted from 0: step s is torchtitan's step s + 1.

    With pipeline parallelism, the parameters of all model parts are measured. Findings are logged by
    ``torchtitan.gradiometer``. An exception in ``train`` writes a black box. Checkpoints do not contain the
    monitor's state: a resumed run continues the numbers of the steps, and its rules start anew.

    Args:
        trainer: the Trainer; its ``train``, ``train_step``, ``forward_backward_step`` and ``close`` are
            wrapped. Create this before its first step, on every rank.
        taps: a regular expression for the names of modules whose outputs to measure; or patterns for `Taps`,
            or a `Taps` of the model. Not with pipeline parallelism.
        options: other arguments of `Monitor`, except the model.

    Raises:
        TypeError: for an unknown option.
        ValueError: for a pattern that selects no module, or modules inside of others that are compiled by
            themselves; for taps with pipeline parallelism.
    """

    def __init__(
        self, trainer: Any, *, taps: str | Mapping[str, Any] | Taps | None = None, **options: Any
    ) -> None:
        self._trainer = trainer
        self._taps = None if taps is None else _taps_of(trainer, taps, options.get("every", 1))
        self._owns_taps = self._taps is not taps
        logger = logging.getLogger("torchtitan.gradiometer")
        self._session: Session = Session("watch(trainer)", {**options, "taps": self._taps}, logger)
        self._is_begun = self._is_over = self._is_recorded = False
        self._are_refused_told = False
        self._hooks: list[Any] = []
        trainer.train = self._to_the_end(trainer.train)
        trainer.train_step = self._observed(trainer.train_step)
        trainer.forward_backward_step = self._with_loss(trainer.forward_backward_step)
        trainer.close = self._closing(trainer.close)

    @property
    def monitor(self) -> Monitor | None:
        """The monitor; None before the first step."""
        return self._session.monitor

    # --- the wrapped methods

    def _to_the_end(self, train: Any) -> Any:
        @wraps(train)
        def watched(*args: Any, **kwargs: Any) -> Any:
            try:
                result = train(*args, **kwargs)
            except BaseException as error:
                self._end(error)
                raise
            self._end()
            return result

        return watched

    def _closing(self, close: Any) -> Any:
        @wraps(close)
        def closing(*args: Any, **kwargs: Any) -> Any:
            # for a loop that calls `train_step` itself
            self._end()
            return close(*args, **kwargs)

        return closing

    def _observed(self, train_step: Any) -> Any:
        @wraps(train_step)
        def observed(*args: Any, **kwargs: Any) -> Any:
            if not self._is_begun:
                self._begin()
            with self._clipping_observed():
                return train_step(*args, **kwargs)

        return observed

    def _with_loss(self, forward_backward_step: Any) -> Any:
        @wraps(forward_backward_step)
        def with_loss(*args: Any, **kwargs: Any) -> Any:
            loss = forward_backward_step(*args, **kwargs)
            self._add_loss(loss)
            return loss

        return with_loss

    @contextmanager
    def _clipping_observed(self) -> Iterator[None]:
        """Record the gradients before torchtitan's function that clips them."""
        clip = _dist_utils.clip_grad_norm_

        @wraps(clip)
        def observed(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
            self._record()
            return clip(parameters, max_norm, *args, **kwargs)

        _dist_utils.clip_grad_norm_ = observed
        try:
            yield
        finally:
            _dist_utils.clip_grad_norm_ = clip

    # --- the run

    def _begin(self) -> None:
        self._is_begun = True
        trainer = self._trainer
        # torchtitan has counted this step already
        step = max(trainer.step - 1, 0)
        optimizers = list(trainer.optimizers)
        self._session.begin(_model_of(trainer), scaler=None, step=step, state=None, optimizers=optimizers)
        # the first for a trainer that does not clip
        before = trainer.optimizers.register_step_pre_hook(lambda *_: self._record())
        # torchtitan may raise after this because of the loss, which has to be in the record
        after = trainer.optimizers.register_step_post_hook(lambda *_: self._advance())
        self._hooks = [before, after]

    @while_running
    def _add_loss(self, loss: Tensor) -> None:
        trainer = self._trainer
        if trainer.parallel_dims.pp_enabled and not trainer.pp_has_last_stage:
            return
        loss = loss.detach()
        if is_dtensor(type(loss)):
            # torchtitan, too, sums the local values over the mesh of the loss
            loss = loss.to_local()  # type: ignore[attr-defined]
        # the product is a new tensor: a CUDA graph overwrites its own in the next micro-batch
        self._session.add_loss(loss * _parts_of_loss(trainer.parallel_dims))

    @while_running
    def _record(self) -> None:
        if self._is_recorded:
            return
        self._is_recorded = True
        self._session.record()
        for i, optimizer in enumerate(self._trainer.optimizers):
            self._session.begin_updates(optimizer)
            self._session.record_updates_after(optimizer)
            self._session.note(**{f"lr_{i}" if i else "lr": optimizer.param_groups[0].get("lr")})

    @while_running
    def _advance(self) -> None:
        self._is_recorded = False
        self._session.advance()
        if isinstance(self._taps, _TrainerTaps) and self._taps.refused and not self._are_refused_told:
            self._are_refused_told = True
            if is_first():
                names = ", ".join(sorted(self._taps.refused))
                self._session.say(f"DTensors, of which each rank has a part, are not measured: {names}")

    def _end(self, error: BaseException | None = None) -> None:
        self._session.end(error)
        for hook in self._hooks:
            hook.remove()
        if self._owns_taps and self._taps is not None:
            self._taps.remove()


class _TrainerTaps(Taps):
    """Taps that do not stop training at outputs that cannot be measured, unlike those of a user's own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.refused: set[str] = set()

    def measure(self, x: Tensor, row: int, channel_dim: int) -> Tensor:
        if is_dtensor(type(x)):
            self.refused.add(self.names[row])
            return x
        return super().measure(x, row, channel_dim)


def _taps_of(trainer: Any, taps: str | Mapping[str, Any] | Taps, every: int) -> Taps:
    if len(trainer.model_parts) > 1 or trainer.parallel_dims.pp_enabled:
        msg = (
            "watch(trainer, taps=...): with pipeline parallelism a rank has only a part of the modules, but "
        )
        raise ValueError(msg + "taps need the same names on all ranks; leave them out")
    if isinstance(taps, Taps):
        return taps
    model: nn.Module = trainer.model_parts[0]
    made = _TrainerTaps(model, {"taps": taps} if isinstance(taps, str) else taps, every=every)
    compiled = [name for name, part in model.named_modules() if part._compiled_call_impl is not None]  # noqa: SLF001
    for name in made.names:
        outer = next(
            (whole for whole in compiled if name.startswith(f"{whole}.") and name != f"{whole}.out"), None
        )
        if outer is not None:
            made.remove()
            msg = f"watch(trainer, taps=...): {name.removesuffix('.out')!r} is inside of {outer!r}, which is "
            msg += (
                "compiled by itself, and torch refuses the backward pass of several such modules with taps "
            )
            raise ValueError(msg + "in them; select the compiled modules, or train without compile.enable")
    return made


def _model_of(trainer: Any) -> nn.Module | list[tuple[str, nn.Parameter]]:
    """Return the model, or the parameters of all parts of it that this rank has, whose names differ."""
    parts = trainer.model_parts
    if len(parts) == 1:
        model: nn.Module = parts[0]
        return model
    return [pair for part in parts for pair in part.named_parameters()]


def _parts_of_loss(parallel_dims: Any) -> int:
    """Return the number of ranks whose local losses add up to the loss of the job."""
    mesh = parallel_dims.get_optional_mesh("loss") if parallel_dims.dp_cp_enabled else None
    return 1 if mesh is None else mesh.size()


def watch(trainer: Any, **options: Any) -> TrainerMonitor:
    """Watch a Trainer, and return what does so."""
    return TrainerMonitor(trainer, **options)


# --- the component


@dataclass(kw_only=True, slots=True)
class MonitorOptions:
    """What `MonitoredMetrics` passes to `Monitor`, in torchtitan's configuration."""

    run_dir: str | None = None
    """Folder of the run record; None: gradiometer in dump_folder"""

    every: int = 1
    """Record the tensors of steps divisible by this; scalars are recorded in every step"""

    weights: bool = False
    """Whether to measure the weights, too"""

    updates: bool = False
    """Whether to measure what each step changes in the weights; keeps a copy of them"""

    fingerprint: bool = False
    """Whether to record fingerprints, which tell runs apart to the bit"""

    precision: int | None = None
    """Count elements by magnitude in steps divisible by this, for what a cast would lose; None: never"""

    taps: str | None = None
    """Regular expression for the names of modules whose outputs and their gradients to measure"""


class MonitoredMetrics(MetricsProcessor):  # type: ignore[misc]
    """torchtitan's metrics processor, which also watches the Trainer that builds it with a `Monitor`.

    Use its ``Config`` as ``metrics`` of a Trainer's configuration, or name the override `monitor`.

    Attributes:
        watched: the `TrainerMonitor`; None until the Trainer has built its model.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):  # type: ignore[misc]
        """torchtitan's configuration of metrics, with the options of the monitor."""

        monitor: MonitorOptions = field(default_factory=MonitorOptions)

    def __init__(self, config: Any, *, dump_folder: str = "./outputs", **kwargs: Any) -> None:
        self.watched: TrainerMonitor | None = None
        options = asdict(config.monitor)
        options["run_dir"] = options["run_dir"] or str(Path(dump_folder) / "gradiometer")
        self._options = options
        super().__init__(config, dump_folder=dump_folder, **kwargs)

    @property
    def model_parts(self) -> list[nn.Module] | None:
        """The parts of the model; the Trainer sets them when it has built them, and is watched from then."""
        return self._model_parts

    @model_parts.setter
    def model_parts(self, parts: list[nn.Module] | None) -> None:
        self._model_parts = parts
        if parts is not None and self.watched is None:
            # no component is passed the Trainer, but only its methods set this
            trainer = sys._getframe(1).f_locals.get("self")  # noqa: SLF001
            if getattr(trainer, "metrics_processor", None) is self:
                self.watched = watch(trainer, **self._options)
            else:
                text = "MonitoredMetrics: the Trainer does not set model_parts itself; use gm.watch(trainer)"
                logging.getLogger("gradiometer").warning(text)


@_override.override(  # type: ignore[untyped-decorator]
    target=MetricsProcessor.Config, description="record gradients with gradiometer"
)
def monitor(config: Any, **options: Any) -> Any:
    """Return the configuration of `MonitoredMetrics`, for ``--override.imports``.

    Args:
        config: the configuration of torchtitan's metrics processor.
        options: the fields of `MonitorOptions`.
    """
    return _override.derive(config, MonitoredMetrics.Config, monitor=MonitorOptions(**options))
