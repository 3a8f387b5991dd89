"""The arrows between the modules, read off their imports. Change the table only with the design."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardstep

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "shardstep"
FILES = sorted(SOURCE.rglob("*.py"))
MODULES = {path.stem: path for path in FILES if path.parent == SOURCE}
USERS = sorted(path for folder in ("examples", "benchmarks") for path in (ROOT / folder).rglob("*.py"))

# Who may import whom. Every module stands below those that import it: layers from the bottom up.
ARROWS = {
    "layout": set(),
    "boxes": set(),
    "codec": set(),
    "orders": set(),
    "local": set(),
    "naming": set(),
    "torch_versions": set(),
    "collectives": {"torch_versions"},
    "subclasses": {"codec"},
    "partition": {"layout"},
    "report": {"layout", "subclasses"},
    "sameness": {"subclasses"},
    "probe": {"codec", "local", "sameness", "subclasses"},
    "agreement": {"collectives"},
    "replicas": {"collectives", "layout"},
    "hostmemory": {"collectives"},
    "buckets": {"collectives", "hostmemory", "layout"},
    "groups": {"codec", "layout", "local"},
    "uneven": {"codec", "collectives", "layout", "local"},
    "reads": {"agreement", "collectives"},
    "norms": {"reads"},
    "hooks": set(),
    "sharded_gradient": set(),
    "state_shard": {"boxes"},
    "reduction": {"collectives", "layout"},
    "state": {"boxes", "buckets", "codec", "collectives", "layout", "orders", "state_shard", "subclasses"},
    "sharded": {
        "buckets",
        "codec",
        "collectives",
        "groups",
        "hostmemory",
        "layout",
        "local",
        "partition",
        "probe",
        "subclasses",
    },
    "status": {"state"},
    "saving": {"codec", "local", "sharded", "state", "state_shard", "status"},
    "sharded_form": {"codec", "layout", "local", "naming", "sharded", "state", "state_shard", "subclasses"},
    "dcp_bridge": {"codec", "collectives"},
    "stepping": {"agreement", "buckets", "hostmemory", "local", "sharded"},
    "gradients": {"collectives", "layout", "norms", "sharded", "reads", "sharded_gradient"},
    "parcels": {"agreement", "collectives", "gradients", "hostmemory", "reduction"},
    "rounds": {"agreement", "collectives", "gradients", "groups", "hooks", "parcels", "sharded_gradient"},
    "clipping": {"gradients", "norms"},
    "lazy": {"stepping"},
    "sharded_state": {
        "agreement",
        "codec",
        "collectives",
        "dcp_bridge",
        "local",
        "naming",
        "sharded",
        "saving",
        "sharded_form",
        "state",
        "status",
        "subclasses",
    },
    "wrappers": {"local", "sharded_state"},
    "optimizer": {
        "agreement",
        "clipping",
        "collectives",
        "gradients",
        "groups",
        "layout",
        "lazy",
        "local",
        "sharded",
        "reads",
        "replicas",
        "report",
        "rounds",
        "sharded_state",
        "status",
        "stepping",
        "uneven",
    },
    "overlap": {"collectives", "hooks", "local", "optimizer", "stepping", "wrappers"},
    # Checkpoints: files first, then what is written to them. None of it is imported with the package.
    "torch_file": set(),
    "manifest": set(),
    "keys": set(),
    "dcp_versions": set(),
    "safe_metadata": {"dcp_versions", "manifest"},
    "directories": {"manifest"},
    "file_writer": {"manifest", "torch_file"},
    "file_reader": {"dcp_versions", "manifest", "safe_metadata", "torch_file"},
    "joining": {"codec", "dcp_versions", "file_writer", "manifest"},
    "holders": {
        "agreement",
        "buckets",
        "collectives",
        "groups",
        "layout",
        "local",
        "naming",
        "sharded",
        "saving",
        "sharded_form",
        "sharded_state",
        "status",
        "subclasses",
        "wrappers",
    },
    "claims": {"collectives", "manifest"},
    "saver": {
        "agreement",
        "claims",
        "codec",
        "collectives",
        "dcp_versions",
        "directories",
        "file_writer",
        "holders",
        "joining",
        "manifest",
        "naming",
        "orders",
        "sharded_form",
        "state_shard",
    },
    "loader": {
        "dcp_versions",
        "file_reader",
        "file_writer",
        "holders",
        "layout",
        "manifest",
        "naming",
        "orders",
        "sharded_form",
        "state_shard",
    },
    "offline": {"codec", "directories", "file_reader", "keys", "loader", "manifest", "torch_file"},
    "conversion": {
        "agreement",
        "codec",
        "collectives",
        "file_reader",
        "keys",
        "loader",
        "manifest",
        "saver",
        "saving",
        "sharded_form",
        "state_shard",
        "subclasses",
        "torch_file",
    },
    "checkpoint": {
        "agreement",
        "claims",
        "codec",
        "collectives",
        "directories",
        "file_reader",
        "holders",
        "loader",
        "local",
        "manifest",
        "offline",
        "saver",
    },
    "arguments": {"directories", "manifest"},
    "cli_output": {"offline"},
    "cli": {"arguments", "cli_output", "conversion", "manifest", "offline"},
    "__init__": {"checkpoint", "optimizer", "overlap", "report", "sharded_gradient", "state_shard"},
}
PURE = ("layout", "partition", "boxes")
# Names that would let bytes from elsewhere become objects.
FORBIDDEN = ("pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "eval", "exec")
# Who speaks with torch.distributed.checkpoint, reads and writes its files, and its metadata (a pickle).
DCP_USERS = ("state_shard", "safe_metadata", "file_writer", "file_reader", "joining", "saver", "loader", "offline")
DCP_USERS += ("conversion", "dcp_versions")
FILE_USERS = ("torch_file", "file_writer", "file_reader", "saver", "conversion")
PICKLE_USERS = ("safe_metadata", "saver")
FORBIDDEN_OF_TORCH = ("load", "save", "broadcast_object", "_broadcast_object", "broadcast_object_list")
FORBIDDEN_OF_TORCH += ("all_gather_object", "gather_object", "scatter_object_list", "send_object_list")
FORBIDDEN_OF_TORCH += ("recv_object_list", "_tensor_to_object", "_object_to_tensor")


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def imports_of(path: Path) -> Iterator[str]:
    """Full names of everything that a file imports, also inside functions and under TYPE_CHECKING."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} line {node.lineno}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def dotted_names_of(path: Path) -> Iterator[str]:
    """Every a.b.c that occurs in a file, longest form and its beginnings."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, (ast.Attribute, ast.Name)):
            yield ast.unparse(node)


def own_imports_of(path: Path) -> set[str]:
    """Which modules of the package a file imports: "shardstep.layout.Piece" and "shardstep.layout" are layout."""
    found = set()
    for name in imports_of(path):
        first, *rest = name.split(".")
        if first == "shardstep":
            found.add(rest[0] if rest and rest[0] in MODULES else "__init__")
    return found


def test_every_module_has_its_row_in_the_table():
    assert set(MODULES) == set(ARROWS)
    assert all(path.parent == SOURCE for path in FILES)


@pytest.mark.parametrize("module", ARROWS)
def test_modules_import_only_what_the_table_allows(module):
    assert own_imports_of(MODULES[module]) <= ARROWS[module]


@pytest.mark.parametrize("module", ARROWS)
def test_the_table_allows_no_more_than_is_used(module):
    assert ARROWS[module] <= own_imports_of(MODULES[module])


def test_arrows_point_one_way():
    """In the order of the table every module imports only earlier ones, so there is no cycle."""
    order = list(ARROWS)
    for module, allowed in ARROWS.items():
        assert allowed <= set(order[: order.index(module)]), module


def test_nothing_but_the_package_itself_and_the_ddp_hooks_imports_the_optimizer():
    assert [module for module, path in MODULES.items() if "optimizer" in own_imports_of(path)] == [
        "__init__",
        "overlap",
    ]


@pytest.mark.parametrize("module", PURE)
def test_layout_and_partition_are_pure(module):
    """No torch, no files, no processes, no clock: the same layout on every rank and machine."""
    outside = {name.split(".")[0] for name in imports_of(MODULES[module])} - {"shardstep"}
    pure = {"__future__", "bisect", "collections", "dataclasses", "functools", "hashlib", "heapq", "itertools"}
    pure |= {"math", "typing"}
    assert outside <= pure


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_only_collectives_touches_torch_distributed(path):
    allowed = {
        "collectives": ("torch.distributed",),
        "torch_versions": ("torch.distributed",),  # what collectives needs, in older versions
        "optimizer": ("torch.distributed.algorithms.join",),  # the base class that the contract asks for
        **dict.fromkeys(DCP_USERS, ("torch.distributed.checkpoint",)),
    }.get(path.stem, ())
    touched = {
        name
        for name in [*imports_of(path), *dotted_names_of(path)]
        if name == "torch.distributed" or name.startswith(("torch.distributed.", "torch._C._distributed"))
    }
    assert [name for name in touched if not name.startswith(allowed or ("-",))] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_module_unpickles_or_evaluates_anything(path):
    """Two exceptions, looked at by the tests after this one: DCP's metadata, and what torch.save wrote."""
    pickling = ("pickle",) if path.stem in PICKLE_USERS else ()
    saving = ("load", "save") if path.stem in FILE_USERS else ()
    for name in [*imports_of(path), *dotted_names_of(path)]:
        parts = name.split(".")
        assert parts[0] not in FORBIDDEN or parts[0] in pickling, f"{path.name}: {name}"
        forbidden = parts[0] in ("torch", "dist", "c10d") and parts[-1] in FORBIDDEN_OF_TORCH
        assert not forbidden or parts[-1] in saving, f"{path.name}: {name}"
        assert "object_list" not in name, f"{path.name}: {name}"
        assert "broadcast_object" not in name, f"{path.name}: {name}"


@pytest.mark.parametrize("module", FILE_USERS)
def test_what_is_loaded_is_loaded_with_weights_only(module):
    calls = [node for node in ast.walk(tree_of(MODULES[module])) if isinstance(node, ast.Call)]
    for call in calls:
        if ast.unparse(call.func) == "torch.load":
            assert "weights_only=True" in [ast.unparse(keyword) for keyword in call.keywords], f"line {call.lineno}"


@pytest.mark.parametrize("module", ["safe_metadata", "manifest", "file_reader", "torch_file", "subclasses", "codec"])
def test_what_reads_other_peoples_files_does_not_check_them_with_assert(module):
    """``python -O`` leaves asserts out."""
    assert not [node.lineno for node in ast.walk(tree_of(MODULES[module])) if isinstance(node, ast.Assert)]


@pytest.mark.parametrize("module", PICKLE_USERS)
def test_pickle_is_used_to_write_and_through_the_safe_reader_only(module):
    allowed = {"pickle.dumps", "pickle.UnpicklingError", "pickle.Unpickler"}
    used = {name for name in dotted_names_of(MODULES[module]) if name.startswith("pickle.")}
    assert used <= (allowed if module == "safe_metadata" else allowed - {"pickle.Unpickler"})


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_only_dependency_is_torch(path):
    outside = {name.split(".")[0] for name in imports_of(path)} - {"shardstep", "torch"}
    optional = {"rich"} if path.stem == "cli_output" else set()  # nicer with it, works without
    assert outside - optional <= sys.stdlib_module_names


def test_there_is_no_module_of_leftovers():
    names = {path.stem for path in [*FILES, *USERS, *(ROOT / "tests").rglob("*.py")]}
    assert not names & {"utils", "util", "helpers", "common", "misc"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_module_keeps_state(path):
    """Collections at module level are constants, named as such, and nobody writes to them."""
    tree = tree_of(path)
    assigned = [node for node in tree.body if isinstance(node, (ast.Assign, ast.AnnAssign))]
    mutable = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
    names = {
        ast.unparse(target)
        for node in assigned
        if isinstance(node.value, mutable)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    } - {"__all__"}
    assert all(name == name.upper() for name in names), names
    for node in ast.walk(tree):
        assert not isinstance(node, ast.Global), f"line {node.lineno}"
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            assert ast.unparse(node.value) not in names, f"line {node.lineno}"
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in names:
            assert node.attr in ("get", "items", "keys", "values", "index", "count"), f"line {node.lineno}"


@pytest.mark.parametrize("module", ["optimizer", "sharded_state"])
def test_methods_of_the_optimizer_set_no_attributes(module):
    """Wrappers of our class would keep them for themselves: what changes is in status.py, which they share."""
    building = ("__init__", "__setstate__")
    for kind in (node for node in tree_of(MODULES[module]).body if isinstance(node, ast.ClassDef)):
        for method in (node for node in kind.body if isinstance(node, ast.FunctionDef) and node.name not in building):
            for node in ast.walk(method):
                stored = isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load)
                assert not (stored and ast.unparse(node.value) == "self"), f"line {node.lineno}: {ast.unparse(node)}"


def test_public_names_exist():
    assert shardstep.__all__ == sorted(shardstep.__all__)
    assert all(hasattr(shardstep, name) for name in shardstep.__all__)


@pytest.mark.parametrize("path", USERS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_examples_and_benchmarks_use_only_the_public_names(path):
    public = {"shardstep", *(f"shardstep.{name}" for name in (*shardstep.__all__, "__version__"))}
    assert {name for name in imports_of(path) if name.split(".")[0] == "shardstep"} <= public
    used = {name for name in dotted_names_of(path) if name.startswith("shardstep.")}
    assert {".".join(name.split(".")[:2]) for name in used} <= public
    private = [name for name in dotted_names_of(path) if ".optimizer._" in name or "opt._" in name]
    assert private == []


def test_the_example_of_the_main_job_is_among_those_checked():
    assert ROOT / "examples" / "train_gpt.py" in USERS
