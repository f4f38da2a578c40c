"""Each rule: a real run in which it fires, its message, and that its history can be saved."""

from __future__ import annotations

import copy
import io
import math
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from gradiometer import rules as all_rules
from gradiometer.columns import TENSORS
from gradiometer.recorder import Catalog, StepRecord
from gradiometer.rules import (
    Dead,
    Exploding,
    GroupRatio,
    LayerImbalance,
    LossSpike,
    NonFinite,
    NormSpike,
    UpdateRatio,
    Vanishing,
    default_rules,
)
from gradiometer.rules.finding import Finding, Severity
from gradiometer.rules.history import History
from gradiometer.rules.ledger import Ledger
from gradiometer.rules.protocol import Rule
from support.pages import blocks, text
from support.real_runs import Run, batches, perceptron
from support.recording import record_of

pytestmark = pytest.mark.usefixtures("_one_thread")


def run_of(model=None, rules=None, lr=0.05, **options):
    model = perceptron() if model is None else model
    return Run(model, batches(), torch.optim.SGD(model.parameters(), lr=lr), rules, **options)


def by_rule(findings):
    return {found.rule: found for found in reversed(findings)}


def put(model, name, value, at):
    def before(step):
        if step == at:
            model.get_parameter(name).grad.view(-1)[0] = value

    return before


CATALOG = Catalog.of(tuple(f"l.{i}.w" for i in range(1000)), ((8, 8),) * 1000, ("float32",) * 1000)


def synthetic(step, norms, n_nan=0, scalars=None, **fields):
    columns = torch.zeros(1000, TENSORS.width, dtype=torch.float64)
    for name, value in (("numel", 64.0), ("sumsq", norms**2), ("n_nan", n_nan)):
        columns[:, TENSORS.index[name]] = value
    return record_of(step, CATALOG, {"grads": columns}, scalars or {"loss": 1.0}, **fields)


def test_an_inf_is_one_finding_that_names_the_culprit_and_histories_stay_clean():
    run = run_of()
    findings = run.go(60, put(run.model, "3.weight", float("inf"), 40))
    assert len(findings) == 1, findings
    found = findings[0]
    assert (found.rule, found.tensor, found.kind) == ("nonfinite", "3.weight", "grads")
    assert (found.first_step, found.last_step, found.severity) == (40, 40, Severity.WARNING)
    assert "3.weight.grad, 1 Inf of 4,096" in found.message


def test_a_nan_that_is_not_skipped_is_an_error_and_stays_one_finding():
    run = run_of(skip_nonfinite=False)
    run.go(60, put(run.model, "3.weight", float("nan"), 40))
    (found,) = run.ledger.findings
    assert (found.tensor, found.first_step, found.last_step) == ("3.weight", 40, 59)
    assert (found.severity, found.count) == (Severity.ERROR, 20)


def test_a_thousand_nans_are_one_finding_and_skips_in_a_row_become_an_error():
    rule = NonFinite()
    found = [list(rule.check(synthetic(i, torch.ones(1000), 3, skipped=True))) for i in range(12)]
    assert [len(seen) for seen in found] == [1] * 12
    assert [seen[0].severity for seen in found] == [Severity.WARNING] * 9 + [Severity.ERROR] * 3
    assert "all 999 others" in found[0][0].message
    assert not list(rule.check(synthetic(12, torch.ones(1000))))
    (alone,) = rule.check(StepRecord(13, 0.0, {"loss": math.nan}, CATALOG))
    assert alone.message == "the loss is nan"
    assert alone.tensor is None


def test_a_learning_rate_that_is_far_too_high_explodes():
    run = run_of()
    run.go(40)
    assert run.ledger.findings == []
    run.optimizer.param_groups[0]["lr"] = 50.0
    found = by_rule(run.go(6))
    assert {"norm_spike", "loss_spike", "exploding"} <= set(found)
    for name in ("norm_spike", "loss_spike", "exploding"):
        assert found[name].first_step in {41, 42}
        assert found[name].severity == Severity.WARNING
        assert found[name].value > found[name].threshold
        assert re.search(r"[\d,.e+]+ times its usual \S+", found[name].message)
    assert found["exploding"].message.startswith(f"{found['exploding'].tensor}.grad: norm ")


def test_a_threshold_that_is_passed_is_info_unless_the_norm_has_risen():
    rule = Exploding(most=3)
    norms = torch.full((1000,), 1.0, dtype=torch.float64)
    norms[7] = 300.0
    first = list(rule.check(synthetic(0, norms)))
    assert [(f.tensor, f.severity, f.threshold) for f in first] == [("l.7.w", Severity.INFO, 100.0)]
    for step in range(1, 60):
        # a summed loss has large gradients in every step
        (later,) = rule.check(synthetic(step, norms))
        assert later.severity == Severity.INFO
    norms[7] = 4000.0
    (risen,) = rule.check(synthetic(60, norms))
    assert (risen.tensor, risen.severity) == ("l.7.w", Severity.WARNING)
    # norms that rise in the first steps are not the start of a healthy run
    rising = Exploding()
    for step in range(5):
        seen = list(rising.check(synthetic(step, torch.full((1000,), 10.0 ** (step - 1)).double() ** 2)))
    assert seen[0].severity == Severity.WARNING


def test_of_many_tensors_the_worst_few_are_named_and_stay_named():
    rule, spike = Exploding(), NormSpike()
    usual = torch.full((1000,), 1.0, dtype=torch.float64)
    for step in range(30):
        assert not list(rule.check(synthetic(step, usual)))
        assert not list(spike.check(synthetic(step, usual)))
    up = usual * 1000 * (1 + torch.arange(1000) / 1000)
    seen = list(rule.check(synthetic(30, up)))
    assert [f.tensor for f in seen] == [f"l.{i}.w" for i in range(999, 994, -1)]
    assert seen[0].message.endswith("; 995 more tensors are affected")
    assert len(list(spike.check(synthetic(30, up)))) == 1
    again = list(rule.check(synthetic(31, up.flip(0))))
    assert {f.tensor for f in again} == {f.tensor for f in seen}


def test_the_first_layers_of_a_deep_sigmoid_network_vanish_and_differ_from_the_last():
    run = run_of(perceptron(depth=14, activation=nn.Sigmoid))
    findings = run.go(35)
    vanishing = [f for f in findings if f.rule == "vanishing"]
    assert "1.weight" in {f.tensor for f in vanishing}
    assert all(f.severity == Severity.WARNING and f.value < f.threshold for f in vanishing)
    assert vanishing[0].first_step == 0
    imbalance = by_rule(findings)["imbalance"]
    # of 13 layers the finding names one end, and its message the other
    assert imbalance.tensor in {"1.weight", "27.weight"}
    assert "1.weight.grad" in imbalance.message
    assert "27.weight.grad" in imbalance.message
    assert imbalance.value > imbalance.threshold == 1e4


def test_a_layer_whose_input_fades_falls_below_its_own_history():
    model = perceptron()
    run = run_of(model)
    run.go(40)
    assert run.ledger.findings == []
    with torch.no_grad():
        model[5].weight.mul_(1e-5)  # earlier layers get almost no gradient of the loss
    found = [f for f in run.go(20) if f.rule == "vanishing"]
    assert {f.tensor for f in found} <= {"1.weight", "3.weight"}
    assert found[0].first_step == 40
    assert "since step 40 far below its usual" in found[0].message


def test_a_layer_of_dead_relus_is_dead_after_a_while():
    model = perceptron()
    with torch.no_grad():
        model[3].bias.fill_(-100.0)
    run = run_of(model, [Dead()])
    assert run.go(19) == []
    findings = run.go(11)
    assert [f.tensor for f in findings] == ["1.weight", "3.weight", "5.weight"]
    assert all(f.severity == Severity.WARNING and f.first_step == 0 and f.count == 11 for f in findings)
    assert "all elements are 0, since step 0" in findings[0].message


def test_a_bad_initialization_of_one_layer_is_an_imbalance():
    model = perceptron(depth=6)
    with torch.no_grad():
        model[7].weight.mul_(1e-6)
    findings = run_of(model, [LayerImbalance()], lr=1e-4).go(25)
    assert [f.rule for f in findings] == ["imbalance"]
    assert "by a factor of" in findings[0].message


@pytest.mark.parametrize("options", [{"weights": True, "updates": True}, {"weights": True}])
def test_updates_beyond_the_band_are_found_and_by_weights_alone_too(options):
    model = perceptron()
    # a weight decay that removes a fifth of every weight in every step
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-7, weight_decay=2e6)
    findings = Run(model, batches(), optimizer, [UpdateRatio()], **options).go(40)
    assert {f.tensor for f in findings} == {"1.weight", "3.weight", "5.weight", "7.weight"}
    assert all(f.rule == "update_ratio" and f.severity == Severity.INFO for f in findings)
    assert findings[0].value == pytest.approx(0.2, rel=0.1 if "updates" in options else 0.3)
    assert ("at least" in findings[0].message) == ("updates" not in options)
    # below the band is info, and weights alone do not show it
    low = run_of(None, [UpdateRatio()], lr=1e-7, **options).go(40)
    assert all(f.severity == Severity.INFO for f in low)
    assert bool(low) == ("updates" in options)


def test_a_group_ratio_out_of_bounds_is_what_group_ratio_says():
    import gradiometer as gm

    model = perceptron()
    groups = {"first": r"^1\.", "last": r"^7\."}
    run = run_of(model, [GroupRatio(groups, "last", "first", high=0.5)])
    (found,) = run.go(3)
    expected = gm.group_ratio(gm.collect_grads(model).group(groups), "last", "first").item()
    assert float(run.rules[0].check(run.records[-1])[0].value) == pytest.approx(expected, rel=1e-12)
    assert found.threshold == 0.5
    with_modules = {"first": model[1], "last": model[7]}
    again = run_of(model, [GroupRatio(with_modules, "last", "first", high=0.5, model=model)])
    assert len(again.go(2)) == 1
    with pytest.raises(ValueError, match="no tensor belongs to the group 'none'"):
        run_of(model, [GroupRatio({"none": "zzz", "last": r"^7\."}, "last", "none")]).go(1)


def test_a_group_ratio_leaves_out_a_step_that_is_not_finite():
    model = perceptron()
    groups = {"first": r"^1\.", "last": r"^7\."}
    run = run_of(model, [GroupRatio(groups, "last", "first", low=1e-9, high=1e9)])

    def spoil(_):
        model[1].weight.grad[0, 0] = math.inf

    assert run.go(3, before=spoil) == []


def test_the_worst_step_of_a_finding_is_that_of_its_value():
    def vanishing(step, value):
        return Finding("vanishing", Severity.WARNING, step - 9, step, "grads", "w", value, 1e-7, "small", "")

    ledger = Ledger()
    for step, value in ((9, 1e-8), (10, 1e-9), (11, 1e-8)):
        ledger.add([vanishing(step, value)])
    (found,) = ledger.findings
    assert (found.first_step, found.last_step, found.value, found.worst_step) == (0, 11, 1e-9, 10)


RULES = sorted(name for name in all_rules.__all__ if hasattr(getattr(all_rules, name), "check"))


@pytest.mark.parametrize("name", [name for name in RULES if name != "Rule"])
def test_a_history_that_is_taken_up_goes_on_identically(name):
    def make():
        if name == "GroupRatio":
            return GroupRatio({"a": r"^1\.", "b": r"^7\."}, "a", "b", low=10.0, patience=3)
        return getattr(all_rules, name)()

    assert isinstance(make(), Rule)
    model = perceptron(depth=8, activation=nn.Sigmoid)
    run = run_of(model, [], weights=True, updates=True)

    def before(step):
        for parameter in model.parameters():
            parameter.grad.mul_(1e4 if step in {40, 41, 48} else 0.0 if step % 3 == 0 else 1.0)
        if step in {30, 31, 50}:
            model[1].weight.grad[0, 0] = float("nan")

    run.go(60, before)
    one = make()
    for record in run.records[:41]:
        list(one.check(record))
    file = io.BytesIO()
    torch.save(one.state_dict(), file)  # plain values and tensors
    file.seek(0)
    two = make()
    two.load_state_dict(torch.load(file, weights_only=True))
    for record in run.records[41:]:
        parameters = copy.copy(record.catalog.parameters)
        fresh = replace(record, catalog=replace(record.catalog, parameters=parameters))
        assert list(two.check(fresh)) == list(one.check(record))
    with pytest.raises(ValueError, match="the state of another rule"):
        two.load_state_dict({"other": 1})


def test_a_state_is_a_snapshot_and_default_rules_go_on_quietly_after_a_resume():
    run = run_of()
    run.go(40)
    states = [rule.state_dict() for rule in run.rules]
    kept = copy.deepcopy(states)
    run.go(10)
    assert str(states) == str(kept)
    rules = default_rules()
    for rule, state in zip(rules, states, strict=True):
        rule.load_state_dict(state)
    exploding, imbalance = (rule for rule in rules if rule.name in {"exploding", "imbalance"})
    assert exploding.norms is imbalance.norms
    assert [f for record in run.records[40:] for rule in rules for f in rule.check(record)] == []
    assert float(exploding.norms.history.count[0]) == 50.0


def test_severities_are_the_callers():
    rule = NormSpike(severity=Severity.ERROR)
    for step in range(31):
        seen = list(rule.check(synthetic(step, torch.ones(1000) * (1e4 if step == 30 else 1.0))))
    assert [f.severity for f in seen] == [Severity.ERROR]
    with pytest.raises(ValueError, match="is not a valid Severity"):
        Dead(severity=7)
    with pytest.raises(ValueError, match="0 <= low < high"):
        UpdateRatio(1.0, 0.1)


def test_a_spike_hides_neither_the_next_one_nor_a_nearly_constant_norm():
    history = History(warmup=20)
    history.restart(1)
    z = []
    for step in range(80):
        x = 5.0 if step in {40, 41, 60} else 0.001 * (step % 2)
        z.append(float(history.score(torch.tensor([x], dtype=torch.float64)).z))
    assert min(z[40], z[41], z[60]) > 15
    assert max(abs(v) for i, v in enumerate(z) if i not in {40, 41, 60}) < 2
    # NaN and Inf do not change the history
    mean = history.mean.clone()
    for x in (math.nan, math.inf, -math.inf):
        assert float(history.score(torch.tensor([x], dtype=torch.float64)).z) == 0.0
    assert torch.equal(history.mean, mean)


def test_the_loss_of_steps_that_are_not_recorded_counts():
    rule = LossSpike()
    for step in range(40):
        assert not list(rule.check(StepRecord(step, 0.0, {"loss": 2.0 + 0.05 * (step % 3)}, CATALOG)))
    (found,) = rule.check(StepRecord(40, 0.0, {"loss": 4.0}, CATALOG))
    assert found.value == 4.0
    assert found.tensor is None
    assert not list(rule.check(StepRecord(41, 0.0, {}, CATALOG)))
    assert not list(Vanishing().check(StepRecord(41, 0.0, {}, CATALOG)))


def test_the_page_runs_and_prints_what_it_says(capsys):
    page, scope = text("docs/how-to/rules.md"), {}
    for block in blocks("docs/how-to/rules.md"):
        exec(block, scope)  # noqa: S102 the page's own code
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2
    assert all(f"# {line}\n" in page for line in printed)
    assert isinstance(scope["TooQuiet"](), Rule)


def test_the_page_lists_every_rule():
    listed = re.findall(r"^\| `(\w+)` \|", text("docs/reference/rules.md"), flags=re.MULTILINE)
    assert set(listed) == {rule.name for rule in default_rules()} | {"group_ratio"}
