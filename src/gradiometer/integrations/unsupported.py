"""Objects of frameworks that `watch` cannot watch, and what to write instead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from torch import nn

from gradiometer import distributed

if TYPE_CHECKING:
    from collections.abc import Iterator


class _Known(NamedTuple):
    """A class of a framework, with the name that users know, and the reason and advice of the message."""

    package: str
    kind: str
    name: str
    advice: str


_FRAMEWORKS: Final = (
    _Known(
        "composer",
        "Trainer",
        "Composer's Trainer",
        "call gm.watch(trainer.state.model, trainer.state.optimizers) before trainer.fit()",
    ),
    _Known(
        "fastai",
        "Learner",
        "fastai's Learner",
        "its optimizers are not torch's; use gm.Monitor(learn.model), with record() in before_step and "
        "advance(loss=learn.loss) in after_step of a Callback",
    ),
    _Known(
        "ignite",
        "Engine",
        "Ignite's Engine",
        "call gm.watch(model, optimizer) with those of its process function, before engine.run()",
    ),
    _Known(
        "keras",
        "Model",
        "a Keras Model",
        "its optimizers are not torch's; with the backend torch, use gm.Monitor({v.path: v.value for v in "
        "model.trainable_weights}), with record() after backward() and advance() at the end of train_step()",
    ),
    _Known(
        "lightning",
        "Fabric",
        "Lightning Fabric",
        "call gm.watch(model, optimizer) with what fabric.setup() has returned",
    ),
    _Known(
        "lightning_fabric",
        "Fabric",
        "Lightning Fabric",
        "call gm.watch(model, optimizer) with what fabric.setup() has returned",
    ),
    _Known(
        "mmengine",
        "Runner",
        "MMEngine's Runner",
        "call gm.watch(runner.model, runner.optim_wrapper.optimizer) in before_train of a Hook",
    ),
    _Known(
        "opacus",
        "PrivacyEngine",
        "Opacus' PrivacyEngine",
        "call gm.watch(model, optimizer) with what make_private() has returned",
    ),
    _Known(
        "ray",
        "DataParallelTrainer",
        "a trainer of Ray Train",
        "call gm.watch(model, optimizer) in train_loop_per_worker, with what prepare_model() has returned",
    ),
    _Known(
        "skorch",
        "NeuralNet",
        "skorch's NeuralNet",
        "call net.initialize(), then gm.watch(net.module_, net.optimizer_), then net.partial_fit()",
    ),
    _Known(
        "stable_baselines3",
        "BaseAlgorithm",
        "an algorithm of Stable-Baselines3",
        "call gm.watch(agent.policy, agent.policy.optimizer), or with an actor and a critic "
        "gm.watch({'actor': agent.actor, 'critic': agent.critic}, [agent.critic.optimizer, "
        "agent.actor.optimizer])",
    ),
    _Known(
        "colossalai",
        "Booster",
        "ColossalAI's Booster",
        "with TorchDDPPlugin or TorchFSDPPlugin of version 2, call gm.watch(model, optimizer) with what "
        "booster.boost() has returned; other plugins shard gradients",
    ),
)

# modules that keep gradients elsewhere, or a part of them in each rank
_MAIN_GRAD: Final = _Known(
    "megatron",
    "DistributedDataParallel",
    "Megatron-LM",
    "its gradients are in main_grad, not in grad; use gm.Monitor(net) with the model inside the wrappers, "
    "and record(gm.collect({name: p.main_grad for name, p in net.named_parameters()})) before the "
    "optimizer's step",
)
_SHARDED: Final = tuple(
    [
        _Known(
            package,
            kind,
            name,
            "on several ranks its gradients are parts without a layout that torch knows; use fully_shard of "
            "torch.distributed.fsdp, or describe the parts: ranks=gm.Ranks(model, shards=...)",
        )
        for package, kind, name in (
            ("torch", "FullyShardedDataParallel", "FSDP version 1"),
            ("torch_xla", "XlaFullyShardedDataParallel", "FSDP of torch_xla"),
            ("fairscale", "FullyShardedDataParallel", "Fairscale's FSDP"),
            ("fairscale", "ShardedDataParallel", "Fairscale's ShardedDDP"),
            ("colossalai", "GeminiDDP", "ColossalAI's Gemini"),
            ("colossalai", "HybridParallelModule", "ColossalAI's hybrid parallelism"),
        )
    ]
)


def refuse(model: Any, optimizer: Any, ranks: Any) -> None:
    """Raise a TypeError with advice for an object of a framework that cannot be watched as it is.

    ``model``, ``optimizer``: what the user passed. ``ranks``: the option of `Monitor`.
    """
    found = _known(model, _FRAMEWORKS)
    if found is not None:
        raise TypeError(f"watch: got {found.name}, which cannot be watched as a whole; {found.advice}")
    for module in _modules(model):
        engine = _known(module, (_MAIN_GRAD,))
        if engine is None and ranks is True and _has_ranks():
            engine = _known(module, _SHARDED)
        if engine is not None:
            raise TypeError(f"watch: the model is wrapped by {engine.name}: {engine.advice}")
    if optimizer is None and not isinstance(model, (nn.Module, Mapping, Iterable)):
        kind, package = type(model).__name__, type(model).__module__.partition(".")[0]
        msg = (
            f"watch: got {kind} of the package {package!r}, which is not among the trainers that gradiometer "
        )
        raise TypeError(
            msg + "knows; pass the model and the optimizer that it uses: gm.watch(model, optimizer)"
        )


def _known(value: Any, known: tuple[_Known, ...]) -> _Known | None:
    kinds = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(value).__mro__}
    return next((each for each in known if (each.package, each.kind) in kinds), None)


def _modules(model: Any) -> Iterator[nn.Module]:
    for part in model.values() if isinstance(model, Mapping) else [model]:
        if isinstance(part, nn.Module):
            yield from part.modules()


def _has_ranks() -> bool:
    return distributed.is_active() and len(distributed.ranks_of(distributed.group_of(None))) > 1
