"""The command line: look into checkpoints, check them, convert them."""

from __future__ import annotations

import errno
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

from shardstep import __version__
from shardstep.checkpoint import inspection, keys
from shardstep.checkpoint.storage.manifest import CheckpointError
from shardstep.tools import arguments, output
from shardstep.tools.from_plain import from_plain
from shardstep.tools.to_plain import to_plain

_DAMAGED, _WRONG, _INTERRUPTED, _PIPE_CLOSED = 1, 2, 130, 141  # (the last two: 128 and the number of the signal)
_EXIT_CODES = (
    "Exit status: 0 fine; 1 the checkpoint is damaged; 2 the command or a path is wrong; 130 interrupted; 141 nobody "
    'reads the output. With --json there is one object on standard output, {"error": ...} if it failed; the line on '
    "standard error stays."
)
_REMEDIES = {
    errno.ENOSPC: "Free some space, or write elsewhere.",
    errno.EDQUOT: "Free some space, or write elsewhere.",
    errno.EFBIG: "Write elsewhere.",
    errno.EROFS: "Write elsewhere.",
    errno.EACCES: "Check the permissions.",
    errno.EPERM: "Check the permissions.",
}


def main(given: list[str] | None = None) -> int:
    """Run a command. Returns the exit code: 0 fine, 1 the checkpoint is not, 2 the command is not."""
    try:
        try:
            return _run(_parser().parse_args(given))
        finally:
            output.flush()
    except BrokenPipeError:  # the reader has closed the pipe
        output.silence()
        return _PIPE_CLOSED
    except KeyboardInterrupt:
        output.tell("interrupted.")
        return _INTERRUPTED
    except OSError as error:
        output.silence()
        output.tell(f"the output cannot be written: {_line(error)}")
        return _WRONG


def _run(args: Namespace) -> int:
    try:
        return args.run(args)
    except BrokenPipeError:
        raise
    except (CheckpointError, OSError, ValueError, TypeError) as error:
        message = _line(error)
        output.tell(message)
        if args.json:
            output.print_json({"error": message})
        return _DAMAGED if isinstance(error, CheckpointError) else _WRONG


def _line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror}. {_REMEDIES.get(error.errno or 0, 'Check the path.')}"
    return str(error)


def _parser() -> ArgumentParser:
    about = "Tools for checkpoint directories of shardstep and DCP."
    parser = ArgumentParser(prog="shardstep", description=about, epilog=_EXIT_CODES)
    parser.add_argument("--version", action="version", version=f"shardstep {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    json = ArgumentParser(add_help=False)
    json.add_argument("--json", action="store_true", help="everything, as one JSON object")
    inside = "what is inside: names, shapes, dtypes, bytes, step, writers"
    inspect = commands.add_parser("inspect", help=inside, parents=[json], epilog=_EXIT_CODES)
    inspect.add_argument("directory", type=Path, metavar="DIR")
    inspect.set_defaults(run=_inspect)
    _add_convert(commands.add_parser("convert", help="to one plain file, or back", parents=[json], epilog=_EXIT_CODES))
    verify = commands.add_parser(
        "verify", help="read every byte and compare the checksums", parents=[json], epilog=_EXIT_CODES
    )
    verify.add_argument("directory", type=Path, metavar="DIR")
    verify.set_defaults(run=_verify)
    return parser


def _add_convert(convert: ArgumentParser) -> None:
    convert.description = (
        "DIR to out.pt: one plain state dict, which any torch.optim optimizer loads; no more than 16 MiB "
        "of it is in memory. in.pt to DIR: a checkpoint, from the state dict of a plain optimizer, of torch's "
        "ZeroRedundancyOptimizer (consolidated) or of fairscale's OSS, which are the same. A plain file has "
        "no names, so what comes back loads by position."
    )
    convert.add_argument("source", type=Path, metavar="DIR|in.pt")
    convert.add_argument("target", type=Path, metavar="out.pt|DIR")
    which = convert.add_mutually_exclusive_group()
    which.add_argument("--part", choices=["optim", "model"], help="which part of DIR (optim)")
    which.add_argument(
        "--key",
        help="where it lies in DIR or in.pt, if not where it usually does: app.optim for {'app': {'optim': ...}}, a "
        "dot for all of it. An optimizer becomes a plain state dict; anything else (app.model) is written as it was",
    )
    convert.add_argument(
        "--master",
        action="store_true",
        help="the model of DIR in float32, from the masters that master_weights=... has kept; what has none is cast",
    )
    convert.add_argument(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="MODULE",
        help="import it first: in.pt may hold tensors of its classes, if it tells torch that they are safe to load "
        "(torchao.optim does). Never imported because a file says so",
    )
    convert.set_defaults(run=_convert)


def _inspect(args: Namespace) -> int:
    arguments.check_checkpoint(args.directory)
    contents = inspection.inspect(args.directory)
    if args.json:
        output.print_contents_as_json(contents)
    else:
        output.print_contents(contents)
    return 0


def _convert(args: Namespace) -> int:
    for module in args.imports:
        _import(module)
    target = Path(os.path.abspath(args.target))
    if args.source.is_dir():
        arguments.check_checkpoint(args.source)
        arguments.check_target_file(args.target)
        if args.master and args.part == "optim":
            raise ValueError("--master expects a model but got --part optim. Leave out one of them.")
        key = args.key if args.key is not None else args.part or (keys.MODEL if args.master else keys.OPTIM)
        total = inspection.data_bytes(args.source)
        with _naming(target), output.progress("converting", total) as advance:
            note = to_plain(args.source, target, key, advance, master=args.master)
        size = target.stat().st_size
    else:
        arguments.check_source_file(args.source)
        arguments.check_target_directory(args.target)
        if args.part == "model":
            raise ValueError(f"--part model expects a checkpoint directory but {args.source} is a file. Leave it out.")
        if args.master:
            raise ValueError(f"--master expects a checkpoint directory but {args.source} is a file. Leave it out.")
        key = args.key if args.key is not None else keys.WHOLE
        with _naming(target), output.progress("converting", args.source.stat().st_size) as advance:
            note = from_plain(args.source, target, key, advance)
        size = inspection.data_bytes(target)
    if note:
        output.tell(note)
    if args.json:
        output.print_json({"source": str(args.source), "target": str(args.target), "key": key, "bytes": size})
    else:
        print(f"{args.source} -> {args.target}")
    return 0


def _import(module: str) -> None:
    try:
        import_module(module)
    except Exception as error:  # importing may raise anything
        raise ValueError(f"--import expects a module that can be imported but got {module!r}: {error!r}.") from error


@contextmanager
def _naming(target: Path) -> Iterator[None]:
    """An error while writing names the target, not the file beside it."""
    try:
        yield
    except OSError as error:
        beside = error.filename is None or f".{target.name}." in str(error.filename)
        if error.strerror and beside:
            raise OSError(error.errno, error.strerror, str(target)) from error
        raise


def _verify(args: Namespace) -> int:
    arguments.check_checkpoint(args.directory)
    try:
        total = inspection.data_bytes(args.directory)
    except (CheckpointError, OSError):  # ``problems`` will say so
        total = 0
    with output.progress("verifying", total) as advance:
        problems = inspection.problems(args.directory, advance)
    for problem in problems:
        output.tell(problem)
    if args.json:
        report = {"directory": str(args.directory), "ok": not problems, "bytes": total, "problems": problems}
        output.print_json(report)
    elif not problems:
        print(f"{args.directory} is complete and undamaged ({total:,} bytes)")
    return _DAMAGED if problems else 0


if __name__ == "__main__":
    sys.exit(main())
