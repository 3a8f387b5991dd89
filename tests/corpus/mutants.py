"""Draws mutants of the package, to judge the differential harness by: ``python -m tests.corpus.mutants --out DIR``.

A mutant is one expression or statement of a function that is replaced, where it stands, by a wrong one; always the same
mutants for the same source and seed. Every kind of mistake has its turn, and every file, so that no file has more than
a few. What only words or refuses is left out: texts, annotations, ``raise``, warnings, ``__repr__``.
DIR gets m001.patch, m002.patch, ... and table.tsv.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.differential.entered import functions

ROOT = Path(__file__).resolve().parents[2]
SEED, COUNT, MOST = 7, 120, 4  # MOST: of a file
# What reduces, gathers, steps, lays out, masks, saves and loads. Not: errors, reports, probes, tools, other frameworks.
FILES = (
    "layout/*.py", "engine.py", "optimizer.py", "join.py", "ddp_hooks.py", "sharded_ddp.py", "model_no_sync.py",
    *(f"grads/{name}.py" for name in (
        "across_replicas", "attendance", "bucket_part", "clipping", "ddp_buckets", "ddp_feed", "ddp_reduced",
        "ddp_scheduler", "ddp_usage", "division", "gradient_hooks", "hooked_scheduler", "iteration", "loss_scale",
        "nested_backward", "norm_exchange", "norms", "parameter_gradients", "reduce_scatter", "reduced_gradients",
        "reducer", "scheduler", "sharded_gradient", "shards", "source", "summation", "transports", "usage_exchange",
        "used_parameters", "zero_grads",
    )),
    *(f"params/{name}.py" for name in (
        "all_gather", "bucket_masters", "bucket_views", "builder", "gather_window", "groups", "lazy_gather",
        "loaded_masters", "local_optimizer", "local_update", "master_blocks", "masters", "memory_order", "pieces",
        "random_bits", "replicas", "rounding", "sharded_parameters", "staging", "step_plan",
    )),
    *(f"state/{name}.py" for name in (
        "chunks", "collect", "cutting", "dcp_forms", "held", "master_weights", "named", "names", "offers", "placement",
        "plain", "shard", "state_dicts", "view",
    )),
    *(f"checkpoint/{name}.py" for name in (
        "__init__", "files", "forms", "metadata", "saving",
    )),
    "comm/collectives.py", "comm/host_channel.py", "comm/reductions.py", "comm/shared_memory.py", "comm/topology.py",
)  # fmt: skip
COMPARISONS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not",
    ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
ARITHMETIC = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Div: "*", ast.Mod: "//"}
WORDS = ("__repr__", "__str__", "error", "message", "text", "warn", "describe")  # names of functions that only word
ALIKE = ("cast", "isinstance", "issubclass", "getattr", "setattr", "hasattr", "min", "max")  # not to swap arguments of
ATOMS = ast.Name | ast.Attribute | ast.Call | ast.Subscript | ast.Constant
TEXTS = ast.JoinedStr | ast.List | ast.Tuple
BOUNDS = ast.Name | ast.Attribute | ast.Call | ast.BinOp


class Mutant(NamedTuple):
    file: str
    line: int
    kind: str
    before: str
    after: str
    start: int  # in the file's bytes
    end: int


class Source:
    """A file: where its nodes are, and what can be mistaken in it."""

    def __init__(self, path: Path) -> None:
        self.name, self.text = path.relative_to(ROOT).as_posix(), path.read_bytes()
        self._lines = [0]
        for line in self.text.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))

    def mutants(self) -> Iterator[Mutant]:
        for name, function in functions(ast.parse(self.text)):
            if not any(word in name.rpartition(".")[2] for word in WORDS):
                for statement in function.body:
                    yield from self._inside(statement)

    def _inside(self, node: ast.AST) -> Iterator[Mutant]:
        if isinstance(node, ast.Raise | ast.JoinedStr | ast.arg | ast.Import | ast.ImportFrom | ast.Assert):
            return
        if isinstance(node, ast.Call) and any(word in self._text(node.func).lower() for word in ("warn", "log")):
            return
        yield from self._of(node)
        for field, value in ast.iter_fields(node):
            if field not in ("annotation", "returns", "decorator_list"):
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        yield from self._inside(child)

    def _of(self, node: ast.AST) -> Iterator[Mutant]:
        match node:
            case ast.Compare(left, [op], [right]) if type(op) in COMPARISONS:
                yield self._mutant("comparison", node, self._joined(COMPARISONS[type(op)], left, right))
            case ast.BinOp(left, op, right) if type(op) in ARITHMETIC and not self._has_text(left, right):
                yield self._mutant("arithmetic", node, self._joined(ARITHMETIC[type(op)], left, right))
            case ast.BoolOp(ast.And(), values):
                yield self._mutant("and/or", node, self._joined("or", *values))
            case ast.Constant(int(value)) if not isinstance(value, bool):
                yield self._mutant("off by one", node, f"{value + 1}")
            case ast.Expr(ast.Call() as call):
                if not any(word in self._text(call.func).lower() for word in ("warn", "log")):
                    yield self._mutant("dropped call", node, "pass")
            case ast.Call(ast.Name("range"), [*bounds]):
                yield from (
                    self._beside(bound) for bound in bounds if not isinstance(bound, ast.Constant | ast.Starred)
                )
            case ast.Slice(lower, upper):
                yield from (self._beside(bound) for bound in (lower, upper) if isinstance(bound, BOUNDS))
            case ast.If(test) | ast.While(test) | ast.IfExp(test):
                yield self._mutant("negated", test, f"(not {self._operand(test)})")
            case ast.comprehension(ifs=[*tests]):
                yield from (self._mutant("negated", test, f"(not {self._operand(test)})") for test in tests)
        if isinstance(node, ast.Call) and self._text(node.func) not in ALIKE:
            for one, two in zip(node.args, node.args[1:], strict=False):
                if (
                    not isinstance(one, ast.Starred)
                    and not isinstance(two, ast.Starred)
                    and ast.dump(one) != ast.dump(two)
                ):
                    between = self.text[self._span(one)[1] : self._span(two)[0]].decode()
                    after = self._text(two) + between + self._text(one)
                    start, end = self._span(one)[0], self._span(two)[1]
                    yield Mutant(
                        self.name, one.lineno, "swapped arguments", self.text[start:end].decode(), after, start, end
                    )

    def _beside(self, bound: ast.expr) -> Mutant:
        return self._mutant("off by one", bound, f"{self._operand(bound)} + 1")

    def _mutant(self, kind: str, node: ast.AST, after: str) -> Mutant:
        return Mutant(self.name, node.lineno, kind, self._text(node), after, *self._span(node))  # type: ignore[attr-defined]

    def _joined(self, operator: str, *operands: ast.expr) -> str:
        return "(" + f" {operator} ".join(map(self._operand, operands)) + ")"

    def _operand(self, node: ast.expr) -> str:
        return self._text(node) if isinstance(node, ATOMS) else f"({self._text(node)})"

    def _has_text(self, *nodes: ast.expr) -> bool:
        """What adds up no numbers: a mistake in it is an error at once."""
        return any(
            isinstance(node, TEXTS) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
            for node in nodes
        )

    def _span(self, node: ast.AST) -> tuple[int, int]:
        start = self._lines[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        return start, self._lines[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]

    def _text(self, node: ast.AST) -> str:
        start, end = self._span(node)
        return self.text[start:end].decode()


def changed(mutant: Mutant) -> bytes:
    text = (ROOT / mutant.file).read_bytes()
    return text[: mutant.start] + mutant.after.encode() + text[mutant.end :]


def is_mutant(mutant: Mutant) -> bool:
    """It compiles, and is not what was there."""
    text = changed(mutant)
    try:
        compile(text, mutant.file, "exec")
    except SyntaxError:
        return False
    return ast.dump(ast.parse(text)) != ast.dump(ast.parse((ROOT / mutant.file).read_bytes()))


def draw(count: int, seed: int) -> list[Mutant]:
    """The kinds in turns; each time from the files that have had fewest, never the same line twice."""
    paths = sorted({path for pattern in FILES for path in (ROOT / "src/shardstep").glob(pattern)})
    left = [mutant for path in paths for mutant in Source(path).mutants()]
    generator, kinds = random.Random(seed), sorted({mutant.kind for mutant in left})
    drawn, taken = list[Mutant](), dict[str, int]()
    while len(drawn) < count and kinds:
        kind = kinds[len(drawn) % len(kinds)]
        open_ = [one for one in left if one.kind == kind and taken.get(one.file, 0) < MOST]
        if not open_:
            kinds.remove(kind)
            continue
        fewest = min(taken.get(one.file, 0) for one in open_)
        chosen = generator.choice([one for one in open_ if taken.get(one.file, 0) == fewest])
        left = [one for one in left if (one.file, one.line) != (chosen.file, chosen.line)]
        if is_mutant(chosen):
            drawn.append(chosen)
            taken[chosen.file] = taken.get(chosen.file, 0) + 1
    return sorted(drawn)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--seed", type=int, default=SEED)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for old in arguments.out.glob("m*.patch"):
        old.unlink()
    table = ["number\tfile\tline\tkind\tbefore\tafter"]
    for number, mutant in enumerate(draw(arguments.count, arguments.seed), 1):
        texts = ((ROOT / mutant.file).read_bytes().decode(), changed(mutant).decode())
        names = f"a/{mutant.file}", f"b/{mutant.file}"
        patch = difflib.unified_diff(*(text.splitlines(keepends=True) for text in texts), *names)
        (arguments.out / f"m{number:03d}.patch").write_text("".join(patch))
        words = (" ".join(text.split()) for text in (mutant.before, mutant.after))
        table.append("\t".join((f"m{number:03d}", mutant.file, str(mutant.line), mutant.kind, *words)))
    (arguments.out / "table.tsv").write_text("\n".join(table) + "\n")
    print(f"{len(table) - 1} mutants in {arguments.out}")


if __name__ == "__main__":
    main()
