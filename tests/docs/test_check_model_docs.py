"""docs/how-to/check-model.md prints what it says, and its table is that of the contracts."""

from __future__ import annotations

import re

import pytest

from gradiometer.checks.contract import ORDER
from gradiometer.checks.contracts import CONTRACTS
from support.pages import blocks, execute, text

pytestmark = pytest.mark.usefixtures("_one_thread")

PAGE = "docs/how-to/check-model.md"


def test_the_page_prints_what_it_says(capsys):
    execute(*blocks(PAGE))
    printed = capsys.readouterr().out
    healthy, broken = blocks(PAGE, "text")
    # the sizes of differences depend on the rounding of the processor
    assert _without_numbers(printed).startswith(_without_numbers(healthy + broken))
    assert "warning  step 0: causal is broken: token 1 changes the output of token 0" in printed


def _without_numbers(lines):
    return re.sub(r"[\d.,]+ %", "# %", lines)


def test_the_table_is_that_of_the_contracts():
    rows = re.findall(r"^\| (\w+): `(\w+)` \| (.*?) \| (.*?) \|$", text(PAGE), re.MULTILINE)
    assert [row[1] for row in rows] == list(ORDER)
    for group, name, holds, how in rows:
        each = CONTRACTS[name]
        assert (group, holds) == (each.group, each.text)
        assert how == each.examine.__doc__.splitlines()[0].rstrip(".").replace("`", "")
