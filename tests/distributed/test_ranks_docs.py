"""The files in many-ranks.md and torchtitan.md run unchanged, and give the results on the pages.

They run in forked ranks with the environment that torchrun sets; it takes 15 seconds to start itself.
"""

from __future__ import annotations

import copy
import json
import re
import sys

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel

import gradiometer as gm
from gradiometer.distributed.global_plan import make_global_plan
from kernels_bench.distributed import bench
from kernels_bench.distributed.bench import CALLS
from kernels_bench.distributed.cost_model import job, members_of, nccl_us, payload, sent, simulate
from kernels_bench.distributed.processes import measure
from support.pages import ROOT, blocks
from support.rank_models import error_of
from support.rank_pool import scripted

pytest.importorskip("pyarrow")
read_run = pytest.importorskip("gradiometer.runs").read_run

PAGE = "docs/how-to/many-ranks.md"
TITAN = "docs/how-to/torchtitan.md"


def files():
    """Return the page's files by the title above each."""
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    found = {}
    for part in text.split("\n### ")[1:]:
        for code in re.findall(r"^```python\n(.*?)^```", part, flags=re.MULTILINE | re.DOTALL):
            assert code.startswith("import torch\n")
            found[part.splitlines()[0]] = code
    # the blocks before it need the package, see tests/integrations/test_torchtitan.py
    *_, found["torchtitan"] = blocks(TITAN)
    return found


def run(tmp_path, title):
    """Run a file as two ranks; return its output."""
    path = tmp_path / "file.py"
    path.write_text(files()[title], encoding="utf-8")
    return scripted(path)


def test_every_file_is_run_here():
    source = (ROOT / "tests/distributed/test_ranks_docs.py").read_text(encoding="utf-8")
    assert len(files()) == 6
    assert all(f'"{title}"' in source for title in files())


def test_data_parallelism(tmp_path):
    assert run(tmp_path, "torchrun, DDP") == "20 steps of 4 tensors by 2 ranks\n"
    recorded = read_run(tmp_path / "runs/ddp")
    losses = recorded.steps["loss"].to_pylist()
    assert losses[-1] < losses[0]
    assert recorded.findings == []
    assert recorded.blackbox is None


def test_fsdp(tmp_path):
    fault, norm = run(tmp_path, "FSDP2").splitlines()
    assert fault == "step 3: ['0.weight'] on rank 1, dp_shard 1 of 2"
    assert re.fullmatch(r"total norm of all ranks \d\.\d{3}", norm)


def test_tensor_parallelism(tmp_path):
    printed = run(tmp_path, "Tensor parallelism")
    # gradients that ranks share in every way, compared with those of one process
    model = torch.nn.Sequential()
    torch.manual_seed(0)
    model.add_module("norm", torch.nn.LayerNorm(16))
    model.add_module("up", torch.nn.Linear(16, 64))
    model.add_module("down", torch.nn.Linear(64, 16))
    model(torch.randn(4, 8, 16)).square().mean().backward()
    alone = gm.collect_grads(model).materialize()
    assert f"total norm {alone.total_norm:.3f}, clipped 0.100" in printed
    for row in alone.rows():
        (norm,) = re.findall(rf"^{row.name} +{row.numel:,} +(\S+) ", printed, flags=re.MULTILINE)
        # three digits, of a sum that is rounded in another order
        assert float(norm) == pytest.approx(row.norm, rel=6e-3), row.name


def test_a_pipeline(tmp_path):
    names, _, norm = run(tmp_path, "A pipeline of two stages").strip().partition(" total norm ")
    assert names.split(", ") == [f"layers.{i}.{kind}" for i in range(4) for kind in ("weight", "bias")]
    assert 0 < float(norm) < 10


def test_experts(tmp_path):
    # the first rank's experts got no token: the others are counted all the same, and no rank waits
    assert run(tmp_path, "Experts and other plain shards") == "64 of the router, 256 of the experts\n"


def test_a_loop_like_torchtitans(tmp_path):
    first, second = run(tmp_path, "torchtitan").splitlines()
    assert first.startswith("10 steps, ")
    assert first.rpartition(" ")[2] == second.rpartition(" ")[2]
    recorded = read_run(tmp_path / "runs/titan")
    expected = [f"{i}.{name}.weight" for i in range(3) for name in ("norm", "w1", "w2")]
    assert recorded.catalog.names == tuple(expected)
    assert set(recorded.catalog.parameters.shapes) == {(16,), (64, 16), (16, 64)}


def test_the_lines_between_them_run_in_one_process():
    scope = {"gm": gm, "model": torch.nn.Linear(2, 1)}
    scope["model"](torch.ones(1, 2)).sum().backward()
    sketches = [code for code in blocks(PAGE) if code not in files().values()]
    assert len(sketches) == 3
    for code in sketches:
        exec(code, scope)  # noqa: S102 the page's own code
    assert scope["report"].ranks == {}
    assert scope["differing"] == {}


def differ(rank):
    weights = {"w": torch.nn.Parameter(torch.zeros(4, 4 if rank else 8))}
    return error_of(lambda: gm.Ranks(weights))


def test_what_ranks_say_that_differ(two_ranks):
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    here, there = two_ranks.run(differ)
    assert here == there
    assert f"`{here}`" in text


def fsdp_1(_):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 63), torch.nn.Linear(63, 1))
    alone = copy.deepcopy(model)
    model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    ranks = gm.Ranks(model, shards={"": None})
    x = torch.randn(8, 16)
    for one in (model, alone):
        one(x).square().mean().backward()
    report = gm.collect_grads(model, reduce=ranks).materialize()
    assert [row.numel for row in report.rows()] == [p.numel() for p in alone.parameters()]
    assert report.total_norm == pytest.approx(gm.grad_norm(alone), rel=1e-6)


def test_fsdp_version_1_is_told_by_shards(two_ranks):
    two_ranks.run(fsdp_1)


# statements about scale


@pytest.mark.parametrize(("ranks", "tensors"), [(8, 100), (64, 30), (512, 64)])
def test_of_many_ranks_every_part_is_counted_once(ranks, tensors):
    members, shardings = members_of(ranks, tensors)
    plan = make_global_plan(members, shardings)
    assert (len(plan.members), len(plan.names)) == (ranks, tensors)
    counted = dict.fromkeys(plan.names, 0)
    for rank, member in enumerate(members):
        for name, counts in zip(shardings[member.digest].names, plan.counts(rank), strict=True):
            counted[name] += counts
    _, _, shards, tensor = job(ranks)
    for name, holding in zip(plan.names, plan.specs, strict=True):
        # norms are replicated over tensor parallelism
        assert counted[name] == shards * (1 if holding.placements[2] == "R" else tensor), name


def test_what_ranks_get_at_set_up():
    few, many = simulate(64, 50), simulate(4096, 50)
    # some bytes per rank, and a layout for each of 8 stages
    assert few["member_bytes"] < many["member_bytes"] < 4096 * 10
    assert many["shardings"] == 8
    assert many["layout_bytes"] < 8 * few["layout_bytes"]


def test_a_collective_on_paper():
    assert payload(17) == (17 * 56, 25 * 16)
    assert [sent(1000, ranks) for ranks in (2, 4, 1000)] == [1000, 1500, 1998]
    # twice as many nodes add one hop of a tree, up and down
    times = [nccl_us(56, ranks)[0] for ranks in (64, 128, 256)]
    assert times[1] - times[0] == pytest.approx(10.0)
    assert times[2] - times[1] == pytest.approx(10.0)
    assert nccl_us(10**9, 8)[1] == "ring Simple"


def test_what_is_sent_is_what_is_said():
    (row,) = measure(2, (8,), 2)
    ours = row["traffic"]["ours"]
    assert ours["collectives"] == 2
    assert ours["payload"] == sum(payload(8)) == 72 * 8 + 128
    if ours["received"] is not None:
        # Gloo's own messages come on top
        assert sent(ours["payload"], 2) < ours["received"] < sent(ours["payload"], 2) + 4096
    assert row["traffic"]["norms apart"]["collectives"] == row["traffic"]["gathered"]["collectives"] == 8
    assert row["traffic"]["pair"]["payload"] == ours["payload"]
    assert set(row["ms"]) == set(CALLS)


def test_the_script_prints_its_tables(capsys, monkeypatch, tmp_path):
    arguments = ["--parts", "setup,model", "--ranks", "8,64", "--tensors", "20", "--json"]
    monkeypatch.setattr(sys, "argv", ["bench", *arguments, str(tmp_path / "a.json")])
    bench.main()
    printed = capsys.readouterr().out
    assert sum(line.startswith("|-") for line in printed.splitlines()) == 2
    keys = {"command", "machine", "rounds", "setup", "model"}
    assert set(json.loads((tmp_path / "a.json").read_text())) == keys
    monkeypatch.setattr(sys, "argv", ["bench", "--processes", "3"])
    with pytest.raises(SystemExit, match=r"distributed\.bench: 3: --processes must be >= 2 and divide 64"):
        bench.main()
