"""docs/how-to/projections.md prints what it says."""

from __future__ import annotations

import pytest

from support.pages import blocks, execute

pytestmark = pytest.mark.usefixtures("_one_thread")

PAGE = "docs/how-to/projections.md"


def test_the_page_prints_what_it_says(capsys, monkeypatch, tmp_path):
    pytest.importorskip("pyarrow")
    monkeypatch.chdir(tmp_path)
    execute(*blocks(PAGE))
    assert capsys.readouterr().out == "".join(blocks(PAGE, "text"))
