"""Every Python snippet of README and the guides runs, as it stands there, on real ranks.

The first snippet of a page is its set-up. Each of the others is run after it, in a namespace of its own, but for the
lines with which a program joins and leaves its process group: here the ranks are in one already. What a ``text`` block
after a snippet shows is what rank 0 prints.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from shardstep import cli
from tests.harness import run_ranks

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    str(path.relative_to(ROOT))
    for folder in ("", "docs", "examples")
    for path in (ROOT / folder).glob("*.md")
    if "```python" in path.read_text() and path.name != "migration.md"  # whose snippets go together: test_migration.py
)
ELSEWHERE = ("docs/frameworks.md",)  # which takes the frameworks: tests/frameworks/test_page.py
BLOCK = re.compile(r"^( *)```python\n(.*?)^ *```\n(?:\n```text\n(.*?)^```\n)?", re.DOTALL | re.MULTILINE)
GROUP = re.compile(r"^dist\.(init|destroy)_process_group\(.*\n", re.MULTILINE)


class Snippet(NamedTuple):
    page: str
    line: int
    code: str
    printed: str  # empty: anything

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def snippets_of(page: str) -> list[Snippet]:
    text = (ROOT / page).read_text()
    found = []
    for block in BLOCK.finditer(text):
        indent, code, printed = block.groups()
        code = re.sub(rf"^{indent}", "", code, flags=re.MULTILINE)
        found.append(Snippet(page, text.count("\n", 0, block.start()) + 1, code, printed or ""))
    return found


SNIPPETS = {page: snippets_of(page) for page in PAGES if page not in ELSEWHERE}
PAIRS = [(snippets[0], snippet) for snippets in SNIPPETS.values() for snippet in snippets]


def run_snippet(rank: int, world: int, setup: Snippet, snippet: Snippet, folder: str) -> str:
    os.chdir(folder)
    output, namespace = io.StringIO(), {"__name__": "__main__"}
    for part in dict.fromkeys([setup, snippet]):
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile(GROUP.sub("", part.code), str(part), "exec"), namespace)
    return output.getvalue()


@pytest.mark.parametrize(("setup", "snippet"), PAIRS, ids=str)
def test_a_snippet_runs_as_it_stands_on_its_page(setup: Snippet, snippet: Snippet, tmp_path: Path) -> None:
    printed = run_ranks(run_snippet, 2, setup, snippet, str(tmp_path))
    if snippet.printed:
        assert printed[0] == snippet.printed


def test_no_snippet_hides_from_this_file() -> None:
    assert {"README.md", "docs/guide.md", "docs/checkpoints.md"} <= set(PAGES)
    for page, found in SNIPPETS.items():
        assert (ROOT / page).read_text().count("```python\n") == len(found), page


def commands_of(page: str) -> list[list[str]]:
    lines = re.findall(r"^shardstep (.*?) *(?:#.*)?$", (ROOT / page).read_text(), re.MULTILINE)
    return [line.split() for line in lines]


def test_the_commands_run_in_order_on_what_the_page_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = "docs/checkpoints.md"
    setup, *others = SNIPPETS[page]
    saving = next(snippet for snippet in others if '"checkpoints/step-000001"' in snippet.code)
    run_ranks(run_snippet, 2, setup, saving, str(tmp_path))
    monkeypatch.chdir(tmp_path)
    commands = commands_of(page)
    assert {command[0] for command in commands} == {"inspect", "verify", "convert"}
    for command in commands:
        assert cli.main(command) == 0, (command, capsys.readouterr())
