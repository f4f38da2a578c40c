"""`gradiometer.watch` for DeepSpeed: ZeRO stages 1 and 2, and its BF16_Optimizer.

DeepSpeed reduces gradients into flat buffers, one for each param group, and gives each rank one partition of
them; ``p.grad`` is None. A parameter may begin in one partition and end in the next: each rank measures its
fragment.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

from torch.optim import Optimizer

from gradiometer.distributed import Mesh
from gradiometer.inputs import tracked_parameters
from gradiometer.integrations import loop
from gradiometer.integrations.partitioned import Part, has_class, place_in, watch_parts

if TYPE_CHECKING:
    from torch import Tensor, nn

    from gradiometer.monitor import Monitor

_STAGES: Final = "use ZeRO stage 1 or 2, or log engine.get_global_grad_norm() yourself"
# optimizers of DeepSpeed that are not supported, by the class, and why
_REFUSED: Final = {
    "DeepSpeedZeroOptimizer_Stage3": f"ZeRO stage 3 also partitions the parameters; {_STAGES}",
    "DeepSpeedZeRoOffload": f"ZeRO stage 3 also partitions the parameters; {_STAGES}",
    "FP16_Optimizer": f"stage 0 in 16 bits keeps no partitions; {_STAGES}",
    "FP16_UnfusedOptimizer": f"stage 0 in 16 bits keeps no partitions; {_STAGES}",
    "OnebitAdam": "ranks exchange compressed momentum, not gradients; use Adam or AdamW",
    "OnebitLamb": "ranks exchange compressed momentum, not gradients; use Lamb",
    "ZeroOneAdam": "ranks exchange compressed momentum, not gradients; use Adam or AdamW",
    "DummyOptim": "this engine has no optimizer; pass one to deepspeed.initialize",
    "NoneType": "this engine has no optimizer; pass one to deepspeed.initialize",
}
_MPU_SIZES: Final = ("get_tensor_model_parallel_world_size", "get_model_parallel_world_size")


def watch(owner: Any, optimizer: Any = None, *, scaler: Any = None, **options: Any) -> Monitor:
    """Watch an engine, or a module and DeepSpeed's optimizer, as `gradiometer.watch` does."""
    if scaler is not None:
        raise TypeError("watch: DeepSpeed scales the loss itself; leave out scaler=")
    engine = owner if has_class(owner, "DeepSpeedEngine") else None
    if has_class(owner, "PipelineEngine"):
        raise _refusal(owner, "pipeline stages have layers of the same names; use a DeepSpeedEngine")
    if engine is not None:
        optimizer = _of_engine(engine, optimizer)
        owner = engine.module
    elif optimizer is None or isinstance(optimizer, Optimizer):
        # the optimizer inside of DeepSpeed's, which has other tensors
        is_stage_3 = any(hasattr(p, "ds_id") for p in tracked_parameters(owner)[1])
        why = _REFUSED["DeepSpeedZeroOptimizer_Stage3"] if is_stage_3 else "use gm.watch(engine)"
        raise ValueError(f"watch: DeepSpeed keeps the gradients of this model in its own buffers: {why}")
    for name, why in _REFUSED.items():
        if has_class(optimizer, name):
            raise _refusal(optimizer, why)
    if has_class(optimizer, "BF16_Optimizer"):
        _check(optimizer)
        source: _Partitions = _BF16(optimizer, owner)
    elif has_class(optimizer, "DeepSpeedZeroOptimizer"):
        _check(optimizer)
        source = _ZeRO(optimizer, owner)
    elif engine is not None and isinstance(optimizer, Optimizer):
        # stage 0: whole gradients on each rank
        return loop.watch(owner, optimizer, **options)
    else:
        raise _refusal(optimizer, "the model's gradients are in DeepSpeed's buffers; use gm.watch(engine)")
    group = optimizer.dp_process_group
    rank, size = place_in(group)
    mesh = Mesh(("data parallel",), (size,), (rank,))
    monitor = watch_parts(owner, source.parts, source, optimizer, options, mesh=mesh, group=group)
    source.prepare(monitor, has_updates=bool(options.get("updates")))
    return monitor


def _refusal(value: Any, why: str) -> ValueError:
    return ValueError(f"watch: DeepSpeed's {type(value).__name__} is not supported: {why}")


def _of_engine(engine: Any, optimizer: Any) -> Any:
    """Return the engine's optimizer; raise ValueError if another one was passed."""
    own = engine.optimizer
    inside = (own, getattr(own, "optimizer", None))
    given = (optimizer, getattr(optimizer, "optimizer", None))
    if optimizer is not None and not any(a is b for a in given for b in inside if a is not None):
        msg = f"watch: this {type(optimizer).__name__} is not the optimizer of the engine, "
        raise ValueError(f"{msg}{type(own).__name__}; pass the engine alone, gm.watch(engine)")
    return own


def _check(optimizer: Any) -> None:
    """Raise ValueError for a configuration whose gradients are elsewhere."""
    inner = type(optimizer.optimizer).__name__
    mpu = getattr(optimizer, "mpu", None)
    sizes = [getattr(mpu, name)() for name in _MPU_SIZES if hasattr(mpu, name)]
    if hasattr(mpu, "initialize_sequence_parallel"):
        sizes = []
    is_muon = has_class(optimizer, "DeepSpeedZeroOptimizer") and "muon" in inner.lower()
    found = {
        "a gradient is on the CPU, with offload_optimizer; leave it out": getattr(
            optimizer, "cpu_offload", 0
        ),
        "ZenFlow keeps gradients on the CPU; leave out zenflow": getattr(optimizer, "zenflow", False),
        "experts are on other ranks; watch a model without MoE layers": optimizer.has_moe_layers,
        "parameters are split by tensor parallelism; use data parallelism only": max(sizes, default=1) > 1,
        f"ZeRO stores the update of {inner} in place of the gradient; use stage 1 with bf16": is_muon,
        "torch.autocast with float16 scales the gradients; use bfloat16": getattr(
            optimizer, "torch_autocast_gradscaler", None
        ),
    }
    for why, is_true in found.items():
        if is_true:
            raise _refusal(optimizer, why)


class _Partitions:
    """The fragments of a model's parameters in this rank's partitions; see `partitioned.Source`.

    ``groups``: the parameters of each param group. ``masters``: this rank's master weights of each.
    ``fragments``: the start and size of each parameter's fragment in that partition, if it has one, and at
    which element of the parameter the fragment begins.
    """

    def __init__(
        self,
        optimizer: Any,
        model: nn.Module,
        groups: list[list[Tensor]],
        masters: list[Tensor],
        fragments: dict[Tensor, tuple[int, int, int]],
    ) -> None:
        self.optimizer, self._masters = optimizer, masters
        places = {p: (i, j) for i, group in enumerate(groups) for j, p in enumerate(group)}
        names, self._parameters = tracked_parameters(model)
        # the param group of each parameter, and its index there; None: frozen, or without elements
        self._places = [places.get(p) for p in self._parameters]
        if not any(self._places):
            msg = "it holds none of the watched model's parameters; watch the module of its engine"
            raise _refusal(optimizer, msg)
        found = [fragments.get(p, (0, 0, 0)) for p in self._parameters]
        self._fragments = [fragment[:2] for fragment in found]
        every = zip(names, self._parameters, self.weights(), self._places, found, strict=True)
        self.parts = [
            Part(name, p, weights, tuple(p.shape), ("R",) if place is None else ("S",), first)
            for name, p, weights, place, (_, _, first) in every
        ]

    def weights(self) -> list[Tensor]:
        """Return this rank's fragments of the master weights; of frozen parameters, themselves."""
        return [
            p if place is None else self._masters[place[0]].detach().narrow(0, *fragment)
            for p, place, fragment in zip(self._parameters, self._places, self._fragments, strict=True)
        ]

    def gradients(self) -> list[Tensor | None]:
        """Return this rank's fragments of the gradients."""
        return [
            None if place is None or numel == 0 else self.fragment(*place, start, numel)
            for place, (start, numel) in zip(self._places, self._fragments, strict=True)
        ]

    def fragment(self, group: int, index: int, start: int, numel: int) -> Tensor | None:
        """Return ``numel`` elements of this rank's partition of the gradients from ``start`` on."""
        raise NotImplementedError

    def prepare(self, monitor: Monitor, *, has_updates: bool) -> None:
        """Prepare what else the monitor needs."""

    def loss_scale(self) -> float:
        """Return the loss scale."""
        return 1.0

    def was_skipped(self, result: Any) -> bool:
        """Return whether the gradients had overflown."""
        del result
        return bool(self.optimizer.overflow)


class _ZeRO(_Partitions):
    """ZeRO 1 and 2: a list of tensors for each param group, which together are the partition."""

    def __init__(self, optimizer: Any, model: nn.Module) -> None:
        rank, _ = place_in(optimizer.dp_process_group)
        fragments = {}
        # `_hp_mapping` has other places with round_robin_gradients
        for i, group in enumerate(optimizer.bit16_groups):
            starts = optimizer.grad_partition_insertion_offset[i][rank]
            skipped = optimizer.grad_start_offset[i][rank]
            for p in group:
                key = optimizer.get_param_id(p)
                if key in starts:
                    start = int(starts[key])
                    left = int(optimizer.partition_size[i]) - start
                    first = int(skipped[key])
                    fragments[p] = start, min(p.numel() - first, left), first
        masters = optimizer.single_partition_of_fp32_groups
        super().__init__(optimizer, model, optimizer.bit16_groups, masters, fragments)
        self._starts: dict[int, dict[int, Tensor]] = {}

    def gradients(self) -> list[Tensor | None]:
        """Return this rank's fragments of the gradients, after the last micro-batch."""
        for group, tensors in self.optimizer.averaged_gradients.items():
            # fragments of parameters, and zeros for the padding
            pieces = tensors or ()
            starts = accumulate([piece.numel() for piece in pieces], initial=0)
            self._starts[group] = dict(zip(starts, pieces, strict=False))
        found = super().gradients()
        self._starts.clear()
        return found

    def fragment(self, group: int, index: int, start: int, numel: int) -> Tensor | None:
        """Return the tensor that begins there."""
        del index
        found = self._starts.get(group, {}).get(start)
        if found is not None and found.numel() != numel:
            msg = (
                f"DeepSpeed's averaged_gradients[{group}] has {found.numel()} elements at {start}, expected "
            )
            raise ValueError(f"{msg}{numel}")
        return found

    def loss_scale(self) -> float:
        """Return the loss scale, by which the gradients are multiplied."""
        return float(self.optimizer.loss_scale)


class _BF16(_Partitions):
    """BF16_Optimizer: whole gradients of each param group in a buffer, of which a rank uses its partition."""

    def __init__(self, optimizer: Any, model: nn.Module) -> None:
        if not optimizer.using_real_optimizer:
            raise _refusal(optimizer, _REFUSED["DummyOptim"])
        fragments = {}
        for p in [p for group in optimizer.bf16_groups for p in group]:
            # kept by DeepSpeed for its checkpoints
            mapping = p._hp_mapping  # noqa: SLF001
            if mapping is not None:
                address = mapping.hp_fragment_address
                fragments[p] = address.start, address.numel, mapping.lp_fragment_address.start
        masters = optimizer.fp32_groups_flat_partition
        super().__init__(optimizer, model, optimizer.bf16_groups, masters, fragments)

    def fragment(self, group: int, index: int, start: int, numel: int) -> Tensor | None:
        """Return a part of the buffer, if the parameter has a gradient."""
        if not self.optimizer.fp32_groups_has_gradients[group][index]:
            return None
        flat: Tensor = self.optimizer.fp32_groups_gradient_flat_partition[group]
        return flat.narrow(0, start, numel)

    def prepare(self, monitor: Monitor, *, has_updates: bool) -> None:
        """Measure the updates before the optimizer clears the gradients."""
        inner = self.optimizer.optimizer
        if has_updates and isinstance(inner, Optimizer):
            hook = inner.register_step_post_hook(
                lambda *_: None if monitor.closed else monitor.record_updates()
            )
            monitor.call_at_close(hook.remove)
