"""docs/how-to/updates.md runs unchanged, and says what it prints."""

from __future__ import annotations

import re

import pytest

from support.pages import blocks, execute

PAGE = "docs/how-to/updates.md"


def numbers(table):
    """Return the words of a table, numbers as numbers."""
    words = table.replace(",", "").split()
    return [float(word) if re.fullmatch(r"[-+.e\d]*\d", word) else word for word in words]


@pytest.mark.usefixtures("_dynamo", "_eager_backend")
def test_the_page_runs_and_says_what_it_prints(capsys):
    first, *others = blocks(PAGE)
    scope = execute(first)
    (table,) = blocks(PAGE, "text")
    for printed, said in zip(numbers(capsys.readouterr().out), numbers(table), strict=True):
        # the steps of a few elements depend on the rounding of the processor
        assert printed == (said if isinstance(said, str) else pytest.approx(said, rel=0.1, abs=0.02))
    for block in others:
        exec(block, scope)  # noqa: S102
        values = [line for line in block.splitlines() if line.startswith("print") and "# " in line]
        for line, printed in zip(values, capsys.readouterr().out.splitlines(), strict=True):
            said = line.partition("# ")[2].strip()
            if not said.startswith(("about", "how far")):
                assert printed == said
    share = sum(x.nbytes for x in scope["gm"].Snapshot(scope["big"], sample=1 / 16).buffers())
    assert share < 1.01 / 16 * sum(p.nbytes for p in scope["big"].parameters())
