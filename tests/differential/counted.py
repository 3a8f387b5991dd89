"""Counts what really ran: an operation that hardly ever did, because its precondition was missing, is a failure.

Hooks of pytest, which ``tests/conftest.py`` takes over: with xdist the process that reports collects nothing, and so
does not find a conftest of this folder.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.differential.programs import OPERATIONS

LEAST = 20
WHOLE = 100  # programs; a run of fewer is a part that somebody chose, and is not judged
ran = Counter[tuple[str, str]]()  # operation and mode, of this process
_total = Counter[tuple[str, str]]()  # of all processes


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    output = getattr(session.config, "workeroutput", None)
    if output is not None:  # in a worker of xdist: tell the process that reports
        output["operations"] = [(*key, count) for key, count in ran.items()]
        return
    _total.update(ran)
    if few(_total) and exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: Any) -> None:
    for operation, mode, count in getattr(node, "workeroutput", {}).get("operations", ()):
        _total[operation, mode] += count


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not _total:
        return
    modes = sorted({mode for _, mode in _total})
    terminalreporter.section("operations that ran, by mode")
    for operation in sorted({name for name, _ in _total}):
        row = " ".join(f"{_total[operation, mode]:6d}" for mode in modes)
        terminalreporter.write_line(f"{operation:12s} {row}")
    terminalreporter.write_line("columns: " + ", ".join(modes))
    for name in few(_total):
        terminalreporter.write_line(f"FAILED: {name} ran fewer than {LEAST} times")


def few(total: Counter[tuple[str, str]]) -> list[str]:
    """The operations that ran too seldom in a whole run."""
    by_name = Counter[str]()
    for (name, _), count in total.items():
        by_name[name] += count
    if by_name["Look"] < WHOLE:  # every program ends with one
        return []
    return [kind.__name__ for kind in OPERATIONS if by_name[kind.__name__] < LEAST]
