"""The types, as a user's type checker sees them in the wheel: what is right passes, and what is wrong is found."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.package.conftest import Environment, run

pytestmark = pytest.mark.timeout(1800)  # the first test installs torch

HERE = Path(__file__).parent
PROGRAM, MISTAKES = HERE / "typed_program.py", HERE / "typed_mistakes.py"


def mypy(environment: Environment, program: Path) -> dict[int, str]:
    """What mypy finds, by line. It runs here and looks at the packages there."""
    pytest.importorskip("mypy", reason="in the environment of make test-package")
    there = ("--python-executable", str(environment.bin / "python"), "--cache-dir", str(program.parent / "cache"))
    found = _output_of("mypy", "--strict", *there, program.name, cwd=program.parent)
    errors = re.findall(rf"^{program.name}:(\d+): error: (.*)$", found, flags=re.MULTILINE)
    assert errors or "Success: no issues found" in found, found
    return {int(line): text for line, text in errors}


def pyrefly(environment: Environment, program: Path) -> dict[int, str]:
    """What pyrefly finds, by line."""
    pytest.importorskip("pyrefly", reason="in the environment of make test-package")
    settings = program.parent / "pyrefly.toml"
    settings.write_text(f'preset = "strict"\npython-interpreter-path = "{environment.bin / "python"}"\n')
    found = _output_of("pyrefly", "check", "--output-format", "json", program.name, cwd=program.parent)
    return {error["line"]: error["description"] for error in json.loads(found)["errors"]}


def _output_of(checker: str, *arguments: str, cwd: Path) -> str:
    return run(sys.executable, "-m", checker, *arguments, cwd=cwd, codes=(0, 1))  # 1: it found errors


Checker = Callable[[Environment, Path], dict[int, str]]
each_checker = pytest.mark.parametrize("checker", [mypy, pyrefly], ids=lambda checker: checker.__name__)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory of the user's, away from this checkout and its settings."""
    shutil.copy(PROGRAM, tmp_path)
    shutil.copy(MISTAKES, tmp_path)
    return tmp_path


@each_checker
def test_a_typed_program_passes(checker: Checker, environment: Environment, place: Path):
    assert checker(environment, place / PROGRAM.name) == {}


@each_checker
def test_every_mistake_is_found_and_nothing_else(checker: Checker, environment: Environment, place: Path):
    lines = MISTAKES.read_text().splitlines()
    wrong = [number for number, line in enumerate(lines, start=1) if line.endswith("# wrong")]
    assert len(wrong) > 30
    assert sorted(checker(environment, place / MISTAKES.name)) == wrong


def test_what_the_types_say_is_what_comes(environment: Environment, place: Path):
    printed = environment.torchrun(2, PROGRAM.name, str(place / "checkpoints"), cwd=place)
    assert printed.count("is done") == 2
