"""The op that measures an activation, in eager PyTorch and with the interpreted kernel."""

import math
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import gradiometer as gm
from conftest import KERNELS
from gradiometer import ops
from gradiometer.columns import CURSOR_SIZE, Cursor
from gradiometer.ops import activation_reference, tap_partials
from gradiometer.ops import taps as tap_ops
from support.activations import Calls, agree, columns_of, merged

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64]


@st.composite
def tensors(draw):
    """Draw a tensor with strides, and the dimension of its channels."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    real = torch.float32 if dtype.is_complex else dtype
    odd = [0.0, -0.0, 1.0, -2.5, 1e-7, 65504.0, float("nan"), float("inf"), float("-inf")]
    numel = torch.Size(shape).numel()
    flat = draw(st.lists(st.sampled_from(odd), min_size=numel, max_size=numel))
    x = torch.tensor(flat, dtype=torch.float64).to(real).view(shape).to(dtype)
    if x.dim() > 1 and draw(st.booleans()):
        x = x.transpose(0, 1)
    if x.dim() and draw(st.booleans()):
        x = torch.cat([x, x])[::2]
    return x, draw(st.integers(-x.dim(), x.dim() - 1)) if x.dim() else -1


@pytest.fixture
def _short_pieces(monkeypatch):
    """Let plain operators measure small tensors, too."""
    monkeypatch.setattr(tap_partials, "_LEAST", 2)
    monkeypatch.setattr(tap_partials, "_ENOUGH", 6)
    monkeypatch.setattr(tap_partials, "_MOST", 4)


def by_operators(*args, orders, **options):
    del orders
    torch.ops.gradiometer.tap(*args, **options)


@pytest.mark.usefixtures("_short_pieces")
@pytest.mark.parametrize("fused", [False, True])
@settings(
    deadline=None,
    max_examples=40 if ops.INTERPRETED else 150,
    # it changes constants, which are the same for all examples
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(tensors(), st.integers(1, 3))
def test_columns_are_those_of_the_definitions(fused, drawn, calls):
    x, channel_dim = drawn
    model = Calls("x")
    taps = gm.Taps(model, names=["x"], fused=fused)
    # the operators of a graph, in eager code
    run = by_operators if fused else ops.tap
    for _ in range(calls):
        with mock.patch.object(ops, "tap", run):
            model(x, channel_dim=channel_dim)
    stats = taps.stats()
    taps.remove()
    if x.numel() == 0:
        assert not stats.columns.any()
        return
    agree(stats.columns[0], merged([columns_of(x, channel_dim)] * calls))
    assert not stats.columns[1].any()


@pytest.fixture
def stores():
    """Return the stores of values and gradients, and a cursor whose step is due."""
    cursor = torch.zeros(CURSOR_SIZE, dtype=torch.float64)
    cursor[Cursor.EVERY] = 1
    return ops.new_store(3, torch.device("cpu")), ops.new_store(3, torch.device("cpu")), cursor


@pytest.mark.parametrize(
    "x",
    [
        torch.ones(2, 3).to(torch.float8_e4m3fn),
        torch.tensor(0.0),
        torch.tensor(0j),
        torch.zeros(2, 70_000).index_fill(1, torch.tensor([69_999]), 1.0),
        torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1),
        torch.ones(3, 1).expand(3, 4),
        torch.ones(4, dtype=torch.complex64).mul(1j).conj(),
    ],
    ids=["fp8", "number", "complex number", "many channels", "permuted", "expanded", "conjugate"],
)
def test_unusual_tensors(x, stores):
    values, grads, cursor = stores
    for _ in range(2):
        ops.tap(x, values, grads, cursor, 1, -1)
    # torch has few operators for fp8
    agree(values[1], merged([columns_of(x.float() if x.itemsize == 1 else x.resolve_conj())] * 2))
    assert not values[0].any()
    assert not values[2].any()
    assert not grads[:3].any()


@pytest.mark.parametrize(
    ("step", "every", "is_due"), [(0, 0, False), (0, 1, True), (3, 2, False), (4, 2, True)]
)
def test_a_step_that_is_not_due_changes_nothing(step, every, is_due, stores):
    values, grads, cursor = stores
    cursor[Cursor.STEP], cursor[Cursor.EVERY] = step, every
    x = torch.ones(3, 100, requires_grad=True) * 2
    for tap, fused in (
        (ops.tap, False),
        (torch.ops.gradiometer.tap, False),
        (torch.ops.gradiometer.tap, True),
    ):
        tap(x, values, grads, cursor, 0, -1, fused=fused)
    x.sum().backward()
    assert values[0].any() == is_due
    assert grads[0].any() == is_due
    assert not values[1:3].any()


class Copies(TorchDispatchMode):
    """Counts the elements that operators copy."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        del types
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in {torch.ops.aten.clone, torch.ops.aten.copy_, torch.ops.aten._to_copy}:
            self.elements += out.numel()
        return out


@pytest.mark.parametrize(
    "x",
    [
        torch.ones(40, 30),
        torch.ones(40, 30).t(),
        torch.ones(40, 30)[:, ::2],
        torch.ones(40, 3 * 32).chunk(3, dim=1)[1],
        torch.ones(1, 30).expand(40, 30),
        torch.ones(40, 60, dtype=torch.bfloat16)[:, 1:31],
        torch.ones(40, 60, dtype=torch.float64)[:, ::2],
        torch.ones(40, 30, dtype=torch.complex64)[:, ::2],
        torch.ones(40, 60).to(torch.float8_e5m2)[:, ::2],
    ],
    ids=["contiguous", "transposed", "sliced", "chunk", "expanded", "bf16", "fp64", "complex", "fp8"],
)
def test_a_step_that_is_not_due_copies_nothing(x, stores, monkeypatch):
    if ops.INTERPRETED:
        from triton.runtime.interpreter import InterpretedFunction

        run = InterpretedFunction.run

        def unseen(*args, **options):
            # the interpreter copies its arguments
            with _disable_current_modes():
                return run(*args, **options)

        monkeypatch.setattr(InterpretedFunction, "run", unseen)
    values, _, cursor = stores
    for every, step, is_due in ((2, 1, False), (0, 0, False), (2, 2, True)):
        cursor[Cursor.EVERY], cursor[Cursor.STEP] = every, step
        with Copies() as copies:
            # what the op calls
            tap_ops._measure(x, None, values, cursor, 1, -1)
        assert values[1].any() == is_due
        # for the kernels, each byte of fp8 is converted once
        assert is_due or copies.elements <= (256 if x.itemsize == 1 and ops.INTERPRETED else 0)
    agree(values[1], columns_of(x.float() if x.itemsize == 1 else x))


@pytest.mark.parametrize("is_forward", [True, False])
def test_opcheck(is_forward, stores):
    values, _, cursor = stores
    x, others = torch.randn(4, 70), (values, cursor, 1, -1, is_forward)
    torch.library.opcheck(torch.ops.gradiometer.tap_.default, (x, *others))
    partials = tap_partials.partials_of(tap_partials.fusible(x))
    torch.library.opcheck(torch.ops.gradiometer.tap_partials_.default, (x, partials, *others))


def fill(x, *values):
    """Return a copy with these values at the first places."""
    x = x.clone()
    x.view(-1)[: len(values)] = torch.tensor(values).to(x.dtype)
    return x


ONES = torch.ones(6, 256)
CASES = {
    "finite": (ONES, 0),
    "NaN": (fill(ONES, math.nan), 1),
    "Inf": (fill(ONES, math.inf, -math.inf, 0.0), 1),
    "NaN and Inf": (fill(ONES, math.inf, math.nan, -1.0), 1),
    "a few zeros": (fill(ONES, 0.0, -0.0, 0.0), 0),
    "as many zeros as a channel has": (fill(ONES, *[0.0] * 6), 0),
    "a zero in each row": (torch.ones(6, 256) - torch.eye(6, 256), 1),
    "a channel of zeros": (torch.ones(6, 256).index_fill(1, torch.tensor([3]), 0.0), 1),
    "zeros": (torch.zeros(6, 256), 1),
    "channels first": (torch.ones(128, 6).t().index_fill(0, torch.tensor([1]), 0.0), 1),
    "short rows": (torch.ones(16, 8).index_fill(1, torch.tensor([7]), 0.0), 1),
}


@pytest.mark.parametrize("name", CASES)
def test_partial_sums_read_the_tensor_only_for_a_nonfinite_value_or_a_channel_of_zeros(
    name, stores, monkeypatch
):
    x, reads = CASES[name]
    values, grads, cursor = stores
    calls = []

    def count(function):
        return lambda *args: calls.append(1) or function(*args)

    for reads_again in ("activation_stats", "zero_channels"):
        monkeypatch.setattr(
            activation_reference, reads_again, count(getattr(activation_reference, reads_again))
        )
    assert tap_partials.fusible(x) is not None
    torch.ops.gradiometer.tap(x, values, grads, cursor, 1, 1, fused=True)
    agree(values[1], columns_of(x, 1))
    if not KERNELS:
        assert min(len(calls), 1) == reads


def test_what_is_known_of_sizes_and_strides_decides_whether_plain_operators_can_measure():
    def pieces(*shape, dtype=torch.float32):
        found = tap_partials.fusible(torch.zeros(shape, dtype=dtype))
        return None if found is None else tuple(found.shape)

    assert pieces(5, 768) == (5, 1, 768)
    assert pieces(5, 3072) == (5, 4, 768)
    # a divisor
    assert pieces(3, 2304) == (3, 3, 768)
    assert pieces(3, 2050) == (3, 5, 410)
    # dimensions are joined
    assert pieces(7, 8, 16, 16) == (7, 8, 1, 256)
    assert pieces(2, 6, 5) is None
    assert pieces(9, 5, 12) == (1, 540)
    assert pieces(2**24) == (2**15, 512)
    assert pieces() is None
    # neither a prime number, nor few elements, nor a dtype that Inductor does not round as memory does
    assert pieces(5, 7919) is None
    assert pieces(5, 768, dtype=torch.float16) is None
    assert pieces(5, 768, dtype=torch.complex64) is None
    assert tap_partials.fusible(torch.ones(300, 1).expand(300, 400)) is None
    x = torch.randn(2, 256, 8, 8).contiguous(memory_format=torch.channels_last)
    assert torch.equal(tap_partials.fusible(x).flatten(), x.permute(0, 2, 3, 1).flatten())


def test_a_recorder_writes_what_taps_have_measured():
    model = torch.nn.Sequential(torch.nn.Linear(3, 2))
    taps = gm.Taps(model, {"all": "."})
    recorder = gm.Recorder(model, taps=taps)
    for _ in range(2):
        model(torch.ones(4, 3)).sum().backward()
        expected = taps.stats()
        recorder.record()
        recorder.advance()
    record = recorder.read()[-1]
    for row, kind in enumerate(("activations", "activation_grads")):
        for name in ("norm", "kurtosis", "n_calls"):
            assert record.value(name, kind).tolist() == [getattr(expected, name)[row]]
