"""docs/how-to/locate-nonfinite.md runs unchanged, and its table is that of the planted faults."""

from __future__ import annotations

import linecache

import pytest
import torch

from support.pages import blocks, text
from support.planted_faults import rows

PAGE = "docs/how-to/locate-nonfinite.md"
pytest.importorskip("pyarrow")


@pytest.mark.usefixtures("_eager_backend")
def test_the_page_runs_and_prints_what_it_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    scope: dict[str, object] = {}
    for i, block in enumerate(blocks(PAGE)):
        # a file, so that lines have a place and a text
        name = str(tmp_path / ("model.py" if not i else f"block_{i}.py"))
        linecache.cache[name] = (len(block), None, block.splitlines(keepends=True), name)
        exec(compile(block, name, "exec"), scope)  # noqa: S102 the page's own code
        if not i:
            first = capsys.readouterr().out
    printed = capsys.readouterr().out
    # the numbers depend on the initialization
    first, shown = first.splitlines(), blocks(PAGE, "text")[0].splitlines()
    assert first[:2] == shown[:2]
    assert [x.split(",")[0] for x in first[2:]] == [x.split(",")[0] for x in shown[2:]]
    assert printed.startswith("aten.exp forward made 1 Inf from finite inputs\nthe loss is nan\n")
    found = scope["found"]
    assert (found.operation, found.direction, found.then) == ("aten.log", "forward", None)
    assert found.code.startswith("return (model(x) - 0.1).log().mean()")
    assert f"\n{scope['kept'].step} aten.log made " in printed
    assert scope["kept"].step > 0


def test_the_table_is_that_of_the_planted_faults():
    table = text(PAGE).split("## Planted faults")[1].split("\n\n")[2]
    assert table.splitlines()[2:] == rows()
    assert len(rows()) >= 12
