"""One row per class: written by the sweep, read by the table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from tests.optimizers.catalogue import Subject

FOLDER = Path(__file__).parent.parent.parent / "build" / "optimizers"


class Row(NamedTuple):
    """What became of one class."""

    package: str
    version: str
    name: str
    verdict: str  # "cut anywhere", "kept whole", "refused", ...: what table.py explains
    reason: str = ""
    resumes: str = ""  # "yes", or what the plain class itself does not do
    remarks: str = ""


def record(row: Row) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / f"{row.package}.{row.name}.json").write_text(json.dumps(row._asdict(), indent=1))


def recorded(subject: Subject) -> Row | None:
    path = FOLDER / f"{subject}.json"
    return Row(**json.loads(path.read_text())) if path.exists() else None
