"""Faults planted in a gradient are described, and nothing is said where the evidence does not tell."""

from __future__ import annotations

import pytest
import torch

from gradiometer.checks.fault_kind import common_factor, common_sentence, factor_of, fault_kind

SEEDS = range(3)


def gradient(seed=0, shape=(64, 48)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def kind(change, seed=0, shape=(64, 48), size=1e-2):
    """Return the kind of a planted fault, with rounding errors of a relative size."""
    reference = gradient(seed, shape)
    errors = gradient(seed + 100, shape) * reference.norm() / reference.numel() ** 0.5
    # the allowed error is a few times that of rounding
    return fault_kind(
        change(reference.clone()) + size / 4 * errors, reference, size * float(reference.norm())
    )


@pytest.mark.parametrize(
    ("factor", "text"),
    [
        (2.0, "2 times"),
        (0.25, "1/4 times"),
        (1 / 3, "1/3 times"),
        (3.0, "3 times"),
        (-1.0, "the negative of"),
        (-2.0, "-2 times"),
        (65536.0, "65,536 (2^16) times"),
        (2.0**-16, "1/65,536 times"),
    ],
)
@pytest.mark.parametrize("shape", [(64, 48), (30,), (8, 3, 3, 3)])
def test_a_factor(factor, text, shape):
    reference = gradient(1, shape)
    given = factor * (reference + 1e-4 * gradient(2, shape))
    noise = 1e-3 * float(reference.norm())
    assert fault_kind(given, reference, noise) == f"all elements are {text} the reference"


def test_a_factor_that_is_no_simple_number_is_given_as_it_is():
    assert kind(lambda g: 1.37 * g, size=1e-4) == "all elements are 1.37 times the reference"


def test_a_factor_of_one_element_is_no_evidence():
    one = torch.tensor([3.0])
    assert fault_kind(one * 1.37, one, 1e-4) == ""
    assert fault_kind(one * 2, one, 1e-4) == "all elements are 2 times the reference"
    assert fault_kind(-one, one, 1e-4) == "all elements are the negative of the reference"


def test_zeros_and_values_that_are_not_finite():
    reference = gradient()
    assert fault_kind(torch.zeros_like(reference), reference, 0.1) == "all elements are 0"
    given = reference.clone()
    given[3:5] = float("nan")
    given[7, 7] = float("inf")
    assert fault_kind(given, reference, 0.1) == "NaN and Inf in 97 of 3,072 elements, in rows 3-4, 7 of 64"
    assert fault_kind(reference, torch.zeros_like(reference), 0.1).startswith(
        "the reference is 0 up to rounding, and the norm is 55"
    )


def changed(place, value):
    def change(g):
        g[place] = value(g[place])
        return g

    return change


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (changed(slice(32), lambda x: 0 * x), "rows 0-31 of 64 are 0, and the others agree"),
        (changed(5, lambda x: -x), "row 5 of 64 is the negative of the reference, and the others agree"),
        (
            changed((slice(None), slice(40, 48)), lambda x: 2 * x),
            "columns 40-47 of 48 are 2 times the reference, and the others agree",
        ),
        (
            changed(slice(10, 20), lambda x: gradient(9)[: len(x)]),
            "rows 10-19 of 64 differ, and the others agree",
        ),
        (
            changed(slice(0, 64, 8), lambda x: 2 * x),
            "every 8th row from 0 (8 of 64) are 2 times the reference, and the others agree",
        ),
        (lambda g: g.roll(3, 0), "the rows are permuted: row 0 is the reference's row 61, and so on around"),
        (lambda g: g.flip(1), "the columns are permuted: in reverse order"),
        (lambda g: g + 0.5, "0.5 was added to every element"),
    ],
)
def test_a_part_or_an_order(change, text, seed):
    found = kind(change, seed, size=1e-4 if "added" in text else 1e-2)
    if "zeros" not in text and " are 0" in text:
        # with rounding added, zeros are no longer exact
        found = fault_kind(change(gradient(seed)), gradient(seed), 0.5)
    assert found == text


def test_elements_of_a_vector():
    text = "elements 4-7 of 30 are 0, and the others agree"
    assert (
        fault_kind(changed(slice(4, 8), lambda x: 0 * x)(gradient(0, (30,))), gradient(0, (30,)), 0.05)
        == text
    )


def test_a_few_elements_that_agree_by_chance_are_no_evidence():
    reference, other = gradient(0, (24,)), gradient(1, (24,))
    assert fault_kind(changed(slice(22), lambda x: x + other[:22])(reference.clone()), reference, 0.01) == ""
    text = fault_kind(changed(slice(20), lambda x: x + other[:20])(reference.clone()), reference, 0.01)
    assert text == "elements 0-19 of 24 differ, and the others agree"


def test_channels_of_a_convolution():
    reference = gradient(0, (8, 4, 3, 3))
    given = changed((slice(None), slice(1)), lambda x: -x)(reference.clone())
    assert fault_kind(given, reference, 0.1) == (
        "column 0 of 4 is the negative of the reference, and the others agree"
    )


def test_a_transposed_matrix_and_elements_in_another_order():
    reference = gradient(0, (16, 16))
    assert fault_kind(reference.T, reference, 0.1) == "the matrix is transposed"
    order = torch.randperm(256, generator=torch.Generator().manual_seed(0))
    given = reference.flatten()[order].view(16, 16)
    assert fault_kind(given, reference, 0.1) == "the elements are those of the reference in another order"
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    text = fault_kind(reference[order], reference, 0.1)
    assert text.startswith("the rows are permuted: 1")
    assert f"row 0 is the reference's row {order[0]}" in text


def test_another_random_mask():
    reference = gradient()
    masks = [torch.rand(64, 48, generator=torch.Generator().manual_seed(i)) > 0.1 for i in range(2)]
    text = fault_kind(reference * masks[0], reference * masks[1], 0.1)
    assert text.endswith("the other way round: another random mask")


@pytest.mark.parametrize("seed", SEEDS)
def test_a_part_of_a_sum_is_missing(seed):
    parts = [gradient(seed + 10 * i) for i in range(4)]
    text = fault_kind(parts[0] + parts[1] + parts[2], sum(parts), 1.0)
    assert text.startswith("the norm is 0.8")
    assert text.endswith("as that of a sum of which a part is missing")


@pytest.mark.parametrize("seed", SEEDS)
def test_a_part_that_is_not_orthogonal_is_not_said_to_be_missing(seed):
    # as a block that is recomputed with other random numbers: each has terms that the other has not
    both, ours, theirs = (gradient(seed + 10 * i) for i in range(3))
    reference = both + 0.7 * theirs
    for given in (0.8 * both + 0.1 * ours, 0.75 * both + 0.2 * ours, 0.6 * reference + 0.2 * ours):
        assert 0.4 < float(given.norm() / reference.norm()) < 0.9
        assert fault_kind(given, reference, 1.0) == ""


@pytest.mark.parametrize("seed", SEEDS)
def test_unknown_stays_unknown(seed):
    reference = gradient(seed)
    # as large, in another direction; and a large sample, which looks much the same when sorted
    assert fault_kind(gradient(seed + 1), reference, 1.0) == ""
    assert fault_kind(gradient(seed + 1, (200_000,)), gradient(seed, (200_000,)), 30.0) == ""
    assert fault_kind(reference + 0.3 * gradient(seed + 2), reference, 1.0) == ""
    tiny = reference.clone()
    tiny[0] *= 1.2
    # a few elements slightly off within the noise of a line
    assert fault_kind(tiny + 0.05 * gradient(seed + 3), reference, 3.0) == ""


def test_factors_of_all_gradients():
    assert common_factor([4.0, 4.0, 4.01]) == (4.0, 0)
    assert common_factor([1.0, 1.0, 1.0]) is None
    assert common_factor([1.0, 2.0, 1.0]) is None
    assert common_factor([1.0, 2.0, None]) is None
    assert common_factor([1.0, 1.0, 2.0]) is None
    assert factor_of(gradient() * 0, gradient(), 0.1) == 0.0
    assert factor_of(gradient(), gradient() * 0, 0.1) is None


@pytest.mark.parametrize(
    ("factor", "text"),
    [
        (4.0, "all gradients are 4 times the reference: a sum over 4 micro-batches or ranks"),
        (0.5, "all gradients are 1/2 times the reference: divided by 2 once too often"),
        (-1.0, "all gradients are the negative of the reference: the sign of the loss"),
        (65536.0, "all gradients are 65,536 (2^16) times the reference: a loss scale was not divided out"),
        (0.0, "all gradients are 0: nothing is passed back"),
        (1.37, "all gradients are 1.37 times the reference: the loss or the accumulation is scaled"),
    ],
)
def test_a_sentence_for_all(factor, text):
    assert common_sentence(factor, "head.weight", is_all=True).startswith(text)
