"""A report in words and tables, apart from where it is shown: terminal (rich), Markdown or a section of an HTML page.

Knows nothing of runs. Every text is escaped by the renderer of its target, so that an id of a trace can't become markup.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape as html_escape

from rich.console import Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text as RichText

GOOD = {"better": "green", "worse": "red", "can't tell": "dim", "same": "dim"}


@dataclass(frozen=True, slots=True)
class Heading:
    text: str


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph. `note`: said quietly."""

    text: str
    note: bool = False


@dataclass(frozen=True, slots=True)
class Items:
    """A list of sentences."""

    items: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Grid:
    """A table. `numeric`: columns set flush right. A row of one cell is a group's heading."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Block:
    """Lines that keep their spaces: a drawing."""

    lines: tuple[str, ...]


Element = Heading | Text | Items | Grid | Block


def to_rich(elements: Sequence[Element]) -> RenderableType:
    """For the terminal; reads without colour and at 80 columns."""
    out: list[RenderableType] = []
    for element in elements:
        match element:
            case Heading(text):
                out += [RichText(), RichText(text, style="bold")] if out else [RichText(text, style="bold")]
            case Text(text, note):
                out.append(RichText(text, style="dim" if note else ""))
            case Items(items):
                out += [_hanging(item) for item in items]
            case Block(lines):
                out += [RichText(line, no_wrap=True, overflow="ignore") for line in lines]
            case Grid():
                out.append(_rich_table(element))
    return Group(*out)


def _hanging(item: str) -> RichTable:
    table = RichTable.grid(padding=(0, 1, 0, 0))
    table.add_column(width=1)
    table.add_column()
    table.add_row(RichText("·"), RichText(item))
    return table


def _rich_table(grid: Grid) -> RichTable:
    table = RichTable(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False, header_style="bold")
    for i, column in enumerate(grid.columns):
        table.add_column(RichText(column), justify="right" if i in grid.numeric else "left", overflow="fold")
    for row in grid.rows:
        if len(row) == 1:
            table.add_row(RichText(row[0], style="bold"))
        else:
            table.add_row(*(RichText(cell, style=GOOD.get(cell, "")) for cell in row))
    return table


def to_markdown(elements: Sequence[Element]) -> str:
    """GitHub's Markdown."""
    out: list[str] = []
    for element in elements:
        match element:
            case Heading(text):
                out.append(f"## {_md(text)}")
            case Text(text, _):
                out.append(_md(text))
            case Items(items):
                out.append("\n".join(f"- {_md(item)}" for item in items))
            case Block(lines):
                fence = "```"
                while any(fence in line for line in lines):
                    fence += "`"
                out.append("\n".join([fence, *lines, fence]))
            case Grid(columns, rows, numeric):
                head = "| " + " | ".join(_md(column) or " " for column in columns) + " |"
                rule = "|" + "|".join("---:" if i in numeric else "---" for i in range(len(columns))) + "|"
                body = [
                    "| " + " | ".join(f"**{_md(cell)}**" if len(row) == 1 else _md(cell) for cell in row)
                    + " |" * (1 + len(columns) - len(row))
                    for row in rows
                ]  # fmt: skip
                out.append("\n".join([head, rule, *body]))
    return "\n\n".join(out) + "\n"


def _md(text: str) -> str:
    """Characters that Markdown or HTML would read, escaped."""
    for character in "\\`*_[]<>|#":
        text = text.replace(character, f"\\{character}" if character != "<" else "&lt;")
    return " ".join(text.split("\n"))


def to_html(elements: Sequence[Element]) -> str:
    """Elements for the inside of a section; no styles or scripts of their own."""
    out: list[str] = []
    for element in elements:
        match element:
            case Heading(text):
                out.append(f"<h3>{html_escape(text)}</h3>")
            case Text(text, note):
                opening = '<p class="note">' if note else "<p>"
                out.append(f"{opening}{html_escape(text)}</p>")
            case Items(items):
                out.append("<ul>" + "".join(f"<li>{html_escape(item)}</li>" for item in items) + "</ul>")
            case Block(lines):
                out.append("<pre>" + html_escape("\n".join(lines)) + "</pre>")
            case Grid():
                out.append(_html_table(element))
    return "\n".join(out)


def _html_table(grid: Grid) -> str:
    def cell(tag: str, i: int, text: str) -> str:
        numeric = ' class="n"' if i in grid.numeric else ""
        return f"<{tag}{numeric}>{html_escape(text)}</{tag}>"

    head = "".join(cell("th", i, column) for i, column in enumerate(grid.columns))
    body = []
    for row in grid.rows:
        if len(row) == 1:
            body.append(
                f'<tr class="group"><th scope="rowgroup" colspan="{len(grid.columns)}">{html_escape(row[0])}</th></tr>'
            )
        else:
            named = f'<th scope="row">{html_escape(row[0].strip())}</th>'
            body.append(f"<tr>{named}{''.join(cell('td', i, text) for i, text in enumerate(row) if i)}</tr>")
    return f'<div class="scroll" tabindex="0" role="region" aria-label="Table"><table class="figures"><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'
