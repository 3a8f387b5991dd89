"""What the tests of the package share: the sdist, the wheel that was built from it, an environment with the wheel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
TORCH = "torch==2.13.0"  # as everywhere but in make test-torch


class Distributions(NamedTuple):
    """The files that are published."""

    sdist: Path
    wheel: Path


class Environment(NamedTuple):
    """Where a user has installed the wheel, and nothing else but torch."""

    bin: Path

    def run(self, program: str, *arguments: str, cwd: Path) -> str:
        """The standard output of a program of this environment. Its failure is the test's."""
        return run(str(self.bin / program), *arguments, cwd=cwd)

    def torchrun(self, ranks: int, *arguments: str, cwd: Path) -> str:
        return self.run("torchrun", "--standalone", "--nproc-per-node", str(ranks), *arguments, cwd=cwd)


def run(*command: str, cwd: Path, codes: tuple[int, ...] = (0,)) -> str:
    """The standard output of a command that knows nothing of this checkout and of the environment of the tests."""
    unwanted = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "MYPYPATH")
    variables = {key: value for key, value in os.environ.items() if key not in unwanted}
    variables |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True)
    assert done.returncode in codes, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="session")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    """As they are published: ``python -m build`` makes the sdist, and the wheel from what is in it."""
    pytest.importorskip("build", reason="in the environment of make test-package")
    place = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", str(place), str(ROOT), cwd=place)
    (sdist,), (wheel,) = place.glob("*.tar.gz"), place.glob("*.whl")
    return Distributions(sdist, wheel)


@pytest.fixture(scope="session")
def environment(distributions: Distributions, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environment]:
    """torch first and by exact version: the wheel alone may choose another build of it."""
    place = tmp_path_factory.mktemp("environment")
    venv.create(place, with_pip=True)
    pip = (str(place / "bin" / "python"), "-m", "pip", "install", "--quiet")
    run(*pip, TORCH, cwd=place)
    run(*pip, str(distributions.wheel), cwd=place)
    yield Environment(place / "bin")
    shutil.rmtree(place)  # gigabytes, and pytest keeps the directories of three runs
