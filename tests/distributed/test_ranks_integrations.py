"""The callbacks for the Trainers of Transformers and Lightning with two ranks: Gloo, on the CPU."""

# ruff: noqa: ARG001, ARG002 the libraries name the arguments

from __future__ import annotations

import json
import logging
import os
import warnings
from contextlib import closing, contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

from support.rank_pool import RankPool, torchrun
from support.watching import Counter

# checked, not imported here: importing takes seconds
for _package in ("pyarrow", "transformers", "accelerate", "pytorch_lightning"):
    if find_spec(_package) is None:
        pytest.skip(f"no {_package}", allow_module_level=True)

from gradiometer.integrations.frameworks import has_whole_gradients  # noqa: E402
from gradiometer.integrations.session import Session  # noqa: E402
from gradiometer.runs.reader import read_run  # noqa: E402

STEPS = 3
# relative: float32 gradients, summed in another order with another number of processes
CLOSE = 1e-4


@pytest.fixture(scope="module")
def ranks():
    """Two processes for this file: the frameworks keep state in theirs."""
    with closing(RankPool(2)) as pool:
        yield pool


@contextmanager
def quiet(logged=()):
    """Ignore the frameworks' warnings; keep our log messages, and make our warnings errors."""
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("gradiometer").addHandler(handler)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if "WORLD_SIZE" in os.environ:
        environment["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]
    try:
        with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
            warnings.simplefilter("ignore")
            warnings.filterwarnings("error", module="gradiometer")
            for name, value in environment.items():
                patch.setenv(name, value)
            for name in ("lightning", "pytorch_lightning"):
                logging.getLogger(name).setLevel(logging.ERROR)
            yield patch
    finally:
        torch.set_num_threads(threads)
        logging.getLogger("gradiometer").removeHandler(handler)


# --- Transformers


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, i):
        tokens = torch.randint(0, 32, (8,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": tokens, "labels": tokens}


def llama(folder, kind):
    """Return a model without dropout, the same in every process; sharded by Transformers if requested."""
    import transformers

    config = transformers.LlamaConfig(
        num_hidden_layers=2,
        hidden_size=16,
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=32,
        max_position_embeddings=8,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    if kind not in {"tp_size", "fsdp_size"}:
        return model
    from transformers.distributed import DistributedConfig

    if torch.distributed.get_rank() == 0:
        model.save_pretrained(folder / "model")
    torch.distributed.barrier()
    cut = DistributedConfig(**{kind: 2})
    return transformers.LlamaForCausalLM.from_pretrained(folder / "model", distributed_config=cut)


def pretend(patch, kind):
    """Let libraries that shard models only on GPUs do so on the CPU."""
    from accelerate import ParallelismConfig
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    if kind == "tp_size":
        patch.setattr(ParallelismConfig, "_validate_accelerator", lambda *_: None)
    if kind in {"fsdp 1", "fsdp 2"}:
        patch.setattr(PartialState, "_prepare_backend", lambda *_, **__: ("gloo", DistributedType.MULTI_GPU))
        patch.setattr(PartialState, "set_device", lambda self: setattr(self, "device", torch.device("cpu")))


def reset_accelerate():
    """Forget accelerate's singletons, which would be kept for the next Trainer of the process."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def told(monitor, options, **of_training):
    """Return what a rank says of its monitor, if it has one, and of its training."""
    return of_training | {
        "failures": None if monitor is None else monitor.failures,
        "every": None if monitor is None else monitor.every,
        "seen": [rule.seen for rule in dict(options).get("rules", ())],
        "step": None if monitor is None else monitor.step,
    }


def trainer_of(folder, kind, **arguments):
    import transformers

    reset_accelerate()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    fsdp = {
        "fsdp": "full_shard auto_wrap",
        "fsdp_config": {
            "version": int(kind[-1]) if kind[-1].isdigit() else None,
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "sync_module_states": False,
            "cpu_ram_efficient_loading": False,
        },
    }
    defaults = {
        "max_steps": STEPS,
        "max_grad_norm": 0.1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "train_sampling_strategy": "sequential",
        "seed": 0,
        **(fsdp if kind.startswith("fsdp ") else {"use_cpu": True}),
    }
    arguments = transformers.TrainingArguments(str(folder / "out"), **(defaults | arguments))
    trainer = transformers.Trainer(llama(folder, kind), arguments, train_dataset=Tokens())
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def train(rank, folder, kind, size=2, arguments=(), options=(), prepare=None, resume=None):
    """Train with a Trainer; return log messages, this rank's losses, and the state of the monitor."""
    from gradiometer.integrations.huggingface import MonitorCallback

    folder, logged, losses = Path(folder), [], []
    with quiet(logged) as patch:
        pretend(patch, kind)
        trainer = trainer_of(folder, kind, per_device_train_batch_size=size, **dict(arguments))
        step = trainer.training_step

        def training_step(*args, **kwargs):
            losses.append(step(*args, **kwargs))
            return losses[-1]

        trainer.training_step = training_step
        callback = MonitorCallback(trainer, **{"run_dir": folder / "run", "rules": ()} | dict(options))
        trainer.add_callback(callback)
        if prepare is not None:
            prepare(rank, trainer, patch)
        trainer.train(resume_from_checkpoint=resume)
    losses, step = [float(loss) for loss in losses], trainer.state.global_step
    return told(callback.monitor, options, logged=logged, losses=losses, global_step=step)


def recorded(folder):
    """Return the contents of a job's run record: steps, total norms, losses, names."""
    run = read_run(Path(folder) / "run")
    records = list(run.records())
    return {
        "steps": [record.step for record in records],
        "totals": [record.total() for record in records],
        "numel": [record.total("numel") for record in records],
        "losses": [record.loss for record in records],
        "names": run.catalog.names,
    }


def mean_losses(results):
    """Return the mean over ranks of each step's loss."""
    return [sum(losses) / len(losses) for losses in zip(*[r["losses"] for r in results], strict=True)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return the record of the same training in one process, by batch size."""
    kept = {}

    def train_alone(function, size, *args):
        if (function, size) not in kept:
            folder = tmp_path_factory.mktemp("alone")
            function(0, folder, "one", size, *args)
            kept[function, size] = recorded(folder)
        return kept[function, size]

    return train_alone


def check_record(found, expected):
    assert found["steps"] == expected["steps"] == list(range(STEPS))
    assert found["names"] == expected["names"]
    assert found["numel"] == expected["numel"]
    assert found["totals"] == pytest.approx(expected["totals"], rel=CLOSE)
    assert found["losses"] == pytest.approx(expected["losses"], rel=CLOSE)


# --- Lightning


def module_of(kind):
    """Return a module that keeps its losses, sharded as the strategy needs it."""
    import pytorch_lightning as pl

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
            self.losses = []

        def configure_model(self):
            if kind == "fsdp":
                torch.distributed.fsdp.fully_shard(self.net, mesh=self.device_mesh["data_parallel"])
            if kind == "tp":
                from torch.distributed.tensor import parallel

                plan = {"0": parallel.ColwiseParallel(), "2": parallel.RowwiseParallel()}
                parallel.parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)

        def training_step(self, batch, batch_idx):
            x, y = batch
            loss = nn.functional.mse_loss(self.net(x), y)
            self.losses.append(float(loss))
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    return Module()


def strategy_of(kind):
    from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy

    class FSDPStrategy(DDPStrategy):
        """Has the name of a strategy that shards a model; the real one needs a GPU."""

    if kind in {"fsdp", "tp"}:
        data, tensor = (2, 1) if kind == "fsdp" else (1, 2)
        return ModelParallelStrategy(data_parallel_size=data, tensor_parallel_size=tensor)
    kinds = {"ddp": DDPStrategy, "FSDPStrategy": FSDPStrategy}
    return kinds[kind](process_group_backend="gloo")


def fit(rank, folder, kind, size=2, arguments=(), options=(), prepare=None, resume=None):
    """Train with Lightning; return the same as `train`."""
    import pytorch_lightning as pl
    from pytorch_lightning.plugins.environments import LightningEnvironment

    from gradiometer.integrations.lightning import MonitorCallback

    folder, logged = Path(folder), []
    job = {}
    if kind != "one":
        job = {"devices": 2, "strategy": strategy_of(kind), "plugins": LightningEnvironment()}
    defaults = {
        "max_steps": STEPS,
        "accelerator": "cpu",
        "use_distributed_sampler": False,
        "devices": 1,
        "logger": False,
        "gradient_clip_val": None,
    }
    still = {"enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": folder}
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(x, 10 * x[:, :1])
    with quiet(logged) as patch:
        module = module_of(kind)
        callback = MonitorCallback(**{"run_dir": folder / "run", "rules": ()} | dict(options))
        trainer = pl.Trainer(
            callbacks=[callback], enable_checkpointing=False, **(defaults | still | job | dict(arguments))
        )
        if prepare is not None:
            prepare(rank, trainer, patch)
        # in order; Lightning's default sampler would shuffle
        sampler = torch.utils.data.DistributedSampler(data, 2, rank, shuffle=False)
        whole = kind in {"one", "tp"}
        loader = torch.utils.data.DataLoader(data, batch_size=size, sampler=None if whole else sampler)
        trainer.fit(module, loader, ckpt_path=resume)
    losses, step = module.losses, trainer.global_step
    return told(callback.monitor, options, logged=logged, losses=losses, global_step=step)


FUNCTIONS = {"transformers": train, "lightning": fit}


@pytest.mark.parametrize(
    ("framework", "kind"),
    [
        ("transformers", "ddp"),
        pytest.param("transformers", "fsdp_size", marks=pytest.mark.deep),
        ("transformers", "fsdp 2"),
        ("transformers", "tp_size"),
        *[("lightning", kind) for kind in ("ddp", "fsdp", "tp")],
    ],
)
def test_a_trainer_leaves_one_record_of_the_whole_job(ranks, alone, tmp_path, framework, kind):
    results = ranks.run(FUNCTIONS[framework], tmp_path, kind)
    assert [result["logged"] for result in results] == [[], []]
    assert [(result["step"], result["failures"]) for result in results] == [(STEPS, {})] * 2
    # under tensor parallelism all ranks have the same batches
    size = 2 if kind.startswith("tp") else 4
    check_record(recorded(tmp_path), alone(FUNCTIONS[framework], size))
    assert recorded(tmp_path)["losses"] == pytest.approx(mean_losses(results), rel=1e-6)
    if size == 4:
        assert results[0]["losses"] != pytest.approx(results[1]["losses"], rel=CLOSE)


def keep_norm(rank, trainer, patch):
    """Write the norm that Lightning's loggers have at the end."""
    import pytorch_lightning as pl

    class Keeping(pl.Callback):
        def on_train_end(self, trainer, pl_module):
            norm = trainer.callback_metrics.get("grad_norm")
            text = "none" if norm is None else str(norm.item())
            (Path(trainer.default_root_dir) / f"norm-{rank}").write_text(text, encoding="utf-8")

    trainer.callbacks.append(Keeping())


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_the_logged_norm_is_that_of_the_job_or_missing(ranks, tmp_path, kind):
    results = ranks.run(fit, tmp_path, kind, 2, (), (), keep_norm)
    assert [result["logged"] for result in results] == [[], []]
    norms = [(tmp_path / f"norm-{rank}").read_text(encoding="utf-8") for rank in (0, 1)]
    if kind == "fsdp":
        # a rank has the norm of its shards only
        assert norms == ["none", "none"]
    else:
        total = read_run(tmp_path / "run").steps["total_norm"].to_pylist()[-1]
        assert [float(norm) for norm in norms] == pytest.approx([total, total], rel=1e-6)


# --- failures


def hurry(patch):
    """Wait one second for other ranks instead of a minute."""
    from gradiometer.integrations import session
    from gradiometer.monitor import setup

    patch.setattr(setup, "TIMEOUT", 1.0)
    patch.setattr(session, "_MOMENT", 1.0)
    patch.setattr(session, "_TIMEOUT", 3.0)


def break_one(rank, trainer, patch):
    """Make the monitor of the second rank fail at construction."""
    from gradiometer.monitor import monitored_run

    def broken(*args, **kwargs):
        msg = "out of telemetry"
        raise RuntimeError(msg)

    if rank == 1:
        patch.setattr(monitored_run, "Recorder", broken)


def forget_one(rank, trainer, patch):
    """Give the second rank no callback, and let the first wait for it briefly."""
    hurry(patch)
    if rank == 1:
        callbacks = getattr(trainer, "callback_handler", trainer).callbacks
        callbacks[:] = [callback for callback in callbacks if type(callback).__name__ != "MonitorCallback"]


def import_all(rank):
    """Import slow modules in advance: a rank would otherwise reach its timeout during the imports."""
    import pytorch_lightning  # noqa: F401
    from transformers import LlamaForCausalLM, Trainer  # noqa: F401

    from gradiometer.integrations import huggingface, lightning  # noqa: F401


@pytest.fixture
def lost_ranks():
    """Two processes that may lose one another; collectives time out soon."""
    with closing(RankPool(2, timeout=6.0)) as pool:
        pool.run(import_all)
        yield pool


def check_unwatched(results, warning):
    assert [result["global_step"] for result in results] == [STEPS] * 2
    (line,) = [line for result in results for line in result["logged"]]
    assert warning in line
    assert line.endswith("training continues without the monitor")


@pytest.mark.parametrize("framework", FUNCTIONS)
def test_where_one_rank_cannot_watch_none_does(ranks, tmp_path, framework):
    results = ranks.run(FUNCTIONS[framework], tmp_path, "ddp", 2, (), (), break_one)
    check_unwatched(results, "MonitorCallback: rank 1: RuntimeError: out of telemetry")


def test_where_one_rank_does_not_come_the_others_do_not_wait_for_ever(lost_ranks, tmp_path):
    results = lost_ranks.run(train, tmp_path, "ddp", 2, (), (), forget_one)
    check_unwatched(results, "rank 1 of 2 did not arrive within 1 s")


@pytest.mark.parametrize(("function", "kind"), [(train, "fsdp 1"), (fit, "FSDPStrategy")])
def test_what_has_neither_whole_gradients_nor_dtensors_is_refused_once(ranks, tmp_path, function, kind):
    results = ranks.run(function, tmp_path, kind)
    named = {"fsdp 1": "FSDP"}.get(kind, kind)
    assert [result["global_step"] for result in results] == [STEPS] * 2
    (line,) = results[0]["logged"]
    assert line.startswith(f"MonitorCallback: with {named}, ranks have neither full gradients nor DTensors")
    assert results[1]["logged"] == []
    assert not (tmp_path / "run").exists()


def fail_one(rank, trainer, patch):
    """Make the third batch fail to load on the second rank."""
    import pytorch_lightning as pl

    seen = []

    def before(*args, **kwargs):
        seen.append(1)
        if rank == 1 and len(seen) == 3:
            msg = "a bad disk"
            raise OSError(msg)

    if hasattr(trainer, "callback_handler"):
        training_step = trainer.training_step
        trainer.training_step = lambda *args, **kwargs: before() or training_step(*args, **kwargs)
    else:
        callback = pl.Callback()
        callback.on_train_batch_start = before
        trainer.callbacks.append(callback)


@pytest.mark.parametrize("framework", ["transformers", pytest.param("lightning", marks=pytest.mark.deep)])
def test_an_exception_on_one_rank_keeps_no_other_waiting_for_us(lost_ranks, tmp_path, framework):
    # the first rank waits in DDP for the second, until Gloo times out
    function = FUNCTIONS[framework]
    outcomes = lost_ranks.outcomes(function, tmp_path, "ddp", 2, (), (), fail_one, timeout=45.0)
    assert [failed for failed, _ in outcomes] == [True, True]
    assert "OSError: a bad disk" in outcomes[1][1]
    assert "RuntimeError" in outcomes[0][1]
    run = read_run(tmp_path / "run")
    assert run.steps["step"].to_pylist() == [0, 1]
    assert run.blackbox is not None


@pytest.mark.parametrize("framework", FUNCTIONS)
def test_each_rank_by_itself(ranks, tmp_path, framework):
    results = ranks.run(FUNCTIONS[framework], tmp_path, "ddp", 2, (), {"ranks": False})
    for rank, result in enumerate(results):
        run = read_run(tmp_path / "run" / f"rank-{rank:05}")
        assert run.steps["step"].to_pylist() == list(range(STEPS))
        assert run.steps["loss"].to_pylist() == pytest.approx(result["losses"], rel=1e-6)
        assert (result["logged"], result["failures"]) == ([], {})


def test_an_engine_that_trains_other_parameters_is_known_by_its_name():
    class DeepSpeedEngine(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Linear(2, 1)

    assert not has_whole_gradients(DeepSpeedEngine(), sharded=False)
    assert has_whole_gradients(nn.Linear(2, 1), sharded=False)
    assert not has_whole_gradients(nn.Linear(2, 1), sharded=True)


def watch_dtensors(rank, folder):
    """Watch a sharded model with one parameter in the optimizer, and a loss that is a partial sum."""
    from torch.distributed.tensor import DTensor, Partial

    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    torch.distributed.fsdp.fully_shard(model, mesh=mesh)
    logged = []
    with quiet(logged):
        session = Session("it", {"run_dir": folder / "run", "rules": ()})
        session.begin(model, scaler=None, step=5, state=None)
        model(torch.ones(2, 4)).sum().backward()
        session.record(only=[model[0].weight])
        session.add_loss(DTensor.from_local(torch.tensor(1.0 + rank), mesh, [Partial()]))
        session.advance()
        session.end()
    return logged, session.monitor.failures, model[0].weight.grad.full_tensor().norm().item()


def test_of_some_dtensors_the_whole_ones_are_recorded_and_a_loss_is_added_up(ranks, tmp_path):
    results = ranks.run(watch_dtensors, tmp_path)
    assert [result[:2] for result in results] == [([], {})] * 2
    (record,) = read_run(tmp_path / "run").records()
    assert (record.step, record.loss) == (5, 3.0)
    assert record.value("numel").tolist() == [12, 0, 0, 0]
    assert record.total() == pytest.approx(results[0][2], rel=1e-6)


def forget_the_state(rank, trainer, patch):
    """Let the second rank, on another disk, have no monitor state in its checkpoint."""
    from gradiometer.integrations import huggingface

    if rank == 1:
        patch.setattr(huggingface.MonitorCallback, "_load", lambda *_: None)


@pytest.mark.parametrize("prepare", [None, forget_the_state])
def test_transformers_resumes_from_what_the_first_rank_remembers(ranks, tmp_path, prepare):
    rules = {"rules": (Counter(),)}
    saving = {"save_strategy": "steps", "save_steps": 2}
    ranks.run(train, tmp_path, "ddp", 2, saving, rules | {"every": 2})
    (state,) = (tmp_path / "out" / "checkpoint-2").glob("gradiometer*")
    assert torch.load(state, weights_only=True)["step"] == 2
    whole = recorded(tmp_path)
    (tmp_path / "run").rename(tmp_path / "first run")
    results = ranks.run(train, tmp_path, "ddp", 2, (), rules, prepare, str(tmp_path / "out/checkpoint-2"))
    assert [(result["step"], result["failures"], result["logged"]) for result in results] == [(3, {}, [])] * 2
    assert [result["every"] for result in results] == [2, 2]
    assert [result["seen"] for result in results] == [[3], [0]]
    again = recorded(tmp_path)
    assert again["steps"] == [2]
    assert again["totals"] == pytest.approx(whole["totals"][2:], rel=CLOSE)


def save(rank, trainer, patch):
    import pytorch_lightning as pl

    folder = Path(trainer.default_root_dir) / "out"
    saving = pl.callbacks.ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    trainer.callbacks.append(saving)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_lightning_resumes_from_what_the_first_rank_remembers(ranks, tmp_path, kind):
    ranks.run(fit, tmp_path, kind, 2, (), {"rules": (Counter(),)}, save)
    (tmp_path / "run").rename(tmp_path / "first run")
    checkpoint = str(tmp_path / "out" / "step=2.ckpt")
    results = ranks.run(fit, tmp_path, kind, 2, (), {"rules": (Counter(),)}, None, checkpoint)
    assert [(result["step"], result["failures"], result["logged"]) for result in results] == [(3, {}, [])] * 2
    assert [result["seen"] for result in results] == [[3], [0]]
    assert recorded(tmp_path)["steps"] == [2]


def run_the_page(rank, folder):
    from support.pages import blocks, sections

    page = "docs/how-to/hugging-face.md"
    logged = []
    with quiet(logged) as patch:
        patch.chdir(folder)
        reset_accelerate()
        scope = {}
        for code in (blocks(page)[0], *sections(page)["Accelerate"]):
            exec(code, scope)  # noqa: S102 the page's own code
    return logged, scope["monitor"].failures


def test_what_the_page_says_of_accelerate_is_the_same_on_every_rank(ranks, tmp_path):
    assert ranks.run(run_the_page, tmp_path) == [([], {})] * 2
    run = read_run(tmp_path / "runs/accelerate")
    # each rank gets half of the 8 batches, two per step
    assert run.steps["step"].to_pylist() == [0, 1]


SCRIPT = """
import json, os, sys
import test_ranks_integrations as tests

if __name__ == "__main__":
    rank, (folder, name) = int(os.environ["RANK"]), sys.argv[1:]
    found = tests.FUNCTIONS[name](rank, f"{folder}/{name}", "ddp")
    with open(f"{folder}/{rank}.json", "w") as file:
        json.dump(found, file)
"""


@pytest.mark.parametrize("framework", ["transformers", pytest.param("lightning", marks=pytest.mark.deep)])
def test_a_job_of_torchrun(tmp_path, alone, framework):
    """The framework makes the process groups, and they end with the job."""
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    torchrun(script, str(tmp_path), framework)
    result = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [(r["step"], r["failures"], r["logged"]) for r in result] == [(STEPS, {}, [])] * 2
    check_record(recorded(tmp_path / framework), alone(FUNCTIONS[framework], 4))
