"""docs/how-to/activations.md runs unchanged, and prints what it says."""

from __future__ import annotations

import re

from support.pages import blocks, text

PAGE = "docs/how-to/activations.md"


def test_the_page_runs_and_says_what_it_prints(capsys):
    outputs = re.findall(r"```text\n(.*?)```", text(PAGE), flags=re.DOTALL)
    for block, said in zip(blocks(PAGE), outputs, strict=True):
        scope: dict[str, object] = {}
        exec(block, scope)  # noqa: S102 the page's own code
        scope["taps"].remove()
        assert capsys.readouterr().out == said
