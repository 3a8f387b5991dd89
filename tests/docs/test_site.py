"""The site is built strictly, leads nowhere wrong, loads nothing from elsewhere, and shows what GitHub shows."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

import shardstep
import shardstep.checkpoint
from shardstep import cli
from tests.docs import site as sites
from tests.docs.site import ROOT, Outline, Page, article, build, markdown_pages, problems

pytestmark = pytest.mark.skipif(not sites.MKDOCS.exists(), reason="in the environment of make test-docs")

NOT_PUBLIC = {"saves", "attendance"}  # of the optimizer: its docstring says so
BROKEN = {
    "[a page](docs/missing.md)": "docs/missing.md",
    "[an anchor](docs/design.md#missing-anchor)": "missing-anchor",
    "[a source](src/shardstep/missing.py)": "src/shardstep/missing.py",
    "[a root](/docs/design.md)": "/docs/design.md",
    "[a name](docs/api.md#shardstep.missing)": "shardstep.missing",
}
WORKING = {
    "[a source](src/shardstep/engine.py)": "src/shardstep/engine.py.html",
    "[the licence](LICENSE)": "LICENSE.html",
    "[a program](.ci/run)": ".ci/run.html",
    "[numbers](benchmarks/results/2026-11-15-core.json)": "benchmarks/results/2026-11-15-core.json",
    "[a section](docs/design.md#gradients-zero-2)": "docs/design.html#gradients-zero-2",
    "[a name](docs/api.md#shardstep.checkpoint.save)": "docs/api.html#shardstep.checkpoint.save",
}
# Where Python-Markdown, which mkdocs uses, sees other lists and blocks than GitHub.
BLOCKS = [
    "text\n- one\n- two",
    "- one\n\n  ```python\n  x = 1\n\n  y = 2\n  ```\n- two",
    "- one:\n  ```\n  x\n  ```\n  more\n- two",
    "1. one\n   - inner\n     continued\n   - inner\n2. two",
    "- one\n  - two\n    - three\n- four",
    "10. ten\n\n    ```\n    x\n    ```\n11. eleven",
    "text\n| a | b |\n|---|---|\n| 1 | 2 |",
    "text:\n```\n- no list\n```\nmore",
    "- one\n\n  a paragraph\n\n- two\n\nafter",
    "- one\ncontinued lazily\n- two",
    "1) one\n2) two",
    "text\n\n    - code\n      code",
    "# head\n- one\n## head\ntext",
    "numbers up to\n98. This is no list.",
    "> [!NOTE]\n> Take care.\n\ntext",
    "| a |\n|---|\n| `one\\|two` |",
    "1. one\n   ```\n   x\n   ```\n\n   more\n2. two\n\n   more",
]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("site")
    done = build(ROOT, target)
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture
def repository(tmp_path) -> Path:
    """A copy to change: what the site is made from."""
    copy = tmp_path / "repository"
    for folder in ("docs", "examples", "benchmarks", "src", ".ci"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (*ROOT.glob("*.md"), ROOT / "mkdocs.yml", ROOT / "LICENSE"):
        shutil.copy(path, copy)
    return copy


def append(page: Path, *lines: str) -> None:
    page.write_text(page.read_text() + "".join(f"\n\n{line}\n" for line in lines))


# --- links ----------------------------------------------------------------------------------------------------------


def test_every_link_leads_somewhere_and_nothing_is_loaded_from_elsewhere(site):
    assert problems(site) == []


def test_a_broken_link_fails_the_build_and_is_named(repository, tmp_path):
    append(repository / "README.md", *BROKEN)
    done = build(repository, tmp_path / "site")
    assert done.returncode != 0
    warnings = [line for line in done.stderr.splitlines() if line.startswith("WARNING")]
    assert [target for target in BROKEN.values() if not any(target in line for line in warnings)] == []
    assert len(warnings) == len(BROKEN)


def test_a_name_that_is_gone_from_the_package_fails_the_build(repository, tmp_path):
    append(repository / "docs" / "api.md", "::: shardstep.checkpoint.gone")
    done = build(repository, tmp_path / "site")
    assert done.returncode != 0
    assert "shardstep.checkpoint.gone" in done.stderr


def test_a_page_that_is_gone_fails_the_build(repository, tmp_path):
    (repository / "docs" / "versions.md").unlink()
    done = build(repository, tmp_path / "site")
    assert done.returncode != 0
    assert "docs/versions.md" in done.stderr


def test_links_as_on_github_work(repository, tmp_path):
    append(repository / "README.md", *WORKING)
    done = build(repository, tmp_path / "site")
    assert done.returncode == 0, done.stderr
    assert set(WORKING.values()) <= set(Page((tmp_path / "site" / "index.html").read_text()).links)
    assert problems(tmp_path / "site") == []
    shown = Outline(article((tmp_path / "site" / "src/shardstep/engine.py.html").read_text())).words
    assert "".join(shown) == "engine.py" + "".join((ROOT / "src/shardstep/engine.py").read_text().split())


@pytest.mark.parametrize(
    ("html", "what"),
    [
        ('<a href="missing.html">', "no such file"),
        ('<a href="page.html#missing">', "no such id"),
        ('<a href="../outside.html">', "no such file"),
        ('<img src="missing.png">', "no such file"),
        ('<script src="https://elsewhere.example/a.js"></script>', "loaded from elsewhere"),
        ('<link rel="stylesheet" href="//elsewhere.example/a.css">', "loaded from elsewhere"),
        ('<link rel="preconnect" href="https://elsewhere.example">', "loaded from elsewhere"),
        ('<img srcset="page.html 1x, https://elsewhere.example/a.png 2x">', "loaded from elsewhere"),
        ('<style>@import "https://elsewhere.example/a.css";</style>', "loaded from elsewhere"),
        ('<p style="background: url(https://elsewhere.example/a.png)">', "loaded from elsewhere"),
        ('<a href="https://elsewhere.example"><a href="page.html#here"><a href="#here"><img src="data:,">', None),
    ],
)
def test_the_check_itself_finds(html, what, tmp_path):
    (tmp_path / "page.html").write_text(f'<p id="here">{html}')
    assert [problem.what for problem in problems(tmp_path)] == ([what] if what else [])


def test_the_check_itself_finds_what_a_stylesheet_loads(tmp_path):
    (tmp_path / "a.css").write_text("a { background: url('https://elsewhere.example/a.png') } @import 'gone.css';")
    assert [problem.what for problem in problems(tmp_path)] == ["loaded from elsewhere", "no such file"]


# --- the reference --------------------------------------------------------------------------------------------------


def public_names() -> list[str]:
    names = [f"shardstep.{name}" for name in shardstep.__all__]
    names += [f"shardstep.checkpoint.{name}" for name in shardstep.checkpoint.__all__]
    ours = [base for base in shardstep.ZeroRedundancyOptimizer.__mro__ if base.__module__.startswith("shardstep.")]
    members = {name for base in ours for name in vars(base) if not name.startswith("_")}
    return names + sorted(f"shardstep.ZeroRedundancyOptimizer.{name}" for name in members - NOT_PUBLIC)


def test_every_public_name_is_in_the_reference(site):
    assert [name for name in public_names() if name not in Page((site / "docs/api.html").read_text()).ids] == []


def test_every_option_of_the_command_line_is_in_the_reference(capsys):
    text = (ROOT / "docs" / "api.md").read_text()
    helps = []
    for command in ([], ["inspect"], ["convert"], ["verify"]):
        with pytest.raises(SystemExit):
            cli.main([*command, "--help"])
        helps.append(capsys.readouterr().out)
    options = {word.strip("[],") for word in " ".join(helps).split() if word.strip("[").startswith("--")}
    assert {"--json", "--part", "--key", "--import", "--help", "--version"} <= options
    assert sorted(option for option in options if f"`{option}" not in text) == []


# --- what GitHub shows ----------------------------------------------------------------------------------------------


def as_on_github(text: str) -> Outline:
    html = MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(text)
    return Outline(re.sub(r"\[!(\w+)\]", lambda found: found[1].capitalize(), html))  # [!NOTE] is a title


@pytest.mark.parametrize("page", list(markdown_pages()))
def test_a_page_has_the_blocks_and_the_words_that_github_shows(page, site):
    expected = as_on_github((ROOT / page).read_text())
    path = site / page.replace("README.md", "index.md").replace(".md", ".html")
    shown = Outline(article(path.read_text()))
    assert shown.blocks == expected.blocks
    assert "".join(shown.words) == "".join(expected.words)


def test_lists_and_blocks_begin_where_they_do_on_github(repository, tmp_path):
    texts = [f"# Title\n\n{text}\n" for text in BLOCKS]
    for position, text in enumerate(texts):
        (repository / "benchmarks" / "results" / f"{position}.md").write_text(text)
    done = build(repository, tmp_path / "site")
    assert done.returncode == 0, done.stderr
    for position, text in enumerate(texts):
        shown = Outline(article((tmp_path / "site" / "benchmarks" / "results" / f"{position}.html").read_text()))
        expected = as_on_github(text)
        assert (shown.blocks, shown.words) == (expected.blocks, expected.words), text
