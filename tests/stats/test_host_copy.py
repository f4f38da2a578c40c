"""Reports in flight to the host: what is copied, when it is read, and which calls wait.

A fake device replaces a GPU: its tensors claim to be on a device, and copies to the
host arrive when a call waits for them, or when the test lets the device proceed.
`tests/gpu/test_gpu_async.py` tests the same on a real device.
"""

from __future__ import annotations

import gc
import random
import threading
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradiometer as gm
from gradiometer.stats import host_copy


class Device:
    """Copies to the host in the order of their requests, each when the test or a wait lets it proceed."""

    def __init__(self) -> None:
        self.queue: list[tuple[Tensor, Tensor]] = []
        self.pinned: list[Tensor] = []
        self.done = 0
        self.log: list[str] = []

    def run(self, until: int) -> None:
        while self.done < until:
            host, value = self.queue[self.done]
            host.copy_(value)
            self.done += 1

    def event(self, device: torch.device) -> Event:
        assert device.type == "cuda"
        return Event(self)


class Event:
    """Replaces `torch.Event`."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def record(self, stream: str) -> None:
        assert stream == "current"
        self.after = len(self.device.queue)

    def query(self) -> bool:
        return self.device.done >= self.after

    def synchronize(self) -> None:
        self.device.log.append(f"waited for {self.after}")
        self.device.run(self.after)


class Away(Tensor):
    """A tensor that claims to be on the device."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.to and isinstance(args[1], torch.device):
            # no conversion: a copy to the host would have to wait
            assert args[1].type == "cuda"
            return args[0]
        if func is Tensor.copy_:
            host, value = args
            assert kwargs == {"non_blocking": True}
            assert any(host is x for x in CURRENT[0].pinned)
            # the value at this point of the stream, whenever the copy arrives
            CURRENT[0].queue.append((host, value.as_subclass(Tensor).clone()))
            return host
        assert func not in {Tensor.cpu, Tensor.item, Tensor.tolist}
        return super().__torch_function__(func, types, args, kwargs)


CURRENT: list[Device] = [Device()]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    empty = torch.empty

    def pinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        if not pin_memory:
            return empty(*args, **kwargs)
        # a value other than that of any test, so that reading before the copy is detected
        CURRENT[0].pinned.append(empty(*args, **kwargs).fill_(77))
        return CURRENT[0].pinned[-1]

    CURRENT[0] = Device()
    monkeypatch.setattr(torch, "empty", pinned)
    monkeypatch.setattr(torch, "Event", CURRENT[0].event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: "current")
    return CURRENT[0]


def away(stats: gm.TensorStats) -> gm.TensorStats:
    return replace(stats, columns=stats.columns.as_subclass(Away), flags=stats.flags.as_subclass(Away))


def model_with_gradients() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3))
    model(torch.randn(5, 4)).square().mean().backward()
    return model


def rows(report: gm.Report) -> dict[str, Any]:
    return report.to_dict()


def tree_of(model: nn.Module) -> dict[str, Any]:
    """Return the collections of a step that grafts a part into a host: slots, groups, ratios, a loss."""
    grads = gm.collect_grads(model)
    grouped = grads.group({"host": r"^0\.", "seed": r"^2\."})
    return {
        "grads": grads,
        "slots": [gm.collect_grads(part) for part in (model[0], model[2])],
        "grouped": grouped,
        "more": (gm.collect_weights(model), {"ratio": gm.group_ratio(grouped, "seed", "host")}),
        "ratios": gm.group_ratio(grouped, ["seed", "host"], "host"),
        "loss": torch.tensor(0.5, dtype=torch.bfloat16),
        "skipped": grads.skipped,
        "step": torch.tensor(2**40 + 1),
        "matrix": torch.arange(6.0).view(2, 3).T,
        "epoch": 3,
    }


def assert_same_tree(found: Any, expected: Any) -> None:
    """Compare the result with the tree that was sent."""
    if isinstance(expected, gm.TensorStats):
        assert isinstance(found, gm.Report)
        assert rows(found) == rows(expected.materialize())
    elif isinstance(expected, Tensor):
        assert type(found) is Tensor
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_same_tree(found[key], value)
    elif isinstance(expected, (list, tuple)):
        assert type(found) is type(expected)
        for a, b in zip(found, expected, strict=True):
            assert_same_tree(a, b)
    else:
        assert found == expected


def sent(tree: Any) -> Any:
    """Return the tree with tensors that claim to be on the device."""
    if isinstance(tree, gm.TensorStats):
        return away(tree)
    if isinstance(tree, Tensor):
        return tree.as_subclass(Away)
    if isinstance(tree, dict):
        return {key: sent(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(sent(value) for value in tree)
    return tree


# contents


def test_on_the_cpu_everything_is_there_at_once():
    tree = tree_of(model_with_gradients())
    pending = gm.materialize_async(tree)
    assert isinstance(pending, gm.Pending)
    assert pending.ready()
    assert_same_tree(pending.result(), tree)
    assert_same_tree(gm.materialize(tree), tree)


def test_all_groups_and_slots_travel_in_one_copy(device):
    tree = tree_of(model_with_gradients())
    pending = gm.materialize_async(sent(tree))
    assert len(device.queue) == 1
    assert_same_tree(pending.result(), tree)
    assert device.log == ["waited for 1"]


def test_tensors_of_the_host_travel_along(device):
    tree = tree_of(model_with_gradients())
    mixed = {key: sent(value) if i % 2 else value for i, (key, value) in enumerate(tree.items())}
    pending = gm.materialize_async(mixed)
    assert len(device.queue) == 1
    assert_same_tree(pending.result(), tree)


@pytest.mark.parametrize("tree", [[], {}, {"epoch": 3}, None, ([], {"a": ()})], ids=str)
def test_a_tree_without_tensors_has_nothing_to_wait_for(device, tree):
    pending = gm.materialize_async(tree)
    assert (pending.ready(), pending.result()) == (True, tree)
    assert device.queue == []


def test_a_model_without_gradients_arrives_as_a_report_of_nothing(device):
    empty = gm.collect_grads(nn.Linear(2, 1))
    pending = gm.materialize_async([away(empty), torch.empty(0, 3).as_subclass(Away)])
    report, tensor = pending.result()
    assert not report.measured
    assert tensor.shape == (0, 3)
    assert len(device.queue) == 1


# readiness


def test_it_is_ready_when_the_copy_has_arrived_and_not_before(device):
    stats = gm.collect([torch.ones(4)])
    pending = away(stats).materialize_async()
    for _ in range(3):
        assert not pending.ready()
    device.run(1)
    assert pending.ready()
    # no call has waited, and the result is there
    assert device.log == []
    assert pending.result().total_norm == 2.0


def test_a_result_waits_for_its_own_copy_and_nothing_else(device):
    pendings = [away(gm.collect([torch.full((4,), float(i))])).materialize_async() for i in range(5)]
    assert pendings[2].result().total_norm == 4.0
    assert (device.log, device.done) == (["waited for 3"], 3)
    assert [pending.ready() for pending in pendings] == [True, True, True, False, False]


def test_a_result_is_read_once_and_given_as_often_as_asked(device):
    tree = {"x": gm.collect([torch.ones(4)]), "loss": torch.tensor(0.5)}
    pending = gm.materialize_async(sent(tree))
    first = pending.result()
    waits = list(device.log)
    # the pinned memory may be reused for another copy
    for host, _ in device.queue:
        host.fill_(-1)
    second = pending.result()
    assert device.log == waits
    for result in (first, second):
        assert_same_tree(result, tree)


def test_many_are_under_way_and_are_read_in_any_order(device):
    pendings = []
    x = torch.empty(100)
    for i in range(200):
        x.fill_(i)
        pendings.append(gm.materialize_async({"stats": away(gm.collect({"x": x})), "step": i}))
    order = list(range(200))
    random.Random(0).shuffle(order)  # noqa: S311 no secret
    for i in order:
        found = pendings[i].result()
        assert (found["step"], found["stats"]["x"].abs_max) == (i, i)
    assert device.done == 200


def test_one_that_nobody_reads_never_waits(device):
    pending = away(gm.collect([torch.ones(4)])).materialize_async()
    gone = weakref.ref(pending)
    del pending
    gc.collect()
    assert gone() is None
    assert device.log == []


def test_the_device_is_not_asked_while_a_graph_is_captured(device, monkeypatch):
    """CUDA invalidates the capture if the same thread queries an event."""
    pending = away(gm.collect([torch.ones(4)])).materialize_async()
    device.run(1)
    monkeypatch.setattr(host_copy, "is_capturing", lambda _: True)
    monkeypatch.setattr(Event, "query", lambda _: pytest.fail("queried"))
    assert not pending.ready()
    assert repr(pending) == "<Pending: in progress>"
    with pytest.raises(
        RuntimeError, match=r"while a CUDA graph is captured; call result\(\) before or after"
    ):
        pending.result()
    assert device.log == []
    monkeypatch.undo()
    assert pending.ready()
    report = pending.result()
    monkeypatch.setattr(host_copy, "is_capturing", lambda _: True)
    assert pending.result() is report


# snapshots


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("where", ["cpu", "device"])
def test_what_training_does_next_changes_nothing(where):
    model = model_with_gradients()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tree = tree_of(model)
    expected = gm.materialize(tree)
    pending = gm.materialize_async(tree if where == "cpu" else sent(tree))

    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(torch.nan)
    # and the tensors are overwritten: a loss accumulated in place, or outputs of a compiled step
    for x in (tree["loss"], tree["ratios"], tree["matrix"], tree["grads"].columns, tree["grads"].flags):
        x.zero_()

    found = pending.result()
    for key in ("loss", "ratios", "matrix"):
        assert torch.equal(found[key], expected[key])
    for key in ("grads", "grouped"):
        assert rows(found[key]) == rows(expected[key])
    assert rows(found["more"][0]) == rows(expected["more"][0])


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "in a tree"])
def test_what_is_copied_lives_until_the_copy_has_been_read(alone):
    # a copy on a side stream reads memory of the main stream, which must not be freed before
    stats, loss = away(gm.collect([torch.ones(4)])), torch.ones(()).as_subclass(Away)
    pending = stats.materialize_async() if alone else gm.materialize_async([stats, loss])
    sources = [weakref.ref(stats.columns), *([] if alone else [weakref.ref(loss)])]
    del stats, loss
    gc.collect()
    assert None not in [source() for source in sources]
    pending.result()
    gc.collect()
    assert {source() for source in sources} == {None}


def test_threads_that_ask_at_once_all_get_the_result(device):
    pendings = [gm.materialize_async([away(gm.collect([torch.ones(2)]))]) for _ in range(50)]
    device.run(len(device.queue))
    found: list[list[gm.Report]] = []
    threads = [
        threading.Thread(target=lambda: found.append([p.result()[0] for p in pendings])) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(len(reports) == 50 for reports in found)


def test_it_says_whether_it_is_ready():
    assert repr(gm.collect([torch.ones(1)]).materialize_async()) == "<Pending: ready>"
