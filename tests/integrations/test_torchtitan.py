"""torchtitan's Trainer is watched: the package itself if it is installed, and an imitation of it."""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
import subprocess
import sys
from contextlib import closing
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import gradiometer as gm
from support import imitated_torchtitan as titan
from support.pages import blocks, execute, text
from support.rank_pool import RankPool, scripted
from support.watching import Sink

PAGE = "docs/how-to/torchtitan.md"
# with updates, weights, precision and taps
KINDS = {
    *("grads", "weights", "updates", "activations", "activation_grads"),
    *("grad_exponents", "weight_exponents"),
}
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
SCRIPT = Path(titan.__file__).with_name("real_torchtitan.py")


@pytest.fixture
def adapter():
    with titan.installed() as module:
        yield module


@pytest.fixture(scope="module")
def ranks():
    with closing(RankPool(2)) as pool:
        yield pool


def weights_of(trainer):
    return [p.detach().clone() for part in trainer.model_parts for p in part.parameters()]


def watched(trainer, **options):
    """Watch a trainer without rules; return what watches it, and its sink."""
    sink = Sink()
    return gm.watch(trainer, **{"rules": (), "sinks": [sink]} | options), sink


# --- the imitation, in one process


@pytest.mark.usefixtures("adapter")
def test_gradients_are_recorded_before_the_clip_with_loss_rate_and_clipping():
    trainer = titan.Trainer(titan.Config())
    hook, sink = watched(trainer, updates=True)
    assert hook.monitor is None
    trainer.train()
    # torchtitan counts from 1
    assert sink.steps == [0, 1, 2, 3]
    norms = [square**0.5 for square in trainer.norms]
    assert min(norms) > trainer.config.max_norm
    assert sink.totals == pytest.approx(norms, rel=1e-12)
    assert [loss for _, loss, _ in trainer.metrics_processor.logged] == sink.scalars("loss")
    assert sink.scalars("lr") == [0.1, 0.05, 0.025, 0.0125]
    assert sink.scalars("clip_max_norm") == [0.05] * 4
    assert sink.scalars("clip_factor") == pytest.approx([0.05 / norm for norm in norms], rel=1e-4)
    assert all(record.has("updates") for record in sink.records)
    assert sink.closed == 1
    assert hook.monitor.failures == {}
    assert hook.monitor.closed


@pytest.mark.usefixtures("adapter")
def test_training_is_the_same_to_the_bit_and_nothing_stays_patched():
    clip = sys.modules["torchtitan.distributed.utils"].clip_grad_norm_
    alone, seen = titan.Trainer(titan.Config()), titan.Trainer(titan.Config())
    alone.train()
    watched(seen, updates=True, weights=True, taps=r"^0$")
    seen.train()
    assert all(map(torch.equal, weights_of(alone), weights_of(seen)))
    assert sys.modules["torchtitan.distributed.utils"].clip_grad_norm_ is clip
    assert not seen.optimizers._optimizer_step_pre_hooks
    assert not seen.optimizers._optimizer_step_post_hooks
    assert not seen.model_parts[0][0]._forward_hooks


def test_the_override_installs_it(adapter, tmp_path):
    pytest.importorskip("pyarrow")
    config = titan.Config(dump_folder=str(tmp_path))
    options = {"precision": 2, "taps": r"^1$", "updates": True, "weights": True, "every": 2}
    config.metrics = adapter.monitor(config.metrics, **options)
    assert config.metrics.log_freq == 1
    trainer = titan.Trainer(config)
    trainer.train()
    trainer.close()
    run = gm.read_run(tmp_path / "gradiometer")
    assert run.steps["recorded"].to_pylist() == [True, False, True, False]
    assert run.steps["loss"].null_count == 0
    assert run.catalog.taps.names == ("1.out",)
    assert set(run.steps["kinds"].to_pylist()[0]) == KINDS | {"exp_avg", "exp_avg_sq"}
    assert trainer.metrics_processor.watched.monitor.failures == {}


def test_options_of_the_configuration_are_those_of_the_monitor(adapter):
    with pytest.raises(TypeError, match="evry"):
        adapter.monitor(titan.MetricsProcessor.Config(), evry=2)
    # each is explained in torchtitan's --help
    source = Path(adapter.__file__).read_text(encoding="utf-8")
    for option in fields(adapter.MonitorOptions):
        assert re.search(rf'^    {option.name}: .*\n    """[A-Z].*"""$', source, flags=re.MULTILINE)


def test_a_metrics_processor_that_no_trainer_builds_says_so(adapter, caplog):
    config = adapter.monitor(titan.MetricsProcessor.Config())
    processor = config.build(parallel_dims=titan.ParallelDims())
    with caplog.at_level(logging.WARNING, "gradiometer"):
        processor.model_parts = [titan.layers()]
    assert "use gm.watch(trainer)" in caplog.text
    assert processor.watched is None


def test_the_page(adapter, tmp_path, monkeypatch):
    # relative to the page: its commands, its table and its file
    commands = "".join(blocks(PAGE, "bash"))
    (given,) = re.findall(rf"'{adapter.__name__}\.monitor=(.*)'", commands)
    options = adapter.MonitorOptions(**json.loads(given))
    assert re.search(options.taps, "layers.3.feed_forward")
    named = re.findall(r"--metrics\.monitor\.([\w-]+)", commands)
    listed = re.findall(r"^\| (`.*`) \|.*\|.*\|$", text(PAGE), flags=re.MULTILINE)
    known = [option.name for option in fields(options)]
    assert re.findall(r"`(\w+)`", "".join(listed)) == known
    assert {name.replace("-", "_") for name in named} <= set(known)
    (of_file, _) = blocks(PAGE)
    config = execute(of_file)["llama3_8b"]()
    assert (config.metrics.monitor.every, config.metrics.log_freq) == (10, 10)
    # modules of the imitation have other names
    config.metrics.monitor.taps = "0"
    monkeypatch.chdir(tmp_path)
    trainer = titan.Trainer(config)
    trainer.train()
    assert gm.read_run("outputs/gradiometer").steps["recorded"].to_pylist() == [True, False, False, False]


@pytest.mark.usefixtures("adapter")
def test_without_a_clip_the_gradients_are_those_of_the_update():
    trainer = titan.Trainer(titan.Config())
    norms = []
    trainer.clip = lambda: norms.append(
        titan.square_of([p.grad for p in trainer.model_parts[0].parameters()])
    )
    trainer.metrics_processor.should_log = lambda _: False
    _, sink = watched(trainer)
    trainer.train()
    assert sink.totals == pytest.approx([square**0.5 for square in norms], rel=1e-12)
    assert "clip_factor" not in sink.records[0].scalars


@pytest.mark.usefixtures("adapter")
def test_a_loss_that_torchtitan_refuses_is_in_the_record():
    trainer = titan.Trainer(titan.Config(fails_at=3))
    _, sink = watched(trainer)
    with pytest.raises(RuntimeError, match="not finite"):
        trainer.train()
    trainer.close()
    assert sink.steps == [0, 1, 2]
    assert len(sink.scalars("loss")) == 3
    (fault,) = sink.faults
    assert fault.message == "RuntimeError: Loss is not finite"
    assert trainer.closed == 1


@pytest.mark.usefixtures("adapter")
def test_a_step_without_its_data_is_no_step():
    # the data ends in the middle of the third step
    trainer = titan.Trainer(titan.Config(batches=5))
    _, sink = watched(trainer)
    trainer.train()
    assert sink.steps == [0, 1]
    assert sink.faults == []


@pytest.mark.usefixtures("adapter")
def test_a_resumed_run_continues_the_numbers():
    trainer = titan.Trainer(titan.Config(steps=7))
    _, sink = watched(trainer)
    # loaded by train, from a checkpoint
    trainer.step = 5
    trainer.train()
    assert sink.steps == [5, 6]


@pytest.mark.usefixtures("adapter")
def test_a_loop_of_its_own_ends_with_close():
    trainer = titan.Trainer(titan.Config())
    _, sink = watched(trainer)
    data = trainer.data()
    for trainer.step in (1, 2):
        trainer.train_step(data)
    trainer.close()
    assert (sink.steps, sink.closed) == ([0, 1], 1)


@pytest.mark.usefixtures("adapter")
def test_several_parts_and_optimizers():
    parts = [nn.Sequential(), nn.Sequential()]
    for i, layer in enumerate(titan.layers()):
        parts[i].add_module(f"layers{i}", layer)
    trainer = titan.Trainer(titan.Config(), parts, run=lambda x: parts[1](parts[0](x)).square().mean())
    hook, sink = watched(trainer, updates=True)
    trainer.train()
    names = [f"layers{i}.{kind}" for i in range(2) for kind in ("weight", "bias")]
    assert list(sink.info.catalog.names) == names
    assert sink.totals == pytest.approx([square**0.5 for square in trainer.norms], rel=1e-12)
    assert sink.scalars("lr_1") == sink.scalars("lr")
    assert min(sink.records[0].value("rms_u", "updates").tolist()) > 0
    assert hook.monitor.failures == {}


@pytest.mark.usefixtures("adapter")
def test_errors_do_not_stop_training(monkeypatch, caplog):
    alone, seen = titan.Trainer(titan.Config()), titan.Trainer(titan.Config())
    alone.train()
    hook, _ = watched(seen)

    def fail(*_, **__):
        raise RuntimeError("broken")

    monkeypatch.setattr(hook._session, "record", fail)
    with caplog.at_level(logging.WARNING, "gradiometer"):
        seen.train()
    assert caplog.text.count("broken") == 1
    assert all(map(torch.equal, weights_of(alone), weights_of(seen)))


@pytest.mark.usefixtures("adapter")
def test_what_is_refused():
    with pytest.raises(TypeError, match="evry"):
        gm.watch(titan.Trainer(titan.Config()), evry=2)
    with pytest.raises(ValueError, match="selects no module"):
        gm.watch(titan.Trainer(titan.Config()), taps="attention")
    staged = titan.Trainer(titan.Config(), parallel_dims=titan.ParallelDims(pp=object()))
    with pytest.raises(ValueError, match="pipeline parallelism"):
        gm.watch(staged, taps="0")
    blocks_of_layers = nn.Sequential(*[nn.Sequential(layer) for layer in titan.layers()])
    for block in blocks_of_layers:
        block.compile(backend="eager")
    compiled = titan.Trainer(titan.Config(), [blocks_of_layers])
    with pytest.raises(ValueError, match=re.escape("'0.0' is inside of '0', which is compiled by itself")):
        gm.watch(compiled, taps=r"\.0$")
    assert not blocks_of_layers[0][0]._forward_hooks
    trainer = titan.Trainer(titan.Config())
    with pytest.raises(TypeError, match="its own optimizer"):
        gm.watch(trainer, trainer.optimizers)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # by torch
@pytest.mark.usefixtures("adapter")
def test_taps_of_modules_that_are_compiled_by_themselves():
    parts = nn.Sequential(*[nn.Sequential(layer) for layer in titan.layers()])
    for block in parts:
        block.compile(backend="eager")
    trainer = titan.Trainer(titan.Config(), [parts])
    hook, sink = watched(trainer, taps=r"^\d$")
    trainer.train()
    assert min(sink.records[-1].value("norm", "activation_grads").tolist()) > 0
    assert hook.monitor.failures == {}


@pytest.mark.usefixtures("adapter")
def test_taps_of_your_own_stay():
    trainer = titan.Trainer(titan.Config())
    taps = gm.Taps(trainer.model_parts[0], {"first": "^0$"})
    _, sink = watched(trainer, taps=taps)
    trainer.train()
    assert sink.records[-1].has("activations")
    assert trainer.model_parts[0][0]._forward_hooks
    taps.remove()


# --- the imitation, with two ranks


class Distributed(nn.Module):
    """Its output is a DTensor."""

    def __init__(self, mesh):
        super().__init__()
        self.mesh = mesh

    def forward(self, x):
        return DTensor.from_local(x, self.mesh, [Shard(0)])


def sharded(_, folder):
    said = logging.Handler()
    messages, said.emit = [], lambda record: messages.append(record.getMessage())
    logging.getLogger("gradiometer").addHandler(said)
    with titan.installed() as adapter:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("loss",))
        model = titan.layers()
        # called by the loss below
        model[0].add_module("other", Distributed(mesh))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh).set_force_sum_reduction_for_comms(True)
        config = titan.Config(dump_folder=folder)
        config.metrics = adapter.monitor(config.metrics, updates=True, taps=r"^0(\.other)?$")
        trainer = titan.Trainer(config, [model], titan.ParallelDims(loss=mesh))
        # as torchtitan's losses: a part of that of the job
        mine = dist.get_rank()

        def run(x):
            model[0].other(x)
            return model(x.chunk(2)[mine]).square().mean() / 2

        trainer.run = run
        trainer.train()
        trainer.close()
        logging.getLogger("gradiometer").removeHandler(said)
        losses = [loss for _, loss, _ in trainer.metrics_processor.logged]
        norms = [norm for _, _, norm in trainer.metrics_processor.logged]
        monitor = trainer.metrics_processor.watched.monitor
        return losses, norms, trainer.norms, monitor.failures, messages


def test_shards_are_those_of_one_job(ranks, tmp_path):
    pytest.importorskip("pyarrow")
    found = ranks.run(sharded, str(tmp_path))
    losses = [sum(parts) for parts in zip(*[losses for losses, *_ in found], strict=True)]
    run = gm.read_run(tmp_path / "gradiometer")
    steps = run.steps
    assert steps["loss"].to_pylist() == pytest.approx(losses, rel=1e-12)
    for rank, (_, norms, squares, failures, messages) in enumerate(found):
        assert ["are not measured: 0.other.out" in text for text in messages] == [True] * (rank == 0)
        assert steps["total_norm"].to_pylist() == pytest.approx([s**0.5 for s in squares], rel=1e-12)
        assert steps["total_norm"].to_pylist() == pytest.approx(norms, rel=1e-6)
        assert failures == {}
    factors = [dict(scalars)["clip_factor"] for scalars in steps["scalars"].to_pylist()]
    assert factors == pytest.approx([0.05 / norm for norm in found[0][1]], rel=1e-4)


def staged(rank, folder):
    """Train as the two stages of a pipeline would, each with two parts of its own."""
    with titan.installed():
        torch.manual_seed(rank)
        parts = [nn.Sequential(), nn.Sequential()]
        for i, part in enumerate(parts):
            part.add_module(f"layers{2 * rank + i}", nn.Linear(6, 6, dtype=torch.float64))
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
        dims, config = titan.ParallelDims(pp=mesh), titan.Config(dump_folder=folder)
        trainer = titan.Trainer(config, parts, dims, has_last=rank == 1)

        def run(x):
            loss = parts[1](parts[0](x)).square().mean()
            if rank == 1:
                return loss
            loss.backward()
            return None

        trainer.run = run
        hook = gm.watch(trainer, run_dir=folder)
        trainer.train()
        logged = trainer.metrics_processor.logged
        losses = [loss for _, loss, _ in logged] if rank == 1 else []
        return trainer.norms, [norm for *_, norm in logged], losses, hook.monitor.failures


def test_stages_of_a_pipeline(ranks, tmp_path):
    pytest.importorskip("pyarrow")
    found = ranks.run(staged, str(tmp_path))
    squares = [sum(parts) for parts in zip(*[norms for norms, *_ in found], strict=True)]
    run = gm.read_run(tmp_path)
    names = [f"layers{i}.{kind}" for i in range(4) for kind in ("weight", "bias")]
    assert sorted(run.catalog.names) == sorted(names)
    totals = run.steps["total_norm"].to_pylist()
    assert totals == pytest.approx([math.sqrt(square) for square in squares], rel=1e-12)
    assert totals == pytest.approx(found[0][1], rel=1e-6)
    # only the last stage has the loss
    assert run.steps["loss"].to_pylist() == pytest.approx(found[1][2], rel=1e-12)
    assert all(failures == {} for *_, failures in found)


# --- torchtitan itself

real = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("torchtitan", "pyarrow", "tokenizers", "triton")),
    reason="torchtitan 0.3 is not installed",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("titan")
    shutil.copy(SCRIPT, path / "script.py")
    subprocess.run([sys.executable, "script.py", "data"], cwd=path, check=True)
    return path


def trained(folder, *arguments):
    """Return what the ranks have found."""
    shutil.rmtree(folder / "outputs", ignore_errors=True)
    output = scripted(folder / "script.py", *arguments)
    found = dict(re.findall(r"^FOUND (\d) (.*)$", output, flags=re.MULTILINE))
    return [json.loads(found[rank]) for rank in ("0", "1")]


def compare(folder, found, *, staged=False):
    """Compare the run record with what the ranks have found."""
    steps = gm.read_run(folder / "outputs/gradiometer").steps
    totals = steps["total_norm"].to_pylist()
    assert steps["step"].to_pylist() == [0, 1, 2]
    squares = [rank["squares"] for rank in found]
    # each stage has its own parameters; other ranks have the whole gradients
    squares = list(map(sum, zip(*squares, strict=True))) if staged else squares[0]
    assert totals == pytest.approx([square**0.5 for square in squares], rel=1e-6)
    for rank in found:
        # sums of squares in float32
        assert totals == pytest.approx([step["norm"] for step in rank["logged"]], rel=2e-4)
        losses = [step["loss"] for step in rank["logged"]]
        if rank["has loss"]:
            assert steps["loss"].to_pylist() == pytest.approx(losses, rel=1e-5)
        assert steps["lr"].to_pylist() == pytest.approx([s["next lr"] for s in rank["logged"]], rel=1e-6)
        assert rank["failures"] == {}
    assert sum(rank["has loss"] for rank in found) == 2 - staged
    scalars = [dict(step) for step in steps["scalars"].to_pylist()]
    assert [step["clip_max_norm"] for step in scalars] == [1.0] * 3
    expected = [min(1.0, 1 / norm) for norm in totals]
    assert [step["clip_factor"] for step in scalars] == pytest.approx(expected, rel=2e-4)
    return steps


@real
def test_the_override_with_fsdp(folder):
    alone, seen = trained(folder, "fsdp", "none"), trained(folder, "fsdp", "component")
    assert [rank["weights"] for rank in alone] == [rank["weights"] for rank in seen]
    steps = compare(folder, seen)
    assert set(steps["kinds"].to_pylist()[0]) >= KINDS
    run = gm.read_run(folder / "outputs/gradiometer")
    assert len(run.catalog.taps.names) == 6


@real
def test_gm_watch_with_tensor_parallelism(folder):
    alone, seen = trained(folder, "tp", "none"), trained(folder, "tp", "watch")
    assert [rank["weights"] for rank in alone] == [rank["weights"] for rank in seen]
    compare(folder, seen)


@real
@pytest.mark.skipif(TORCH < (2, 14), reason="pipelines of torchtitan 0.3 need torch 2.14")
def test_gm_watch_with_a_pipeline(folder):
    alone, seen = trained(folder, "pp", "none"), trained(folder, "pp", "watch")
    assert [rank["weights"] for rank in alone] == [rank["weights"] for rank in seen]
    compare(folder, seen, staged=True)
    # of each of the two ranks, in both of its parts
    names = gm.read_run(folder / "outputs/gradiometer").catalog.names
    assert {int(name.split(".")[1]) for name in names if name.startswith("layers.")} == set(range(6))
