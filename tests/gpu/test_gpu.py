"""The kernels on a real device: their numbers, and behavior that only a device shows.

Streams, graph capture and replay, reused addresses, tables that later calls must not
change, and waits that only a driver notices: in every test here a collection that waits for the
device is an error.
"""

from __future__ import annotations

import gc
import math
import threading
from contextlib import nullcontext
from functools import wraps
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.functional import mse_loss

import gradiometer as gm
from gradiometer import clip_grad_norm_, collect_and_clip_, ops
from gradiometer.columns import DEFAULT_THRESHOLDS, TENSORS
from gradiometer.ops import launch_plans, uploads
from support.gpu import (
    DEVICE,
    DTYPES,
    SIZES,
    assert_same_bits,
    no_waits,
    on_a_gpu,
    record,
    small_model,
    values,
)

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [
    pytest.mark.gpu,
    on_a_gpu,
    pytest.mark.usefixtures("_dynamo"),
    # shown, not raised: drivers and Inductor give advice that depends on the machine
    pytest.mark.filterwarnings("default"),
]

EXACT = ("numel", "n_zero", "n_nan", "n_posinf", "n_neginf", "abs_max")
# relative to the exact value, for the kernels and for the CPU alike
TOLERANCE = 1e-13

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def without_waits(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        # Dynamo traces this, and must not see the change of mode
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        with no_waits():
            return function(*args, **kwargs)

    return call


@pytest.fixture(autouse=True)
def _collections_never_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("collect", "collect_grads", "collect_weights", "total_norm"):
        monkeypatch.setattr(gm, name, without_waits(getattr(gm, name)))


def to_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu() for name, tensor in tensors.items()}


def assert_measured(stats: gm.TensorStats, tensors: dict[str, Tensor], **options: Any) -> None:
    """Compare with the CPU's results for the same numbers."""
    expected = gm.collect(to_host(tensors), **options)
    assert stats.names == expected.names
    assert stats.columns.device.type == torch.device(DEVICE).type
    found = gm.TensorStats(stats.names, stats.columns.cpu(), stats.flags.cpu(), stats.thresholds)
    for name in EXACT:
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    torch.testing.assert_close(found.finite_norm, expected.finite_norm, rtol=2 * TOLERANCE, atol=0.0)
    # an error of the sum is relative to the sum of magnitudes, which the Cauchy-Schwarz inequality bounds
    magnitudes = expected.finite_norm * expected.numel.sqrt()
    assert torch.all((found.sum - expected.sum).abs() <= 2 * TOLERANCE * magnitudes)
    assert torch.equal(found.flags, expected.flags)


def assert_near(a: Tensor, b: Tensor) -> None:
    """Compare the results of two compilers for the same step."""
    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


# values


@every_dtype
def test_the_kernels_agree_with_the_cpu(dtype):
    tensors = {str(size): values(size, dtype) for size in (0, *SIZES)}
    assert_measured(gm.collect(tensors), tensors)


def test_several_dtypes_share_a_call():
    tensors = {f"{i}": values(size, DTYPES[i % 4]) for i, size in enumerate(SIZES)}
    assert_measured(gm.collect(tensors), tensors)


@every_dtype
def test_views_that_begin_anywhere_agree_with_the_cpu(dtype):
    base = values(100_000, dtype)
    tensors = {
        f"{start}+{size}": base[start : start + size]
        for start in range(17)
        for size in (1, 5, 1024, 1040, 2**15 + 3, 70_001)
    }
    assert {x.data_ptr() % 16 // dtype.itemsize for x in tensors.values()} == set(range(16 // dtype.itemsize))
    assert_measured(gm.collect(tensors), tensors)


def test_all_strides_and_kinds_agree_with_the_cpu():
    x = values(6 * 5 * 40 * 7).view(6, 5, 40, 7)
    matrix = values(300 * 700).view(300, 700)
    real = values(5000, torch.float64)
    number = torch.complex(real, real.flip(0))
    sparse = torch.sparse_coo_tensor([[0, 2, 2]], values(12).view(3, 4), (9, 4), device=DEVICE)
    tensors = {
        "transposed": matrix.T,
        "channels_last": x.contiguous(memory_format=torch.channels_last),
        "sliced": matrix[3::2, 5:600:3],
        "expanded": matrix[:1].expand(40, 700),
        "permuted": x.permute(2, 0, 3, 1),
        "flipped": matrix.flip(1),
        "0-d": matrix[1, 1],
        "empty": matrix[:0],
        "requires grad": matrix.clone().requires_grad_(),
        "complex": number,
        "conjugate": number.conj(),
        "negative": number.conj().imag,
        "half complex": torch.view_as_complex(values(64, torch.float16).view(32, 2)),
        "sparse": sparse,
        "e4m3": values(3000).to(torch.float8_e4m3fn),
        "e5m2": values(3000).to(torch.float8_e5m2),
    }
    # torch coalesces a sparse tensor, and waits to learn the number of coordinates
    stats = gm.collect.__wrapped__(tensors)
    tensors["sparse"] = sparse.to_dense()
    assert_measured(stats, tensors)


@every_dtype
def test_nan_and_inf_are_counted_wherever_they_are(dtype):
    tensors = {}
    for bad in (math.nan, math.inf, -math.inf):
        for place in (0, 1, 1023, 1024, 2**15 - 1, 2**15, 2 * 2**15 + 5, -1):
            # unaligned at both ends
            x = values(3 * 2**15 + 1030, dtype)[1:-1]
            x[place] = bad
            tensors[f"{bad} at {place}"] = x
        tensors[f"{bad} alone"] = torch.full((1,), bad, dtype=dtype, device=DEVICE)
        tensors[f"{bad} everywhere"] = torch.full((40_000,), bad, dtype=dtype, device=DEVICE)
    mixed = values(100_000, dtype)
    mixed[::7], mixed[1::11], mixed[2::13] = math.nan, math.inf, -math.inf
    tensors["mixed"] = mixed
    stats = gm.collect(tensors)
    assert_measured(stats, tensors)
    report = stats.materialize()
    assert report["nan everywhere"].n_nan == 40_000
    assert report["inf at -1"].n_posinf == 1
    assert report["-inf alone"].n_neginf == 1


@every_dtype
def test_the_smallest_and_largest_numbers_keep_their_value(dtype):
    info = torch.finfo(dtype)
    # outside of these limits the square of a float64 overflows or underflows
    low, high = (1e-150, 1e150) if dtype == torch.float64 else (info.smallest_normal / 2, info.max)
    tensors = {
        "low": torch.full((5000,), low, dtype=dtype, device=DEVICE),
        "high": torch.full((5000,), -high, dtype=dtype, device=DEVICE),
        "zeros": torch.tensor([0.0, -0.0, low], dtype=dtype, device=DEVICE),
    }
    stats = gm.collect(tensors)
    assert_measured(stats, tensors)
    assert stats.n_zero.tolist() == [0, 0, 2]
    assert stats.found_inf == 0.0
    assert stats.norm[1].item() == pytest.approx(high * math.sqrt(5000), rel=0.01)


def test_thresholds_are_compared_in_fp64():
    # rounded to fp32 it is above 0.1
    x = torch.tensor([0.1], dtype=torch.float64, device=DEVICE)
    below = math.nextafter(0.1, 0.0)
    above = math.nextafter(0.1, 1.0)
    for thresholds, flag in (
        (gm.Thresholds(vanishing=0.1), 0),
        (gm.Thresholds(vanishing=above), gm.Flag.VANISHING),
        (gm.Thresholds(exploding=0.1), 0),
        (gm.Thresholds(exploding=below), gm.Flag.EXPLODING),
    ):
        assert gm.collect([x], thresholds=thresholds).flags.item() == flag


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
def test_an_inv_scale_tensor_is_applied(dtype):
    tensors = {str(size): values(size) for size in SIZES}
    inv_scale = torch.tensor(2.0**-10, dtype=dtype)
    stats = gm.collect(tensors, inv_scale=inv_scale.to(DEVICE))
    assert_measured(stats, tensors, inv_scale=inv_scale)


# bit-identical results


def test_a_row_has_the_same_bits_in_any_company():
    tensors = {f"{size} {dtype}": values(size, dtype) for size in SIZES for dtype in DTYPES}
    together = gm.collect(tensors)
    rows = dict(zip(together.names, together.columns, strict=True))
    pairs = list(tensors.items())
    shuffled = [pairs[i] for i in torch.randperm(len(pairs)).tolist()]
    again = gm.collect(shuffled)
    for name, row in zip(again.names, again.columns, strict=True):
        assert torch.equal(row, rows[name])
    for name, tensor in tensors.items():
        assert torch.equal(gm.collect([tensor]).columns[0], rows[name])
    assert_same_bits(gm.collect(tensors), together)


def test_a_copy_elsewhere_has_the_same_bits():
    tensors = {str(size): values(size) for size in SIZES}
    stats = gm.collect(tensors)
    # allocations begin at multiples of 512 bytes
    assert_same_bits(gm.collect({name: x.clone() for name, x in tensors.items()}), stats)


# waits for the device


class Model(nn.Module):
    """Parameters of several shapes and dtypes."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        for i, size in enumerate(SIZES):
            self.register_parameter(f"w{i}", nn.Parameter(values(size, DTYPES[i % 4])))

    def renew_gradients(self, factor: float) -> None:
        for parameter in self.parameters():
            parameter.grad = parameter.detach() * (self.scale * factor)

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.named_parameters()}


def test_a_wait_in_a_collection_would_be_seen(monkeypatch):
    x = values(3)
    with pytest.raises(RuntimeError, match="synchroniz"), no_waits():
        x.sum().item()
    assert torch.cuda.get_sync_debug_mode() == 0
    measure = ops.measure

    def waits(*args: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        found = measure(*args, **options)
        found[0].sum().item()
        return found

    monkeypatch.setattr(ops, "measure", waits)
    with pytest.raises(RuntimeError, match="synchroniz"):
        gm.collect([x])


def test_nothing_waits_for_the_device():
    model = Model()
    model.renew_gradients(1.0)
    inv_scale = torch.ones((), device=DEVICE)
    # kernels are compiled and loaded at their first call
    gm.collect_grads(model)
    gm.collect_grads(model, inv_scale=inv_scale)
    gm.collect_weights(model)
    torch.cuda.synchronize()
    pending = []
    with no_waits():
        for factor in (1.0, 2.0, 3.0):
            # other addresses need other tables
            model.renew_gradients(factor)
            stats = gm.collect_grads(model)
            for name in (
                *TENSORS.index,
                "norm",
                "rms",
                "mean",
                "std",
                "zero_fraction",
                "n_inf",
                "n_nonfinite",
            ):
                getattr(stats, name)
            assert stats.total_norm.is_cuda
            assert stats.found_inf.is_cuda
            grouped = stats.group({"odd": r"w\d*[13579]$", "all": ".", "none": "x"})
            pending += [stats.materialize_async(), grouped.merge(grouped).materialize_async()]
            gm.collect_grads(model, inv_scale=inv_scale)
            gm.collect_grads(model, inv_scale=0.5)
            gm.collect_grads(model, thresholds=gm.Thresholds(exploding=factor))
            gm.collect_weights(model)
            gm.total_norm(list(model.parameters()))
            pending[-1].ready()

    reports = [p.result() for p in pending[::2]]
    assert all(p.ready() for p in pending)
    one = gm.collect(model.gradients()).total_norm.item() / 3
    # each report is of its own step, whatever was computed later
    for factor, report in zip((1.0, 2.0, 3.0), reports, strict=True):
        assert report.total_norm == pytest.approx(one * factor, rel=1e-2)


def test_pending_reports_are_those_of_their_step():
    x = torch.empty(5_000_000, device=DEVICE)
    pending = []
    for i in range(30):
        x.fill_(i)
        pending.append(gm.collect({"x": x}).materialize_async())
    assert [p.result()["x"].abs_max for p in pending] == list(range(30))


# pointer tables


def test_tables_are_uploaded_when_an_address_changed_and_only_then(monkeypatch):
    launch_plans.clear()
    pinned, upload = [], uploads._upload
    monkeypatch.setattr(
        uploads, "_upload", lambda host, device: (pinned.append(host.is_pinned()), upload(host, device))[1]
    )
    tensors = {str(size): values(size) for size in SIZES}
    # the first call meets the list, the second one keeps its table
    gm.collect(tensors)
    gm.collect(tensors)
    assert pinned
    assert all(pinned)
    pinned.clear()
    for _ in range(3):
        for x in tensors.values():
            x.mul_(2.0)
        assert_measured(gm.collect(tensors), tensors)
    assert pinned == []
    tensors["7"] = values(8)[:7]
    assert_measured(gm.collect(tensors), tensors)
    assert pinned == [True]


def test_addresses_that_are_used_again_are_read_again():
    seen: set[int] = set()
    again = 0
    for i in range(40):
        # freed and allocated in another order: most addresses are reused for other tensors
        tensors = {str(size): torch.full((size,), float(i + size), device=DEVICE) for size in SIZES}
        if i % 3 == 0:
            tensors = dict(sorted(tensors.items(), reverse=True))
        addresses = {x.data_ptr() for x in tensors.values()}
        again += len(addresses & seen)
        seen |= addresses
        stats = gm.collect(tensors)
        del tensors
        assert stats.abs_max.tolist() == [float(i + int(name)) for name in stats.names]
        if i % 10 == 9:
            gc.collect()
            torch.cuda.empty_cache()
    assert again > 0


def test_a_steady_call_copies_nothing_and_launches_twice(monkeypatch):
    from gradiometer import kernels

    tensors = [values(1000 + i) for i in range(50)]
    for _ in range(3):
        measured = ops.tensor_stats(tensors, DEFAULT_THRESHOLDS)
    launches = []
    for name in ("moments", "finalize"):
        launch = getattr(kernels, name)
        monkeypatch.setattr(
            kernels, name, lambda *args, launch=launch: (launches.append(launch), launch(*args))[1]
        )
    monkeypatch.setattr(uploads, "_upload", lambda *_: pytest.fail("copied"))
    again = ops.tensor_stats(tensors, DEFAULT_THRESHOLDS)
    assert len(launches) == 2
    assert torch.equal(again[0], measured[0])


def test_tables_that_are_replaced_are_not_written_while_they_are_read():
    # keep the device busy, so that all calls are queued before the first one runs
    busy = torch.ones(4000, 4000, device=DEVICE)
    for _ in range(20):
        busy = busy @ busy * 1e-4
    results, expected = [], []
    for i in range(40):
        tensors = [torch.full((n,), float(i), device=DEVICE) for n in (5, 70_000, 333)]
        results.append(ops.tensor_stats(tensors, DEFAULT_THRESHOLDS)[0])
        expected.append([float(i)] * 3)
        # freed, so that later lists and tables may reuse the memory
        del tensors
    assert [columns[:, TENSORS.index["abs_max"]].tolist() for columns in results] == expected


def test_models_of_the_same_shapes_do_not_share_what_they_measure():
    models = [Model(1.0), Model(2.0), Model(4.0)]
    for factor in (1.0, 3.0):
        for model in models:
            model.renew_gradients(factor)
        for model in [*models, *reversed(models)]:
            assert_measured(gm.collect_grads(model), model.gradients())
            assert_measured(gm.collect_weights(model), dict(model.named_parameters()))


def test_thresholds_and_sizes_do_not_compile_a_kernel_anew():
    from gradiometer.kernels.finalize import _finalize_kernel
    from gradiometer.kernels.moments import _moments_kernel

    def compiled() -> int:
        device = torch.cuda.current_device()
        return sum(len(kernel.device_caches[device][0]) for kernel in (_finalize_kernel, _moments_kernel))

    x = values(3000)
    gm.collect([x])
    before = compiled()
    for thresholds in (
        gm.Thresholds(1e-3, 1.0, 0.5),
        gm.Thresholds(0.0, math.inf, 2.0),
        gm.Thresholds(1, 16, 1),
    ):
        gm.collect([x], thresholds=thresholds)
        gm.collect([x, values(16)] * 8, thresholds=thresholds)
        gm.collect([values(10 * 2**15), x[1:]], thresholds=thresholds)
    assert compiled() == before


# streams


def test_a_call_runs_on_the_current_stream():
    streams = [torch.cuda.Stream() for _ in range(2)]
    for i in range(10):
        expected, found = [], []
        for k, stream in enumerate(streams):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                # long enough that the other stream's call is queued before it finishes
                x = torch.full((30_000_000,), 1.0, device=DEVICE)
                for _ in range(5):
                    x.add_(1.0)
                x.mul_(i + k)
                found.append(gm.collect({"x": x}).materialize_async())
                expected.append(6.0 * (i + k))
        assert [pending.result()["x"].abs_max for pending in found] == expected


def test_one_list_is_measured_on_several_streams_in_turn():
    tensors = {str(size): values(size) for size in SIZES}
    expected = gm.collect(tensors)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    found = []
    for i in range(30):
        with torch.cuda.stream(streams[i % 3]):
            if i % 5 == 4:
                # moved to another address, when no call reads the old one any more
                torch.cuda.synchronize()
                tensors["1025"] = tensors["1025"].clone()
                torch.cuda.synchronize()
            found.append(gm.collect(tensors))
    torch.cuda.synchronize()
    for stats in found:
        assert_same_bits(stats, expected)


def test_tables_of_one_stream_are_not_read_on_another():
    tensors = [values(n) for n in (5, 70_000, 333)]
    for _ in range(3):
        expected = ops.tensor_stats(tensors, DEFAULT_THRESHOLDS)[0]
    streams = [torch.cuda.Stream() for _ in range(3)]
    results = []
    for i in range(12):
        stream = streams[i % 3]
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            # later copies on this stream run after this
            torch.cuda._sleep(20_000_000)
            results.append(ops.tensor_stats(tensors, DEFAULT_THRESHOLDS)[0])
    torch.cuda.synchronize()
    assert all(torch.equal(result, expected) for result in results)


def test_weights_and_gradients_on_two_threads_keep_to_themselves():
    failures: list[object] = []

    def run(scale: float) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(50):
                tensors = [torch.full((n,), scale, device=DEVICE) for n in (5, 70_000)]
                found = ops.tensor_stats(tensors, DEFAULT_THRESHOLDS)[0][:, TENSORS.index["abs_max"]].tolist()
                if found != [scale, scale]:
                    failures.append(found)

    threads = [threading.Thread(target=run, args=(float(i + 1),)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


# fingerprints


@every_dtype
def test_fingerprints_are_those_of_the_cpu(dtype):
    base = values(100_000, dtype)
    tensors = {
        f"{start}+{size}": base[start : start + size]
        for start in range(9)
        for size in (0, 1, 5, 1040, 2**15 + 3, 70_001)
    }
    tensors["transposed"] = base[:9_900].view(99, 100).t()
    ours = gm.collect(tensors, fingerprint=True)
    theirs = gm.collect({name: x.cpu() for name, x in tensors.items()}, fingerprint=True)
    assert torch.equal(ours.fingerprints.cpu(), theirs.fingerprints)
    assert_measured(ours, tensors)


def test_a_replay_makes_new_fingerprints():
    x = values(70_001)
    graph, stats = record(lambda: gm.collect([x], fingerprint=True))
    for _ in range(3):
        x.add_(1.0)
        graph.replay()
        assert torch.equal(stats.fingerprints.cpu(), gm.collect([x.cpu()], fingerprint=True).fingerprints)


# manually captured graphs


def test_a_recorded_step_measures_what_each_replay_computes():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 33), nn.GELU(), nn.Linear(33, 5)).to(DEVICE)
    x, y = torch.randn(8, 16, device=DEVICE), torch.randn(8, 5, device=DEVICE)

    def step() -> gm.TensorStats:
        # the capture allocates the gradients, and they keep their addresses
        model.zero_grad()
        mse_loss(model(x), y).backward()
        return gm.collect_grads(model)

    graph, stats = record(step)
    grads = {name: p.grad for name, p in model.named_parameters()}
    norms = set()
    for i in range(10):
        x.normal_()
        y.normal_(mean=i)
        graph.replay()
        assert_measured(stats, grads)
        assert_same_bits(stats, gm.collect(grads))
        norms.add(stats.total_norm.item())
    assert len(norms) == 10


@pytest.mark.parametrize(("tensors", "steady"), [(1, 0), (2, 0), (7, 0), (5, 3)])
def test_replays_are_not_changed_by_calls_in_between(tensors, steady):
    fixed = {str(i): values(5000 + i) for i in range(tensors)}
    # tables that steady calls have left are dropped and overwritten below
    for _ in range(steady):
        gm.collect(fixed)
    graph, stats = record(lambda: gm.collect(fixed))
    for i in range(5):
        for x in fixed.values():
            x.fill_(float(i + 1))
        # the same shapes, so the same cached tables, with other addresses; and their memory is overwritten
        others = {name: torch.full_like(x, 100.0) for name, x in fixed.items()}
        assert_measured(gm.collect(others), others)
        del others
        launch_plans.clear()
        gc.collect()
        sizes = (5, 8, 16, 30, 32, 64, 128) * 4
        rubbish = [torch.full((n,), -1, dtype=torch.int64, device=DEVICE) for n in sizes]
        stats.columns.zero_()
        graph.replay()
        assert_measured(stats, fixed)
        del rubbish
        assert_measured(gm.collect(fixed), fixed)


def test_several_recordings_live_side_by_side():
    inputs = [{name: values(size) for name, size in (("a", 40_000), ("b", 1023))} for _ in range(3)]
    recorded = [record(lambda tensors=tensors: gm.collect(tensors)) for tensors in inputs]
    # two captures of one set of tensors
    recorded.append(record(lambda: gm.collect(inputs[0])))
    inputs.append(inputs[0])
    for order in ((0, 1, 2, 3), (3, 1, 0, 2), (2, 2, 0, 0)):
        for k, tensors in enumerate(inputs[:3]):
            for x in tensors.values():
                x.fill_(float(10 * k + order[0] + 1))
        for i in order:
            graph, stats = recorded[i]
            stats.columns.zero_()
            graph.replay()
            assert_measured(stats, inputs[i])


def test_graphs_are_replayed_on_two_streams_at_once():
    sides = []
    for k in range(2):
        stream = torch.cuda.Stream()
        tensors = {"big": values(5_000_000 + k), "small": values(77), "half": values(9001, torch.bfloat16)}
        sides.append((stream, tensors, *record(lambda tensors=tensors: gm.collect(tensors), stream)))
    torch.cuda.synchronize()
    for i in range(20):
        found = []
        for k, (stream, tensors, graph, stats) in enumerate(sides):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for x in tensors.values():
                    x.fill_(float(1 + i + 10 * k))
                graph.replay()
                found.append(stats.materialize_async())
                # the same shapes, on the stream where a replay is running
                gm.collect(tensors)
        torch.cuda.synchronize()
        for k, ((_, tensors, _, stats), pending) in enumerate(zip(sides, found, strict=True)):
            assert_same_bits(stats, gm.collect(tensors))
            assert [row.abs_max for row in pending.result().rows()] == [1.0 + i + 10 * k] * 3


def test_recordings_that_share_a_pool_are_replayed_in_their_order():
    tensors = [{"a": values(40_000 + k), "b": values(1023)} for k in range(3)]
    pool = torch.cuda.graph_pool_handle()
    recorded = [record(lambda each=each: gm.collect(each), pool=pool) for each in tensors]
    for i in range(3):
        for each in tensors:
            for x in each.values():
                x.normal_(std=i + 1)
        for graph, _ in recorded:
            graph.replay()
        for (_, stats), each in zip(recorded, tensors, strict=True):
            assert_same_bits(stats, gm.collect(each))


def test_gradients_of_others_come_and_go_between_replays():
    torch.manual_seed(0)
    recorded, other = small_model(), small_model()
    x, y = torch.randn(8, 16, device=DEVICE), torch.randn(8, 5, device=DEVICE)
    mse_loss(recorded(x), y).backward()
    graph, stats = record(lambda: gm.collect_grads(recorded))
    kept = []
    for i in range(10):
        # freed, and allocated at the other model's addresses
        other.zero_grad()
        kept.append(torch.empty(17 * (i + 1), device=DEVICE))
        mse_loss(other(x + i), y).backward()
        expected = gm.collect_grads(other)
        recorded.zero_grad(set_to_none=False)
        mse_loss(recorded(x - i), y).backward()
        stats.columns.zero_()
        graph.replay()
        assert_same_bits(stats, gm.collect_grads(recorded))
        assert_same_bits(gm.collect_grads(other), expected)
    assert expected.total_norm != stats.total_norm


def test_a_graph_that_is_dropped_leaves_the_others_alone():
    x, y = {"x": values(5000)}, {"x": values(5001)}
    dropped, _ = record(lambda: gm.collect(x))
    graph, stats = record(lambda: gm.collect(y))
    dropped.replay()
    del dropped
    gc.collect()
    torch.cuda.empty_cache()
    y["x"].fill_(3.0)
    graph.replay()
    assert_measured(stats, y)
    assert_measured(gm.collect(x), x)


def test_everything_on_the_device_can_be_recorded():
    x = {
        "a": values(50_000),
        "b": values(999, torch.bfloat16),
        "c": values(64, torch.float16).view(8, 8)[:, ::2],
    }
    inv_scale = torch.tensor(0.5, device=DEVICE)

    def step() -> tuple[gm.TensorStats, Tensor, Tensor]:
        stats = gm.collect(x, inv_scale=inv_scale)
        grouped = stats.group({"first": "a", "rest": "[bc]", "none": "z"})
        return grouped.merge(grouped), stats.total_norm, stats.found_inf

    graph, (merged, norm, found_inf) = record(step)
    for scale in (0.5, 0.25):
        inv_scale.fill_(scale)
        x["a"].normal_()
        graph.replay()
        expected, expected_norm, _ = step()
        assert_same_bits(merged, expected)
        assert (norm, found_inf) == (expected_norm, 0.0)
    x["b"][5] = math.nan
    graph.replay()
    assert (norm.isnan().item(), found_inf) == (True, 1.0)


def test_an_inv_scale_that_is_a_number_can_be_recorded():
    x = {"a": values(50_000)}
    graph, stats = record(lambda: gm.collect(x, inv_scale=0.25))
    x["a"].normal_()
    graph.replay()
    assert_measured(stats, x, inv_scale=0.25)


# compiled steps


def measured_step(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, gm.TensorStats, dict[str, Tensor]]:
    loss = mse_loss(model(x), y)
    loss.backward()
    stats = gm.collect_grads(model)
    grads = {name: p.grad for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = None
    return loss.detach(), stats, grads


def updating_step(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, gm.TensorStats, dict[str, Tensor]]:
    loss, stats, grads = measured_step(model, x, y)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.sub_(0.1 * grads[name])
    return loss, stats, grads


@pytest.mark.compiles
@pytest.mark.parametrize("step", [measured_step, updating_step])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_step_measures_what_it_computes(mode, step, monkeypatch):
    replays = []
    replay = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(
        torch.cuda.CUDAGraph, "replay", lambda graph: (replays.append(graph), replay(graph))[1]
    )

    model, twin = small_model(), small_model()
    compiled = torch.compile(step, fullgraph=True, mode=mode)
    for i in range(20):
        x, y = torch.randn(8, 16, device=DEVICE), torch.randn(8, 5, device=DEVICE)
        torch.compiler.cudagraph_mark_step_begin()
        # by then it is compiled, warmed up and captured
        waits = no_waits() if i >= 5 else nullcontext()
        with torch._dynamo.config.patch(error_on_recompile=i > 0), waits:
            loss, stats, grads = compiled(model, x, y)
        assert stats.names == ("0.weight", "0.bias", "2.weight", "2.bias")
        assert_measured(stats, grads)
        assert_same_bits(stats, gm.collect(grads))
        same_loss, same_stats, _ = step(twin, x, y)
        assert_near(loss, same_loss)
        assert_near(stats.norm, same_stats.norm)
        # calls in between, with the same shapes
        others = {name: torch.ones_like(grad) for name, grad in grads.items()}
        assert gm.collect(others).abs_max.tolist() == [1.0] * 4
        del loss, stats, grads
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    if mode == "reduce-overhead" and step is measured_step:
        # neither the op nor the tables left by a warm-up run prevent CUDA graphs
        assert counters["inductor"]["cudagraph_skips"] == 0
        assert len(replays) >= 10


@pytest.mark.compiles
def test_a_compiled_step_between_steady_calls_keeps_its_pool_clean():
    # weights are measured in eager mode before, between and after steps that Inductor captures
    model = small_model()
    compiled = torch.compile(measured_step, fullgraph=True, mode="reduce-overhead")
    for _ in range(12):
        before = gm.collect_weights(model)
        x, y = torch.randn(8, 16, device=DEVICE), torch.randn(8, 5, device=DEVICE)
        torch.compiler.cudagraph_mark_step_begin()
        _, stats, grads = compiled(model, x, y)
        assert_measured(stats, grads)
        assert_same_bits(gm.collect_weights(model), before)
        del stats, grads
    assert counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.compiles
def test_a_call_inside_an_op_of_a_recorded_graph_leaves_nothing_in_its_pool():
    # its implementation is ordinary eager code, run while Inductor warms up and captures
    @torch.library.custom_op("gradiometer_tests::measured_sum", mutates_args=())
    def measured_sum(x: Tensor) -> Tensor:
        return gm.collect([x, weight]).sum.sum()

    @measured_sum.register_fake
    def _(x: Tensor) -> Tensor:
        return x.new_empty((), dtype=torch.float64)

    weight = values(1000)
    for _ in range(3):
        gm.collect([torch.ones(64, device=DEVICE), weight])
    compiled = torch.compile(lambda x: measured_sum(x * 2.0) + 1.0, mode="reduce-overhead", fullgraph=True)
    for i in range(6):
        x = torch.full((64,), float(i), device=DEVICE)
        torch.compiler.cudagraph_mark_step_begin()
        expected = 128.0 * i + weight.double().sum().item() + 1.0
        assert compiled(x).item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.compiles
def test_several_sizes_of_batch_are_recorded_side_by_side():
    model = small_model()
    compiled = torch.compile(measured_step, fullgraph=True, mode="reduce-overhead", dynamic=False)
    for size in (4, 8, 4, 8, 4, 8, 8, 4, 4):
        x, y = torch.randn(size, 16, device=DEVICE), torch.randn(size, 5, device=DEVICE)
        torch.compiler.cudagraph_mark_step_begin()
        _, stats, grads = compiled(model, x, y)
        assert_measured(stats, grads)
        assert_same_bits(stats, gm.collect(grads))
        del stats, grads


@pytest.mark.compiles
@pytest.mark.parametrize("shared", [False, True], ids=["a step each", "one step"])
@pytest.mark.parametrize("step", [measured_step, updating_step])
def test_two_models_are_trained_in_turn_by_recorded_steps(step, shared):
    models = [small_model(), small_model()]
    with torch.no_grad():
        for parameter in models[1].parameters():
            parameter.mul_(-2.0)

    def compiled() -> Callable[..., Any]:
        return torch.compile(step, fullgraph=True, mode="reduce-overhead")

    steps = [compiled()] * 2 if shared else [compiled(), compiled()]
    for k in (0, 1, 0, 1, 0, 0, 1, 1, 0, 1, 1, 0, 1, 0):
        x, y = torch.randn(8, 16, device=DEVICE), torch.randn(8, 5, device=DEVICE)
        torch.compiler.cudagraph_mark_step_begin()
        _, stats, grads = steps[k](models[k], x, y)
        assert_same_bits(stats, gm.collect(grads))
        twin, undone = small_model(), 0.1 if step is updating_step else 0.0
        twin.load_state_dict({name: p + undone * grads[name] for name, p in models[k].named_parameters()})
        assert_near(stats.norm, measured_step(twin, x, y)[1].norm)
        del stats, grads


@pytest.mark.compiles
@pytest.mark.parametrize("freed", [True, False], ids=["freed", "in place"])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_gradients_made_outside_are_measured_by_a_compiled_update(mode, freed):
    model = small_model()

    def update() -> gm.TensorStats:
        stats = gm.collect_grads(model)
        factor = (1.0 / (stats.total_norm + 1e-6)).clamp(max=1.0).float()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.1 * factor * parameter.grad)
        return stats

    compiled = torch.compile(update, fullgraph=True, mode=mode)
    rubbish = []
    for i in range(10):
        x, y = torch.randn(8, 16, device=DEVICE), torch.randn(8, 5, device=DEVICE)
        # freed and reallocated, at new addresses or those of other gradients; or kept in place
        model.zero_grad(set_to_none=freed)
        rubbish.append(torch.empty(13 * (i + 1), device=DEVICE))
        mse_loss(model(x), y).backward()
        expected = gm.collect_grads(model)
        torch.compiler.cudagraph_mark_step_begin()
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            assert_same_bits(compiled(), expected)
        assert_same_bits(gm.collect_grads(model), expected)


# large tensors


def free_memory() -> int:
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def test_a_tensor_beyond_32_bits_is_measured():
    size = 2**31 + 70_001
    if free_memory() < 3 * size:
        pytest.skip("needs 6 GiB of free device memory")
    x = torch.ones(size, dtype=torch.bfloat16, device=DEVICE)
    x[-1], x[2**31], x[2**31 - 1] = 3.0, -5.0, 0.0
    row = gm.collect([x]).materialize()["0"]
    assert (row.numel, row.n_zero, row.abs_max) == (size, 1, 5.0)
    assert (row.sumsq, row.sum) == (size - 3 + 34, size - 3 - 2)
    x[-1], x[-2], x[2**31] = math.nan, math.inf, -math.inf
    row = gm.collect([x]).materialize()["0"]
    assert (row.n_nan, row.n_posinf, row.n_neginf) == (1, 1, 1)
    assert (row.sumsq, row.abs_max) == (size - 4, 1.0)


def test_measuring_takes_little_memory():
    tensors = [torch.ones(25_000_000, device=DEVICE) for _ in range(10)]
    gm.collect(tensors)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gm.collect(tensors)
    # 1 GB was read; the extra memory is seven numbers per chunk, and tables
    assert torch.cuda.max_memory_allocated() - before < 4 * 2**20


# several devices


def test_the_current_device_is_not_changed_and_need_not_be_that_of_the_tensors():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    tensors = {
        "second": values(5000, device="cuda:1"),
        "first": values(5001, device="cuda:0"),
        "host": values(5002, device="cpu"),
        "second again": values(70_000, torch.bfloat16, device="cuda:1"),
    }
    for current in (0, 1):
        with torch.cuda.device(current):
            alone = gm.collect({"second": tensors["second"]})
            assert alone.columns.device == torch.device("cuda:1")
            stats = gm.collect(tensors)
            assert torch.cuda.current_device() == current
        assert stats.columns.device == torch.device("cuda:1")
        assert_measured(alone, {"second": tensors["second"]})
        assert_measured(stats, tensors)


def test_rows_of_the_host_join_those_of_the_device():
    tensors = {
        "host": values(5002, device="cpu"),
        "device": values(5000),
        "host too": values(3, device="cpu"),
    }
    stats = gm.collect(tensors)
    assert stats.columns.shape == (3, TENSORS.width)
    assert_measured(stats, tensors)


# clipping


def with_grads(*grads: Tensor) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.empty_like(grad)) for grad in grads]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad
    return parameters


def clipped_on_the_host(x: Tensor, norm: Tensor, max_norm: float) -> Tensor:
    """Return the expected gradient, bit for bit, from its copy on the host, given the norm."""
    limit = torch.full((), max_norm, dtype=torch.float64)
    factor = (limit / (norm.cpu() + 1e-6)).clamp(max=1.0)
    if x.dtype == torch.float64:
        return x * factor
    below = factor < 2.0**-126
    high = torch.where(below, factor * 2.0**126, factor).float()
    return (x.float() * high * (2.0**-126 if below else 1.0)).to(x.dtype)


@every_dtype
@pytest.mark.parametrize("first", [0, 1, 5], ids=["aligned", "off by 1", "off by 5"])
@pytest.mark.parametrize("max_norm", [0.5, 1e-41])
def test_the_scale_kernel_leaves_the_bits_that_the_cpu_leaves(dtype, first, max_norm):
    memories = [values(first + size + 9, dtype) for size in SIZES]
    before = [memory.cpu() for memory in memories]
    grads = [memory[first:-9] for memory in memories]
    norm = without_waits(clip_grad_norm_)(with_grads(*grads), max_norm)
    for memory, old in zip(memories, before, strict=True):
        expected = old.clone()
        expected[first:-9] = clipped_on_the_host(old[first:-9], norm, max_norm)
        # nothing is written on either side of the view
        assert torch.equal(memory.cpu(), expected)


def test_lists_that_the_kernel_does_not_take_get_the_same_bits():
    grads = [values(40_000, dtype).view(200, 200) for dtype in DTYPES]
    views = [grad[:, 1:150] for grad in grads] + [values(300).view(20, 15).T]
    before = [view.cpu() for view in views]
    norm = without_waits(clip_grad_norm_)(with_grads(*views), 0.5)
    for view, old in zip(views, before, strict=True):
        assert torch.equal(view.cpu(), clipped_on_the_host(old, norm, 0.5))


@pytest.mark.parametrize("order", [0.5, 1, 2, 3, math.inf, -1])
def test_clipping_agrees_with_torch(order):
    grads = [values(size).double() for size in (1000, 5000, 3)]
    twins = [grad.clone() for grad in grads]
    norm = without_waits(clip_grad_norm_)(with_grads(*grads), 0.5, norm_type=order)
    said = torch.nn.utils.clip_grad_norm_(with_grads(*twins), 0.5, norm_type=order)
    torch.testing.assert_close(norm, said, rtol=1e-12, atol=0.0)
    for grad, twin in zip(grads, twins, strict=True):
        torch.testing.assert_close(grad, twin, rtol=1e-12, atol=0.0)


def test_finite_gradients_that_overflow_half_precision_are_not_clipped_to_zero():
    grads = [torch.full((40_000,), 300.0, device=DEVICE, dtype=torch.float16) for _ in range(4)]
    assert without_waits(clip_grad_norm_)(with_grads(*grads), 1.0).item() == pytest.approx(1.2e5)
    after = gm.total_norm(grads).item()
    assert after == pytest.approx(1.0, rel=2**-10)


def test_nothing_is_written_where_nothing_is_clipped():
    # any multiplication turns a signalling NaN into a quiet one
    word = 0x7FA00001
    x = torch.full((100_000,), word, dtype=torch.int32, device=DEVICE).view(torch.float32)
    clip = without_waits(clip_grad_norm_)
    parameters = with_grads(x)
    version = x._version
    for _ in range(3):
        clip(parameters, math.inf)
    assert (x.view(torch.int32) == word).all()
    assert x._version > version


def test_nan_and_inf_spare_the_other_gradients():
    good, bad = values(5000), values(70_000, torch.bfloat16)
    bad[5], bad[69_999], bad[1] = math.nan, math.inf, -math.inf
    before = good.cpu()
    finite = gm.collect([good, bad]).finite_norm.norm().cpu()
    norm = without_waits(clip_grad_norm_)(with_grads(good, bad), 0.5)
    assert norm.isnan()
    torch.testing.assert_close(good.cpu(), clipped_on_the_host(before, finite, 0.5), rtol=2**-22, atol=0.0)
    assert (bad.isnan().sum(), (bad == math.inf).sum(), (bad == -math.inf).sum()) == (1, 1, 1)
    with pytest.raises(RuntimeError, match="'1' has 1 NaN and 2 Inf of 70000"):
        clip_grad_norm_(with_grads(good, bad), 0.5, error_if_nonfinite=True)


def test_later_kernels_of_the_stream_see_clipped_gradients():
    stream = torch.cuda.Stream()
    x = torch.ones(2**24, device=DEVICE)
    parameters = with_grads(x)
    clip_grad_norm_(parameters, 1e9)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream), no_waits():
        for _ in range(20):
            x.fill_(1.0)
            clip_grad_norm_(parameters, 1.0)
            total = x.sum()
    stream.synchronize()
    # 2**24 elements of 2**-12
    assert total.item() == pytest.approx(2**12, rel=1e-4)


def test_clipping_is_captured_and_replayed():
    grads = [values(5000), values(70_000, torch.bfloat16)]
    parameters = with_grads(*grads)
    bound = torch.ones((), device=DEVICE)
    fresh = [grad.clone() for grad in grads]
    collect_and_clip_(parameters, bound)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stats = collect_and_clip_(parameters, bound)
    for factor in (1.0, 3.0, 0.25):
        for grad, new in zip(grads, fresh, strict=True):
            grad.copy_(new * factor)
        bound.fill_(factor)
        # a later call must not change the memory that the replay reads
        clip_grad_norm_(with_grads(*[grad.clone() for grad in grads]), 0.1)
        before = [grad.cpu() for grad in grads]
        expected = gm.collect(grads)
        graph.replay()
        assert torch.equal(stats.columns, expected.columns)
        for grad, old in zip(grads, before, strict=True):
            assert torch.equal(grad.cpu(), clipped_on_the_host(old, expected.total_norm, factor))


def clipping_step(model: nn.Module, x: Tensor, y: Tensor, bound: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    mse_loss(model(x), y).backward()
    norm = clip_grad_norm_(model.parameters(), bound)
    after = gm.collect_grads(model).total_norm
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(0.1 * parameter.grad)
    for parameter in model.parameters():
        parameter.grad = None
    return norm, after, bound.clone()


@pytest.mark.compiles
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_step_clips(mode):
    model = small_model()
    step = torch.compile(clipping_step, fullgraph=True, mode=mode)
    for i in range(8):
        x, y = torch.randn(8, 16, device=DEVICE), torch.randn(8, 5, device=DEVICE)
        torch.compiler.cudagraph_mark_step_begin()
        bound = torch.full((), 10.0 ** -(i % 4), dtype=torch.float64, device=DEVICE)
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            norm, after, said = (out.item() for out in step(model, x, y, bound))
        assert after == pytest.approx(min(norm, said), rel=1e-5)


@every_dtype
def test_a_gradient_beyond_32_bits_is_clipped(dtype):
    size = 2**31 + 70_001
    if free_memory() < 3 * size * dtype.itemsize:
        pytest.skip("needs more free device memory")
    x = torch.ones(size, dtype=dtype, device=DEVICE)
    norm = clip_grad_norm_(with_grads(x), 1.0)
    assert norm.item() == pytest.approx(math.sqrt(size))
    expected = clipped_on_the_host(torch.ones((), dtype=dtype), norm, 1.0).item()
    assert all((part == expected).all() for part in x.split(2**28))


def test_gradients_of_several_devices_are_clipped_together():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    for foreign in ("cuda:1", "cpu"):
        grads = [values(5000, device="cuda:0"), values(6000, device=foreign), values(70_000, device="cuda:0")]
        twins = [grad.to("cuda:0", copy=True) for grad in grads]
        for order in (2.0, math.inf):
            norm = clip_grad_norm_(with_grads(*grads), 0.5, norm_type=order)
            expected = clip_grad_norm_(with_grads(*twins), 0.5, norm_type=order)
            torch.testing.assert_close(norm, expected, rtol=1e-13, atol=0.0)
            for grad, twin in zip(grads, twins, strict=True):
                torch.testing.assert_close(grad.to("cuda:0"), twin, rtol=2**-22, atol=0.0)
