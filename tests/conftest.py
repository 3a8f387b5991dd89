"""Which tests a run takes, and with how many threads.

A test that is written for several numbers of ranks runs at 1 and 3 by default: three is where halves, pairs and
powers of two stop hiding mistakes. At 2, 4 or 5 ranks the same test is marked ``again``, and so is one through shared
memory that also runs through sockets; of a test with three or more parameters those that are left over when every pair
of values has met (``tests.pairs``). Of tests with ranks that have one or two parameters besides their number: at 1 rank
all but the first, and of two parameters what is left over when every value was there. ``make test-all`` takes all of
them. What needs packages that
are not in the environment of ``make test`` is not in it even if they are installed: the sweep over every optimizer
class and all of heavyball (``optimizers``, ``make test-optimizers``), Lightning and transformers (``frameworks``,
``make test-frameworks``), the site (``docs``, ``make test-docs``), what a user installs (``package``,
``make test-package``), and several hosts, for which it takes root (``hosts``, ``make test-hosts``).

For the time they take, some have targets of their own: programs that a user starts (``programs``: examples, the command
line, ``make test-programs``), and tests whose claim a cheaper one makes as well (``extended``, ``make test-extended``).
Of the tests of the simulated device (``accelerator``) a core is in ``make test`` (``tests/accelerator/core.py``); the
others are ``extended``, and ``make test-accelerator`` runs all.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.differential.counted import pytest_sessionfinish, pytest_terminal_summary, pytest_testnodedown  # noqa: F401
from tests.pairs import covering

# Tests run in parallel already, and results do not depend on how threads cut a tensor.
torch.set_num_threads(1)

WORLDS = ("world", "world_size")
TRANSPORTS = ("transport", "way")
# Whose parameters are not thinned out: they were chosen one by one, or are not in make test.
LEFT_OUT = ("again", "programs", "extended", "optimizers", "frameworks", "package", "docs", "accelerator", "hosts")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "again: other parameters of a test whose pairs all ran: make test-all")
    config.addinivalue_line("markers", "programs: what a user starts, in interpreters of its own: make test-programs")
    config.addinivalue_line("markers", "extended: takes long, and a cheaper test makes the claim: make test-extended")
    config.addinivalue_line("markers", "optimizers: every optimizer class of other packages: make test-optimizers")
    config.addinivalue_line("markers", "frameworks: what needs Lightning or transformers: make test-frameworks")
    config.addinivalue_line("markers", "package: the wheel in an environment of its own: make test-package")
    config.addinivalue_line("markers", "docs: the site, which needs mkdocs: make test-docs")
    config.addinivalue_line("markers", "accelerator: a simulated device, which is compiled: make test-accelerator")
    config.addinivalue_line("markers", "hosts: several hosts, which takes root and iproute2: make test-hosts")
    config.addinivalue_line("markers", "long: takes ten seconds or more, so it is started first")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """What is not asked for is not even imported: heavyball takes seconds, and sets what is torch's."""
    name = collection_path.name
    folders = ("package", "docs", "accelerator", "hosts")
    marker = "optimizers" if name == "test_heavyball.py" else name if name in folders else None
    return True if marker and f"not {marker}" in config.option.markexpr else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for names, chosen, also in ((WORLDS, 3, (1,)), (TRANSPORTS, "sockets", ())):
        variants = {_without(item, names): set[object]() for item in items}
        for item in items:
            variants[_without(item, names)].add(_value(item, names))
        for item in items:
            value = _value(item, names)
            if chosen in variants[_without(item, names)] and value not in (chosen, None, *also):
                item.add_marker("again")
    _leave_pairs(items)
    _leave_values([item for item in items if item.path.parent.name == "ranks"])
    # Started last, a long test keeps one worker busy while the others have nothing left to do.
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def _leave_pairs(items: list[pytest.Item]) -> None:
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if len(_params(item)) >= 3 and not any(item.get_closest_marker(name) for name in LEFT_OUT):
            tests.setdefault(item.nodeid.split("[")[0], []).append(item)
    for variants in tests.values():
        rows = [{name: repr(value) for name, value in _params(item).items()} for item in variants]
        chosen = set(covering(rows))
        for position, item in enumerate(variants):
            if position not in chosen:
                item.add_marker("again")


def _leave_values(items: list[pytest.Item]) -> None:
    """Of one or two parameters besides the number of ranks."""
    tests: dict[tuple[str, object], list[pytest.Item]] = {}
    for item in items:
        others = set(_params(item)) - {*WORLDS, *TRANSPORTS}
        if len(others) in (1, 2) and not any(item.get_closest_marker(name) for name in LEFT_OUT):
            tests.setdefault((item.nodeid.split("[")[0], _value(item, WORLDS)), []).append(item)
    for (name, ranks), variants in tests.items():
        others = [{key: repr(value) for key, value in _params(item).items() if key not in WORLDS} for item in variants]
        chosen = {0} if ranks == 1 and any((name, more) in tests for more in (2, 3)) else set(covering(others, 1))
        for position, item in enumerate(variants):
            if position not in chosen:
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
