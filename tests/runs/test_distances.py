"""How far two runs are apart, and which tensor leaves rounding first."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("pyarrow")

import gradiometer as gm
from gradiometer.runs import distances as distances_module
from gradiometer.runs.departure import Measured, find
from gradiometer.runs.distances import distances_of
from gradiometer.web.page import contents

STEPS, TENSORS = 40, 6
NAMES = tuple(f"layers.{i}" for i in reversed(range(TENSORS)))


def noise(seed, *shape):
    """Return factors between 0.5 and 2, that do not depend on a machine's rounding."""
    return 2 ** (
        2 * torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 1
    )


def measured(grads=None, total=None, updates=None, size=None, **more):
    """Return distances as rounding makes them: weights drift apart, and gradients follow."""
    w = 1e-8 * 1.1 ** torch.arange(STEPS, dtype=torch.float64) if total is None else total
    grads = 30 * w.clamp(min=6e-8)[:, None] * noise(0, STEPS, TENSORS) if grads is None else grads
    updates = 2 * grads.roll(1, 0) if updates is None else updates
    updates[0] = math.nan
    fields = {
        "grads": grads,
        "across": grads,
        "factors": torch.ones_like(grads),
        "size": torch.ones_like(grads) if size is None else size,
        "total": w,
        "updates": updates,
        "updates_across": updates,
        "update_factors": torch.ones_like(grads),
        "update_size": torch.full_like(grads, 1e-2),
        "consecutive": torch.ones(STEPS, dtype=torch.bool),
        "deviation": math.sqrt(2 / 16),
    }
    return Measured(**(fields | more))


def departure(found):
    return find(found, range(STEPS), NAMES).departure


def test_runs_that_drift_apart_do_not_leave_rounding():
    assert departure(measured()) is None
    # 1e4 times as far in ten steps: weights explain it, and without them that all gradients do it
    total = 1e-8 * torch.logspace(0, 8, STEPS, dtype=torch.float64)
    assert departure(measured(total=total)) is None
    assert departure(measured(total=total)._replace(total=None, updates=None)) is None


@pytest.mark.parametrize("size", [0.5, 0.1, 0.01])
def test_a_fault_from_a_step_on_is_named_first_in_backward_order(size):
    made = measured()
    made.grads[20:, 2:] += size * noise(1, STEPS - 20, TENSORS - 2)

    found = departure(made)

    assert (found.step, found.name, found.kind, found.lasts) == (20, "layers.3.grad", "grads", True)
    assert found.ratio == pytest.approx(found.distance / found.explained)
    assert found.explained < 1e-4


def test_a_fault_in_the_first_step_is_beyond_the_rounding_of_a_format():
    made = measured()
    made.grads[:, 3] += 0.3
    found = departure(made)
    assert (found.step, found.name, found.lasts) == (0, "layers.2.grad", True)
    # sqrt(2**-24), with the margins
    assert found.explained == pytest.approx(3 * 2.0**-12 * (1 + 2 * math.sqrt(1 / 8)))


def test_an_update_that_is_wrong_is_named():
    made = measured()
    made.updates[25:, 1] = 0.5
    found = departure(made)
    assert (found.step, found.name, found.kind, found.lasts) == (25, "layers.4.update", "updates", True)


@pytest.mark.parametrize("start", [2, 20])
def test_one_factor_in_most_updates_is_a_departure_whatever_the_later_limits(start):
    made = measured()
    across = made.updates.clone()
    # the gradients follow the weights, so that later updates may be anything
    made.grads[start:] = 0.5
    made.updates[start, 1:], across[start, 1:] = 1 / 11, 1e-4
    factors = torch.full_like(across, 1.1)
    changes = {"updates_across": across, "update_factors": factors, "total": torch.full((STEPS,), 0.3)}
    found = departure(made._replace(**changes))
    assert (found.step, found.name, found.kind, found.lasts) == (start, "layers.4.update", "updates", True)
    assert (found.factor, found.shared) == (1.1, 1.0)
    # not of one factor
    factors[:, 1:] = torch.linspace(0.5, 2, TENSORS - 1)
    found = departure(made._replace(**changes))
    assert found is None or not found.lasts


def test_whether_a_departure_lasts_cannot_be_told_where_its_limit_has_grown():
    made = measured()
    made.updates[20, 1] = 0.1
    assert departure(made).lasts is False
    total = made.total.clone()
    made.grads[20:], total[20:] = 0.5, 0.3
    assert departure(made._replace(total=total)).lasts is None


def test_a_departure_of_one_step_does_not_last_and_later_ones_that_do_are_named():
    made = measured()
    made.grads[20, 4] = 0.1
    found = departure(made)
    assert (found.step, found.name, found.lasts) == (20, "layers.1.grad", False)

    made.grads[30:, 5] = 0.3
    found = departure(made)
    assert (found.step, found.name, found.lasts) == (30, "layers.0.grad", True)


def test_of_the_last_step_it_is_not_known_whether_it_lasts():
    made = measured()
    made.grads[-1, 4] = 0.3
    assert departure(made).lasts is None


def test_a_gradient_that_is_0_but_for_rounding_may_be_anything():
    made = measured()
    made.grads[:, 1] = 1.4
    assert departure(made).name == "layers.4.grad"
    size = torch.ones_like(made.grads)
    size[:, 1] = 1e-6
    assert departure(made._replace(size=size)) is None


@pytest.mark.parametrize("start", [0, 20])
@pytest.mark.parametrize("with_weights", [True, False])
def test_a_factor_in_all_gradients_is_found_with_and_without_weights(start, with_weights):
    made = measured()
    across = made.grads.clone()
    made.grads[start:] = 0.5
    made = made._replace(across=across, factors=torch.full_like(across, 2.0))
    if not with_weights:
        made = made._replace(total=None, updates=None)
    found = departure(made)
    assert (found.step, found.name, found.lasts, found.factor) == (start, "layers.5.grad", True, 2.0)
    # the same distances, but not parallel: without weights, nothing tells where they come from
    found = departure(made._replace(across=made.grads))
    assert (found is not None) == with_weights


def test_a_factor_lasts_while_the_limit_grows_with_the_weights():
    # the weights follow the fault and explain half of a gradient
    total = torch.full((STEPS,), 1e-8, dtype=torch.float64)
    total[21:] = 0.03
    made = measured(total=total)
    across = made.grads.clone().clamp(max=0.2)
    made.grads[20:, 3] = 0.5
    across[20, 3], across[21:, 3] = 1e-6, 0.2
    found = departure(made._replace(across=across, updates=None))
    assert (found.step, found.name, found.lasts, found.factor) == (20, "layers.2.grad", True, 1.0)
    # the limit is above the distance
    across[21:, 3] = 0.3
    assert departure(made._replace(across=across, updates=None)).lasts is None


@pytest.mark.parametrize(("times", "step"), [(1.4, None), (1.6, 1)])
def test_all_gradients_may_begin_to_differ_at_once_in_the_second_step(times, step):
    total = torch.full((STEPS,), 1e-9, dtype=torch.float64)
    grads = torch.full(
        (STEPS, TENSORS), times * 3 * 2.0**-12 * (1 + 2 * math.sqrt(1 / 8)), dtype=torch.float64
    )
    grads[0] = 1e-7
    found = departure(measured(grads, total)._replace(updates=None))
    assert (found and found.step) == step


def test_weights_without_effect_do_not_hide_a_fault():
    # as a bias in front of a normalization, whose gradient is 0 but for rounding
    made = measured()
    total = torch.full((STEPS,), 0.1, dtype=torch.float64)
    made.grads[20:, 2] = 0.1
    found = departure(made._replace(total=total, across=made.grads))
    assert (found.step, found.name, found.lasts) == (20, "layers.3.grad", True)


def test_first_updates_of_elements_whose_gradient_is_0_but_for_rounding():
    made = measured()
    # equal until step 1 by chance, as of a bias of keys
    made.updates[2:, 1] = 0.02
    made.grads[:2] = 0
    assert departure(made) is None
    made.updates[2:, 1] = 0.5
    found = departure(made)
    assert (found.step, found.name, found.lasts) == (2, "layers.4.update", True)


def test_the_first_steps_tell_the_precision():
    for level, rounding in ((1e-7, "float32"), (5e-4, "TF32 or float16"), (0.05, "bfloat16")):
        total = torch.zeros(STEPS, dtype=torch.float64)
        made = measured(torch.full((STEPS, TENSORS), level, dtype=torch.float64), total)
        found = find(made, range(STEPS), NAMES)
        assert (found.rounding, found.departure) == (rounding, None)
    assert find(made._replace(roundoff=2.0**-8), range(STEPS), NAMES).rounding == "bfloat16"


def train(
    path,
    *,
    halves=False,
    wrong=None,
    seed=0,
    steps=24,
    every=1,
    lr=0.05,
    nan_at=None,
    adam=False,
    rate=1,
    **options,
):
    """Record a small run; ``wrong(step, model)`` may change gradients.

    From step 12 on, the learning rate is ``rate`` times as large.
    """
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(12, 12), torch.nn.Tanh(), torch.nn.Linear(12, 12), torch.nn.Tanh()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(12, 2))
    optimizer = (torch.optim.AdamW if adam else torch.optim.SGD)(model.parameters(), lr)
    options = {"weights": True, "projections": 16, "projections_every": every, "rules": ()} | options
    with gm.Monitor(model, run_dir=path, **options) as monitor:
        for step in range(steps):
            x = torch.randn(16, 12, generator=torch.Generator().manual_seed(step))
            parts = (x[8:], x[:8]) if halves else (x,)
            for part in parts:
                ((model(part) - part[:, :2]).square().mean() / len(parts)).backward()
            if wrong is not None:
                wrong(step, model)
            if step == nan_at:
                model[0].weight.grad[0, 0] = math.nan
            monitor.record()
            if step == 12:
                optimizer.param_groups[0]["lr"] *= rate
            if step != nan_at:
                optimizer.step()
            optimizer.zero_grad()
            monitor.advance(lr=lr)
    return gm.read_run(path)


def double(step, model):
    if step >= 12:
        model[2].weight.grad *= 2


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train(tmp_path_factory.mktemp("run") / "a")


def test_runs_that_round_differently_are_the_same_up_to_rounding(run, tmp_path):
    found = gm.compare_runs(run, train(tmp_path / "b", halves=True))
    assert found.apart.startswith(
        "the same up to rounding in 24 compared steps, as in float32: most gradients"
    )
    assert found.distances.names == tuple(reversed(run.catalog.names))
    assert found.distances.grads.shape == found.distances.limits.shape == (24, 6)
    assert 0 < found.distances.grads[1:].max() < 1e-3


def test_a_fault_is_named_with_its_step_in_words_and_data(run, tmp_path):
    found = gm.compare_runs(run, train(tmp_path / "b", halves=True, wrong=double))
    text = "the same up to rounding until step 12; then `2.weight.grad` leaves it, "
    assert found.apart.startswith(text)
    assert found.apart.endswith(" times what the steps before explain: in B it is 2 times that of A")
    worst = found.distances.worst()[0]
    assert (worst.step, worst.name) == (12, "2.weight.grad")
    assert worst.distance == pytest.approx(0.5, rel=1e-3)
    assert worst.cosine == pytest.approx(1)
    plain = found.to_dict()
    assert plain["apart"] == found.apart
    assert plain["distances"]["departure"]["name"] == "2.weight.grad"
    assert plain["distances"]["worst"][0]["name"] == "2.weight.grad"


@pytest.mark.parametrize("with_weights", [True, False])
@pytest.mark.parametrize(("factor", "start"), [(2, 0), (2, 12), (-1, 0), (-1, 12)])
def test_a_factor_in_all_gradients_is_told(factor, start, with_weights, run, tmp_path):
    def wrong(step, model):
        for p in model.parameters():
            p.grad *= factor if step >= start else 1

    found = gm.compare_runs(run, train(tmp_path / "b", halves=True, wrong=wrong, weights=with_weights))
    assert (found.distances.departure.step, found.distances.departure.lasts) == (start, True)
    assert found.apart.endswith(f": in B it is {factor} times that of A")
    text = "the same up to rounding until step 12; then `4.bias.grad` leaves it, "
    first = "not the same up to rounding from the first compared step, 0, on: `4.bias.grad` is "
    assert found.apart.startswith(text if start else first)


@pytest.mark.parametrize("rate", [0.9, 1.1, 2, 10])
@pytest.mark.parametrize("adam", [False, True])
def test_another_learning_rate_is_told(rate, adam, tmp_path):
    options = {"adam": adam, "lr": 1e-3 if adam else 0.05}
    a, b = train(tmp_path / "a", **options), train(tmp_path / "b", halves=True, rate=rate, **options)
    found = gm.compare_runs(a, b)
    text = "the same up to rounding until step 13; then `4.bias.update` (the update of step 12) leaves it, "
    assert found.apart.startswith(text)
    end = f": in B it is {rate} times that of A, and so are all updates, as with another learning rate"
    assert found.apart.endswith(end)
    first, second = found.distances.worst()[:2]
    assert (first.name, second.name.rpartition(".")[2]) == ("4.bias.update", "grad")
    assert first.distance > first.limit
    assert found.to_dict()["distances"]["worst"][0]["name"] == "4.bias.update"
    drawn = contents([a, b])[0]["differ"]["distances"]
    assert (drawn["name"], drawn["step"], len(drawn["others"])) == ("4.bias.update", 13, 6)


def test_the_command_says_first_how_far_the_runs_are_apart(run, call, tmp_path):
    pytest.importorskip("typer")
    train(tmp_path / "b", halves=True, rate=2)
    code, out, _ = call("diff", run.path, tmp_path / "b")
    assert code == 1
    words = " ".join(out.split())
    assert words.index("The same up to rounding until step 13") < words.index("first differ at step")
    # in 80 columns, names are whole
    assert " 1 4.bias.update " in words
    assert "distance explains step before cosine weight" in words


@pytest.mark.parametrize("start", [0, 12])
def test_what_cannot_be_told_is_not_called_rounding(start, run, tmp_path):
    def wrong(step, model):
        for p in model.parameters():
            if step >= start:
                p.grad[: len(p) // 4 + 1] = 0

    found = gm.compare_runs(run, train(tmp_path / "b", halves=True, wrong=wrong, weights=False))
    assert found.distances.departure is None
    text = "the same up to rounding until step 12, as in float32, and from there on too far apart to tell a"
    first = "too far apart to tell a fault from rounding from the first compared step, 0, on: most gradients"
    assert found.apart.startswith(text if start else first)
    assert found.apart.endswith("; projected weights of both runs would tell more")


def test_blocks_of_steps_give_the_same(run, tmp_path, monkeypatch):
    other = train(tmp_path / "b", halves=True, wrong=double)
    whole = distances_of(run, other)
    monkeypatch.setattr(distances_module, "_CELLS", 6 * 19 * 5)
    parts = distances_of(run, other)
    assert whole.grads.equal(parts.grads)
    assert whole.weights.equal(parts.weights)
    assert whole.departure == parts.departure


def test_common_steps_of_other_cadences_and_the_smaller_number_of_projections(run, tmp_path):
    other = train(tmp_path / "b", halves=True, every=5, projections=32, weights=False)
    found = gm.compare_runs(run, other).distances
    assert (found.steps, found.projections, found.weights) == ((0, 5, 10, 15, 20), 16, None)
    assert found.grads.max() < 1e-3


def test_runs_that_have_nothing_in_common(run, tmp_path):
    found = gm.compare_runs(run, train(tmp_path / "b", seed=1))
    assert found.apart.startswith(
        "different from the first compared step, 0, on: the cosine of most gradients"
    )
    assert found.distances.unrelated

    def other_data(step, model):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))

    found = gm.compare_runs(run, train(tmp_path / "c", wrong=other_data))
    assert found.apart.endswith("apart: the batches, the random numbers or the loss differ")


def test_a_step_with_nan_and_a_changed_rate_are_not_faults(run, tmp_path):
    found = gm.compare_runs(run, train(tmp_path / "b", halves=True, nan_at=10))
    # the update of this step is left out, too
    assert found.distances.grads[10, -1].isnan()
    assert found.distances.grads[10].isnan().sum() == 1

    found = gm.compare_runs(run, train(tmp_path / "c", lr=0.0500001, wrong=double))
    assert found.apart.endswith("; `lr` differs from step 0 on")


def test_without_projections_it_says_so(run, tmp_path):
    plain = {"projections": None, "projections_every": None}
    other = train(tmp_path / "b", halves=True, **plain)
    assert gm.compare_runs(run, other).apart == "distances: not compared, because B has no projections"
    both = gm.compare_runs(other, other)
    assert both.apart == "distances: not compared, because A and B have no projections"
    with pytest.raises(ValueError, match="A and B have no projections; there is nothing to draw"):
        both.plot()


def test_equal_runs_have_no_distance(run, tmp_path):
    assert gm.compare_runs(run, run).apart == "no distance in 24 compared steps: projections are equal"
    exact = train(tmp_path / "b", fingerprint=True)
    found = gm.compare_runs(exact, exact)
    assert (found.identical, found.distances, found.apart) == (True, None, "")


def test_distances_are_drawn(run, tmp_path):
    pytest.importorskip("matplotlib").use("Agg")
    found = gm.compare_runs(run, train(tmp_path / "b", halves=True, wrong=double))
    (axes,) = found.plot().axes
    assert axes.get_yscale() == "log"
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert axes.get_xlabel() == "step"
    assert labels == ["other gradients", "rounding explains", "all weights", "2.weight.grad"]


def test_the_page_of_two_runs_has_the_distances(run, tmp_path):
    values, _ = contents([run, train(tmp_path / "b", halves=True, wrong=double)])
    drawn = values["differ"]["distances"]
    assert values["differ"]["apart"].startswith("the same up to rounding until step 12; then")
    assert (drawn["name"], drawn["step"], len(drawn["others"])) == ("2.weight.grad", 12, 5)
    assert drawn["line"]["x"] == list(range(24))
    assert drawn["line"]["y"][12] == pytest.approx(0.5, rel=1e-3)
    assert max(drawn["limit"]["y"]) <= 2

    plain = train(tmp_path / "c", halves=True, projections=None, projections_every=None)
    values, _ = contents([run, plain])
    assert (values["differ"]["apart"], values["differ"]["distances"]) == ("", None)
