"""Builds the site, and reads what was built: links, ids, what a browser would load, and what a reader sees."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urljoin, urlsplit

ROOT = Path(__file__).parents[2]
MKDOCS = ROOT / ".venv-docs" / "bin" / "mkdocs"
# Of <link>: what a browser fetches, or connects to, on its own.
FETCHED = {"stylesheet", "icon", "preload", "modulepreload", "prefetch", "preconnect", "dns-prefetch", "manifest"}
STRUCTURE = {"h1", "h2", "h3", "h4", "h5", "h6", "ul", "ol", "li", "pre", "table", "tr"}
_IN_CSS = re.compile(r"""url\(\s*["']?([^"')]+)|@import\s+["']([^"']+)""")


def build(repository: Path, target: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [MKDOCS, "build", "--site-dir", target],
        cwd=repository,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=170,
    )


class Page(HTMLParser):
    """One page: ``links`` that are followed, what is ``loaded`` on its own, and the ``ids`` that links may lead to."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self._in_style = False
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attributes}
        self.ids |= {given["id"]} if "id" in given else set()
        self._in_style = tag == "style"
        self.loaded += _in_css(given.get("style", ""))
        self.loaded += [given[name] for name in ("src", "poster", "data") if name in given]
        self.loaded += [part.split()[0] for part in given.get("srcset", "").split(",") if part.strip()]
        if "href" in given:
            followed = tag in ("a", "area") or (tag == "link" and not FETCHED & set(given.get("rel", "").split()))
            (self.links if followed else self.loaded).append(given["href"])

    def handle_data(self, data: str) -> None:
        if self._in_style:
            self.loaded += _in_css(data)


class Problem(NamedTuple):
    page: str
    url: str
    what: str


def problems(site: Path) -> list[Problem]:
    """Links that lead nowhere, and what is loaded from elsewhere."""
    pages = {path.relative_to(site).as_posix(): Page(path.read_text()) for path in site.rglob("*.html")}
    files = {path.relative_to(site).as_posix() for path in site.rglob("*") if path.is_file()}
    found = [
        Problem(name, url, what)
        for name, page in pages.items()
        for url in [*page.links, *page.loaded]
        if (what := _problem(name, url, pages, files, may_be_elsewhere=url in page.links))
    ]
    for path in site.rglob("*.css"):
        name = path.relative_to(site).as_posix()
        urls = _in_css(path.read_text())
        found += [Problem(name, url, what) for url in urls if (what := _problem(name, url, pages, files, False))]
    return found


def _problem(name: str, url: str, pages: dict[str, Page], files: set[str], may_be_elsewhere: bool) -> str:
    if urlsplit(url).scheme in ("data", "mailto"):
        return ""
    if urlsplit(url).scheme or urlsplit(url).netloc:
        return "" if may_be_elsewhere else "loaded from elsewhere"
    target = urlsplit(urljoin(f"https://site/{name}", url))
    path = unquote(target.path).lstrip("/")
    path = f"{path}index.html" if not path or path.endswith("/") else path
    if path not in files:
        return "no such file"
    if target.fragment and path in pages and unquote(target.fragment) not in pages[path].ids:
        return "no such id"
    return ""


def _in_css(text: str) -> list[str]:
    return [first or second for first, second in _IN_CSS.findall(text)]


class Outline(HTMLParser):
    """What a reader sees: headings, lists, code and tables in order, each with its depth in lists, and the words."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.blocks: list[tuple[str, int]] = []
        self.words: list[str] = []
        self._lists = 0
        self._skipped = False  # the sign beside a heading
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self._skipped = ("class", "headerlink") in attributes
        self._lists += tag in ("ul", "ol")
        if tag in STRUCTURE:
            self.blocks.append((tag, self._lists))

    def handle_endtag(self, tag: str) -> None:
        self._skipped = False
        self._lists -= tag in ("ul", "ol")

    def handle_data(self, data: str) -> None:
        self.words += [] if self._skipped else data.split()


def article(html: str) -> str:
    """The page without the navigation."""
    return html[html.index("<article") : html.index("</article>")]


def markdown_pages() -> Iterator[str]:
    """The repository's pages but the reference, most of which is not written on the page."""
    for pattern in ("*.md", "docs/*.md", "examples/*.md", "benchmarks/results/*.md"):
        yield from (path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob(pattern)) if path.name != "api.md")
