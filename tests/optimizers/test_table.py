"""docs/optimizers.md tells of every class there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.contract.test_classes import CLASSES, REFUSED, WHOLE
from tests.optimizers.catalogue import PACKAGES, is_installed, subjects, version_of

PAGE = Path(__file__).parent.parent.parent / "docs" / "optimizers.md"


@pytest.mark.parametrize("package", PACKAGES)
def test_the_table_has_a_row_with_a_verdict_for_every_class(package):
    if not is_installed(package):
        pytest.skip(f"{package} is not installed")
    heading = f"## {package} {version_of(package)}\n"
    text = PAGE.read_text()
    if heading not in text:
        pytest.skip(f"the table was made with another version of {package} than {version_of(package)}")
    section = text.partition(heading)[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", section, flags=re.MULTILINE))
    assert set(rows) == {subject.name for subject in subjects() if subject.package == package}
    assert not {name for name, verdict in rows.items() if verdict in ("FAILED", "not run")}


def test_the_page_says_of_each_class_of_torch_what_becomes_of_it():
    rows = dict(re.findall(r"^\| (cut anywhere|kept whole|refused) \| ([^|]+) \|$", PAGE.read_text(), re.MULTILINE))
    said = {verdict: set(re.findall(r"\b[A-Z]\w+", classes)) for verdict, classes in rows.items()}
    assert said["refused"] == REFUSED
    assert said["kept whole"] == WHOLE
    assert said["cut anywhere"] == CLASSES.keys() - REFUSED - WHOLE
