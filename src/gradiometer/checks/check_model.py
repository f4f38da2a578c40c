"""check_model: ask a model questions before it trains."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.utils.data import DataLoader

from gradiometer.checks.contract import GROUPS, ORDER, Contract
from gradiometer.checks.kept_state import kept_state
from gradiometer.checks.probe import Probe
from gradiometer.checks.report import ContractResult, ModelReport, NotApplicable, Status, broken
from gradiometer.stats import outside_of_a_graph
from gradiometer.terminal import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from torch.optim import Optimizer

_WHAT = "check_model"
_SHARDED = "the parameters are sharded over ranks; check the model before it is sharded"


def check_model(
    model: nn.Module,
    batch: Any,
    *,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    causal: bool | None = None,
    pretrained: bool | None = None,
    only: Iterable[str] = (),
    skip: Iterable[str] = (),
) -> ModelReport:
    """Ask a model questions before it trains: does the future change the past, do masked tokens matter?

    The model is called with changed inputs, in float64 if it can, and its gradients and weights are
    looked at once. Each question is a contract, which holds, is broken, or does not apply; those that may be
    broken on purpose are only noted. Differences count if rounding does not explain them: that is measured
    by a run whose weights differ by their rounding error. Weights, buffers, gradients, modes, hooks,
    attributes and random states are afterwards as before.

    A model of Hugging Face is called with the arguments of its ``forward`` that the batch has by name, and a
    LightningModule's loss is that of its ``training_step``. Any other model is called with the tensors of
    the batch, without labels; two functions say how if that is wrong. Compiled models run in eager mode, and
    a DistributedDataParallel's module runs without it. If parameters are sharded, as by ``fully_shard``,
    contracts that need outputs, gradients or values do not apply: check the model before.

    Args:
        model: the model, on any device.
        batch: a batch to train on, of two or more different examples: a mapping of arguments by name; a
            tuple of arguments by position, the last of which may be labels; or one tensor. Masks and labels
            are recognized by their names.
        forward: a function of the model and a batch that returns the output, logits ``(B, T, C)`` or
            ``(B, C)``. It gets batches like the given one with other tokens, values or masks.
        loss: a function of the model and the batch that returns the loss, 0-d with its graph.
        optimizer: the optimizer, or several, whose parameters are compared with those of the model.
        causal: whether no output may depend on later inputs. By default from the config, or from labels that
            are the next tokens.
        pretrained: whether weights have been trained, so that contracts of initialization do not apply. By
            default a config with a path says so.
        only: names of contracts or of their groups to examine; all by default.
        skip: names of contracts or groups to leave out.

    Returns:
        A `ModelReport`: false if a contract is broken.

    Raises:
        TypeError: if ``model`` is not a module, ``forward`` or ``loss`` is not a function, or ``batch`` is a
            loader.
        ValueError: if the model fails on the batch or has no values, if ``loss`` fails, or if a contract name
            is unknown.
        RuntimeError: inside a compiled function.

    >>> import torch, gradiometer as gm
    >>> class Reversed(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.embedding, self.mix = torch.nn.Embedding(9, 4), torch.nn.LSTM(4, 4, batch_first=True)
    ...     def forward(self, tokens):
    ...         return self.mix(self.embedding(tokens).flip(1))[0].flip(1)
    >>> tokens = torch.arange(8).view(2, 4)
    >>> report = gm.check_model(Reversed(), tokens, causal=True, only=["causal"])
    >>> bool(report), report["causal"].text.partition(" by ")[0]
    (False, 'token 1 changes the output of token 0')
    """
    outside_of_a_graph(_WHAT)
    if not isinstance(model, nn.Module):
        raise TypeError(f"{_WHAT}: expected a torch.nn.Module, got {type(model).__name__}")
    for option, function in (("forward", forward), ("loss", loss)):
        if function is not None and not callable(function):
            what = type(function).__name__
            raise TypeError(f"{_WHAT}: {option}= is a {what}; pass a function of the model and a batch")
    if isinstance(batch, DataLoader | Iterator):
        what = type(batch).__name__
        raise TypeError(f"{_WHAT}: expected a batch, got a {what}; pass one batch of it, next(iter(loader))")
    chosen = _chosen(only, skip)
    lazy = next((n for n, p in model.named_parameters() if isinstance(p, UninitializedParameter)), None)
    if lazy is not None:
        raise ValueError(f"{_WHAT}: {lazy!r} has no shape yet; call the model once on a batch first")
    if any(p.is_meta for p in model.parameters()):
        name = next(name for name, p in model.named_parameters() if p.is_meta)
        raise ValueError(
            f"{_WHAT}: {name!r} is on the meta device and has no values; materialize and initialize the "
            "model first"
        )
    probe = Probe(model, batch, forward, loss, optimizer, causal, pretrained)
    rounding = 0.0
    with kept_state(probe.model, values=not probe.is_sharded, batch=batch):
        if not probe.is_sharded:
            try:
                probe.prepare()
                rounding = probe.rounding
            except Exception as error:
                if isinstance(error, ValueError) and str(error).startswith(_WHAT):
                    raise
                called = "forward(model, batch)" if forward is not None else "the model"
                raise ValueError(
                    f"{_WHAT}: {called} fails on this batch: {one_line(error)}; pass the batch that the "
                    "model trains on, or forward=, a function of model and batch that returns the output"
                ) from error
            if loss is not None:
                try:
                    probe.loss()
                except Exception as error:
                    raise ValueError(
                        f"{_WHAT}: loss(model, batch) fails: {one_line(error)}; pass a function of the model "
                        "and the batch that returns the loss, a 0-d tensor with its graph"
                    ) from error
        results = tuple([_result(each, probe) for each in chosen])
    return ModelReport(results, str(probe.dtype).removeprefix("torch."), rounding)


def _chosen(only: Iterable[str], skip: Iterable[str]) -> list[Contract]:
    from gradiometer.checks.contracts import CONTRACTS  # noqa: PLC0415 so that other uses import less

    groups: dict[str, tuple[str, ...]] = {"only": (), "skip": ()}
    for option, names in (("only", only), ("skip", skip)):
        if not isinstance(names, Iterable):
            raise TypeError(f"{_WHAT}: {option}= is {names!r}; pass names of contracts or groups")
        groups[option] = (names,) if isinstance(names, str) else tuple(names)
        for name in groups[option]:
            if name not in CONTRACTS and name not in GROUPS:
                known = ", ".join(dict.fromkeys([*GROUPS, *ORDER]))
                raise ValueError(
                    f"{_WHAT}: {option} has {name!r}, which is not a contract; known are {known}"
                )
    every = [CONTRACTS[name] for name in ORDER]
    taken = [each for each in every if not groups["only"] or {each.name, each.group} & {*groups["only"]}]
    return [each for each in taken if not {each.name, each.group} & {*groups["skip"]}]


def _result(each: Contract, probe: Probe) -> ContractResult:
    if probe.is_sharded and not each.is_static:
        return ContractResult(each.name, each.group, Status.NOT_APPLICABLE, _SHARDED)
    try:
        evidence = tuple(broken(list(each.examine(probe))))
    except NotApplicable as reason:
        return ContractResult(each.name, each.group, Status.NOT_APPLICABLE, one_line(reason))
    except Exception as error:  # noqa: BLE001 of code of the model, which other contracts do not run
        text = f"it could not be checked: {type(error).__name__}: {one_line(error)}"
        return ContractResult(each.name, each.group, Status.NOT_APPLICABLE, text)
    if evidence:
        return ContractResult(each.name, each.group, Status.BROKEN, evidence[0].text, evidence)
    return ContractResult(each.name, each.group, Status.HOLDS, each.text)
