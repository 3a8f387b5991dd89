"""Programs of Lightning, Fabric and transformers save and load through the optimizers that those hand out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.frameworks import programs

pytestmark = pytest.mark.frameworks

PACKAGES = {"lightning": "lightning", "fabric": "lightning", "trainer": "transformers"}


@pytest.mark.parametrize("name", PACKAGES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_program_saves_and_loads_what_the_framework_calls_the_optimizer(name, world_size, tmp_path):
    pytest.importorskip(PACKAGES[name], reason="in the environment of make test-frameworks")
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    done = subprocess.run(
        [*command, str(programs.__file__), name, str(tmp_path / "checkpoint")],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"},
        cwd=root,
        timeout=170,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("saved and loaded through") == world_size
