"""CITATION.cff and the GitHub workflow can be read, and speak of what there is. (The workflow was never run.)"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

import shardstep
from tests.package.conftest import ROOT, TORCH

WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"


def read(path: Path) -> dict[Any, Any]:
    yaml = pytest.importorskip("yaml", reason="in the environment of make test-package")
    return yaml.safe_load(path.read_text())


def test_the_citation_has_what_its_format_requires():
    citation = read(ROOT / "CITATION.cff")
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors", "abstract", "keywords"} <= citation.keys()
    assert citation["type"] == "software"
    assert citation["authors"] == [{"name": "The shardstep developers"}]
    assert str(citation["date-released"]) == "2026-11-16"
    project = (ROOT / "pyproject.toml").read_text()
    assert f'name = "{citation["title"]}"' in project
    assert f'license = "{citation["license"]}"' in project
    assert citation["version"] == shardstep.__version__


def commands_of_the_workflow() -> list[str]:
    steps = [step for job in read(WORKFLOW)["jobs"].values() for step in job["steps"]]
    return [step["run"] for step in steps if "run" in step]


def test_the_workflow_says_that_it_was_never_run():
    assert "Checked for syntax only" in WORKFLOW.read_text().splitlines()[0]


def test_every_job_checks_the_repository_out_and_ends():
    for job in read(WORKFLOW)["jobs"].values():
        assert job["steps"][0]["uses"].startswith("actions/checkout@")
        assert job["timeout-minutes"] == 90
        assert job["runs-on"].startswith("ubuntu-")


def test_what_the_workflow_runs_exists():
    """Files that can be executed, and targets of the Makefile with variables that it knows."""
    commands = commands_of_the_workflow()
    assert len(commands) == 2
    makefile = (ROOT / "Makefile").read_text()
    for command in commands:
        program, *arguments = re.sub(r"\$\{\{.*?\}\}", "value", command).split()
        if program != "make":
            assert os.access(ROOT / program, os.X_OK), program
            continue
        variables = [argument.partition("=")[0] for argument in arguments if "=" in argument]
        targets = [argument for argument in arguments if "=" not in argument]
        assert all(re.search(rf"^{name}\s*\?=", makefile, flags=re.MULTILINE) for name in variables), command
        assert all(re.search(rf"^{name}:", makefile, flags=re.MULTILINE) for name in targets), command


def test_what_ci_runs_exists():
    targets = re.findall(r"^make (\S+)$", (ROOT / ".ci" / "run").read_text(), flags=re.MULTILINE)
    assert "test-package" in targets
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{target}:", makefile, flags=re.MULTILINE) for target in targets)


def test_the_versions_of_the_workflow_are_those_of_the_page_about_them():
    """The matrix, and the version that everything else runs with."""
    jobs = read(WORKFLOW)["jobs"]
    matrix = [(row["torch"], row["python"]) for row in jobs["versions"]["strategy"]["matrix"]["include"]]
    setup = next(step for step in jobs["all-suites"]["steps"] if "with" in step)
    matrix.append((TORCH.removeprefix("torch=="), setup["with"]["python-version"]))
    page = (ROOT / "docs" / "versions.md").read_text().partition("## What was run")[2]
    rows = re.findall(r"^\| (\d+\.\d+\.\d+) \| (\d+\.\d+)\.\d+ \|", page, flags=re.MULTILINE)
    assert sorted(matrix) == sorted(rows)
