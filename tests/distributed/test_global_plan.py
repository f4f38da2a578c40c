"""The plan that ranks agree on, with simulated ranks: every part of every tensor is counted once."""

from __future__ import annotations

import json
import math
import time
from itertools import product
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradiometer.distributed import global_plan
from gradiometer.distributed.global_plan import DisagreementError, Member, make_global_plan
from gradiometer.distributed.sharding import Mesh, Sharding, ShardSpec

AXES = ("pp", "ep", "dp_replicate", "dp_shard", "tp")


class Tensor(NamedTuple):
    """One tensor of a job whose ranks form a grid.

    ``stages``: the coordinates along pp that have it; None: all. ``axes``: the axes of its mesh, which may
    leave out axes of the grid; None: a plain tensor. ``cut``: the axes over which it is sharded.
    """

    name: str
    axes: tuple[str, ...] | None = None
    cut: frozenset[str] = frozenset()
    stages: frozenset[int] | None = None

    def has(self, place):
        return self.stages is None or place["pp"] in self.stages

    def part(self, place):
        """Return the coordinates that distinguish parts: several stages may hold copies of the same part."""
        return tuple(place[axis] for axis in self.axes or () if axis in self.cut)


def job(grid, tensors):
    """Return the coordinates of all ranks in a grid, the description that each sends, and the shardings."""
    places = [dict(zip(grid, place, strict=True)) for place in product(*[range(n) for n in grid.values()])]
    shardings, stages, members = {}, {}, []
    own = [[] for _ in range(grid["pp"])]
    for tensor in tensors:
        for stage in tensor.stages or range(grid["pp"]):
            own[stage].append(tensor)
    for place in places:
        # ranks of one stage differ only in their coordinates
        if place["pp"] not in stages:
            sharding = layout_at(place, grid, own[place["pp"]])
            stages[place["pp"]] = shardings.setdefault(sharding.digest, sharding)
        sharding = stages[place["pp"]]
        coordinates = tuple(tuple(place[axis] for axis in mesh.names) for mesh in sharding.meshes)
        members.append(Member(sharding.digest, coordinates))
    return places, members, shardings


def layout_at(place, grid, own):
    meshes, specs = {}, []
    for tensor in own:
        if tensor.axes is None:
            specs.append(ShardSpec((7, 3), "float32"))
        else:
            cuts = tuple("S(0)" if axis in tensor.cut else "R" for axis in tensor.axes)
            specs.append(ShardSpec((7, 3), "float32", meshes.setdefault(tensor.axes, len(meshes)), cuts))
    found = [
        Mesh(axes, tuple(grid[axis] for axis in axes), tuple(place[axis] for axis in axes)) for axes in meshes
    ]
    return Sharding(tuple(tensor.name for tensor in own), tuple(specs), tuple(found))


def counters(found, places, tensors):
    """Return for each part of each tensor the ranks that count it."""
    who = {}
    for rank, place in enumerate(places):
        own = [tensor for tensor in tensors if tensor.has(place)]
        for tensor, counted in zip(own, found.counts(rank), strict=True):
            who.setdefault((tensor.name, tensor.part(place)), [])
            if counted:
                who[tensor.name, tensor.part(place)].append(rank)
    return who


@st.composite
def jobs(draw):
    grid = {axis: draw(st.integers(1, 3)) for axis in AXES}
    count = draw(st.integers(1, 6))
    tensors = []
    for i in range(count):
        axes = draw(st.none() | st.lists(st.sampled_from(AXES[1:]), min_size=1, unique=True).map(tuple))
        cut = draw(st.frozensets(st.sampled_from(axes))) if axes else frozenset()
        stages = draw(st.none() | st.frozensets(st.integers(0, grid["pp"] - 1), min_size=1))
        tensors.append(Tensor(f"layers.{i}.w", axes, cut, stages))
    return grid, tensors


@given(jobs())
def test_every_part_is_counted_once_and_by_the_first_that_has_it(case):
    grid, tensors = case
    places, members, shardings = job(grid, tensors)
    found = make_global_plan(members, shardings)
    assert found.names == tuple(tensor.name for tensor in tensors)
    who = counters(found, places, tensors)
    for tensor in tensors:
        parts = math.prod(grid[axis] for axis in tensor.cut)
        assert len([part for name, part in who if name == tensor.name]) == parts
    for (name, part), ranks in who.items():
        tensor = next(tensor for tensor in tensors if tensor.name == name)
        holders = [r for r, place in enumerate(places) if tensor.has(place) and tensor.part(place) == part]
        assert ranks == holders[:1]


GRID = {"pp": 2, "ep": 1, "dp_replicate": 2, "dp_shard": 2, "tp": 2}
HSDP = ("dp_replicate", "dp_shard")


@pytest.mark.parametrize(
    ("tensor", "ranks"),
    [
        (Tensor("plain"), [0]),
        (Tensor("plain in the second stage", stages=frozenset({1})), [8]),
        (Tensor("hsdp", HSDP, frozenset({"dp_shard"})), [0, 2]),
        (Tensor("one of its axes", ("dp_shard",), frozenset({"dp_shard"})), [0, 2]),
        (Tensor("fsdp x tp", (*HSDP, "tp"), frozenset({"dp_shard", "tp"})), [0, 1, 2, 3]),
        (Tensor("norm", (*HSDP, "tp"), frozenset({"dp_shard"}), frozenset({1})), [8, 10]),
        (Tensor("all", (*HSDP, "tp"), frozenset({*HSDP, "tp"}), frozenset({1})), list(range(8, 16))),
        (Tensor("whole", (*HSDP, "tp")), [0]),
    ],
    ids=lambda value: value.name if isinstance(value, Tensor) else "",
)
def test_who_counts_what(tensor, ranks):
    places, members, shardings = job(GRID, [tensor])
    found = make_global_plan(members, shardings)
    assert sorted(rank for each in counters(found, places, [tensor]).values() for rank in each) == ranks


def test_experts_of_which_each_rank_has_its_own():
    """Experts are matched by name, beside tensors that all ranks have."""
    shardings = {}
    members = []
    for rank in range(6):
        # two ranks for each expert name
        names = ("gate", f"experts.{rank // 2}.w", "head")
        sharding = Sharding(names, (ShardSpec((3,), "float32"),) * 3)
        shardings[sharding.digest] = sharding
        members.append(Member(sharding.digest, ()))
    found = make_global_plan(members, shardings)
    assert found.names == ("gate", "experts.0.w", "experts.1.w", "experts.2.w", "head")
    for rank in range(6):
        assert found.counts(rank) == [rank == 0, rank % 2 == 0, rank == 0]


def test_a_rank_outside_of_a_mesh_counts_nothing_of_it():
    spec = ShardSpec((4,), "float32", 0, ("S(0)",))
    shardings, members = {}, []
    for coordinate in (None, (0,), (1,)):
        mesh = Mesh(("dp",), (2,), coordinate)
        sharding = Sharding(("w", "b"), (spec, ShardSpec((1,), "float32")), (mesh,))
        shardings.setdefault(sharding.digest, sharding)
        members.append(Member(sharding.digest, sharding.coordinates))
    assert len(shardings) == 2
    found = make_global_plan(members, shardings)
    assert [found.counts(rank) for rank in range(3)] == [[False, True], [True, False], [True, False]]
    assert found.where(0, 0) == "rank 0"
    assert found.where(0, 2) == "rank 2, dp 1 of 2"


def test_where_a_rank_stands():
    tensors = [Tensor("w", (*HSDP, "tp"), frozenset({"dp_shard", "tp"})), Tensor("b", stages=frozenset({0}))]
    _, members, shardings = job(GRID, tensors)
    found = make_global_plan(members, shardings)
    assert found.where(0, 13) == "rank 13, dp_shard 0 of 2, tp 1 of 2"
    assert found.where(1, 3) == "rank 3"
    # this rank does not have the tensor
    assert found.where(1, 13) == "rank 13"


# the merged order of names

MODEL = (
    "embed.w",
    *[f"layers.{i}.{part}" for i in range(12) for part in ("norm", "up", "down")],
    "norm.w",
    "head",
)


@st.composite
def stages(draw):
    """Return a model split into arbitrary stages, each in the order of the model."""
    count = draw(st.integers(1, 4))
    layers = draw(st.lists(st.integers(0, count - 1), min_size=12, max_size=12))
    first, last = draw(st.integers(0, count - 1)), draw(st.integers(0, count - 1))
    parts = []
    for stage in range(count):
        names = [name for name in MODEL[1:-2] if layers[int(name.split(".")[1])] == stage]
        names = [*(MODEL[:1] if stage == first else ()), *names, *(MODEL[-2:] if stage == last else ())]
        parts.append(tuple(names))
    return parts


@given(stages())
def test_the_order_is_the_models_where_the_stages_tell_it(parts):
    found = global_plan._in_order(parts)
    assert sorted(found) == sorted(MODEL)
    # each rank's own order is kept, and layers are ordered by number
    for part in parts:
        assert [name for name in found if name in part] == list(part)
    assert [name for name in found if name.startswith("layers.")] == list(MODEL[1:-2])


@pytest.mark.parametrize(
    "parts",
    [
        [("embed.w", *MODEL[1:10]), MODEL[10:]],
        # interleaved stages
        [("embed.w", *MODEL[1:4], *MODEL[7:10]), (*MODEL[4:7], *MODEL[10:])],
        # a V-shaped schedule: the first stage also has the last layers
        [("embed.w", *MODEL[1:4], *MODEL[-5:]), MODEL[4:-5]],
        [(*MODEL[-5:],), ("embed.w", *MODEL[1:4]), MODEL[4:-5]],
        [MODEL[:1], MODEL[1:-2], MODEL[-2:]],
        # tensors that several stages have
        [("embed.w", "head"), (*MODEL[1:-2], "norm.w", "head")],
        [MODEL[4:], MODEL],
        [(), MODEL],
    ],
)
def test_the_order_of_a_pipeline_is_the_models(parts):
    assert global_plan._in_order(parts) == MODEL


def test_orders_that_contradict_one_another_are_ordered_all_the_same():
    assert global_plan._in_order([("a", "b", "c"), ("b", "a", "d")]) == ("a", "b", "c", "d")


# disagreements

MESH = Mesh(("dp_shard",), (2,), (0,))
BASE = Sharding(
    ("w", "b"), (ShardSpec((4, 3), "float32", 0, ("S(0)",)), ShardSpec((4,), "float32", 0, ("R",))), (MESH,)
)


def changed(place=0, mesh=MESH, **change):
    specs = list(BASE.specs)
    specs[place] = specs[place]._replace(**change)
    return Sharding(BASE.names, tuple(specs), (mesh,))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (changed(shape=(5, 3)), r"'w' is \(4, 3\) float32, .* on rank 0, but \(5, 3\) float32, .* on rank 1"),
        (
            changed(dtype="bfloat16"),
            r"'w' is \(4, 3\) float32, .* on rank 0, but \(4, 3\) bfloat16, .* rank 1",
        ),
        (changed(placements=("S(1)",)), r"'w' is .*S\(0\) over dp_shard of 2 .*S\(1\) over dp_shard of 2 on"),
        (
            changed(placements=("R",)),
            r"'w' is .*S\(0\) over dp_shard of 2 on rank 0, but .*float32, whole on rank 1",
        ),
        (
            changed(1, shape=(3,)),
            r"'b' is \(4,\) float32, whole on rank 0, but \(3,\) float32, whole on rank 1",
        ),
        (
            changed(mesh=Mesh(("dp_shard",), (4,), (1,))),
            r"'w' is .*S\(0\) over dp_shard of 2 on rank 0, but .*S\(0\) over dp_shard of 4 on rank 1",
        ),
    ],
)
def test_the_first_difference_is_named(other, words):
    shardings = {sharding.digest: sharding for sharding in (BASE, other)}
    assert len(shardings) == 2
    with pytest.raises(DisagreementError, match=words):
        make_global_plan([Member(digest, ((rank,),)) for rank, digest in enumerate(shardings)], shardings)


def test_names_of_other_axes_are_no_difference():
    """Tensors sharded alike may be on meshes with other axis names and numbers of dimensions."""
    other = Sharding(
        BASE.names,
        (ShardSpec((4, 3), "float32", 0, ("R", "S(0)")), ShardSpec((4,), "float32")),
        (Mesh(("r", "s"), (1, 2), (0, 1)),),
    )
    both = {sharding.digest: sharding for sharding in (BASE, other)}
    found = make_global_plan([Member(digest, x.coordinates) for digest, x in both.items()], both)
    assert [found.counts(0), found.counts(1)] == [[True, True], [True, False]]


def test_a_part_that_no_rank_has_is_an_error():
    mesh = Mesh(("dp_shard",), (4,), (0,))
    sharding = changed(mesh=mesh)
    rest = Sharding(("b",), (ShardSpec((4,), "float32"),))
    members = [Member(sharding.digest, ((0,),)), Member(rest.digest, ()), Member(sharding.digest, ((3,),))]
    said = r"'w' is sharded into 4 parts, .* hold only 2 of them.*rank 1"
    with pytest.raises(DisagreementError, match=said):
        make_global_plan(members, {sharding.digest: sharding, rest.digest: rest})


def test_layouts_are_equal_by_value():
    again = Sharding(BASE.names, BASE.specs, (MESH,))
    assert (again, hash(again)) == (BASE, hash(BASE))
    elsewhere = Sharding(BASE.names, BASE.specs, (MESH._replace(coordinate=(1,)),))
    # the same sharding in another object
    assert elsewhere.digest == BASE.digest
    assert elsewhere != BASE
    assert Sharding.from_plain(json.loads(json.dumps(BASE.to_plain()))) == BASE
    for other in (changed(shape=(5, 3)), Sharding(("w", "c"), BASE.specs, (MESH,))):
        assert other.digest != BASE.digest


# many ranks

LARGE = {
    "one stage": ({"pp": 1, "ep": 1, "dp_replicate": 16, "dp_shard": 128, "tp": 8}, 10_000, 0),
    "a pipeline": ({"pp": 16, "ep": 1, "dp_replicate": 8, "dp_shard": 16, "tp": 8}, 10_000, 0),
    # 256 groups of ranks whose experts have different names, beside tensors that all ranks have
    "experts": ({"pp": 256, "ep": 1, "dp_replicate": 1, "dp_shard": 64, "tp": 1}, 7_500, 2_500),
}


def large_job(grid, count, shared):
    axes, stages = (*HSDP, "tp"), grid["pp"]
    cuts = (frozenset({"dp_shard"}), frozenset({"dp_shard", "tp"}), frozenset())
    tensors = [
        Tensor(
            f"layers.{i}.w",
            axes if i % 4 else None,
            cuts[i % 3] if i % 4 else cuts[2],
            frozenset({i * stages // count}) if i < count else None,
        )
        for i in range(count + shared)
    ]
    return job(grid, tensors)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.deep if name == "experts" else ()) for name in LARGE]
)
def test_sixteen_thousand_ranks_and_ten_thousand_tensors(name):
    """One rank's work, which each rank does independently."""
    grid, count, shared = LARGE[name]
    assert math.prod(grid.values()) == 16_384
    _, members, shardings = large_job(grid, count, shared)
    # CPU time of this process, independent of other load on the machine
    start = time.process_time()
    found = make_global_plan(members, shardings)
    counted = found.counts(len(members) - 1)
    seconds = time.process_time() - start
    assert len(found.names) == count + shared
    assert len(counted) == len(shardings[members[-1].digest].names)
    assert seconds < 10
    # memory proportional to tensors plus ranks, not to their product
    distinct = {id(pattern) for pattern in found.patterns}
    assert len(distinct) == len(set(found.patterns)) <= 4 * (grid["pp"] + 1)
