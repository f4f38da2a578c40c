"""Convert docstrings to Markdown for mkdocstrings: fenced examples, and links to names of this package."""

from __future__ import annotations

import re
from textwrap import dedent
from typing import Any

import griffe
from public_names import entries

# an indented block after two colons; an example and its output, up to the next empty line
LITERAL = re.compile(r"^(.*)::\n\n((?:(?: +.*)?\n)+(?: +.*)?)", re.MULTILINE)
EXAMPLE = re.compile(r"^( *)>>> .*(?:\n(?! *$).+)*", re.MULTILINE)
NAME = re.compile(r"(?<!`)`(?:gradiometer\.|gm\.)?([\w.]+)`(?!`)")


class Markdown(griffe.Extension):
    """Rewrites each docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Convert the docstring of one object of any kind."""
        if obj.docstring is not None:
            obj.docstring.value = _markdown(obj.docstring.value)


def _markdown(text: str) -> str:
    text = LITERAL.sub(lambda found: f"{found[1]}```python\n{dedent(found[2]).strip()}\n```\n\n", text)
    text = EXAMPLE.sub(lambda found: f"{found[1]}```pycon\n{found[0]}\n{found[1]}```", text)
    return NAME.sub(_link, text)


def _link(found: re.Match[str]) -> str:
    """Link a public name, or a member of one as `TensorStats.reduce`."""
    name = found[1]
    for entry in entries():
        if name == entry.shown.removeprefix("gm.") and not entry.is_package:
            return f"[{found[0]}][{entry.path}]"
        owner = entry.shown.rpartition(".")[2]
        if not entry.is_package and name.startswith(f"{owner}.") and name.count(".") == 1:
            # a member without a docstring has no anchor to link to
            member = f"{entry.path}.{name.partition('.')[2]}"
            return f'<autoref optional identifier="{member}"><code>{found[0].strip("`")}</code></autoref>'
    return found[0]
