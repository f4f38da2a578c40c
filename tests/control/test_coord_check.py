"""The coordinate check: broken parametrizations fail by name, μP passes, and the slopes are exact powers."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import gradiometer as gm
from gradiometer.control.coord_report import Slope, row_of

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("_one_thread")

WIDTHS, BASE, LR = (64, 128, 256, 512), 64, 1e-2
X = torch.randn(32, 16, generator=torch.Generator().manual_seed(1))
Y = torch.randint(10, (32,), generator=torch.Generator().manual_seed(2))
# Half of the distance between exponents that differ in the limit. In μP the slopes differ from the limit by
# the finite width, by up to 0.17 in four data sets, and by the seeds; rounding changes them far less.
HALF = 0.25


class Net(nn.Module):
    """Three layers whose widths grow, and one that does not."""

    def __init__(self, width: int, multiplier: float = 1.0) -> None:
        super().__init__()
        self.embed, self.up = nn.Linear(16, width), nn.Linear(width, width)
        self.down, self.head = nn.Linear(width, width), nn.Linear(width, 10, bias=False)
        self.multiplier = multiplier

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(self.up(self.embed(x).relu()).relu()).relu()
        return self.head(x * self.multiplier)


def adam(model: Net, hidden: float, others: float) -> torch.optim.Optimizer:
    matrices = [model.up.weight, model.down.weight]
    rest = [model.embed.weight, model.embed.bias, model.up.bias, model.down.bias, model.head.weight]
    return torch.optim.Adam([{"params": matrices, "lr": hidden}, {"params": rest, "lr": others}])


def standard(width: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Net(width)
    return model, torch.optim.Adam(model.parameters(), lr=LR)


def mup(width: int, *, zeros: bool = False) -> tuple[Net, torch.optim.Optimizer]:
    model = Net(width, multiplier=BASE / width)
    nn.init.normal_(model.head.weight, std=0.0 if zeros else BASE**-0.5)
    return model, adam(model, LR * BASE / width, LR)


def mup_zeros(width: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    return mup(width, zeros=True)


def loss(model: nn.Module) -> Tensor:
    return cross_entropy(model(X), Y)


@pytest.fixture(scope="module")
def broken() -> gm.CoordCheck:
    return gm.coord_check(standard, WIDTHS, loss, seeds=3)


@pytest.fixture(scope="module")
def right() -> gm.CoordCheck:
    return gm.coord_check(mup, WIDTHS, loss, seeds=3)


def test_the_standard_parametrization_fails(broken: gm.CoordCheck) -> None:
    assert not broken
    # the first layer's inputs do not get wider
    assert broken.failed == ("up.out", "down.out", "head.out")
    # an update of ± lr in each of n weights changes a sum of n products by up to n lr
    assert broken["up.out"].change_slopes[1].value > 1 - HALF
    for name in broken.failed:
        assert broken[name].faults[0].startswith("Δx_1 grows: +")
    # all that the values alone show of it after the first step is a part
    assert broken["up.out"].slopes[1].value < broken["up.out"].change_slopes[1].value
    assert all(abs(row.slopes[0].value) < HALF for row in broken.rows)


@pytest.mark.parametrize("zeros", [False, True])
def test_mup_passes(right: gm.CoordCheck, *, zeros: bool) -> None:
    result = gm.coord_check(mup_zeros, WIDTHS, loss, seeds=3) if zeros else right
    assert result
    assert result.failed == ()
    assert [row.widens for row in result.rows] == [True, True, True, False]
    for row in result.rows:
        for slope in (*row.change_slopes[2:], *(row.slopes if row.widens else row.slopes[3:])):
            assert abs(slope.value) < HALF
    head = result["head.out"].slopes[0].value
    assert math.isnan(head) if zeros else abs(head + 0.5) < HALF
    # with a readout of zeros, the first step changes nothing behind it
    first = [row.change_slopes[1].value for row in result.rows if row.widens]
    assert all(map(math.isnan, first)) is zeros


def too_high(width: int) -> Any:
    model, _ = mup(width)
    return model, adam(model, LR, LR)


def lazy(width: int) -> Any:
    model, _ = mup(width)
    model.multiplier = (BASE / width) ** 0.5
    return model, adam(model, LR * BASE / width, LR * BASE / width)


def shrinking(width: int) -> Any:
    model, optimizer = mup(width)
    model.up.weight.data *= (BASE / width) ** 0.5
    model.up.bias.data *= (BASE / width) ** 0.5
    return model, optimizer


def growing(width: int) -> Any:
    model, optimizer = mup(width)
    model.down.weight.data *= (width / BASE) ** 0.5
    return model, optimizer


def silent(width: int) -> Any:
    model, optimizer = mup(width)
    model.multiplier = (BASE / width) ** 2
    return model, optimizer


@pytest.mark.parametrize(
    ("make", "name", "fault"),
    [
        (too_high, "up.out", "Δx_1 grows: +0.9"),
        (lazy, "embed.out", "Δx_2 vanishes: -1.0"),
        (shrinking, "up.out", "x_0 vanishes: -0.5"),
        (growing, "down.out", "x_0 grows: +0."),
        (silent, "head.out", "Δx_2 vanishes: -1."),
    ],
)
def test_each_mistake_is_named(make: Any, name: str, fault: str) -> None:
    result = gm.coord_check(make, WIDTHS[:3], loss, seeds=2, steps=2)
    found = [text for text in result[name].faults if text.startswith(fault[:-4])]
    assert found, result
    said, limit = float(found[0].split()[2]), float(fault.split()[2].rstrip("."))
    # the exponents of these mistakes differ by 1/2
    assert abs(said - limit) < 2 * HALF


def test_the_same_numbers_again(right: gm.CoordCheck) -> None:
    """Seeds are set and random numbers are restored; the caller's own do not matter."""
    torch.manual_seed(99)
    state = torch.get_rng_state()
    again = gm.coord_check(mup, WIDTHS, loss, seeds=3)
    assert torch.equal(torch.get_rng_state(), state)
    for a, b in zip(right.rows, again.rows, strict=True):
        for x, y in zip(a.rms[-1], b.rms[-1], strict=True):
            assert math.isclose(x, y, rel_tol=1e-6)


class Product(nn.Module):
    """Its output is exactly width**power; its one parameter moves by the learning rate of SGD."""

    def __init__(self, width: int, power: float) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(()))
        self.width, self.power, self.drop = width, power, nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(x) + (1.0 + self.shift) * self.width**self.power


class Triple(nn.Module):
    """Changes what the module before it returned."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(3)


def product(power: float, lr: float) -> Any:
    def make(width: int) -> Any:
        model = nn.Sequential(Product(width, power), Triple())
        return model, torch.optim.SGD(model.parameters(), lr=lr)

    return make


@pytest.mark.parametrize("power", [0.5, -2.0, 0.0])
def test_exact_powers(power: float) -> None:
    def of(model: nn.Module) -> Tensor:
        y = model(torch.zeros(4))
        # a gradient of -1 with respect to the shift
        return y.sum() / -12 * model[0].width ** -model[0].power

    result = gm.coord_check(product(power, 0.25), [2, 4, 8], of, steps=2, seeds=2)
    row = result["0.out"]
    assert row.slopes == tuple(Slope(pytest.approx(power, abs=1e-9), 0.0) for _ in range(3))  # type: ignore[arg-type]
    assert [slope.value for slope in row.change_slopes[1:]] == [pytest.approx(power, abs=1e-9)] * 2
    for t in range(3):
        want = [w**power for w in (2, 4, 8)]
        assert row.rms[t] == pytest.approx([(1 + 0.25 * t) * x for x in want])
        assert row.changes[t] == pytest.approx([0.25 * t * x for x in want])
        assert result.losses[t] == pytest.approx([-(1 + 0.25 * t)] * 3)
    expected = {0.5: ("0.out",), -2.0: ("0.out",), 0.0: ()}
    assert result.failed == expected[power]


def test_dropout_and_random_batches_are_the_same_in_each_step() -> None:
    def of(model: nn.Module) -> Tensor:
        return model(torch.rand(64) + 1.0).sum() * 0.0

    result = gm.coord_check(product(0.0, 1.0), [2, 4, 8], of, steps=1, seeds=1)
    (row,) = result.rows
    assert row.changes == ((0.0,) * 3,) * 2
    assert len(set(row.rms[0])) == 1
    assert result.passed
    assert math.isnan(row.change_slopes[1].value)


class Several(nn.Module):
    """A module called twice, under activation checkpointing, with a tap in it, and another never called."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.twice = nn.Linear(4, width), nn.Linear(width, width)
        self.unused = nn.Linear(2, 2)

    def part(self, x: Tensor) -> Tensor:
        x = self.twice(self.twice(x).relu())
        return gm.tap(x @ x.T / x.shape[-1], "scores")

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.part, self.embed(x), use_reentrant=False)
        return y


def several(width: int) -> Any:
    model = Several(width)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_taps_calls_and_checkpointing() -> None:
    x = torch.randn(3, 4)

    def check(**options: Any) -> gm.CoordCheck:
        return gm.coord_check(several, [8, 16, 32], lambda m: m(x).mean(), steps=1, seeds=1, **options)

    result = check(names="scores")
    assert [row.name for row in result.rows] == ["embed.out", "twice.out", "scores"]
    assert [row.widens for row in result.rows] == [True, True, False]
    assert all(0.0 < change < math.inf for row in result.rows for change in row.changes[1])
    torch.manual_seed(0)
    model = Several(8)
    values = []
    model.twice.register_forward_hook(lambda _, __, y: values.append(y.detach()))
    with torch.no_grad():
        model(x)
    want = torch.stack(values).double().square().mean().sqrt().item()
    assert result["twice.out"].rms[0][0] == pytest.approx(want, rel=1e-6)
    assert [row.name for row in check(modules="embed").rows] == ["embed.out"]
    with pytest.raises(KeyError, match=r"no activation 'unused\.out'"):
        result["unused.out"]


def test_compiled_models_run_eagerly() -> None:
    def compiled(width: int) -> Any:
        model, optimizer = mup(width)
        return torch.compile(model, backend=backend), optimizer

    def backend(*_: Any) -> Any:
        pytest.fail("compiled a model of a few steps")

    result = gm.coord_check(compiled, [8, 16, 32], loss, steps=1, seeds=1)
    want = gm.coord_check(mup, [8, 16, 32], loss, steps=1, seeds=1)
    assert [row.name for row in result.rows] == [row.name for row in want.rows]
    assert result.rows[0].rms[1] == pytest.approx(want.rows[0].rms[1], rel=1e-6)


def test_zeros_and_changed_shapes() -> None:
    def row(values: list[list[float]], numel: tuple[int, ...] = (2, 4, 8)) -> Any:
        ones = [[1.0] * 3]
        return row_of("x", (1, 2, 4), numel, [ones, ones], [[[0.0] * 3], values], 0.25)

    assert row([[0.0, 0.0, 0.0]]).passed
    assert row([[math.nan, 1.0, 9.0]]).passed
    assert row([[0.0, 1.0, 1.0]]).faults == ("Δx_1 grows: +inf ± 0.00",)
    assert row([[1.0, 1.0, 0.0]]).faults == ("Δx_1 vanishes: -inf ± 0.00",)
    # what does not widen may shrink as width**-0.5, not as 1 / width
    shrinks = [[1.0, 2**-0.5, 0.5]]
    assert row(shrinks).faults == ("Δx_1 vanishes: -0.50 ± 0.00",)
    assert row(shrinks, (2, 2, 2)).passed
    assert not row([[1.0, 0.5, 0.25]], (2, 2, 2)).passed
    # the seeds disagree too much
    assert row([[1.0, 2.0, 4.0], [1.0, 1.0, 1.0]]).passed
    assert not row([[1.0, 2.0, 4.0], [1.0, 1.9, 4.0]]).passed


def test_the_table(broken: gm.CoordCheck, right: gm.CoordCheck) -> None:
    lines = str(broken).splitlines()
    how = "widths 64, 128, 256, 512; 4 steps, 3 seeds, tolerance 0.25"
    assert lines[0] == f"coordinate check FAILED, 3 of 4 activations; {how}"
    assert lines[2].split() == ["slopes", *[f"x_{t}" for t in range(5)], *[f"Δx_{t}" for t in range(1, 5)]]
    rows = {line.split()[0]: line.split() for line in lines[4:8]}
    assert rows["embed.out"][-1] == "ok"
    assert rows["up.out"][10:13] == ["Δx_1", "grows:", rows["up.out"][6]]
    assert str(right).startswith("coordinate check passed, 4 activations;")
    many = gm.coord_check(product(0.0, 0.0), [2, 4, 8], lambda m: m(torch.ones(2)).sum(), steps=9, seeds=1)
    assert str(many).splitlines()[2].split()[1:6] == ["x_0", "x_2", "x_4", "x_7", "x_9"]


def test_the_picture(broken: gm.CoordCheck, right: gm.CoordCheck, tmp_path: Path) -> None:
    for result in (broken, right):
        path = tmp_path / "picture.svg"
        result.save_svg(path)
        root = ET.fromstring(path.read_text(encoding="utf-8"))  # noqa: S314 our own
        tag = "{http://www.w3.org/2000/svg}"
        lines = root.findall(f"{tag}polyline")
        # 5 panels of x, 4 of its change
        assert len(lines) == 9 * 4
        thick = [line.attrib["stroke-width"] == "2.6" for line in lines]
        assert sum(thick) == 9 * len(result.failed)
        texts = ["".join(text.itertext()) for text in root.iter(f"{tag}text")]
        for row in result.rows:
            assert (row.name if row.passed else f"{row.name} ✗ {row.faults[0]}") in texts
        width, height = (float(root.attrib[name]) for name in ("width", "height"))
        for line in lines:
            for point in line.attrib["points"].split():
                x, y = map(float, point.split(","))
                assert 0.0 < x < width
                assert 0.0 < y < height


def bare(width: int) -> Any:
    model = nn.Linear(16, width)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def other_names(width: int) -> Any:
    model = nn.Sequential(nn.Linear(16, width), *([nn.Linear(width, 10)] if width < 128 else [nn.ReLU()]))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def unstable(width: int) -> Any:
    model, _ = mup(width)
    return model, torch.optim.SGD(model.parameters(), lr=1e30 if width == 128 else 1e-3)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"widths": [64, 128]}, ValueError, r"needs at least 3 widths, got \[64, 128\]"),
        ({"widths": [64, 256, 128]}, ValueError, "must increase, but 128 comes after 256"),
        ({"widths": [64, 64, 128]}, ValueError, "must increase, but 64 comes after 64"),
        ({"widths": [64, 128.0, 256]}, ValueError, r"positive integers, got 128\.0"),
        ({"widths": [0, 1, 2]}, ValueError, "positive integers, got 0"),
        ({"steps": 0}, ValueError, r"coord_check\(steps=0\): steps must be an integer, at least 1"),
        ({"seeds": True}, ValueError, r"coord_check\(seeds=True\)"),
        ({"tolerance": math.nan}, ValueError, "must be a positive number"),
        ({"make_model": Net}, TypeError, r"make_model\(64\) must return \(model, optimizer\).* got Net"),
        ({"make_model": lambda n: (Net(n), 0.1)}, TypeError, r"got \(Net, float\)"),
        ({"make_model": bare}, ValueError, "the model of width 64 has no modules with parameters"),
        ({"make_model": other_names}, ValueError, r"width 64 has '1\.out', but that of width 128 has not"),
        (
            {"make_model": unstable},
            RuntimeError,
            r"the loss is (nan|inf) at width 128 after [12] steps?,",
        ),
        ({"loss": lambda m: m(X)}, TypeError, "must return a tensor with one element"),
        ({"loss": lambda m: loss(m).item()}, TypeError, "must return a tensor with one element"),
        ({"modules": "nothing"}, ValueError, "selects no module"),
        ({"names": ["hdi"]}, ValueError, r"no call of gm.tap in the model has the name 'hdi'; measured"),
        ({"widths": 128}, TypeError, r"widths must be several integers, .* got 128"),
    ],
)
def test_errors(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    state = torch.get_rng_state()
    given = {"make_model": mup, "widths": [64, 128, 256], "loss": loss, "seeds": 1} | options
    with pytest.raises(kind, match=message):
        gm.coord_check(given.pop("make_model"), given.pop("widths"), given.pop("loss"), **given)
    assert torch.equal(torch.get_rng_state(), state)
