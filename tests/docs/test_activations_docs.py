"""docs/how-to/activations.md runs unchanged, and prints what it says."""

from __future__ import annotations

import re

from support.pages import blocks, execute, text

PAGE = "docs/how-to/activations.md"


def test_the_page_runs_and_says_what_it_prints(capsys):
    outputs = re.findall(r"```text\n(.*?)```", text(PAGE), flags=re.DOTALL)
    for block, said in zip(blocks(PAGE), outputs, strict=True):
        execute(block)["taps"].remove()
        assert capsys.readouterr().out == said
