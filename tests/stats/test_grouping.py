"""Groups by names and by modules, and the tree of modules; see test_tensor_stats for patterns."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import gradiometer as gm
from gradiometer.stats.grouping import module_of


class Grafted(nn.Module):
    """A host with slots that hold grafted seeds, and a weight that two of them share."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.host = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 3))
        self.seeds = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3), nn.GELU()])
        self.head = nn.Linear(3, 3)
        self.head.weight = self.seeds[0].weight

    def forward(self, x):
        y = self.host(x)
        return self.scale * self.head(y + self.seeds[2](self.seeds[0](y)) + self.seeds[1](y))


@pytest.fixture
def model():
    model = Grafted()
    model(torch.randn(5, 3)).square().sum().backward()
    return model


def names_in(stats, rule, **model):
    """Return the names of a group's rows: each row holds a different power of two."""
    powers = {name: torch.full((1,), 2.0**i) for i, name in enumerate(stats.names)}
    total = int(gm.collect(powers).group({"group": rule}, **model).sum)
    return {name for i, name in enumerate(stats.names) if total >> i & 1}


def test_a_module_is_a_group_of_its_parameters(model):
    stats = gm.collect_grads(model)
    grouped = stats.group({"host": model.host, "seed0": model.seeds[0], "head": model.head}, model=model)
    expected = stats.group(
        {"host": r"^host\.", "seed0": r"^seeds\.0\.", "head": r"^head\.|^seeds\.0\.weight"}
    )
    assert grouped.names == ("host", "seed0", "head")
    # the tied weight is named under seeds.0, and is a parameter of the head as well
    assert torch.equal(grouped.columns, expected.columns)
    assert torch.equal(grouped.flags, expected.flags)


def test_several_modules_are_one_group(model):
    stats = gm.collect_grads(model)
    expected = {f"seeds.{i}.{name}" for i in (0, 1) for name in ("weight", "bias")}
    assert names_in(stats, [model.seeds[0], model.seeds[1]], model=model) == expected
    assert names_in(stats, model.seeds, model=model) == names_in(stats, r"^seeds\.")
    assert names_in(stats, model, model=model) == set(stats.names)


def test_a_module_without_parameters_is_an_empty_group(model):
    grouped = gm.collect_grads(model).group({"gelu": model.seeds[2]}, model=model)
    assert (grouped.numel.item(), grouped.norm.item(), grouped.flags.item()) == (0.0, 0.0, 0)


def test_a_module_of_another_model_is_refused(model):
    with pytest.raises(
        ValueError, match=r"the module in the rule of 'host' has no parameter in common with model"
    ):
        gm.collect_grads(model).group({"host": Grafted().host}, model=model)


def test_a_module_without_its_model_is_refused_and_not_called(model):
    with pytest.raises(TypeError, match=r"the rule of 'host' is a module; pass its model"):
        gm.collect_grads(model).group({"host": model.host})


def test_wrappers_do_not_hide_a_module(model):
    compiled = torch.compile(model, backend="aot_eager")
    stats = gm.collect_grads(compiled)
    assert names_in(stats, model.host, model=compiled) == names_in(stats, r"^host\.")


def test_a_collection_of_names_is_a_group(model):
    stats = gm.collect_grads(model)
    for rule in (
        ["head.bias", "scale"],
        ("scale", "head.bias"),
        {"scale", "head.bias"},
        frozenset({"scale", "head.bias"}),
        {"scale": 1, "head.bias": 2}.keys(),
    ):
        assert names_in(stats, rule) == {"scale", "head.bias"}
    # a parameter without a gradient has no row; names are not patterns
    assert names_in(stats, ["frozen.weight", "host", "seeds.0"]) == set()
    assert names_in(stats, []) == set()


@pytest.mark.parametrize("rule", [3, None, [1, 2], ["host", 3], 2.5])
def test_a_rule_that_is_none_is_refused_by_its_group(model, rule):
    with pytest.raises(TypeError, match="the rule of 'host' must be a regular expression, a predicate"):
        gm.collect_grads(model).group({"host": rule}, model=model)


def test_groups_by_module_and_their_ratio_are_made_inside_a_compiled_step():
    def step(model, x):
        model(x).square().sum().backward()
        stats = gm.collect_grads(model)
        grouped = stats.group(
            {"host": model.host, "seeds": [model.seeds[0], model.seeds[1]], "names": ["scale"]}, model=model
        )
        return grouped, gm.group_ratio(grouped, "seeds", "host"), stats.by_module(1)

    torch.manual_seed(0)
    x, eager, compiled = torch.randn(5, 3), Grafted(), Grafted()
    compiled.load_state_dict(eager.state_dict())
    expected = step(eager, x)
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        found = torch.compile(step, fullgraph=True, backend="aot_eager")(compiled, x)
    torch._dynamo.reset()
    assert found[0].names == expected[0].names
    assert found[2].names == expected[2].names == ("", "host", "seeds", "head")
    torch.testing.assert_close(found[0].columns, expected[0].columns)
    torch.testing.assert_close(found[1], expected[1])
    torch.testing.assert_close(found[2].columns, expected[2].columns)


# the tree of modules


@pytest.mark.parametrize(
    ("name", "by_depth"),
    [
        ("blocks.0.mlp.w", ["", "blocks", "blocks.0", "blocks.0.mlp", "blocks.0.mlp"]),
        ("embed.weight", ["", "embed", "embed", "embed", "embed"]),
        ("scale", ["", "", "", "", ""]),
        ("0", ["", "", "", "", ""]),
    ],
)
def test_a_tensor_belongs_to_the_module_at_most_so_many_steps_down(name, by_depth):
    assert [module_of(name, depth) for depth in range(5)] == by_depth
    assert module_of(name, None) == by_depth[-1]


@pytest.mark.parametrize("depth", [0, 1, 2, 5, None])
def test_the_tree_is_the_same_on_the_device_and_in_the_report(model, depth):
    stats = gm.collect_grads(model)
    on_device, reports = stats.by_module(depth), stats.materialize().by_module(depth)
    assert on_device.names == tuple(reports)
    assert list(reports) == list(dict.fromkeys(module_of(name, depth) for name in stats.names))
    for i, (module, report) in enumerate(reports.items()):
        assert report.total.sumsq == on_device.sumsq[i].item()
        assert report.total.numel == on_device.numel[i].item()
        assert report.total.abs_max == on_device.abs_max[i].item()
        inside = [name for name in stats.names if module_of(name, depth) == module]
        assert list(report.names) == inside
        assert repr([report[name] for name in inside]) == repr([stats.materialize()[name] for name in inside])
        assert report.min_norm == min(report[name].norm for name in inside)
        assert report.max_norm == max(report[name].norm for name in inside)


def test_depth_0_is_the_whole_model(model):
    report = gm.collect_grads(model).materialize()
    (root,) = report.by_module(0).values()
    assert root.to_dict() == report.to_dict()


@pytest.mark.parametrize("depth", [-1, 1.5, "1", True])
def test_a_depth_that_is_none_is_refused(model, depth):
    stats = gm.collect_grads(model)
    for by_module in (stats.by_module, stats.materialize().by_module):
        with pytest.raises(ValueError, match="depth must be a non-negative integer"):
            by_module(depth)


def test_nothing_measured_has_no_modules():
    empty = gm.collect([])
    assert empty.by_module(1).names == ()
    reports = empty.materialize().by_module(1)
    assert (len(reports), reports.to_dict()) == (0, {})
    assert str(reports).startswith("nothing measured: no tensors")


def test_module_reports_are_a_mapping_that_prints_as_a_table():
    reports = (
        gm.collect(
            {
                "embed.weight": torch.zeros(1000, 8),
                "blocks.0.up.weight": torch.full((30, 30), 0.01),
                "blocks.0.up.bias": torch.tensor([1e-9]),
                "blocks.1.up.weight": torch.tensor([1.0, math.nan, math.inf, 4.0]),
                "blocks.1.up.bias": torch.tensor([1e20]),
                "scale": torch.tensor([3.0]),
            }
        )
        .materialize()
        .by_module(2)
    )
    assert repr(reports) == "<ModuleReports: 4 modules>"
    assert list(reports) == ["embed", "blocks.0", "blocks.1", ""]
    assert reports["blocks.0"].vanishing == ["blocks.0.up.bias"]
    assert str(reports) == PRINTED.strip("\n")
    with pytest.raises(KeyError, match=r"no module 'blocks'; available: 'embed', 'blocks.0', 'blocks.1', ''"):
        reports["blocks"]


PRINTED = """
module    tensors  elements  norm  min norm  max norm      rms     mean      std  zero %  flags
─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────
embed           1     8,000     0         0         0        0        0        0     100  1 dead, 1 vanishing
blocks.0        2       901   0.3      1e-9       0.3  9.99e-3  9.99e-3  3.33e-4       0  1 vanishing
blocks.1        2         5   nan       nan       nan  5.77e19  3.33e19  4.71e19       0  1 with NaN, 1 with Inf, 2 exploding
(root)          1         1     3         3         3        3        3        0       0
"""  # noqa: E501 a table is as wide as it is


def test_module_reports_as_a_frame_and_as_plain_values():
    pytest.importorskip("pandas")
    report = gm.collect(
        {"a.w": torch.tensor([3.0, 0.0]), "a.b": torch.tensor([1e-9]), "b.w": torch.tensor([4.0])}
    ).materialize()
    reports = report.by_module(1)
    frame, values = reports.to_frame(), reports.to_dict()
    assert frame.index.name == "module"
    assert list(frame.index) == list(values) == ["a", "b"]
    assert list(frame.columns) == list(values["a"])
    assert frame.to_dict("index") == values
    a = values["a"]
    assert (a["tensors"], a["numel"], a["norm"]) == (2, 3, 3.0)
    assert (a["min_norm"], a["max_norm"]) == (report["a.b"].norm, 3.0)
    assert (a["mean"], a["zero_fraction"]) == (pytest.approx(1.0), 1 / 3)
    assert (a["vanishing_fraction"], a["exploding_fraction"], a["dead_fraction"]) == (0.5, 0.0, 0.0)
    assert a["norm_ratio"] == 3.0 / report["a.b"].norm
    assert gm.collect([]).materialize().by_module().to_frame().shape == (0, len(a))


def test_a_model_whose_names_are_others_is_refused(model):
    wrapped = nn.ModuleDict({"module": model})
    with pytest.raises(
        ValueError, match=r"no row has the name of a parameter of model: .* 'module\.scale', .* 'scale'"
    ):
        gm.collect_grads(wrapped).group({"host": model.host}, model=model)
    with pytest.raises(ValueError, match=r"'0', .* 'scale'; pass the model that was measured"):
        gm.collect_grads(model.parameters()).group({"host": model.host}, model=model)
    # having measured nothing does not make it another model
    model.zero_grad()
    assert gm.collect_grads(model).group({"host": model.host}, model=model).numel.tolist() == [0.0]


def test_the_model_is_walked_once_for_all_groups(model):
    stats = gm.collect_grads(model)
    rules = {"host": model.host, "seeds": model.seeds, "head": model.head}
    grouped = stats.group(rules, model=model.named_parameters())
    assert torch.equal(grouped.columns, stats.group(rules, model=model).columns)


def test_a_pattern_that_is_none_is_refused_by_its_group(model):
    with pytest.raises(ValueError, match=r"the rule of 'host' is not a regular expression: .*unterminated"):
        gm.collect_grads(model).group({"host": "(host"})
    with pytest.raises(TypeError, match=r"or one or more modules, got Tensor$"):
        gm.collect_grads(model).group({"host": torch.ones(1000)})
