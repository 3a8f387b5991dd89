"""Draw programs for a configuration, run them, and show the smallest one that fails.

``python -m tests.differential.cases --seconds 600`` draws new programs (``make test-fuzz``).
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.accelerator import simulated
from tests.differential.configurations import AXES, SIMULATED, Configuration, covering
from tests.differential.counted import ran
from tests.differential.pool import pool
from tests.differential.programs import Program
from tests.differential.strategies import programs

SHRINKS = os.environ.get("SHARDSTEP_SHRINK", "1") != "0"

PASTE = """{error}

To run it again, paste this into a shell:

cat > case.py <<'END'
from tests.differential.cases import *
from tests.differential.programs import *
if __name__ == "__main__":
    run({config!r}, {program!r})
END
PYTHONPATH=. .venv/bin/python case.py
"""


def run(config: Configuration, program: Program) -> None:
    """Run one case; AssertionError if it fails. Skips where the simulated device cannot be built."""
    need(config.device)
    outcome = pool(config.device).run(config, program)
    for operation, count in outcome.counts.items():
        ran[operation, config.mode if config.device == "cpu" else f"{config.mode} on {config.device}"] += count
    assert not outcome.error, PASTE.format(error=outcome.error, config=config, program=program)


def need(device: str) -> None:
    """Skip a test, or fail if it is required, where the simulated device cannot be built."""
    if device == "sim" and (reason := simulated.missing()):
        assert os.environ.get("SHARDSTEP_DEVICE") != "required", f"the simulated device needs {reason}"
        pytest.skip(f"the simulated device needs {reason}")


def check(config: Configuration, count: int, seed: int) -> None:
    """Run ``count`` programs, always the same ones for the same seed."""
    phases = (Phase.generate, Phase.shrink) if SHRINKS else (Phase.generate,)

    @hypothesis.seed(seed)
    @settings(
        max_examples=count,
        phases=phases,
        database=None,
        deadline=None,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(programs(config, seed))
    def case(program: Program) -> None:
        run(config, program)

    case()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    generator, end, count = random.Random(arguments.seed), time.monotonic() + arguments.seconds, 0
    while time.monotonic() < end:
        for config in covering(SIMULATED if generator.random() < 0.2 else AXES, 2, generator.randrange(2**31)):
            if time.monotonic() >= end:
                break
            check(config, 2, generator.randrange(2**31))
            count += 2
    print(f"{count} programs, {sum(ran.values())} operations, no difference")


if __name__ == "__main__":
    sys.exit(main())
