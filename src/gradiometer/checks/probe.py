"""A model that is examined: its outputs for changed inputs, in float64 where it has that."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from gradiometer.checks.batch import loss_of, output_of
from gradiometer.checks.model_inputs import ModelInputs
from gradiometer.checks.precision import Copy, Dtypes, cast, copies_in, exchanged, floating
from gradiometer.checks.recompute import plain_checkpoints
from gradiometer.checks.report import NotApplicable
from gradiometer.inputs import is_dtensor, unwrapped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch.optim import Optimizer

    from gradiometer.checks.batch import Stream

# how many times the measured rounding error two outputs may differ, and the least such error in roundings
_FACTOR, _LEAST = 16.0, 8.0

DROPOUTS: Final = (nn.modules.dropout._DropoutNd,)  # noqa: SLF001 the base class of all
BATCH_NORMS: Final = (nn.modules.batchnorm._NormBase,)  # noqa: SLF001


class Probe(ModelInputs):
    """A model, a batch, and what is known of both. `check_model` restores the model afterwards.

    Attributes:
        optimizer: the optimizer, several, or None.
        pretrained: whether the weights have been trained, as passed; None if that is not known.
        is_sharded: whether parameters are DTensors or FSDP's flat ones, so that the model cannot be run here.
        dtype: the dtype in which outputs are compared.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        forward: Callable[[nn.Module, Any], Any] | None = None,
        loss: Callable[[nn.Module, Any], Tensor] | None = None,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        causal: bool | None = None,  # noqa: FBT001 keyword arguments of check_model
        pretrained: bool | None = None,  # noqa: FBT001
    ) -> None:
        super().__init__(unwrapped(model), batch, causal=causal, has_forward=forward is not None)
        self.given = model
        self.optimizer = optimizer
        self._forward, self._loss, self.pretrained = forward, loss, pretrained
        parameters = list(self.model.parameters())
        self.is_sharded = any(is_dtensor(type(p)) or type(p).__name__ == "FlatParameter" for p in parameters)
        self.names = {module: name for name, module in self.model.named_modules()}
        # as they were given
        self.modes = {module: module.training for module in self.names}
        self._own_dtype = next((p.dtype for p in parameters if p.is_floating_point()), torch.float32)
        self.dtype = self._own_dtype
        # wider copies of parameters and buffers, and whether calls use them
        self._copies: list[Copy] = []
        self._is_wide = True

    @property
    def has_loss(self) -> bool:
        """Whether a function of the loss was passed, or the model returns one with its output."""
        return self._loss is not None or self._is_lightning or self.batch.takes("labels")

    # calls

    def prepare(self) -> None:
        """Run the model once, and again in float64; keep the latter if the model has it.

        Raises:
            ValueError: if the model does not run on the batch, or returns no tensor.
        """
        with self._settings(training=False), torch.no_grad():
            # a layer that is called again would find what it has stored; a decoder may have its own config
            if not self._has_forward and self.config is not None:
                if self.batch.takes("use_cache"):
                    self._defaults = {"use_cache": False}
                self._find_decoder_inputs()
            # of models that draw random numbers also in evaluation mode, the outputs of one seed are compared
            torch.manual_seed(0)
            native = self._call({})
        if native is None:
            raise ValueError(
                "check_model: the model returns no tensor; pass forward=, a function of the model and the "
                "batch that returns its output"
            )
        self.reference = native.detach()
        for dtype in (torch.float64, torch.float32):
            if dtype.itemsize <= self.dtype.itemsize:
                break
            previous, self.dtype = self.dtype, dtype
            try:
                self._copies = copies_in(self.model, dtype)
                with self._settings(training=False), torch.no_grad():
                    torch.manual_seed(0)
                    output = self._call({})
            # operators without this dtype, layers that are not registered, no memory for the copies
            except Exception:  # noqa: BLE001
                output = None
            # the lowest number of float64, as a mask, is -inf in a softmax in float32
            if output is not None and torch.equal(output.isfinite(), native.isfinite()):
                self.reference = output.detach()
                break
            self._copies, self.dtype = [], previous

    @contextmanager
    def in_own_dtype(self) -> Iterator[None]:
        """Run the model with its own weights, as for gradients."""
        wide, dtype = self._is_wide, self.dtype
        self._is_wide, self.dtype = False, self._own_dtype
        try:
            yield
        finally:
            self._is_wide, self.dtype = wide, dtype

    def output(
        self, changes: Mapping[str, Any] | None = None, *, training: bool = False, seed: int = 0
    ) -> Tensor:
        """Return the output for changed inputs, without a graph.

        Args:
            changes: other values of arguments, by name.
            training: whether all modules are in training mode, apart from those of BatchNorm; otherwise all
                are in evaluation mode.
            seed: the seed of random numbers.

        Raises:
            NotApplicable: if the model raises an error for these inputs.
        """
        with self._settings(training=training), torch.no_grad():
            torch.manual_seed(seed)
            try:
                output = self._call(changes or {})
            except Exception as error:
                names = ", ".join(changes or {}) or "the batch"
                raise NotApplicable(f"the model fails with other values of {names}: {error}") from error
        if output is None:
            raise NotApplicable("the model returns no tensor for other values")
        return output.detach()

    def loss(self) -> Tensor:
        """Return the loss of the batch with its graph, in the model's own dtype, without dropout.

        Raises:
            NotApplicable: if the model has none and no function was passed.
        """
        with self.differentiated():
            found = self.result_with_loss()[1]
        if found is None:
            raise NotApplicable("the model returns no loss; pass loss=, a function of model and batch")
        return found

    @contextmanager
    def differentiated(self, *, training: bool = True) -> Iterator[None]:
        """Set what a forward with its backward needs: gradients and modes, which checkpoints read again.

        Args:
            training: whether it is the training step, in the model's own dtype and without dropout; otherwise
                the model is in evaluation mode, and in `dtype`.
        """
        dtype = self.in_own_dtype() if training else nullcontext()
        with (
            dtype,
            self._settings(training=training, dropout=False),
            torch.inference_mode(mode=False),
            torch.enable_grad(),
            plain_checkpoints(),
        ):
            yield

    def result_with_loss(self, changes: Mapping[str, Any] | None = None) -> tuple[Any, Tensor | None]:
        """Return all that the model returns and the loss, with their graph; call it in `differentiated`.

        The loss is None if the model has none and no function was passed.

        Args:
            changes: other values of arguments, by name.
        """
        batch = self.batch.changed(changes or {})
        if self._loss is not None:
            found = self._loss(self.model, batch)
            if not isinstance(found, Tensor) or found.numel() != 1:
                what = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
                raise NotApplicable(f"loss= returned {what}; return a 0-d tensor with its graph")
            return found, found
        if self._is_lightning and self._forward is None:
            result = self.model.training_step(batch, 0)  # type: ignore[operator]
            return result, result if isinstance(result, Tensor) else loss_of(result)
        batch = cast(batch, self.dtype)
        call = self.batch.call if self._forward is None else self._forward
        result = call(self.model, batch)
        return result, loss_of(result)

    def output_with_graph(self, changes: Mapping[str, Any], seed: int = 0) -> Tensor | None:
        """Return the output for changed inputs with its graph; call it in `differentiated`."""
        torch.manual_seed(seed)
        return self._call(changes)

    def weights(self) -> list[Tensor]:
        """Return the parameters and buffers that calls use, or their copies."""
        return [*(each.copy for each in self._copies), *self.model.parameters(), *self.model.buffers()]

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module as in evaluation mode, without a graph; None if it fails with these inputs."""
        with self.in_evaluation(), suppress(Exception):
            return module(*args, **kwargs)
        return None

    @contextmanager
    def in_evaluation(self) -> Iterator[None]:
        """Call modules as `output` does: in evaluation mode, in `dtype`, without a graph."""
        with self._settings(training=False), torch.no_grad():
            yield

    def captured(
        self, modules: Iterable[nn.Module], changes: Mapping[str, Any] | None = None
    ) -> dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any], Any]]:
        """Return the arguments and the output of the last call of each module, of those that are called."""
        found: dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any], Any]] = {}

        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            found[module] = args, kwargs, output

        with ExitStack() as stack:
            for module in modules:
                stack.callback(module.register_forward_hook(note, with_kwargs=True).remove)
            self.output(changes)
        return found

    @cached_property
    def streams(self) -> list[Stream]:
        """The sequences that go into the model; with ``forward=``, those that the output depends on."""
        if not self._has_forward:
            return super().streams
        return [x for x in super().streams if self._is_used(x)]

    def _is_used(self, stream: Stream) -> bool:
        try:
            output = self.output({stream.name: self.changed(stream, self.kept(stream))})
        except NotApplicable:
            return True
        return output.shape != self.reference.shape or not torch.equal(output, self.reference)

    # comparisons

    @cached_property
    def scale(self) -> float:
        """The root mean square of the output."""
        finite = self.reference[self.reference.isfinite()].double()
        return float(finite.square().mean().sqrt()) if finite.numel() else 0.0

    @cached_property
    def rounding(self) -> float:
        """The largest change of the output, in proportion to `scale`, if each weight changes by its rounding.

        The rounding is that of the narrowest dtype in which the model computes anything, float32 at most,
        unless it runs in a narrower one itself.
        """
        least = torch.finfo(self.dtype).eps
        return self._error_of(max(least, min(self._narrowest, torch.finfo(torch.float32).eps)))

    @property
    def tolerance(self) -> float:
        """The largest difference of two outputs, in proportion to `scale`, that rounding explains.

        It is for inputs of equal shapes, which are computed in the same order.
        """
        return _FACTOR * self.rounding

    @property
    def least(self) -> float:
        """The largest difference, in proportion, of what does not depend on the inputs that were changed.

        With inputs of equal shapes it is computed from the same numbers in the same order.
        """
        return torch.finfo(self.dtype).eps

    @cached_property
    def tolerance_of_shapes(self) -> float:
        """The same for inputs of other shapes, where the narrowest dtype of all matters."""
        return _FACTOR * self._error_of(max(self._narrowest, torch.finfo(self.dtype).eps))

    @cached_property
    def _narrowest(self) -> float:
        seen = Dtypes()
        with seen:
            self.output()
        return max([torch.finfo(x).eps for x in seen.dtypes], default=0.0)

    def _error_of(self, eps: float) -> float:
        """Return the largest change of the output if each weight changes by up to ``eps`` of itself."""
        copies = [each.copy for each in self._copies if self._is_wide]
        weights = list(dict.fromkeys(copies)) or list(floating(self.model))
        before = [p.data for p in weights]
        generator = torch.Generator(device="cpu").manual_seed(0)
        try:
            for p in weights:
                noise = torch.rand(p.shape, generator=generator, device="cpu", dtype=torch.float64)
                p.data = p.data * (1 + eps * (2 * noise.to(p.device) - 1)).to(p.dtype)
            error = self.distance(self.output(), self.reference)
        finally:
            for p, data in zip(weights, before, strict=True):
                p.data = data
        return max(error, _LEAST * eps) if error < float("inf") else _LEAST * eps

    def distance(self, a: Tensor, b: Tensor) -> float:
        """Return the largest difference of elements, in proportion to `scale`; equal infinities are equal."""
        if a.numel() == 0:
            return 0.0
        return float(self.differences(a, b).max())

    def differences(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the difference of each element, in proportion to `scale`, in float64."""
        a, b = a.double(), b.double()
        same = (a == b) | (a.isnan() & b.isnan())
        return torch.where(same, 0.0, (a - b).abs().nan_to_num(nan=float("inf"))) / (self.scale or 1.0)

    # details

    @property
    def _is_lightning(self) -> bool:
        names = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(self.model).__mro__}
        return bool(names & {"lightning.LightningModule", "pytorch_lightning.LightningModule"})

    def _call(self, changes: Mapping[str, Any]) -> Tensor | None:
        changes = self._defaults | dict(changes)
        labels = "decoder_input_ids" not in self._defaults
        batch = self.batch.changed(changes, labels=labels or not changes)
        batch = cast(batch, self.dtype)
        if self._forward is not None:
            return output_of(self._forward(self.model, batch))
        return output_of(self.batch.call(self.model, batch))

    def _find_decoder_inputs(self) -> None:
        """Find the inputs that a decoder gets which makes them of the labels."""
        name = "decoder_input_ids"
        decoder = getattr(self.model, "get_decoder", lambda: None)() if self.is_encoder_decoder else None
        given = name in self.batch.arguments or self.batch.labels is None or not self.batch.takes(name)
        if not isinstance(decoder, nn.Module) or given:
            return
        found: list[Any] = []

        def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found.append(kwargs.get("input_ids", args[0] if args else None))

        handle = decoder.register_forward_pre_hook(note, with_kwargs=True)
        try:
            self.batch.call(self.model, cast(self.batch.changed({}), self.dtype))
        finally:
            handle.remove()
        if found and isinstance(found[0], Tensor):
            self._defaults[name] = found[0]

    @contextmanager
    def _settings(self, *, training: bool, dropout: bool = True) -> Iterator[None]:
        """Set the modes of all modules for a call, without compilation, autocast and a cache of keys."""
        modes = {module: module.training for module in self.model.modules()}
        device = next((p.device.type for p in self.model.parameters()), "cpu")
        with ExitStack() as stack:
            stack.enter_context(exchanged(self._copies, wide=self._is_wide))
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(plain_checkpoints())
            stack.enter_context(torch.autocast(device, enabled=False) if device != "meta" else nullcontext())
            config: Any = self.config
            if hasattr(config, "get_text_config"):
                config = config.get_text_config()
            # a layer that is called again, or is in two places, would read its own keys
            if getattr(config, "use_cache", False):
                stack.callback(setattr, config, "use_cache", config.use_cache)
                config.use_cache = False
            for module in modes:
                off = isinstance(module, BATCH_NORMS) or (isinstance(module, DROPOUTS) and not dropout)
                module.training = training and not off
            try:
                yield
            finally:
                for module, mode in modes.items():
                    module.training = mode
