"""docs/how-to/optimizer-states.md runs unchanged, and says what it prints."""

from __future__ import annotations

import re

import pytest

from support.pages import blocks

PAGE = "docs/how-to/optimizer-states.md"


def numbers(table):
    """Return the words of a table, numbers as numbers."""
    words = table.replace(",", "").split()
    return [float(word) if re.fullmatch(r"[-+.e\d]*\d", word) else word for word in words]


def test_the_page_runs_and_says_what_it_prints(capsys, tmp_path, monkeypatch):
    pytest.importorskip("pyarrow")
    monkeypatch.chdir(tmp_path)
    first, second = blocks(PAGE)
    scope = {}
    exec(first, scope)  # noqa: S102
    kinds, *table, decay = capsys.readouterr().out.splitlines()
    assert kinds == "['grads', 'exp_avg', 'exp_avg_sq']"
    assert decay == "0.0"
    (said,) = blocks(PAGE, "text")
    for printed, expected in zip(numbers("\n".join(table)), numbers(said), strict=True):
        # rounding depends on the processor
        assert printed == (expected if isinstance(expected, str) else pytest.approx(expected, rel=0.05))
    exec(second, scope)  # noqa: S102
    scope["monitor"].close()
