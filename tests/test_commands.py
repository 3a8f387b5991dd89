"""What the README shows is what runs: its examples as pasted. (The main job: test_examples.py.)"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.launch import ROOT, torchrun

LEAVE = "dist.destroy_process_group()\n"  # the last line of the first example


def blocks_of_the_readme() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)


def assert_half_the_state(printed: str, ranks: int = 2) -> None:
    for rank in range(ranks):
        # A share of AdamW's two float32 moments of 512 x 513 parameters, and a step counter per piece.
        state = int(re.search(rf"rank {rank}: MemoryReport\(.*state=(\d+)\)", printed)[1])  # type: ignore[index]
        assert state == pytest.approx(512 * 513 * 8 / ranks, rel=0.01)


def test_the_example_of_the_readme_runs_as_pasted(tmp_path: Path) -> None:
    first, saving = blocks_of_the_readme()[:2]
    assert len(first.strip().splitlines()) <= 15
    # The second block goes on where the first one stands before it leaves the group.
    body = first.removesuffix(LEAVE)
    (tmp_path / "example.py").write_text(first)
    (tmp_path / "save.py").write_text(body + saving + "print('at step', step)\n" + LEAVE)
    assert_half_the_state(torchrun(2, "example.py", cwd=tmp_path))
    printed = torchrun(2, "save.py", cwd=tmp_path)
    assert_half_the_state(printed)
    assert printed.count("at step 10") == 2


def test_what_the_readme_says_about_dcp_runs_as_pasted(tmp_path: Path) -> None:
    body = blocks_of_the_readme()[0].removesuffix(LEAVE)
    block = next(block for block in blocks_of_the_readme() if "dcp.save" in block)
    (tmp_path / "example.py").write_text(body + block + LEAVE)
    assert_half_the_state(torchrun(3, "example.py", cwd=tmp_path), ranks=3)
    assert (tmp_path / "dcp" / ".metadata").is_file()
