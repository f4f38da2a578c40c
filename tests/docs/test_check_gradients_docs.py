"""docs/how-to/check-gradients.md and rewritten-loss.md print what they say."""

from __future__ import annotations

import re

import pytest

from support.pages import blocks, execute

pytestmark = pytest.mark.usefixtures("_one_thread")


@pytest.mark.parametrize("page", ["docs/how-to/check-gradients.md", "docs/how-to/rewritten-loss.md"])
def test_the_page_prints_what_it_says(capsys, monkeypatch, tmp_path, page):
    monkeypatch.chdir(tmp_path)
    execute(*blocks(page))
    expected = "".join(blocks(page, "text"))
    # the sizes of rounding errors, and so the order of tensors, depend on the processor
    assert _without_rounding(capsys.readouterr().out) == _without_rounding(expected)


def _without_rounding(text):
    text = re.sub(r"─+", "─", re.sub(r"\d(\.\d+)?e-\d+|0\.\d+", "#", text))
    return sorted([re.sub(r"\s+", " ", line) for line in text.splitlines()])
