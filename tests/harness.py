"""Real processes, real gloo. ``run_ranks`` runs a function on every rank and returns what each returned.

The processes are kept and used again: what a rank is made of (imports, the first touch of every page and kernel) is
paid once for a pytest worker, not once for a call. Every call has a store and a process group of its own. A process is
used again only if the call succeeded on every rank and left nothing behind (see ``tests.traces``); otherwise, and
after a call with ``fresh=True``, it is thrown away, and the next call starts another one.
"""

from __future__ import annotations

import gc
import io
import os
import pickle
import random
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import shardstep
from tests import forkserver
from tests.traces import Start

_STARTING = 60.0  # seconds in which all processes of a call have to be there
_CLEANING = 10.0  # seconds in which a process that succeeded has to be ready again


def _modules_of(package: Any) -> list[str]:
    root = Path(package.__file__).parent
    files = (path.relative_to(root).with_suffix("") for path in sorted(root.rglob("*.py")))
    names = (".".join((package.__name__, *path.parts)).removesuffix(".__init__") for path in files)
    return [name for name in names if not name.endswith("__main__")]


# Whatever a worker's test module imports is imported once, not once per rank. All of shardstep, so that what a test
# replaces in it is noticed.
_PRELOADED = [
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "torch.distributed.optim",
    "torch.distributed.checkpoint.state_dict",
    "accelerate",
    "pytest",
    "numpy",
    *_modules_of(shardstep),
    "tests.harness",
]
forkserver.preload(_PRELOADED, last=["tests.prepared"])


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 90,
    pg_timeout: float = 60,
    fresh: bool = False,
    **kwargs: Any,
) -> list[Any]:
    """``function(rank, world_size, *args, **kwargs)`` on every rank of a gloo group; the results by rank.

    Raises the first real error of any rank (not the "connection closed by peer" that follows on the others).

    Args:
        timeout: seconds for all of it; ranks that still run are killed.
        pg_timeout: of the process group.
        fresh: in processes that nobody used before and nobody uses afterwards: a rank that is done, or gone, leaves
            the group by ending, so that the others notice at once.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [_start() if fresh or not _idle else _idle.pop() for _ in range(world_size)]
    again, succeeded, deadline = False, False, time.monotonic() + timeout
    try:
        for rank, process in enumerate(processes):
            _tell(process, fresh, (function, rank, world_size, store.port, pg_timeout, args, kwargs))
        outcomes = _await(processes, timeout)
        succeeded = all(kind == "ok" for kind, _, _ in outcomes)
        again = not fresh and succeeded
    finally:
        for process in reversed(processes):
            if again and _is_clean(process):
                _idle.append(process)
            else:
                _throw_away(process, patience=max(deadline - time.monotonic(), 1) if fresh and succeeded else 0)
    failures = [(at, rank, text) for rank, (kind, at, text) in enumerate(outcomes) if kind == "error"]
    if failures:
        _, rank, text = min(failures)
        raise AssertionError(f"rank {rank} of {world_size} failed first:\n{text}")
    return [torch.load(io.BytesIO(payload), weights_only=False) for _, _, payload in outcomes]


# --- in the process of the tests --------------------------------------------------------------------------------------


class _Process(NamedTuple):
    process: Any
    pipe: Connection


_idle: list[_Process] = []
_verdicts: dict[str, Any] = {}  # of the probe, see tests.prepared


def _start() -> _Process:
    ours, theirs = forkserver.context.Pipe()
    process = forkserver.context.Process(target=_work, args=(theirs, _verdicts), daemon=True)
    process.start()
    theirs.close()
    return _Process(process, ours)


def _tell(process: _Process, last: bool, call: tuple) -> None:
    process.pipe.send(last)
    process.pipe.send_bytes(ForkingPickler.dumps(call))


def _await(processes: list[_Process], timeout: float) -> list[tuple[str, float, Any]]:
    deadline = time.monotonic() + timeout
    outcomes: list[tuple[str, float, Any]] = []
    for process, pipe in processes:
        if not pipe.poll(max(deadline - time.monotonic(), 0.01)):
            outcomes.append(("error", float("inf"), f"still running after {timeout} s"))
            continue
        try:
            *outcome, found = pipe.recv()
            outcomes.append(tuple(outcome))
            _verdicts.update(found)
        except (EOFError, ConnectionResetError):
            process.join(5)
            # First, whenever it is noticed: nobody dies of what another rank tells.
            outcomes.append(("error", 0.0, f"died with exit code {process.exitcode}"))
    return outcomes


def _is_clean(process: _Process) -> bool:
    """Whether it left the group in time and found no traces of the call."""
    try:
        return process.pipe.poll(_CLEANING) and process.pipe.recv() == ""
    except (EOFError, ConnectionResetError):
        return False


def _throw_away(process: _Process, patience: float = 0) -> None:
    """End a process; ``patience``: seconds in which it may come to its own end, as a program does."""
    process.pipe.close()
    process.process.join(patience)
    process.process.kill()
    process.process.join()


# --- in the process of a rank -----------------------------------------------------------------------------------------


def _work(pipe: Connection, known: dict[str, Any]) -> None:
    from tests import prepared  # was imported before the fork

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    gc.freeze()  # as in tests.prepared: what was imported since
    prepared.learn(known)
    start = None
    while True:
        try:
            last, call = pipe.recv(), pipe.recv_bytes()
        except EOFError:
            return
        if start is None and not last:  # else nobody asks how it was
            start = Start(prepared.WATCHED)
        if not _answer(pipe, call, start) or start is None or last:
            return
        pipe.send(start.restore())


def _answer(pipe: Connection, call: bytes, start: Start | None) -> bool:
    """Make one call and send its outcome; whether it succeeded."""
    from tests.prepared import news

    torch.manual_seed(0)
    random.seed()
    try:
        function, rank, world_size, port, pg_timeout, args, kwargs = pickle.loads(call)
        if start is not None:
            start.watch_tests()
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        # A process may start late on a busy machine: the group's timeout, which may be short, begins when all are here.
        if store.add("here", 1) == world_size:
            store.set("all here", "")
        store.wait(["all here"], timedelta(seconds=_STARTING))
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=pg_timeout)
        )
        dist.barrier()  # a rank that is done must not leave while slower ones still connect
        result = function(rank, world_size, *args, **kwargs)
        buffer = io.BytesIO()
        torch.save(result, buffer)
        pipe.send(("ok", time.time(), buffer.getvalue(), news()))
        dist.destroy_process_group()
        return True
    except BaseException:
        pipe.send(("error", time.time(), traceback.format_exc(), news()))
        return False
