"""The code in docs/how-to/amp.md runs unchanged, and gives the results on the page."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

from support.pages import blocks

pytestmark = pytest.mark.usefixtures("_eager_backend")

PAGE = "docs/how-to/amp.md"


def assert_shown(printed: str, shown: str) -> None:
    """Compare words and numbers; sums in fp16 differ in their last digits between processors."""
    for word, expected in zip(printed.split(), shown.split(), strict=True):
        if re.fullmatch(r"\d\.\d{3}e[+-]\d\d", expected):
            assert float(word) == pytest.approx(float(expected), rel=0.02)
        else:
            assert word == expected


def run(block: str, scope: dict[str, Any]) -> None:
    exec(block, scope)  # noqa: S102 the page's own code


def test_every_block_of_the_page_runs_and_says_what_it_says(capsys):
    page = blocks(PAGE)
    setup, before, skipped, reads, watched, after, clipped, fused, compiled, scaled, shared = page
    scope: dict[str, Any] = {}
    run(setup, scope)
    run(before, scope)
    reports = scope["reports"]
    assert {report.skipped for report in reports} == {True, False}

    run(skipped, scope)
    printed = capsys.readouterr().out
    assert_shown(printed, blocks(PAGE, "text")[0])
    assert "step skipped" in printed.splitlines()[0]

    run(reads, scope)
    values = [eval(line.partition("#")[0], scope) for line in reads.splitlines()[1:]]  # noqa: S307
    assert values == [(True, True), ["2.weight", "2.bias"], [], 0.0]
    run(watched, scope)
    assert (scope["exploding"], scope["health"]) == (set(), 1.0)
    assert 0.0 < scope["share"] < 0.5
    for block in (after, clipped):
        run(block, scope)
        assert scope["stats"].measured
    run(fused, scope)
    assert scope["scale"] <= 2.0**16
    for block in (compiled, scaled):
        run(block, scope)
        report = scope["stats"].materialize()
        assert not report.skipped
        assert 0.0 < report.total_norm < 100.0
        # no gradient is left for the next step to accumulate into
        assert all(p.grad is None for p in scope["model"].parameters())

    # the guard
    weights = [p.detach().clone() for p in scope["model"].parameters()]
    _, stats = scope["step"](scope["x"] * math.inf, scope["y"], torch.tensor(0.1))
    assert stats.skipped
    assert all(torch.equal(p, w) for p, w in zip(scope["model"].parameters(), weights, strict=True))

    # tests/distributed/test_ranks_clip.py runs it on several
    run(shared, scope)
    assert len(set(scope["scales"])) > 1
    assert scope["stats"].total_norm < 100.0


@pytest.mark.parametrize("loop", [1, 5, 6], ids=["before", "after, with clipping", "clipping without"])
def test_the_loops_stay_as_they_are_for_a_fused_optimizer(loop):
    page = blocks(PAGE)
    weights = []
    for fused in (False, True):
        scope: dict[str, Any] = {}
        run(page[0].replace("lr=1e-3", f"lr=1e-3, fused={fused}"), scope)
        run(page[loop], scope)
        weights.append([p.detach() for p in scope["model"].parameters()])
        assert scope["scaler"].get_scale() < 2.0**20
    for plain, other in zip(*weights, strict=True):
        torch.testing.assert_close(plain, other)
