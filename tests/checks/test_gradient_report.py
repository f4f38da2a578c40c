"""The verdict on a step: which tensors are wrong, and what rounding explains."""

from __future__ import annotations

import copy
import json
import math
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from gradiometer.checks.gradient_report import judge
from gradiometer.checks.rounded_products import RoundedProducts, rounded
from gradiometer.checks.step_run import StepRun


class Attention(nn.Module):
    """Attention, whose keys' bias has a gradient of 0 in exact arithmetic."""

    def __init__(self, width):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (2, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return x + scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Images(nn.Module):
    """Convolutions with a bias that BatchNorm takes away again, and ReLU, whose gradient jumps."""

    def __init__(self, width=8):
        super().__init__()
        layers = []
        for channels in (3, width, width):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(width, 5)
        self.gain = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return self.head(self.gain * self.layers(x).mean((2, 3)))


class Words(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.embed = nn.Embedding(20, width)
        self.blocks = nn.Sequential(*[nn.Sequential(Attention(width), nn.LayerNorm(width)) for _ in range(3)])
        self.head = nn.Linear(width, 20)

    def forward(self, x):
        return self.head(self.blocks(self.embed(x))).transpose(1, 2)


def make(kind, seed):
    torch.manual_seed(seed)
    if kind is Images:
        return Images(), torch.randn(6, 3, 8, 8), torch.randint(5, (6,))
    return Words(), torch.randint(20, (4, 12)), torch.randint(20, (4, 12))


def run(model, x, y, dtype=torch.float32, mode=None):
    """Run a step and return its `StepRun`."""
    model, wide = copy.deepcopy(model), dtype == torch.float64
    model = model.double() if wide else model
    x = x.double() if wide and x.is_floating_point() else x
    autocast = torch.autocast("cpu", dtype) if dtype.itemsize == 2 else nullcontext()
    with mode or nullcontext():
        with autocast:
            loss = cross_entropy(model(x), y)
        loss.backward()
    grads = {name: p.grad for name, p in reversed(list(model.named_parameters()))}
    return StepRun({"loss": loss.detach()}, grads)


def verdict(given, runs, **options):
    reference, exact, coarse = runs
    return judge(given, reference, exact, modules={}, against="eager", rounded=coarse, **options)


def scaled(given, factor):
    """Return a run whose gradients have a factor."""
    return replace(given, grads={name: factor * g for name, g in given.grads.items()})


def runs_of(model, x, y, dtype=torch.float32):
    return (
        run(model, x, y, dtype),
        run(model, x, y, torch.float64),
        run(model, x, y, dtype, RoundedProducts()),
    )


def with_grad(run, name, change):
    return StepRun(run.outputs, {**run.grads, name: change(run.grads[name])})


def noisy(run, size, seed):
    """Return a run with relative rounding errors of a size in each element."""
    generator = torch.Generator().manual_seed(seed)
    grads = {name: g + size * g * torch.randn(g.shape, generator=generator) for name, g in run.grads.items()}
    return StepRun(run.outputs, grads)


class Truncated(RoundedProducts):
    """Cuts the inputs of matrix products off as tensor cores do."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        def cut(x):
            if not isinstance(x, torch.Tensor) or x.dtype != torch.float32:
                return x
            return (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)

        products = {"mm", "addmm", "bmm", "convolution", "convolution_backward"}
        if func.overloadpacket.__name__ in products:
            args = [cut(x) for x in args]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [Words, Images])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", range(5))
def test_a_healthy_step_agrees(kind, dtype, seed):
    model, x, y = make(kind, seed)
    runs = runs_of(model, x, y, dtype)
    order = torch.randperm(len(x))
    healthy = [runs[0], run(model, x[order], y[order], dtype), noisy(runs[0], 1e-3, seed)]
    if dtype == torch.float32:
        healthy += [run(model, x, y, dtype, RoundedProducts(10)), run(model, x, y, dtype, Truncated())]
    if kind is Words:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            healthy.append(run(model, x, y, dtype))

    for given in healthy:
        report = verdict(given, runs)
        assert report, str(report)


@pytest.mark.parametrize("seed", range(3))
def test_faults_of_a_few_per_cent_are_found(seed):
    model, x, y = make(Words, seed)
    runs = runs_of(model, x, y)
    for name in runs[0].grads:
        if name.endswith("k.bias"):
            continue
        report = verdict(with_grad(runs[0], name, lambda g: g * 1.03), runs)
        assert [each.name for each in report.failures] == [name]
        assert report.first.norm_ratio == pytest.approx(1.03, abs=2e-3)


@pytest.mark.parametrize("seed", range(3))
def test_float32_without_tf32_is_judged_by_its_own_rounding(seed):
    model, x, y = make(Words, seed)
    runs = runs_of(model, x, y)
    order = torch.randperm(len(x))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        other = run(model, x, y)
    # with TF32 all gradients are farther, and are judged as before
    for given in (
        runs[0],
        other,
        run(model, x[order], y[order]),
        run(model, x, y, mode=RoundedProducts(10)),
        run(model, x, y, mode=Truncated()),
    ):
        report = verdict(given, runs, is_smooth=True)
        assert report, str(report)
    for name, grad in runs[0].grads.items():
        if name.endswith("k.bias"):
            continue
        factor = 1 + (1e-4 if grad.numel() >= 256 else 1e-3)
        report = verdict(with_grad(runs[0], name, lambda g, by=factor: g * by), runs, is_smooth=True)
        assert [each.name for each in report.failures] == [name]
        assert report.first.text == f"all elements are {factor} times the reference"


@pytest.mark.parametrize("seed", range(3))
def test_a_factor_of_all_gradients_is_not_rounding(seed):
    model, x, y = make(Words, seed)
    runs = runs_of(model, x, y)
    given = scaled(runs[0], 1.005)
    report = verdict(given, runs, is_smooth=True)

    assert report["head.weight"].fails
    assert report.kind.startswith("all gradients are 1.005 times the reference")
    # rounding to TF32 besides is rounding
    report = verdict(scaled(run(model, x, y, mode=RoundedProducts(10)), 2.0), runs, is_smooth=True)
    assert report["head.weight"].allowed > 1e-3 * report["head.weight"].norm
    assert report.kind.startswith("all gradients are 2 times the reference")


def test_a_factor_that_rounding_could_hide_is_said():
    model, x, y = make(Words, 0)
    runs = runs_of(model, x, y, torch.bfloat16)
    report = verdict(scaled(runs[0], 1.02), runs)
    assert "all gradients are about 1.02 times the reference" in report.notes[-1]
    assert not verdict(runs[0], runs).notes

    # as the gradients may jump, those of few elements may have larger errors
    model, x, y = make(Images, 0)
    runs = runs_of(model, x, y)
    report = verdict(scaled(runs[0], 1.005), runs)
    assert not all(row.fails for row in report if row.what == "gradient")
    assert report.kind.startswith("all gradients are 1.005 times the reference")


def test_errors_that_coarse_rounding_does_not_explain_are_not_rounding():
    model, x, y = make(Words, 0)
    runs = runs_of(model, x, y)
    # the loss of half of the batch
    given = replace(run(model, x[:2], y[:2]), outputs={"loss": runs[0].outputs["loss"] * 1.001})
    report = verdict(given, runs, is_smooth=True)
    assert report.first.what == "output"
    assert report["loss"].allowed < 1e-3 * report["loss"].norm


def test_rounding_that_only_some_gradients_have_is_said():
    model, x, y = make(Words, 0)
    runs = runs_of(model, x, y)
    given = with_grad(runs[0], "embed.weight", lambda g: rounded(g, 9))
    report = verdict(given, runs, is_smooth=True)

    assert [each.name for each in report.failures] == ["embed.weight"]
    assert "they are rounding if the step uses TF32 or 16 bits in its backward pass only" in report.notes[-1]
    assert verdict(given, runs)


@pytest.mark.parametrize("seed", range(3))
def test_a_gradient_without_rounding_does_not_hide_tf32(seed):
    torch.manual_seed(seed)
    model, x = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32)), torch.randn(64, 8)

    def summed(dtype=torch.float32, mode=None):
        mine = copy.deepcopy(model).to(dtype)
        with mode or nullcontext():
            mine(x.to(dtype)).sum().backward()
        # that of the last bias is the number of rows, exactly
        return StepRun({}, {name: p.grad for name, p in reversed(list(mine.named_parameters()))})

    runs = summed(), summed(torch.float64), summed(mode=RoundedProducts())
    report = verdict(summed(mode=RoundedProducts(10)), runs, is_smooth=True)
    assert report, str(report)
    assert report["2.bias"].error == 0


@pytest.mark.parametrize(
    ("function", "is_smooth"),
    [
        (nn.functional.gelu, True),
        (lambda x: x.softmax(-1), True),
        (torch.relu, False),
        (lambda x: x.max(-1).values, False),
        (lambda x: torch.where(x > 0, x, 0.1 * x), False),
        (lambda x: torch.relu(x[:2]), True),
    ],
    ids=["gelu", "softmax", "relu", "max", "where", "few"],
)
def test_steps_whose_gradients_may_jump_are_known(function, is_smooth):
    x = torch.randn(128, 64, requires_grad=True)
    with RoundedProducts() as mode:
        function(x).sum().backward()
    assert mode.is_smooth == is_smooth


def test_rounding_alone_is_said():
    model, x, y = make(Words, 0)
    runs = runs_of(model, x, y)
    report = verdict(runs[0], runs)

    assert report["blocks.0.0.k.bias"].is_rounding
    assert "rounding alone is as large as blocks.2.0.k.bias, blocks.1.0.k.bias" in str(report)


def test_the_first_in_backward_order_is_named():
    model, x, y = make(Words, 0)
    runs = runs_of(model, x, y)
    given = StepRun(
        runs[0].outputs,
        {name: g * (1 if name.startswith(("head", "blocks.2")) else -1) for name, g in runs[0].grads.items()},
    )
    modules = {"blocks.1.1.bias": "LayerNorm"}
    report = judge(given, runs[0], runs[1], modules=modules, against="eager", rounded=runs[2])

    assert not report
    assert report.first.name == "blocks.1.1.bias"
    assert report.first.module == "LayerNorm"
    assert "\nfirst: gradient blocks.1.1.bias (LayerNorm): error 2 of its norm, allowed" in str(report)
    assert "from blocks.1.1.bias on, in the order of the backward pass, all gradients are the negative" in (
        report.kind
    )


def test_an_output_comes_before_gradients():
    model, x, y = make(Words, 0)
    runs = runs_of(model, x, y)
    given = StepRun({"loss": runs[0].outputs["loss"] * 2}, {name: g * 2 for name, g in runs[0].grads.items()})
    report = verdict(given, runs)

    assert report.first.what == "output"
    assert "gradients differ since an output does; the first of them: gradient head.bias" in str(report)
    assert report.kind.startswith("all gradients are 2 times the reference")


ONES = {"weight": torch.ones(4, 3), "bias": torch.ones(4)}


def judged(given, reference=None, exact=None):
    reference = ONES if reference is None else reference
    exact = {name: x.double() for name, x in reference.items()} if exact is None else exact
    return judge(StepRun({}, given), StepRun({}, reference), StepRun({}, exact), modules={}, against="eager")


def test_missing_gradients_are_wrong_unless_they_are_0():
    report = judged({"weight": ONES["weight"]})
    assert [each.text for each in report.failures] == [
        "the step has none, the other one has a norm of 2",
    ]
    report = judged({**ONES, "more": torch.ones(1)})
    assert report.first.text == "the reference has none, the other one has a norm of 1"
    assert judged(ONES, {**ONES, "unused": torch.zeros(3)})
    assert judged({**ONES, "unused": torch.zeros(3)})


def test_shapes_must_be_equal():
    report = judged({**ONES, "weight": torch.ones(3, 4)})
    assert report.first.text == "has the shape (3, 4), in the reference (4, 3)"


def test_outputs_of_another_function_are_not_compared():
    given, reference = (
        {"loss": torch.ones(shape), name: torch.ones(1)} for shape, name in ((2, "a"), (3, "b"))
    )
    exact = StepRun(reference, ONES)
    report = judge(StepRun(given, ONES), StepRun(reference, ONES), exact, modules={}, against="eager")

    assert report
    assert [each.name for each in report if not each.is_compared] == ["loss", "b", "a"]
    assert "not compared: output loss: has the shape (2,), in the reference (3,)" in str(report)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite(value):
    broken = {**ONES, "weight": torch.full((4, 3), 1.0)}
    broken["weight"][2, 1] = value
    kind = "NaN" if math.isnan(value) else "Inf"

    report = judged(broken)
    assert report.first.text == f"{kind} in 1 of 12 elements, in row 2 of 4; the reference is finite"
    report = judged(ONES, broken)
    assert report.first.text == f"finite, but the reference has {kind} in 1 of 12 elements, in row 2 of 4"
    report = judged(broken, broken)
    assert report
    assert "not compared: gradient weight: not finite in both" in str(report)
    only = {"weight": broken["weight"]}
    report = judged(only, only)
    assert not report
    assert not report.is_comparable
    assert report.summary.startswith("not compared with eager mode: no gradient could be compared")


def test_a_gradient_that_is_exact_by_luck_may_round():
    # the eager error is 0, since all numbers are small integers
    assert judged({name: x * (1 + 1e-3) for name, x in ONES.items()})
    assert not judged({name: x * 1.03 for name, x in ONES.items()})


def test_float64_has_the_tolerance_of_float64():
    wide = {name: x.double() for name, x in ONES.items()}
    assert judged({name: x * (1 + 1e-14) for name, x in wide.items()}, wide)
    assert not judged({name: x * (1 + 1e-9) for name, x in wide.items()}, wide)


def test_without_float64_it_is_said_and_the_tolerance_is_wide():
    model, x, y = make(Images, 1)
    reference = run(model, x, y, torch.bfloat16)
    order = torch.randperm(len(x))
    healthy = run(model, x[order], y[order], torch.bfloat16)
    report = judge(healthy, reference, None, modules={}, against="eager")

    assert report, str(report)
    assert report.precision == ""
    assert report.summary == "agrees with eager mode alone: 16 tensors, without a float64 run"
    wrong = with_grad(healthy, "head.weight", lambda g: g * 1.5)
    assert judge(wrong, reference, None, modules={}, against="eager").first.name == "head.weight"


def test_a_tensor_that_the_float64_run_lacks_is_not_compared():
    report = judged(ONES, ONES, {"weight": ONES["weight"].double()})
    assert report
    assert report["bias"].text == "the float64 run does not have it"
    assert not report["bias"].is_compared


def test_integers_and_complex_and_sparse_tensors():
    outputs = {"ids": torch.tensor([1, 2])}
    grads = {"z": torch.tensor([1 + 2j, 3j]), "e": torch.eye(3).to_sparse()}
    same = StepRun(outputs, grads)
    assert judge(same, same, None, modules={}, against="eager")
    other = StepRun({"ids": torch.tensor([1, 3])}, {**grads, "z": grads["z"] * 1j})
    report = judge(other, same, None, modules={}, against="eager")
    assert [each.name for each in report.failures] == ["z"]
    assert "not compared: output ids: differs, but has no gradient" in str(report)


def test_outputs_alone_do_not_pass():
    same = StepRun({"loss": torch.ones(())}, {})
    report = judge(same, same, same, modules={}, against="eager")
    assert not report
    assert not report.is_comparable


def test_reports_are_joined():
    report = judged({**ONES, "bias": -ONES["bias"]})
    other = judged(ONES)
    other = replace(other, rows=tuple(replace(each, what="update") for each in other), notes=("more",))
    both = other.joined(report)

    assert [each.what for each in both] == ["update"] * 2 + ["gradient"] * 2
    assert both["bias"].what == "update"
    assert both.first == report.first
    assert both.notes == ("more",)
    assert not both


def test_a_report_is_shown_on_one_screen_and_as_plain_values():
    names = [f"layers.{i}.weight\x1b[31m" for i in range(40)]
    good = {name: torch.ones(3) for name in names}
    report = judged({name: -x for name, x in good.items()}, good)
    text = str(report)

    assert len(text.splitlines()) < 24
    assert "\x1b" not in text + repr(report) + report._repr_html_()
    assert "and 28 more" in text
    assert "<table" in report._repr_html_()
    values = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert values["first"] == names[0]
    assert len(values["rows"]) == len(report) == 40
    assert not values["agrees"]
    with pytest.raises(KeyError, match="head"):
        report["head"]


def test_rows_tell_more_than_elements():
    torch.manual_seed(0)
    good = {"bias": torch.randn(24), "weight": torch.randn(24, 16)}
    wrong = {name: torch.cat([x[:8] + torch.randn_like(x[:8]), x[8:]]) for name, x in good.items()}
    report = judged(wrong, good)
    assert "elements 0-7 of 24 differ" in report["bias"].text
    first = str(report).splitlines()[1:3]
    assert "first: gradient bias" in first[0]
    assert "in weight, rows 0-7 of 24 differ, and the others agree" in " ".join(map(str.strip, first))


def test_what_agrees_is_counted_by_kind():
    good = {f"layers.{i}.weight": torch.ones(3) for i in range(9)}
    report = judged(good, good)
    report = replace(report, rows=(*report.rows, *(replace(row, what="update") for row in report.rows)))
    report = replace(report, rows=(*report.rows, replace(report.rows[0], name="loss", what="output")))
    assert "and 13 more; agree: 9 gradients, 9 updates, 1 output" in str(report)


def test_rounding_to_tf32():
    x = torch.tensor([1 + 2**-10, 1 + 2**-12, -3.0, 0.0, math.inf, math.nan])
    expected = torch.tensor([1 + 2**-10, 1.0, -3.0, 0.0, math.inf, math.nan])
    assert torch.equal(rounded(x, 10).nan_to_num(7.0), expected.nan_to_num(7.0))
    wide = x.double()
    assert rounded(wide, 10) is wide


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float32, 8), (torch.float16, 8), (torch.bfloat16, 6)])
def test_rounding_keeps_some_bits(dtype, bits):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1000, generator=generator).to(dtype)
    found = rounded(x, 8)

    assert found.dtype == dtype
    assert 0 < float(((found - x).double() / x.double()).abs().max()) <= 2.0 ** -(bits + 1)
    for end in (torch.finfo(dtype).max, torch.inf, torch.nan):
        edge = torch.tensor([end, -end], dtype=dtype)
        assert torch.equal(rounded(edge, 8).nan_to_num(7.0), edge.nan_to_num(7.0))
