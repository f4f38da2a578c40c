"""Hooks for mkdocs: a page for each public name, links to them, and two checks that mkdocs lacks."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkdocs.structure.files import File
from public_names import ROOT, entries

if TYPE_CHECKING:
    from public_names import Entry

# a logged warning fails the build
LOG = logging.getLogger("mkdocs.hooks.gradiometer")
HERE = Path(__file__).parent
REPOSITORY = "https://github.com/gradiometer/gradiometer"
# files of this folder that the site publishes
ASSETS = ("extra.css", "favicon.svg", "iframe-worker.js")
# the place of the table on reference/index.md
PLACE_OF_THE_TABLE = "*The site lists every public name here.*"
# markup that makes a browser load a resource when it shows the page
LOADS = re.compile(
    r"""<(?:script|img|iframe|source|video)\b[^>]*\ssrc=["']?(?:https?:)?//[^>]*>"""
    r"""|<link\b(?=[^>]*\srel=["']?(?:stylesheet|preload|preconnect|icon|manifest))[^>]*\shref=["']?(?:https?:)?//[^>]*>"""
    r"""|@import\s+(?:url\()?["']?(?:https?:)?//[^;]*|url\(["']?(?:https?:)?//[^)]*\)"""
)


def on_config(config: Any) -> Any:
    """Add the reference's pages to the navigation."""
    (section,) = [item["Reference"] for item in config.nav if "Reference" in item]
    for group in _groups():
        section.append({group: [{entry.title: f"reference/{entry.page}"} for entry in _of(group)]})
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the reference's pages, and the site's own assets."""
    for entry in entries():
        files.append(File.generated(config, f"reference/{entry.page}", content=_page(entry)))
    for name in ASSETS:
        files.append(File.generated(config, f"assets/{name}", abs_src_path=str(HERE / name)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill in the table of names, link names in the text, and check links into the repository."""
    for path in re.findall(rf"{REPOSITORY}/(?:blob|tree)/main/([^)\s#]+)", markdown):
        if not (ROOT / path).exists():
            LOG.warning("%s links to %s, which the repository does not have", page.file.src_uri, path)
    if page.file.src_uri.startswith("reference/api/"):
        return markdown
    tables = [f"### {group}\n\n{_table(_of(group), 'api/')}" for group in _groups()]
    return _linked(markdown.replace(PLACE_OF_THE_TABLE, "\n".join(tables)))


def on_post_build(config: Any) -> None:
    """Warn about every external resource that a page would load."""
    for path in sorted(Path(config.site_dir).rglob("*")):
        if path.suffix in {".html", ".css", ".svg"}:
            for found in LOADS.findall(path.read_text(encoding="utf-8")):
                LOG.warning("%s would load %s", path.relative_to(config.site_dir), found[:200])


def _groups() -> list[str]:
    return list(dict.fromkeys([entry.group for entry in entries()]))


def _of(group: str) -> list[Entry]:
    return [entry for entry in entries() if entry.group == group]


def _page(entry: Entry) -> str:
    if entry.is_package:
        inner = [other for other in _of(entry.group) if not other.is_package]
        options = "    options:\n      show_root_heading: false\n      members: []\n"
        return f"# {entry.shown}\n\n::: {entry.path}\n{options}\n{_table(inner, '')}"
    options = f"    options:\n      heading: {entry.shown}\n      toc_label: {entry.shown}\n"
    if entry.shown.rpartition(".")[2].isupper() or entry.title == "__version__":
        # show the value of a constant
        options += "      show_attribute_values: true\n"
    return f"---\ntitle: {entry.shown}\n---\n\n::: {entry.path}\n{options}"


def _table(listed: list[Entry], folder: str) -> str:
    lines = ["| name | description |", "|---|---|"]
    for entry in listed:
        summary = entry.summary.replace("``", "`").replace("|", "\\|")
        # relative to the parent folder of this page's folder
        target = folder + entry.page.removeprefix("api/")
        lines.append(f"| [`{entry.shown}`]({target}) | {summary} |")
    return "\n".join([*lines, ""])


def _linked(markdown: str) -> str:
    """Make links of public names in the text, as `gm.collect_grads(model)`, but not in code and headings."""
    paths = {entry.shown: entry.path for entry in entries() if not entry.is_package}

    def link(found: re.Match[str]) -> str:
        path = paths.get(found[1])
        return found[0] if path is None else f"[{found[0]}][{path}]"

    lines, is_code = [], False
    for line in markdown.split("\n"):
        is_code ^= line.lstrip().startswith("```")
        if not is_code and not line.startswith(("#", "    ")):
            line = re.sub(r"(?<![\[`\w])`(gm\.\w[\w.]*)(?:\([^`]*\))?`(?![\]`])", link, line)  # noqa: PLW2901
        lines.append(line)
    return "\n".join(lines)
