"""Every row of the table of refusals (``refusals.py``) on every rank; and that its checker would notice."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.differential import cases, refusals
from tests.differential.configurations import Configuration
from tests.differential.pool import pool
from tests.differential.refusals import ALONE, ODD, ROWS, TABLE, Odd, Row, check, told

MOST = 40  # rows for one test


def _cases() -> list[tuple[Configuration, list[str]]]:
    """Rows of one configuration together, in the order of the table."""
    names: dict[Configuration, list[str]] = {}
    for row in ROWS:
        names.setdefault(row.config, []).append(row.what)
    return [(config, found[at : at + MOST]) for config, found in names.items() for at in range(0, len(found), MOST)]


CASES = _cases()


@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{n}-{c.mode}-{c.ranks}" for n, (c, _) in enumerate(CASES)])
def test_wrong_use_ends_as_the_table_says_and_training_goes_on(number: int) -> None:
    config, names = CASES[number]
    cases.need(config.device)
    outcome = pool(config.device).run(config, names, timeout=120, by=refusals.run)
    assert not outcome.error, f"{outcome.error}\nTo run it alone: python -m tests.differential.test_refusals 'its name'"
    assert sorted(outcome.counts) == sorted(names)


@pytest.mark.parametrize("row", ALONE, ids=lambda row: row.what)
def test_wrong_use_in_one_process_ends_as_the_table_says(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")  # (a row may change it)
    check(row, SimpleNamespace(rank=0))  # type: ignore[arg-type]


def test_the_table_has_no_two_rows_of_one_name_and_knows_the_issues_that_change_it() -> None:
    assert len(TABLE) == len(ROWS) >= 150
    assert {row.changes for row in ROWS} == {None, 26, 28}


# --- negative controls ------------------------------------------------------------------------------------------------


def _raise(error: Any) -> Any:
    def do(t: Any) -> None:
        if (found := refusals.mine(t, error)) is not None:
            raise found

    return do


WRONG = ValueError("shard expects one of three")
CONTROLS: dict[str, tuple[Row, str]] = {
    "wrong words": (Row("x", _raise(WRONG), ValueError, "shard|one of four"), r"the words \['one of four'\]"),
    "no error": (Row("x", _raise(None), ValueError, "shard"), "raised nothing"),
    "another class": (Row("x", _raise(WRONG), TypeError, "shard"), "expected <class 'TypeError'>"),
    "an error too much": (Row("x", _raise(WRONG), None, ""), "expected nothing"),
    "silence on the other ranks": (Row("x", _raise(Odd(WRONG, None)), told(ValueError), "shard"), "raised nothing"),
    "no name": (Row("x", _raise(Odd(WRONG, RuntimeError("shard"))), told(ValueError), "shard"), "'rank 1'"),
}


@pytest.mark.parametrize("control", CONTROLS)
def test_the_checker_notices(control: str) -> None:
    row, message = CONTROLS[control]
    with pytest.raises(AssertionError, match=message):
        check(row, SimpleNamespace(rank=ODD + 1))  # type: ignore[arg-type]


def test_the_checker_notices_what_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "SOON", 0.0)
    with pytest.raises(AssertionError, match="took"):
        check(Row("x", _raise(WRONG), ValueError, "shard"), SimpleNamespace(rank=0))  # type: ignore[arg-type]


def main() -> None:
    """Run rows by name."""
    import sys

    for name in sys.argv[1:]:
        print(
            name,
            pool(TABLE[name].config.device).run(TABLE[name].config, [name], by=refusals.run).error
            or "as the table says",
        )


if __name__ == "__main__":
    main()
