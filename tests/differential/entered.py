"""Which functions of the package a test enters, for ``tests.corpus.judge``: with SHARDSTEP_TRACE set to a folder.

Every function of src/shardstep then notes that it was entered, by a statement that is put before its first one when its
module is imported. (sys.setprofile does not see the threads of torch, in which futures call back.) Closures count as
the function around them. Without the variable nothing is changed.
"""

from __future__ import annotations

import ast
import builtins
import json
import os
import sys
import zlib
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from typing import Any

FOLDER = os.environ.get("SHARDSTEP_TRACE", "")
Function = ast.FunctionDef | ast.AsyncFunctionDef
_seen = set[str]()


def functions(node: ast.AST, around: str = "") -> Iterator[tuple[str, Function]]:
    """The functions of a module and the methods of its classes, by qualified name; not those inside functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            yield around + child.name, child
        else:
            yield from functions(child, f"{around}{child.name}." if isinstance(child, ast.ClassDef) else around)


def write(test: str) -> None:
    """What this process has entered since it was started."""
    if FOLDER:
        assert _Finder in sys.meta_path, "the package was imported before its functions could be marked"
        Path(FOLDER, f"{os.getpid()}-{zlib.crc32(test.encode())}.json").write_text(
            json.dumps({"test": test, "entered": sorted(_seen)})
        )


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> Any:
        path = self.get_filename(fullname)
        tree = ast.parse(self.get_data(path))
        for name, function in functions(tree):
            place = f"{path[path.rindex('/shardstep/') + 1 :]}:{name}"
            first = function.body[0]
            note = ast.parse(f"__shardstep_entered__({place!r})").body[0]
            for inner in ast.walk(note):
                ast.copy_location(inner, first)
            function.body.insert(ast.get_docstring(function, clean=False) is not None, note)
        return compile(tree, path, "exec", dont_inherit=True)  # (annotations here are texts, there not always)


class _Finder:
    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name.partition(".")[0] == "shardstep" else None
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


if FOLDER and "shardstep" not in sys.modules:
    builtins.__shardstep_entered__ = _seen.add  # type: ignore[attr-defined]
    sys.meta_path.insert(0, _Finder)
