"""The pages of docs/, and their code blocks."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def text(page):
    return (ROOT / page).read_text(encoding="utf-8")


def code_of(markdown, language="python"):
    return re.findall(rf"^```{language}\n(.*?)^```", markdown, flags=re.MULTILINE | re.DOTALL)


def blocks(page, language="python"):
    return code_of(text(page), language)


def sections(page):
    """Return the blocks of each section, by its title."""
    return {part.splitlines()[0]: code_of(part) for part in text(page).split("\n## ")[1:]}


def execute(*code, **scope):
    """Run blocks of a page one after the other, and return the names that they define, and those of scope."""
    for block in code:
        exec(block, scope)  # noqa: S102 the page's own code
    return scope


def close(one, other):
    """Return whether two printed tables agree, to three digits."""
    words = [page.replace(",", "").split() for page in (one, other)]
    pairs = list(zip(*words, strict=True))
    return all(a == b or float(a) == pytest.approx(float(b), rel=5e-3) for a, b in pairs)


def load(path):
    """Import a script of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / "docs" / path)
    # dataclasses look up their module there
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
