"""Which tests a run takes, and with how many threads.

A test that is written for several numbers of ranks runs at 1 and 3 by default: three is where halves, pairs and
powers of two stop hiding mistakes. At 2, 4 or 5 ranks the same test is marked ``again``, and so is one through shared
memory that also runs through sockets; ``make test-all`` takes those, too.
"""

from __future__ import annotations

import pytest
import torch

# Tests run in parallel already, and results do not depend on how threads cut a tensor.
torch.set_num_threads(1)

WORLDS = ("world", "world_size")
CHOSEN = (1, 3)
TRANSPORTS = ("transport", "way")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "again: the same test at another number of ranks")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    variants: dict[str, set[object]] = {}
    for item in items:
        variants.setdefault(_function(item), set()).update((_world(item), _transport(item)))
    for item in items:
        others = variants[_function(item)]
        other_ranks = 3 in others and _world(item) not in (*CHOSEN, 0)
        other_way = "sockets" in others and _transport(item) == "shared memory"
        if other_ranks or other_way:
            item.add_marker("again")


def _function(item: pytest.Item) -> str:
    return item.nodeid.split("[")[0]


def _world(item: pytest.Item) -> int:
    """The number of ranks that a test is written for as a parameter; 0 if it is none."""
    params = getattr(getattr(item, "callspec", None), "params", {})
    return next((params[name] for name in WORLDS if isinstance(params.get(name), int)), 0)


def _transport(item: pytest.Item) -> object:
    params = getattr(getattr(item, "callspec", None), "params", {})
    return next((params[name] for name in TRANSPORTS if name in params), None)
