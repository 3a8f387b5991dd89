"""The snippets of docs/frameworks.md run as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.frameworks import page_worker
from tests.frameworks.launch import start
from tests.launch import ROOT
from tests.test_snippets import snippets_of

SNIPPET = re.compile(r"^```python\n(.*?)^```\n", re.DOTALL | re.MULTILINE)


def test_every_snippet_of_the_page_runs_on_two_ranks_and_shards_the_state(tmp_path: Path):
    for package in ("accelerate", "transformers", "lightning", "ignite"):
        pytest.importorskip(package, reason="in the environment of make test-frameworks")
    printed = start(2, str(page_worker.__file__), str(tmp_path))
    for snippet in snippets_of(page_worker.PAGE)[1:]:
        for rank in range(2):
            assert f"rank {rank} ran {snippet}:" in printed, printed


@pytest.mark.parametrize("title", ["Ignite", "torch.distributed.checkpoint"])
def test_a_snippet_that_makes_its_own_group_runs_as_a_file_of_its_own(title, tmp_path: Path):
    """As it stands, in processes that nobody has prepared: DCP starts a process, which imports the file once more."""
    pytest.importorskip("ignite", reason="in the environment of make test-frameworks")
    section = (ROOT / page_worker.PAGE).read_text().split(f"## {title}\n")[1]
    setup, *others = snippets_of(page_worker.PAGE)
    (snippet,) = [other for other in others if other.code == SNIPPET.search(section)[1]]  # type: ignore[index]
    program = tmp_path / "program.py"
    program.write_text(f"import os\n\nos.chdir({str(tmp_path)!r})\n{setup.code}\n{snippet.code}")
    start(2, str(program))
    assert (tmp_path / "saved").is_dir()
