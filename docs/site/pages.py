"""A hook of mkdocs that makes the site's pages: the repository's own Markdown files, at the repository's own paths.

Because the paths are the same, a relative link means the same on GitHub and on the site, and mkdocs checks it. A file
that a page links to and that is no page (a source, an image, the licence) comes along: sources as a page of code,
anything else as it is.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dialect import for_python_markdown
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[2]
PAGES = ("*.md", "docs/**/*.md", "examples/*.md", "benchmarks/results/*.md")
LANGUAGES = {".py": "python", ".toml": "toml", ".yml": "yaml", ".cff": "yaml", ".txt": "text", "": "text"}
_LINK = re.compile(r"""(?:\]\(<?|^\[[^\]]+\]:\s*|(?:src|href)=")([^)\s#>"]+)""", re.MULTILINE)


class SourcePage(File):
    """A source file as a page: links to ``engine.py`` lead to ``engine.py.html``."""

    def is_documentation_page(self) -> bool:
        return True

    @property
    def name(self) -> str:
        return posixpath.basename(self.src_uri)


def on_files(files: Files, config: Any) -> Files:
    """What mkdocs found is the stylesheet; everything else is added here."""
    paths = sorted({path for pattern in PAGES for path in ROOT.glob(pattern)})
    for path in paths:
        files.append(File.generated(config, _uri(path), abs_src_path=str(path)))
    for linked in sorted({found for path in paths for found in _linked_files(path)}):
        if _uri(linked) not in files.src_uris:
            files.append(_as_file(linked, config))
    return files


def on_page_markdown(markdown: str, page: Any, **others: Any) -> str:
    if page.parent is None:  # a page without others beside it needs the width more than a list of one
        page.meta["hide"] = ["navigation"]
    return markdown if isinstance(page.file, SourcePage) else for_python_markdown(markdown)


def _uri(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _linked_files(page: Path) -> Iterator[Path]:
    for target in _LINK.findall(page.read_text()):
        path = ROOT / posixpath.normpath(posixpath.join(posixpath.dirname(_uri(page)), target))
        if path.is_relative_to(ROOT) and path.is_file():
            yield path


def _as_file(path: Path, config: Any) -> File:
    shown = InclusionLevel.NOT_IN_NAV  # said here, because mkdocs leaves out names that begin with a dot (.ci/run)
    if path.suffix not in LANGUAGES:
        return File.generated(config, _uri(path), abs_src_path=str(path), inclusion=shown)
    text = path.read_text()
    fence = max(["``", *re.findall("`+", text)], key=len) + "`"
    head = f"---\ntitle: {_uri(path)}\nsearch:\n  exclude: true\n---\n# `{path.name}`\n"
    code = f"{fence}{LANGUAGES[path.suffix]}\n{text.rstrip()}\n{fence}\n"
    return SourcePage.generated(config, _uri(path), content=f"{head}\n{code}", inclusion=shown)
