"""What kind of fault makes a gradient differ from its reference, where the two tell.

All functions take float64 tensors of the same shape, and ``noise``: the norm that rounding may have. They
return a sentence with numbers, or nothing if the evidence does not tell.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

# most rows or columns that are compared each with each
_MOST_LINES: Final = 2048
# elements of a line that may agree by chance
_FEW: Final = 16
# elements whose directions tell whether a part of a sum is missing
_DIRECTIONS: Final = 64
# a part of a tensor is said to be right if it has this share of the norm
_SHARE: Final = 0.05
_DIMS: Final = ("row", "column")


def fault_kind(given: Tensor, reference: Tensor, noise: float) -> str:
    """Return in one sentence how a gradient differs from its reference; ``""`` if that is unknown.

    >>> fault_kind(torch.tensor([2.0, 4.0, -6.0]), torch.tensor([1.0, 2.0, -3.0]), 1e-6)
    'all elements are 2 times the reference'
    """
    given, reference = given.double(), reference.double()
    norm = float(reference.norm())
    if not bool(given.isfinite().all()):
        return nonfinite(given)
    if norm <= noise:
        return f"the reference is 0 up to rounding, and the norm is {given.norm():.3g}"
    if not bool(given.any()):
        return "all elements are 0"
    if (factor := factor_of(given, reference, noise)) is not None:
        return f"all elements are {times(factor)} the reference"
    return (
        _lines(given, reference, noise)
        or _permuted(given, reference, noise)
        or _added(given, reference, noise)
        or _other_zeros(given, reference, noise)
        or _partial(given, reference)
    )


def factor_of(given: Tensor, reference: Tensor, noise: float) -> float | None:
    """Return the factor by which all elements differ, 0 if all are 0; None if no single factor explains them.

    A factor near a power of 2, an integer or the inverse of one is rounded to that.
    """
    given, reference = given.double().flatten(), reference.double().flatten()
    square = float(reference @ reference)
    if not 0 < square < math.inf or math.sqrt(square) <= noise:
        return None
    factor = float(given @ reference) / square
    if not bool(given.any()) or not math.isfinite(factor):
        return 0.0 if factor == 0 else None
    # rounding is as large in proportion to the gradient
    if not float((given - factor * reference).norm()) <= noise * abs(factor):
        return None
    exact = _round_factor(factor)
    if exact != 1.0 and abs(factor / exact - 1.0) <= min(0.02, max(noise / math.sqrt(square), 1e-3)):
        return exact
    # one element always has a factor
    return factor if given.numel() > 2 else None


def _round_factor(factor: float) -> float:
    """Return the nearest power of 2, integer below 1,025 or inverse of one, with the sign."""
    size = abs(factor)
    near = [2.0 ** round(math.log2(size))]
    if 0.5 < size < 1024.5:
        near.append(float(round(size)))
    if 0.5 < 1.0 / size < 1024.5:
        near.append(1.0 / round(1.0 / size))
    return math.copysign(min(near, key=lambda each: abs(each / size - 1.0)), factor)


def times(factor: float) -> str:
    """Return a factor as text.

    >>> times(0.25), times(-1.0), times(65536.0), times(1.00012)
    ('1/4 times', 'the negative of', '65,536 (2^16) times', '1.00012 times')
    """
    if factor == -1.0:
        return "the negative of"
    size = abs(factor)
    if size >= 1 and size == int(size):
        power = f" (2^{int(math.log2(size))})" if size >= 1024 and math.log2(size).is_integer() else ""
        text = f"{int(size):,}{power}"
    elif size < 1 and abs(1 / size - round(1 / size)) < 1e-9 / size:
        text = f"1/{round(1 / size):,}"
    else:
        # a factor near 1 has its digits later
        text = next((x for x in (f"{size:.4g}", f"{size:.6g}") if x != "1"), f"{size:.9g}")
    return f"{'-' if factor < 0 else ''}{text} times"


def common_factor(factors: Sequence[float | None]) -> tuple[float, int] | None:
    """Return the factor that the last gradients of a backward pass share, and the position of the first.

    Args:
        factors: the factor of each gradient in the order of the backward pass, 1 for those that agree, and
            None for those without a single factor.

    >>> common_factor([1.0, 1.0, 4.0, 4.0, 4.0])
    (4.0, 2)
    """
    start = next((i for i, each in enumerate(factors) if each != 1.0), None)
    if start is None or (factor := factors[start]) is None or len(factors) - start < 2:
        return None
    # measured factors of different tensors differ by rounding
    same = all(each is not None and abs(each - factor) <= 0.01 * abs(factor) for each in factors[start:])
    return (factor, start) if same else None


def common_sentence(factor: float, name: str, *, is_all: bool) -> str:
    """Return the sentence about a factor that all gradients share, or all from one on."""
    if not factor:
        where = (
            "all gradients" if is_all else f"from {name} on, in the order of the backward pass, all gradients"
        )
        return f"{where} are 0: nothing is passed back, or they were cleared"
    if not is_all:
        return (
            f"from {name} on, in the order of the backward pass, all gradients are {times(factor)} the "
            "reference: what is passed back from there is scaled"
        )
    power = math.log2(abs(factor))
    causes = "the loss or the accumulation is scaled"
    if factor == -1.0:
        causes = "the sign of the loss is flipped"
    elif power.is_integer() and power >= 10:
        causes = "a loss scale was not divided out"
    elif factor > 1 and factor == int(factor):
        causes = f"a sum over {int(factor)} micro-batches or ranks in place of their mean, or counted twice"
    elif 0 < factor < 1 and round(1 / factor) * factor == 1.0:
        causes = f"divided by {round(1 / factor)} once too often: the number of micro-batches or ranks"
    return f"all gradients are {times(factor)} the reference: {causes}"


def nonfinite(x: Tensor) -> str:
    """Return how many elements are not finite, and where."""
    bad = ~x.isfinite()
    kinds = [kind for kind, found in (("NaN", x.isnan()), ("Inf", x.isinf())) if bool(found.any())]
    where = ""
    if x.dim() > 1 and x.shape[0] > 1:
        rows = bad.flatten(1).any(1)
        where = "" if bool(rows.all()) else f", in {_places(rows, 'row')}"
    return f"{' and '.join(kinds)} in {int(bad.sum()):,} of {x.numel():,} elements{where}"


def _lines(given: Tensor, reference: Tensor, noise: float) -> str:
    """Return which rows or columns are wrong, if others are right."""
    best: tuple[float, str] | None = None
    for dim in range(min(given.dim(), 2)):
        x, r = (each.movedim(dim, 0).reshape(each.shape[dim], -1) for each in (given, reference))
        norms = r.norm(dim=1)
        limit = 4.0 * noise * torch.maximum(norms / norms.norm(), norms.new_tensor(len(r) ** -0.5))
        errors = (x - r).norm(dim=1)
        wrong = errors > limit
        count = int(wrong.sum())
        right = float(norms[~wrong].norm() / norms.norm())
        # most of the right lines must have a gradient at all, or they are right because they are 0
        if not 0 < count < len(r) or right < _SHARE:
            continue
        # a fault that is everywhere is here and there below the limit, too
        if float((errors[wrong] / limit[wrong]).median()) < 4.0:
            continue
        word = "element" if given.dim() == 1 else _DIMS[dim]
        bad, good = x[wrong], r[wrong]
        # some single elements agree by chance
        is_chance = r.shape[1] < _FEW and len(r) - count < len(r) / 8.0
        part_noise = 4.0 * noise * max(float(good.norm() / norms.norm()), (count / len(r)) ** 0.5)
        places, verb = _places(wrong, word), "is" if count == 1 else "are"
        text = f"{places} differ{'s' * (count == 1)}, and the others agree"
        if not bool(bad.any()):
            text = f"{places} {verb} 0, and the others agree"
        elif (factor := factor_of(bad, good, part_noise)) is not None:
            text = f"{places} {verb} {times(factor)} the reference, and the others agree"
        elif is_chance:
            continue
        if best is None or count / len(r) < best[0]:
            best = count / len(r), text
    return best[1] if best else ""


def _places(mask: Tensor, word: str) -> str:
    """Return the places of a mask as ranges.

    >>> _places(torch.tensor([True, True, False, True]), "row")
    'rows 0-1, 3 of 4'
    """
    at = mask.nonzero().flatten().tolist()
    starts = [x for i, x in enumerate(at) if i == 0 or at[i - 1] != x - 1]
    ends = [x for i, x in enumerate(at) if i + 1 == len(at) or at[i + 1] != x + 1]
    parts = [str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
    if len(parts) > 4:
        step = starts[1] - starts[0]
        if ends == starts and all(x == starts[0] + i * step for i, x in enumerate(starts)):
            return f"every {step}th {word} from {starts[0]} ({len(at):,} of {len(mask):,})"
        return f"{len(at):,} of {len(mask):,} {word}s ({', '.join(parts[:3])}, …)"
    return f"{word}{'s' * (len(at) != 1)} {', '.join(parts)} of {len(mask):,}"


def _permuted(given: Tensor, reference: Tensor, noise: float) -> str:
    """Return the kind of permutation that leads from the reference to what is given."""
    is_square = given.dim() == 2 and given.shape[0] == given.shape[1]
    if is_square and float((given - reference.T).norm()) <= noise:
        return "the matrix is transposed"
    for dim in range(min(given.dim(), 2) if given.dim() > 1 else 0):
        x, r = (each.movedim(dim, 0).reshape(each.shape[dim], -1) for each in (given, reference))
        if not 1 < len(r) <= _MOST_LINES or r.shape[1] < 2:
            continue
        nearest = torch.cdist(x, r, compute_mode="donot_use_mm_for_euclid_dist").argmin(1)
        if len(nearest.unique()) == len(r) and float((x - r[nearest]).norm()) <= noise:
            return f"the {_DIMS[dim]}s are permuted: {_moves(nearest, _DIMS[dim])}"
    size = float(reference.norm())
    a, b = given.flatten().sort().values, reference.flatten().sort().values
    # many random numbers look much like others when sorted
    if len(a) > 3 and float((a - b).norm()) <= min(noise, 1e-4 * size):
        return "the elements are those of the reference in another order"
    return ""


def _moves(nearest: Tensor, word: str) -> str:
    """Return a permutation in words."""
    places = torch.arange(len(nearest), device=nearest.device)
    if bool((nearest == places.flip(0)).all()):
        return "in reverse order"
    shift = int((nearest[0] - places[0]) % len(nearest))
    if bool((nearest == (places + shift) % len(nearest)).all()):
        return f"{word} 0 is the reference's {word} {shift}, and so on around"
    moved = (nearest != places).nonzero().flatten().tolist()
    few = ", ".join(f"{word} {i} is the reference's {word} {int(nearest[i])}" for i in moved[:2])
    return f"{len(moved):,} of {len(nearest):,} moved; {few}"


def _added(given: Tensor, reference: Tensor, noise: float) -> str:
    """Return the constant that was added to each element."""
    if given.numel() < 3:
        return ""
    difference = given - reference
    mean = float(difference.mean())
    if float((difference - mean).norm()) <= noise:
        return f"{mean:.3g} was added to every element"
    return ""


def _other_zeros(given: Tensor, reference: Tensor, noise: float) -> str:
    """Return how many zeros are at other places, if what is 0 in neither agrees."""
    a, b = given == 0, reference == 0
    lost, found = int((a & ~b).sum()), int((b & ~a).sum())
    both = ~a & ~b
    if not lost or not int(both.sum()) > 2:
        return ""
    if factor_of(given[both], reference[both], noise) is None:
        return ""
    if found:
        return (
            f"{lost:,} elements are 0 that are not 0 in the reference, and {found:,} the other way round: "
            "another random mask"
        )
    return f"{lost:,} of {given.numel():,} elements are 0 that are not 0 in the reference"


def _partial(given: Tensor, reference: Tensor) -> str:
    """Return that a part of a sum is missing, if what is missing is orthogonal to what is there."""
    a, b = float(given.norm()), float(reference.norm())
    missing = reference - given
    cosine, ratio = float((given * reference).sum()) / (a * b), a / b
    # random directions have a cosine of this size
    along = abs(float((given * missing).sum())) / (a * float(missing.norm()))
    is_orthogonal = given.numel() >= _DIRECTIONS and along <= 3.0 / given.numel() ** 0.5
    if ratio < 0.9 and cosine > 0.4 and is_orthogonal:
        return (
            f"the norm is {ratio:.2f} times the reference's with a cosine of {cosine:.2f}, as that of a sum "
            "of which a part is missing"
        )
    return ""
