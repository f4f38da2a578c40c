"""check_model: what it changes, what it refuses, and its report."""

import copy
import json

import pytest
import torch
from torch import nn

import gradiometer as gm
from gradiometer.checks.contract import GROUPS, ORDER
from gradiometer.checks.contracts import CONTRACTS
from support.small_models import Transformer, cross_entropy, text


def healthy(**rest):
    torch.manual_seed(0)
    return Transformer(**rest)


def state(model):
    modules = {name: (module.training, dict(vars(module)).keys()) for name, module in model.named_modules()}
    hooks = [
        len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules()
    ]
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    bits = {
        name: (id(x), x.data_ptr(), x.dtype, x.requires_grad, x.detach().clone())
        for name, x in tensors.items()
    }
    grads = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    return modules, hooks, bits, grads, torch.get_rng_state()


def assert_equal(a, b):
    assert a[:2] == b[:2]
    for name, (key, pointer, dtype, requires, x) in a[2].items():
        assert b[2][name][:4] == (key, pointer, dtype, requires), name
        torch.testing.assert_close(b[2][name][4], x, rtol=0, atol=0, equal_nan=True)
    for name, grad in a[3].items():
        assert grad is None or torch.equal(grad, b[3][name])
    assert torch.equal(a[4], b[4])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_nothing_is_changed(dtype):
    model = healthy(causal=True, dropout=0.1).to(dtype)
    model.extra = nn.BatchNorm1d(3)
    model.blocks[0].eval()
    model.positions.requires_grad_(requires_grad=False)
    cross_entropy(model, text()).backward()
    optimizer = torch.optim.AdamW(model.parameters())
    before, slots = state(model), copy.deepcopy(optimizer.state_dict())
    data = text(padded=True)
    kept = {name: x.clone() for name, x in data.items()}
    gm.check_model(model, data, optimizer=optimizer, loss=cross_entropy)
    assert_equal(before, state(model))
    assert optimizer.state_dict() == slots
    assert all(torch.equal(x, data[name]) for name, x in kept.items())


def test_running_statistics_and_counters_are_restored():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.calls, self.linear = nn.BatchNorm1d(4), 0, nn.Linear(4, 2)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            self.cache = x
            self.seen += 1
            return self.linear(self.norm(x))

    model, x = Counting().train(), torch.randn(5, 4)
    before = state(model)
    gm.check_model(model, x, loss=lambda model, x: model(x).square().mean())
    assert_equal(before, state(model))
    assert (model.calls, hasattr(model, "cache")) == (0, False)


def test_a_model_that_changes_its_weights_gets_them_back():
    class Clamped(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 3))

        def forward(self, x):
            with torch.no_grad():
                self.weight.mul_(0.5)
            return x @ self.weight

    model, x = Clamped().double(), torch.randn(4, 3).double()
    before = state(model)
    gm.check_model(model, x)
    assert_equal(before, state(model))


def test_everything_is_restored_after_an_error():
    class Failing(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, _):
            self.training = True
            raise KeyboardInterrupt

    model = Failing().eval()
    before = state(model)
    with pytest.raises(KeyboardInterrupt):
        gm.check_model(model, torch.zeros(2, 2))
    assert_equal(before, state(model))


def test_a_monitor_records_no_step():
    model = healthy(causal=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gm.watch(model, optimizer) as monitor:
        gm.check_model(model, text(), optimizer=optimizer, loss=cross_entropy)
        assert monitor.step == 0
        cross_entropy(model, text()).backward()
        optimizer.step()
        assert monitor.step == 1
    assert not [each for each in monitor.findings if each.severity >= gm.Severity.WARNING]


def test_healthy_models_hold():
    for data in (text(), text(padded=True)):
        report = gm.check_model(healthy(causal=True), data, loss=cross_entropy)
        assert report, report
    report = gm.check_model(healthy(), text(padded=True, shifted=False), loss=cross_entropy)
    assert report, report


def test_layers_that_are_not_registered_are_run_in_their_own_dtype():
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.layers = nn.Linear(4, 4), [nn.Linear(4, 4)]

        def forward(self, x):
            return self.layers[0](self.linear(x))

    report = gm.check_model(Hidden(), torch.randn(3, 5, 4), causal=True, only=["causal", "examples"])
    assert report.precision == "float32"
    assert [each.status for each in report] == ["holds", "holds"]
    assert 1e-8 < report.rounding < 1e-4


def test_one_contract_or_group_can_be_named():
    model, data = healthy(causal=True), text()
    assert [each.contract for each in gm.check_model(model, data, only="causal")] == ["causal"]
    groups = {each.group for each in gm.check_model(model, data, only=["behaviour"])}
    assert groups == {"behaviour"}
    left = gm.check_model(model, data, skip=["causal", "gradients"], loss=cross_entropy)
    assert "causal" not in [each.contract for each in left]
    assert "gradients" not in {each.group for each in left}
    with pytest.raises(ValueError, match="skip has 'casual', which is not a contract"):
        gm.check_model(model, data, skip=["casual"])


def test_each_contract_has_a_group_and_a_text():
    assert sorted(CONTRACTS) == sorted(ORDER)
    groups = [CONTRACTS[name].group for name in ORDER]
    assert groups == sorted(groups, key=GROUPS.index)
    assert all(each.text and not each.text.endswith(".") for each in CONTRACTS.values())


def test_what_is_refused():
    model = healthy()
    with pytest.raises(TypeError, match=r"expected a torch.nn.Module, got function"):
        gm.check_model(lambda x: x, text())
    with pytest.raises(
        ValueError, match=r"the model fails on this batch: .*pass the batch that the model trains on"
    ):
        gm.check_model(model, {"words": torch.zeros(2, 2)})
    with pytest.raises(ValueError, match=r"forward\(model, batch\) fails"):
        gm.check_model(model, text(), forward=lambda _, batch: batch["none"])
    with pytest.raises(ValueError, match="returns no tensor"):
        gm.check_model(model, text(), forward=lambda *_: None)
    with torch.device("meta"):
        empty = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="'weight' is on the meta device"):
        gm.check_model(empty, torch.zeros(2, 2))


def test_a_contract_that_fails_does_not_stop_the_others(monkeypatch):
    def broken(_):
        raise RuntimeError("no such layer")

    monkeypatch.setitem(
        CONTRACTS, "causal", type(CONTRACTS["causal"])("causal", "behaviour", "", broken, False)
    )
    report = gm.check_model(healthy(causal=True), text(), only=["causal", "examples"])
    assert report["causal"].status == "does not apply"
    assert "could not be checked: RuntimeError: no such layer" in report["causal"].text
    assert report["examples"].status == "holds"


def test_the_report_tells():
    model = healthy(causal=False)
    report = gm.check_model(model, text(), only=["causal", "examples", "bidirectional"])
    assert not report
    assert report.broken == ["causal"]
    result = report["causal"]
    assert (result.status, result.severity) == ("broken", gm.Severity.WARNING)
    assert "token 1 changes the output of token 0 by" in result.text
    shown = str(report)
    assert "1 broken" in shown.splitlines()[0]
    assert any(line.startswith("broken") and "causal" in line for line in shown.splitlines())
    assert result.evidence[0].advice in shown
    values = json.loads(json.dumps(report.to_dict()))
    assert values["holds"] is False
    assert {each["contract"]: each["status"] for each in values["results"]}["causal"] == "broken"
    html = report._repr_html_()
    assert "<table>" in html
    assert "token 1 changes" in html
    with pytest.raises(KeyError):
        report["none"]
    (finding,) = report.findings(7)
    assert (finding.rule, finding.first_step, finding.severity) == ("contract_causal", 7, gm.Severity.WARNING)


def test_names_cannot_break_a_terminal_or_a_page():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.add_module("<b>\x1b[31m", nn.Linear(2, 2))

        def forward(self, x):
            return next(self.children())(x)

    report = gm.check_model(Odd(), torch.randn(3, 2), loss=lambda _, x: x.sum().requires_grad_())
    assert "\x1b" not in str(report)
    assert "<b>\x1b" not in report._repr_html_()


@pytest.mark.parametrize("wrap", [lambda m: torch.compile(m, backend="eager"), nn.DataParallel])
def test_wrappers_are_taken_off(wrap):
    model = healthy(causal=False)
    assert gm.check_model(wrap(model), text(), only=["causal"]).broken == ["causal"]


def test_a_compiled_model_is_not_compiled_again():
    model = healthy(causal=True)
    model.compile(backend="inductor")
    report = gm.check_model(model, text(), only=["causal"])
    assert (report["causal"].status, report.precision) == ("holds", "float64")


def test_inside_of_a_graph_it_is_refused():
    model = healthy()

    @torch.compile(backend="eager", fullgraph=True)
    def step():
        return gm.check_model(model, text())

    with pytest.raises(Exception, match="check_model"):
        step()


def test_sharded_parameters_are_not_run(monkeypatch):
    model = healthy(causal=True)
    monkeypatch.setattr("gradiometer.checks.probe.is_dtensor", lambda _: True)
    report = gm.check_model(model, text(), loss=cross_entropy)
    assert report["causal"].status == "does not apply"
    assert "sharded" in report["causal"].text


def test_hooks_of_autograd_still_fire():
    model, fired = healthy(causal=True), []
    weight = model.head.weight
    # as DistributedDataParallel has them
    accumulator = weight.expand_as(weight).grad_fn.next_functions[0][0]
    accumulator.register_hook(lambda *_: fired.append("accumulated"))
    weight.register_post_accumulate_grad_hook(lambda _: fired.append("after"))
    report = gm.check_model(model, text(), loss=cross_entropy)
    assert report.precision == "float64"
    assert not fired
    cross_entropy(model, text()).backward()
    assert sorted(fired) == ["accumulated", "after"]


def test_recurrent_layers_run_in_float64_and_keep_their_weights():
    model = nn.LSTM(4, 4, num_layers=2, batch_first=True)
    flat = list(map(id, model._flat_weights))
    report = gm.check_model(model, torch.randn(3, 5, 4), causal=True, only=["causal", "examples"])
    assert (report.precision, [each.status for each in report]) == ("float64", ["holds", "holds"])
    assert list(map(id, model._flat_weights)) == flat


def test_a_lazy_model_is_refused():
    with pytest.raises(ValueError, match="'weight' has no shape yet; call the model once"):
        gm.check_model(nn.LazyLinear(2), torch.zeros(2, 2))


def test_a_loss_that_fails_is_refused():
    model = nn.Linear(4, 3)
    pair = torch.randn(8, 4), torch.randint(3, (8,))
    for loss in (nn.CrossEntropyLoss(), lambda *_: 1.0, lambda model, batch: (model(batch[0]).sum(), 0)):
        with pytest.raises(ValueError, match=r"loss\(model, batch\) fails: .*a 0-d tensor with its graph"):
            gm.check_model(model, pair, loss=loss)


def test_a_loader_is_no_batch():
    loader = torch.utils.data.DataLoader(torch.randn(8, 4))
    for given in (loader, iter(loader)):
        with pytest.raises(TypeError, match=r"pass one batch of it, next\(iter\(loader\)\)"):
            gm.check_model(nn.Linear(4, 3), given)


def test_what_an_assertion_shows():
    report = gm.check_model(healthy(causal=False), text(), only=["causal", "examples"])
    assert repr(report) == "<ModelReport: 2 contracts: 1 hold, 1 broken: causal>"
