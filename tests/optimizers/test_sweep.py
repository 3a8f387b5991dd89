"""Every optimizer class of these packages trains as its plain self, saves and resumes, or is refused by name.

``make test-optimizers`` runs it; ``make test`` does not. Each leaves a row for ``docs/optimizers.md``.
"""

from __future__ import annotations

import pytest

from tests import forkserver
from tests.harness import run_ranks
from tests.optimizers import claims, training
from tests.optimizers.catalogue import PACKAGES, Subject, is_abstract, is_installed, subjects, version_of, wraps
from tests.optimizers.table import Row, record
from tests.optimizers.training import Facts

LIMITS = {"timeout": 300, "pg_timeout": 120}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("subject", subjects(), ids=str)
def test_every_class_trains_as_the_plain_one_and_resumes_or_is_refused_by_name(subject, tmp_path):
    if not is_installed(subject.package):
        pytest.skip(f"{subject.package} is not installed")
    forkserver.preload([package for package in PACKAGES if is_installed(package)])
    row = Row(subject.package, version_of(subject.package), subject.name, "FAILED")
    try:
        row = _sweep(subject, row, str(tmp_path))
    except BaseException as error:
        row = row._replace(reason=str(error))
        raise
    finally:
        record(row)
    if row.verdict in ("wraps another", "cannot run on the CPU"):
        pytest.skip(f"{row.verdict}: {row.reason}")


def _sweep(subject: Subject, row: Row, folder: str) -> Row:
    if is_abstract(subject):
        return row._replace(verdict="wraps another", reason="a base class")
    if wraps(subject):
        return row._replace(verdict="wraps another", reason=wraps(subject))
    (facts,) = run_ranks(training.survey, 1, subject, **LIMITS)
    if isinstance(facts, str):
        return row._replace(verdict="cannot run on the CPU", reason=facts)
    assert facts.moves, "it does nothing in so few steps, so this says nothing: it needs options in catalogue.py"
    row = row._replace(remarks="; ".join(_remarks(facts)))
    findings = run_ranks(claims.trains_and_saves, 3, subject, facts, folder, **LIMITS)
    refusals = [finding["refused"] for finding in findings if "refused" in finding]
    if refusals:
        assert len(refusals) == len(findings), f"refused on some ranks only: {findings}"
    else:
        assert all(finding == findings[0] for finding in findings), f"the ranks found different things: {findings}"
    if facts.takes_float64:
        wide = run_ranks(claims.trains_and_saves, 3, subject, facts.in_float64(), f"{folder}/wide", **LIMITS)[0]
        # One that rounds at random does so in float32 only: what counts is what people train in.
        random = bool(refusals) and "random numbers" in refusals[0]
        assert random or ("refused" in wide) == bool(refusals), f"float32: {findings[0]}, float64: {wide}"
    if refusals:
        assert subject.name in refusals[0], f"the refusal does not name {subject.name}: {refusals[0]}"
        assert len(refusals[0]) > len(subject.name) + 20, f"the refusal has no reason: {refusals[0]}"
        return row._replace(verdict="refused", reason=refusals[0])
    run_ranks(claims.resumes, 2, subject, facts, folder, **LIMITS)
    cut = findings[0]["cut"]
    return row._replace(
        verdict="cut anywhere" if all(cut) else "cut in some groups" if any(cut) else "kept whole",
        reason=findings[0]["reason"],
        resumes="as the plain one, which does not" if facts.resumes else "yes",
    )


def _remarks(facts: Facts) -> list[str]:
    course, said = facts.course, []
    if course.shapes != next(iter(training.SHAPES)):
        said.append(course.shapes)
    if course.drive != "gradients":
        said.append({"closure": "needs a closure", "graph": "differentiates gradients"}[course.drive])
    if course.grouping != training.GROUPINGS[0]:
        said.append(course.grouping)
    if not facts.takes_float64:
        said.append("no float64")
    if facts.random:
        said.append("random: all that is compared are the ranks")
    if facts.resumes:
        said.append(f"plain: {facts.resumes}")
    return said
