"""The sdist holds what is in git, the wheel what is imported, and nothing is lost on the way from one to the other."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import shardstep
from tests.package.conftest import ROOT, Distributions, run

pytestmark = pytest.mark.timeout(600)

SOURCE = ROOT / "src" / "shardstep"


def files_of_the_sdist(sdist: Path) -> set[str]:
    with tarfile.open(sdist) as archive:
        return {member.name.partition("/")[2] for member in archive if not member.isdir()}


def files_of_the_wheel(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def files_in_git() -> set[str]:
    """Also what is not committed yet, but nothing that is ignored."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {name for name in listed.splitlines() if (ROOT / name).is_file()}


def test_the_sdist_holds_what_is_in_git_and_its_own_metadata(distributions: Distributions):
    if not (ROOT / ".git").exists():
        pytest.skip("this is no checkout")
    assert files_of_the_sdist(distributions.sdist) ^ files_in_git() == {"PKG-INFO"}


def test_the_wheel_holds_every_file_of_the_source_and_nothing_else(distributions: Distributions):
    source = {
        f"shardstep/{path.relative_to(SOURCE).as_posix()}": path.read_bytes()
        for path in SOURCE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert "shardstep/py.typed" in source
    files = files_of_the_wheel(distributions.wheel)
    metadata = {name for name in files if name.startswith(f"shardstep-{shardstep.__version__}.dist-info/")}
    assert {name: content for name, content in files.items() if name not in metadata} == source
    names = {name.partition("/")[2] for name in metadata}
    assert names == {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}


def test_the_wheel_of_the_sdist_is_the_wheel_of_the_checkout(distributions: Distributions, tmp_path: Path):
    run(sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path), str(ROOT), cwd=tmp_path)
    (direct,) = tmp_path.glob("*.whl")
    assert direct.name == distributions.wheel.name
    assert files_of_the_wheel(direct) == files_of_the_wheel(distributions.wheel)


def test_the_sdist_has_the_same_source_as_the_wheel(distributions: Distributions, tmp_path: Path):
    with tarfile.open(distributions.sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    source = unpacked / "src"
    in_sdist = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    assert in_sdist == {name for name in files_of_the_wheel(distributions.wheel) if ".dist-info/" not in name}
