"""The op that measures an activation, in eager PyTorch and with the interpreted kernel."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gradiometer as gm
from gradiometer import ops
from gradiometer.columns import CURSOR_SIZE, Cursor
from support.activations import Calls, agree, columns_of, merged

# the interpreter computes with NumPy
pytestmark = pytest.mark.filterwarnings(
    "ignore:(overflow|invalid value|All-NaN slice) encountered:RuntimeWarning"
)

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


@settings(deadline=None, max_examples=40 if ops.INTERPRETED else 150)
@given(tensors(), st.integers(1, 3))
def test_columns_are_those_of_the_definitions(drawn, calls):
    x, channel_dim = drawn
    model = Calls("x")
    taps = gm.Taps(model, names=["x"])
    for _ in range(calls):
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
    x = torch.ones(5, requires_grad=True) * 2
    for tap in (ops.tap, torch.ops.gradiometer.tap):
        tap(x, values, grads, cursor, 0, -1)
    x.sum().backward()
    assert values[0].any() == is_due
    assert grads[0].any() == is_due
    assert not values[1:3].any()


@pytest.mark.parametrize("is_forward", [True, False])
def test_opcheck(is_forward, stores):
    values, _, cursor = stores
    torch.library.opcheck(
        torch.ops.gradiometer.tap_.default, (torch.randn(4, 3), values, cursor, 1, -1, is_forward)
    )


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
    place = record.roster.index["0.out"]
    for row, kind in enumerate(("activations", "activation_grads")):
        for name in ("norm", "kurtosis", "n_calls"):
            assert record.value(name, kind)[place] == getattr(expected, name)[row]
