"""The script that injects faults: fingerprints miss none, and other checks miss those that they have to."""

from __future__ import annotations

import re

import pytest
import torch

from kernels_bench import faults

pytestmark = pytest.mark.usefixtures("_one_thread")


def test_no_fault_is_missed_and_no_alarm_is_false(capsys):
    assert faults.main(["--faults", "3000", "--unchanged", "1500", "--check"]) == 0
    printed = capsys.readouterr().out
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines() if line[:1] == "|"
    ]
    (head, _, *rows), total = rows[:-1], rows[-1]
    assert len(rows) == len(faults.FAULTS) * len(faults.INTEGERS)
    assert {row[2] for row in rows} == {"100"}
    assert total[2:4] == ["3,000", "0"]
    assert {row[3] for row in rows} == {"0"}
    by_name = {row[0]: dict(zip(head, row, strict=True)) for row in rows}
    assert by_name["block transposed"]["by statistics"] == "100"
    if hasattr(torch, "hash_tensor"):
        assert by_name["swap of two elements"]["by hash_tensor"] == "100"
    found = re.search(r"^0 false alarms in ([\d,]+) unchanged tensors", printed, re.MULTILINE)
    assert int(found[1].replace(",", "")) >= 1500


@pytest.mark.parametrize("kind", faults.FAULTS)
@pytest.mark.parametrize("data", faults.DATA)
def test_a_fault_changes_what_it_says(kind, data):
    g = torch.Generator().manual_seed(0)
    for shape in faults.SHAPES:
        x, batch = faults.batch_of(shape, data, torch.bfloat16, 20, g)
        faults.FAULTS[kind](batch)
        flipped = (batch.flat ^ x.view(-1)).long() & 0xFFFF
        elements = (flipped != 0).sum(1)
        if kind == "bit flip":
            assert (elements == 1).all()
        elif kind in {"swap of two elements", "same bit of two elements", "same bit, opposite directions"}:
            assert set(elements.tolist()) <= {0, 2}
        elif kind == "signs of a row":
            assert (elements == shape[1]).all()
        if kind in {"swap of two elements", "row shifted", "block transposed"}:
            assert torch.equal(batch.flat.sort(1).values, x.view(1, -1).sort(1).values.expand(20, -1))
        if "bit" in kind and kind != "same bit, opposite directions":
            # one bit
            assert all((flipped[i].unique() > 0).sum() <= 1 for i in range(20))


def test_the_check_fails_where_a_fault_is_missed(monkeypatch, capsys):
    monkeypatch.setattr(faults, "FAULTS", {"swap of two elements": faults.swap})
    checks_of = faults.checks_of
    monkeypatch.setattr(faults, "checks_of", lambda *args: {"fingerprint": checks_of(*args)["statistics"]})
    assert faults.main(["--faults", "60", "--unchanged", "0", "--check"]) == 1
    assert faults.main(["--faults", "60", "--unchanged", "0"]) == 0
    with pytest.raises(SystemExit):
        faults.main(["--faults", "0"])
    assert "--faults must be 3 or more" in capsys.readouterr().err
