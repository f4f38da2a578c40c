"""check_finite: NaN and Inf in weights, gradients, buffers and the loss, by name; one transfer; its text."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import json
import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from gradiometer import FiniteReport, check_finite
from support.fake_device import DEVICES, device_of, watch

pytestmark = pytest.mark.once

NAN, INF = math.nan, math.inf
ISSUES = ("nan_weights", "inf_weights", "nan_grads", "inf_grads", "nan_buffers", "inf_buffers")


class Net(nn.Module):
    """Three layers with known values, gradients of 1, and buffers of several kinds."""

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__()
        for i in range(3):
            layer = nn.Module()
            for name, shape in (("weight", (2, 4)), ("bias", (2,))):
                parameter = nn.Parameter(torch.full(shape, 2.0, device=device))
                parameter.grad = torch.ones_like(parameter)
                layer.register_parameter(name, parameter)
            self.add_module(f"l{i}", layer)
        self.register_buffer("mean", torch.zeros(4, device=device))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64, device=device))
        self.register_buffer("mask", torch.full((3, 3), -INF, device=device), persistent=False)


def issues(report: FiniteReport) -> dict[str, list[str]]:
    return {name: found for name in ISSUES if (found := getattr(report, name))}


# findings


def test_a_finite_model_has_no_issues():
    report = check_finite(Net(), torch.tensor(0.5))
    assert issues(report) == {}
    assert report.has_issues is False
    assert (report.max_weight, report.max_grad) == (2.0, 1.0)
    assert (report.loss, report.loss_is_finite) == (0.5, True)
    assert report.weights.names == report.grads.names == tuple(dict(Net().named_parameters()))
    assert report.buffers is None


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64], ids=str
)
@pytest.mark.parametrize(("value", "kind"), [(NAN, "nan"), (INF, "inf"), (-INF, "inf")])
def test_what_is_not_finite_is_named(dtype, value, kind):
    w, b = (nn.Parameter(torch.full((3,), 2.0, dtype=dtype)) for _ in range(2))
    w.grad, b.grad = torch.ones_like(w), torch.ones_like(b)
    b.grad[1] = value
    report = check_finite({"w": w, "b": b})
    assert issues(report) == {f"{kind}_grads": ["b"]}
    assert report.grads["b"].n_nonfinite == 1
    w.data[0] = value
    report = check_finite({"w": w, "b": b})
    assert issues(report) == {f"{kind}_weights": ["w"], f"{kind}_grads": ["b"]}
    assert report.has_issues is True
    # maxima are over finite elements
    assert (report.max_weight, report.max_grad) == (2.0, 1.0)


numbers = st.floats(width=32) | st.sampled_from([NAN, INF, -INF, 0.0, -3.0])
tensors = st.dictionaries(st.sampled_from("abcde"), st.tuples(*[st.lists(numbers, max_size=5)] * 2))


@given(tensors, st.booleans(), numbers | st.none())
def test_lists_and_maxima_are_those_of_the_obvious_formula(tensors, all_have_gradients, loss):
    parameters, grads = {}, {}
    for i, (name, (weight, grad)) in enumerate(tensors.items()):
        parameters[name] = nn.Parameter(torch.tensor(weight, dtype=torch.float32))
        if all_have_gradients or i % 2:
            grads[name] = (grad * len(weight))[: len(weight)] or [1.0] * len(weight)
            parameters[name].grad = torch.tensor(grads[name], dtype=torch.float32)
    weights = {name: weight for name, (weight, _) in tensors.items()}
    expected = {"nan_buffers": [], "inf_buffers": [], "loss_is_finite": loss is None or math.isfinite(loss)}
    for kind, values in (("weight", weights), ("grad", grads)):
        for what, holds in (("nan", math.isnan), ("inf", math.isinf)):
            expected[f"{what}_{kind}s"] = [name for name, xs in values.items() if any(map(holds, xs))]
        finite = [abs(x) for xs in values.values() for x in xs if math.isfinite(x)]
        expected[f"max_{kind}"] = max(finite, default=0.0)
    expected["has_issues"] = not expected["loss_is_finite"] or any(expected[name] for name in ISSUES)
    found = check_finite(parameters, loss).to_dict()
    # NaN does not equal itself, so compare its text
    assert repr(found.pop("loss")) == repr(loss)
    assert found == expected


def test_frozen_parameters_are_weights_and_those_without_gradient_no_gradients():
    net = Net().requires_grad_(False)
    net.l0.weight.data[0, 0] = NAN
    net.l1.weight.grad = None
    report = check_finite(net)
    assert report.nan_weights == ["l0.weight"]
    assert len(report.weights) == 6
    assert "l1.weight" not in report.grads


def test_nothing_to_look_at_is_fine():
    for model in (nn.ReLU(), {}, [], iter(())):
        report = check_finite(model)
        assert report.has_issues is False
        assert (report.max_weight, report.max_grad) == (0.0, 0.0)
        assert str(report) == "all finite: no weights; no gradients"
    net = Net()
    net.zero_grad()
    assert check_finite(net).grads.measured is False
    empty = nn.Parameter(torch.ones(0, 3))
    empty.grad = torch.ones(0, 3)
    report = check_finite([empty], 1.0)
    assert (report.has_issues, report.max_weight) == (False, 0.0)
    assert str(report) == "all finite: loss 1; 1 weight; 1 gradient"


def test_a_model_is_what_collect_weights_takes():
    net = Net()
    net.l2.bias.grad[0] = INF
    # an iterator can be read only once
    assert check_finite(net.parameters()).inf_grads == ["5"]
    assert check_finite(net.named_parameters()).inf_grads == ["l2.bias"]
    assert check_finite(dict(net.named_parameters())).inf_grads == ["l2.bias"]
    assert check_finite(torch.compile(net)).inf_grads == ["l2.bias"]
    net.l0.weight = net.l1.weight
    assert check_finite(net).weights.names == ("l0.weight", "l0.bias", "l1.bias", "l2.weight", "l2.bias")


# losses

LOSSES = {
    "none": (None, None, True),
    "float": (0.25, 0.25, True),
    "NaN": (NAN, NAN, False),
    "inf": (-INF, -INF, False),
    "int": (3, 3.0, True),
    "bool": (True, 1.0, True),
    "tensor": (torch.tensor(0.25), 0.25, True),
    "tensor of one": (torch.tensor([[NAN]]), NAN, False),
    "float64": (torch.tensor(1 / 3, dtype=torch.float64), 1 / 3, True),
    "bfloat16": (torch.tensor(0.5, dtype=torch.bfloat16), 0.5, True),
    "float16": (torch.tensor(1e5).half(), INF, False),
    "int64": (torch.tensor([1, 4]), 2.5, True),
    "bool tensor": (torch.tensor([True, False]), 0.5, True),
    "vector": (torch.tensor([1.0, 2.0]), 1.5, True),
    "one NaN": (torch.tensor([1.0, NAN, 2.0]), NAN, False),
    "one inf": (torch.tensor([1.0, INF, 2.0]), INF, False),
    "one -inf": (torch.tensor([[-INF], [2.0]]), -INF, False),
    "both": (torch.tensor([INF, -INF]), NAN, False),
    "inf and NaN": (torch.tensor([INF, NAN]), NAN, False),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_its_mean_and_carries_what_is_not_finite(name):
    loss, value, finite = LOSSES[name]
    report = check_finite(Net(), loss)
    assert report.loss == (value if value is None else pytest.approx(value, nan_ok=True, rel=1e-15))
    assert type(report.loss) is (type(None) if value is None else float)
    assert report.loss_is_finite is finite
    assert report.has_issues is not finite
    assert issues(report) == {}


@pytest.mark.parametrize(
    ("loss", "error", "words"),
    [
        (torch.ones(0), ValueError, r"the loss of shape \(0,\) has no elements"),
        ("0.5", TypeError, "the loss must be a real number or tensor, got str"),
        ([0.5], TypeError, "the loss must be a real number or tensor, got list"),
        (1j, TypeError, "the loss must be a real number or tensor, got complex"),
        (torch.tensor(1j), TypeError, "the loss must be real, got torch.complex64"),
        (torch.ones((), device="meta"), TypeError, "'loss' is on the meta device"),
        (10**400, ValueError, "the loss is an integer beyond the range of float64"),
        (
            torch.quantize_per_tensor(torch.ones(1), 0.1, 0, torch.qint8),
            TypeError,
            "'loss' has quantized dtype",
        ),
    ],
    ids=["empty", "string", "list", "complex", "complex tensor", "meta", "too large", "quantized"],
)
def test_what_is_no_loss_is_refused(loss, error, words):
    with pytest.raises(error, match=f"check_finite: {words}"):
        check_finite(Net(), loss)


# buffers


def test_buffers_are_looked_at_when_asked_for():
    net = Net()
    assert check_finite(net).has_issues is False
    report = check_finite(net, buffers=True)
    assert report.buffers.names == ("mean", "mask")
    assert issues(report) == {"inf_buffers": ["mask"]}
    assert report.has_issues is True
    net.mean[2] = NAN
    net.again = net.mean
    net.register_buffer("phase", torch.tensor([1j, complex(NAN, 0)]))
    expected = {"nan_buffers": ["mean", "phase"], "inf_buffers": ["mask"]}
    assert issues(check_finite(net, buffers=True)) == expected
    assert check_finite(nn.Linear(2, 1), buffers=True).buffers.measured is False


@pytest.mark.parametrize("model", [{"w": torch.ones(2)}, [torch.ones(2)]], ids=["mapping", "list"])
def test_buffers_need_a_module(model):
    with pytest.raises(TypeError, match=r"buffers=True needs a module, got (dict|list)"):
        check_finite(model, buffers=True)


# refused arguments, and unchanged state


def test_what_cannot_be_measured_is_refused_by_name_and_kind():
    w = nn.Parameter(torch.ones(3))
    with pytest.raises(TypeError, match=r"check_finite, weights: 'n' is on the meta device"):
        check_finite({"w": w, "n": torch.ones(3, device="meta")})
    with pytest.raises(TypeError, match=r"check_finite: 'n' is a module.*; pass one module by itself"):
        check_finite({"w": w, "n": nn.Linear(1, 1)})
    with pytest.raises(ValueError, match="check_finite, weights: two tensors have the name 'w'"):
        check_finite([("w", w), ("w", torch.ones(2))])
    with pytest.raises(TypeError, match=r"check_finite: got|check_finite: expected"):
        check_finite(3)


def test_inside_a_compiled_function_it_says_to_call_it_outside():
    net = Net()
    with pytest.raises(Exception, match=r"check_finite copies to the host.* call it outside"):
        torch.compile(lambda: check_finite(net), fullgraph=True, backend="aot_eager")()
    torch._dynamo.reset()


def test_everything_stays_as_it_is():
    net = Net()
    net.l0.weight.grad[0, 0] = NAN
    before = copy.deepcopy([(p.detach(), p.grad) for p in net.parameters()])
    held = [(p, p.grad, p.data_ptr(), p._version, p.grad._version) for p in net.parameters()]
    loss = net.l0.weight.sum()
    state = torch.get_rng_state()
    check_finite(net, loss, buffers=True)
    assert torch.equal(torch.get_rng_state(), state)
    for p, (same, grad, pointer, version, grad_version) in zip(net.parameters(), held, strict=True):
        assert (p is same, p.grad is grad, p.data_ptr(), p._version) == (True, True, pointer, version)
        assert p.grad._version == grad_version
    for p, (value, grad) in zip(net.parameters(), before, strict=True):
        torch.testing.assert_close((p.detach(), p.grad), (value, grad), rtol=0, atol=0, equal_nan=True)
    # the autograd graph of the loss still exists
    loss.backward()


def test_a_report_is_a_snapshot_and_frozen():
    net = Net()
    report = check_finite(net)
    net.l0.weight.data.fill_(NAN)
    assert report.nan_weights == []
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.loss = 0.0
    assert json.loads(json.dumps(report.to_dict())) == report.to_dict()


# waits for the device


class ArrivedError(Exception):
    """Raised when the transfer to the host has happened."""


@pytest.fixture
def ends_on_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop after the transfer: the report is made on the host, and cannot be made from fake values."""
    module = importlib.import_module("gradiometer.control.check_finite")
    fetch = module.fetch

    def arrive(tensors):
        copies = fetch(tensors)
        assert {copy.device.type for copy in copies} == {"cpu"}
        raise ArrivedError

    monkeypatch.setattr(module, "fetch", arrive)


@pytest.mark.usefixtures("ends_on_arrival")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("loss", ["none", "float", "scalar", "vector", "int", "host"])
@pytest.mark.parametrize("buffers", [False, True])
def test_there_is_one_transfer_and_no_wait_before_it(device, loss, buffers):
    with device_of(device) as d:
        net = Net(d)
        losses = {
            "none": None,
            "float": 0.5,
            "scalar": torch.ones((), device=d, requires_grad=True),
            "vector": torch.ones(5, device=d, dtype=torch.bfloat16),
            "int": torch.ones(5, device=d, dtype=torch.int64),
            "host": torch.ones(()),
        }
        with watch() as seen, pytest.raises(ArrivedError):
            check_finite(net, losses[loss], buffers=buffers)
        # a blocking copy, into ordinary memory
        assert seen.to_host == ([] if device == "cpu" else [(True, False)])
        assert seen.to_device == []
        assert seen.op_calls == (2 if (device, loss) == ("cuda", "host") else 1)


@pytest.mark.usefixtures("ends_on_arrival")
def test_there_is_one_transfer_from_several_devices_too():
    with FakeTensorMode():
        places = ("cpu", "cuda:0", "cuda:1", "cpu", "cuda:1")
        weights = {f"w{i}": torch.ones(3, device=d) for i, d in enumerate(places)}
        with watch() as seen, pytest.raises(ArrivedError):
            check_finite(weights, torch.ones((), device="cuda:1"))
        assert seen.to_host == [(True, False)]
        assert not any(blocking for blocking, _ in seen.to_device)


# printed text

WELL = "all finite: loss 0.5; 6 weights, largest 2 in l0.weight; 6 gradients, largest 1 in l0.weight"
FORWARD = (
    "The weights are finite, so the forward pass of this step caused this (the batch, an overflow, log(0), "
    "0/0): skip the update."
)
EARLIER = (
    "The weights are already non-finite, and so is everything computed from them: load an earlier checkpoint."
)


def net_with(**tensors: dict[int, float]) -> Net:
    """Return a Net with values put into weights, gradients (``grad_...``) and buffers, by flat index."""
    net = Net()
    held = {name.replace(".", "_"): p for name, p in (*net.named_parameters(), *net.named_buffers())}
    for name, values in tensors.items():
        owner = held[name.removeprefix("grad_")]
        into = owner.grad if name.startswith("grad_") else owner.data
        for place, value in values.items():
            into.view(-1)[place] = value
    return net


EVERY_GRADIENT = {
    f"grad_l{i}_{name}": dict.fromkeys(range(n), NAN)
    for i in range(3)
    for name, n in (("weight", 8), ("bias", 2))
}
SITUATIONS = {
    "all is well": ({}, 0.5, False, WELL),
    "no loss": ({}, None, False, WELL.replace(" loss 0.5;", "")),
    "the largest": (
        {"l1_bias": {1: -4e20}, "grad_l2_weight": {7: 1.25}},
        0.5,
        False,
        "all finite: loss 0.5; 6 weights, largest 4e+20 in l1.bias; 6 gradients, largest 1.25 in l2.weight",
    ),
    "forward": (
        EVERY_GRADIENT,
        torch.tensor(NAN),
        False,
        f"""\
not finite: loss, all 6 gradients
  loss      nan
  gradient  all 6  30 NaN of 30
{FORWARD}""",
    ),
    "forward, of some samples": (
        {},
        torch.tensor([1.0, INF, 2.0, NAN]),
        False,
        """\
not finite: loss
  loss  nan  1 NaN, 1 +Inf of 4
The gradients are finite, so they come from another loss, or the loss overflowed after its backward pass.""",
    ),
    "weights already": (
        EVERY_GRADIENT | {"l1_weight": {0: NAN, 3: NAN}, "l0_bias": {1: -INF}},
        NAN,
        False,
        f"""\
not finite: loss, 2 of 6 weights, all 6 gradients
  loss      nan
  weight    l0.bias    1 -Inf of 2
  weight    l1.weight  2 NaN of 8
  gradient  all 6      30 NaN of 30
{EARLIER}""",
    ),
    "the optimizer": (
        {"l2_bias": {0: NAN}},
        0.5,
        False,
        """\
not finite: 1 of 6 weights
  weight  l2.bias  1 NaN of 2
The gradients are finite, so an optimizer step probably caused this: load an earlier checkpoint, and check \
the optimizer's learning rate and state.""",
    ),
    "weights already, and no gradient of this loss": (
        {"l2_bias": {0: NAN}},
        NAN,
        False,
        f"""\
not finite: loss, 1 of 6 weights
  loss    nan
  weight  l2.bias  1 NaN of 2
{EARLIER}""",
    ),
    "backward, everywhere": (
        EVERY_GRADIENT,
        0.5,
        False,
        """\
not finite: all 6 gradients
  gradient  l2.bias    2 NaN of 2
  gradient  l2.weight  8 NaN of 8
  gradient  l1.bias    2 NaN of 2
  gradient  l1.weight  8 NaN of 8
  gradient  l0.bias    2 NaN of 2
  gradient  l0.weight  8 NaN of 8
Weights and loss are finite, so the backward pass of this step caused this: skip the update.""",
    ),
    "backward, last layers first": (
        {"grad_l0_weight": {0: NAN, 1: INF}, "grad_l1_bias": {0: NAN}},
        0.5,
        False,
        """\
not finite: 2 of 6 gradients
  gradient  l1.bias    1 NaN of 2
  gradient  l0.weight  1 NaN, 1 +Inf of 8
Weights and loss are finite, so the backward pass of this step caused this, near l1.bias: skip the update.""",
    ),
    "overflow, no loss": (
        {"grad_l1_weight": {0: INF, 1: -INF, 2: -INF}},
        None,
        False,
        """\
not finite: 1 of 6 gradients
  gradient  l1.weight  1 +Inf, 2 -Inf of 8
The weights are finite, so this step caused this, near l1.weight: skip the update. \
Inf without NaN is an overflow: lower the loss scale, if any.""",
    ),
    "a mask": (
        {},
        0.5,
        True,
        """\
not finite: 1 of 2 buffers
  buffer  mask  9 -Inf of 9
Only buffers contain Inf, as attention masks do on purpose: if these are masks, ignore this.""",
    ),
    "a running mean": (
        EVERY_GRADIENT | {"mean": {1: NAN}, "mask": dict.fromkeys(range(9), 0.0)},
        NAN,
        True,
        """\
not finite: loss, 1 of 2 buffers, all 6 gradients
  loss      nan
  buffer    mean   1 NaN of 4
  gradient  all 6  30 NaN of 30
The weights are finite, but a buffer contains NaN: reset or reload it, and skip the update.""",
    ),
    "a mask, and a loss": (
        EVERY_GRADIENT,
        NAN,
        True,
        f"""\
not finite: loss, 1 of 2 buffers, all 6 gradients
  loss      nan
  buffer    mask   9 -Inf of 9
  gradient  all 6  30 NaN of 30
{FORWARD}""",
    ),
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_a_report_reads_like_a_diagnosis(name):
    values, loss, buffers, text = SITUATIONS[name]
    report = check_finite(net_with(**values), loss, buffers=buffers)
    assert str(report) == text
    headline = re.sub(r", largest [^;]*", "", text.splitlines()[0])
    assert repr(report) == f"<FiniteReport: {headline}>"


def test_before_backward_a_loss_blames_the_forward_pass():
    net = Net()
    net.zero_grad()
    assert str(check_finite(net, NAN)) == f"not finite: loss\n  loss  nan\n{FORWARD}"


def test_a_long_list_is_abridged():
    weights = {f"w{i}": torch.full((2,), NAN if i else 1.0) for i in range(31)}
    lines = str(check_finite(weights)).splitlines()
    assert lines[0] == "not finite: 30 of 31 weights"
    assert [line.split()[1] for line in lines[1:9]] == [f"w{i}" for i in range(1, 9)]
    assert lines[9].strip() == "… 22 more"
    assert lines[10:] == [EARLIER]
    report = check_finite(weights, INF)
    assert len(report.to_string(max_rows=None).splitlines()) == 33
    assert "… 30 more" in report.to_string(max_rows=0)
    assert "… 29 more" in report.to_string(max_rows=1)
    # they all follow from the loss, but their names are still available
    weights["w0"].fill_(NAN)
    assert "all 31  62 NaN of 62" in str(check_finite(weights, INF))
    assert "w30" in check_finite(weights, INF).to_string(max_rows=None)


def test_one_of_one_and_large_counts_and_names_that_cannot_be_printed():
    said = f"not finite: the only weight\n  weight  a\\nb  1,234,567 NaN of 1,234,567\n{EARLIER}"
    assert str(check_finite({"a\nb": torch.full((1234567,), NAN)})) == said
    assert "largest 1 in a\\nb" in str(check_finite({"a\nb": torch.ones(1)}))


def test_integer_weights_are_finite_and_left_out():
    net = Net()
    net.codes = nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False)
    report = check_finite(net)
    assert "codes" not in report.weights
    assert len(report.weights) == len(list(net.parameters())) - 1
    assert not report.has_issues


def test_a_weight_that_no_gradient_reaches_is_not_laid_on_the_optimizer():
    net = Net()
    net.l0.weight.data[0, 0] = NAN
    assert "optimizer step probably caused this" in str(check_finite(net))
    net.l0.weight.requires_grad_(False).grad = None
    assert "(frozen, or unused in this step)" in str(check_finite(net))


def test_it_is_neither_true_nor_false():
    with pytest.raises(TypeError, match=r"use report\.has_issues"):
        bool(check_finite(Net()))
