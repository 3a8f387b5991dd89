"""Programs of Lightning, Fabric and transformers save and load through the optimizers that those hand out."""

from __future__ import annotations

import pytest

from tests.frameworks import programs
from tests.frameworks.launch import start

PACKAGES = {"lightning": "lightning", "fabric": "lightning", "trainer": "transformers"}


@pytest.mark.parametrize("name", PACKAGES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_program_saves_and_loads_what_the_framework_calls_the_optimizer(name, world_size, tmp_path):
    pytest.importorskip(PACKAGES[name], reason="in the environment of make test-frameworks")
    printed = start(world_size, str(programs.__file__), name, str(tmp_path / "checkpoint"))
    assert printed.count("saved and loaded through") == world_size
