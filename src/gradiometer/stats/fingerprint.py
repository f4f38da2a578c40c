"""Fingerprints of a module, a state dict or any named tensors as text, and their comparison over ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import reduce
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gradiometer.columns import WORD_BYTES, Fingerprint
from gradiometer.distributed import minority, share
from gradiometer.inputs import (
    Named,
    check_names,
    has_float64,
    is_dtensor,
    named_parameters,
    named_tensors,
    refusal,
    unwrapped,
    with_names,
    without_wrappers,
)
from gradiometer.stats.host_copy import outside_of_a_graph
from gradiometer.stats.measure import dense, measure, over_ranks_with

if TYPE_CHECKING:
    from gradiometer.distributed import Ranks
    from gradiometer.inputs import Parameters

# the end of the text of an object that is not read
NOT_COMPARED: Final = ", not compared"

# elements that are copied at a time; a multiple of two words
_PIECE: Final = 2**22
# elements of an expanded tensor that are read, at most
_MOST: Final = 2**35

# a dtype that can be measured, by its size: only the bits are read
_BITS: Final = {1: torch.float8_e5m2, 2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


def fingerprint(source: nn.Module | Mapping[str, Any] | Iterable[Any]) -> dict[str, str]:
    """Return the fingerprint of each tensor of a module or state dict, as text. Waits for the device once.

    Store the result as JSON beside a checkpoint, and compare it with ``==`` after loading. The text has the
    dtype, the shape, and the 32 digits of `Fingerprint`, which depend on every bit and on the order of the
    elements: not on the device, strides, alignment or the format of a file. -0.0 and 0.0 differ, and so do
    NaNs with different bits.

    Tensors of every dtype are read. A tied tensor appears under each of its names, and a sparse COO tensor
    has the fingerprint of its dense form. Numbers, strings and None, and lists of them, are included as
    their text. Any other object, such as a function, is included as its type and the words "not compared".

    Args:
        source: a module or an optimizer; its state dict; any nesting of mappings and lists of tensors, whose
            names are joined by dots; or (name, tensor) pairs. The parts of names that
            ``torch.compile`` and other wrappers add are removed.

    Returns:
        The text by name, in the order of ``source``.

    Raises:
        TypeError: for a DTensor, of which a rank has only a part, and for a tensor that cannot be read: on
            the meta device, quantized, nested, or in a sparse layout other than COO. The message names it.
        ValueError: for a duplicate name.
        RuntimeError: inside a compiled function; call it outside.

    >>> import torch, gradiometer as gm
    >>> gm.fingerprint({"w": torch.ones(2, 1), "optimizer": {"step": torch.tensor(3), "lr": 0.1}})
    ... # doctest: +NORMALIZE_WHITESPACE
    {'w': 'float32 (2, 1) 3f800000204000003f80000020400000',
     'optimizer.step': 'int64 () 00000000000000030000000000000003',
     'optimizer.lr': '0.1'}
    """
    outside_of_a_graph("fingerprint")
    state: Any = unwrapped(source) if isinstance(source, nn.Module) else source
    if callable(getattr(state, "state_dict", None)):
        content = state.state_dict()
        names = without_wrappers(state, content) if isinstance(state, nn.Module) else list(content)
        state = dict(zip(names, content.values(), strict=True))
    if not isinstance(state, Mapping):
        named = named_tensors(state, "fingerprint")
        check_names(named.names, "fingerprint")
        state = dict(zip(*named, strict=True))
    return texts(leaves("", state) if state else (), "fingerprint")


def check_replicas(model: Parameters, *, reduce: bool | Ranks = True) -> dict[str, tuple[int, ...]]:
    """Compare copies of a model's parameters over the ranks, bit by bit.

    Ranks hold copies of plain tensors, as under DDP, and of DTensors in the replicated dimensions of their
    mesh, as under HSDP and tensor parallelism. One read and two collectives compare the fingerprints of all
    of them; only if copies differ do the ranks exchange fingerprints, to find the ranks in the minority. All
    ranks have to make this call.

    Args:
        model: a module, or parameters as for `gradiometer.collect_weights`.
        reduce: as for `gradiometer.collect_grads`; a `gradiometer.Ranks` saves the agreement in each process.

    Returns:
        The names of the parameters whose copies differ -> the global ranks whose copy differs from that of
        most others. If as many ranks hold one version as another, the version of the lowest rank counts as
        that of most. Empty if all copies are the same, or with one process. The same on all ranks.

    Raises:
        RuntimeError: inside a compiled function; use ``collect_weights(..., fingerprint=True, reduce=ranks)``
            there, and `TensorStats.diverged`.
        TypeError, RankError: as for `gradiometer.collect_weights`.

    >>> import torch, gradiometer as gm
    >>> gm.check_replicas(torch.nn.Linear(2, 1))  # in a process of its own
    {}
    """
    if torch.compiler.is_compiling():
        msg = "check_replicas waits for the result, which a compiled function cannot do; call it outside, or "
        raise RuntimeError(msg + "use collect_weights(model, fingerprint=True, reduce=ranks).diverged")
    what = "check_replicas"
    named = named_parameters(model, what)
    stats, _, ranks = over_ranks_with(
        reduce, named, what, lambda _: (measure(named, what, fingerprint=True), None), fingerprint=True
    )
    if ranks is None or ranks.size == 1 or stats.local is None:
        return {}
    names = stats.materialize().diverged
    if not names:
        return {}
    own = stats.local.materialize()
    bits = {name: str(own[name].fingerprint) for name in names if name in own}
    gathered = share(bits, ranks.group, ranks.timeout, what)
    return {name: minority(ranks, name, [each.get(name) for each in gathered]) for name in names}


def leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Return the tensors and other values of nested mappings and lists, with their names.

    A list without tensors and mappings is one value, and so is an empty mapping.
    """
    if isinstance(value, Mapping) and value:
        items: Iterable[tuple[object, Any]] = value.items()
    elif _has_tensors(value):
        items = enumerate(value)
    else:
        yield name, value
        return
    for key, item in items:
        yield from leaves(f"{name}.{key}" if name else str(key), item)


def _has_tensors(value: object) -> bool:
    if not isinstance(value, list | tuple):
        return False
    return any([isinstance(item, Tensor | Mapping) or _has_tensors(item) for item in value])


def texts(found: Iterable[tuple[str, Any]], what: str) -> dict[str, str]:
    """Return the texts of named tensors and other values, in one read; ``what`` names the caller in errors.

    Raises:
        TypeError, ValueError: as `fingerprint`.
    """
    pairs = list(found)
    names, values = with_names([name for name, _ in pairs], [value for _, value in pairs], what)
    check_names(names, what)
    tensors = {name: x for name, x in zip(names, values, strict=True) if isinstance(x, Tensor)}
    for name, x in tensors.items():
        if is_dtensor(type(x)):
            msg = f"{what}: {name!r} is a DTensor, of which this rank has only a part; "
            raise TypeError(msg + "pass its full_tensor(), or a state dict made with full_state_dict=True")
    parts = {name: x for name, x in tensors.items() if not _is_expanded(x)}
    bits = Named(tuple(parts), [_in_floats(x) for x in parts.values()])
    rows = measure(bits, what, fingerprint=True).fingerprints
    digits = dict(zip(parts, [] if rows is None else rows.tolist(), strict=True))
    for name, x in tensors.items():
        if name not in parts:
            if _reads(x) > _MOST:
                held = x.untyped_storage().nbytes()
                msg = f"{what}: {name!r} has {x.numel()} elements in {held} bytes, too many to read; "
                raise ValueError(msg + "pass the tensor that it was expanded from")
            digits[name] = _expanded(x).row
    return {
        name: _tensor_text(x, digits[name]) if name in digits else _text(x)
        for name, x in zip(names, values, strict=True)
    }


def _in_floats(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor in a dtype that can be measured; a tensor that is refused as it is."""
    if is_lazy(tensor) or refusal(tensor) is None or tensor.is_nested or tensor.is_quantized:
        return tensor
    if not has_float64(tensor.device):
        # so that the error is about the device, whatever the dtype
        return tensor.new_empty(0, dtype=torch.float32)
    if tensor.layout not in {torch.strided, torch.sparse_coo} or tensor.dtype in _BITS.values():
        return tensor
    # without a gradient that a view of another dtype could not have
    return dense(tensor).detach().resolve_neg().view(_BITS[tensor.itemsize])


def _is_expanded(tensor: Tensor) -> bool:
    """Return whether a tensor has elements that share memory, as after `expand`; a copy may be far larger."""
    if is_lazy(tensor) or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
        return False
    is_large = tensor.layout == torch.strided and tensor.numel() > _PIECE and has_float64(tensor.device)
    return is_large and tensor.numel() * tensor.itemsize > tensor.untyped_storage().nbytes()


def _reads(x: Tensor) -> int:
    """Return how many elements `_expanded` reads."""
    if x.numel() <= _PIECE:
        return x.numel()
    group = _rows_of_words(x)
    count, rest = divmod(len(x), group)
    if x.stride(0) == 0 and count > 1:
        return _reads(x[:group]) + _reads(x[:rest])
    return len(x) * _reads(x[0]) if group == 1 or len(x) == 1 else x.numel()


def _rows_of_words(x: Tensor) -> int:
    """Return the least number of rows that end with a whole word."""
    return WORD_BYTES // math.gcd(x[0].numel() * x.itemsize, WORD_BYTES)


def _expanded(x: Tensor) -> Fingerprint:
    """Return the fingerprint of such a tensor, from copies of small parts of it."""
    if x.numel() <= _PIECE:
        rows = measure(Named(("x",), [_in_floats(x.contiguous())]), "fingerprint", fingerprint=True)
        return Fingerprint(*rows.fingerprints.tolist()[0])  # type: ignore[union-attr]
    group = _rows_of_words(x)
    count, rest = divmod(len(x), group)
    if x.stride(0) == 0 and count > 1:
        found = _repeated(_expanded(x[:group]), count)
        return found.then(_expanded(x[:rest])) if rest else found
    if group == 1 or len(x) == 1:
        return reduce(Fingerprint.then, map(_expanded, x))
    return reduce(Fingerprint.then, _of_pieces(x))


def _repeated(block: Fingerprint, count: int) -> Fingerprint:
    """Return the fingerprint of ``count`` equal blocks of whole words, one after the other."""
    found = Fingerprint(0, 0, 0)
    while count:
        if count % 2:
            found = found.then(block)
        block, count = block.then(block), count // 2
    return found


def _of_pieces(x: Tensor) -> Iterator[Fingerprint]:
    """Return the fingerprints of parts of whole words, and of the last one."""
    left = x.new_empty(0)
    for piece in _pieces(x):
        left = torch.cat([left, piece])
        whole = len(left) - len(left) % WORD_BYTES
        if whole:
            yield _expanded(left[:whole])
        left = left[whole:]
    if len(left):
        yield _expanded(left)


def _pieces(x: Tensor) -> Iterator[Tensor]:
    """Return the elements in row-major order, in small vectors."""
    each = x[0].numel()
    if each > _PIECE // 2:
        for row in x:
            yield from _pieces(row)
        return
    rows = _PIECE // 2 // each
    for start in range(0, len(x), rows):
        yield x[start : start + rows].reshape(-1)


def _tensor_text(tensor: Tensor, row: list[int]) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} {tuple(tensor.shape)} {Fingerprint.of_row(row)}"


def _text(value: object) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join([_text(item) for item in value])}]"
    if isinstance(value, Mapping) and not value:
        return "{}"
    if type(value).__module__ == "numpy" and callable(getattr(value, "item", None)) and not value.shape:  # type: ignore[attr-defined]
        # a number or string of NumPy, as Python's
        value = value.item()  # type: ignore[attr-defined]
    if value is None or isinstance(value, bool | str | bytes | complex | torch.dtype | torch.device):
        return repr(value)
    # numbers of NumPy print their type, in some versions
    if isinstance(value, Integral):
        return repr(int(value))
    if isinstance(value, Real):
        return repr(float(value))
    return f"{type(value).__name__}{NOT_COMPARED}"
