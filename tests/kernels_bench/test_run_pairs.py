"""The pairs of runs that distances are examined with: faults are found, and all pairs are counted."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

pytest.importorskip("pyarrow")

from kernels_bench.monitoring import run_pairs

pytestmark = pytest.mark.usefixtures("_one_thread")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(run_pairs, "STARTS", (4,))
    monkeypatch.setattr(run_pairs, "FAULTY_STEPS", 4)
    monkeypatch.setattr(run_pairs, "PROJECTIONS", 16)
    monkeypatch.setattr(run_pairs, "FAULTS", {"2 times": 2.0, "a quarter of rows 0": None})


@pytest.mark.parametrize("kind", run_pairs.MODELS)
def test_pairs_are_judged(kind):
    found = Counter()
    made = run_pairs.pairs(kind, "AdamW 1e-3", 3, 8, run_pairs.ROUNDINGS[:-1])
    for _, fault, where, start, names, a, b in made:
        assert len(a[0]) == len(b[0]) == 8
        judged = run_pairs.judged(names, a, b, 16, 1, has_weights=True)
        assert judged.names == tuple(names[::-1])
        found[fault, where, run_pairs.outcome(judged, where, start)] += 1
    faults = {one: n for one, n in found.items() if one[0]}
    assert sum(faults.values()) == 4
    assert {outcome for _, _, outcome in faults} <= {"lasts", "remark"}
    assert sum(found.values()) - 4 == (3 if kind == "conv" else 4)


def test_tf32_rounds_to_ten_bits():
    x = torch.tensor([1.0, 1 + 2**-10, 1 + 2**-12, -3.0])
    assert run_pairs.Round.apply(x).tolist() == [1.0, 1 + 2**-10, 1.0, -3.0]


def test_the_table(monkeypatch, capsys):
    monkeypatch.setattr(run_pairs, "COLUMNS", [(16, 1, True)])
    run_pairs.main(["--seeds", "3", "--models", "mlp", "--steps", "8", "--roundings", "order"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "lasts / remark / too far / nothing"
    assert lines[2] == "| pairs |  | k = 16, weights, every 1 |"
    rows = {row[1]: row[2:4] for row in ([x.strip() for x in line.split("|")] for line in lines[4:])}
    assert set(rows) == {
        "mlp, order", "2 times, one", "2 times, all", "a quarter of rows 0, one", "a quarter of rows 0, all"
    }  # fmt: skip
    assert {int(count) for count, _ in rows.values()} == {len(run_pairs.OPTIMIZERS)}
    for count, cells in rows.values():
        assert sum(map(int, cells.split(" / "))) == int(count)
