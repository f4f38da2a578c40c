"""`Snapshot`: what it keeps, how it moves with a model, its memory, and the error of a sample."""

from __future__ import annotations

import copy
import functools
import gc
import math
import pickle
import zlib

import pytest
import torch
from torch import nn

import gradiometer as gm
from gradiometer.stats import snapshot as module
from support.compiling import needs_compiler
from support.gradients import bit_patterns
from support.pair_oracle import exact_pair

NAMES = tuple(column.name for column in gm.PAIR_COLUMNS)
CHUNK = module.CHUNK


def rows(stats):
    return {
        name: dict(zip(NAMES, row, strict=True))
        for name, row in zip(stats.names, stats.columns.tolist(), strict=True)
    }


def kept(snapshot):
    return [x for name, x in snapshot.named_buffers() if name != "scale"]


def name_with_first(first, step):
    """Return the name of a tensor whose sample begins with this chunk."""
    return next(f"w{i}" for i in range(10**4) if zlib.crc32(f"w{i}".encode()) % step == first)


# what is kept


def test_it_is_a_copy_in_the_same_dtypes_and_strides():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(4, 2).bfloat16())
    model[0].to(memory_format=torch.channels_last)
    model[1].weight.requires_grad_(False)
    before = [p.detach().clone() for p in model.parameters() if p.requires_grad]
    snapshot = gm.Snapshot(model)
    assert snapshot.names == ("0.weight", "0.bias", "1.bias")
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    for x, y in zip(kept(snapshot), before, strict=True):
        assert (x.dtype, x.stride()) == (y.dtype, y.stride())
        assert torch.equal(x, y)
    assert not any(x.requires_grad for x in snapshot.buffers())
    assert list(snapshot.parameters()) == []
    assert snapshot.scale is None


def test_parameters_without_a_module_are_all_kept():
    frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    assert gm.Snapshot({"a": frozen, "b": torch.ones(2)}).names == ("a", "b")
    assert gm.Snapshot([frozen]).names == ("0",)
    assert gm.Snapshot({}).names == ()


def test_an_update_copies_the_current_weights_in_place():
    model = nn.Linear(5, 3)
    snapshot = gm.Snapshot(model)
    addresses = [x.data_ptr() for x in kept(snapshot)]
    with torch.no_grad():
        model.weight.add_(1.0)
    assert snapshot.update_(model) is snapshot
    assert [x.data_ptr() for x in kept(snapshot)] == addresses
    assert torch.equal(kept(snapshot)[0], model.weight)
    assert gm.collect_updates(model, snapshot).unchanged_fraction.tolist() == [1.0, 1.0]
    assert model.weight.requires_grad
    with pytest.raises(ValueError, match=r"Snapshot.update_: 'weight' is \(3, 4\) on cpu, but was \(3, 5\)"):
        snapshot.update_(nn.Linear(4, 3))
    with pytest.raises(ValueError, match=r"Snapshot.update_: the model has no parameter 'bias'"):
        snapshot.update_(nn.Linear(5, 3, bias=False))
    # nothing was half-written
    assert torch.equal(kept(snapshot)[0], model.weight)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float16),
        (torch.float8_e4m3fn, torch.bfloat16),
        (torch.float8_e4m3fn, torch.float8_e5m2),
        (torch.float32, torch.complex64),
    ],
)
def test_an_update_does_not_round_the_weights(before, now):
    weights = {"a": torch.ones(3), "w": torch.ones(5).to(before)}
    snapshot = gm.Snapshot(weights)
    weights = {"a": torch.zeros(3), "w": torch.full((5,), 1.0 + 2.0**-9).to(now)}
    names = [str(dtype).removeprefix("torch.") for dtype in (now, before)]
    with pytest.raises(ValueError, match=rf"update_: 'w' is {names[0]}, but was {names[1]} in the snapshot"):
        snapshot.update_(weights)
    # nothing was half-written
    assert torch.equal(kept(snapshot)[0], torch.ones(3))


@pytest.mark.parametrize("now", [torch.bfloat16, torch.float16, torch.float8_e5m2])
def test_an_update_by_weights_of_fewer_bits_is_exact(now):
    weights = {"w": torch.ones(5)}
    snapshot = gm.Snapshot(weights)
    weights["w"] = torch.full((5,), 1.25).to(now)
    assert gm.collect_updates(weights, snapshot.update_(weights)).n_unchanged == 5


@pytest.mark.parametrize("sample", [1, 1 / 2])
def test_it_is_copied_and_pickled(sample):
    model = nn.Linear(128, 128)
    snapshot = gm.Snapshot(model, sample=sample)
    with torch.no_grad():
        model.weight.mul_(1.5)
    expected = gm.collect_updates(model, snapshot).columns
    for other in (copy.deepcopy(snapshot), pickle.loads(pickle.dumps(snapshot))):  # noqa: S301 its own bytes
        assert bit_patterns([gm.collect_updates(model, other).columns]) == bit_patterns([expected])
        other.update_(model)
    # the copies have their own memory
    assert bit_patterns([gm.collect_updates(model, snapshot).columns]) == bit_patterns([expected])


@pytest.mark.parametrize("sample", [1, 1 / 2])
@pytest.mark.parametrize("change", ["half", "bfloat16", "double", "to", "load_state_dict", "assign"])
def test_as_a_part_of_a_model_it_keeps_its_dtypes_and_its_values(change, sample):
    model = nn.Linear(128, 128)
    model.snapshot = gm.Snapshot(model, sample=sample)
    before = [x.clone() for x in model.snapshot.buffers()]
    if change == "load_state_dict":
        model.load_state_dict(nn.Linear(128, 128).state_dict())
    elif change == "assign":
        model.load_state_dict(nn.Linear(128, 128).state_dict(), assign=True)
    else:
        getattr(model, change)(*(["cpu", torch.float16] if change == "to" else []))
    for x, y in zip(model.snapshot.buffers(), before, strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x, y)
    # it is neither a parameter of the model nor in its state
    assert list(model.state_dict()) == ["weight", "bias"]
    assert gm.collect_updates(model, model.snapshot).names == ("weight", "bias")


@pytest.mark.parametrize("sample", [0, -1, 2, 0.3, math.nan, math.inf, True, "1/16", None, 1e-320])
def test_a_sample_that_cannot_be(sample):
    with pytest.raises(
        ValueError, match=r"Snapshot\(sample=.*\): sample must be 1, or 1 divided by an integer"
    ):
        gm.Snapshot(nn.Linear(2, 2), sample=sample)


def test_the_nearest_sample_is_suggested():
    with pytest.raises(ValueError, match="the nearest is 1/3"):
        gm.Snapshot(nn.Linear(2, 2), sample=0.3)
    assert [gm.Snapshot({}, sample=1 / n).step for n in (1, 3, 7, 49, 1000)] == [1, 3, 7, 49, 1000]


@pytest.mark.parametrize(
    ("source", "kind", "said"),
    [
        (torch.ones(3), TypeError, "Snapshot: got one tensor, not a collection of tensors"),
        ({"steps": torch.arange(3)}, TypeError, "Snapshot: 'steps' has dtype torch.int64"),
        (
            [("w", torch.ones(1)), ("w", torch.zeros(1))],
            ValueError,
            "Snapshot: two tensors have the name 'w'",
        ),
        (nn.LazyLinear(3), TypeError, "Snapshot: 'weight' is not initialized and has no values"),
        ({"w": torch.ones(2, device="meta")}, TypeError, "Snapshot: 'w' is on the meta device"),
    ],
    ids=["a tensor", "integers", "twice", "not initialized", "meta"],
)
def test_what_cannot_be_kept_is_named(source, kind, said):
    with pytest.raises(kind, match=said):
        gm.Snapshot(source)


# a sample


def test_a_sample_takes_its_share_of_memory():
    model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(100, 100))
    snapshot = gm.Snapshot(model, sample=1 / 16)
    sizes = dict(zip(snapshot.names, [x.numel() for x in kept(snapshot)], strict=True))
    # tensors of less than 16 chunks are whole
    assert sizes == {"0.weight": 2**16, "0.bias": 1024, "1.weight": 10**4, "1.bias": 100}
    assert snapshot.scale.tolist() == [[16.0], [1.0], [1.0], [1.0]]
    assert all(x.untyped_storage().nbytes() == 4 * x.numel() for x in kept(snapshot))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("chunks", [3, 4, 6 + 1 / 3, 7])
def test_the_samples_of_all_first_chunks_are_a_partition(dtype, chunks):
    step, numel = 3, int(chunks * CHUNK)
    g = torch.Generator().manual_seed(0)
    integers = [torch.randint(-3, 4, (numel,), generator=g).to(dtype) for _ in range(3)]
    old, new, grad = (x.mul_(1 + 1j) if dtype.is_complex else x for x in integers)
    summed = dict.fromkeys(NAMES[:-1], 0.0)
    for first in range(step):
        weight = nn.Parameter(old.clone())
        name = name_with_first(first, step)
        snapshot = gm.Snapshot({name: weight}, sample=1 / step)
        with torch.no_grad():
            weight.copy_(new)
        weight.grad = grad.clone()
        stats = gm.collect_updates({name: weight}, snapshot)
        assert stats.numel.tolist() == [numel * (2 if dtype.is_complex else 1)]
        for column, value in zip(NAMES[:-1], stats.columns[0, :-1].tolist(), strict=True):
            # a ratio of integers below 2**53: the division rounds once
            summed[column] += round(value / snapshot.scale.item(), 6)
    complete = numel // CHUNK * CHUNK
    expected, _ = exact_pair(new[:complete], old[:complete], grad[:complete])
    assert {name: round(value, 3) for name, value in summed.items()} == {
        name: expected[name] for name in summed
    }


@pytest.mark.parametrize("sample", [1 / 4, 1 / 16])
def test_the_error_of_a_sample_is_as_stated(sample):
    numel = 2**19
    errors = []
    for seed in range(12):
        torch.manual_seed(seed)
        weight = nn.Parameter(torch.randn(numel))
        name = f"layer.{seed}"
        snapshot, whole = gm.Snapshot({name: weight}, sample=sample), gm.Snapshot({name: weight})
        with torch.no_grad():
            # a third of the elements does not change
            weight.add_(torch.randn(numel) * (torch.rand(numel) > 1 / 3))
        weight.grad = torch.randn(numel)
        found, true = (gm.collect_updates({name: weight}, x) for x in (snapshot, whole))
        n = kept(snapshot)[0].numel()
        assert n == numel * sample
        # for a norm of independent normal elements: 1 / sqrt(2 n). A third of zeros increases the kurtosis of
        # u from 3 to 4.5, and the standard error by sqrt(3.5 / 2)
        for column, factor in (("norm_b", 1.0), ("norm_g", 1.0), ("norm_u", math.sqrt(3.5 / 2))):
            value, expected = (getattr(x, column).item() for x in (found, true))
            error = (value / expected - 1) * math.sqrt(2 * n) / factor
            assert abs(error) <= 4, (column, seed, error)
            errors.append(error)
        deviation = math.sqrt(2 / 9 / n)
        assert abs(found.unchanged_fraction.item() - true.unchanged_fraction.item()) <= 4 * deviation
        assert found.abs_max_u <= true.abs_max_u
    # and not smaller either: the elements that are not in the sample reduce it by sqrt(1 - sample)
    mean_square = sum(error**2 for error in errors) / len(errors)
    assert 0.4 <= mean_square <= 1.6


def test_counts_of_a_sample_are_rounded_in_a_report():
    weight = nn.Parameter(torch.ones(7 * CHUNK + 5))
    snapshot = gm.Snapshot({"w": weight}, sample=1 / 3)
    found = gm.collect_updates({"w": weight}, snapshot).materialize()["w"]
    assert (found.numel, found.n_unchanged) == (7 * CHUNK + 5, 7 * CHUNK + 5)
    assert type(found.n_unchanged) is int


ORDERS = {
    "row-major": lambda x: x,
    "transposed": lambda x: x.t().contiguous().t(),
    "with gaps": lambda x: torch.cat([x, x], dim=1)[:, : x.shape[1]],
}


@pytest.mark.parametrize("weight_order", ORDERS)
@pytest.mark.parametrize("grad_order", ORDERS)
def test_the_gradient_of_a_sample_is_that_of_its_elements(weight_order, grad_order):
    # elements whose number is a multiple of 5 do not move, and those have a gradient
    numbers = torch.arange(100 * 1024).view(100, 1024)
    stays = numbers % 5 == 0
    weight = ORDERS[weight_order](torch.ones(100, 1024)).detach().requires_grad_()
    weight.grad = ORDERS[grad_order](stays.float())
    snapshot = gm.Snapshot({"w": weight}, sample=1 / 4)
    with torch.no_grad():
        weight.add_((~stays).float())
    (found,) = rows(gm.collect_updates({"w": weight}, snapshot)).values()
    # exactly: if an element met the gradient of another one, not all would be stuck
    assert found["n_stuck"] == found["n_nonzero_g"] == found["n_unchanged"] > 0
    assert found["dot_ug"] == 0.0
    # memory with gaps has no chunks: all of it is kept
    assert (kept(snapshot)[0].numel() == weight.numel()) == (weight_order == "with gaps")


@pytest.mark.parametrize("before", ORDERS)
@pytest.mark.parametrize("now", ORDERS)
def test_a_sample_of_memory_in_another_order_is_refused(before, now):
    numbers = torch.arange(100 * 1024.0).view(100, 1024)
    small = torch.arange(20.0).view(4, 5)
    snapshot = gm.Snapshot({"w": ORDERS[before](numbers), "small": ORDERS[before](small)}, sample=1 / 4)
    same = {"w": ORDERS[now](numbers), "small": ORDERS[now](small)}
    if before == now:
        assert gm.collect_updates(same, snapshot).unchanged_fraction.tolist() == [1.0, 1.0]
        return
    for call in (lambda: gm.collect_updates(same, snapshot), lambda: snapshot.update_(same)):
        with pytest.raises(ValueError, match=r"'w' has the strides .* in the snapshot, .* take a new one"):
            call()


# memory


def peak(call):
    """Return the most bytes that are allocated at once during a call, in addition to those before it."""
    activity = torch.profiler.ProfilerActivity.CPU
    # garbage of earlier tests that is freed during the call would count as memory that it frees
    gc.collect()
    gc.disable()
    try:
        with torch.profiler.profile(activities=[activity], profile_memory=True) as profile:
            result = call()
    finally:
        gc.enable()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    del result
    return most


MIB = 2**20
# the buffers that the CPU path reads through: four of 2**17 elements of fp64
BUFFERS = 4 * MIB


@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize("sample", [1, 1 / 16])
def test_memory_in_eager_mode_is_that_of_the_snapshot(sample):
    weight = nn.Parameter(torch.randn(2**22))
    weight.grad = torch.randn(2**22)
    held = []
    assert peak(lambda: held.append(gm.Snapshot([weight], sample=sample))) <= 16 * MIB * sample + 2**12
    (snapshot,) = held
    assert peak(lambda: snapshot.update_([weight])) == 0
    assert peak(lambda: gm.collect_updates([weight], snapshot)) <= BUFFERS + 2**12


@needs_compiler
@pytest.mark.usefixtures("_one_thread", "_dynamo")
@pytest.mark.parametrize("first", [True, False], ids=["snapshot first", "snapshot last"])
@pytest.mark.parametrize("sample", [1, 1 / 16])
def test_memory_in_a_compiled_step(sample, first):
    def step_of(model, snapshot):
        def step(x):
            model(x).square().mean().backward()
            if snapshot and first:
                snapshot.update_(model)
            with torch.no_grad():
                model.weight.sub_(1e-3 * model.weight.grad)
            stats = gm.collect_updates(model, snapshot) if snapshot else ()
            if snapshot and not first:
                snapshot.update_(model)
            return stats

        return torch.compile(step, fullgraph=True)

    def run(step, model):
        # outside of the graph: torch 2.13 cannot compile a second step that ends with it
        model.weight.grad = None
        return step(x)

    x, most = torch.randn(4, 2048), []
    for with_snapshot in (False, True):
        model = nn.Linear(2048, 2048, bias=False)
        step = step_of(model, gm.Snapshot(model, sample=sample) if with_snapshot else None)
        for _ in range(2):
            run(step, model)
        # or its memory would be freed during the call, or not, if a cycle of the compiler holds it
        model.weight.grad = None
        most.append(peak(functools.partial(run, step, model)))
    # Inductor keeps new weights, or the sampled ones, until they are measured, and then writes them; a
    # second copy of a sample may be for the snapshot
    copies = 1 if sample == 1 else 3
    assert most[1] - most[0] <= BUFFERS + copies * 16 * MIB * sample + 2**16


@pytest.mark.parametrize("sample", [1, 1 / 2])
def test_a_name_that_utf8_cannot_encode_is_a_name(sample):
    name = "w\ud800"
    params = {name: torch.linspace(0.0, 1.0, 3 * CHUNK, requires_grad=True)}
    snapshot = gm.Snapshot(params, sample=sample)
    with torch.no_grad():
        params[name].add_(0.5)
    stats = gm.collect_updates(params, snapshot)
    assert stats.names == (name,)
    assert r"w\ud800" in str(stats.materialize())
    snapshot.update_(params)
    snapshot.load_state_dict(snapshot.state_dict())
    assert gm.collect_updates(params, copy.deepcopy(snapshot)).materialize()[name].update_ratio == 0.0
    assert gm.compare(params, params).names == (name,)
    assert gm.fingerprint(params)[name] == gm.fingerprint({"w": params[name]})["w"]
    assert gm.collect_exponents(params).names == (name,)
    assert gm.collect(params, fingerprint=True).group({"a\ud800": ""}).names == ("a\ud800",)
    clip = gm.PerTensorClip(params)
    clip.load_state_dict(clip.state_dict())
