"""What the statistics of every schema do alike: values, groups, merges, trees, copies, and reports."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle

import pytest
import torch
from torch.utils import _pytree as pytree

import gradiometer as gm
from gradiometer.distributed import UNKNOWN
from gradiometer.distributed.sharding import Mesh, Sharding, ShardSpec
from gradiometer.stats import NamedStats, report_of, stats_of
from support.gradients import bit_patterns
from support.kinds import COLLECT, NAMES, SCHEMAS, SIGNS, TENSORS_BY_NAME, stats_of_kind

CLASSES = {
    "tensors": (gm.TensorStats, gm.Report),
    "pairs": (gm.PairStats, gm.PairReport),
    "exponents": (gm.ExponentStats, gm.PrecisionReport),
    "activations": (gm.ActivationStats, gm.ActivationReport),
}


@pytest.fixture(params=SCHEMAS)
def kind(request):
    return request.param


@pytest.fixture
def stats(kind):
    return stats_of_kind(kind)


def same(a, b):
    """Return whether two stats are the same to the bit."""
    leaves, others = pytree.tree_leaves(a), pytree.tree_leaves(b)
    return (
        type(a) is type(b)
        and pytree.tree_structure(a) == pytree.tree_structure(b)
        and [x.dtype for x in leaves] == [x.dtype for x in others]
        and bit_patterns(leaves) == bit_patterns(others)
    )


def saved(x):
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def reduced(stats, origin=(-1.0, -1.0, 1.0)):
    return dataclasses.replace(stats, origin=torch.tensor(origin, dtype=torch.float64), local=stats)


# values


def test_a_schema_has_a_class_of_stats(kind):
    schema = SCHEMAS[kind]
    columns = torch.zeros((2, schema.width), dtype=schema.dtype)
    made = stats_of(schema, ("x", "y"), columns)
    assert (made.schema, made.names, made.columns) == (schema, ("x", "y"), columns)
    assert type(made) is type(stats_of_kind(kind))
    assert isinstance(made, NamedStats)
    if kind in CLASSES:
        assert type(made) is CLASSES[kind][0]


def test_every_value_is_a_property_and_has_a_total(kind, stats):
    schema = SCHEMAS[kind]
    names = [name for name in schema.attributes if name != "total"]
    assert len(names) > 3
    for name in names:
        assert bit_patterns([getattr(stats, name)]) == bit_patterns([schema.value(stats.columns, name)])
        assert bit_patterns([stats.total_value(name)]) == bit_patterns([schema.value(stats.total, name)])
        assert getattr(stats, name).shape == (3,)
    assert bit_patterns([stats.total]) == bit_patterns([schema.merge_rows(stats.columns)])
    with pytest.raises(KeyError, match="there is no 'nothing' of"):
        stats.total_value("nothing")


def test_type_checkers_and_help_know_the_values(kind, stats):
    schema = SCHEMAS[kind]
    for name in schema.attributes:
        assert getattr(type(stats), name).__doc__.startswith(schema[name].meaning)
    typed = {
        name
        for base in type(stats).__mro__
        if base.__module__.endswith(".device_values")
        for name in vars(base).get("__annotations__", ())
    }
    assert typed <= set(schema.attributes)
    if kind in {"tensors", "activations", "exponents"}:
        assert typed == set(schema.attributes)


def test_the_repr_is_one_line_that_never_waits(kind, stats):
    noun = {"pairs": "pair", "activations": "row", "signs": "row"}.get(kind, "tensor")
    end = ", on cpu; materialize() reads them>"
    name = type(stats).__name__
    assert repr(stats) == f"<{name}: 3 {noun}s{end}"
    assert repr(stats.group({"a": "^a"})) == f"<{name}: 1 {noun}{end}"
    assert repr(reduced(stats)) == f"<{name}: 3 {noun}s of all ranks{end}"
    local = dataclasses.replace(stats, sharding=UNKNOWN)
    assert repr(local) == f"<{name}: 3 {noun}s, this rank's shards only (reduce() merges them){end}"


def test_stats_are_frozen_and_equal_to_themselves_alone(kind, stats):
    for name in ("names", "columns", "local", SCHEMAS[kind].attributes[-1]):
        with pytest.raises(AttributeError):
            setattr(stats, name, None)
    assert stats == stats  # noqa: PLR0124
    assert stats != stats_of_kind(kind)
    assert len({stats, stats}) == 1


# groups and merges


def test_a_group_is_its_rows_merged(kind, stats):
    schema = SCHEMAS[kind]
    grouped = stats.group({"all": "", "a": "^a", "names": ["b.w"], "none": "^x"})
    assert type(grouped) is type(stats)
    assert grouped.names == ("all", "a", "names", "none")
    rows = [schema.merge_rows(stats.columns[rows]) for rows in ([0, 1, 2], [0, 1], [2], [])]
    assert bit_patterns([grouped.columns]) == bit_patterns([torch.stack(rows)])
    assert not grouped.columns[3].any()
    assert same(stats.by_module(1), stats.group({"a": "^a", "b": "^b"}))
    assert stats.by_module(0).names == ("",)
    assert stats.group({}).columns.shape == (0, schema.width)
    assert not stats.group({}).measured


def test_groups_of_all_ranks_keep_the_first_rank(stats):
    grouped = reduced(stats, (-1.0, -2.0, 3.0)).group({"a": "^a", "b": "^b", "only": "a.b", "none": "x"})
    assert grouped.origin.tolist() == [-1.0, 3.0, -1.0, -1.0]
    assert grouped.local is None
    assert reduced(stats, (-1.0, -2.0, 3.0)).by_module(1).origin.tolist() == [-1.0, 3.0]


def test_a_merge_is_as_if_all_had_been_measured_together(kind, stats):
    other, schema = stats_of_kind(kind, 1), SCHEMAS[kind]
    merged = stats.merge(other)
    assert type(merged) is type(stats)
    assert bit_patterns([merged.columns]) == bit_patterns([schema.merge(stats.columns, other.columns)])
    together = {name: torch.cat([x[name] for x in TENSORS_BY_NAME]) for name in NAMES}
    if kind != "activations":
        # small integers and powers of two: sums are exact in any order
        assert bit_patterns([merged.columns]) == bit_patterns([COLLECT[kind](together).columns])
    both = reduced(stats).merge(reduced(other, (2.0, -2.0, 0.0)))
    assert both.origin.tolist() == [2.0, -1.0, 0.0]
    assert same(both.local, merged)
    # neither side has changed
    assert (same(stats, stats_of_kind(kind)), same(other, stats_of_kind(kind, 1))) == (True, True)
    assert not COLLECT[kind]({}).merge(COLLECT[kind]({})).measured


@pytest.mark.parametrize(
    ("there", "says"),
    [
        (["a.w", "x", "y"], "row 1 is 'a.b' in one and 'x' in the other"),
        (["a.b", "a.w", "b.w"], "row 0 is 'a.w' in one and 'a.b' in the other"),
        (["a.w"], "one has 3 rows and the other 1"),
        ([], "one has 3 rows and the other 0"),
    ],
)
def test_a_merge_of_other_names_is_refused_with_the_first_difference(kind, stats, there, says):
    other = COLLECT[kind]({name: torch.ones(1) for name in there})
    with pytest.raises(ValueError, match=rf"^merge: .*same names in the same order; {says}$"):
        stats.merge(other)


def test_a_merge_with_anything_else_is_refused(kind, stats):
    name = type(stats).__name__
    for other in (None, 3, stats.materialize(), stats_of_kind("pairs" if kind == "tensors" else "tensors")):
        with pytest.raises(TypeError, match=rf"^merge: expected {name}, got {type(other).__name__}"):
            stats.merge(other)
    with pytest.raises(ValueError, match="one of the two is of this rank only, and the other of all ranks"):
        stats.merge(reduced(stats))


# trees and copies


def test_a_round_trip_through_pytree_gives_the_same_stats(kind, stats):
    for each in (stats, reduced(stats), COLLECT[kind]({})):
        leaves, spec = pytree.tree_flatten(each)
        assert leaves[0] is each.columns
        # torch.export.save writes the structure of a program's outputs as JSON
        assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec
        assert same(pytree.tree_unflatten(leaves, spec), each)
        assert_plain(spec.context)
    assert pytree.tree_structure(stats) == pytree.tree_structure(stats_of_kind(kind, 1))
    assert pytree.tree_structure(stats) != pytree.tree_structure(stats.group(dict.fromkeys("xyz", "")))
    keys = [pytree.keystr(path) for path, _ in pytree.tree_leaves_with_path({"s": reduced(stats)})]
    assert [key for key in keys if "columns" in key] == ["['s'].columns", "['s'].local.columns"]


def test_the_structure_keeps_the_sharding(stats):
    specs = (ShardSpec((3,), "float32", 0, ("S(0)",)),) * 3
    stats = dataclasses.replace(stats, sharding=Sharding(NAMES, specs, (Mesh(("dp",), (2,), (1,)),)))
    leaves, spec = pytree.tree_flatten(stats)
    # strict torch.export can rebuild only plain values
    assert_plain(spec.context)
    assert pytree.tree_unflatten(leaves, spec).sharding == stats.sharding


def assert_plain(value):
    assert value is None or type(value) in {tuple, str, float, bool, int}, value
    for part in value if isinstance(value, tuple) else ():
        assert_plain(part)


def copies_of(stats):
    pickled = [] if stats.schema is SIGNS else [pickle.loads(pickle.dumps(stats)), saved(stats)]  # noqa: S301
    return [*pickled, copy.copy(stats), copy.deepcopy(stats), pytree.tree_map(torch.clone, stats)]


def test_copies_and_files_are_the_same_stats(kind, stats):
    for each in (stats, reduced(stats), COLLECT[kind]({})):
        assert all([same(again, each) for again in copies_of(each)])
    twin = copy.deepcopy(stats)
    twin.columns.zero_()
    assert same(stats, stats_of_kind(kind))


def test_what_is_not_there_is_no_attribute_of_the_instance(stats):
    """In torch 2.12 to 2.14, Dynamo takes an attribute that is None for the new value of another object."""
    again = dataclasses.replace(reduced(stats), origin=None, local=None)
    made = [stats, again, reduced(stats), stats.group({"all": "."}), stats.merge(stats), stats.by_module()]
    for each in [*made, *copies_of(stats)]:
        assert not [name for name, value in vars(each).items() if value is None]
    assert (stats.sharding, stats.origin, stats.local) == (None, None, None)
    assert set(dataclasses.asdict(stats)) >= {"names", "columns", "sharding", "origin", "local"}


def test_a_compiled_function_takes_and_returns_stats(kind, stats):
    name = SCHEMAS[kind].attributes[-1]

    @torch.compile(backend="aot_eager", fullgraph=True)
    def use(stats, other):
        grouped = stats.group({"a": "^a", "rest": ["b.w"]})
        return stats.merge(other), grouped, getattr(stats, name) * 2, stats.packed()

    found = use(stats, stats_of_kind(kind, 1))
    assert same(found[0], stats.merge(stats_of_kind(kind, 1)))
    assert same(found[1], stats.group({"a": "^a", "rest": ["b.w"]}))
    assert bit_patterns(found[2:]) == bit_patterns([getattr(stats, name) * 2, stats.packed()])


# reports


def test_the_report_is_that_of_the_columns(kind, stats):
    expected = report_of(SCHEMAS[kind], stats.names, stats.columns)
    for each in (stats.materialize(), stats.materialize_async().result(), gm.materialize([stats])[0]):
        assert type(each) is type(expected)
        assert (each.names, each.is_reduced, each.is_local, each.ranks) == (NAMES, False, False, {})
        if kind == "tensors":
            assert (
                each["a.w"].fingerprint
                == gm.collect(TENSORS_BY_NAME[0], fingerprint=True).materialize()["a.w"].fingerprint
            )
        else:
            assert repr(each.to_dict()) == repr(expected.to_dict())
    if kind in CLASSES:
        assert type(expected) is CLASSES[kind][1]


def test_a_report_of_all_ranks_leaves_out_what_no_rank_has_measured(stats):
    report = reduced(stats, (-1.0, -2.0, 1.0)).materialize()
    assert report.names == ("a.w", "b.w")
    assert (report.is_reduced, report.ranks) == (True, {"b.w": 1})


@pytest.mark.parametrize("origin", [-3.0, -4.0], ids=["calls", "an argument"])
def test_a_report_of_different_calls_is_an_error(stats, origin):
    different = reduced(stats, (origin,) * 3)
    for each in (different, different.group({"all": "."})):
        with pytest.raises(gm.RankError, match=r"^reduce: "):
            each.materialize()


def test_later_changes_do_not_change_a_report(stats):
    pending, before = stats.materialize_async(), repr(stats.materialize().to_dict())
    stats.columns.zero_()
    assert repr(pending.result().to_dict()) == before


def test_one_rank_has_the_statistics_of_all(kind, stats):
    assert stats.reduce() is stats
    ranks = gm.Ranks({name: torch.ones(1) for name in (*NAMES, "c")})
    found = stats.reduce(ranks)
    assert found.names == (*NAMES, "c")
    assert found.origin.tolist() == [-1.0, -1.0, -1.0 if kind == "signs" else 0.0, -2.0]
    assert bit_patterns([found.columns[:3]]) == bit_patterns([stats.columns])
    assert found.columns.dtype == SCHEMAS[kind].dtype
    assert same(found.local, stats)
    assert found.reduce(ranks) is found
    with pytest.raises(ValueError, match="'other' is not among the tensors that gm"):
        COLLECT[kind]({"other": torch.ones(1)}).reduce(ranks)
