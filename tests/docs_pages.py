"""README.md and docs/ as what is in them: code blocks, inline code, links, headings, tables. Read by markdown-it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token


ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line} ({self.language or 'no language'})"


@dataclass
class Page:
    """A page, taken apart.

    Attributes:
        anchors (`list[str]`):
            Of its headings, as GitHub makes them.
        tables (`list[list[list[str]]]`):
            Cells by table and row, the head among the rows.
        lines (`list[str]`):
            As they are written.
    """

    name: str
    blocks: list[Block] = field(default_factory=list)
    inline_code: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    anchors: list[str] = field(default_factory=list)
    tables: list[list[list[str]]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    @property
    def path(self) -> Path:
        return ROOT / self.name

    def table(self, first_head: str, *, after: str = "") -> list[list[str]]:
        """The rows, without the head, of the only table whose first head cell is this."""
        (table,) = [table for table in self.tables if table[0][0] == first_head]
        return table[1:]


def page_names() -> list[str]:
    return ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))]


@cache
def read_page(name: str) -> Page:
    """The page of this name, relative to the root of the repository."""
    text = (ROOT / name).read_text()
    page = Page(name, lines=text.splitlines())
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    for index, token in enumerate(tokens):
        if token.type == "fence":
            page.blocks.append(Block(name, (token.map or [0])[0] + 1, token.info.strip(), token.content))
        elif token.type == "heading_open":
            page.anchors.append(anchor(plain(tokens[index + 1]), page.anchors))
        elif token.type == "table_open":
            page.tables.append([])
        elif token.type == "tr_open":
            page.tables[-1].append([])
        elif token.type in ("th_open", "td_open"):
            page.tables[-1][-1].append(tokens[index + 1].content)
        elif token.type == "inline":
            for child in token.children or []:
                if child.type == "code_inline":
                    page.inline_code.append(child.content)
                elif child.type == "link_open":
                    page.links.append(str(child.attrs["href"]))
                elif child.type == "image":
                    page.links.append(str(child.attrs["src"]))
    return page


def plain(inline: Token) -> str:
    """The text of a heading."""
    return "".join(child.content for child in inline.children or [])


def anchor(heading: str, earlier: list[str]) -> str:
    """What GitHub makes of a heading: lower case, no punctuation, hyphens for spaces, and a number if it is taken."""
    slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
    number = sum(taken == slug or re.fullmatch(re.escape(slug) + r"-\d+", taken) is not None for taken in earlier)
    return f"{slug}-{number}" if number else slug
