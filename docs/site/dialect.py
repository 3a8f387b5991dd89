"""GitHub's Markdown, written so that Python-Markdown, which mkdocs uses, understands the same.

The two differ where a list, a table or a block of code begins. GitHub looks at the column where a list item's text
starts, and needs no empty line before a block; Python-Markdown wants four spaces per level and the empty line.
"""

from __future__ import annotations

import re
from itertools import pairwise

_ITEM = re.compile(r"([-*+]|\d{1,9}[.)])( {1,4})(?=\S)")
_FENCE = re.compile(r"`{3,}|~{3,}")
_CODE = re.compile(r"(`+)[^`]+\1")
_RULE = re.compile(r"[ :|-]*-[ :|-]*")  # below the head of a table


def for_python_markdown(text: str) -> str:
    """The same page with four spaces per level of lists, and empty lines around blocks."""
    lines: list[str] = []
    columns: list[int] = []  # for every list item that is open, where its text begins
    fence = ""  # what ends the block of code that is open
    for line, following in pairwise([*text.splitlines(), ""]):
        bare = line.lstrip(" ")
        indent = len(line) - len(bare)
        if fence or not bare:
            lines.append(_moved(line, columns))
            if fence and bare.startswith(fence) and not bare.strip(fence[0] + " "):
                fence = ""
                lines += [""] if following.strip() else []
            continue
        in_list = bool(columns)
        while columns and indent < columns[-1]:
            columns.pop()
        is_code = indent - (columns[-1] if columns else 0) >= 4
        item = None if is_code else _ITEM.match(bare)
        if item and not in_list and lines and lines[-1] and item[1] not in ("-", "*", "+", "1.", "1)"):
            item = None  # within a paragraph only a list that begins with 1 begins
        opening = None if is_code else _FENCE.match(bare)
        if opening or (item and not _is_list(lines)) or _is_table(bare, following):
            lines += [""] if lines and lines[-1] else []
        if item:
            lines.append("    " * len(columns) + item[1].replace(")", ".") + " " + bare[item.end() :])
            columns.append(indent + item.end())
        else:
            lines.append(_moved(_row(line) if bare.startswith("|") else line, columns))
            fence = opening[0] if opening else ""
    return "\n".join(lines) + "\n"


def _moved(line: str, columns: list[int]) -> str:
    """A line inside list items, at the column where Python-Markdown expects it."""
    indent = len(line) - len(line.lstrip(" "))
    moved = "    " * len(columns) + line[min(indent, columns[-1] if columns else 0) :]
    return moved if moved.strip() else ""


def _row(line: str) -> str:
    """A row of a table: within code Python-Markdown shows the backslash before a bar, which GitHub needs there."""
    return _CODE.sub(lambda code: code[0].replace("\\|", "|"), line)


def _is_list(lines: list[str]) -> bool:
    """Whether the lines since the last empty one begin with an item: then another may follow at once."""
    start = next((i for i in range(len(lines), 0, -1) if not lines[i - 1]), 0)
    return start < len(lines) and _ITEM.match(lines[start].lstrip(" ")) is not None


def _is_table(line: str, following: str) -> bool:
    """Whether this line is the head of one."""
    return "|" in line and "|" in following and _RULE.fullmatch(following.strip()) is not None
