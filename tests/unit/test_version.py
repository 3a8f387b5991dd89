"""The version is written in one place."""

from __future__ import annotations

import re
from pathlib import Path

import shardstep

ROOT = Path(__file__).parents[2]


def test_the_project_file_takes_the_version_from_the_package():
    text = (ROOT / "pyproject.toml").read_text()
    assert 'dynamic = ["version"]' in text
    assert '[tool.hatch.version]\npath = "src/shardstep/__init__.py"' in text
    assert not re.search(r"^version\s*=", text, flags=re.MULTILINE)


def test_no_other_file_of_the_package_repeats_the_version():
    source = ROOT / "src" / "shardstep"
    repeats = [path.name for path in source.rglob("*.py") if shardstep.__version__ in path.read_text()]
    assert repeats == ["__init__.py"]


def test_the_citation_is_of_this_version():
    cited = re.findall(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), flags=re.MULTILINE)
    assert cited == [shardstep.__version__]
