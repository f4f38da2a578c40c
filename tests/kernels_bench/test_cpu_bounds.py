"""The script that checks the bounds of the CPU path: its contenders, and that a bound can be missed."""

from __future__ import annotations

import pytest

from kernels_bench import cpu_bounds


def test_every_contender_of_a_bound_is_measured(monkeypatch, capsys):
    monkeypatch.setattr(cpu_bounds, "BUSY_ELEMENTS", 2**12)
    monkeypatch.setattr(cpu_bounds.os, "cpu_count", lambda: 1)
    # compiling a step takes a minute
    cases = {bound.case for bound in cpu_bounds.BOUNDS} - {"step"}
    cpu_bounds.main(["--only", ",".join(cases), "--rounds", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + sum(bound.case in cases for bound in cpu_bounds.BOUNDS)


@pytest.mark.usefixtures("_eager_backend")
def test_a_step_with_collection_does_what_one_without_does():
    # the first batch takes as long as it has to
    steps = cpu_bounds.steps(milliseconds=0.0)
    loss, stats = steps["with collect_grads"]()
    assert loss > 0
    assert steps["without"]() > 0
    assert len(stats.names) == 8
    assert stats.total_norm > 0


@pytest.mark.parametrize(("most", "status"), [(1e9, 0), (0.0, 1)])
def test_the_check_fails_where_a_bound_is_missed(monkeypatch, most, status):
    bound = cpu_bounds.Bound("2 of 32", "grad_norm", "get_total_norm", most)
    monkeypatch.setattr(cpu_bounds, "BOUNDS", (bound,))
    assert cpu_bounds.main(["--check", "--rounds", "2"]) == status


def test_a_case_that_is_not_there_is_refused(capsys):
    with pytest.raises(SystemExit):
        cpu_bounds.main(["--only", "lazy"])
    assert "2 of 32" in capsys.readouterr().err
