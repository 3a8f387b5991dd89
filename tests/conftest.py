"""Which tests a run takes, and with how many threads.

A test that is written for several numbers of ranks runs at 1 and 3 by default: three is where halves, pairs and
powers of two stop hiding mistakes. At 2, 4 or 5 ranks the same test is marked ``again``, and so is one through shared
memory that also runs through sockets; ``make test-all`` takes those, too. What needs packages that
are not in the environment of ``make test`` is not in it even if they are installed: the sweep over every optimizer
class and all of heavyball (``optimizers``, ``make test-optimizers``), Lightning and transformers (``frameworks``,
``make test-frameworks``).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

# Tests run in parallel already, and results do not depend on how threads cut a tensor.
torch.set_num_threads(1)

WORLDS = ("world", "world_size")
TRANSPORTS = ("transport", "way")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "again: the same test at another number of ranks, or through shared memory")
    config.addinivalue_line("markers", "optimizers: every optimizer class of other packages: make test-optimizers")
    config.addinivalue_line("markers", "frameworks: what needs Lightning or transformers: make test-frameworks")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """What is not asked for is not even imported: heavyball takes seconds, and sets what is torch's."""
    left_out = "not optimizers" in config.option.markexpr and collection_path.name == "test_heavyball.py"
    return True if left_out else None


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
