"""Tensors of several devices in one call, as in manual model parallelism: one op per device, one result.

The devices are fake, so that a mode sees each op and each copy as a call of the dispatcher. Numbers
are compared on CPU memory that claims to be several devices; `test_gpu_devices.py` uses real ones.
"""

from __future__ import annotations

import importlib
import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import gradiometer as gm
from gradiometer import ops
from gradiometer.recorder.updates import Updates
from gradiometer.stats.host_copy import fetch
from gradiometer.stats.materialize import materialize
from support.fake_device import HostWaitError, device_of, watch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

A, B, C, HOST = "cuda:0", "cuda:1", "cuda:2", "cpu"
# the device of each tensor in turn
PLACES = {
    "halves": (A, A, A, B, B, B),
    "the second first": (B, B, A),
    "the last layer shares the first's device": (A, B, C, A),
    "one by one": (A, B) * 8,
    "host first": (HOST, B, HOST, A),
    "host last": (A, A, HOST),
}

every_place = pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)


class Seen(TorchDispatchMode):
    """Records each of this library's ops and its device, each copy between devices, and counts all calls."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple[str, str]] = []
        # (source, target, whether it is non-blocking)
        self.copies: list[tuple[str, str, bool]] = []
        self.calls = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        # a fake tensor answers the query of its device by a call too
        self.calls += func is not torch.ops.prim.device.default
        if func.namespace == "gradiometer":
            (device,) = {str(x.device) for x in pytree.tree_leaves(args) if isinstance(x, Tensor)}
            self.ops.append((func._opname, device))
        elif func is torch.ops.aten._to_copy.default and args[0].device != out.device:
            self.copies.append((str(args[0].device), str(out.device), kwargs.get("non_blocking", False)))
        return out


def measured_on(seen: Seen) -> list[str]:
    """Return the devices on which tensors were read, in order."""
    return [device for op, device in seen.ops if op == "tensor_stats"]


def in_order(places: Iterable[str]) -> list[str]:
    """Return the devices in order of appearance, the host last."""
    return sorted(dict.fromkeys(places), key=lambda place: place == HOST)


@pytest.fixture
def _fake() -> Iterator[None]:
    with device_of("cuda"):
        yield


def parameters_on(places: Sequence[str], shape: tuple[int, ...] = (3,)) -> dict[str, nn.Parameter]:
    """Return parameters with gradients: one layer for each device in ``places``."""
    found = {}
    for i, place in enumerate(places):
        parameter = nn.Parameter(torch.ones(shape, device=place))
        parameter.grad = torch.ones(shape, device=place)
        found[f"layer{i}.weight"] = parameter
    return found


# one op per device

COLLECTIONS: dict[str, Callable[[dict[str, nn.Parameter]], gm.TensorStats]] = {
    "collect_grads": gm.collect_grads,
    "collect_weights": gm.collect_weights,
    "collect": lambda model: gm.collect({name: p.grad for name, p in model.items()}),
    "skip_nonfinite": lambda model: gm.collect_grads(model, skip_nonfinite=True),
    "reduce": lambda model: gm.collect_grads(model, reduce=True),
}


@every_place
@pytest.mark.parametrize("name", COLLECTIONS)
@pytest.mark.usefixtures("_fake")
def test_each_device_is_read_once_and_its_rows_travel_once(name, places):
    model = parameters_on(places)
    with watch() as waits, Seen() as seen:
        stats = COLLECTIONS[name](model)
    home, *others = in_order(places)
    assert measured_on(seen) == [home, *others]
    # columns and flags
    assert seen.copies == [(other, home, True) for other in others for _ in range(2)]
    assert waits.to_host == []
    assert stats.names == tuple(model)
    assert stats.columns.shape == (len(places), len(gm.COLUMNS))
    assert {str(x.device) for x in (stats.columns, stats.flags, stats.norm, stats.total_norm)} == {home}


@pytest.mark.parametrize("pattern", [(A, B), (A, HOST), (A, A, B, B, HOST)])
@pytest.mark.parametrize("times", [2, 200])
@pytest.mark.usefixtures("_fake")
def test_there_are_as_many_calls_whatever_the_number_of_tensors(times, pattern):
    model = parameters_on(pattern * times)
    # the first call in a process tests torch's guards
    gm.collect_grads(model)
    with Seen() as seen:
        gm.collect_grads(model)
    devices = len(set(pattern))
    # for each device an op and two slices, for each but the first two copies; and two concatenations
    assert seen.calls == 3 * devices + 2 * (devices - 1) + 2


class Placed(Tensor):
    """A CPU tensor that claims to be on another device, which is the CPU too."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    place: torch.device

    @property
    def device(self) -> torch.device:
        return self.place


class Away(Tensor):
    """A CPU tensor that claims to be on a GPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = torch.device(A)


@pytest.fixture
def several(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a function that measures tensors on these devices, all of which are the CPU."""
    read = ops.measure

    def read_there(tensors: Sequence[Tensor], *args: Any, **options: Any) -> Any:
        assert len({tensor.device for tensor in tensors}) == 1
        return read([tensor.as_subclass(Tensor) for tensor in tensors], *args, **options)

    monkeypatch.setattr(ops, "measure", read_there)
    # the package attribute of this name is the function, not the module
    measure = importlib.import_module("gradiometer.stats.measure")._measure_tensors

    def measured(tensors: Sequence[Tensor], places: Sequence[int], scale: Any) -> tuple[Tensor, Tensor]:
        placed = [tensor.as_subclass(Placed) for tensor in tensors]
        for tensor, place in zip(placed, places, strict=True):
            tensor.place = torch.device("cpu", place)
        devices = list(dict.fromkeys(tensor.device for tensor in placed))
        columns, flags, _ = measure(placed, devices, gm.Thresholds(), scale, None, fingerprint=False)
        return columns, flags

    return measured


@pytest.mark.parametrize("seed", range(20))
def test_the_rows_are_those_of_the_tensors_in_their_order(several, seed):
    drawn = random.Random(seed)  # noqa: S311 nothing is secret
    tensors = [torch.randn(drawn.randrange(50)) for _ in range(drawn.randrange(2, 40))]
    tensors[-1] = torch.tensor([float("nan"), 0.0])
    places = [0, 1, *[drawn.randrange(drawn.randrange(2, 5)) for _ in tensors[2:]]]
    expected = gm.collect(tensors)
    columns, flags = several(tensors, places, None)
    assert torch.equal(columns, expected.columns)
    assert torch.equal(flags, expected.flags)


# inv_scale


def test_a_scale_that_the_rows_meet_later_is_the_same_scale(several):
    tensors = [torch.randn(20), torch.randn(3) * 1e4, torch.tensor([float("inf"), 1e-3]), torch.zeros(2)]
    scale = torch.tensor([2.0**-8])
    expected = gm.collect(tensors, inv_scale=scale)
    for given in (scale, scale.as_subclass(Away)):
        columns, flags = several(tensors, [0, 1, 0, 2], given)
        assert torch.equal(columns, expected.columns)
        assert torch.equal(flags, expected.flags)


@every_place
@pytest.mark.parametrize("where", ["number", HOST, A, B])
@pytest.mark.usefixtures("_fake")
def test_a_scale_of_any_device_is_not_waited_for(where, places):
    model = parameters_on(places)
    scale = 0.5 if where == "number" else torch.ones((), device=where)
    with watch() as waits, Seen() as seen:
        stats = gm.collect_grads(model, inv_scale=scale)
    home, *others = in_order(places)
    assert measured_on(seen) == [home, *others]
    assert str(stats.columns.device) == home
    assert waits.to_host == []
    assert all(at_once for _, _, at_once in seen.copies)


@pytest.mark.usefixtures("_fake")
def test_where_all_is_on_the_host_a_scale_has_to_arrive():
    model = parameters_on((HOST, HOST))
    with Seen() as seen:
        stats = gm.collect_grads(model, inv_scale=torch.ones((), device=A))
    # a blocking copy, because it is used at once
    assert seen.copies == [(A, HOST, False)]
    assert str(stats.columns.device) == HOST


@pytest.mark.usefixtures("_fake")
def test_a_limit_has_to_arrive_on_the_host_before_it_is_used():
    with Seen() as seen:
        gm.clip_grad_norm_(parameters_on((HOST,)), torch.ones((), device=A))
    assert seen.copies == [(A, HOST, False)]


# without gradients


@every_place
@pytest.mark.usefixtures("_fake")
def test_without_gradients_the_result_is_where_it_would_be_with_them(places):
    model = parameters_on(places)
    there = gm.collect_grads(model)
    for parameter in model.values():
        parameter.grad = None
    found = gm.collect_grads(model)
    assert found.columns.device == there.columns.device
    assert gm.clip_grad_norm_(model, 1.0).device == there.columns.device


# uses of the statistics


@every_place
@pytest.mark.usefixtures("_fake")
def test_a_norm_and_a_coefficient_travel_once(places):
    model = parameters_on(places)
    home, *others = in_order(places)
    with Seen() as seen:
        norm = gm.total_norm(model)
    assert str(norm.device) == home
    assert measured_on(seen) == [home, *others]
    rows = [(other, home, True) for other in others for _ in range(2)]
    for clip in (gm.clip_grad_norm_, gm.collect_and_clip_):
        with Seen() as seen:
            clip(model, 1.0)
        assert measured_on(seen) == [home, *others]
        # only the host waits for it
        back = [(home, other, other != HOST) for other in others]
        assert Counter(seen.copies) == Counter(rows + back)


@pytest.mark.usefixtures("_fake")
def test_groups_and_modules_stay_on_the_first_device():
    stats = gm.collect_grads(parameters_on((HOST, A, B, A)))
    with watch(), Seen() as seen:
        grouped = stats.group({"first": r"layer[01]\.", "last": r"layer[23]\.", "ends": r"layer[03]\."})
        found = [grouped, stats.by_module(1), stats.merge(stats)]
        ratio = gm.group_ratio(grouped, "first", "last")
    assert seen.copies == []
    assert {str(x.device) for x in [ratio, *[s.columns for s in found]]} == {A}


@pytest.mark.parametrize(("first", "second", "home"), [(A, B, A), (B, A, B), (HOST, B, B), (B, HOST, B)])
@pytest.mark.usefixtures("_fake")
def test_stats_of_two_devices_merge_without_a_wait(first, second, home):
    # such as manual replicas
    one, two = [gm.collect({"w": torch.ones(3, device=device)}) for device in (first, second)]
    with watch() as waits:
        merged = one.merge(two)
    assert {str(x.device) for x in (merged.columns, merged.flags)} == {home}
    assert waits.to_host == []


@pytest.mark.usefixtures("_fake")
def test_one_transfer_brings_all_to_the_host(monkeypatch):
    def arrive(tensors: Sequence[Tensor]) -> None:
        copied = fetch(tensors)
        raise ArrivedError([str(x.device) for x in copied])

    class ArrivedError(Exception):
        pass

    monkeypatch.setattr(importlib.import_module("gradiometer.stats.materialize"), "fetch", arrive)
    tree = {
        "several": gm.collect_grads(parameters_on((A, B, HOST))),
        "second": gm.collect_grads(parameters_on((B,))),
        "loss": torch.ones((), device=C),
    }
    with watch() as waits, pytest.raises(ArrivedError, match=r"\['cpu', 'cpu', 'cpu'\]"):
        materialize(tree)
    assert waits.to_host == [(True, False)]


@pytest.mark.usefixtures("_fake")
def test_one_number_is_one_transfer():
    model = parameters_on((A, B))
    with pytest.raises(HostWaitError), watch() as waits:
        gm.grad_norm(model)
    assert waits.to_host == []


# the recorder


@every_place
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.usefixtures("_fake")
def test_a_recorder_reads_each_device_once_for_each_kind(weights, places):
    model = parameters_on(places)
    recorder = gm.Recorder(model, weights=weights)
    home, *others = in_order(places)
    with watch() as waits, Seen() as seen:
        recorder.record(inv_scale=0.5)
        recorder.advance()
        skip = recorder.skip_step
    kinds = 1 + weights
    assert measured_on(seen) == [home, *others] * kinds
    assert [device for op, device in seen.ops if op == "append_"] == [home] * kinds
    assert {str(x.device) for x in (recorder.ring, recorder.cursor, skip)} == {home}
    assert waits.to_host == []
    assert all(at_once for _, _, at_once in seen.copies)


@pytest.mark.parametrize("kept", [A, B, HOST, None])
@pytest.mark.usefixtures("_fake")
def test_gradients_of_some_devices_alone_come_to_the_ring_without_a_wait(kept):
    model = parameters_on((A, B, HOST))
    recorder = gm.Recorder(model, updates=True)
    for parameter in model.values():
        if str(parameter.device) != kept:
            parameter.grad = None
    updates = Updates(recorder)
    with watch() as waits, Seen() as seen:
        recorder.record()
        recorder.record(gm.collect_grads(model))
        updates.measure(0)
        updates.keep_for(1, every=1)
    assert waits.to_host == []
    assert all(at_once for _, _, at_once in seen.copies)


# ranks


@pytest.mark.usefixtures("_fake")
def test_which_parts_count_is_told_to_rows_on_any_device():
    model = parameters_on((A, B))
    ranks = gm.Ranks(model)
    assert str(gm.collect_grads(model, reduce=ranks).columns.device) == A
    # as if another rank had a copy that counts
    ranks._counts_all = False
    for device in (A, B, HOST):
        with Seen() as seen:
            ranks.to_rows(
                ranks.local_names, torch.ones(2, len(gm.COLUMNS), dtype=torch.float64, device=device)
            )
        # on the host it is used at once, so that copy blocks
        assert seen.copies == ([] if device == A else [(A, device, device != HOST)])


@pytest.mark.parametrize("kept", [A, B, HOST, None])
@pytest.mark.usefixtures("_fake")
def test_ranks_meet_on_the_first_device_whichever_has_gradients(kept):
    model = parameters_on((HOST, A, B))
    ranks = gm.Ranks(model)
    for parameter in model.values():
        if str(parameter.device) != kept:
            parameter.grad = None
    with watch() as waits, Seen() as seen:
        stats = gm.collect_grads(model, reduce=ranks)
    assert {str(x.device) for x in (stats.columns, stats.flags, stats.origin)} == {A}
    assert waits.to_host == []
    assert all(at_once for _, _, at_once in seen.copies)


def _shards_beside_others(rank: int) -> tuple[list[tuple[str, str]], str, list[int]]:
    del rank
    mesh = init_device_mesh("cpu", (2,))
    with FakeTensorMode():
        shard = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)])
        tensors = {"plain": torch.ones(4, device=B), "shard": shard, "first": torch.ones(2, device=A)}
        with Seen() as seen:
            stats = gm.collect(tensors)
        return seen.ops, str(stats.columns.device), list(stats.columns.shape)


def test_a_shard_is_measured_beside_tensors_of_other_devices(two_ranks):
    expected = [("tensor_stats", B), ("tensor_stats", A), ("tensor_stats", HOST)]
    assert two_ranks.run(_shards_beside_others) == [(expected, B, [3, len(gm.COLUMNS)])] * 2


# in a graph


@pytest.mark.usefixtures("_dynamo")
def test_in_a_graph_there_is_one_op_a_device_too():
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    with FakeTensorMode():
        model = parameters_on((A, A, B, HOST, A))
        step = torch.compile(gm.collect_grads, fullgraph=True, backend=backend)
        stats = step(model, inv_scale=torch.ones((), device=B))
        assert str(stats.columns.device) == A
    (graph,) = graphs
    read = [node for node in graph.graph.nodes if "tensor_stats" in str(node.target)]
    assert [len(node.args[0]) for node in read] == [3, 1, 1]
