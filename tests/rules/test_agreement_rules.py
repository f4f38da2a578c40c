"""Rules about micro-batches and ranks: simulated jobs of many ranks, and monitors of one process."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from torch import nn

import gradiometer as gm
from gradiometer.control.gradient_cosines import cosines_of
from gradiometer.distributed import RankError
from gradiometer.recorder import AgreementLook, Catalog, ModelState, StepRecord
from gradiometer.rules import DisagreeingRank, NotAveraged, SameData, Severity, default_rules
from support.watching import Sink

F64 = torch.float64
CATALOG = Catalog.of(("a.w", "a.b", "c.w"), ((2,),) * 3, ("float32",) * 3)
K = 64


def record_of(looks, step):
    return StepRecord(step, 0.0, {}, CATALOG, model=ModelState((), agreements=tuple(looks)))


def checked(rule, looks):
    """Return the findings after each look."""
    return [list(rule.check(record_of(looks[max(0, i - 31) : i + 1], i))) for i in range(len(looks))]


def simulated(gradients, step):
    """Return the look of a step from the projections of each rank, ``(R, k)``."""
    nothing = torch.full((64, 1, K), math.nan, dtype=F64)
    none = torch.zeros(0, dtype=torch.bool)
    found = cosines_of(("total",), torch.zeros((), dtype=F64), nothing, gradients.unsqueeze(1), none)
    return AgreementLook(
        step, K, rank_twins=tuple(found.rank_twins.tolist()), rank_cosines=tuple(found.rank_cosines.tolist())
    )


def job(ranks, cosine, seed, steps=40, change=None):
    """Return looks of a job whose ranks have this cosine with each other, with a common part that moves."""
    generator = torch.Generator().manual_seed(seed)
    common, looks = torch.randn(K, generator=generator, dtype=F64), []
    for step in range(steps):
        common = 0.95 * common + 0.31 * torch.randn(K, generator=generator, dtype=F64)
        own = torch.randn(ranks, K, generator=generator, dtype=F64)
        gradients = math.sqrt(cosine) * common + math.sqrt(1 - cosine) * own
        looks.append(simulated(gradients if change is None else change(gradients, step), step))
    return looks


@pytest.mark.parametrize("cosine", [0.0, 0.05, 0.5, 0.95])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 64, 1024])
def test_healthy_jobs_have_no_finding(ranks, cosine):
    for seed in range(5 if ranks < 1024 else 1):
        looks = job(ranks, cosine, seed)
        for rule in (SameData(), DisagreeingRank(), NotAveraged()):
            assert not any(checked(rule, looks))


def test_ranks_of_different_difficulty_are_no_finding():
    """Half of the ranks have data of another domain."""

    def domains(gradients, _):
        gradients[::2] += 1.5 * torch.randn(len(gradients[::2]), K, dtype=F64)
        return gradients

    torch.manual_seed(0)
    for seed in range(5):
        assert not any(checked(DisagreeingRank(), job(8, 0.7, seed, change=domains)))


@pytest.mark.parametrize("ranks", [3, 8, 64])
def test_a_rank_that_disagrees_is_found_after_ten_steps(ranks):
    def unrelated(gradients, step):
        gradients[2] = torch.randn(K, generator=torch.Generator().manual_seed(step), dtype=F64)
        return gradients

    found = checked(DisagreeingRank(), job(ranks, 0.8, 1, change=unrelated))
    first = next(i for i, findings in enumerate(found) if findings)
    assert 9 <= first < 30
    (finding,) = found[first]
    assert finding.message.startswith("rank 2 disagrees with the other ranks: the gradient of rank 2 has ")
    assert finding.severity == Severity.WARNING
    assert finding.first_step <= first - 9
    assert finding.value < finding.threshold
    # it lasts
    assert all(found[first:])


def test_several_ranks_may_disagree_and_one_may_be_unknown():
    def two(gradients, step):
        gradients[[1, 4]] *= -1
        gradients[6] = math.nan
        if step == 20:
            gradients[:] = math.nan
        return gradients

    found = checked(DisagreeingRank(), job(8, 0.8, 1, change=two))
    (finding,) = found[-1]
    assert finding.message.startswith("ranks 1 and 4 disagree") or finding.message.startswith(
        "ranks 4 and 1 disagree"
    )


def test_a_rank_that_disagrees_in_a_few_steps_is_no_finding():
    def few(gradients, step):
        if step % 10 == 5:
            gradients[2] *= -3
        return gradients

    assert not any(checked(DisagreeingRank(), job(8, 0.8, 1, change=few)))


def test_equal_ranks_are_named_in_sets():
    def equal(gradients, _):
        gradients[4] = gradients[1]
        gradients[6] = gradients[5] * (1 + 1e-7)
        return gradients

    found = checked(SameData(), job(8, 0.5, 0, 5, equal))
    assert [len(findings) for findings in found] == [0, 0, 1, 1, 1]
    (finding,) = found[2]
    text = "ranks 1 and 4; ranks 5 and 6 get the same data: their gradients are equal, with cosine 1 and "
    assert finding.message == text + "equal norms, in 3 measured steps or more"
    assert (finding.first_step, finding.tensor) == (0, None)


def test_equal_ranks_that_change_are_no_finding():
    def equal(gradients, step):
        gradients[step % 3] = gradients[3]
        return gradients

    assert not any(checked(SameData(), job(4, 0.5, 0, 12, equal)))


def test_all_ranks_may_be_equal():
    looks = [AgreementLook(i, K, rank_twins=(0,) * 16, rank_cosines=(1.0,) * 16) for i in range(3)]
    ((finding,),) = [found for found in checked(SameData(), looks) if found]
    assert finding.message.startswith("all 16 ranks get the same data")
    looks = [AgreementLook(i, K, rank_twins=(0, 0), micro_batch_twins=(0, 1, 0)) for i in range(3)]
    ((finding,),) = [found for found in checked(SameData(), looks) if found]
    assert finding.message.startswith("ranks 0 and 1; micro-batches 0 and 2 get the same data")


def test_many_sets_are_counted():
    pairs = tuple(i // 2 * 2 for i in range(20))
    looks = [AgreementLook(i, K, micro_batch_twins=pairs) for i in range(3)]
    (finding,) = checked(SameData(), looks)[-1]
    assert "micro-batches 8 and 9; and 5 more sets get the same data" in finding.message
    looks = [AgreementLook(i, K, rank_twins=(0,) * 9 + (9,)) for i in range(3)]
    (finding,) = checked(SameData(), looks)[-1]
    assert finding.message.startswith("ranks 0, 1, 2, 3, 4 and 4 more get the same data")


def test_tensors_that_are_not_averaged_are_named():
    names = [("a.w", "a.b"), ("a.b", "a.w"), ("a.w", "a.b", "c.w"), ("a.w", "a.b"), (), ("a.w",)]
    looks = [AgreementLook(i, K, rank_twins=(0, 1), differing=each) for i, each in enumerate(names)]
    found = checked(NotAveraged(), looks)
    assert [len(findings) for findings in found] == [0, 0, 1, 1, 0, 0]
    (finding,) = found[2]
    assert finding.severity == Severity.ERROR
    said = "over the 2 ranks: after backward(), those of a (2 tensors) differ between ranks"
    assert said in finding.message


@pytest.mark.parametrize("rule", [SameData, DisagreeingRank, NotAveraged])
def test_a_history_can_be_saved(rule):
    def broken(gradients, _):
        gradients[2], gradients[1] = -gradients[3], gradients[0]
        return gradients

    looks = [look._replace(differing=("a.w",)) for look in job(5, 0.8, 0, 30, broken)]
    whole, first, second = rule(), rule(), rule()
    wanted = [[str(one) for one in findings] for findings in checked(whole, looks)]
    assert wanted[-1]
    half = [[str(one) for one in findings] for findings in checked(first, looks[:12])]
    second.load_state_dict(first.state_dict())
    rest = [
        [str(one) for one in second.check(record_of(looks[i - 5 : i + 1], i))] for i in range(12, len(looks))
    ]
    assert half + rest == wanted
    with pytest.raises(ValueError, match="does not fit"):
        second.load_state_dict({**first.state_dict(), "last": "1"})


def test_looks_count_once_and_late_ones_too():
    rule = SameData()
    looks = [AgreementLook(i, K, rank_twins=(0, 0)) for i in range(3)]
    assert not rule.check(StepRecord(0, 0.0, {}, CATALOG))
    assert not rule.check(record_of(looks[:1], 1))
    assert not rule.check(record_of(looks[:1], 2))
    assert not rule.check(record_of(looks[:1], 3))
    # two that arrive at once
    assert len(rule.check(record_of(looks, 4))) == 1
    assert not rule.check(record_of(looks, 5))


def test_patience_is_checked_and_they_are_default_rules():
    with pytest.raises(ValueError, match="patience=0"):
        SameData(patience=0)
    assert {SameData, DisagreeingRank, NotAveraged} <= {type(rule) for rule in default_rules()}


# with a monitor, in one process


def trained(steps, same, **options):
    torch.manual_seed(0)
    model, sink = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)), Sink()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    agreement = gm.GradientAgreement(model, **options)
    with gm.watch(model, optimizer, agreement=agreement, rules=[SameData()], sinks=[sink]) as monitor:
        for _ in range(steps):
            batches = [torch.randn(8, 6) for _ in range(3)]
            for i in (0, 1, 1) if same else (0, 1, 2):
                x = batches[i]
                (nn.functional.mse_loss(model(x), x[:, :2]) / 3).backward()
                agreement.add()
            optimizer.step()
            optimizer.zero_grad()
    assert monitor.failures == {}
    return monitor.findings, sink


@pytest.mark.parametrize("same", [False, True])
def test_micro_batches_with_the_same_data(same):
    findings, sink = trained(30, same)
    cosines = sink.scalars("micro_batch_cosine")
    assert all(-1 <= x <= 1 for x in cosines)
    assert "rank_cosine" not in sink.records[0].scalars
    messages = [finding.message for finding in findings]
    assert len(messages) == same
    assert all(message.startswith("micro-batches 1 and 2 get the same data") for message in messages)


def test_scalars_of_groups_in_due_steps():
    _, sink = trained(5, same=False, groups={"first": r"^0\."}, every=2)
    names = [sorted(name for name in record.scalars if "cosine" in name) for record in sink.records]
    assert names == [["micro_batch_cosine", "micro_batch_cosine.first"], []] * 2 + names[:1]


def test_a_monitor_in_a_loop_of_your_own():
    model = nn.Linear(3, 1)
    sink, agreement = Sink(), gm.GradientAgreement(model)
    with gm.Monitor(model, agreement=agreement, sinks=[sink], rules=()) as monitor:
        for _ in range(2):
            model(torch.ones(2, 3)).sum().backward()
            agreement.add()
            model(-torch.ones(2, 3)).square().sum().backward()
            agreement.add()
            monitor.record()
            model.zero_grad()
            # a value of one's own has precedence
            monitor.advance(micro_batch_cosine=7.0)
        monitor.advance()
    assert [record.scalars["micro_batch_cosine"] for record in sink.records[:2]] == [7.0, 7.0]
    assert math.isnan(sink.records[2].scalars["micro_batch_cosine"])
    assert [look.step for look in sink.records[2].model.agreements] == [0, 1, 2]


def test_what_is_no_agreement_is_refused():
    with pytest.raises(TypeError, match=r"Monitor\(agreement=...\): expected gm.GradientAgreement"):
        gm.Monitor(nn.Linear(2, 1), agreement=True)


def test_a_failure_does_not_stop_training(monkeypatch, caplog):
    model = nn.Linear(3, 1)
    agreement = gm.GradientAgreement(model)
    calls = []

    def late():
        calls.append(1)
        raise RankError("rank 1 did not respond")

    monkeypatch.setattr(agreement, "step", late)
    with caplog.at_level(logging.WARNING), gm.Monitor(model, agreement=agreement, rules=()) as monitor:
        for _ in range(3):
            monitor.advance()
    # it waits for a rank once
    assert calls == [1]
    assert monitor.failures == {"agreement": 1}
    assert "rank 1 did not respond" in caplog.text


@pytest.mark.usefixtures("_dynamo")
def test_a_compiled_step_records_the_averaged_gradients():
    torch.manual_seed(0)
    model, sink = nn.Linear(3, 1), Sink()
    agreement = gm.GradientAgreement(model, ranks=gm.Ranks(model))
    with gm.Monitor(model, agreement=agreement, sinks=[sink], rules=()) as monitor:

        def step(x):
            for p in model.parameters():
                p.grad = None
            model(x).sum().backward()
            agreement.add()
            monitor.record()

        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        for _ in range(3):
            compiled(torch.ones(2, 3))
            assert agreement.averaged.any(dim=1).all()
            monitor.advance()
            assert not agreement.averaged.any()
    assert monitor.failures == {}
    looks = sink.records[-1].model.agreements
    assert [look.step for look in looks] == [0, 1, 2]
    assert {(look.rank_twins, look.differing) for look in looks} == {((0,), ())}
