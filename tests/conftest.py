"""Which tests a run takes, and with how many threads.

A test that is written for several numbers of ranks runs at 1 and 3 by default: three is where halves, pairs and
powers of two stop hiding mistakes. At 2, 4 or 5 ranks the same test is marked ``again``, and so is one through shared
memory that also runs through sockets; ``make test-all`` takes those, too. The sweep over every optimizer class
(``optimizers``) has a command of its own, ``make test-optimizers``.
"""

from __future__ import annotations

import pytest
import torch

# Tests run in parallel already, and results do not depend on how threads cut a tensor.
torch.set_num_threads(1)

WORLDS = ("world", "world_size")
TRANSPORTS = ("transport", "way")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "again: the same test at another number of ranks, or through shared memory")
    config.addinivalue_line("markers", "optimizers: slow tests of optimizers of other packages: make test-optimizers")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for names, chosen, also in ((WORLDS, 3, (1,)), (TRANSPORTS, "sockets", ())):
        variants = {_without(item, names): set[object]() for item in items}
        for item in items:
            variants[_without(item, names)].add(_value(item, names))
        for item in items:
            value = _value(item, names)
            if chosen in variants[_without(item, names)] and value not in (chosen, None, *also):
                item.add_marker("again")


def _params(item: pytest.Item) -> dict[str, object]:
    return getattr(getattr(item, "callspec", None), "params", {})


def _value(item: pytest.Item, names: tuple[str, ...]) -> object:
    """The test's parameter of one of these names; None if it has none."""
    return next((value for name, value in _params(item).items() if name in names), None)


def _without(item: pytest.Item, names: tuple[str, ...]) -> str:
    """Which test it is, whatever that parameter is."""
    rest = {name: value for name, value in _params(item).items() if name not in names}
    return f"{item.nodeid.split('[')[0]} {rest!r}"
