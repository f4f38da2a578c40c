"""Nothing waits for the device until a report is requested, which then takes one copy.

Waits can be detected without a GPU: on fake tensors a copy from "cuda" to the CPU, or reading a value
in Python, is a call like any other, and a dispatch mode sees it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import gradiometer as gm
from gradiometer.columns import PAIRS, TENSORS
from gradiometer.columns.health import HEALTH
from gradiometer.stats import named_stats, tensor_stats
from support.fake_device import DEVICES, FakeEvent, HostWaitError, Model, Watch, device_of, watch

if TYPE_CHECKING:
    from collections.abc import Callable

# all tensor properties of TensorStats
PROPERTIES = (*TENSORS.names, *HEALTH, "total", "found_inf", "skipped")


# the detection itself

FORBIDDEN: dict[str, Callable[[Tensor], object]] = {
    "item": lambda t: t[0].item(),
    "bool": lambda t: bool(t[0] > 0),
    "if": lambda t: 1 if t.sum() > 0 else 2,
    "float": lambda t: float(t[0]),
    "int": lambda t: int(t[0]),
    "tolist": lambda t: t.tolist(),
    "is_nonzero": lambda t: torch.is_nonzero(t[0]),
    "equal": lambda t: torch.equal(t, t),
    "allclose": lambda t: torch.allclose(t, t),
    "in": lambda t: 1.0 in t,
    "nonzero": lambda t: t.nonzero(),
    "mask": lambda t: t[t > 0],
    "index_put by mask": lambda t: t.index_put_((t > 0,), t[0]),
    "masked_select": lambda t: t.masked_select(t > 0),
    "unique": lambda t: t.unique(),
    "where with one argument": lambda t: torch.where(t > 0),
}

COPIES: dict[str, Callable[[Tensor], object]] = {
    "cpu": lambda t: t.cpu(),
    "to": lambda t: t.to("cpu"),
    "to, non-blocking": lambda t: t.to("cpu", non_blocking=True),
    "to another dtype": lambda t: t.to("cpu", torch.float64),
    "copy_": lambda t: torch.empty(3, device="cpu").copy_(t),
    "copy_, non-blocking": lambda t: torch.empty(3, device="cpu").copy_(t, non_blocking=True),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FORBIDDEN)
def test_the_watch_sees_a_wait(device, name):
    with device_of(device) as d:
        t = torch.ones(3, device=d)
        with watch(), pytest.raises(HostWaitError):
            FORBIDDEN[name](t)
        with Watch():
            # an index is not a mask
            t[torch.tensor([0, 2], device=d)] + t.sum()


@pytest.mark.parametrize("name", [name for name in FORBIDDEN if name not in {"tolist", "in"}])
def test_the_dispatcher_alone_shows_most_waits(name):
    with device_of("cuda") as d, Watch(), pytest.raises(HostWaitError):
        FORBIDDEN[name](torch.ones(3, device=d))


@pytest.mark.parametrize("name", COPIES)
def test_the_watch_sees_a_copy_to_the_host(name):
    with device_of("cuda") as d:
        t = torch.ones(3, device=d)
        with watch() as seen:
            COPIES[name](t)
        assert seen.to_host == [("non-blocking" not in name, False)]
        assert seen.to_device == []


@pytest.mark.parametrize("name", ["to", "index"])
def test_the_watch_sees_a_copy_to_the_device(name):
    with device_of("cuda") as d:
        t, host = torch.ones(3, device=d), torch.tensor([0, 2])
        with watch() as seen:
            host.to(d) if name == "to" else t[host]
        assert (seen.to_host, seen.to_device) == ([], [(True, False)])


# collection and everything on the device


@pytest.mark.parametrize("device", DEVICES)
def test_collection_never_waits(device):
    with device_of(device) as d:
        model = Model(d)
        inv_scale = torch.ones((), device=d)
        with watch() as seen:
            found = gm.collect_grads(model)
            gm.collect_grads(model.named_parameters(), thresholds=gm.Thresholds(exploding=1.0))
            gm.collect_grads(model, inv_scale=inv_scale)
            gm.collect_weights(model)
            gm.collect({"transposed": torch.ones(3, 2, device=d).T, "complex": torch.ones(2, device=d) * 1j})
            gm.collect([torch.ones(3, device=d).expand(4, 3), torch.ones((), device=d)])
            gm.collect([torch.ones(0, device=d)])
            gm.total_norm(list(model.parameters()))
        assert found.columns.device.type == device
        assert found.columns.shape == (7, TENSORS.width)
        assert seen.op_calls == 8
        assert (seen.to_host, seen.to_device) == ([], [])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", PROPERTIES)
def test_derived_values_stay_on_the_device(device, name):
    with device_of(device) as d:
        found = gm.collect_grads(Model(d))
        with watch() as seen:
            value = getattr(found, name)
        assert value.device.type == device
        assert (seen.op_calls, seen.to_host, seen.to_device) == (0, [], [])


@pytest.mark.parametrize("device", DEVICES)
def test_grouping_and_merging_never_wait_nor_read_the_tensors_again(device):
    with device_of(device) as d:
        found = gm.collect_grads(Model(d))
        with watch() as seen:
            # adjacent rows, scattered rows, one row, all, none
            rules = {"run": r"w[0-2]$", "odd": r"w[135]", "one": "w4", "all": ".", "none": "x"}
            grouped = found.group(rules)
            again = grouped.merge(grouped).merge(grouped)
            again.group({"both": lambda name: name in {"run", "none"}}).total_norm.add(1)
            found.group({}).found_inf.add(1)
        assert again.columns.device.type == device
        assert again.flags.shape == (5,)
        assert (seen.op_calls, seen.to_host, seen.to_device) == (0, [], [])


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_to_measure_never_waits(device):
    with device_of(device) as d:
        model = Model(d)
        for parameter in model.parameters():
            parameter.grad = None
        with watch() as seen:
            empty = gm.collect_grads(model)
            values = [getattr(empty, name) for name in PROPERTIES]
            empty.group({"all": "."}).merge(empty.group({"all": "x"}))
        assert {value.device.type for value in values} == {device}
        assert (seen.op_calls, seen.to_host, seen.to_device) == (0, [], [])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("parameters", [1, 10, 100, 1000])
def test_one_call_of_the_op_measures_any_number_of_parameters(device, parameters):
    with device_of(device) as d:
        model = Model(d, parameters)
        with watch() as seen:
            found = gm.collect_grads(model)
        assert len(found.names) == parameters
        assert (seen.op_calls, seen.to_host, seen.to_device) == (1, [], [])


def test_an_inv_scale_that_is_a_number_needs_no_copy():
    with FakeTensorMode():
        tensors = [torch.ones(3, device="cuda")]
        with watch() as seen:
            gm.collect(tensors, inv_scale=0.5)
        assert seen.to_device == []


# pairs


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sample", [1, 1 / 2])
def test_updates_never_wait(device, sample):
    with device_of(device) as d:
        model = Model(d)
        large = torch.nn.Parameter(torch.ones(4 * 4096, device=d))
        large.grad = torch.ones(4 * 4096, device=d)
        model.register_parameter("large", large)
        snapshot = gm.Snapshot(model, sample=sample)
        with watch() as seen:
            snapshot.update_(model)
            stats = gm.collect_updates(model, snapshot)
            values = [getattr(stats, name) for name in PAIRS.names]
            stats.group({"odd": r"w[135]", "none": "x"}).merge(stats.group({"odd": "w1", "none": "w2"}))
            values += [stats.by_module().columns, stats.total, stats.total_value("update_ratio")]
        assert {value.device.type for value in values} == {device}
        assert (seen.op_calls, seen.to_host, seen.to_device) == (1, [], [])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("parameters", [1, 100])
def test_one_call_of_the_op_measures_any_number_of_pairs(device, parameters):
    with device_of(device) as d:
        a, b = Model(d, parameters), Model(d, parameters)
        # a parameter without a gradient
        a.w0.grad = None
        snapshot = gm.Snapshot(a)
        with watch() as seen:
            assert gm.compare(a, b).columns.shape == (parameters, PAIRS.width)
            assert len(gm.collect_updates(a, snapshot).names) == parameters
        assert (seen.op_calls, seen.to_host, seen.to_device) == (2, [], [])


def test_pairs_of_several_devices_travel_to_the_accelerator_without_a_wait():
    with FakeTensorMode():
        tensors = [torch.ones(3, device=d) for d in ("cpu", "cuda", "cpu", "cuda")]
        with watch() as seen:
            found = gm.compare(tensors, tensors)
        assert found.columns.device.type == "cuda"
        assert seen.op_calls == 2
        assert seen.to_host == []
        assert not any(blocking for blocking, _ in seen.to_device)


def test_a_report_of_pairs_takes_one_copy(monkeypatch):
    matrices = []
    monkeypatch.setattr(
        named_stats, "report_of", lambda _, names, matrix, **__: matrices.append(matrix) or names
    )
    with device_of("cuda") as d:
        stats = gm.compare(Model(d, 100), Model(d, 100))
        with watch() as seen:
            assert len(stats.materialize()) == 100
        assert len(seen.to_host) == 1
        assert seen.to_device == []
    assert [(x.device.type, x.shape) for x in matrices] == [("cpu", (100, PAIRS.width))]


@pytest.mark.parametrize("device", DEVICES)
def test_counts_by_magnitude_never_wait(device):
    with device_of(device) as d:
        tensors = {name: p.detach() for name, p in Model(d, 100).named_parameters()}
        with watch() as seen:
            stats = gm.collect_exponents(tensors)
            values = [stats.numel, stats.n_zero, stats.binades, stats.min_exponent, stats.max_exponent]
            values += [stats.best_scale("float16"), stats.quantile(0.5), stats.total]
            values += [count("float8_e5m2", 8.0) for count in (stats.n_flushed, stats.n_overflowed)]
            values += [stats.by_module().columns, stats.merge(stats).columns]
            values += gm.block_losses(tensors, "mxfp4")[1:]
        assert {value.device.type for value in values} == {device}
        assert (seen.op_calls, seen.to_host, seen.to_device) == (1, [], [])
        with watch() as seen:
            gm.block_losses(tensors, "nvfp4")
        assert (seen.to_host, seen.to_device) == ([], [])


@pytest.mark.parametrize("device", DEVICES)
def test_projections_never_wait(device):
    with device_of(device) as d:
        tensors = {name: p.detach() for name, p in Model(d, 100).named_parameters()}
        with watch() as seen:
            stats = gm.collect_projections(tensors)
            values = [stats.projections, stats.estimated_norm, stats.distance(stats), stats.cosine(stats)]
        assert {value.device.type for value in values} == {device}
        assert (seen.op_calls, seen.to_host, seen.to_device) == (1, [], [])


# transfers to the host


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Return the matrices that reports are made from; a report cannot be made from fake values."""
    seen: list[Tensor] = []

    def fake_report(names: tuple[str, ...], matrix: Tensor, *_: object, **__: object) -> str:
        assert len(names) == len(matrix)
        seen.append(matrix)
        return "report"

    monkeypatch.setattr(tensor_stats, "Report", fake_report)
    monkeypatch.setattr(FakeEvent, "waits", 0)
    return seen


def test_a_report_takes_one_copy(packed):
    with device_of("cuda") as d:
        found = gm.collect_grads(Model(d, 100))
        with watch() as seen:
            assert found.materialize() == "report"
        assert len(seen.to_host) == 1
        assert seen.to_device == []
        (matrix,) = packed
        assert (matrix.device.type, matrix.shape) == ("cpu", (100, TENSORS.width))


def test_a_pending_report_takes_one_copy_into_pinned_memory_and_waits_when_it_is_read(packed):
    with device_of("cuda") as d:
        found = gm.collect_grads(Model(d, 100))
        with watch() as seen:
            pending = found.materialize_async()
            assert pending.ready()
        assert seen.to_host == [(False, True)]
        assert seen.to_device == []
        assert (packed, FakeEvent.waits) == ([], 0)
        with watch() as seen:
            assert pending.result() == "report"
        assert (seen.to_host, FakeEvent.waits) == ([], 1)
        assert packed[0].device.type == "cpu"


@pytest.mark.parametrize("later", [False, True])
def test_many_collections_and_tensors_of_several_dtypes_take_one_copy(packed, later):
    with device_of("cuda") as d:
        grads = gm.collect_grads(Model(d, 100))
        slots = grads.group({f"slot{i}": rf"^w{i}$" for i in range(20)})
        tree = {
            "grads": grads,
            "slots": [slots, gm.group_ratio(slots, "slot1", "slot0")],
            "loss": torch.ones((), device=d, dtype=torch.bfloat16),
            "there already": torch.ones(2, device="cpu"),
        }
        with watch() as seen:
            found = gm.materialize_async(tree).result() if later else gm.materialize(tree)
        assert seen.to_host == [(False, True) if later else (True, False)]
        assert (seen.op_calls, seen.to_device) == (0, [])
        assert (found["grads"], found["slots"][0]) == ("report", "report")
        assert [len(matrix) for matrix in packed] == [100, 20]
        assert found["slots"][1].shape == found["loss"].shape == ()
        assert (found["loss"].dtype, found["loss"].device.type) == (torch.bfloat16, "cpu")
        assert found["there already"].shape == (2,)


def test_a_gradient_norm_takes_one_wait():
    class Count(TorchDispatchMode):
        waits = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            del types
            self.waits += Watch._waits(func, args)
            return func(*args, **(kwargs or {}))

    model = Model(torch.device("cpu"))
    with Count() as count:
        assert gm.grad_norm(model) > 0
    assert count.waits == 1
