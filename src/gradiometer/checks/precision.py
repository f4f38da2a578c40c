"""Copies of a model's weights in a wider dtype, and the dtypes that a model computes in."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gradiometer.checks.batch import like

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# the standard deviation of weights in place of those that are all 0
_SMALL: Final = 0.02


class Copy(NamedTuple):
    """A copy of a parameter or buffer.

    Attributes:
        module: the module that has it.
        table: its table of parameters or of buffers.
        name: the name there.
        copy: the copy.
        original: the parameter or buffer.
    """

    module: nn.Module
    table: dict[str, Any]
    name: str
    copy: Tensor
    original: Tensor


def copies_in(model: nn.Module, dtype: torch.dtype) -> list[Copy]:
    """Return copies of parameters and buffers in a dtype; tied ones have one copy.

    Those that are 0 have small random values, unless they are biases.

    The parameters themselves stay as they are: autograd would forget the hooks of one that gets another
    dtype, among them those of DistributedDataParallel.
    """
    generator = torch.Generator(device="cpu").manual_seed(0)
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    copies: dict[Tensor, nn.Parameter] = {}
    for x in floating(model):
        # also where inference mode is on: its tensors have no gradients
        with torch.inference_mode(mode=False):
            copies[x] = nn.Parameter(x.detach().to(dtype), x.requires_grad)
        # a head, a gate or positions that start at 0 would hide what comes before; a norm that multiplies by
        # 1 + weight does not
        may_hide = (x.dim() > 1 or x.numel() == 1) and not names.get(x, "bias").endswith("bias")
        if may_hide and not bool(x.any()):
            copies[x].data.copy_(_SMALL * torch.randn(x.shape, generator=generator, device="cpu"))
    return [
        Copy(module, table, name, copies[x] if isinstance(x, nn.Parameter) else copies[x].data, x)
        for module in model.modules()
        for table in (module._parameters, module._buffers)  # noqa: SLF001
        for name, x in table.items()
        if x is not None and x in copies
    ]


def floating(model: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters and buffers of floating-point dtypes that can be copied."""
    for x in dict.fromkeys([*model.parameters(), *model.buffers()]):
        if (
            x.is_floating_point()
            and x.layout == torch.strided
            and type(x) in {Tensor, nn.Parameter, nn.Buffer}
        ):
            yield x


@contextmanager
def exchanged(copies: Sequence[Copy], *, wide: bool) -> Iterator[None]:
    """Put copies, if they are to be used, or the weights themselves in the places of parameters and buffers.

    Such contexts may be nested.
    """
    before = [each.table[each.name] for each in copies]
    recurrent = dict.fromkeys(each.module for each in copies if isinstance(each.module, nn.RNNBase))
    flat = [module._flat_weights for module in recurrent]  # noqa: SLF001
    for each in copies:
        each.table[each.name] = each.copy if wide else each.original
    for module in recurrent:
        module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]  # noqa: SLF001
    try:
        yield
    finally:
        for each, x in zip(copies, before, strict=True):
            each.table[each.name] = x
        for module, weights in zip(recurrent, flat, strict=True):
            module._flat_weights = weights  # noqa: SLF001


class Dtypes(TorchDispatchMode):
    """Notes the floating-point dtypes of what operators return."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, list | tuple) else [result]:
            if isinstance(x, Tensor) and x.is_floating_point():
                self.dtypes.add(x.dtype)
        return result


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Return floating-point tensors in a dtype, also in containers; others as they are."""
    if isinstance(value, Tensor):
        # a copy, which the model may write to
        return value.to(dtype, copy=True) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return like(value, {key: cast(x, dtype) for key, x in value.items()})
    if isinstance(value, list | tuple):
        return like(value, [cast(x, dtype) for x in value])
    return value
