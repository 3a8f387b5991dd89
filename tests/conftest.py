"""Which tests a run takes, and with how many threads.

There are two markers. ``long``: a test that takes more than about five seconds, or whose claim a cheaper test makes as
well (``make test-long``). ``extra``: a test that needs further packages, or root, as all tests of the folders ``EXTRA``
do; each of these folders has a target of its own. ``make test`` runs everything else.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.differential.counted import pytest_sessionfinish, pytest_terminal_summary, pytest_testnodedown  # noqa: F401

# Tests run in parallel already, and results do not depend on how threads cut a tensor.
torch.set_num_threads(1)

EXTRA = ("frameworks", "optimizers", "package", "docs", "hosts")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "long: takes long, or a cheaper test makes the same claim: make test-long")
    config.addinivalue_line("markers", "extra: needs further packages, or root: a target of its own")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """What is not asked for is not imported either: some packages take seconds, and change settings of torch."""
    is_extra = collection_path.name in EXTRA and collection_path.parent.name == "tests"
    return True if is_extra and "not extra" in config.option.markexpr else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    root = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(root) and item.path.relative_to(root).parts[0] in EXTRA:
            item.add_marker("extra")
