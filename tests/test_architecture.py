"""The packages and the arrows between them, read off the imports. Change the tables only with the design."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import shardstep

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "shardstep"
FILES = sorted(SOURCE.rglob("*.py"))
USERS = sorted(path for folder in ("examples", "benchmarks") for path in (ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    """src/shardstep/comm/codec.py -> "comm.codec"; a package is its __init__."""
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts)


MODULES = {name_of(path): path for path in FILES}

# Which package (or module beside the packages) may import which. Every row stands below those that import it.
ARROWS = {
    "layout": set(),
    "comm": set(),
    "params": {"layout", "comm"},
    "grads": {"layout", "comm", "params"},
    "state": {"layout", "comm", "params"},
    "engine": {"comm", "params", "grads"},
    "join": {"layout", "comm", "params", "grads", "engine"},
    "optimizer": {"layout", "comm", "params", "grads", "state", "engine", "join"},
    "model_no_sync": {"grads", "state", "optimizer"},
    "sharded_ddp": {"comm", "params", "grads", "state", "optimizer"},
    "ddp_hooks": {"comm", "params", "grads", "state", "engine", "optimizer", "sharded_ddp"},
    # Checkpoints: files first, then what is written to them. None of it is imported with the package.
    "checkpoint.storage": {"comm"},
    "checkpoint": {"layout", "comm", "params", "state", "checkpoint.storage"},
    "__init__": {"params", "grads", "state", "optimizer", "model_no_sync", "sharded_ddp", "ddp_hooks", "checkpoint"},
    "integrations": {"__init__"},
    "tools": {"__init__", "comm", "params", "state", "checkpoint", "checkpoint.storage"},
}
# Who speaks with torch.distributed.checkpoint, reads and writes its files, and its metadata (a pickle).
DCP_USERS = ("state.shard", "checkpoint.", "tools.to_plain")
FILE_USERS = ("checkpoint.storage.", "checkpoint.leaves", "tools.to_plain", "tools.from_plain")
PICKLE_USERS = ("checkpoint.storage.safe_metadata", "checkpoint.leaves")
# Names that would let bytes from elsewhere become objects.
FORBIDDEN = ("pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "eval", "exec")
FORBIDDEN_OF_TORCH = ("load", "save", "broadcast_object", "_broadcast_object", "broadcast_object_list")
FORBIDDEN_OF_TORCH += ("all_gather_object", "gather_object", "scatter_object_list", "send_object_list")
FORBIDDEN_OF_TORCH += ("recv_object_list", "_tensor_to_object", "_object_to_tensor")
# Underscored names of Python's and torch's own that are used, because there is no public one.
FOREIGN_PRIVATE = {
    "_asdict _replace _getframe _DummyThread",  # Python's: NamedTuples, the call stack, autograd's threads
    "_C _current_graph_task_id _engine_run_backward _execution_engine",  # which backward runs, being called at its end
    "_make_wrapper_subclass _make_subclass _disable_dynamo _modules",
    "_version",  # of a tensor: whether somebody has written to it
    "_foreach_copy_ _foreach_div_ _foreach_mul_ _foreach_norm _foreach_zero_ _to_copy",  # kernels over lists
    "_amp_foreach_non_finite_check_and_unscale_ _foreach_clamp_min_ _foreach_clamp_max_",
    "_optimizer_step_pre_hooks _optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks _optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks _optimizer_load_state_dict_post_hooks",
    "_join_config",
    "_get_default_group _get_process_group_store _new_process_group_helper _resolve_process_group _world",
    "_get_backend _timeout",
    "_StorageInfo _StoragePrefix _MEM_FORMAT_ENCODING _save_state_dict _load_state_dict",  # DCP's file format
    "_checkpoint_offset _storage_offset",  # of a storage in a file that torch.save wrote
}


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


def package_of(module: str) -> str:
    """The row of a module: its package, or itself."""
    parent = module.rpartition(".")[0]
    return parent or module


def private_names_defined_in(path: Path) -> set[str]:
    """Functions and classes, and attributes that the classes of a file set or declare."""
    names = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            names.add(node.attr)
    return {name for name in names if name.startswith("_")}


def foreign_private_names_read_by(path: Path) -> Iterator[str]:
    """Underscored attributes of anything but ``self``, unless the file itself defines them."""
    own = private_names_defined_in(path)
    for node in ast.walk(tree_of(path)):
        private = isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
        if private and ast.unparse(node.value) not in ("self", "cls") and node.attr not in own:
            yield node.attr


def test_every_module_is_in_a_package_of_the_table():
    assert {package_of(module) for module in MODULES} == set(ARROWS)


@pytest.mark.parametrize("package", ARROWS)
def test_packages_import_only_what_the_table_allows_and_no_less(package):
    modules = [path for module, path in MODULES.items() if package_of(module) == package]
    used = {package_of(module) for path in modules for module in modules_imported_by(path)} - {package}
    assert used == ARROWS[package]


def test_arrows_point_one_way():
    """In the order of the table every package imports only earlier ones, so there is no cycle between packages."""
    order = list(ARROWS)
    for package, allowed in ARROWS.items():
        assert allowed <= set(order[: order.index(package)]), package


def test_no_modules_import_each_other_in_a_circle():
    graph = {module: modules_imported_by(path) for module, path in MODULES.items()}
    TopologicalSorter(graph).prepare()  # CycleError names them


def test_the_files_of_a_checkpoint_know_torch_the_codec_and_copies_to_the_host_only():
    outside = {
        module
        for name, path in MODULES.items()
        if package_of(name) == "checkpoint.storage"
        for module in modules_imported_by(path)
        if package_of(module) != "checkpoint.storage"
    }
    assert outside == {"comm.codec", "comm.host_copies"}


def test_nothing_but_the_package_itself_and_what_takes_optimizers_imports_the_optimizer():
    importers = [module for module, path in MODULES.items() if "optimizer" in modules_imported_by(path)]
    assert importers == ["__init__", "ddp_hooks", "model_no_sync", "sharded_ddp"]


@pytest.mark.parametrize("module", MODULES)
def test_no_module_reads_underscored_attributes_of_another_one(module):
    known = {name for names in FOREIGN_PRIVATE for name in names.split()}
    assert set(foreign_private_names_read_by(MODULES[module])) - known == set()


def test_the_table_of_foreign_underscored_names_holds_none_of_ours(tmp_path):
    known = {name for names in FOREIGN_PRIVATE for name in names.split()}
    assert not known & {name for path in FILES for name in private_names_defined_in(path)}
    # The scan finds what it is for.
    (tmp_path / "bad.py").write_text("def look(optimizer):\n    return optimizer._status\n")
    assert list(foreign_private_names_read_by(tmp_path / "bad.py")) == ["_status"]


@pytest.mark.parametrize("module", [module for module in MODULES if package_of(module) == "layout"])
def test_the_layout_is_pure(module):
    """No torch, no files, no processes, no clock: the same layout on every rank and machine."""
    outside = {name.split(".")[0] for name in imports_of(MODULES[module])} - {"shardstep"}
    pure = {"__future__", "bisect", "collections", "dataclasses", "functools", "hashlib", "heapq", "itertools"}
    pure |= {"math", "typing"}
    assert outside <= pure


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_only_comm_touches_torch_distributed(path):
    name, allowed = name_of(path), ()
    if name in ("comm.collectives", "comm.process_group", "comm.rank_groups", "comm.reductions", "comm.torch_versions"):
        allowed = ("torch.distributed",)
    elif name in ("optimizer", "join"):
        allowed = ("torch.distributed.algorithms.join",)  # the base class that the contract asks for
    elif name.startswith(DCP_USERS):
        allowed = ("torch.distributed.checkpoint",)
    touched = {
        name
        for name in [*imports_of(path), *dotted_names_of(path)]
        if name == "torch.distributed" or name.startswith(("torch.distributed.", "torch._C._distributed"))
    }
    assert [name for name in touched if not name.startswith(allowed or ("-",))] == []


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_module_unpickles_or_evaluates_anything(path):
    """Two exceptions, looked at by the tests after this one: DCP's metadata, and what torch.save wrote."""
    pickling = ("pickle",) if name_of(path) in PICKLE_USERS else ()
    saving = ("load", "save") if name_of(path).startswith(FILE_USERS) else ()
    for name in [*imports_of(path), *dotted_names_of(path)]:
        parts = name.split(".")
        assert parts[0] not in FORBIDDEN or parts[0] in pickling, f"{path.name}: {name}"
        forbidden = parts[0] in ("torch", "dist", "c10d") and parts[-1] in FORBIDDEN_OF_TORCH
        assert not forbidden or parts[-1] in saving, f"{path.name}: {name}"
        assert "object_list" not in name, f"{path.name}: {name}"
        assert "broadcast_object" not in name, f"{path.name}: {name}"


@pytest.mark.parametrize("module", [module for module in MODULES if module.startswith(FILE_USERS)])
def test_what_is_loaded_is_loaded_with_weights_only(module):
    calls = [node for node in ast.walk(tree_of(MODULES[module])) if isinstance(node, ast.Call)]
    for call in calls:
        if ast.unparse(call.func) == "torch.load":
            assert "weights_only=True" in [ast.unparse(keyword) for keyword in call.keywords], f"line {call.lineno}"


@pytest.mark.parametrize(
    "module",
    [
        *(module for module in MODULES if package_of(module) == "checkpoint.storage"),
        "params.tensor_subclasses",
        "comm.codec",
    ],
)
def test_what_reads_other_peoples_files_does_not_check_them_with_assert(module):
    """``python -O`` leaves asserts out."""
    assert not [node.lineno for node in ast.walk(tree_of(MODULES[module])) if isinstance(node, ast.Assert)]


@pytest.mark.parametrize("module", PICKLE_USERS)
def test_pickle_is_used_to_write_and_through_the_safe_reader_only(module):
    allowed = {"pickle.dumps", "pickle.UnpicklingError", "pickle.Unpickler"}
    used = {name for name in dotted_names_of(MODULES[module]) if name.startswith("pickle.")}
    assert used <= (allowed if module.endswith("safe_metadata") else allowed - {"pickle.Unpickler"})


def test_nothing_imports_what_is_for_frameworks():
    assert not [name for name, path in MODULES.items() if any("integrations." in m for m in modules_imported_by(path))]


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_the_only_dependency_is_torch(path):
    outside = {name.split(".")[0] for name in imports_of(path)} - {"shardstep", "torch"}
    optional = {"rich"} if name_of(path) == "tools.output" else set()  # nicer with it, works without
    if name_of(path).startswith("integrations."):
        optional = {"lightning"} if name_of(path) == "integrations.fabric" else {path.stem}  # who imports it has it
    assert outside - optional <= sys.stdlib_module_names


def test_there_is_no_module_of_leftovers():
    names = {path.stem for path in [*FILES, *USERS, *(ROOT / "tests").rglob("*.py")]}
    assert not names & {"utils", "util", "helpers", "common", "misc"}


@pytest.mark.parametrize("path", FILES, ids=name_of)
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


@pytest.mark.parametrize("module", ["optimizer", "state.state_dicts"])
def test_methods_of_the_optimizer_set_no_attributes(module):
    """Wrappers of our class would keep them for themselves; they share the engine and state/status.py."""
    building = ("__init__", "__setstate__", "_assemble", "_set_up_state")
    for kind in (node for node in tree_of(MODULES[module]).body if isinstance(node, ast.ClassDef)):
        for method in (node for node in ast.walk(kind) if isinstance(node, ast.FunctionDef)):
            if method.name in building:
                continue
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


def test_the_design_names_every_module():
    text = (ROOT / "docs" / "design.md").read_text()
    tree = text[text.index("## Package layout") :]
    assert [path.name for path in FILES if path.name != "__init__.py" and f" {path.name} " not in tree] == []
