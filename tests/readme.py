"""README's first example and its snippet for checkpoints, for tests that run them as programs."""

from __future__ import annotations

import re

import pytest

from tests.launch import ROOT

README = (ROOT / "README.md").read_text()
BLOCKS: list[str] = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
EXAMPLE = BLOCKS[0]
LEAVE = EXAMPLE[EXAMPLE.index("dist.barrier()") :]  # the last lines of the example: wait for all, then leave
(SAVING,) = [block for block in BLOCKS if "checkpoint.save" in block]


def assert_half_the_state(printed: str) -> None:
    """What the example prints on two ranks."""
    for rank in range(2):
        # A share of AdamW's two float32 moments of 512 x 513 parameters, and a step counter per piece.
        state = int(re.search(rf"rank {rank}: MemoryReport\(.*state=(\d+)", printed)[1])  # type: ignore[index]
        assert state == pytest.approx(512 * 513 * 8 / 2, rel=0.01)
