"""A model that is examined: its outputs for changed inputs, in float64 where it has that."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gradiometer.checks.batch import Batch, Stream, loss_of, output_of
from gradiometer.checks.recompute import plain_checkpoints
from gradiometer.checks.report import NotApplicable
from gradiometer.inputs import is_dtensor, unwrapped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch.optim import Optimizer

# how many times the measured rounding error two outputs may differ, and the least such error in roundings
_FACTOR, _LEAST = 16.0, 8.0

DROPOUTS: Final = (nn.modules.dropout._DropoutNd,)  # noqa: SLF001 the base class of all
BATCH_NORMS: Final = (nn.modules.batchnorm._NormBase,)  # noqa: SLF001


class Probe:
    """A model, a batch, and what is known of both. `check_model` restores the model afterwards.

    Attributes:
        model: the model, without wrappers of data parallelism and compilation.
        batch: the `Batch`.
        optimizer: the optimizer, or None.
        is_sharded: whether parameters are DTensors or FSDP's flat ones, so that the model cannot be run here.
        dtype: the dtype in which outputs are compared.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        forward: Callable[[nn.Module, Any], Any] | None = None,
        loss: Callable[[nn.Module, Any], Tensor] | None = None,
        optimizer: Optimizer | None = None,
        causal: bool | None = None,  # noqa: FBT001 keyword arguments of check_model
        pretrained: bool | None = None,  # noqa: FBT001
    ) -> None:
        self.given, self.model = model, unwrapped(model)
        self.batch = Batch(self.model, batch)
        self.optimizer = optimizer
        self._forward, self._loss, self._causal, self._pretrained = forward, loss, causal, pretrained
        parameters = list(self.model.parameters())
        self.is_sharded = any(is_dtensor(type(p)) or type(p).__name__ == "FlatParameter" for p in parameters)
        self.names = {module: name for name, module in self.model.named_modules()}
        self.dtype = next((p.dtype for p in parameters if p.is_floating_point()), torch.float32)
        # of what is used instead of the batch's own tensors, such as the inputs of a decoder
        self._defaults: dict[str, Any] = {}

    @property
    def config(self) -> Any:
        """The config of a Hugging Face model; None without."""
        found = getattr(self.model, "config", None)
        return found if hasattr(found, "model_type") else None

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
            self._find_decoder_inputs()
            native = self._call({})
        if native is None:
            raise ValueError(
                "check_model: the model returns no tensor; pass forward=, a function of the model and the "
                "batch that returns its output"
            )
        self._output = native.detach()
        if self.dtype == torch.float64:
            return
        stored = [(p, p.data) for p in self._floating()]
        for dtype in dict.fromkeys([torch.float64, torch.float32]):
            if dtype.itemsize <= self.dtype.itemsize:
                break
            try:
                for p, data in stored:
                    p.data = data.to(dtype)
                previous, self.dtype = self.dtype, dtype
                with self._settings(training=False), torch.no_grad():
                    output = self._call({})
            except Exception:  # noqa: BLE001 operators without this dtype, or layers that are not registered
                self.dtype = previous
            else:
                if output is not None and output.shape == native.shape:
                    self._output, self._stored = output.detach(), stored
                    return
                self.dtype = previous
        for p, data in stored:
            p.data = data

    _stored: list[tuple[Tensor, Tensor]] = []  # noqa: RUF012 replaced, never changed

    @contextmanager
    def in_own_dtype(self) -> Iterator[None]:
        """Run the model in the dtype that it has, as for gradients."""
        wide, dtype = [(p, p.data) for p, _ in self._stored], self.dtype
        for p, data in self._stored:
            p.data = data
        self.dtype = next((p.dtype for p in self.model.parameters() if p.is_floating_point()), self.dtype)
        try:
            yield
        finally:
            self.dtype = dtype
            for p, data in wide:
                p.data = data

    @property
    def reference(self) -> Tensor:
        """The output for the batch as it was given, in evaluation mode."""
        return self._output

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
            self._settings(training=training, dropout=False),
            dtype,
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
        batch = self.batch.changed(changes) if changes else self.batch.given
        if self._loss is not None:
            found = self._loss(self.model, batch)
            return found, found
        if self._is_lightning and self._forward is None:
            result = self.model.training_step(batch, 0)  # type: ignore[operator]
            return result, result if isinstance(result, Tensor) else loss_of(result)
        batch = _cast(batch, self.dtype)
        call = self.batch.call if self._forward is None else self._forward
        result = call(self.model, batch)
        return result, loss_of(result)

    def output_with_graph(self, changes: Mapping[str, Any], seed: int = 0) -> Tensor | None:
        """Return the output for changed inputs with its graph; call it in `differentiated`."""
        torch.manual_seed(seed)
        return self._call(changes)

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

    # comparisons

    @cached_property
    def scale(self) -> float:
        """The root mean square of the output."""
        finite = self.reference[self.reference.isfinite()].double()
        return float(finite.square().mean().sqrt()) if finite.numel() else 0.0

    @cached_property
    def rounding(self) -> float:
        """The largest change of the output, in proportion to `scale`, if each weight changes by its rounding.

        The rounding is that of the narrowest dtype in which the model computes anything.
        """
        seen = _Dtypes()
        with seen:
            self.output()
        narrowest = max([torch.finfo(x).eps for x in seen.dtypes], default=torch.finfo(self.dtype).eps)
        weights = self._floating()
        before = [p.data for p in weights]
        generator = torch.Generator(device="cpu").manual_seed(0)
        try:
            for p in weights:
                noise = torch.rand(p.shape, generator=generator, device="cpu", dtype=torch.float64)
                p.data = p.data * (1 + narrowest * (2 * noise.to(p.device) - 1)).to(p.dtype)
            error = self.distance(self.output(), self.reference)
        finally:
            for p, data in zip(weights, before, strict=True):
                p.data = data
        return max(error, _LEAST * narrowest) if error < float("inf") else _LEAST * narrowest

    @property
    def tolerance(self) -> float:
        """The largest difference of two outputs, in proportion to `scale`, that rounding explains."""
        return _FACTOR * self.rounding

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

    # what is known of the inputs

    @cached_property
    def streams(self) -> list[Stream]:
        """The sequences that go into the model; that of a decoder is the last."""
        known = self.batch.streams()
        for name, x in self._defaults.items():
            if isinstance(x, Tensor) and name not in self.batch.tensors:
                known.append(Stream(name, x))
        return known

    @property
    def aligned(self) -> Stream | None:
        """The sequence for each of whose positions the model has an output ``(B, T, ...)``; None without."""
        shape = self.reference.shape
        for stream in reversed(self.streams):
            if stream.is_sequence and len(shape) >= 2 and stream.tensor.shape[:2] == shape[:2]:
                # one number for each example, such as a class, is not an output of positions
                return stream if len(shape) > 2 else None
        return None

    @cached_property
    def is_causal(self) -> bool | None:
        """Whether no output may depend on later tokens: as passed, or by the config, or by the labels.

        None if that is not known. Labels that are the tokens one position later are those of a causal model;
        labels of tokens that are hidden in the input are those of an encoder.
        """
        if self._causal is not None:
            return self._causal
        config = self.config
        if config is not None:
            name = type(self.model).__name__
            if getattr(config, "is_encoder_decoder", False):
                return True
            if "CausalLM" in name or "LMHead" in name or getattr(config, "is_decoder", False):
                return True
            return False if "MaskedLM" in name or "Image" in name else None
        stream, labels = self.aligned, self.batch.labels
        if stream is None or labels is None or not stream.is_tokens:
            return None
        x, y = stream.tensor, self.batch.tensors[labels]
        if y.is_floating_point() or y.shape != x.shape:
            return None
        used = y >= 0
        shifted = used[:, :-1]
        if stream.mask is not None:
            shifted = shifted & self.batch.kept(stream.mask)[:, 1:]
        if int(shifted.sum()) and float((y[:, :-1] == x[:, 1:])[shifted].double().mean()) > 0.9:
            return True
        hidden = float((x[used] == x[used].mode().values).double().mean()) if bool(used.any()) else 0.0
        return False if hidden > 0.9 and not bool(used.all()) else None

    @cached_property
    def is_encoder_decoder(self) -> bool:
        """Whether the model has an encoder and a decoder, as its config or its inputs say."""
        if self.config is not None:
            return bool(getattr(self.config, "is_encoder_decoder", False))
        return len([x for x in self.streams if x.is_sequence]) > 1

    def kept(self, stream: Stream) -> Tensor:
        """Return which tokens of a sequence are not padding, ``(B, T)`` bool."""
        if stream.mask is None:
            return torch.ones(stream.tensor.shape[:2], dtype=torch.bool, device=stream.tensor.device)
        return self.batch.kept(stream.mask)

    def changed(self, stream: Stream, where: Tensor, seed: int = 0) -> Tensor:
        """Return a sequence with other values at some positions, ``(B, T)`` bool or ``(B,)`` bool.

        Tokens are replaced by others of the batch, values by random ones of the same spread.

        Raises:
            NotApplicable: if all tokens of the batch are equal.
        """
        x = stream.tensor
        generator = torch.Generator(device="cpu").manual_seed(seed)
        if stream.is_tokens:
            known = x[self.kept(stream)].unique()
            if len(known) < 2:
                raise NotApplicable(f"all tokens in {stream.name} are equal; pass a batch of real data")
            # another one of those that are known
            place = torch.searchsorted(known, x.contiguous()).clamp(max=len(known) - 1)
            step = torch.randint(1, len(known), x.shape, generator=generator, device="cpu").to(x.device)
            other = known[(place + step) % len(known)]
        else:
            noise = torch.randn(x.shape, generator=generator, device="cpu", dtype=torch.float64)
            spread = float(x.double().std()) if x.numel() > 1 else 1.0
            other = x + ((spread or 1.0) * noise).to(x.device, x.dtype)
        where = where.to(x.device)
        return torch.where(where.view(where.shape + (1,) * (x.dim() - where.dim())), other, x)

    # details

    @property
    def _is_lightning(self) -> bool:
        names = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(self.model).__mro__}
        return bool(names & {"lightning.LightningModule", "pytorch_lightning.LightningModule"})

    def _floating(self) -> list[Tensor]:
        every = dict.fromkeys([*self.model.parameters(), *self.model.buffers()])
        return [x for x in every if x.is_floating_point() and x.layout == torch.strided]

    def _call(self, changes: Mapping[str, Any]) -> Tensor | None:
        changes = self._defaults | dict(changes)
        batch = self.batch.changed(changes, labels=not self._defaults) if changes else self.batch.given
        batch = _cast(batch, self.dtype)
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
            self.batch.call(self.model, _cast(self.batch.given, self.dtype))
        finally:
            handle.remove()
        if found and isinstance(found[0], Tensor):
            self._defaults = {name: found[0]}

    @contextmanager
    def _settings(self, *, training: bool, dropout: bool = True) -> Iterator[None]:
        """Set the modes of all modules for a call, without compilation, autocast and a cache of keys."""
        modes = {module: module.training for module in self.model.modules()}
        device = next((p.device.type for p in self.model.parameters()), "cpu")
        with ExitStack() as stack:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(plain_checkpoints())
            stack.enter_context(torch.autocast(device, enabled=False) if device != "meta" else nullcontext())
            config: Any = self.config
            if hasattr(config, "get_text_config"):
                config = config.get_text_config()
            # one layer in two places would read its own keys
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


class _Dtypes(TorchDispatchMode):
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


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Return floating-point tensors in a dtype, also in containers; others as they are."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _cast(x, dtype) for key, x in value.items()}
    if type(value) in {list, tuple}:
        return type(value)([_cast(x, dtype) for x in value])
    return value
