"""The gradient noise scale in several processes: the same bits on all ranks, and the right value."""

from __future__ import annotations

import contextlib
import math
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradiometer as gm
from support.noise_oracle import least_squares
from support.pages import blocks
from support.rank_models import Collectives, mesh_of
from support.rank_pool import pool_of, scripted

F64 = torch.float64
BATCH, STEPS = 4, 3
GROUPS = {"first": r"^0\.", "second": r"^2\.", "all": ""}
DECAY = 0.5
PAGE = "docs/how-to/noise-scale.md"


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).to(F64)


def data(size, micro_batches):
    """Return each step's inputs, ``(steps, ranks, micro-batches, examples, 3)``."""
    generator = torch.Generator().manual_seed(1)
    # a mean, so that the gradient is clear
    return 1 + torch.randn(STEPS, size, micro_batches, BATCH, 3, dtype=F64, generator=generator)


def loss_of(model, x):
    return (model(x) - 2).square().mean()


def running_sums(model, inputs):
    """Return the gradient of each group after each micro-batch of one rank, not divided by their number."""
    total, found = None, []
    for x in inputs:
        grads = [grad.flatten() for grad in torch.autograd.grad(loss_of(model, x), model.parameters())]
        total = grads if total is None else [a + b for a, b in zip(total, grads, strict=True)]
        found.append([torch.cat(total[:2]), torch.cat(total[2:]), torch.cat(total)])
    return found


def by_hand(size, micro_batches, own, steps=STEPS):
    """Return the noise scale of each group after each step; None keeps the averages of a step."""
    model, scales = model_of(), []
    weight, mean = 0.0, torch.zeros(3, 2, dtype=F64)
    for inputs in data(size, micro_batches)[:steps]:
        runs = [running_sums(model, of_rank) for of_rank in inputs]
        estimates = []
        for group in range(3):
            squares = [sum(run[k][group].square().sum() for run in runs) / size for k in range(own)]
            squares.append(sum(run[-1][group] for run in runs).square().sum())
            signal, noise = least_squares(torch.stack(squares), own, size, micro_batches)
            estimates.append(torch.stack([signal, noise * BATCH]))
        weight = DECAY * weight + 1 - DECAY
        mean = mean + (1 - DECAY) / weight * (torch.stack(estimates) - mean)
        scales.append((mean[:, 1] / mean[:, 0]).tolist())
    return scales


def close(found, expected):
    # the system's condition number is below 1e4 n², and its solution not more accurate
    assert all(map(math.isfinite, expected))
    assert found == pytest.approx(expected, rel=1e-9)


def trained(rank, size, micro_batches, *, hook, reduce=False, compiled=False, mean=True):
    """Return the noise scale after each step of a DDP model, its state, and the gradients."""
    # several buckets, from the second step on
    model = DistributedDataParallel(model_of(), bucket_cap_mb=1e-4)
    ranks = gm.Ranks(model)
    options = {"decay": DECAY, "ranks": ranks, "reduction": "mean" if mean else "sum"}
    noise, total = gm.NoiseScale(BATCH, groups=GROUPS, **options), gm.NoiseScale(BATCH, **options)
    if hook:
        noise.register_comm_hook(model)
    step = torch.compile(noise.step, fullgraph=True, backend="aot_eager") if compiled else noise.step
    scales, totals, gradients = [], [], []
    for inputs in data(size, micro_batches)[:, rank]:
        for k, x in enumerate(inputs):
            with contextlib.nullcontext() if k == micro_batches - 1 else model.no_sync():
                (loss_of(model, x) / (micro_batches if mean else 1)).backward()
            stats = gm.collect_grads(model, reduce=ranks if reduce else False)
            noise.add(stats)
            if not hook:
                total.add(stats)
        scales.append(step().tolist())
        totals.append(scales[-1][2] if hook else total.step().item())
        gradients.append([p.grad.clone() for p in model.parameters()])
        model.zero_grad()
    return scales, totals, noise.average.state.tolist(), gradients


WAYS = [
    # (micro-batches, hook): norms of this rank's gradient before each all-reduce
    pytest.param(1, True, id="hook"),
    pytest.param(3, False, id="no_sync"),
    pytest.param(3, True, id="no_sync-hook"),
]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("micro_batches", "hook"), WAYS)
def test_under_ddp_it_is_the_value_computed_by_hand(request, size, micro_batches, hook):
    own = micro_batches if hook else micro_batches - 1
    expected = by_hand(size, micro_batches, own)
    answers = pool_of(request, size).run(under_ddp, size, micro_batches, hook)
    for scales, totals, state in answers:
        for found, wanted in zip(scales, expected, strict=True):
            close(found, wanted)
        assert totals == pytest.approx([row[2] for row in scales], rel=1e-9)
        # bit for bit on all ranks
        assert (scales, state) == (answers[0][0], answers[0][2])


def under_ddp(rank, size, micro_batches, hook):
    return trained(rank, size, micro_batches, hook=hook)[:3]


def test_merged_statistics_and_a_loss_that_is_not_divided_give_the_same(two_ranks):
    for plain, others in two_ranks.run(under_ddp_in_other_ways):
        for scales in others:
            for found, wanted in zip(scales, plain, strict=True):
                close(found, wanted)


def under_ddp_in_other_ways(rank):
    plain = trained(rank, 2, 3, hook=False)[0]
    # the statistics of this rank are used, not those of the first one's copies
    merged = trained(rank, 2, 3, hook=False, reduce=True)[0]
    undivided = trained(rank, 2, 3, hook=False, mean=False)[0]
    return plain, [merged, undivided, trained(rank, 2, 3, hook=False, compiled=True)[0]]


def test_a_hook_changes_no_gradient(two_ranks):
    assert two_ranks.run(gradients_with_and_without_a_hook) == [True, True]


def gradients_with_and_without_a_hook(rank):
    bare, hooked = (trained(rank, 2, 2, hook=hook)[3] for hook in (False, True))
    pairs = [pair for steps in zip(bare, hooked, strict=True) for pair in zip(*steps, strict=True)]
    return all(torch.equal(a, b) for a, b in pairs)


def test_a_given_hook_runs_after_the_measurement(two_ranks):
    for calls, equal, scale in two_ranks.run(with_a_given_hook):
        # several buckets, from the second backward on
        assert calls > 2
        assert equal
        assert math.isfinite(scale)


def with_a_given_hook(rank):
    calls = []

    def halved(state, bucket):
        calls.append(state)
        return default_hooks.fp16_compress_hook(None, bucket)

    grads = []
    for ours in (False, True):
        model = DistributedDataParallel(model_of(), bucket_cap_mb=1e-4)
        noise = gm.NoiseScale(BATCH, ranks=gm.Ranks(model))
        if ours:
            noise.register_comm_hook(model, "state", halved)
        else:
            model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        for inputs in data(2, 1)[:2, rank]:
            model.zero_grad()
            noise.reset_()
            loss_of(model, inputs[0]).backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    noise.add(gm.collect_grads(model))
    equal = all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert set(calls) == {"state"}
    return len(calls), equal, noise.step().item()


def test_a_hook_measures_unscaled_gradients(two_ranks):
    for found, expected in two_ranks.run(with_a_grad_scaler):
        # the scale is a power of two
        assert found == expected


def with_a_grad_scaler(rank):
    scales = []
    for scaled in (False, True):
        model = DistributedDataParallel(model_of())
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
        noise = gm.NoiseScale(BATCH, ranks=gm.Ranks(model))
        noise.register_comm_hook(model, scaler=scaler)
        # nothing was measured: no estimate
        noise.step()
        assert noise.steps == 0
        # as left by a backward that failed after its first bucket
        noise.sums[-1].fill_(7.0 if scaled else 0.0)
        scaler.scale(loss_of(model, data(2, 1)[0, rank, 0])).backward()
        noise.add(gm.collect_grads(model, inv_scale=gm.inverse_scale(scaler)))
        scales.append(noise.step().item())
    assert math.isfinite(scales[0])
    return scales


@pytest.mark.parametrize("what", ["nan", "numbers", "one"])
def test_a_step_without_an_estimate_changes_nothing_on_any_rank(two_ranks, what):
    answers = two_ranks.run(without_an_estimate, what)
    for before, after, value in answers:
        assert before == after
        assert math.isfinite(value)
    assert answers[0] == answers[1]


def without_an_estimate(rank, what):
    model = model_of()
    noise = gm.NoiseScale(BATCH, ranks=gm.Ranks(model))

    def add(square):
        noise.add(gm.collect([torch.tensor([square], dtype=F64).sqrt()]))

    for square in (3.0 + rank, 10.0):
        add(square)
    noise.step()
    before = noise.average.state.tolist()
    if what == "nan" and rank == 1:
        # the average over the ranks may still be finite, as with a hook that drops NaN
        add(math.nan)
    elif what != "one":
        add(1.0)
    if what == "numbers" and rank == 1:
        add(2.0)
    add(4.0)
    value = noise.step().item()
    return before, noise.average.state.tolist(), value


def test_a_step_takes_one_collective(two_ranks):
    for calls in two_ranks.run(collectives_of_a_step):
        assert [shapes for _, shapes in calls] == [[((6, 3), F64)]]


def collectives_of_a_step(rank):
    noise = gm.NoiseScale(BATCH, groups=GROUPS, ranks=gm.Ranks(model_of()))
    with Collectives() as seen:
        noise.add(gm.collect([("0.w", torch.ones(2, dtype=F64) + rank)]))
        noise.add(gm.collect([("0.w", torch.ones(2, dtype=F64))]))
        noise.step()
    return seen.calls


@pytest.mark.parametrize("size", [2, 4])
def test_under_fsdp2_it_comes_from_the_sums_over_all_ranks(request, size):
    """Micro-batches of all ranks together; each backward reduces."""
    inputs = data(size, 3).transpose(1, 2).reshape(STEPS, 1, 3, size * BATCH, 3)
    model, expected, weight, mean = model_of(), [], 0.0, torch.zeros(2, dtype=F64)
    for of_step in inputs:
        runs = running_sums(model, of_step[0])
        squares = torch.stack([run[2].square().sum() for run in runs])
        estimate = least_squares(squares, 2, 1, 3) * torch.tensor([1.0, size * BATCH])
        weight = DECAY * weight + 1 - DECAY
        mean = mean + (1 - DECAY) / weight * (estimate - mean)
        expected.append((mean[1] / mean[0]).item())
    answers = pool_of(request, size).run(under_fsdp, size)
    for scales in answers:
        close(scales, expected)
        assert scales == answers[0]


def under_fsdp(rank, size):
    model = model_of()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh_of((size,), ("dp_shard",)))
    fully_shard(model, mesh=mesh_of((size,), ("dp_shard",)))
    ranks = gm.Ranks(model)
    noise, refusing = gm.NoiseScale(size * BATCH, decay=DECAY), gm.NoiseScale(BATCH, ranks=ranks)
    scales = []
    for inputs in data(size, 3)[:, rank]:
        for x in inputs:
            (loss_of(model, x) / 3).backward()
            noise.add(gm.collect_grads(model, reduce=ranks))
        scales.append(noise.step().item())
        refuses_shards(model, ranks, noise, refusing)
        model.zero_grad()
    # without a reduction, there is no gradient after the first micro-batch, and so no estimate
    for x, is_last in zip(data(size, 2)[0, rank], (False, True), strict=True):
        model.set_requires_gradient_sync(is_last)
        (loss_of(model, x) / 2).backward()
        noise.add(gm.collect_grads(model, reduce=ranks))
    assert noise.step().item() == scales[-1]
    assert noise.steps == STEPS
    return scales


def test_a_copy_that_does_not_count_may_have_the_nan(two_ranks):
    for steps in two_ranks.run(with_a_nan_in_the_second_copy):
        assert steps == 0


def with_a_nan_in_the_second_copy(rank):
    model = model_of()
    ranks, noise = gm.Ranks(model), gm.NoiseScale(BATCH, groups=GROUPS)
    for x in data(1, 2)[0, 0]:
        loss_of(model, x).backward()
        if rank == 1:
            model[0].weight.grad[0, 0] = math.nan
        noise.add(gm.collect_grads(model, reduce=ranks))
    noise.step()
    assert noise.steps[1] == 1
    return noise.steps[0].item() + noise.steps[2].item()


def refuses_shards(model, ranks, noise, with_ranks):
    stats = gm.collect_grads(model)
    said = r"this rank's shards only; add those of all ranks, gm.collect_grads"
    with pytest.raises(ValueError, match=said):
        noise.add(stats)
    said = r"of shards or groups; with FSDP2 .* without ranks=, accumulate"
    for given in (stats, gm.collect_grads(model, reduce=ranks)):
        with pytest.raises(ValueError, match=said):
            with_ranks.add(given)
    with pytest.raises(TypeError, match=r"expected a DistributedDataParallel model, got .*; with FSDP2"):
        with_ranks.register_comm_hook(model)


def test_groups_of_all_ranks_are_refused_with_ranks(two_ranks):
    two_ranks.run(refuses_groups)


def refuses_groups(rank):
    model = model_of()
    loss_of(model, data(2, 1)[0, rank, 0]).backward()
    ranks = gm.Ranks(model)
    grouped = gm.collect_grads(model, reduce=ranks).group({"all": ""})
    with pytest.raises(ValueError, match="of shards or groups"):
        gm.NoiseScale(BATCH, ranks=ranks).add(grouped)
    # a barrier, so that no rank ends before the others
    dist.barrier()


# the page


def test_the_file_of_the_page_runs(tmp_path):
    path = tmp_path / "file.py"
    path.write_text(blocks(PAGE)[-2], encoding="utf-8")
    printed = sorted(scripted(path).splitlines())
    assert len(printed) == 2
    first = re.fullmatch(r"rank 0: noise scale (\d+\.\d+)", printed[0])
    assert printed[1] == f"rank 1: noise scale {first[1]}"


def test_the_function_of_the_page_runs(two_ranks):
    expected = [row[2] for row in by_hand(2, 3, 2)]
    for scales in two_ranks.run(accumulated_as_on_the_page):
        close(scales, expected)


def accumulated_as_on_the_page(rank):
    scope = {"gm": gm}
    exec(blocks(PAGE)[-1], scope)  # noqa: S102 the page's own code
    model = DistributedDataParallel(model_of())
    noise = gm.NoiseScale(BATCH, decay=DECAY, ranks=gm.Ranks(model))
    loss_fn, scales = (lambda y, target: (y - target).square().mean()), []
    for inputs in data(2, 3)[:, rank]:
        batches = [(x, 2.0) for x in inputs]
        scales.append(scope["accumulate"](model, noise, batches, loss_fn).item())
        model.zero_grad()
    return scales
