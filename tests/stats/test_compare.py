"""`compare` and `collect_updates`, and what becomes of PairStats and PairReport."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import gradiometer as gm
from support.gradients import bit_patterns
from support.pair_oracle import assert_pair

NAMES = tuple(column.name for column in gm.PAIR_COLUMNS)


def row(stats, name):
    return dict(zip(NAMES, stats.columns[stats.names.index(name)].tolist(), strict=True))


def two_of(*shapes, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [{f"w{i}": torch.randn(shape, generator=g) for i, shape in enumerate(shapes)} for _ in range(2)]


def stepped(model, lr=0.1):
    """Return a snapshot of a model, and take a step of gradient descent."""
    snapshot = gm.Snapshot(model)
    torch.manual_seed(1)
    model(torch.randn(6, 5)).square().mean().backward()
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p.sub_(lr * p.grad)
    return snapshot


# compare


def test_two_mappings_are_compared_by_name_in_the_order_of_the_first():
    a, b = two_of((3, 4), (50,), ())
    stats = gm.compare(a, dict(reversed(b.items())))
    assert stats.names == ("w0", "w1", "w2")
    for name, x in a.items():
        assert_pair(row(stats, name), x, b[name])
    assert bit_patterns([gm.compare(list(a.values()), list(b.values())).columns]) == bit_patterns(
        [stats.columns]
    )
    assert gm.compare(a.items(), b.items()).names == stats.names


def test_modules_stand_for_their_parameters():
    a, b = nn.Linear(4, 3), nn.Linear(4, 3)
    stats = gm.compare(a, b)
    assert stats.names == ("weight", "bias")
    assert_pair(row(stats, "weight"), a.weight, b.weight)
    compiled = torch.compile(b, backend="eager")
    assert bit_patterns([gm.compare(a, compiled).columns]) == bit_patterns([stats.columns])
    assert bit_patterns([gm.compare(a, dict(b.named_parameters())).columns]) == bit_patterns([stats.columns])
    assert not stats.columns.requires_grad


def test_gradients_of_two_micro_batches():
    model, batches = nn.Linear(4, 3), torch.randn(2, 5, 4)
    grads = [torch.autograd.grad(model(x).square().sum(), list(model.parameters())) for x in batches]
    stats = gm.compare(*grads)
    for i, (x, y) in enumerate(zip(*grads, strict=True)):
        expected = nn.functional.cosine_similarity(x.double().flatten(), y.double().flatten(), dim=0).item()
        # three sums of few terms
        assert abs(stats.cosine[i].item() - expected) <= 1e-14


def test_odd_tensors_are_compared():
    sparse = torch.sparse_coo_tensor([[0, 2]], [1.0, 3.0], (4,))
    z = torch.randn(5, dtype=torch.complex64)

    class Named(torch.Tensor):
        pass

    plain = torch.randn(6)
    a = {
        "sparse": sparse,
        "complex": z.conj(),
        "subclass": plain.as_subclass(Named),
        "fp8": plain.to(torch.float8_e5m2),
    }
    b = {"sparse": torch.ones(4), "complex": z, "subclass": plain, "fp8": plain.bfloat16()}
    stats = gm.compare(a, b)
    for name, x in a.items():
        assert_pair(row(stats, name), x.to_dense() if name == "sparse" else x, b[name])
    assert stats.numel.tolist() == [4, 10, 6, 6]


def test_nothing_is_compared_with_nothing():
    stats = gm.compare({}, {})
    assert stats.columns.shape == (0, len(NAMES))
    assert not stats.measured
    assert stats.total.tolist() == [0.0] * len(NAMES)
    report = stats.materialize()
    assert (len(report), report.total.numel, str(report)) == (0, 0, "nothing measured: no pairs")
    assert repr(report) == "<PairReport: nothing measured: no pairs>"


X = torch.ones(3)
BAD = {
    "a tensor": (X, [X], TypeError, "compare: got one tensor, not a collection of tensors"),
    "a number": ([X], 3, TypeError, "compare: expected a module, a mapping or an iterable"),
    "missing in b": ({"v": X, "w": X}, {"v": X}, ValueError, "compare: 'w' is not in b; pass the same names"),
    "missing in a": ({"v": X}, {"v": X, "w": X}, ValueError, "compare: 'w' is not in a; pass the same names"),
    "lists of two lengths": ([X], [X, X], ValueError, "compare: '1' is not in a"),
    "twice": ([("w", X), ("w", X)], [X, X], ValueError, "compare: two tensors have the name 'w'"),
    "shapes": ([X], [X[:2]], ValueError, r"'0' is float32 \(3,\) on cpu in a, but float32 \(2,\) on cpu"),
    "one number": ([X[0]], [X[:1]], ValueError, r"'0' is float32 \(\) on cpu in a, but float32 \(1,\)"),
    "complex": ([X], [X * 1j], ValueError, "'0' is float32 .* but complex64 .* both real or both complex"),
    "integers": ({"w": X}, {"w": torch.arange(3)}, TypeError, "'w' has dtype torch.int64, .* convert it"),
    "meta": ({"w": X}, {"w": X.to("meta")}, TypeError, "'w' is on the meta device"),
    "None": ({"w": None}, {"w": X}, TypeError, "'w' has type NoneType, not Tensor"),
}


@pytest.mark.parametrize("which", BAD)
def test_what_cannot_be_compared_is_named(which):
    a, b, kind, said = BAD[which]
    with pytest.raises(kind, match=said):
        gm.compare(a, b)


# collect_updates


def test_a_step_of_gradient_descent():
    model = nn.Sequential(nn.Linear(5, 40), nn.Tanh(), nn.Linear(40, 1))
    snapshot = stepped(model)
    stats = gm.collect_updates(model, snapshot)
    assert stats.names == snapshot.names == tuple(name for name, _ in model.named_parameters())
    for (name, p), old in zip(model.named_parameters(), snapshot.buffers(), strict=True):
        assert_pair(row(stats, name), p, old, p.grad)
    report = stats.materialize()
    for name in report:
        # the update is -0.1 g, rounded to fp32
        assert report[name].descent_cosine == pytest.approx(1.0, abs=1e-6)
        assert report[name].norm_u == pytest.approx(0.1 * report[name].norm_g, rel=1e-5)
        assert report[name].n_stuck == 0


def test_updates_that_rounding_loses_are_stuck():
    weight = nn.Parameter(torch.full((1000,), 1.0, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    weight.grad[:100] = 0.0
    snapshot = gm.Snapshot({"w": weight})
    with torch.no_grad():
        # less than half a unit in the last place, 2**-8, for all but 50 elements
        steps = torch.full((1000,), 1e-3, dtype=torch.bfloat16)
        steps[:50] = 0.5
        weight.sub_(steps)
    found = gm.collect_updates({"w": weight}, snapshot).materialize()["w"]
    assert (found.n_unchanged, found.n_nonzero_g, found.n_stuck) == (950, 900, 900)
    assert (found.unchanged_fraction, found.stuck_fraction) == (0.95, 1.0)
    assert found.abs_max_u == 0.5


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.head(self.frozen(self.embed(x)))


def test_tied_frozen_and_unused_parameters():
    model = Tied()
    snapshot = gm.Snapshot(model)
    assert snapshot.names == ("unused", "embed.weight")
    model(torch.tensor([1, 2])).sum().backward()
    with torch.no_grad():
        model.embed.weight.sub_(model.embed.weight.grad)
        model.frozen.weight.zero_()
    report = gm.collect_updates(model, snapshot).materialize()
    assert list(report) == ["unused", "embed.weight"]
    # it has no gradient, and no update
    unused = report["unused"]
    assert (unused.norm_g, unused.n_nonzero_g, unused.norm_u, unused.n_unchanged) == (0.0, 0, 0.0, 3)
    assert math.isnan(unused.descent_cosine)
    assert report["embed.weight"].descent_cosine == pytest.approx(1.0, abs=1e-6)


def test_without_any_gradient():
    model = nn.Linear(5, 3)
    snapshot = gm.Snapshot(model)
    with torch.no_grad():
        model.weight.add_(1.0)
    found = gm.collect_updates(model, snapshot).materialize()
    assert found["weight"].norm_u == pytest.approx(math.sqrt(15))
    assert (found["weight"].norm_g, found["weight"].stuck_fraction) == (0.0, 0.0)
    assert found["bias"].unchanged_fraction == 1.0


def test_complex_parameters():
    weight = nn.Parameter(torch.randn(30, 3, dtype=torch.complex64))
    snapshot = gm.Snapshot([weight])
    old = weight.detach().clone()
    weight.abs().sum().backward()
    with torch.no_grad():
        weight.sub_(0.1 * weight.grad)
    found = gm.collect_updates([weight], snapshot)
    assert_pair(row(found, "0"), weight, old, weight.grad)
    assert found.numel.tolist() == [180]


def test_gradients_in_other_memory_orders():
    conv = nn.Conv2d(3, 8, 3)
    conv.to(memory_format=torch.channels_last)
    snapshot = gm.Snapshot(conv)
    old = conv.weight.detach().clone()
    conv.weight.grad = torch.randn(8, 3, 3, 3)
    with torch.no_grad():
        conv.weight.sub_(conv.weight.grad)
    assert_pair(row(gm.collect_updates(conv, snapshot), "weight"), conv.weight, old, conv.weight.grad)


def test_only_what_the_snapshot_has_is_compared():
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))
    snapshot = gm.Snapshot({"1.weight": model[1].weight})
    assert gm.collect_updates(model, snapshot).names == ("1.weight",)


def test_a_wrapped_model_has_the_same_names():
    model = nn.Sequential(nn.Linear(5, 3))
    snapshot = gm.Snapshot(torch.compile(model, backend="eager"))
    assert snapshot.names == ("0.weight", "0.bias")
    assert gm.collect_updates(model, snapshot).n_unchanged.tolist() == [15, 3]


def test_what_does_not_fit_the_snapshot_is_named():
    model = nn.Linear(5, 3)
    snapshot = gm.Snapshot(model)
    with pytest.raises(ValueError, match="has no parameter 'bias', which is in the snapshot; pass the model"):
        gm.collect_updates(nn.Linear(5, 3, bias=False), snapshot)
    with pytest.raises(
        ValueError, match=r"'weight' is \(3, 4\) on cpu, but was \(3, 5\) on cpu in the snapshot"
    ):
        gm.collect_updates(nn.Linear(4, 3), snapshot)
    with pytest.raises(
        ValueError, match=r"'weight' is \(3, 5\) on meta, but was .* take a new one: gm.Snapshot"
    ):
        gm.collect_updates(nn.Linear(5, 3, device="meta"), snapshot)
    with pytest.raises(TypeError, match=r"expected gm\.Snapshot\(model\), taken before .*, got Linear"):
        gm.collect_updates(model, model)


def test_a_model_in_another_dtype_is_compared_with_the_old_one():
    model = nn.Linear(5, 3)
    snapshot = gm.Snapshot(model)
    old = model.weight.detach().clone()
    model.bfloat16()
    assert_pair(row(gm.collect_updates(model, snapshot), "weight"), model.weight, old)


# PairStats


def test_stats_do_not_change_with_the_tensors():
    a, b = two_of((3, 4))
    stats = gm.compare(a, b)
    before = bit_patterns([stats.columns])
    a["w0"].zero_()
    gm.compare(a, b)
    assert bit_patterns([stats.columns]) == before


# PairReport


def test_the_printed_table():
    b = {
        "fast": torch.full((200,), 2.0),
        "slow": torch.full((1000,), 4.0),
        "new": torch.zeros(2),
        "nan": X.clone(),
    }
    a = {name: x.clone() for name, x in b.items()}
    a["fast"] += 1.0
    a["slow"][:10] += 0.5
    a["new"] += 0.25
    a["nan"][0], a["nan"][1] = math.nan, -math.inf
    text = str(gm.compare(a, b).materialize())
    assert [line.rstrip() for line in text.splitlines()] == TABLE.strip("\n").splitlines()
    short = gm.compare(a, b).materialize().to_string(max_rows=2)
    assert "… 2 more" in short
    assert "slow" not in short
    assert "nan" in short


TABLE = """
4 pairs, 1,205 elements, update ratio 0.11
────────────────────────────────────────────────────────────────────────────────────────
name   elements  update ratio   rms  abs max  cos(u,-g)  unchanged %  stuck %  NaN  ±Inf
────────────────────────────────────────────────────────────────────────────────────────
nan           3             0     0        0          -         33.3        -    1  1
new           2           inf  0.25     0.25          -            0        -    -  -
fast        200           0.5     1        1          -            0        -    -  -
slow      1,000        0.0125  0.05      0.5          -         99.0        -    -  -
────────────────────────────────────────────────────────────────────────────────────────
total     1,205          0.11  0.41        1          -         82.2        -    1  1
"""


def test_the_table_of_updates_shows_what_is_stuck():
    weight = nn.Parameter(torch.full((200,), 1.0, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    snapshot = gm.Snapshot({"w": weight})
    with torch.no_grad():
        weight[:50] -= 0.5
    line = str(gm.collect_updates({"w": weight}, snapshot).materialize()).splitlines()[4].split()
    # name, elements, update ratio, rms, abs max, cosine, unchanged, stuck
    assert line == ["w", "200", "0.25", "0.25", "0.5", "0.500", "75.0", "75.0", "-", "-"]
