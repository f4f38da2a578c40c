"""TensorStats: values by name, merging and grouping, and that it is a frozen, portable snapshot."""

from __future__ import annotations

import io
import math
import re

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import gradiometer as gm

RAW = ("numel", "sumsq", "sum", "n_zero", "n_nan", "n_posinf", "n_neginf", "abs_max")
DERIVED = ("n_inf", "n_nonfinite", "finite_norm", "norm", "rms", "mean", "std", "zero_fraction")

TENSORS = {
    "host.0.weight": torch.tensor([[3.0, -4.0], [0.0, 12.0]]),
    "host.0.bias": torch.tensor([0.0, -0.0]),
    "seed.weight": torch.tensor([1.0, math.nan, -math.inf, math.inf, -2.0, math.inf]),
    "seed.bias": torch.tensor([-8.0]),
    "none": torch.empty(0, 3),
}
FINITE = {
    "host.0.weight": [3.0, -4.0, 0.0, 12.0],
    "host.0.bias": [0.0, 0.0],
    "seed.weight": [1.0, -2.0],
    "seed.bias": [-8.0],
    "none": [],
}
NONFINITE = {"seed.weight": [math.nan, -math.inf, math.inf, math.inf]}


def stats_of_all() -> gm.TensorStats:
    return gm.collect(TENSORS)


def expected(name: str) -> dict[str, float]:
    """Compute the plain formulas in doubles."""
    finite, rest = FINITE[name], NONFINITE.get(name, [])
    n, n_nan, n_inf = len(finite), sum(map(math.isnan, rest)), sum(map(math.isinf, rest))
    sumsq = math.fsum(x * x for x in finite)
    mean = math.fsum(finite) / n if n else 0.0
    norm = math.nan if n_nan else math.inf if n_inf else math.sqrt(sumsq)
    return {
        "numel": n + len(rest),
        "sumsq": sumsq,
        "sum": math.fsum(finite),
        "n_zero": finite.count(0.0),
        "n_nan": n_nan,
        "n_posinf": rest.count(math.inf),
        "n_neginf": rest.count(-math.inf),
        "abs_max": max(map(abs, finite), default=0.0),
        "n_inf": n_inf,
        "n_nonfinite": len(rest),
        "finite_norm": math.sqrt(sumsq),
        "norm": norm,
        "rms": math.sqrt(sumsq / n) if n else 0.0,
        "mean": mean,
        "std": math.sqrt(math.fsum((x - mean) ** 2 for x in finite) / n) if n else 0.0,
        "zero_fraction": finite.count(0.0) / (n + len(rest)) if n + len(rest) else 0.0,
    }


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether both are equal bit for bit, or NaN in the same places."""
    return a.dtype == b.dtype and torch.equal(a.nan_to_num(nan=-7.0), b.nan_to_num(nan=-7.0))


def same_stats(a: gm.TensorStats, b: gm.TensorStats) -> bool:
    return (
        a.names == b.names
        and same(a.columns, b.columns)
        and torch.equal(a.flags, b.flags)
        and a.flags.dtype == b.flags.dtype
        and a.thresholds == b.thresholds
    )


# values by name


@pytest.mark.parametrize("field", RAW + DERIVED)
def test_every_column_and_derived_value_is_a_property(field: str) -> None:
    stats = stats_of_all()
    values = getattr(stats, field)
    assert values.shape == (len(TENSORS),)
    assert values.dtype == torch.float64
    for name, value in zip(stats.names, values.tolist(), strict=True):
        right = expected(name)[field]
        if math.isnan(right):
            assert math.isnan(value)
        elif field in {"rms", "mean", "std", "norm", "finite_norm"} and math.isfinite(right):
            # sums of small integers are exact; what remains are the roundings of one or two
            # divisions and a root, and of the subtraction under the root of std
            assert abs(value - right) <= 4 * 2**-53 * (abs(right) + (expected(name)["rms"] if right else 0))
        else:
            assert value == right


def test_names_are_a_tuple_and_flags_a_bit_mask() -> None:
    stats = stats_of_all()
    assert stats.names == tuple(TENSORS)
    assert stats.flags.dtype == torch.int32
    dead, bad = gm.Flag.DEAD | gm.Flag.VANISHING, gm.Flag.NAN | gm.Flag.INF | gm.Flag.EXPLODING
    assert stats.flags.tolist() == [0, dead, bad, 0, 0]
    assert stats.thresholds == gm.Thresholds()
    assert stats.measured is True


@pytest.mark.parametrize(
    ("tensors", "found"),
    [
        ([torch.ones(2), torch.zeros(3)], 0.0),
        ([torch.full((2,), 3e38)], 0.0),
        ([torch.empty(0)], 0.0),
        ([], 0.0),
        ([torch.ones(2), torch.tensor([1.0, math.nan])], 1.0),
        ([torch.tensor([math.inf]), torch.ones(2)], 1.0),
        ([torch.tensor(-math.inf)], 1.0),
    ],
)
def test_found_inf_is_what_grad_scaler_expects(tensors: list[torch.Tensor], found: float) -> None:
    found_inf = gm.collect(tensors).found_inf
    assert found_inf.shape == ()
    assert found_inf.dtype == torch.float32
    assert found_inf.item() == found


# groups


def grouped(rules: object) -> dict[str, list[float]]:
    stats = stats_of_all().group(rules)
    return {
        name: [int(x) for x in row.tolist()]
        for name, row in zip(stats.names, stats.columns[:, [0, 3, 4]], strict=True)
    }


@pytest.mark.parametrize(
    "rule",
    [r"^host\.", re.compile(r"^HOST\.", re.IGNORECASE), lambda name: name.startswith("host.")],
    ids=["regex", "compiled regex", "predicate"],
)
def test_a_group_is_a_regex_or_a_predicate_of_the_name(rule: object) -> None:
    stats = stats_of_all().group({"host": rule})
    assert type(stats) is gm.TensorStats
    assert stats.names == ("host",)
    # 6 elements, squares 9 + 16 + 144, sum 11, 3 zeros
    assert stats.columns.tolist() == [[6.0, 169.0, 11.0, 3.0, 0.0, 0.0, 0.0, 12.0]]
    assert stats.norm.tolist() == [13.0]
    assert stats.flags.tolist() == [0]
    assert stats.flags.dtype == torch.int32


def test_a_regex_is_searched_anywhere_in_the_name() -> None:
    # elements, zeros, NaN of both biases
    assert grouped({"bias": "bias"}) == {"bias": [3, 2, 0]}
    assert grouped({"b": r"s$"}) == {"b": [3, 2, 0]}


def test_groups_may_overlap_be_empty_and_leave_rows_out() -> None:
    assert grouped(
        {"all": "", "weights": "weight$", "nobody": "^weight", "seed": "^seed", "0d": "^none"}
    ) == {
        "all": [13, 3, 1],
        "weights": [10, 1, 1],
        "nobody": [0, 0, 0],
        "seed": [7, 0, 1],
        "0d": [0, 0, 0],
    }
    stats = stats_of_all().group({"nobody": "^weight", "none": "none"})
    assert stats.columns.tolist() == [[0.0] * len(RAW)] * 2
    assert stats.flags.tolist() == [0, 0]
    assert stats.norm.tolist() == [0.0, 0.0]


def test_groups_can_be_grouped() -> None:
    stats = stats_of_all()
    layers = stats.group({"host": "^host", "seed": "^seed", "none": "^none"})
    assert same(layers.group({"both": "o|s"}).columns[0], stats.total)
    assert layers.group({"h": "host"}).names == ("h",)


def test_flags_of_a_group_are_those_of_the_merged_row() -> None:
    thresholds = gm.Thresholds(exploding=4.5, vanishing=1e-3, dead=0.5)
    stats = gm.collect(
        {
            "a.0": torch.full((9,), 1.0),
            "a.1": torch.full((16,), 1.0),
            "b.0": torch.zeros(3),
            "b.1": torch.tensor([4.0, 0.0]),
            "c.0": torch.tensor([math.inf]),
        },
        thresholds=thresholds,
    )
    assert stats.flags.tolist() == [
        0,
        0,
        gm.Flag.VANISHING | gm.Flag.DEAD,
        gm.Flag.DEAD,
        gm.Flag.INF | gm.Flag.EXPLODING,
    ]
    groups = stats.group({"a": "^a", "b": "^b", "bc": "^[bc]"})
    assert groups.thresholds is thresholds
    # a: norm 5 > 4.5; b: four of five are zeros; with c it is four of six, and one is infinite
    assert groups.flags.tolist() == [
        gm.Flag.EXPLODING,
        gm.Flag.DEAD,
        gm.Flag.INF | gm.Flag.EXPLODING | gm.Flag.DEAD,
    ]


# merge


def test_a_merge_takes_flags_anew_from_its_own_thresholds() -> None:
    thresholds = gm.Thresholds(exploding=4.5)
    three, four = torch.full((1,), 3.0), torch.full((1,), 4.0)
    mine, other = gm.collect({"w": three}, thresholds=thresholds), gm.collect({"w": four})
    assert mine.flags.tolist() == other.flags.tolist() == [0]
    merged = mine.merge(other)
    assert merged.norm.tolist() == [5.0]
    assert merged.flags.tolist() == [gm.Flag.EXPLODING]
    assert merged.thresholds is thresholds
    assert other.merge(mine).flags.tolist() == [0]
    # half of the elements are nonzero now: no longer dead
    dead = gm.collect({"w": torch.zeros(2)})
    assert dead.flags.tolist() == [gm.Flag.VANISHING | gm.Flag.DEAD]
    assert dead.merge(other).flags.tolist() == [0]
    assert dead.merge(dead).flags.tolist() == dead.flags.tolist()


# snapshots


def test_later_changes_of_gradients_change_neither_stats_nor_report() -> None:
    model = nn.Sequential(nn.Linear(3, 70), nn.Linear(70, 80))  # 5600 weights: more than one row
    model(torch.ones(2, 3)).square().mean().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grads, weights = gm.collect_grads(model), gm.collect_weights(model)
    pending, report = grads.materialize_async(), grads.materialize()
    kept = [x.clone() for x in (grads.columns, grads.flags, weights.columns, weights.flags)]
    norms = grads.norm.tolist()

    optimizer.step()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    for p in model.parameters():
        p.grad.fill_(math.nan)
    optimizer.zero_grad(set_to_none=False)
    optimizer.zero_grad()

    now = [grads.columns, grads.flags, weights.columns, weights.flags]
    assert all(torch.equal(a, b) for a, b in zip(now, kept, strict=True))
    for later in (report, pending.result(), grads.materialize()):
        assert [row.norm for row in later.rows()] == norms
        assert later.found_inf is False
    assert not torch.equal(gm.collect_weights(model).columns, weights.columns)


def test_measuring_again_does_not_change_earlier_stats() -> None:
    x = torch.ones(5003)
    first = gm.collect({"x": x})
    kept = first.columns.clone()
    x.fill_(2.0)
    second = gm.collect({"x": x})
    assert torch.equal(first.columns, kept)
    assert second.sum.tolist() == [10006.0]


def test_derived_values_do_not_write_to_the_columns() -> None:
    stats = stats_of_all()
    kept = stats.columns.clone()
    for field in DERIVED:
        getattr(stats, field).fill_(-1.0)
    stats.total.fill_(-1.0)
    stats.group({"one": "^seed.bias$"}).columns.fill_(-1.0)
    assert same(stats.columns, kept)


# a pytree


def test_a_round_trip_through_pytree_gives_the_same_stats() -> None:
    thresholds = gm.Thresholds(exploding=3.0)
    stats = gm.collect(TENSORS, thresholds=thresholds)
    leaves, spec = pytree.tree_flatten(stats)
    assert same_stats(pytree.tree_unflatten(leaves, spec), stats)
    # thresholds are part of the structure
    assert spec == pytree.tree_structure(gm.collect(TENSORS, thresholds=thresholds))
    assert spec != pytree.tree_structure(gm.collect(TENSORS))


@pytest.mark.parametrize(
    "rules",
    [
        {"host": r"^host[.]", "rest": r"^(?!host[.])"},
        {"host": re.compile(r"^host\."), "rest": re.compile(r"^(?!host\.)")},
        {"host": lambda name: name.startswith("host."), "rest": lambda name: not name.startswith("host.")},
    ],
    ids=["regex", "compiled regex", "predicate"],
)
def test_stats_are_grouped_inside_a_compiled_function(rules: object) -> None:
    re.purge()  # clear the cache of an eager call
    stats = stats_of_all()
    groups = torch.compile(lambda x: x.group(rules), backend="aot_eager", fullgraph=True)(stats)
    assert same_stats(groups, stats.group(rules))
    assert groups.norm[0].item() == 13.0


# copies and files


def test_stats_load_safely_where_their_types_are_allowed() -> None:
    stats = stats_of_all()
    file = io.BytesIO()
    torch.save({"step": 3, "stats": stats}, file)
    file.seek(0)
    with torch.serialization.safe_globals([gm.TensorStats, gm.Thresholds]):
        assert same_stats(torch.load(file, weights_only=True)["stats"], stats)


@pytest.mark.parametrize(
    ("rules", "error", "says"),
    [
        ([("a", "x"), ("a", "y")], ValueError, "unique strings"),
        ({1: "x"}, ValueError, "unique strings"),
        ({"a": 3}, TypeError, "rule of 'a'"),
        (len, TypeError, "a mapping from group names"),
        (r"^layers", TypeError, "a mapping from group names"),
    ],
    ids=["name twice", "name of a number", "rule of a number", "function", "pattern"],
)
def test_a_group_that_is_not_one_is_refused(rules: object, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=f"^group: .*{says}"):
        gm.collect({"x": torch.ones(2)}).group(rules)
