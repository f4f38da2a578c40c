"""Planted gradient faults and healthy steps, of one seed; `kernels_bench.zoo` counts over several."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch._inductor.config

from kernels_bench.zoo.gradients import command, faults_compiled, faults_ranks, faults_updates, runs

pytestmark = [
    pytest.mark.usefixtures("_one_thread"),
    # Dynamo makes one of each autograd.Function that it traces
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]
# found in PyTorch; a later version does not have them
BUGS = {
    "gradient-of-a-least-angle-is-dropped": 0,  # pytorch#186799
    # pytorch#190758; with this seed, the slope of the loss does not tell, since it has too many kinks
    "dropout-is-drawn-again-below-a-memory-budget": 2,
}
RANKS = [*faults_ranks.FAULTS, *runs.HEALTHY_RANKS]
FAULTS = [name for name in runs.FAULTS if name not in RANKS and name not in BUGS]
OF_GRADIENTS = [name for name in FAULTS if runs.FAULTS[name].what == "gradient"]
# the rest is covered by the zoo
COMPILED = ("compiled-with-its-backward", "compiled-with-dropout")
OPTIMIZERS = ("adamw-fused", "adafactor", "muon", "lbfgs", "sparse-adam")
HEALTHY = [
    *(name for name in runs.HEALTHY if name not in runs.COMPILED and not name.startswith("optimizer")),
    *(f"optimizer-{name}" for name in OPTIMIZERS),
    *COMPILED,
]


def gradients(case, step, stance="default"):
    """Return the gradients of a step by name, in the order in which they are first complete."""
    order, handles, weights = {}, [], {k: x.clone() for k, x in case.model.state_dict().items()}
    case.model.zero_grad()
    torch.manual_seed(5)
    for name, p in case.model.named_parameters():
        note = order.setdefault
        handles.append(p.register_post_accumulate_grad_hook(lambda _, name=name, note=note: note(name)))
    with torch.compiler.set_stance(stance):
        step(*case.args)
    for handle in handles:
        handle.remove()
    parameters = dict(case.model.named_parameters())
    found = {name: parameters[name].grad.clone() for name in order}
    case.model.load_state_dict(weights)
    case.model.zero_grad()
    return found


def wrong(case):
    """Return the gradients that differ from the reference's, as pairs by name in backward order."""
    given = gradients(case, case.step)
    reference = case.plain or (case.against if callable(case.against) else case.step)
    right = gradients(case, reference, "force_eager")
    pairs = {name: (given[name], right[name]) for name in right}
    return {
        name: pair
        for name, pair in pairs.items()
        if not torch.allclose(*pair, rtol=1e-3, atol=1e-4 * float(pair[1].abs().max()))
    }


def is_of_kind(kind, factor, given, right):
    """Return whether a wrong gradient has the relation to the right one that a kind says."""
    norm = float(right.norm())
    if kind == "factor":
        return float((given - factor * right).norm()) < 1e-4 * norm * factor
    if kind == "sign":
        return float((given + right).norm()) < 1e-4 * norm
    if kind == "zeros":
        return not given.any()
    if kind == "rows":
        same = (given - right).flatten(1).norm(dim=1) < 1e-4 * norm
        return bool(same.any()) and not bool(same.all())
    if kind == "permutation":
        nearest = torch.cdist(given.double(), right.double()).min(1)
        return float(nearest.values.max()) < 1e-4 * norm and len(nearest.indices.unique()) == len(right)
    return not given.isfinite().all() if kind == "non-finite" else True


def is_planted(name):
    """Assert that the first wrong gradient is the one that a fault names, and is of its kind."""
    fault, case = runs.FAULTS[name], runs.start(name, 0)
    first, pair = next(iter(wrong(case).items()))
    assert first == fault.first
    assert is_of_kind(fault.kind, fault.factor, *pair)


def is_named(row):
    """Assert that a run's fault is named, with its kind, and nothing was changed."""
    assert row["error"] is None, row["error"]
    assert row["planted"]
    assert row["alarm"]
    assert row["named"], row["text"]
    assert row["kind_named"], row["text"]
    assert row["first"] in row["text"]


def is_quiet(row):
    """Assert that a healthy run has no alarm, and nothing was changed."""
    assert row["error"] is None, row["error"]
    assert not row["planted"]
    assert row["alarm"] is False, row["text"]


@pytest.mark.parametrize("name", OF_GRADIENTS)
def test_the_declared_tensor_is_the_first_wrong_one(name):
    is_planted(name)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(name):
    is_named(runs.run(name, 0))


@pytest.mark.parametrize(("name", "seed"), BUGS.items())
def test_a_bug_of_pytorch_is_named(name, seed):
    # with the random numbers of eager mode
    with torch._inductor.config.patch(fallback_random=True):
        present = wrong(runs.start(name, seed))
    if not present:
        pytest.skip(f"torch {torch.__version__} does not have it")
    is_named(runs.run(name, seed))


def test_every_bug_is_a_fault_of_the_table():
    assert BUGS.keys() <= set(faults_compiled.FAULTS)


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_step_has_no_alarm(name):
    is_quiet(runs.run(name, 0))


def on_a_rank(_, name):
    """Check one case on one rank."""
    return runs.run(name, 0)


def planted_on_a_rank(_, name):
    is_planted(name)


@pytest.mark.parametrize("name", faults_ranks.FAULTS)
def test_the_declared_tensor_is_the_first_wrong_one_on_all_ranks(two_ranks, name):
    two_ranks.run(planted_on_a_rank, name)


@pytest.mark.parametrize("name", faults_ranks.FAULTS)
def test_a_fault_of_ranks_is_named_by_all(two_ranks, name):
    for row in two_ranks.run(on_a_rank, name):
        is_named(row)


@pytest.mark.parametrize("name", runs.HEALTHY_RANKS)
def test_a_healthy_step_of_ranks_has_no_alarm(two_ranks, name):
    for row in two_ranks.run(on_a_rank, name):
        is_quiet(row)


@pytest.mark.parametrize("name", faults_updates.FAULTS)
def test_the_declared_update_is_the_wrong_one(name):
    def updated(*, plain):
        case = runs.start(name, 0)
        case.step(*case.args)
        if plain:
            case.optimizer.param_groups[0]["foreach"] = False
        before = {key: p.detach().clone() for key, p in case.model.named_parameters()}
        with torch.compiler.set_stance("force_eager" if plain else "default"):
            case.optimizer.step()
        return {key: p.detach() - before[key] for key, p in case.model.named_parameters()}

    # with the seed, the first two steps are those of the wrong update in both
    given, right = updated(plain=False), updated(plain=True)
    fault = runs.FAULTS[name]
    assert [key for key in right if not torch.allclose(given[key], right[key])] == [fault.first]
    assert is_of_kind(fault.kind, None, given[fault.first], right[fault.first])


# counting


class Report:
    """A report that says nothing, or one thing."""

    def __init__(self, first=None):
        self.first = first and SimpleNamespace(name=first, what="gradient", text="")
        self.failures = [self.first] if first else []

    def __bool__(self):
        return not self.failures

    def __str__(self):
        return f"first: {self.first}"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("all elements are 1/4 times the reference", ("factor", 0.25)),
        ("all elements are 1,024 (2^10) times the reference", ("factor", 1024.0)),
        ("all elements are the negative of the reference", ("sign", None)),
        ("all elements are 0", ("zeros", None)),
        ("row 4 of 5 is 0, and the others agree", ("rows", None)),
        ("rows 24-26 of 27 are 0, and the others agree", ("rows", None)),
        ("the rows are permuted: row 0 is the reference's row 5, and so on around", ("permutation", None)),
        ("NaN and Inf in 128 of 128 elements", ("non-finite", None)),
        ("", ("other", None)),
    ],
)
def test_the_kind_is_read_from_the_text(text, kind):
    assert runs.kind_of(text) == kind


def test_a_check_that_says_nothing_misses_every_fault():
    rows = [runs.run(name, 0, check=lambda *_, **__: Report()) for name in FAULTS[:3]]
    assert [(row["alarm"], row["named"]) for row in rows] == [(False, False)] * 3
    assert len(command.missed(rows)) == 3


def test_a_change_is_a_failure():
    def check(*_, model, **__):
        torch.nn.init.zeros_(next(model.parameters()))
        torch.rand(1)
        return Report()

    row = runs.run("accumulation", 0, check=check)
    assert row["error"] == "changed weights or buffers, the random state"


def test_an_alarm_of_a_healthy_step_is_missed():
    row = runs.run("accumulation", 0, check=lambda *_, **__: Report("0.weight"))
    assert row["alarm"]
    assert command.missed([row]) == ["accumulation, seed 0: 0.weight fails"]
