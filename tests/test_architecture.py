"""Two rules about the code, read off its sources: modules import each other in no circle, and the layout is pure."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import shardstep

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "shardstep"
USERS = sorted(path for folder in ("examples", "benchmarks") for path in (ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    """src/shardstep/comm/codec.py -> "comm.codec"; a package is its __init__."""
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts)


MODULES = {name_of(path): path for path in sorted(SOURCE.rglob("*.py"))}


def imports_of(path: Path) -> Iterator[str]:
    """Full names of everything that a file imports, also inside functions and under TYPE_CHECKING."""
    for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} line {node.lineno}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def modules_imported_by(path: Path) -> set[str]:
    """Which modules of the package a file imports: "shardstep.layout.specs.Piece" is layout.specs."""
    found = set()
    for name in imports_of(path):
        first, *rest = name.split(".")
        if first != "shardstep":
            continue
        candidates = (".".join(rest[:length]) for length in range(len(rest), 0, -1))
        found.add(
            next((one for name in candidates for one in (name, f"{name}.__init__") if one in MODULES), "__init__")
        )
    return found


def test_no_modules_import_each_other_in_a_circle():
    graph = {module: modules_imported_by(path) for module, path in MODULES.items()}
    TopologicalSorter(graph).prepare()  # CycleError names them


@pytest.mark.parametrize("module", [module for module in MODULES if module.startswith("layout.")])
def test_the_layout_is_pure(module):
    """No torch, no files, no processes, no clock: the same layout on every rank and machine."""
    outside = {name.split(".")[0] for name in imports_of(MODULES[module])} - {"shardstep"}
    pure = {"__future__", "bisect", "collections", "dataclasses", "functools", "hashlib", "heapq", "itertools"}
    pure |= {"math", "typing"}
    assert outside <= pure


def test_public_names_exist():
    assert shardstep.__all__ == sorted(shardstep.__all__)
    assert all(hasattr(shardstep, name) for name in shardstep.__all__)


@pytest.mark.parametrize("path", USERS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_examples_and_benchmarks_use_only_the_public_names(path):
    public = {"shardstep", *(f"shardstep.{name}" for name in (*shardstep.__all__, "__version__"))}
    assert {name for name in imports_of(path) if name.split(".")[0] == "shardstep"} <= public


@pytest.mark.parametrize("module", MODULES)
def test_nothing_from_elsewhere_is_unpickled_freely(module):
    """A file, or another rank, must not be able to run code here."""
    for call in (node for node in ast.walk(ast.parse(MODULES[module].read_text())) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func)
        assert name not in ("pickle.load", "pickle.loads", "eval", "exec"), f"line {call.lineno}: {name}"
        if name == "torch.load":
            assert "weights_only=True" in map(ast.unparse, call.keywords), f"line {call.lineno}"
