"""Fingerprints by themselves: the multiplier, the merge law, and the guarantee with its exact limits."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sympy import ZZ
from sympy.polys.matrices import DomainMatrix

import gradiometer as gm
from gradiometer.columns.fingerprint import (
    MULTIPLIER,
    POSITION_BITS,
    Fingerprint,
    geometric,
    merge_fingerprints,
    mix,
    power,
    signed,
)
from support import fingerprints
from support.fingerprints import HALF, MODULUS, mixed, unmixed

words = st.integers(0, MODULUS - 1)
# words of the guarantee: 32 GiB
MOST_WORDS = 2**32


def twos(n: int) -> int:
    """Return how often 2 divides n mod 2**64; 64 for 0."""
    n %= MODULUS
    return 64 if n == 0 else (n & -n).bit_length() - 1


# the multiplier


def test_the_multiplier_is_as_the_proof_and_the_kernels_need_it():
    assert MULTIPLIER % 4 == 1
    assert 0 < MULTIPLIER < MODULUS
    # saves the kernels a multiplication
    assert power(-256) < HALF


@pytest.mark.parametrize(
    ("d", "power_of_constant"), [(2, 4 / 3), (3, 2), (4, 4), (5, 8), (6, 64 / 3), (7, 64), (8, 256)]
)
def test_the_multiplier_passes_the_spectral_test(d, power_of_constant):
    # Knuth, The Art of Computer Programming, volume 2, 3.3.4: the shortest vector of integers s with
    # sum s_i m**i = 0 mod 2**64, over the longest possible by Hermite's constant
    basis = [[int(i == j) for j in range(d)] for i in range(d)]
    for i in range(1, d):
        basis[i][0] = -power(i)
    basis[0][0] = MODULUS
    reduced = DomainMatrix(basis, (d, d), ZZ).lll().to_list()
    vectors = (
        [sum(c * int(row[j]) for c, row in zip(coefficients, reduced, strict=True)) for j in range(d)]
        for coefficients in product((-1, 0, 1), repeat=d)
    )
    shortest = min(filter(None, (sum(x * x for x in vector) for vector in vectors)))
    longest = power_of_constant ** (1 / (2 * d)) * MODULUS ** (1 / d)
    assert 0.7 < shortest**0.5 / longest <= 1


@given(words, st.integers(0, 2**40))
def test_powers_are_those_of_the_multiplier(a, b):
    assert power(a) == pow(MULTIPLIER, a, MODULUS)
    assert power(a) * power(-a) % MODULUS == 1
    assert power(a + b) == power(a) * power(b) % MODULUS
    assert geometric(a % 100) == sum(power(i) for i in range(a % 100)) % MODULUS
    assert geometric(a + b) == (geometric(a) + power(a) * geometric(b)) % MODULUS


@pytest.mark.parametrize("odd", [1, 3, 2**20 + 1])
def test_differences_of_weights_have_the_twos_of_the_distance(odd):
    for k in range(40):
        assert twos(geometric(odd * 2**k)) == k
        assert twos(geometric(1000 + odd * 2**k) - geometric(1000)) == k


@given(words)
def test_words_are_mixed_one_to_one(word):
    assert mix(word) == mixed(word)
    assert unmixed(mixed(word)) == word
    assert mixed(unmixed(word)) == word


@given(words, words)
def test_mixing_keeps_exclusive_ors(a, b):
    assert mixed(a ^ b) == mixed(a) ^ mixed(b)


# rows and strings


@given(st.integers(0, 2**40), words, words)
def test_a_row_and_a_string_hold_a_fingerprint(n_bytes, a, b):
    fingerprint = Fingerprint(n_bytes, a, b)
    row = fingerprint.row
    assert torch.tensor(row, dtype=torch.int64).tolist() == row
    assert Fingerprint.of_row(row) == fingerprint
    text = str(fingerprint)
    assert len(text) == 32
    assert (int(text[:16], 16), int(text[16:], 16)) == (a, b)
    assert signed(a) % MODULUS == a


def test_a_row_with_a_negative_size_has_no_fingerprint():
    assert Fingerprint.of_row([-1, 0, 0]) is None
    assert Fingerprint.of_row([0, 0, 0]) == Fingerprint(0, 0, 0)


# the merge law


def merged_by_torch(a: Fingerprint, b: Fingerprint) -> Fingerprint | None:
    rows = [torch.tensor(part.row, dtype=torch.int64) for part in (a, b)]
    return Fingerprint.of_row(merge_fingerprints(*rows).tolist())


@given(st.binary(max_size=100), st.integers(0, 100))
def test_parts_merge_into_the_whole(data, cut):
    cut = min(cut // 8 * 8, len(data) // 8 * 8)
    first, second = fingerprints.of_bytes(data[:cut]), fingerprints.of_bytes(data[cut:])
    assert first.then(second) == fingerprints.of_bytes(data)
    assert merged_by_torch(first, second) == fingerprints.of_bytes(data)


def test_every_cut_of_a_tensor_gives_the_same():
    data = fingerprints.bytes_of(fingerprints.random_bits(torch.bfloat16, 1003))
    whole = fingerprints.of_bytes(data)
    cuts = range(0, len(data), 8)
    firsts = [fingerprints.of_bytes(data[:cut]) for cut in cuts]
    seconds = [fingerprints.of_bytes(data[cut:]) for cut in cuts]
    assert {a.then(b) for a, b in zip(firsts, seconds, strict=True)} == {whole}
    a, b = (torch.tensor([part.row for part in parts]) for parts in (firsts, seconds))
    assert merge_fingerprints(a, b).tolist() == [whole.row] * len(cuts)
    of_pairs = merge_fingerprints(a[:250].view(-1, 2, 3), b[:250].view(-1, 2, 3))
    assert of_pairs.tolist() == [[whole.row] * 2] * 125


@given(st.integers(0, 2**POSITION_BITS - 1), st.integers(0, 2**30), *[words] * 4)
def test_parts_of_any_size_merge_alike(count, n_bytes, a, b, c, d):
    first, second = Fingerprint(8 * count, a, b), Fingerprint(n_bytes, c, d)
    weighted_sum = (b + geometric(count) * c + power(count) * d) % MODULUS
    expected = Fingerprint(8 * count + n_bytes, (a + c) % MODULUS, weighted_sum)
    assert first.then(second) == expected
    assert merged_by_torch(first, second) == expected


def test_a_part_far_away_is_merged():
    n = 2**36 + 1
    first, second = Fingerprint(8 * n, 1, 1), Fingerprint(8, 3, 3)
    expected = Fingerprint(8 * n + 8, 4, (1 + 3 * geometric(n) + 3 * power(n)) % MODULUS)
    assert first.then(second) == merged_by_torch(first, second) == expected


@given(*[st.integers(0, 2**30).map(lambda n: 8 * n)] * 2, *[words] * 6)
def test_merging_is_associative(size, other, a, b, c, d, e, f):
    x, y, z = Fingerprint(size, a, b), Fingerprint(other, c, d), Fingerprint(5, e, f)
    assert x.then(y).then(z) == x.then(y.then(z))
    assert x.then(Fingerprint(0, 0, 0)) == x
    assert Fingerprint(0, 0, 0).then(x) == x


@pytest.mark.parametrize("n_bytes", [1, 4, 7, 9, 8 * 2**33 + 2])
def test_a_part_that_does_not_end_with_a_word_is_refused(n_bytes):
    first, second = Fingerprint(n_bytes, 1, 1), Fingerprint(8, 2, 2)
    with pytest.raises(ValueError, match=rf"the first part has {n_bytes} bytes, .* take the fingerprint of"):
        first.then(second)
    assert merged_by_torch(first, second) is None
    # the order matters: as a second part it is welcome
    assert second.then(first) == merged_by_torch(second, first)


def test_rows_without_a_fingerprint_stay_without():
    some, none = torch.tensor([8, 5, 6]), torch.tensor([-1, 5, 6])
    for a, b in ((some, none), (none, some), (none, none)):
        assert merge_fingerprints(a, b).tolist() == [-1, 0, 0]


# The guarantee. These tests know nothing but the definition; tests/ops/test_fingerprints.py has tensors.


@st.composite
def one_changed_half(draw):
    """A word, and that word with another lower or upper half."""
    word = draw(words)
    pattern = draw(st.one_of(st.integers(1, HALF - 1), st.integers(0, 31).map(lambda bit: 1 << bit)))
    return word, word ^ (pattern << draw(st.sampled_from((0, 32))))


@given(words, words)
def test_a_change_of_one_word_changes_the_word_sum(before, after):
    assert (mixed(after) - mixed(before)) % MODULUS != 0 or before == after


@given(one_changed_half())
def test_a_changed_half_of_a_word_is_a_difference_with_few_twos(change):
    before, after = change
    assert twos(mixed(after) - mixed(before)) <= 32


# distances that a power of two divides are the hardest
distances = st.one_of(
    st.integers(1, MOST_WORDS - 1),
    st.integers(0, 31).flatmap(
        lambda k: st.integers(0, (MOST_WORDS // 2**k - 2) // 2).map(lambda i: (2 * i + 1) * 2**k)
    ),
)


def difference(changes: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """Return by how much the changes of words, by position, change both sums."""
    found = [(i, mixed(after) - mixed(before)) for i, (before, after) in changes.items()]
    return sum(d for _, d in found) % MODULUS, sum(geometric(i + 1) * d for i, d in found) % MODULUS


@given(distances, st.integers(0, 2**20), one_changed_half(), one_changed_half(), st.booleans())
def test_changed_halves_of_two_words_are_detected(distance, first, change, other, is_swap):
    # a swap leaves the word sum as it is
    other = (change[1], change[0]) if is_swap else other
    first %= MOST_WORDS - distance
    assert difference({first: change, first + distance: other}) != (0, 0)


@given(distances, st.integers(0, 32), st.integers(0, 2**31), st.sampled_from((-1, 1)))
def test_opposite_differences_are_detected_at_any_distance(distance, k, odd, sign):
    d = sign * (2 * odd + 1) * 2**k
    assert twos(d * geometric(distance)) < 64


def test_opposite_powers_of_two_are_detected_at_every_distance_with_many_twos():
    for k in range(33):
        for t in range(32):
            assert 2**k * geometric(2**t) % MODULUS != 0
            assert twos(2**k * geometric(MOST_WORDS - 2**t)) == k + t < 64


@given(st.integers(1, HALF - 1), words)
def test_one_pattern_in_both_halves_changes_the_lower_half(pattern, word):
    # so a fault that hits all elements alike is detected: n equal differences add up to a multiple of 2**64
    # only for n of 2**33 words
    assert twos(mixed(word ^ (pattern << 32 | pattern)) - mixed(word)) < 32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("n", [8, 64, 4096, 2**20 + 4])
def test_a_negated_tensor_is_another(dtype, n):
    tensors = [torch.randn(n).to(dtype), torch.ones(n, dtype=dtype), torch.zeros(n, dtype=dtype)]
    stats = gm.collect([*tensors, *[-x for x in tensors]], fingerprint=True)
    assert len(set(map(tuple, stats.fingerprints.tolist()))) == 6


# what is not guaranteed, as the page says


def test_the_limit_of_32_gib_is_sharp():
    # a swap of 0 and the smallest subnormal, as the second fp32 numbers of two words
    change, back = (0, 2**32), (2**32, 0)
    assert difference({0: change, MOST_WORDS // 2: back}) == (0, MODULUS // 2)
    assert difference({0: change, MOST_WORDS: back}) == (0, 0)


def test_three_words_can_be_changed_without_a_trace():
    # m, -(m + 1) and 1 are the coefficients of (z - 1)(z - m)
    before = fingerprints.random_bits(torch.float32, 6)
    x = [word % MODULUS for word in before.view(torch.int64).tolist()]
    for d in (1, 2**31 + 12345):
        deltas = (MULTIPLIER * d, -(MULTIPLIER + 1) * d, d)
        y = [unmixed((mixed(word) + delta) % MODULUS) for word, delta in zip(x, deltas, strict=True)]
        after = torch.tensor([signed(word) for word in y]).view(torch.float32)
        assert all(a != b for a, b in zip(x, y, strict=True))
        assert fingerprints.of_tensor(after) == fingerprints.of_tensor(before)
        stats = gm.collect({"before": before, "after": after}, fingerprint=True).materialize()
        assert stats["before"].fingerprint == stats["after"].fingerprint


def is_missed(distance: int, before: tuple[int, int], after: tuple[int, int]) -> bool:
    pairs = zip(before, after, strict=True)
    return difference(dict(zip((0, distance), pairs, strict=True))) == (0, 0)


@given(distances, *[words] * 4, st.integers(1, HALF - 1), st.integers(0, 31), st.booleans())
def test_two_changed_words_are_missed_exactly_if_the_page_says_so(
    distance, a, b, other_a, other_b, upper, k, is_swap
):
    # the changes that leave the lower half of w as it is
    upper = ((upper | 1) << k) % HALF
    pattern = unmixed(upper << 32)
    assert pattern >> 32 == upper
    assert pattern.bit_count() >= 2 or upper == 1
    before, after = ((a, a ^ pattern), (a ^ pattern, a)) if is_swap else ((a, b), (a ^ pattern, b ^ pattern))
    differences = [mixed(y) - mixed(x) for x, y in zip(before, after, strict=True)]
    assert twos(differences[0]) == 32 + twos(upper)
    expected = sum(differences) % MODULUS == 0 and twos(upper) + twos(distance) >= 32
    assert is_missed(distance, before, after) == expected
    # two arbitrary words
    if (a, b) != (other_a, other_b) and is_missed(distance, (a, b), (other_a, other_b)):
        assert (mixed(a) - mixed(other_a)) % HALF == (mixed(b) - mixed(other_b)) % HALF == 0


def test_elements_of_64_bits_can_be_changed_in_pairs_without_a_trace():
    before = torch.tensor([1.0, 2.0, -3.0, 4.0], dtype=torch.float64)
    flips = torch.tensor([signed(2**63 + 2**30), 0] * 2)
    flipped = (before.view(torch.int64) ^ flips).view(torch.float64)
    for x, y in (
        (before, flipped),
        (torch.view_as_complex(before.view(2, 2)), torch.view_as_complex(flipped.view(2, 2))),
        (before.view(torch.complex64), flipped.view(torch.complex64)),
    ):
        stats = gm.collect({"x": x, "y": y}, fingerprint=True).materialize()
        assert stats["x"].fingerprint == stats["y"].fingerprint
    # one of them, neighbors, or fewer bits of both, are detected
    one = torch.cat([flipped[:2], before[2:]])
    neighbors = (before.view(torch.int64) ^ flips.sort().values).view(torch.float64)
    fewer = (before.view(torch.int64) ^ (flips & 2**30)).view(torch.float64)
    found = gm.collect([before, one, neighbors, fewer, before.neg()], fingerprint=True).materialize()
    first, *others = found.rows()
    assert all(row.fingerprint != first.fingerprint for row in others)


@given(st.sets(st.integers(0, 40), min_size=2, max_size=5))
def test_random_changes_are_missed_with_the_probability_of_the_page(places):
    """For differences in Z/2**64, the sums take 2**(128 - g) values; g: the least v2 of two distances."""
    least = min(twos(i - j) for i in places for j in places if i != j)
    first = min(places)
    # the sums of the differences 1 at one place and -1 at another generate those with an unchanged word sum
    changes = [geometric(i + 1) - geometric(first + 1) for i in places if i != first]
    assert min(map(twos, changes)) == least
