"""Reports in flight to the host, and mixed precision, on a real device.

The tests keep the device busy while they queue work, so that the order of the queued work shows. A call that
waited for the device is detected because the device is idle when it returns.
"""

from __future__ import annotations

import math
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import gradiometer as gm
from gradiometer.columns import TENSORS
from gradiometer.monitor.capture_mode import beside_captures
from support.gpu import (
    DEVICE,
    LONG,
    SIZES,
    assert_same_bits,
    keep_busy,
    no_waits,
    on_a_gpu,
    queued,
    record,
    small_model,
    values,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.gpu,
    on_a_gpu,
    # shown, not raised: drivers and Inductor give advice that depends on the machine
    pytest.mark.filterwarnings("default"),
]

two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")


@pytest.fixture(autouse=True)
def _clean(_dynamo: None) -> Iterator[None]:
    yield
    # the next test starts with an idle device
    torch.cuda.synchronize()


def tensors_of(factor: float = 1.0) -> dict[str, Tensor]:
    return {f"w{i}": values(size) * factor for i, size in enumerate(SIZES)}


def collections_of(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return all results that a step may request: slots, groups, ratios, a loss, flags."""
    stats = gm.collect(tensors, skip_nonfinite=True)
    grouped = stats.group({"odd": r"[13579]$", "even": r"[02468]$"})
    return {
        "stats": stats,
        "slots": [gm.collect([x]) for x in list(tensors.values())[:3]],
        "grouped": grouped,
        "ratio": gm.group_ratio(grouped, "odd", "even"),
        "nested": ({"health": stats.health, "skipped": stats.skipped}, stats.found_inf),
        "half": tensors["w1"].to(torch.bfloat16),
        "step": torch.full((), 2**40 + 1, device=DEVICE),
        "transposed": tensors["w3"][:6].view(2, 3).T,
        "epoch": 3,
    }


def near(value: Tensor) -> Any:
    """Compare the device's results with the host's computation from the same columns."""
    # a few sums of fp64, in another order
    return pytest.approx(value.tolist(), rel=1e-14)


def assert_same_result(found: Any, expected: Any) -> None:
    if isinstance(expected, gm.Report):
        assert found.to_dict() == expected.to_dict()
    elif isinstance(expected, Tensor):
        assert (found.device.type, found.dtype, found.shape) == ("cpu", expected.dtype, expected.shape)
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        assert_same_result(list(found.values()), list(expected.values()))
    elif isinstance(expected, (list, tuple)):
        assert type(found) is type(expected)
        for a, b in zip(found, expected, strict=True):
            assert_same_result(a, b)
    else:
        assert found == expected


def test_a_busy_device_is_busy():
    torch.cuda._sleep(1000)
    torch.cuda.synchronize()
    start = time.perf_counter()
    busy = keep_busy()
    assert not busy.query()
    busy.synchronize()
    assert busy.query()
    assert time.perf_counter() - start > 0.1
    # and a wait inside `queued` would be detected
    x = values(3)
    with pytest.raises((AssertionError, RuntimeError)):
        queued(lambda: x.sum().item())


# several collections in one transfer


def test_a_tree_of_collections_arrives_as_it_was():
    tree = collections_of(tensors_of())
    expected = gm.materialize(tree)
    assert expected["stats"].total_norm == near(tree["stats"].total_norm)
    assert expected["grouped"]["odd"].numel == tree["grouped"].numel[0].item()
    for key in ("ratio", "half", "step", "transposed"):
        assert torch.equal(expected[key], tree[key].cpu())
    _, pending = queued(lambda: gm.materialize_async(tree))
    assert_same_result(pending.result(), expected)


def test_all_groups_and_slots_take_one_copy_into_pinned_memory():
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    tree = collections_of(tensors_of())
    for _ in range(2):
        gm.materialize_async(tree).result()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        pending = gm.materialize_async(tree)
        pending.result()
        torch.cuda.synchronize()
    names = [event.name for event in seen.events() if event.device_type == DeviceType.CUDA]
    if not names:
        pytest.skip("the profiler sees nothing of this device")
    # the names of copies to the host in CUDA and ROCm
    copies = [name for name in names if "DtoH" in name or "DeviceToHost" in name]
    assert len(copies) == 1, names
    assert "Pageable" not in copies[0]
    assert not [name for name in names if "HtoD" in name or "HostToDevice" in name]


def test_a_report_of_its_own_is_pinned_too(monkeypatch):
    made, empty = [], torch.empty

    def seen(*args: Any, **kwargs: Any) -> Tensor:
        made.append(empty(*args, **kwargs))
        return made[-1]

    stats = gm.collect(tensors_of())
    monkeypatch.setattr(torch, "empty", seen)
    pending = stats.materialize_async()
    monkeypatch.undo()
    on_host = [x for x in made if x.device.type == "cpu"]
    assert [x.is_pinned() for x in on_host] == [True]
    assert on_host[0].numel() == len(SIZES) * (TENSORS.width + 1)
    assert pending.result().to_dict() == stats.materialize().to_dict()


# which calls wait


def test_ready_never_blocks():
    stats = gm.collect(tensors_of())
    busy, pending = queued(stats.materialize_async)
    took = []
    for _ in range(100):
        start = time.perf_counter()
        assert not pending.ready()
        took.append(time.perf_counter() - start)
    # it would be done if any of the calls had waited for it
    assert not busy.query()
    assert sorted(took)[50] < 1e-3
    busy.synchronize()
    # the copy follows right after
    while not pending.ready():
        time.sleep(1e-4)
    start = time.perf_counter()
    pending.result()
    assert time.perf_counter() - start < 0.1


def test_a_result_waits_for_a_device_that_is_busy():
    tensors = tensors_of()
    expected = gm.collect(tensors).materialize()
    busy, pending = queued(lambda: gm.collect(tensors).materialize_async())
    assert pending.result().to_dict() == expected.to_dict()
    assert busy.query()
    assert pending.ready()


def test_a_result_waits_for_its_own_copy_only():
    tensors = tensors_of()
    expected = gm.collect(tensors).materialize().to_dict()

    def copy_then_work() -> tuple[gm.Pending[gm.Report], torch.cuda.Event]:
        pending = gm.collect(tensors).materialize_async()
        return pending, keep_busy()

    # the first call loads kernels and pins memory
    copy_then_work()
    torch.cuda.synchronize()
    pending, busy = copy_then_work()
    assert pending.result().to_dict() == expected
    assert not busy.query(), "the result waited for work that comes after it"


def test_a_side_stream_is_not_held_up_by_the_main_one():
    tensors = tensors_of()
    expected = gm.materialize(collections_of(tensors))
    torch.cuda.synchronize()
    side = torch.cuda.Stream()

    def on_the_side() -> gm.Pending[Any]:
        with torch.cuda.stream(side):
            return gm.materialize_async(collections_of(tensors))

    busy, pending = queued(on_the_side)
    found = pending.result()
    assert pending.ready()
    assert not busy.query(), "the result waited for the main stream"
    assert_same_result(found, expected)


def test_a_side_stream_waits_for_what_it_is_told_to_wait_for():
    tensors = tensors_of()
    side = torch.cuda.Stream()

    def on_the_side() -> gm.Pending[Any]:
        stats = gm.collect(tensors)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            return stats.materialize_async()

    expected = gm.collect(tensors).materialize()
    busy, pending = queued(on_the_side)
    assert not pending.ready()
    assert pending.result().to_dict() == expected.to_dict()
    assert busy.query()


def test_many_are_under_way_at_once():
    x = torch.empty(5000, device=DEVICE)

    def many() -> list[gm.Pending[Any]]:
        # about twenty launches each; the launch queue holds a thousand before the host has to wait
        pendings = []
        for i in range(20):
            x.fill_(i)
            stats = gm.collect({"x": x})
            pendings.append(gm.materialize_async({"stats": stats, "norm": stats.total_norm, "step": i}))
        return pendings

    _, pendings = queued(many)
    assert not any(pending.ready() for pending in pendings)
    # the last one first: all others have arrived by then
    for i in reversed(range(20)):
        found = pendings[i].result()
        assert (found["step"], found["stats"]["x"].abs_max) == (i, i)
        assert found["stats"].total_norm == near(found["norm"])
        assert all(pending.ready() for pending in pendings)


def test_one_that_nobody_reads_is_dropped_without_a_wait():
    stats = gm.collect(tensors_of())
    expected = stats.materialize().to_dict()

    def dropped() -> gm.Pending[gm.Report]:
        for _ in range(10):
            stats.materialize_async()
        # its pinned memory must not be reused by the others, which are still to be written
        return stats.group({"all": "."}).materialize_async()

    _, pending = queued(dropped)
    assert pending.result().total_norm == pytest.approx(expected["total_norm"], rel=1e-14)
    assert stats.materialize_async().result().to_dict() == expected


# snapshots


@pytest.mark.parametrize("side", [False, True], ids=["main stream", "side stream"])
def test_what_training_does_next_changes_nothing(side):
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    x, y = torch.randn(8, 16, device=DEVICE), torch.randn(8, 5, device=DEVICE)
    stream = torch.cuda.Stream() if side else torch.cuda.current_stream()

    def step() -> tuple[gm.Pending[Any], list[Tensor]]:
        mse_loss(model(x), y).backward()
        stats = gm.collect_grads(model)
        tree = {"grads": stats, "weights": gm.collect_weights(model), "first": stats.norm}
        # the expected values, copied in stream order
        aside = [t.clone() for t in (stats.columns, tree["weights"].columns)]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            pending = gm.materialize_async(tree)
        torch.cuda.current_stream().wait_stream(stream)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        with torch.no_grad():
            for p in model.parameters():
                p.grad.fill_(math.nan)
        for t in (stats.columns, stats.flags, tree["weights"].columns):
            t.zero_()
        optimizer.zero_grad()
        return pending, aside

    _, (pending, (grads, weights)) = queued(step)
    found = pending.result()
    for report, columns in ((found["grads"], grads), (found["weights"], weights)):
        for name in ("sumsq", "sum", "abs_max"):
            assert [getattr(row, name) for row in report.rows()] == columns[:, TENSORS.index[name]].tolist()
    assert [row.norm for row in found["grads"].rows()] == near(found["first"])
    assert 0 < found["grads"].total_norm < math.inf


def test_memory_that_is_used_again_while_the_copy_is_pending_is_harmless(monkeypatch):
    tensors = tensors_of()
    expected = gm.collect(tensors).materialize()
    addresses: list[int] = []
    packed = gm.TensorStats.packed

    def seen(stats: gm.TensorStats) -> Tensor:
        matrix = packed(stats)
        addresses.append(matrix.data_ptr())
        return matrix

    monkeypatch.setattr(gm.TensorStats, "packed", seen)

    def copy_and_reuse() -> tuple[gm.Pending[gm.Report], list[Tensor]]:
        pending = gm.collect(tensors).materialize_async()
        shape = (len(SIZES), TENSORS.width + 1)
        rubbish = [torch.full(shape, math.nan, dtype=torch.float64, device=DEVICE) for _ in range(100)]
        return pending, rubbish

    _, (pending, rubbish) = queued(copy_and_reuse)
    # one of them covers it: the allocator may have joined it with other free memory
    assert any(0 <= addresses[-1] - x.data_ptr() < x.nbytes for x in rubbish)
    assert pending.result().to_dict() == expected.to_dict()


def test_memory_of_another_stream_is_kept_until_the_copy_has_been_made():
    tensors = tensors_of()
    expected = gm.collect(tensors).materialize()
    side = torch.cuda.Stream()

    def copy_late() -> tuple[gm.Pending[Any], list[Tensor]]:
        stats = gm.collect(tensors)
        norm = stats.total_norm + 0.0
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(LONG // 4)
            pending = gm.materialize_async({"stats": stats, "norm": norm})
        del stats, norm
        # allocated on the main stream at once, while the side stream still has to read
        rubbish = [
            torch.full(shape, math.nan, dtype=torch.float64, device=DEVICE)
            for shape in ((len(SIZES), TENSORS.width), (len(SIZES),), ())
            for _ in range(30)
        ]
        return pending, rubbish

    _, (pending, _rubbish) = queued(copy_late)
    found = pending.result()
    assert found["stats"].to_dict() == expected.to_dict()
    assert expected.total_norm == near(found["norm"])


def test_a_single_tensor_of_another_stream_is_kept_too():
    side = torch.cuda.Stream()

    def copy_late() -> tuple[gm.Pending[Tensor], list[Tensor]]:
        loss = torch.full((), 3.0, device=DEVICE)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(LONG // 4)
            pending = gm.materialize_async(loss)
        del loss
        return pending, [torch.full((), math.nan, device=DEVICE) for _ in range(100)]

    _, (pending, _rubbish) = queued(copy_late)
    assert pending.result().item() == 3.0


@pytest.mark.compiles
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_reports_of_a_compiled_step_are_those_of_their_step(mode):
    model = small_model()

    @torch.compile(fullgraph=True, mode=mode)
    def step(model: nn.Module, x: Tensor, y: Tensor) -> tuple[gm.TensorStats, Tensor]:
        loss = mse_loss(model(x), y)
        loss.backward()
        stats = gm.collect_grads(model)
        for p in model.parameters():
            p.grad = None
        return stats, loss.detach()

    pendings, expected = [], []
    for i in range(15):
        x, y = torch.randn(8, 16, device=DEVICE), torch.randn(8, 5, device=DEVICE) + i
        torch.compiler.cudagraph_mark_step_begin()
        stats, loss = step(model, x, y)
        expected.append((stats.norm.clone(), loss.clone()))
        # the next replay overwrites the outputs of this one
        pendings.append(gm.materialize_async({"stats": stats, "loss": loss}))
        del stats, loss
    for pending, (norm, loss) in zip(pendings, expected, strict=True):
        found = pending.result()
        assert [row.norm for row in found["stats"].rows()] == near(norm)
        assert found["loss"].item() == loss.item()
    assert len({loss.item() for _, loss in expected}) == 15


# captures, in the default mode, which a query by any thread would invalidate


def test_a_copy_under_way_does_not_disturb_a_capture():
    tensors = tensors_of()
    expected = gm.collect(tensors).materialize().to_dict()
    side = torch.cuda.Stream()
    asked: list[bool] = []

    def ask() -> None:
        with beside_captures(torch.device(DEVICE)) as may:
            asked.extend([may, pending.ready()])

    pending = gm.collect(tensors).materialize_async()
    torch.cuda.synchronize()
    x = torch.zeros(3, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        x += 1
        assert not pending.ready()
        with pytest.raises(RuntimeError, match="while a CUDA graph is captured"):
            pending.result()
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    graph.replay()
    assert x.tolist() == [1.0, 1.0, 1.0]
    if torch.version.cuda is not None:
        assert asked == [True, True]
    assert pending.ready()
    assert pending.result().to_dict() == expected


# two devices


@two_devices
def test_collections_of_two_devices_take_one_copy_to_the_host():
    tensors = tensors_of()
    trees = [collections_of(tensors)]
    with torch.cuda.device(1):
        trees.append({"stats": gm.collect({name: x.to("cuda:1") * 2 for name, x in tensors.items()})})
    expected = gm.materialize(trees)
    assert expected[1]["stats"].total_norm == 2 * expected[0]["stats"].total_norm
    _, pending = queued(lambda: gm.materialize_async(trees))
    assert not pending.ready()
    assert_same_result(pending.result(), expected)


@two_devices
@pytest.mark.parametrize("current", [0, 1])
def test_a_result_waits_for_the_device_that_it_comes_from(current):
    x = values(5000, device="cuda:1")
    expected = gm.collect({"x": x}).materialize().to_dict()
    gm.collect({"x": x}).materialize_async().result()
    with torch.cuda.device(0):
        busy = keep_busy()
    with torch.cuda.device(1):
        late = keep_busy()
    with torch.cuda.device(current):
        pending = gm.collect({"x": x}).materialize_async()
        assert not pending.ready()
        assert pending.result().to_dict() == expected
    assert late.query()
    busy.synchronize()


# mixed precision


def half_step(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
    x, y = torch.randn(8, 16, device=DEVICE), torch.randn(8, 5, device=DEVICE)
    with torch.autocast(DEVICE, dtype=torch.float16):
        loss = mse_loss(model(x).float(), y)
    scaler.scale(loss).backward()


@pytest.mark.parametrize("scale", [2.0**16, 2.0**-3, 1000.0])
def test_the_inverse_of_a_scale_is_taken_without_a_wait(scale):
    scaler = torch.amp.GradScaler(DEVICE, init_scale=scale)
    parameter = nn.Parameter(torch.zeros((), device=DEVICE))
    with no_waits():
        unused = gm.inverse_scale(scaler)
        scaler.scale(torch.ones((), device=DEVICE))
        inv_scale = gm.inverse_scale(scaler)
        disabled = gm.inverse_scale(torch.amp.GradScaler(DEVICE, enabled=False))
        assert {unused.device.type, inv_scale.device.type, disabled.device.type} == {DEVICE}
        with pytest.raises(RuntimeError, match="synchroniz"):
            scaler.get_scale()
    parameter.grad = torch.ones((), device=DEVICE)
    scaler.unscale_(torch.optim.SGD([parameter]))
    scaler.update(new_scale=4.0)
    assert unused.item() == inv_scale.item() == parameter.grad.item()
    assert disabled.item() == 1.0


def test_statistics_before_unscale_are_those_after_it():
    model, scaler = small_model(), torch.amp.GradScaler(DEVICE)
    optimizer = torch.optim.SGD(model.parameters())
    half_step(model, scaler)
    model[0].bias.grad[:3] = torch.tensor([math.nan, math.inf, -math.inf])
    scaled = [p.grad.clone() for p in model.parameters()]
    with no_waits():
        before = gm.collect_grads(model, inv_scale=gm.inverse_scale(scaler), skip_nonfinite=True)
    for p, grad in zip(model.parameters(), scaled, strict=True):
        assert torch.equal(p.grad.view(torch.int32), grad.view(torch.int32))
    scaler.unscale_(optimizer)
    after = gm.collect_grads(model, skip_nonfinite=True)
    # the scale is a power of two, so the results are bit-identical
    assert_same_bits(before, after)
    assert before.skipped.item() is True
    assert before.materialize().exploding == []


def test_a_half_precision_step_with_a_fused_optimizer_never_waits():
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    # starts far too large, and doubles every four good steps
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**28, growth_interval=4)
    pendings = []

    def step() -> None:
        half_step(model, scaler)
        stats = gm.collect_grads(model, inv_scale=gm.inverse_scale(scaler), skip_nonfinite=True)
        before = [p.detach().clone() for p in model.parameters()]
        scaler.step(optimizer)
        changed = sum((p.detach() != b).sum() for p, b in zip(model.parameters(), before, strict=True))
        found = sum(scaler._found_inf_per_device(optimizer).values())
        tree = {"stats": stats, "changed": changed, "theirs": found, "ours": stats.found_inf}
        pendings.append(gm.materialize_async(tree))
        scaler.update()
        optimizer.zero_grad()

    for i in range(60):
        if i < 3:
            # the first steps load kernels and make the optimizer's state
            step()
            continue
        with no_waits():
            step()
    results = [pending.result() for pending in pendings]
    skipped = [i for i, found in enumerate(results) if found["stats"].skipped]
    assert skipped == [i for i, found in enumerate(results) if found["changed"].item() == 0]
    assert all(torch.equal(found["ours"], found["theirs"]) for found in results)
    assert not any(found["stats"].exploding for found in results)
    assert 0 < len(skipped) < 60


@pytest.mark.parametrize("bad", [None, math.inf, math.nan])
def test_a_fused_optimizer_takes_found_inf(bad):
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    for step in range(3):
        for p in model.parameters():
            p.grad = torch.ones_like(p) * 8.0
        if bad is not None and step == 1:
            model[2].bias.grad[1] = bad
        before = [p.detach().clone() for p in model.parameters()]
        with no_waits():
            stats = gm.collect_grads(model, inv_scale=0.125)
            optimizer.found_inf = stats.found_inf
            optimizer.grad_scale = torch.full((), 8.0, device=DEVICE)
        optimizer.step()
        same = all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
        assert same is (bad is not None and step == 1)


def test_a_recorded_step_reads_the_scale_of_the_moment():
    scaler = torch.amp.GradScaler(DEVICE)
    scaler.scale(torch.ones((), device=DEVICE))
    x = {"x": values(5000)}
    graph, (stats, inv_scale) = record(
        lambda: (gm.collect(x, inv_scale=gm.inverse_scale(scaler)), gm.inverse_scale(scaler))
    )
    for scale in (2.0**16, 4.0, 0.5):
        scaler.update(new_scale=scale)
        graph.replay()
        assert inv_scale.item() == 1 / scale
        assert_same_bits(stats, gm.collect(x, inv_scale=1 / scale))


@pytest.mark.compiles
def test_a_compiled_step_reads_the_scale_of_the_moment():
    scaler = torch.amp.GradScaler(DEVICE)
    scaler.scale(torch.ones((), device=DEVICE))
    x = [values(5000)]

    @torch.compile(fullgraph=True)
    def measure() -> gm.TensorStats:
        return gm.collect(x, inv_scale=gm.inverse_scale(scaler))

    for i, scale in enumerate((2.0**16, 4.0, 0.5)):
        scaler.update(new_scale=scale)
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            stats = measure()
        assert_same_bits(stats, gm.collect(x, inv_scale=1 / scale))
