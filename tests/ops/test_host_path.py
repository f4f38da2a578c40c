"""The host path in the steady state: recognized lists, reused tables, and no cost per tensor.

In the interpreted run the kernels compute the numbers. Tests of the host path
alone stub the launches, and also run on CPU tensors in the plain run.
"""

from __future__ import annotations

import contextlib
import gc
import json
import subprocess
import sys
import threading
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._C._dynamo.guards import TensorGuards
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import gradiometer as gm
from conftest import INTERPRETED
from gradiometer import ops
from gradiometer.columns import DEFAULT_THRESHOLDS, TENSORS
from gradiometer.ops import dispatch, launch_plans, packing, uploads
from gradiometer.ops import guards as tensor_guards
from gradiometer.ops import tensors as tensor_ops
from kernels_bench import host_path as bench
from support.gradients import bit_patterns
from support.strategies import lists

pytest.importorskip("triton", reason="the kernels' path")

needs_kernels = pytest.mark.skipif(not INTERPRETED, reason="needs the interpreted kernels")

LIMITS = (DEFAULT_THRESHOLDS.vanishing, DEFAULT_THRESHOLDS.exploding, DEFAULT_THRESHOLDS.dead)


@pytest.fixture(autouse=True)
def nothing_known():
    launch_plans.clear()
    yield
    launch_plans.clear()


STRANGERS = {
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "csr": lambda: torch.ones(2, 2).to_sparse_csr(),
    "mkldnn": lambda: torch.ones(2, 2).to_mkldnn(),
    "meta": lambda: torch.ones(3, device="meta"),
    "integers": lambda: torch.arange(3),
    "uninitialized": nn.UninitializedParameter,
    "number": lambda: 3.0,
    "none": lambda: None,
}


def measure(tensors, inv_scale=None):
    return tensor_ops.tensor_stats(tensors, DEFAULT_THRESHOLDS, inv_scale)


@pytest.fixture
def launches(monkeypatch):
    """Route CPU tensors to the kernels' path, without kernels; return (pointers, dtype) of each launch."""
    from gradiometer import kernels

    seen = []

    def moments(pointers, table, partials, dtype, *_):
        del table, partials
        seen.append((pointers, dtype))

    def finalize(table, partials, num_tensors, *_):
        del table, partials
        columns = torch.zeros((num_tensors, TENSORS.width), dtype=torch.float64, device="cpu")
        return columns, torch.zeros((num_tensors,), dtype=torch.int32, device="cpu")

    monkeypatch.setattr(kernels, "moments", moments)
    monkeypatch.setattr(kernels, "finalize", finalize)
    monkeypatch.setattr(dispatch, "uses_kernels", lambda _: True)
    return seen


@pytest.fixture
def direct(monkeypatch):
    """Count the calls that bypass the dispatcher."""
    calls = []
    inner = tensor_ops.measure_now

    def noted(tensors, thresholds, inv_scale, known=None, **options):
        if known is not None:
            calls.append(len(tensors))
        return inner(tensors, thresholds, inv_scale, known, **options)

    monkeypatch.setattr(tensor_ops, "measure_now", noted)
    return calls


def test_this_torch_has_the_guards_that_make_it_quick():
    # if this fails with a new torch, results are right, but a call takes 1 us a tensor: tensor_guards.alike
    assert tensor_guards.guards_tell()


# when a list counts as unchanged

VIEWS = {
    "whole": lambda m: m,
    "shorter": lambda m: m[:12],
    "matrix": lambda m: m.view(4, 6),
    "transposed": lambda m: m.view(4, 6).t(),
    "other matrix": lambda m: m.view(6, 4),
    "stepped": lambda m: m.view(4, 6)[:, ::2],
    "sliced": lambda m: m.view(4, 6)[:, :5],
    "expanded": lambda m: m[:1].expand(24),
    "fp64": lambda m: m.view(torch.float64),
    "fp16": lambda m: m.view(torch.float16),
    "fp8": lambda m: m.view(torch.float8_e5m2),
    "complex": lambda m: m.view(torch.complex64),
    "conjugate": lambda m: m.view(torch.complex64).conj(),
    "negative": torch._neg_view,
    "parameter": nn.Parameter,
    "requires grad": lambda m: m.detach().requires_grad_(),
    "sparse": lambda m: torch.sparse_coo_tensor(torch.arange(24)[None] * 2, m, (50,), is_coalesced=True),
    "empty": lambda m: m[:0],
    "0-d": lambda m: m[0],
}
SCALES = {
    "none": lambda: None,
    "fp64": lambda: torch.tensor(0.25, dtype=torch.float64),
    "fp16": lambda: torch.tensor([0.25], dtype=torch.float16),
    "negative": lambda: torch._neg_view(torch.tensor(-0.25)),
}


class Watch(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        del types
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    __torch_function__ = Watch.__torch_dispatch__


class Handler(TorchDispatchMode):
    """Runs something inside its handler, where the thread's dispatch keys differ."""

    def __init__(self, run):
        super().__init__()
        self.run = run

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        del types
        self.result = self.run()
        return func(*args, **(kwargs or {}))


def inside_handler(run):
    with Handler(run) as handler:
        torch.ones(1)
    return handler.result


def inside(context):
    def place(run):
        with context():
            return run()

    return place


PLACES = {
    "alone": lambda run: run(),
    "under a mode": inside(Watch),
    "inside a handler": inside_handler,
    "inference": inside(torch.inference_mode),
    "no grad": inside(torch.no_grad),
}


@given(
    st.lists(st.lists(st.sampled_from(sorted(VIEWS)), min_size=1, max_size=3), min_size=2, max_size=5),
    st.sampled_from(sorted(SCALES)),
    st.sampled_from(sorted(PLACES)),
)
def test_other_views_of_the_same_memory_are_measured_as_what_they_are(sequence, scale, place):
    memory = torch.linspace(-3.0, 5.0, 24)
    memory[3] = 0.0
    calls = [[VIEWS[name](memory) for name in names] for names in sequence]
    inv_scale = SCALES[scale]()

    def collect(tensors):
        stats = gm.collect(tensors, inv_scale=inv_scale)
        return bit_patterns((stats.columns, stats.flags))

    def result(tensors):
        return PLACES[place](lambda: collect(tensors))

    expected = []
    for tensors in calls:
        # not seen before
        launch_plans.clear()
        expected.append(collect(tensors))
    launch_plans.clear()
    for _ in range(2):
        assert [result(tensors) for tensors in calls] == expected
    # in place, without new tensor objects
    memory.mul_(-2.0)
    again = [result(tensors) for tensors in calls]
    launch_plans.clear()
    assert again == [collect(tensors) for tensors in calls]


@needs_kernels
@pytest.mark.parametrize("place", PLACES)
def test_lazy_signs_are_applied_wherever_a_call_comes_from(place):
    z = torch.complex(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))
    x = torch.tensor([1.0, 2.0])

    def sums(*tensors):
        # reads the columns in the same context
        return PLACES[place](lambda: gm.collect(tensors).sum).tolist()

    for _ in range(3):
        assert sums(z, x) == [10.0, 3.0]
        assert sums(z.conj(), torch._neg_view(x)) == [-4.0, -3.0]


def test_zeros_without_memory_are_measured():
    for _ in range(3):
        for x in (torch.ones(24), torch._efficientzerotensor((24,))):
            assert gm.collect([x]).sumsq.item() == x.sum().item()


@needs_kernels
@given(lists(largest=3000), st.sampled_from(sorted(SCALES)))
def test_calls_past_the_dispatcher_give_the_same_bits(some, scale):
    tensors = [recipe.tensor() for recipe in some]
    inv_scale = SCALES[scale]()
    launch_plans.clear()
    expected = bit_patterns(torch.ops.gradiometer.tensor_stats(tensors, *LIMITS, inv_scale))
    for _ in range(3):
        assert bit_patterns(measure(tensors, inv_scale)) == expected
    copies = [tensor.clone() for tensor in tensors]
    assert bit_patterns(measure(copies, inv_scale))[1] == expected[1]


def test_a_tensor_that_changes_in_place_is_seen(launches):
    x, y = torch.ones(6, 4), torch.ones(5)
    measure([x, y])
    (before,) = launch_plans._plans
    x.t_()
    measure([x, y])
    y.resize_(3)
    measure([x, y])
    x.data = x.t().data.view(torch.float64)
    measure([x, y])
    assert len(launch_plans._plans) == 4
    assert next(iter(launch_plans._plans)) is before
    numels = [one.chunk_map.table[:2].tolist() for one in launch_plans._plans]
    assert numels == [[24, 5], [24, 5], [24, 3], [12, 3]]
    assert [dtype for _, dtype in launches[-2:]] == [torch.float64, torch.float32]


def test_what_kernels_do_not_read_is_refused_by_name_after_an_op_was_given_it(launches):
    numbers, nothing = torch.arange(3), torch.empty(0, dtype=torch.int64)
    for _ in range(2):
        measure([numbers, nothing])
    assert launches
    for tensors in ([numbers, nothing], [nothing]):
        with pytest.raises(TypeError, match=r"'0' has dtype torch\.int64"):
            gm.collect(tensors)


@pytest.mark.usefixtures("launches")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.parametrize("make", STRANGERS.values(), ids=STRANGERS)
def test_what_cannot_be_measured_is_refused_by_name_after_a_list_as_long(make):
    x = torch.ones(3)
    for _ in range(3):
        gm.collect([x])
    # torch's own guards abort the process at a nested tensor
    with pytest.raises(TypeError, match="'0' "):
        gm.collect([make()])


# the steady state


def kinds(count):
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    return [torch.ones(3, 2, dtype=dtypes[i % 3]) for i in range(count)]


def test_unchanged_addresses_make_nothing_new(launches, direct, monkeypatch):
    tensors = kinds(9)
    measure(tensors)
    measure(tensors)
    (known,) = launch_plans._plans
    kept = known.kept
    for name in ("remember", "chunk_map_of", "int64", "_flat"):
        monkeypatch.setattr(packing, name, lambda *_: pytest.fail("made anew"))
    for name in ("_upload", "_pinned"):
        monkeypatch.setattr(uploads, name, lambda *_: pytest.fail("made anew"))
    launches.clear()
    for _ in range(3):
        measure(tensors)
        gm.collect(tensors)
        gm.collect({f"layer.{i}": tensor for i, tensor in enumerate(tensors)})
    assert len(direct) == 10
    assert list(launch_plans._plans) == [known]
    assert known.kept is kept
    # one launch per dtype, all with the same table
    assert len(launches) == 9 * 3
    assert {id(pointers) for pointers, _ in launches} == {id(kept.pointers)}


def test_a_changed_address_copies_pointers_and_nothing_else(launches, monkeypatch):
    tensors = kinds(9)
    measure(tensors)
    measure(tensors)
    (known,) = launch_plans._plans
    first = known.kept
    copied = []
    upload = uploads._upload
    monkeypatch.setattr(uploads, "_upload", lambda host, device: copied.append(host) or upload(host, device))
    moved = [*tensors[:4], tensors[4].clone(), *tensors[5:]]
    measure(moved)
    assert [host.numel() for host in copied] == [9]
    assert launches[-1][0].tolist() == [tensor.data_ptr() for tensor in moved]
    # memory that an earlier call may still read is unchanged
    assert first.pointers.tolist() == [tensor.data_ptr() for tensor in tensors]
    assert known.kept.table is first.table
    measure(moved)
    assert len(copied) == 1


@needs_kernels
def test_classes_of_histograms_are_copied_once(monkeypatch):
    tensors = kinds(9)
    first = gm.collect_exponents(tensors)
    copied = []
    upload = uploads._upload
    monkeypatch.setattr(uploads, "_upload", lambda host, device: copied.append(host) or upload(host, device))
    assert torch.equal(gm.collect_exponents(tensors).columns, first.columns)
    # the first call goes through the dispatcher, and the second keeps what it copies
    copied.clear()
    moved = [*tensors[:4], tensors[4].clone(), *tensors[5:]]
    for _ in range(2):
        assert torch.equal(gm.collect_exponents(moved).columns, first.columns)
    assert [host.numel() for host in copied] == [9]


def test_gradients_and_weights_of_the_same_shapes_keep_a_table_each(launches, direct):
    weights = [nn.Parameter(torch.ones(4)) for _ in range(3)]
    grads = [torch.ones(4) for _ in range(3)]
    for tensors in (weights, grads) * 2:
        measure(tensors)
    kept = {id(one.kept) for one in launch_plans._plans}
    for tensors in (weights, grads) * 3:
        measure(tensors)
        assert launches[-1][0].tolist() == [tensor.data_ptr() for tensor in tensors]
    assert {id(one.kept) for one in launch_plans._plans} == kept
    assert len(kept) == 2
    assert len(direct) == 8


def events_of(run):
    """Count the profiler's events in a run: calls and returns of Python and C functions."""
    seen = []
    # a garbage collection would run the callbacks of other libraries
    gc.disable()
    sys.setprofile(lambda *event: seen.append(event[1]))
    try:
        run()
    finally:
        sys.setprofile(None)
        gc.enable()
    return len(seen)


NAMES = tuple(f"layer.{i}.weight" for i in range(1000))


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize(
    "run",
    [
        measure,
        gm.collect,
        lambda tensors: gm.collect(dict(zip(NAMES, tensors, strict=False))),
        lambda tensors: gm.collect(tensors, inv_scale=0.5),
    ],
    ids=["op", "list", "dict", "scaled"],
)
def test_no_function_is_called_for_each_tensor(run):
    events = []
    for count in (2, len(NAMES)):
        tensors = [torch.ones(2) for _ in range(count)]
        for _ in range(3):
            run(tensors)
        events.append(events_of(lambda tensors=tensors: run(tensors)))
    few, many = events
    assert few > 10
    assert many == few


@pytest.mark.parametrize("run", [gm.collect_grads, lambda model: gm.collect_and_clip_(model, 1.0)])
def test_no_function_is_called_for_each_parameter(run):
    events = []
    for count in (2, 1000):
        tensors = [torch.ones(1) for _ in range(count)]
        with bench.stubbed(count, "cpu"):
            model = bench.model_of(tensors)
            for _ in range(3):
                run(model)
            events.append(events_of(lambda model=model: run(model)))
    assert events[0] == events[1]


def test_nothing_is_left_behind_by_a_call(launches):
    tensors = [torch.ones(2) for _ in range(500)]

    def blocks_after(calls):
        for _ in range(calls):
            gm.collect(tensors)
            launches.clear()
        return sys.getallocatedblocks()

    # Python's memory blocks; one object per tensor and call would be 50,000
    before = blocks_after(20)
    assert blocks_after(100) - before < 500


# modes, transforms and traces that must see the op


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("mode", [Watch, Functions])
def test_a_mode_sees_the_op_of_a_known_list(direct, mode):
    tensors = kinds(4)
    for _ in range(3):
        measure(tensors)
    assert len(direct) == 2
    for _ in range(2):
        with mode() as watch:
            measure(tensors)
            gm.collect(tensors)
        assert sum("tensor_stats" in str(func) for func in watch.seen) == 2
    assert len(direct) == 2
    measure(tensors)
    assert len(direct) == 3


@pytest.mark.usefixtures("launches")
def test_a_list_first_met_under_modes_is_not_taken_from_them(direct):
    tensors = kinds(4)
    for depth in (2, 1, 2):
        with contextlib.ExitStack() as stack:
            watches = [stack.enter_context(Watch()) for _ in range(depth)]
            measure(tensors)
        for watch in watches:
            assert sum("tensor_stats" in str(func) for func in watch.seen) == 1
    assert direct == []


@pytest.mark.usefixtures("launches")
def test_a_profile_names_the_op_of_a_known_list():
    tensors = kinds(4)
    for _ in range(3):
        measure(tensors)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        measure(tensors)
    assert "gradiometer::tensor_stats" in {event.key for event in profile.key_averages()}


@pytest.mark.usefixtures("launches")
def test_fake_tensors_like_a_known_list_stay_fake(direct):
    tensors = kinds(4)
    for _ in range(2):
        measure(tensors)
    with FakeTensorMode() as mode:
        columns, _ = measure([mode.from_tensor(tensor) for tensor in tensors])
    assert type(columns).__name__ == "FakeTensor"
    assert len(direct) == 1


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("transform", ["vmap", "functionalize", "grad"])
def test_a_transform_sees_the_op_of_a_known_list(direct, transform):
    closed_over = [torch.ones(3), torch.ones(3)]
    for _ in range(2):
        measure(closed_over)
    direct.clear()

    def function(x):
        # like the known list, but in a context where the path must not be used
        columns, _ = measure([closed_over[0], closed_over[1]])
        return (x + columns.sum().to(x.dtype)).sum()

    def run():
        if transform == "vmap":
            torch.func.vmap(function)(torch.ones(2, 3))
        elif transform == "functionalize":
            torch.func.functionalize(function)(torch.ones(3))
        else:
            torch.func.grad(function)(torch.ones(3))

    run()
    assert direct == []


@pytest.mark.usefixtures("launches")
def test_a_graph_holds_the_op_of_a_known_list(direct):
    tensors = [torch.ones(3), torch.ones(2)]
    for _ in range(2):
        measure(tensors)
    direct.clear()
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    torch.compile(
        lambda ts: tensor_ops.tensor_stats(ts, DEFAULT_THRESHOLDS), backend=backend, fullgraph=True
    )(tensors)
    (graph,) = graphs
    assert [str(node.target) for node in graph.graph.nodes if "tensor_stats" in str(node.target)] == [
        "gradiometer.tensor_stats"
    ]
    assert direct == []


# which device tables are kept


GRAPH_TREES = "torch._inductor.cudagraph_trees"


@pytest.fixture(params=["not imported", "imported", "not in this torch"])
def graph_trees(request, monkeypatch):
    monkeypatch.delitem(sys.modules, GRAPH_TREES, raising=False)
    if request.param == "imported":
        monkeypatch.setitem(sys.modules, GRAPH_TREES, ModuleType(GRAPH_TREES))
    if request.param == "not in this torch":
        monkeypatch.setitem(sys.modules, "torch._inductor", ModuleType("torch._inductor"))
        monkeypatch.setattr(uploads, "_has_graph_trees", lambda: False)
    return request.param


@pytest.mark.usefixtures("launches")
def test_calls_through_the_dispatcher_keep_tables_where_no_graph_can_be_warmed_up(graph_trees):
    tensors = kinds(3)
    for _ in range(3):
        torch.ops.gradiometer.tensor_stats(tensors, *LIMITS)
    (known,) = launch_plans._plans
    assert (known.kept is not None) == (graph_trees == "not imported")


IMPORT = f"""
import sys
import torch._inductor.compile_fx
from gradiometer.ops import uploads

assert "{GRAPH_TREES}" not in sys.modules
assert uploads._has_graph_trees()
assert not uploads.may_warm_up()
"""


def test_the_module_of_graph_trees_is_not_imported_without_graphs():
    run = subprocess.run([sys.executable, "-c", IMPORT], check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.usefixtures("launches")
def test_no_call_is_direct_while_inductor_allocates_from_a_graphs_pool(direct, monkeypatch):
    from torch._inductor import cudagraph_trees

    # all functions that need a device
    for name in ("beginAllocateCurrentThreadToPool", "endAllocateToPool", "releasePool"):
        monkeypatch.setattr(torch._C, f"_cuda_{name}", lambda *_: None, raising=False)
    stream = SimpleNamespace(wait_stream=lambda _: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    tensors = kinds(3)
    for _ in range(2):
        measure(tensors)
    direct.clear()
    with cudagraph_trees._use_cuda_memory_pool_manager("cuda:0", (0, 0), stream):
        measure(tensors)
        gm.collect(tensors)
    assert direct == []
    measure(tensors)
    assert direct == [3]


@pytest.fixture
def elsewhere(monkeypatch):
    """A device with streams that receives copies; the stream numbers are in a list, the current one last."""
    streams = [0]
    monkeypatch.setattr(uploads, "_pinned", lambda host, _: host.clone())
    monkeypatch.setattr(uploads, "_upload", lambda host, _: host.clone())
    monkeypatch.setattr(uploads, "is_capturing", lambda _: streams[-1] is None)
    monkeypatch.setattr(uploads, "stream_of", lambda _: streams[-1])
    return streams


def known_elsewhere(tensors, device):
    with torch.no_grad():
        packing.pack(tensors, 1024, 64)
    return replace(next(iter(launch_plans._plans)), device=torch.device(device))


def keep(tensors, known):
    return packing.pack(tensors, 1024, 64, known, keep=True)


def test_tables_on_the_device_belong_to_a_stream(elsewhere):
    tensors = [torch.ones(5), torch.ones(7)]
    known = known_elsewhere(tensors, "cuda:0")
    first = keep(tensors, known)
    assert keep(tensors, known).pointers is first.pointers
    elsewhere.append(7)
    other = keep(tensors, known)
    assert other.pointers is not first.pointers
    assert other.table is not first.table
    assert keep(tensors, known).pointers is other.pointers
    for packed in (first, other):
        assert packed.pointers.tolist() == [tensor.data_ptr() for tensor in tensors]
        assert packed.table.tolist() == known.chunk_map.table.tolist()


def test_a_captured_call_neither_reads_nor_leaves_what_is_kept(elsewhere, monkeypatch):
    monkeypatch.setattr(uploads, "_captured", [])
    tensors = [torch.ones(5), torch.ones(7)]
    known = known_elsewhere(tensors, "cuda:0")
    kept = keep(tensors, known)
    elsewhere.append(None)
    captured = keep(tensors, known)
    elsewhere.append(0)
    assert captured.pointers is not kept.pointers
    assert captured.table is not kept.table
    assert len(uploads._captured) == 1
    assert keep(tensors, known).pointers is kept.pointers


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_captures_and_streams_are_those_of_the_device(kind, monkeypatch):
    device, module = torch.device(kind, 0), torch.get_device_module(kind)
    others = {torch.cuda, torch.xpu} - {module}
    for name in ("is_initialized", "is_current_stream_capturing", "current_stream"):
        for other in others:
            monkeypatch.setattr(other, name, lambda *_: pytest.fail("another device"))
    monkeypatch.setattr(module, "is_initialized", lambda: True)
    monkeypatch.setattr(module, "current_stream", lambda of: SimpleNamespace(stream_id=7 + of.index))
    for answer in (True, False):
        monkeypatch.setattr(module, "is_current_stream_capturing", lambda answer=answer: answer)
        assert uploads.is_capturing(device) is answer
    assert uploads.stream_of(device) == 7
    # asking would initialize the device
    monkeypatch.setattr(module, "is_initialized", lambda: False)
    monkeypatch.setattr(module, "is_current_stream_capturing", lambda: pytest.fail("initialized"))
    assert uploads.is_capturing(device) is False


def test_threads_do_not_mix_their_addresses():
    failures = []

    def run():
        for _ in range(200):
            tensors = [torch.ones(5), torch.ones(7), torch.ones(5)]
            with torch.no_grad():
                packed = packing.pack(tensors, 1024, 64, keep=True)
            if packed.pointers.tolist() != [tensor.data_ptr() for tensor in tensors]:
                failures.append(packed)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


# versions of torch without these guards, or with others


@pytest.fixture(params=["gone", "other arguments", "any size", "none alike"])
def other_torch(request, monkeypatch):
    def guards(tensors):
        if request.param == "gone":
            raise ImportError
        if request.param == "other arguments":
            raise TypeError
        if request.param == "none alike":
            return lambda *_: False
        dims = [[None] * tensor.dim() for tensor in tensors]
        return TensorGuards(*tensors, dynamic_dims_sizes=dims, dynamic_dims_strides=dims).check

    monkeypatch.setattr(tensor_guards, "_guards", guards)
    tensor_guards._guards_tell.cache_clear()
    yield
    tensor_guards._guards_tell.cache_clear()


@pytest.mark.usefixtures("other_torch", "launches")
def test_without_torchs_guards_all_is_compared_in_python(direct):
    assert not tensor_guards.guards_tell()
    memory = torch.ones(24)
    for name in ("whole", "shorter", "matrix", "transposed", "fp64", "complex", "negative", "parameter"):
        for _ in range(2):
            measure([VIEWS[name](memory), memory])
    # the dispatcher has resolved the lazy sign: the path sees a contiguous copy
    assert len(launch_plans._plans) == 7
    assert direct == []
    for one in launch_plans._plans:
        assert one.chunk_map.table[1].item() == 24


# the benchmark


def test_the_benchmark_writes_what_it_measures(tmp_path, monkeypatch, capsys):
    pytest.importorskip("rich")
    # other tests import it
    monkeypatch.delitem(sys.modules, GRAPH_TREES, raising=False)
    path = tmp_path / "host.json"
    monkeypatch.setattr(bench, "COUNTS", (1, 20))
    monkeypatch.setattr(sys, "argv", ["host_path", "--rounds", "2", "--json", str(path)])
    assert bench.main() == 0
    figures = json.loads(path.read_text())
    steady, moved, first, op, op_moved = figures["calls"]["20"].values()
    assert steady == op == {"launches": 2, "copies": 0, "bytes": 0}
    assert moved == op_moved == {"launches": 2, "copies": 1, "bytes": 20 * 8}
    assert first == {"launches": 2, "copies": 2, "bytes": (20 + 4 * 20) * 8 + (20 + 2) * 4}
    assert set(figures["medians_us"]) == {"1", "20"}
    assert "bound" in figures
    assert "list of data_ptr()" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("beyond", "launches", "copies", "met"),
    [(179.0, 2, 0, True), (181.0, 2, 0, False), (1.0, 3, 0, False), (1.0, 2, 1, False)],
)
def test_the_benchmark_notices_a_missed_bound(monkeypatch, beyond, launches, copies, met):
    monkeypatch.setattr(bench, "COUNTS", (1000,))
    medians = {1000: {bench.BARE: 70.0, bench.OURS: 70.0 + beyond, bench.PEER: 900.0}}
    counted = {1000: {bench.OURS: {"launches": launches, "copies": copies}}}
    assert bench.verdicts_of(medians, counted)[1000]["met"] is met


def test_a_list_is_looked_up_once_a_call_whether_it_is_known_or_not(monkeypatch):
    asked = []
    recognize = ops.recognize
    monkeypatch.setattr(ops, "recognize", lambda tensors: (asked.append(len(tensors)), recognize(tensors))[1])
    tensors = [torch.ones(5), torch.ones(3)]
    for _ in range(3):
        gm.collect(tensors)
    # it has to be copied, so it is never measured directly
    gm.collect([torch.ones(6)[::2]])
    assert asked == [2, 2, 2, 1]
