"""One process that all ranks of all tests are forked from. What it has imported, no rank imports again.

A Python process has one such server, so whoever starts ranks (``harness.py``, ``differential/pool.py``) says here what
to import. Without effect once the first rank was started.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable

context = multiprocessing.get_context("forkserver")
_first: dict[str, None] = {}
_last: dict[str, None] = {}


def preload(modules: Iterable[str], last: Iterable[str] = ()) -> None:
    """Import these, after all that were named before; ``last``: after everything else."""
    _first.update(dict.fromkeys(modules))
    _last.update(dict.fromkeys(last))
    context.set_forkserver_preload([*_first, *_last])
