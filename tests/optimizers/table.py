"""The outcomes of the sweep as a page: ``python -m tests.optimizers.table > docs/optimizers.md``."""

from __future__ import annotations

import datetime
import json
import re
import sys
from pathlib import Path
from typing import NamedTuple

import torch

from tests.optimizers.catalogue import PACKAGES, Subject, is_installed, subjects, version_of

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


_INTRODUCTION = """\
# With which optimizers

Any `torch.optim.Optimizer` whose update of one parameter does not depend on the others. You need not look it up: when
the optimizer is built, a probe steps tiny tensors with your class ([how](guide.md#how-parameters-are-cut)). Either it
can be cut (every rank holds exactly 1/N), or it needs whole parameters (each goes to one rank, so balance is as even
as your tensors are), or it is refused with the reason. If it is not refused, weights are those of the plain
optimizer.

| of `torch.optim` | |
|---|---|
| cut anywhere | Adadelta, Adagrad, Adam, AdamW, Adamax, ASGD, NAdam, RAdam, RMSprop, Rprop, SGD |
| kept whole | Adafactor, Muon |
| refused | LBFGS (couples all parameters), SparseAdam (takes sparse gradients only) |

Of other packages, roughly: variants of Adam (also schedule-free ones) are cut; 8-bit and 4-bit state, LAMB, and
Shampoo and SOAP of pytorch_optimizer are kept whole; what estimates a learning rate over all parameters
(D-Adaptation, Prodigy) and heavyball's SOAP are refused. Wrappers (SAM, Lookahead) have nothing to shard: shard what
they wrap.

## Every class of {count_of_packages} packages
What shardstep makes of every optimizer class that {count_of_packages} packages export. Made on {date} by
`make test-optimizers` and `python -m tests.optimizers.table > docs/optimizers.md`, with torch {torch} on CPUs and
{versions}.

Each class is trained at 3 ranks with `shard="auto"` beside the plain class in the same process, on the same gradients:
float32 and float64, two groups with different options, tensors of 5 to 12288 elements. A class that is not refused

- *trains*: after 3 and 6 steps the weights on every rank and every parameter's `full_state` are bit-equal to the plain
  one's;
- *resumes*: saved after 3 steps, with `checkpoint.save` and as one file, fresh optimizers at 2 ranks go on to the same
  bits as a plain run without interruption, and so does the plain class from that file.

Compilers are off (`torch.compile`, heavyball's own): this says nothing about the rounding of compiled steps.

| verdict | meaning | classes |
|---|---|---|
{verdicts}
"""
_MEANINGS = {
    "cut anywhere": "parameters are cut wherever it balances best; every rank holds 1/N",
    "cut in some groups": "cut in one of the two groups, whole in the other",
    "kept whole": "each parameter is on one rank; the reason is what differed when it was cut",
    "refused": "`ValueError` when it is built, with this reason",
    "wraps another": "takes an optimizer or a model, or is a base class: nothing to shard. Shard what it wraps",
    "cannot run on the CPU": "the plain class raises this: nothing to compare with",
    "FAILED": "a bug of shardstep",
    "not run": "",
}


def page() -> str:
    found = [(subject, recorded(subject)) for subject in subjects()]
    rows = [row or Row(subject.package, "", subject.name, "not run") for subject, row in found]
    counts = {verdict: sum(row.verdict == verdict for row in rows) for verdict in _MEANINGS}
    packages = [package for package in PACKAGES if is_installed(package)]
    introduction = _INTRODUCTION.format(
        count_of_packages=len(packages),
        date=datetime.date.today(),
        torch=torch.__version__.partition("+")[0],
        versions=", ".join(f"{PACKAGES[package]} {version_of(package)}" for package in packages),
        verdicts="\n".join(
            f"| {verdict} | {_MEANINGS[verdict]} | {count} |" for verdict, count in counts.items() if count
        ),
    )
    sections = [_section(package, [row for row in rows if row.package == package]) for package in packages]
    return "\n".join([introduction, *sections])


def _section(package: str, rows: list[Row]) -> str:
    lines = [
        f"## {package} {version_of(package)}",
        "| class | verdict | why | resumes | remarks |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [f"`{row.name}`", row.verdict, _short(row), row.resumes, row.remarks]
        lines.append(f"| {' | '.join(_cell(cell) for cell in cells)} |")
    return "\n".join(lines) + "\n"


def _short(row: Row) -> str:
    """The reason in one line: without what is the same for all, and of a traceback the end."""
    text = row.reason.strip()
    if row.verdict == "FAILED":
        text = (text.splitlines() or [""])[-1 if text.startswith("rank ") else 0]
    if row.verdict == "refused":
        text = text.removeprefix(f"{row.name} cannot be sharded: ")
        text = re.sub(r" Use (another|an) optimizer.*$", "", text, flags=re.DOTALL)
    text = " ".join(text.split())
    return text if len(text) <= 200 else text[:197] + "..."


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(page())
