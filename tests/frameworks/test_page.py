"""The snippets of docs/frameworks.md run as they stand there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks import page_worker
from tests.frameworks.launch import start
from tests.test_snippets import snippets_of

pytestmark = [pytest.mark.frameworks, pytest.mark.long]


def test_every_snippet_of_the_page_runs_on_two_ranks_and_shards_the_state(tmp_path: Path):
    for package in ("accelerate", "transformers", "lightning", "ignite"):
        pytest.importorskip(package, reason="in the environment of make test-frameworks")
    printed = start(2, str(page_worker.__file__), str(tmp_path))
    for snippet in snippets_of(page_worker.PAGE)[1:]:
        for rank in range(2):
            assert f"rank {rank} ran {snippet}:" in printed, printed
