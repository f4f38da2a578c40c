"""The site: every public name has its page, every page is reachable, and no link is dead."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re

import pytest

import gradiometer as gm
from support.pages import ROOT, code_of, load, text

SITE = ROOT / "docs" / ".site"
PAGES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))
OTHERS = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "kernels_bench/README.md"]
REPOSITORY = "https://github.com/gradiometer/gradiometer"


@pytest.fixture(scope="module")
def entries():
    return {entry.shown: entry for entry in load(".site/public_names.py").entries()}


def test_every_public_name_has_a_page(entries):
    listed = [shown.removeprefix("gm.") for shown in entries if shown.count(".") == 1]
    assert sorted(listed) == sorted(gm.__all__)
    assert len({entry.page for entry in entries.values()}) == len(entries)


@pytest.mark.parametrize("package", ["rules", "sinks"])
def test_every_rule_and_every_sink_has_a_page(entries, package):
    module = getattr(gm, package)
    paths = {entry.path for entry in entries.values()}
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isclass(value):
            assert f"{value.__module__}.{value.__qualname__}" in paths, name
    assert "gm.rules.default_rules" in entries


def test_a_page_is_about_the_name_that_users_import(entries):
    for shown, entry in entries.items():
        if shown.startswith("gm."):
            value = gm
            for part in shown.split(".")[1:]:
                value = getattr(value, part)
            where, _, name = entry.path.rpartition(".")
            assert getattr(importlib.import_module(where), name) is value, shown
            assert entry.summary, shown
            if inspect.isclass(value) or inspect.isfunction(value):
                assert inspect.getdoc(value).startswith(entry.summary.split()[0])


def test_every_page_is_in_the_navigation():
    config = (SITE / "mkdocs.yml").read_text("utf-8")
    listed = re.findall(r"^ +- .*?([\w/-]+\.md)$", config, flags=re.MULTILINE)
    assert sorted(f"docs/{page}" for page in listed) == PAGES


def test_every_page_with_code_is_run_by_a_test():
    files = set((ROOT / "tests").rglob("test_*.py")) - {ROOT / "tests" / "docs" / "test_site.py"}
    sources = "".join(file.read_text("utf-8") for file in files)
    pages = [page for page in [*PAGES, *OTHERS] if code_of(text(page))]
    assert len(pages) > 10
    assert [page for page in pages if f'"{page}"' not in sources] == []


def without_code(markdown):
    markdown = re.sub(r"^```.*?^```", "", markdown, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "", markdown)


def anchors(page):
    """Return the anchors of a page's headings, as GitHub and the site generate them."""
    markdown = re.sub(r"^```.*?^```", "", text(page), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*?) *$", markdown, flags=re.MULTILINE)
    titles = [re.sub(r"\[(.*?)\]\(.*?\)", r"\1", title) for title in titles]
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [*PAGES, *OTHERS])
def test_no_link_is_dead(page):
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(text(page))):
        target, _, anchor = link.partition("#")
        within = re.fullmatch(rf"{REPOSITORY}/(?:blob|tree)/main/(.+)", target)
        if within:
            path = ROOT / within[1]
        elif re.match(r"https?:", target):
            continue
        else:
            path = ((ROOT / page).parent / target).resolve() if target else ROOT / page
        known = path.exists() and ROOT in [path, *path.parents]
        # the site has no files outside docs/
        if known and page.startswith("docs/") and not within:
            known = ROOT / "docs" in path.parents
        if known and anchor and path.suffix == ".md":
            known = anchor in anchors(str(path.relative_to(ROOT)))
        if not known:
            dead.append(link)
    assert dead == []


@pytest.mark.parametrize("page", PAGES)
def test_a_page_needs_nothing_from_elsewhere(page):
    # diagrams are files of the repository: Mermaid would be loaded from a server
    assert "```mermaid" not in text(page)
    assert not re.search(r"!\[.*?\]\(https?:|<(?:script|img|iframe|link)\b", without_code(text(page)))


@pytest.mark.parametrize("page", [*PAGES, *OTHERS])
def test_a_page_names_files_that_exist(page):
    named = re.findall(r"`((?:tests|src|kernels_bench|docs)/[\w./*-]+)`", text(page))
    assert [path for path in named if not list(ROOT.glob(path.rstrip("/")))] == []


def test_every_promise_of_the_run_record_names_tests_that_exist():
    page = text("docs/explanation/run-record.md")
    named = re.findall(r"`(tests/[\w/.]+\.py)`(?: -k `([\w ]+)`)?", page)
    assert len(named) > 30
    # each row of the tables of promises ends with a test
    rows = re.findall(
        r"^\|(?! *(?:---|the run ends by|what happens|damage|in the run)).*",
        page.split("## Figures")[0],
        re.MULTILINE,
    )
    assert [row for row in rows if "`tests/" not in row] == []
    for path, words in named:
        tests = re.findall(r"^def (test_\w+)", text(path), re.MULTILINE)
        for word in words.split(" or "):
            assert any(word in test for test in tests), (path, word)
