"""README, tutorial and how-to guides: every block can be pasted into a Python session; a page is a script."""

from __future__ import annotations

import ast
import code
import importlib.util
import re
import sys

import pytest

from support.pages import ROOT, blocks, code_of, text
from support.session import Session, errors

pytest.importorskip("pyarrow")

ALL = ["README.md", "docs/index.md", "docs/tutorial.md"]
ALL += sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs/how-to").glob("*.md"))
PAGES = [page for page in ALL if blocks(page)]
# logs of other packages stay on this machine
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "MLFLOW_ALLOW_FILE_STORE": "true",
}


def is_file(block):
    """Return whether a block is a file for torchrun, and not lines for a session."""
    return "init_process_group(" in block


def missing(block):
    """Return the packages that a block imports, and that are not installed here."""
    nodes = list(ast.walk(ast.parse(block)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    packages = {name.partition(".")[0] for name in names}
    return {package for package in packages if importlib.util.find_spec(package) is None}


def lines_of(page):
    """Return the blocks to paste, without sections of packages that are not installed, and these packages."""
    kept, absent = [], set()
    for part in text(page).split("\n## "):
        own = [block for block in code_of(part) if not is_file(block)]
        lacking = set().union(*map(missing, own))
        kept += [] if lacking else own
        absent |= lacking
    return kept, sorted(absent)


@pytest.mark.parametrize("page", [page for page in PAGES if not all(map(is_file, blocks(page)))])
def test_a_page_can_be_pasted_and_is_a_script(page, tmp_path):
    lines, absent = lines_of(page)
    if not lines:
        pytest.skip(f"{page} imports {', '.join(absent)}")
    folders = [tmp_path / name for name in ("pasted", "script")]
    for folder in folders:
        folder.mkdir()
    (tmp_path / "page.py").write_text("\n".join(lines), encoding="utf-8")
    store = (tmp_path / "store").as_uri()
    with Session(folders[0], **OFFLINE, WANDB_DIR=str(tmp_path), MLFLOW_TRACKING_URI=store) as session:
        for block in lines:
            printed = session.paste(block)
            assert not errors(printed), printed
        # in the same process, whose imports take longer than most pages
        session.paste("import os, runpy")
        session.paste(f"os.chdir({str(folders[1])!r})")
        printed = session.paste("_ = runpy.run_path('../page.py', run_name='__main__')")
        assert not errors(printed), printed
        assert session.leave() == 0


class Reader(code.InteractiveConsole):
    """Takes lines as a session does, and compiles what is complete without running it."""

    def __init__(self):
        super().__init__()
        self.problems = []

    def runcode(self, code):
        """Do nothing."""

    def showsyntaxerror(self, *_, **__):
        self.problems.append(f"{sys.exc_info()[1]}")


def problems(block):
    """Return the syntax errors in a block if it is pasted."""
    reader = Reader()
    for line in [*block.splitlines(), ""]:
        reader.push(line)
    # a session refuses these too, but the standard library's console waits for more lines
    return reader.problems + re.findall(r"^.*: *(?:#.*)?\n\n+ +.*", block, re.MULTILINE)


@pytest.mark.parametrize("page", PAGES)
def test_no_line_is_a_syntax_error_in_a_session(page):
    # of every package, also of those that are not installed here
    assert [found for block in blocks(page) if not is_file(block) for found in problems(block)] == []


@pytest.mark.parametrize(
    "block",
    ["for x in y:\n    x\ny", "class A:\n    x = 1\n\n    y = 2", "with a:\n\n    b"],
    ids=["a statement after a block", "a blank line in a block", "a blank line at its start"],
)
def test_such_lines_are_syntax_errors(block):
    assert problems(block)
    ast.parse(block)


@pytest.mark.parametrize("page", [page for page in PAGES if any(map(is_file, blocks(page)))])
def test_a_file_for_torchrun_cannot_be_pasted_and_its_page_says_so(page, tmp_path):
    before, *_ = text(page).split("init_process_group(")
    assert "`torchrun --nproc-per-node=2 file.py`" in before
    assert "can't be pasted into a Python session" in " ".join(before.split())
    with Session(tmp_path) as session:
        for block in filter(is_file, blocks(page)):
            assert "environment variable RANK expected" in session.paste(block)


def test_a_session_shows_what_cannot_be_pasted(tmp_path):
    with Session(tmp_path) as session:
        assert errors(session.paste("for x in range(2):\n    print(x)\nprint(x)")) == [
            "SyntaxError: invalid syntax"
        ]
        assert errors(session.paste("")) == []
        (error,) = errors(session.paste("class A:\n    x = 1\n\n    y = 2"))
        assert error == "IndentationError: unexpected indent"
        session.paste("")
        assert errors(session.paste("with open('startup.py') as file:\n    x = 1\n\nx")) == []
        assert "NameError" in errors(session.paste("y"))[1]
        session.paste("import atexit, os\n")
        session.paste("_ = atexit.register(os._exit, 3)\n")
        assert session.leave() == 3
