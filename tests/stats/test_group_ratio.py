"""The ratio of two groups, normalized by parameters: defined for every input."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import gradiometer as gm
from support.compiling import graphs, inductor_if_deep, no_recompile
from support.fake_device import DEVICES, device_of, watch

GROUPS = {
    "host": torch.full((16,), 2.0),
    "seed": torch.full((4,), 0.5),
    "dead": torch.zeros(3),
    "tiny": torch.full((2,), 1e-9),
    "none": torch.empty(0),
    "nan": torch.tensor([1.0, math.nan]),
    "inf": torch.tensor([1.0, math.inf, 2.0]),
}


def grouped(tensors=GROUPS):
    return gm.collect({f"{name}.w": x for name, x in tensors.items()}).group(
        {name: rf"^{name}\." for name in tensors}
    )


def test_it_is_the_ratio_of_norms_by_the_root_of_the_number_of_elements():
    stats = grouped()
    # the ratio of root mean squares, which compares groups of different sizes
    assert gm.group_ratio(stats, "seed", "host").item() == 0.25
    assert gm.group_ratio(stats, "host", "seed").item() == 4.0
    assert gm.group_ratio(stats, "host", "host").item() == 1.0
    assert gm.group_ratio(stats, "host", "seed").dtype == torch.float64


def expected(a, b):
    """Return the IEEE quotient, but 0 if both norms are finite and one of them counts as zero."""
    x, y = (math.nan if name == "nan" else math.inf if name == "inf" else finite(name) for name in (a, b))
    if math.isfinite(x) and math.isfinite(y):
        return x / y if x and y else 0.0
    if math.isnan(x) or math.isnan(y) or x == y:
        return math.nan
    return x if x == math.inf else 0.0


def finite(name):
    x = GROUPS[name]
    norm = math.sqrt(math.fsum((x.double() ** 2).tolist()))
    return norm / math.sqrt(len(x)) if norm >= 1e-8 else 0.0


@pytest.mark.parametrize(("a", "b"), list(itertools.product(GROUPS, repeat=2)))
def test_every_pair_has_a_defined_result_and_none_raises(a, b):
    ratio = gm.group_ratio(grouped(), a, b).item()
    assert ratio == pytest.approx(expected(a, b), rel=1e-14, nan_ok=True)


def test_many_slots_against_one_host_in_one_call():
    slots = {f"slot{i}": torch.full((i + 1,), float(i)) for i in range(50)}
    stats = grouped(GROUPS | slots)
    ratios = gm.group_ratio(stats, list(slots), "host")
    assert ratios.shape == (50,)
    assert ratios.tolist() == pytest.approx([i / 2.0 for i in range(50)], rel=1e-14)
    assert gm.group_ratio(stats, [], "host").shape == (0,)


def test_the_floor_can_be_chosen():
    stats = grouped()
    assert gm.group_ratio(stats, "tiny", "host").item() == 0.0
    assert gm.group_ratio(stats, "tiny", "host", floor=0.0).item() == pytest.approx(5e-10, rel=1e-7)
    assert gm.group_ratio(stats, "seed", "host", floor=5.0).item() == 0.0
    # with finite norms it stays finite
    assert gm.group_ratio(stats, "dead", "dead", floor=0.0).item() == 0.0
    assert gm.group_ratio(stats, ["host", "none"], "dead", floor=0.0).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("floor", [-1.0, math.nan])
def test_a_floor_that_is_none_is_refused(floor):
    with pytest.raises(ValueError, match="floor must be a non-negative number"):
        gm.group_ratio(grouped(), "seed", "host", floor=floor)


def test_a_group_that_is_not_there_is_named():
    with pytest.raises(KeyError, match=r"no group 'sed'; available: 'host', 'seed'"):
        gm.group_ratio(grouped(), "sed", "host")
    with pytest.raises(KeyError, match=r"no group 'hst'"):
        gm.group_ratio(grouped(), ["seed"], "hst")
    with pytest.raises(KeyError, match="available: none"):
        gm.group_ratio(gm.collect([]), "seed", "host")


def test_it_works_inside_a_compiled_step_from_one_read():
    def step(tensors):
        stats = gm.collect(tensors).group({"host": r"^host", "seed": r"^seed", "rest": r"^(nan|inf)"})
        return gm.group_ratio(stats, ["seed", "rest"], "host")

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    named = {f"{name}.w": x for name, x in GROUPS.items()}
    assert torch.equal(compiled(named).nan_to_num(nan=-1), step(named).nan_to_num(nan=-1))
    torch._dynamo.reset()


def test_a_floor_that_changes_in_a_compiled_step_is_an_input_of_it():
    stats = grouped()
    compiled = torch.compile(
        lambda floor: gm.group_ratio(stats, "seed", "host", floor=floor), fullgraph=True, backend="aot_eager"
    )
    assert [compiled(floor).item() for floor in (1e-8, 5.0, 0.5)] == [0.25, 0.0, 0.25]
    torch._dynamo.reset()


@pytest.mark.parametrize("what", [None, "stats", gm.collect([]).materialize()], ids=repr)
def test_what_is_no_stats_is_refused(what):
    with pytest.raises(TypeError, match=r"expected the TensorStats .*, or two norms .*, got "):
        gm.group_ratio(what, "seed", "host")


def test_rows_that_are_no_groups_are_not_all_listed():
    stats = gm.collect([torch.ones(1)] * 50)
    with pytest.raises(
        KeyError, match=r"no group 'seed'; available: '0', .*'9' and 40 more; if these are not groups"
    ):
        gm.group_ratio(stats, "seed", "0")


# plain norms and numbers of elements


def norm_and_size(name):
    x = GROUPS[name]
    return gm.total_norm([x]), x.numel()


@pytest.mark.parametrize(("a", "b"), list(itertools.product(GROUPS, repeat=2)))
def test_of_plain_numbers_it_is_the_same(a, b):
    (norm_a, n_a), (norm_b, n_b) = norm_and_size(a), norm_and_size(b)
    of_groups = gm.group_ratio(grouped(), a, b)
    for found in (
        gm.group_ratio(norm_a, norm_b, n_a=n_a, n_b=n_b),
        gm.group_ratio(norm_a.item(), norm_b.item(), n_a=float(n_a), n_b=torch.tensor(n_b)),
        gm.group_ratio(norm_a.item(), norm_b, n_a=torch.tensor(float(n_a)), n_b=n_b),
    ):
        assert (found.shape, found.dtype) == ((), torch.float64)
        assert torch.equal(found.nan_to_num(nan=-1.0), of_groups.nan_to_num(nan=-1.0))


def test_of_tensors_the_shapes_broadcast():
    slots = torch.arange(5.0)
    ratios = gm.group_ratio(slots, 8.0, n_a=torch.arange(5), n_b=16)
    assert ratios.tolist() == pytest.approx([0.0, 0.5, *(i / math.sqrt(i) / 2.0 for i in (2.0, 3.0, 4.0))])
    assert gm.group_ratio(slots.requires_grad_(), 8.0, n_a=1, n_b=1).requires_grad is False
    assert gm.group_ratio(3, 4, n_a=1, n_b=1, floor=3.5).item() == 0.0
    assert gm.group_ratio(torch.tensor([3.0]).half(), 1e300, n_a=1, n_b=1, floor=0.0).item() == 3.0 / 1e300


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: gm.group_ratio(1.0, 2.0), TypeError, r"need their numbers of elements; call"),
        (lambda: gm.group_ratio(1.0, 2.0, n_a=3), TypeError, "need their numbers of elements"),
        (lambda: gm.group_ratio(1.0, "a", "b"), TypeError, "need their numbers of elements"),
        (lambda: gm.group_ratio(1.0, "a", n_a=1, n_b=1), TypeError, "norm_b must be a number .*, got str"),
        (
            lambda: gm.group_ratio(-1.0, 2.0, n_a=1, n_b=1),
            ValueError,
            "norm_a must be a non-negative number, got -1.0",
        ),
        (lambda: gm.group_ratio(1.0, 2.0, n_a=1, n_b=-2), ValueError, "n_b must be .* got -2"),
        (lambda: gm.group_ratio(1.0, 2.0, n_a=math.nan, n_b=1), ValueError, "n_a must be .* got nan"),
        (
            lambda: gm.group_ratio(1j * torch.ones(()), 2.0, n_a=1, n_b=1),
            TypeError,
            "norm_a must be real, got .*complex64",
        ),
        (lambda: gm.group_ratio(grouped(), "seed", "host", n_a=1), TypeError, "omit n_a and n_b"),
    ],
    ids=[*"123456789"],
)
def test_what_are_no_norms_and_numbers_of_elements_is_refused(call, error, said):
    with pytest.raises(error, match=f"^group_ratio: .*{said}"):
        call()


@pytest.mark.parametrize("device", DEVICES)
def test_of_norms_it_is_on_their_device_without_a_wait(device):
    with device_of(device) as d:
        norms, sizes = torch.ones(3, device=d), torch.ones(3, device=d, dtype=torch.int64)
        with watch() as seen:
            found = gm.group_ratio(norms, 2.0, n_a=sizes, n_b=4)
        assert (found.device.type, found.shape) == (device, (3,))
        assert (seen.to_host, seen.to_device) == ([], [])


@pytest.mark.usefixtures("_dynamo")
@inductor_if_deep
def test_of_norms_it_works_inside_a_compiled_step_and_numbers_may_change(backend):
    def step(x, y, norm):
        return gm.group_ratio(gm.total_norm([x]), norm, n_a=x.numel(), n_b=y.numel())

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    x, y = torch.randn(5), torch.randn(7)
    for norm in (1.0, 2.5):
        compiled(x, y, norm)
    with no_recompile():
        for i in range(3, 23):
            torch.testing.assert_close(compiled(x, y, 0.1 * i), step(x, y, 0.1 * i), rtol=1e-14, atol=0.0)
    assert graphs() <= 2
