"""Taps in a monitor: their rows stand beside the gradients' in the run record, the rules, sinks and page."""

from __future__ import annotations

import contextlib
import dataclasses
import math

import pytest
import torch
from torch import nn

import gradiometer as gm
from gradiometer.cli import show
from gradiometer.columns import ACTIVATIONS, Cursor
from gradiometer.rules import DeadUnits, Finding, Severity
from gradiometer.sinks.selection import Selection, lookup
from gradiometer.web.data import page_of
from support.compiling import graphs, inductor_if_deep, no_recompile

pytestmark = pytest.mark.usefixtures("_dynamo", "_one_thread")

TAPPED = {"layers": r"^blocks\.\d$|act$"}
NAMES = ("blocks.0.out", "blocks.0.act.out", "blocks.1.out", "blocks.1.act.out", "scores")
STEPS = 4
DERIVED = ("rms", "norm", "outlier_ratio", "kurtosis", "zero_channel_fraction")


class Block(nn.Module):
    def __init__(self, d=8):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(d), nn.Linear(d, 3 * d)
        self.up, self.act, self.down = nn.Linear(d, 2 * d), nn.ReLU(), nn.Linear(2 * d, d)

    def forward(self, x):
        q, k, v = self.attn(self.norm(x)).chunk(3, dim=-1)
        scores = gm.tap(q @ k.transpose(-1, -2) / 3.0, "scores")
        x = x + scores.softmax(-1) @ v
        return x + self.down(self.act(self.up(x)))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.fixture
def tapped():
    """Return a function that makes a model and its taps, which are removed at the end."""
    made = []

    def make(**options):
        model = Transformer()
        made.append(gm.Taps(model, TAPPED, names=["scores"], **options))
        return model, made[-1]

    yield make
    for taps in made:
        taps.remove()


def batches(seed=1):
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(4, 12, 8, generator=generator)


def train(model, taps, monitor, steps=STEPS, compiled=None):
    """Return what the taps have measured in each step."""

    def step(x):
        loss = model(x)
        loss.backward()
        monitor.record()
        return loss.detach()

    run = step if compiled is None else torch.compile(step, fullgraph=True, backend=compiled)
    found = []
    for i, x in zip(range(steps), batches(), strict=False):
        for p in model.parameters():
            p.grad = None
        with no_recompile() if compiled and i > 1 else contextlib.nullcontext():
            loss = run(x)
        if taps is not None:
            found.append(taps.stats().columns.clone())
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.05 * p.grad)
        monitor.advance(loss=loss)
    return found


def agrees(record, columns):
    """Check the rows of a record against the columns of the taps in that step."""
    n = len(NAMES)
    stats = gm.ActivationStats(tuple(f"{i}" for i in range(2 * n)), columns)
    for kind, own in (("activations", slice(n)), ("activation_grads", slice(n, None))):
        assert record.names(kind) == NAMES
        assert record.measured(kind).all()
        for name in (*ACTIVATIONS.index, *DERIVED):
            assert torch.equal(record.value(name, kind), getattr(stats, name)[own]), (kind, name)


@pytest.mark.parametrize("fingerprint", [False, True])
@pytest.mark.parametrize("close", [True, False])
def test_a_run_has_what_the_taps_have_measured(tmp_path, tapped, fingerprint, close):
    model, taps = tapped()
    options = {"weights": True, "updates": True} if fingerprint else {}
    monitor = gm.Monitor(model, taps=taps, run_dir=tmp_path, fingerprint=fingerprint, rules=(), **options)
    measured = train(model, taps, monitor)
    # while it is open, the steps are in the journal
    (monitor.close if close else monitor.flush)()
    run = gm.read_run(tmp_path)
    assert run.catalog.taps.names == NAMES
    records = list(run.records())
    for record, columns in zip(records, measured, strict=True):
        agrees(record, columns)
        assert record.total() > 0
    _, kurtosis = run.matrix("kurtosis", "activations")
    assert torch.equal(kurtosis[2], records[2].value("kurtosis", "activations"))
    comparison = gm.compare_runs(tmp_path, tmp_path)
    assert comparison.same
    assert comparison.identical == fingerprint
    monitor.close()
    assert monitor.failures == {}


@inductor_if_deep
def test_a_compiled_step_records_its_taps(tmp_path, tapped, backend):
    model, taps = tapped()
    with gm.Monitor(model, taps=taps, run_dir=tmp_path, rules=()) as monitor:
        measured = train(model, taps, monitor, compiled=backend)
    assert graphs() == 1
    assert monitor.failures == {}
    for record, columns in zip(gm.read_run(tmp_path).records(), measured, strict=True):
        agrees(record, columns)


@inductor_if_deep
def test_record_and_advance_may_be_in_the_graph(tapped, backend):
    model, taps = tapped()
    recorder = gm.Recorder(model, taps=taps)
    addresses = [x.data_ptr() for x in (taps.values, taps.grads, taps.cursor, recorder.ring, recorder.cursor)]

    def step(x):
        model(x).backward()
        recorder.record()
        recorder.advance()

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    for i, x in zip(range(3), batches(), strict=False):
        for p in model.parameters():
            p.grad = None
        with no_recompile() if i > 1 else contextlib.nullcontext():
            compiled(x)
    assert graphs() == 1
    after = [x.data_ptr() for x in (taps.values, taps.grads, taps.cursor, recorder.ring, recorder.cursor)]
    assert addresses == after
    found = recorder.read()
    assert [record.step for record in found] == [0, 1, 2]
    assert int(taps.cursor[Cursor.STEP]) == 3
    assert not taps.values.any()
    # each step has its own calls: nothing adds up
    calls = [record.value("n_calls", "activations").tolist() for record in found]
    assert calls == [[1.0, 1.0, 1.0, 1.0, 2.0]] * 3


def test_gradients_are_recorded_as_without_taps(tmp_path, tapped):
    for name, with_taps in (("with", True), ("without", False)):
        model, taps = tapped()
        taps = taps if with_taps else None
        options = {"weights": True, "updates": True, "rules": ()}
        with gm.Monitor(model, taps=taps, run_dir=tmp_path / name, **options) as monitor:
            train(model, taps, monitor)
    runs = [gm.read_run(tmp_path / name) for name in ("with", "without")]
    # but for the statistics of activations in the table of steps
    shared = [name for name in runs[1].steps.schema.names if name not in {"time", "kinds"}]
    steps, others = [run.steps.select(shared).to_pylist() for run in runs]
    assert steps == others
    for name in ("tensors", "pairs"):
        first, second = [run.table(name).to_pylist() for run in runs]
        assert first == second
    assert [*runs[1].catalog.kinds] == ["grads", "weights", "updates"]
    assert runs[0].catalog.parameters == runs[1].catalog.parameters


def test_a_recorder_without_taps_has_no_room_for_them(tapped):
    model, taps = tapped()
    plain, more = gm.Recorder(model, updates=True), gm.Recorder(model, updates=True, taps=taps)
    # a number of each table in the header of a slot, and the columns and flags of each row
    room = 2 * (1 + len(NAMES) * (ACTIVATIONS.width + 1))
    assert more.ring.shape[1] == plain.ring.shape[1] + room


def test_steps_that_the_taps_leave_out_are_not_measured(tapped):
    model, taps = tapped(every=2)
    model(next(batches())).backward()  # before the monitor: belongs to no step
    records = []
    with gm.Monitor(model, taps=taps, sinks=[records.append], rules=()) as monitor:
        train(model, taps, monitor)
    assert [bool(record.measured("activations").any()) for record in records] == [True, False] * 2
    assert records[0].value("n_calls", "activations")[-1] == 2.0
    assert all(record.measured().sum() == len(list(model.parameters())) for record in records)


def test_a_resumed_monitor_and_its_taps_have_the_same_step(tapped):
    model, taps = tapped(every=3)
    records = []
    with gm.Monitor(model, taps=taps, sinks=[records.append], rules=()) as monitor:
        monitor.step = 7
        train(model, taps, monitor)
    measured = {record.step: bool(record.measured("activations").any()) for record in records}
    assert measured == {7: False, 8: False, 9: True, 10: False}


@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_loss_scale_is_taken_out_of_the_gradients(tapped, as_tensor):
    model, taps = tapped()
    recorder, x = gm.Recorder(model, taps=taps), next(batches())
    for scale in (1.0, 1024.0):
        model.zero_grad()
        (model(x) * scale).backward()
        inv_scale = torch.tensor(1.0 / scale) if as_tensor else 1.0 / scale
        recorder.record(inv_scale=inv_scale)
        recorder.advance()
    plain, scaled = recorder.read()
    # powers of two change no digit
    for kind in ("activations", "activation_grads"):
        for name in ACTIVATIONS.index:
            assert torch.equal(plain.value(name, kind), scaled.value(name, kind)), name


def test_taps_that_do_not_fit_are_refused(tapped):
    model, _ = tapped()
    with pytest.raises(TypeError, match=r"taps=\.\.\.\): expected gm\.Taps\(model, \.\.\.\), got"):
        gm.Recorder(model, taps=["blocks.0"])
    wrong = gm.Taps(model, names=["blocks.0.up.weight"])
    with pytest.raises(ValueError, match=r"'blocks\.0\.up\.weight' is the name of a tap and of a parameter"):
        gm.Monitor(model, taps=wrong)
    wrong.remove()
    recorder = gm.Recorder(model)
    recorder.record()
    (record,) = recorder.read()
    with pytest.raises(KeyError, match="create the Monitor or Recorder with taps"):
        record.value("rms", "activations")


def test_sinks_the_page_and_the_command_line_show_activations(tmp_path, tapped):
    model, taps = tapped()
    with gm.Monitor(model, taps=taps, run_dir=tmp_path, rules=()) as monitor:
        train(model, taps, monitor)
    run = gm.read_run(tmp_path)
    record = run.record(1)
    values = Selection(tensors=r"^blocks\.0\.act", statistics=("norm", "kurtosis")).values(record)
    assert {key for key in values if "/blocks" in key} == {
        f"{kind}/blocks.0.act.out/{statistic}"
        for kind in ("activations", "activation_grads")
        for statistic in ("norm", "kurtosis")
    }
    key = "activations/blocks.0.act.out/zero_channel_fraction"
    row = record.catalog.taps.index["blocks.0.act.out"]
    assert lookup(record, key) == record.value("zero_channel_fraction", "activations")[row]
    page = page_of(run).values
    kinds = {"grads": "parameter", "activations": "tap", "activation_grads": "tap"}
    assert [(kind["name"], kind["rows"]) for kind in page["kinds"]] == list(kinds.items())
    assert page["rows"]["tap"] == {"names": NAMES, "shapes": ["activation"] * len(NAMES)}
    assert page["summary"]["activations"]["largest"]["kurtosis"][row] > 0
    shown = show.look(run, 1, kind="activations").to_dict()["report"]
    (rows,) = [x for x in shown.values() if isinstance(x, dict) and "scores" in x]
    assert {*rows} == {*NAMES}
    assert rows["scores"]["kurtosis"] > 0
    assert show.look(run, 1, kind="activation_grads").report["scores"].name == "scores"


def checked(model, taps, rules, poison=None, steps=25, loss=None):
    with gm.Monitor(model, taps=taps, rules=rules) as monitor:
        for i, x in zip(range(steps), batches(), strict=False):
            model.zero_grad()
            if poison is not None and i == steps - 2:
                poison(model)
            value = model(x) if loss is None else loss(model(x))
            value.backward()
            monitor.record()
            with torch.no_grad():
                for p in model.parameters():
                    if p.grad is not None and p.grad.isfinite().all():
                        p.sub_(0.05 * p.grad)
            monitor.advance(loss=value)
        monitor.flush()
        return monitor.findings


def of_output(model):
    # after the tap's own hook: its output is finite, so the next one in the forward pass is the first
    model.blocks[1].act.register_forward_hook(lambda *args: args[2] * math.nan)


def of_an_inner_module(model):
    model.blocks[0].up.register_forward_hook(lambda *args: args[2] + math.inf)


def of_a_gradient(model):
    # after the gradient of the first block's output was measured
    model.blocks[1].register_forward_pre_hook(
        lambda _, args: args[0].register_hook(lambda g: g * math.nan) and None
    )


@pytest.mark.parametrize(
    ("poison", "kind", "name", "message"),
    [
        (of_output, "activations", "blocks.1.out", "the loss is nan"),
        (of_an_inner_module, "activations", "blocks.0.act.out", ""),
        (of_a_gradient, "activation_grads", "blocks.0.act.out", ""),
    ],
)
def test_the_first_values_that_are_not_finite_are_named(tapped, poison, kind, name, message):
    (found,) = [f for f in checked(*tapped(), None, poison) if f.rule == "nonfinite"]
    assert (found.kind, found.tensor, found.severity) == (kind, name, Severity.ERROR)
    assert message in found.message


def test_a_mask_of_minus_infinity_is_only_mentioned():
    class Masked(nn.Linear):
        def forward(self, x):
            scores = super().forward(x).masked_fill(torch.ones(8, 8).triu(1).bool()[0], -math.inf)
            return gm.tap(scores, "scores").softmax(-1).square().mean()

    torch.manual_seed(0)
    model = Masked(8, 8)
    taps = gm.Taps(model, names=["scores"])
    found = [f for f in checked(model, taps, None) if f.rule == "nonfinite"]
    taps.remove()
    assert {(f.kind, f.tensor, f.severity) for f in found} == {("activations", "scores", Severity.INFO)}
    assert "the loss and all gradients are finite" in found[0].message


def test_a_layer_of_dead_units_is_found(tapped):
    model, taps = tapped()
    with torch.no_grad():
        model.blocks[1].up.bias[:10] = -100.0
    found = [f for f in checked(model, taps, None) if f.severity > Severity.INFO]
    (dead,) = [f for f in found if f.rule == "dead_units"]
    assert (dead.kind, dead.tensor, dead.value) == ("activations", "blocks.1.act.out", 10 / 16)
    assert "62.5% of its channels are 0 in every sample" in dead.message
    assert Finding.from_dict(dead.to_dict()) == dead


def test_units_that_die_later_are_found(tapped):
    model, taps = tapped()

    def kill(model):
        with torch.no_grad():
            model.blocks[0].up.bias.fill_(-100.0)

    rules = [DeadUnits(patience=2)]
    (dead,) = checked(model, taps, rules, kill)
    assert (dead.tensor, dead.first_step, dead.value) == ("blocks.0.act.out", 23, 1.0)


@pytest.mark.parametrize("layer", ["relu", "gelu", "dropout", "few rows", "inputs"])
def test_healthy_layers_have_no_dead_units(layer):
    torch.manual_seed(0)
    acts = {"gelu": nn.GELU(), "dropout": nn.Dropout(0.5)}
    model = nn.Sequential(nn.Identity(), nn.Linear(8, 32), acts.get(layer, nn.ReLU()), nn.Linear(32, 1))
    taps = gm.Taps(model, {"all": lambda _: True})
    rows = 2 if layer == "few rows" else 48
    found = []
    with gm.Monitor(model, taps=taps, rules=[DeadUnits(patience=3)]) as monitor:
        for _ in range(12):
            model.zero_grad()
            x = torch.randn(rows, 8)
            if layer == "inputs":
                x[:, :6] = 0.0
            loss = model(x).square().mean()
            loss.backward()
            monitor.record()
            monitor.advance(loss=loss)
        monitor.flush()
        found = monitor.findings
    taps.remove()
    assert found == []


def test_dead_units_checks_its_arguments():
    for fraction in (0.0, 1.5, math.nan):
        with pytest.raises(ValueError, match="fraction must be above 0 and at most 1"):
            DeadUnits(fraction)


def test_a_black_box_and_a_replaced_record_keep_activations(tapped):
    model, taps = tapped()
    recorder = gm.Recorder(model, taps=taps)
    model(next(batches())).backward()
    recorder.record()
    (record,) = recorder.read()
    again = dataclasses.replace(record, skipped=True)
    assert torch.equal(again.value("kurtosis", "activations"), record.value("kurtosis", "activations"))
    assert record.total("zero_channel_fraction", "activations") >= 0.0
    assert "blocks.0.act.out" in str(record.report("activations"))


def test_a_healthy_run_with_taps_has_no_finding_above_info(tapped):
    model, taps = tapped()
    assert [str(f) for f in checked(model, taps, None, steps=60) if f.severity > Severity.INFO] == []
