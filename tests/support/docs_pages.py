"""The pages of the documentation: code blocks, inline code, links, headings and tables, read by markdown-it."""

import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt


ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Block:
    """A fenced code block."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass
class Page:
    """A parsed page. The first row of a table is its head."""

    text: str
    blocks: list[Block] = field(default_factory=list)
    inline_code: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    anchors: list[str] = field(default_factory=list)  # of its headings, as on GitHub
    tables: list[list[list[str]]] = field(default_factory=list)


def page_names() -> list[str]:
    docs = sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))
    return ["README.md", "CONTRIBUTING.md", "benchmarks/README.md", *docs]


@cache
def read_page(name: str) -> Page:
    """Parse the page at this path, relative to the repository."""
    page = Page((ROOT / name).read_text())
    tokens = MarkdownIt("commonmark").enable("table").parse(page.text)
    for token, following in zip(tokens, [*tokens[1:], None], strict=True):
        if token.type == "fence":
            page.blocks.append(Block(name, (token.map or [0])[0] + 1, token.info.strip(), token.content))
        elif token.type == "heading_open":
            heading = "".join(child.content for child in following.children)
            page.anchors.append(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-"))
        elif token.type == "table_open":
            page.tables.append([])
        elif token.type == "tr_open":
            page.tables[-1].append([])
        elif token.type in ("th_open", "td_open"):
            page.tables[-1][-1].append(following.content)
        for child in token.children or []:
            if child.type == "code_inline":
                page.inline_code.append(child.content)
            elif child.type in ("link_open", "image"):
                page.links.append(str(child.attrs.get("href") or child.attrs["src"]))
    return page
