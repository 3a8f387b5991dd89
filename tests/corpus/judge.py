"""Does the differential suite notice a patch that breaks the package? A past bug, undone, or a mutant.

``python -m tests.corpus.judge PATCHES... --out TSV`` judges patches of src/ (files, or folders of them), each in a copy
of HEAD, and goes on where it stopped: a patch that is in the TSV, as it is, is skipped (``--again missed``,
``--again all``: it is judged again). ``caught``: a test failed, and passes without the patch. ``missed``: every test
passed. ``error``: the patch cannot be applied, or pytest ran nothing.

Which tests run, and in which order, is taken from a map, which ``--map`` builds (once for a state of src/ and
tests/differential): what every test enters of the package, how long it takes, and which tests fail as it is (they are
left out). For a patch only those tests run that enter a function which it changes, the fastest first: a test that never
enters it cannot notice. A patch that nothing enters is missed. What is outside of functions changes all tests, except
imports. A method that is new counts as its class: it may stand in for an inherited one. Any other new function is
called by one that the patch changes as well.
"""

from __future__ import annotations

import argparse
import ast
import csv
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import zlib
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple
from xml.etree import ElementTree

from tests.differential.entered import functions

ROOT = Path(__file__).resolve().parents[2]
STORE = ROOT / ".mutants"  # of maps
SUITE = ("tests/differential", "-m", "not long")
COLUMNS = ("patch", "verdict", "seconds", "tests", "test", "failure", "case", "state", "digest")
LIMIT = 1800  # seconds for a run of pytest


class Run(NamedTuple):
    """Of pytest."""

    durations: dict[str, float]  # of tests that ran
    failures: dict[str, str]
    output: str


def git(*arguments: str, at: Path = ROOT) -> str:
    return subprocess.run(("git", *arguments), cwd=at, check=True, capture_output=True, text=True).stdout.strip()


def state() -> str:
    """Which package and which suite: maps are for one of them."""
    return "-".join(git("rev-parse", "--short=8", f"HEAD:{folder}") for folder in ("src", "tests/differential"))


def copy(folder: Path) -> Path:
    git("clone", "--quiet", "--shared", "--no-checkout", str(ROOT), str(folder))
    git("checkout", "--quiet", "--detach", git("rev-parse", "HEAD"), at=folder)
    return folder


def run(tree: Path, *arguments: str, **environment: str) -> Run:
    """Pytest in a copy, whose package is imported."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = ("-m", "pytest", "-p", "no:cacheprovider", "-o", "junit_family=xunit1", f"--junitxml={report}")
        variables = {"PYTHONPATH": f"{tree}/src:{tree}", "SHARDSTEP_SHRINK": "0", "TMPDIR": folder, **environment}
        try:
            done = subprocess.run(
                (sys.executable, *command, *arguments), cwd=tree, env={**os.environ, **variables}, timeout=LIMIT,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return Run({}, {}, f"pytest took more than {LIMIT} s")
        cases = ElementTree.parse(report).iter("testcase") if report.exists() else ()
        durations, failures = dict[str, float](), dict[str, str]()
        for case in cases:
            test = f"{case.get('file')}::{case.get('name')}"
            durations[test] = float(case.get("time", 0))
            for found in (*case.findall("failure"), *case.findall("error")):
                lines = [line[1:].strip() for line in (found.text or "").splitlines() if line.startswith("E ")]
                failures[test] = "\n".join(lines) or found.get("message") or "?"
        return Run(durations, failures, done.stdout)


# --- the map -----------------------------------------------------------------------------------------------------


def map_path() -> Path:
    return STORE / f"map-{state()}.json"


def build_map(select: str, jobs: int) -> None:
    with tempfile.TemporaryDirectory(prefix="shardstep-map-") as folder:
        tree, traces = copy(Path(folder, "tree")), Path(folder, "traces")
        traces.mkdir()
        ran = run(tree, *SUITE, "-k", select, "-n", str(jobs), SHARDSTEP_TRACE=str(traces))
        entered = dict[str, set[str]]()
        for found in map(json.loads, (path.read_text() for path in traces.iterdir())):
            entered.setdefault(found["test"], set()).update(found["entered"])
    if not ran.durations:
        sys.exit(ran.output)
    rows = {
        test: {"seconds": seconds, "entered": sorted(entered.get(test, ()))}
        for test, seconds in ran.durations.items() if test not in ran.failures
    }  # fmt: skip
    STORE.mkdir(exist_ok=True)
    map_path().write_text(
        json.dumps({"tests": rows, "broken": {test: reason(ran.failures[test]) for test in ran.failures}})
    )
    for test, text in ran.failures.items():
        print(f"left out, it fails without a patch: {test}: {reason(text)}")
    print(f"{len(rows)} tests in the map, {len(ran.failures)} left out: {map_path()}")


# --- what a patch changes ----------------------------------------------------------------------------------------


class _Outside(ast.NodeTransformer):
    """What is left of a module without functions, imports and texts."""

    def _drop(self, node: ast.AST) -> None:
        return None

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Import = visit_ImportFrom = _drop

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        return None if isinstance(node.value, ast.Constant) else node


def _without_texts(function: Any) -> str:
    for node in ast.walk(function):
        if ast.get_docstring(node) is not None if isinstance(node, ast.FunctionDef | ast.ClassDef) else False:
            node.body = node.body[1:]
    return ast.dump(function)


def _outside(text: str, classes: set[str]) -> str:
    tree = ast.parse(text)
    tree.body = [node for node in tree.body if not isinstance(node, ast.ClassDef) or node.name in classes]
    return ast.dump(_Outside().visit(tree))


def changed(before: str, after: str) -> set[str] | None:
    """The functions of a module that differ ("Class." is any of a class); None if what is outside of them does."""
    trees = [ast.parse(text) for text in (before, after)]
    old, new = ({name: _without_texts(function) for name, function in functions(tree)} for tree in trees)
    classes = [{node.name for node in tree.body if isinstance(node, ast.ClassDef)} for tree in trees]
    if _outside(before, classes[0] & classes[1]) != _outside(after, classes[0] & classes[1]):
        return None
    added = {f"{name.rpartition('.')[0]}." for name in new.keys() - old.keys() if "." in name}
    return added | {name for name in old if old[name] != new.get(name)}


def tests_for(tree: Path, tests: dict[str, Any]) -> list[str]:
    """Those that may notice what a copy has changed, the fastest first."""
    chosen = set[str]()
    for name in git("diff", "HEAD", "--name-only", "--no-renames", at=tree).splitlines():
        place, path = name.removeprefix("src/"), tree / name
        found = changed(git("show", f"HEAD:{name}", at=tree), path.read_text() if path.exists() else "")
        wanted = {f"{place}:{function}" for function in found or ()}
        for test, row in tests.items():
            entered = row["entered"]
            if found is None or any(one in wanted or f"{one.rpartition('.')[0]}." in wanted for one in entered):
                chosen.add(test)
    return sorted(chosen, key=lambda test: tests[test]["seconds"])


# --- judging -----------------------------------------------------------------------------------------------------


def judge(patch: Path, tree: Path, tests: dict[str, Any], most: int) -> dict[str, Any]:
    started, row = time.monotonic(), {"patch": patch.stem, "verdict": "missed", "tests": 0}
    try:
        git("apply", "--3way", str(patch.resolve()), at=tree)
        left = spread(tests_for(tree, tests), most)
        row["tests"] = len(left)
        while left and row["verdict"] == "missed":
            ran = run(tree, "-x", "-n", "0", *left)
            if not ran.durations:
                row |= {"verdict": "error", "failure": ran.output.strip().splitlines()[-1][:300]}
            elif not ran.failures:
                break
            for test, text in ran.failures.items():
                clean(tree)
                if test in tests and run(tree, "-n", "0", test).failures:  # now and then, or on a machine that is busy
                    git("apply", "--3way", str(patch.resolve()), at=tree)
                    left = left[left.index(test) + 1 :]
                    row["failure"] = f"without the patch, too: {test.partition('::')[2]}"
                else:
                    row |= {
                        "verdict": "caught",
                        "test": test.partition("::")[2],
                        "failure": reason(text),
                        "case": case(text),
                    }
    except subprocess.CalledProcessError as error:
        row |= {"verdict": "error", "failure": error.stderr.strip().splitlines()[0]}
    clean(tree)
    return {**row, "seconds": round(time.monotonic() - started), "state": state(), "digest": digest(patch)}


def spread(tests: list[str], most: int) -> list[str]:
    """At most so many of them (0: all), from all over the list."""
    if not 0 < most < len(tests):
        return tests
    return [tests[at * len(tests) // most] for at in range(most)]


def digest(patch: Path) -> str:
    return f"{zlib.crc32(patch.read_bytes()):08x}"


def clean(tree: Path) -> None:
    git("reset", "--quiet", "--hard", at=tree)
    git("clean", "-fdxq", "src", at=tree)  # also compiled files: they are told apart by whole seconds only


def reason(failure: str) -> str:
    """The exception of the rank that failed first, and the operation it was in."""
    lines = [line.strip() for line in failure.partition("To run it again")[0].splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Mismatch|Exception|Timeout)\b", line)]
    notes = [line for line in lines if line.startswith("in ")]
    return " ".join((*(named[-1:] or lines[:1]), *notes[-1:]))[:500]


def case(failure: str) -> str:
    """What was run, on one line."""
    found = re.search(r"^run\(.*?^END$", failure, re.DOTALL | re.MULTILINE)
    return " ".join(found.group().removesuffix("END").split()) if found else ""


def recorded(path: Path) -> dict[str, dict[str, Any]]:
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        return {row["patch"]: row for row in csv.DictReader(file, delimiter="\t")}


def record(path: Path, rows: dict[str, dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, delimiter="\t", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows[name] for name in sorted(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("patches", nargs="*", type=Path)
    parser.add_argument("--out", type=Path, default=STORE / "verdicts.tsv")
    parser.add_argument("--map", action="store_true", help="build the map of this state, even if there is one")
    parser.add_argument("--select", default="", help="for the map: tests to take, as for pytest -k")
    parser.add_argument("--most", type=int, default=0, help="tests for a patch; 0: all that enter what it changes")
    parser.add_argument("--jobs", type=int, default=2, help="patches at a time")
    parser.add_argument("--again", choices=("missed", "all"), help="also patches that are in the TSV")
    arguments = parser.parse_args()
    if arguments.map or not map_path().exists():
        build_map(arguments.select, arguments.jobs)
    tests = json.loads(map_path().read_text())["tests"]
    patches = [one for path in arguments.patches for one in (sorted(path.glob("*.patch")) if path.is_dir() else [path])]
    rows = recorded(arguments.out)
    again = {None: (), "missed": ("missed", "error"), "all": ("missed", "error", "caught")}
    done = {one for one, row in rows.items() if row["verdict"] not in again[arguments.again]}
    wanted = [one for one in patches if one.stem not in done or rows[one.stem]["digest"] != digest(one)]
    with (
        tempfile.TemporaryDirectory(prefix="shardstep-judge-") as folder,
        ThreadPoolExecutor(arguments.jobs) as workers,
    ):
        trees = SimpleQueue[Path]()
        for number in range(min(arguments.jobs, len(wanted))):
            trees.put(copy(Path(folder, str(number))))

        def judged(patch: Path) -> dict[str, Any]:
            tree = trees.get()
            try:
                return judge(patch, tree, tests, arguments.most)
            finally:
                trees.put(tree)

        for future in as_completed([workers.submit(judged, patch) for patch in wanted]):
            row = future.result()
            rows[row["patch"]] = row
            record(arguments.out, rows)
            print(*(row.get(name, "") for name in COLUMNS[:6]), sep="\t", flush=True)
    verdicts = [rows[one.stem]["verdict"] for one in patches]
    counts = {name: verdicts.count(name) for name in ("caught", "missed", "error")}
    rate = counts["caught"] / max(counts["caught"] + counts["missed"], 1)
    print(", ".join(f"{name} {count}" for name, count in counts.items()) + f": {rate:.0%} caught")


if __name__ == "__main__":
    main()
