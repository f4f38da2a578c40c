"""Compare what normalization layers of other code return with their input, in some steps of a run."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from gradiometer.monitor.failures import raise_of_handlers
from gradiometer.monitor.hooks import ModuleHook
from gradiometer.ops import is_capturing
from gradiometer.recorder import NormValues
from gradiometer.stats import Pending, run_eagerly

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.utils.hooks import RemovableHandle

# not AdaLayerNorm, ConditionalLayerNorm, RMSNormGated or LayerNormAct, which do something else as well
_NAME: Final = re.compile(
    r"(?!Ada|Cond|Gated|Partial|Group)\w*(Layer|RMS)_?Norm(alization)?(\dd)?", re.IGNORECASE
)
# of torch itself, which are correct
_CORRECT: Final = (nn.LayerNorm.forward, nn.RMSNorm.forward)
_DTYPES: Final = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
# steps of which it looks at the first call, layers that it looks at, and tokens of a call
_STEPS: Final = (0, 1, 15, 63)
_LAYERS, _TOKENS, _LEAST_TOKENS = 64, 256, 16
# mean squares below this, or this multiple of the eps, say nothing
_TINY, _TINY_EPS = 1e-3, 100.0
_EPS: Final = ("eps", "epsilon", "variance_epsilon", "norm_eps")
# Of elements that differ less between tokens, in proportion to their magnitude, rounding to 8 bits explains
# too much: an error of 2**-8 of the magnitude is 2 % of this
_VARIES: Final = 0.2

ZERO: Final = 2.0
"""What `compare` returns for an output that is all 0, though the input is not."""


class NormReader:
    """Looks at the layers that normalize by their name, have one weight, and a forward that is not torch's.

    In four steps a hook on each compares the output with the normalized input, on the device. The hooks are
    removed then. In compiled code they do nothing, and stay, because to remove them would compile it again.
    """

    def __init__(self, modules: Mapping[str, nn.Module], device: torch.device) -> None:
        self._device = device
        self._reads = 0
        self._found: dict[str, Tensor] = {}
        # with the values on the device, which may be those of another stream
        self._pending: tuple[Pending[list[list[float]]], int, dict[str, Tensor]] | None = None
        self._error: Exception | None = None
        self._values = NormValues()
        self._kinds: dict[str, str] = {}
        self._hooks: list[tuple[_Hook, RemovableHandle]] = []
        every = [(prefix + path, x) for prefix, model in modules.items() for path, x in model.named_modules()]
        for name, module in [pair for pair in every if _is_asked(pair[1])][:_LAYERS]:
            self._kinds[name] = type(module).__name__
            hook = _Hook(self, name)
            self._hooks.append((hook, module.register_forward_hook(hook, with_kwargs=True)))

    def look(self, name: str, module: nn.Module, inputs: Sequence[object], output: object) -> None:
        """Compare the output of a layer with its input, if that is due and was not done in this step."""
        try:
            self._look(name, module, inputs, output)
        except Exception as error:  # noqa: BLE001 training goes on
            raise_of_handlers(error)
            self._error = error
            self.release()

    def read(self, step: int) -> NormValues:
        """Return the values that have arrived; end the step. Raise the error of a hook."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if self._pending is not None and self._pending[0].ready():
            pending, of_step, found = self._pending
            pairs = zip(found, pending.result(), strict=True)
            layers = tuple([(name, self._kinds[name], error, power) for name, (error, power) in pairs])
            self._values, self._pending = NormValues(of_step, layers), None
        if self._found and self._pending is None and not is_capturing(self._device):
            found, self._found = self._found, {}
            pending = Pending(list(found.values()), lambda host: [x.tolist() for x in host])
            self._pending = pending, step, found
        self._reads += 1
        if self._reads > _STEPS[-1]:
            self.release()
        return self._values

    def release(self) -> None:
        """Remove the hooks that have run; the others may be in compiled code, and do nothing."""
        for hook, handle in self._hooks:
            hook.reader = None
            if hook.has_run:
                handle.remove()
        self._hooks, self._found = [], {}

    def _look(self, name: str, module: nn.Module, inputs: Sequence[object], output: object) -> None:
        tensors = [x for x in inputs if isinstance(x, Tensor)]
        if name in self._found or self._reads not in _STEPS or not module.training or len(tensors) != 1:
            return
        x = tensors[0]
        if not isinstance(output, Tensor) or not all([self._is_readable(y) for y in (x, output)]):
            return
        # what was normalized in place is gone
        if x.shape != output.shape or x.data_ptr() == output.data_ptr() or is_capturing(self._device):
            return
        pair = _tokens(module, x.detach(), output.detach())
        if pair is not None:
            every = (getattr(module, attribute, None) for attribute in _EPS)
            eps = max([e for e in every if isinstance(e, float)], default=0.0)
            found = compare(*pair, least=max(_TINY, _TINY_EPS * eps))
            weight = next(p for p in module._parameters.values() if p is not None)  # noqa: SLF001
            # a weight that starts at 0 is meant
            self._found[name] = torch.where((weight.detach() != 0).any(), found, 0.0)

    def _is_readable(self, x: Tensor) -> bool:
        return (
            type(x) is Tensor
            and x.layout == torch.strided
            and not x.is_nested
            and x.dtype in _DTYPES
            and x.device == self._device
            and not torch._C._functorch.is_functorch_wrapped_tensor(x)  # noqa: SLF001 it has no public name
        )


class _Hook(ModuleHook):
    """The forward hook of one layer."""

    def __init__(self, reader: NormReader, name: str) -> None:
        self.reader: NormReader | None = reader
        self.name, self.has_run = name, False

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self.has_run = True
        # an activation checkpoint computes it without a graph at first
        if self.reader is not None and torch.is_grad_enabled():
            with torch.no_grad():
                self.reader.look(self.name, module, (*args, *kwargs.values()), output)


def _is_asked(module: nn.Module) -> bool:
    is_own = type(module).forward not in _CORRECT or "forward" in vars(module)
    own = [p for p in module._parameters.values() if p is not None]  # noqa: SLF001
    is_plain = 1 <= len(own) <= 2 and all([p.shape == own[0].shape for p in own]) and own[0].numel() > 1
    # a norm of groups of channels, a weight of each head
    has_groups = any(getattr(module, name, None) not in {None, 1} for name in ("group_size", "num_groups"))
    return is_own and is_plain and not has_groups and bool(_NAME.fullmatch(type(module).__name__))


def _tokens(module: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return some tokens of input and output, ``(T, C)`` each, the C being those that are normalized."""
    count = next(p.numel() for p in module._parameters.values() if p is not None)  # noqa: SLF001
    shape = tuple(getattr(module, "normalized_shape", None) or (count,))
    if tuple(x.shape[-len(shape) :]) == shape and torch.Size(shape).numel() == count:
        if len(shape) == 1 and x.dim() > 2 and x.shape[1] == count:
            # channels may be first or last
            return None
        found = [z.reshape(-1, count) for z in (x, y)]
    elif x.dim() > 2 and x.shape[1] == count:
        found = [z.flatten(2).movedim(1, -1)[:_LEAST_TOKENS].reshape(-1, count) for z in (x, y)]
    else:
        return None
    if len(found[0]) < _LEAST_TOKENS:
        return None
    every = -(-len(found[0]) // _TOKENS)
    return found[0][::every], found[1][::every]


def compare(x: Tensor, y: Tensor, *, least: float = _TINY) -> Tensor:
    """Return how far y is from a normalized x, ``(2,) float32``.

    The first value is the share of the variation of y between tokens, as a root mean square, that no scale
    and shift of each channel gives of tokens that are divided by their standard deviation, or by their root
    mean square; 0 where y hardly varies, or x is too small, and `ZERO` where only y is all 0. The second one
    is by which power of the divisor too much y is larger where x is: -1 where it is divided twice, 1 where it
    is not divided.

    Args:
        x: tokens before the norm, ``(T, C)``.
        y: after it, ``(T, C)``.
        least: the least mean square of a token that is compared.
    """
    x, y = x.float(), y.float()
    finite = x.isfinite().all(1) & y.isfinite().all(1)
    x, y = (torch.where(finite.unsqueeze(1), z, 0.0) for z in (x, y))
    centered = x - x.mean(1, keepdim=True)
    results = [_misfit(z, y, finite, least) for z in (centered, x)]
    best = torch.where(results[0][0] <= results[1][0], results[0], results[1])
    is_zero = (y == 0).all() & finite.all() & (centered.square().mean(1) > least).all()
    return torch.where(is_zero, torch.full_like(best, ZERO), best)


def _misfit(x: Tensor, y: Tensor, finite: Tensor, least: float) -> Tensor:
    square = x.square().mean(1, keepdim=True)
    used = (finite.unsqueeze(1) & (square > least)).float()
    count = used.sum().clamp(min=1.0)
    normed = x / square.clamp(min=least).sqrt()

    def between(z: Tensor) -> Tensor:
        return used * (z - (used * z).sum(0) / count)

    n, z = between(normed), between(y)
    of_n, of_z, both = n.square().sum(0), z.square().sum(), (n * z).sum(0)
    gain = both / of_n.clamp(min=1e-30)
    # two values of each channel are fitted
    rest = (z - gain * n).square().sum() * count / (count - 2.0).clamp(min=1.0)
    known = (count >= _LEAST_TOKENS) & (of_z > _VARIES**2 * (used * y).square().sum())
    error = (rest / of_z.clamp(min=1e-30)).clamp(max=1.0).sqrt()
    # of each token, by how much it is scaled, without the shifts
    shift = (used * y).sum(0) / count - gain * (used * normed).sum(0) / count
    scales = ((y - shift) * gain * normed).sum(1, keepdim=True).clamp(min=1e-30).log()
    a, b = between(square.clamp(min=least).log() / 2.0), between(scales)
    power = (a * b).sum() / a.square().sum().clamp(min=1e-30)
    return torch.stack([torch.where(known, error, 0.0), torch.where(known, power, 0.0)])


run_eagerly(_Hook.__call__)
