"""Several real devices in one call: a GPU with the CPU, and two GPUs where available.

As in `test_gpu.py`, a collection that waits for a device is an error; the host measures the CPU's tensors
while the GPU works.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import gradiometer as gm
from gradiometer import kernels
from gradiometer.ops import reference
from gradiometer.recorder.recorder import Recorder
from support.gpu import DTYPES, SIZES, keep_busy, no_waits, on_a_gpu, queued, values
from support.recording import packed, written

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [
    pytest.mark.gpu,
    on_a_gpu,
    # shown, not raised: drivers and Inductor give advice that depends on the machine
    pytest.mark.filterwarnings("default"),
]

FIRST, SECOND, HOST = (torch.device(name) for name in ("cuda:0", "cuda:1", "cpu"))
two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
TWO = [pytest.param((FIRST, SECOND), marks=two_devices), pytest.param((SECOND, FIRST), marks=two_devices)]
# the device of the result, and the other one
every_pair = pytest.mark.parametrize("pair", [(FIRST, HOST), *TWO], ids=lambda pair: "+".join(map(str, pair)))
two_gpus = pytest.mark.parametrize("pair", TWO, ids=lambda pair: "+".join(map(str, pair)))
# the device of each tensor in turn, as an index into the pair
PATTERNS = {"halves": [0] * 8 + [1] * 8, "one by one": [0, 1] * 8, "the other last": [0] * 15 + [1]}
every_pattern = pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)


@pytest.fixture(autouse=True)
def _clean(_dynamo: None) -> Iterator[None]:
    yield
    for index in range(torch.cuda.device_count()):
        torch.cuda.synchronize(index)


def tensors_on(pair: tuple[torch.device, ...], pattern: list[int]) -> dict[str, Tensor]:
    """Return tensors of all sizes and dtypes, one with a NaN and one with an Inf."""
    found = {}
    for i, which in enumerate(pattern):
        tensor = values(SIZES[i % len(SIZES)], DTYPES[i % 4], pair[which])
        if i in (4, 5):
            tensor[-1] = float("nan" if i == 4 else "inf")
        found[f"layer{i}.weight"] = tensor
    return found


def alone(tensors: dict[str, Tensor], **options: Any) -> dict[str, tuple[list[float], int]]:
    """Return the columns and flags of each tensor, measured with the other tensors of its device."""
    found = {}
    for device in {tensor.device for tensor in tensors.values()}:
        own = {name: tensor for name, tensor in tensors.items() if tensor.device == device}
        found |= rows(gm.collect(own, **options))
    return found


def rows(stats: gm.TensorStats) -> dict[str, tuple[list[float], int]]:
    columns, flags = stats.columns.tolist(), stats.flags.tolist()
    return {name: (columns[i], flags[i]) for i, name in enumerate(stats.names)}


def parameters_of(tensors: dict[str, Tensor]) -> dict[str, nn.Parameter]:
    """Return parameters with these gradients."""
    found = {}
    for name, tensor in tensors.items():
        parameter = nn.Parameter(torch.zeros_like(tensor))
        parameter.grad = tensor
        found[name] = parameter
    return found


# values


@every_pair
@every_pattern
def test_rows_are_those_of_each_device_alone_bit_for_bit(pair, pattern):
    tensors = tensors_on(pair, pattern)
    with no_waits():
        stats = gm.collect(tensors)
    assert stats.names == tuple(tensors)
    assert stats.columns.device == stats.flags.device == pair[0]
    assert rows(stats) == alone(tensors)


@every_pair
@pytest.mark.parametrize("where", ["number", FIRST, SECOND, HOST], ids=str)
def test_a_scale_of_any_device_is_not_waited_for_and_scales_all_alike(pair, where):
    if where not in (*pair, "number", HOST):
        pytest.skip("of no device of these")
    tensors = tensors_on(pair, PATTERNS["one by one"])
    scale = 2.0**-7 if where == "number" else torch.full((1,), 2.0**-7, device=where)
    expected = alone(tensors, inv_scale=2.0**-7)
    with no_waits():
        stats = gm.collect(tensors, inv_scale=scale)
    assert rows(stats) == expected


@every_pair
def test_each_gpu_is_launched_on_as_if_it_were_alone(pair, monkeypatch):
    from gradiometer import kernels

    tensors = tensors_on(pair, PATTERNS["one by one"])
    launches: Counter[tuple[str, int]] = Counter()

    def counted(name: str, launch: Callable[..., Any]) -> Callable[..., Any]:
        def launched(*args: Any) -> Any:
            launches[name, torch.cuda.current_device()] += 1
            return launch(*args)

        return launched

    for name in ("moments", "finalize"):
        monkeypatch.setattr(kernels, name, counted(name, getattr(kernels, name)))
    current = torch.cuda.current_device()
    gm.collect(tensors)
    assert torch.cuda.current_device() == current
    expected: dict[tuple[str, int], int] = {}
    for device in pair:
        if device != HOST:
            dtypes = {tensor.dtype for tensor in tensors.values() if tensor.device == device}
            expected |= {("moments", device.index): len(dtypes), ("finalize", device.index): 1}
    assert dict(launches) == expected


def test_the_gpu_is_at_work_while_the_host_measures_its_own():
    # the CPU's tensors come first in the list, and are measured last
    tensors = {"host": values(1_000_003, device=HOST), "device": values(1_000_003, device=FIRST)}
    order = []
    on_host, on_device = reference.tensor_stats, kernels.finalize
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "tensor_stats", lambda *a, **o: (order.append("host"), on_host(*a, **o))[1])
        patch.setattr(kernels, "finalize", lambda *a, **o: (order.append("device"), on_device(*a, **o))[1])
        gm.collect(tensors)
    assert order == ["device", "host"]


# stream order


@two_gpus
@pytest.mark.parametrize("late", [0, 1])
def test_what_a_device_still_writes_is_waited_for_on_the_device(pair, late):
    tensors = {"a": torch.zeros(70_000, device=pair[0]), "b": torch.zeros(70_000, device=pair[1])}
    gm.collect(tensors).materialize()
    for device in pair:
        torch.cuda.synchronize(device)
    with torch.cuda.device(pair[late]):
        busy = keep_busy()
        for i, tensor in enumerate(tensors.values()):
            if i == late:
                tensor.fill_(3.0)
    with no_waits():
        stats = gm.collect(tensors)
    assert not busy.query(), "it waited for the device, or took longer than the device"
    expected = [3.0 if i == late else 0.0 for i in range(2)]
    assert stats.abs_max.tolist() == expected


@two_gpus
def test_each_device_reads_on_its_current_stream(pair):
    tensors = {"a": torch.zeros(70_000, device=pair[0]), "b": torch.zeros(70_000, device=pair[1])}
    gm.collect(tensors).materialize()
    sides = [torch.cuda.Stream(device) for device in pair]
    with torch.cuda.stream(sides[0]), torch.cuda.stream(sides[1]):
        for side, tensor in zip(sides, tensors.values(), strict=True):
            with torch.cuda.stream(side):
                keep_busy()
                tensor.fill_(5.0)
        # `torch.cuda.stream` sets the stream of its own device only
        assert [torch.cuda.current_stream(device) for device in pair] == sides
        stats = gm.collect(tensors)
        found = stats.abs_max.tolist()
    assert found == [5.0, 5.0]


@every_pair
def test_many_calls_in_a_row_keep_their_numbers(pair):
    results = []
    for i in range(50):
        tensors = {str(k): torch.full((1000 + k,), float(i + k), device=pair[k % 2]) for k in range(8)}
        results.append(gm.collect(tensors))
        del tensors
    for i, stats in enumerate(results):
        assert stats.abs_max.tolist() == [float(i + k) for k in range(8)]


# uses of the statistics


@every_pair
def test_stats_of_two_devices_merge_on_the_first(pair):
    one, two = [gm.collect({"w": torch.full((9,), 4.0, device=device)}) for device in pair]
    for a, b in ((one, two), (two, one)):
        with no_waits():
            merged = a.merge(b)
        assert merged.columns.device.type == "cuda"
        assert merged.numel.tolist() == [18.0]
        assert merged.norm.tolist() == [pytest.approx(4.0 * 18**0.5)]


@two_gpus
def test_gradients_of_two_gpus_are_clipped_without_a_wait(pair):
    tensors = {f"{i}": values(5000 + i, device=pair[i % 2]) for i in range(6)}
    before = gm.collect(tensors).total_norm.item()
    parameters = parameters_of(tensors)
    gm.clip_grad_norm_(parameters, 1e9)
    with no_waits():
        norm = gm.clip_grad_norm_(parameters, 1.0)
    assert norm.item() == pytest.approx(before, rel=1e-13)
    assert gm.collect(tensors).total_norm.item() == pytest.approx(1.0, rel=1e-5)


@every_pair
@every_pattern
@pytest.mark.parametrize("weights", [False, True])
def test_a_recorder_holds_what_a_collection_holds(pair, pattern, weights):
    model = parameters_of(tensors_on(pair, pattern))
    recorder = Recorder(model, weights=weights)
    recorder.record()
    recorder.advance()
    with no_waits():
        recorder.record()
        recorder.advance()
    expected = packed(gm.collect_grads(model)).cpu()
    for record in recorder.read():
        assert torch.equal(written(record), expected)
        assert record.skipped


@every_pair
@pytest.mark.parametrize("kept", [0, 1, None])
def test_a_step_with_gradients_of_one_device_alone_is_recorded_without_a_wait(pair, kept):
    model = parameters_of(tensors_on(pair, PATTERNS["one by one"]))
    recorder = Recorder(model)
    recorder.record()
    for parameter in model.values():
        if kept is None or parameter.device != pair[kept]:
            parameter.grad = None
    found = gm.collect_grads(model)
    if kept is None:
        assert found.columns.device == pair[0]
    recorder.advance()
    with no_waits():
        recorder.record()
    measured = recorder.read()[-1].measured()
    assert measured.tolist() == [parameter.grad is not None for parameter in model.values()]


@two_gpus
def test_a_report_takes_one_transfer_that_nothing_waits_for(pair):
    tensors = tensors_on(pair, PATTERNS["halves"])
    expected = gm.collect(tensors).materialize().to_string()
    with torch.cuda.device(pair[0]):
        _, pending = queued(lambda: gm.collect(tensors).materialize_async())
    assert not pending.ready()
    assert pending.result().to_string() == expected


# compiled steps


@pytest.mark.compiles
@every_pair
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_collection_has_the_same_bits(pair, backend):
    tensors = tensors_on(pair, PATTERNS["halves"])
    model = parameters_of(tensors)
    scale = torch.full((), 0.5, device=pair[0])
    expected = rows(gm.collect_grads(model, inv_scale=scale))
    step = torch.compile(gm.collect_grads, fullgraph=True, backend=backend)
    step(model, inv_scale=scale)
    with no_waits():
        stats = step(model, inv_scale=scale)
    assert stats.columns.device == pair[0]
    assert rows(stats) == expected


class TwoParts(nn.Module):
    """Manual model parallelism: the first and the last layer on one device, the second on the other."""

    def __init__(self, pair: tuple[torch.device, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(
            [nn.Linear(*size).to(pair[which]) for size, which in (((16, 33), 0), ((33, 9), 1), ((9, 5), 0))]
        )

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = torch.nn.functional.gelu(part(x.to(part.weight.device, non_blocking=True)))
        return x


@pytest.mark.compiles
@two_gpus
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_step_over_two_gpus_measures_both(pair, backend):
    model = TwoParts(pair)

    def step(x: Tensor) -> tuple[Tensor, gm.TensorStats]:
        loss = model(x).square().mean()
        loss.backward()
        stats = gm.collect_grads(model)
        for parameter in model.parameters():
            parameter.grad = None
        return loss.detach(), stats

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    inputs = [torch.randn(8, 16, device=pair[0]) for _ in range(3)]
    for x in inputs:
        loss, stats = step(x)
        said, found = compiled(x)
        assert found.columns.device == pair[0]
        torch.testing.assert_close(said, loss, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(found.norm, stats.norm, rtol=1e-3, atol=1e-6)
    with no_waits():
        compiled(inputs[0])
