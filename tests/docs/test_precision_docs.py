"""docs/how-to/precision.md runs unchanged, and its table is the one that is printed."""

from __future__ import annotations

import pytest

from support.pages import blocks, execute

PAGE = "docs/how-to/precision.md"


def test_the_page_runs_and_says_what_it_prints(capsys, tmp_path, monkeypatch):
    pytest.importorskip("pyarrow")
    # a run is recorded
    monkeypatch.chdir(tmp_path)
    first, *others = blocks(PAGE)
    scope = execute(first)
    (table,) = blocks(PAGE, "text")
    printed, said = capsys.readouterr().out.splitlines(), table.splitlines()
    assert len(printed) == len(said)
    rows = [{line.split()[0]: line.split() for line in lines[3:-4]} for lines in (printed, said)]
    assert rows[0].keys() == rows[1].keys()
    # those of gradients depend on the rounding of the processor
    weights = [name for name in rows[0] if name.endswith(("weight", "bias"))]
    assert len(weights) > 4
    for name in weights:
        assert rows[0][name] == rows[1][name]
    scope = execute(*others, **scope)
    assert scope["run"].precision_steps == [0, 10, 20, 30, 40]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[-4:]] == ["mxfp8_e4m3", "mxfp8_e5m2", "mxfp4", "nvfp4"]
    assert "dtype=torch.float64" in "".join(lines)
