"""What the simulated device notices while a program runs on it, beside races, which it raises by itself.

A ``Loop`` is watched from its third iteration on. There our code (whatever has ``/shardstep/`` in its path)

- never makes the host wait;
- launches at most one collective per bucket in backward, in the hooks' steps and in a step, and one for clipping;
- takes no memory that was not used before;
- frees nothing that another stream may still use;
- launches nothing in ``zero_grad``;
- does nothing in a step of SGD that the capture of a graph would forbid.

With ``watch="time"`` the ranks put their logs together: a part of the communication must be hidden behind computation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tests.accelerator import simulated
from tests.accelerator.simulated import Entry, HostRead, Log
from tests.accelerator.timeline import Timeline, balanced, overlap
from tests.differential.configurations import Configuration
from tests.differential.programs import Loop
from tests.differential.sides import Sharded

OWN_STEP = ("default", "views", "lazy")  # the others step in backward, or wait for reductions that began there
WARM = 2  # iterations of a loop: whatever there is to make is made
# The least part of the communication that is hidden in each mode, with several buckets and one group of parameters.
# (What is reduced at the end of backward, as with ``overlap_backward=False``, has 0.4 where "sharded" has 0.54.)
HIDDEN = {
    "default": 0.5,
    "views": 0.5,
    "lazy": 0.5,
    "sharded": 0.5,
    "sharded lazy": 0.5,
    "under DDP": 0.55,
    "bare hook": 0.55,
    "hook": 0.15,
    "interleaved": 0.2,
    "hook scattering": 0.2,
    "interleaved scattering": 0.2,
}


class Noticed(AssertionError):
    """The device has seen something that must not be."""


class Watched(Sharded):
    """Ours, on the simulated device."""

    def loop(self, op: Loop, first: int) -> None:
        if not op.aside:
            return self._loop(op, first)
        here, stream = torch.accelerator.current_stream(), torch.Stream(self.device)
        stream.wait_stream(here)
        with stream:
            self._loop(op, first)
            self.optimizer.wait_for_parameters()
        return here.wait_stream(stream)

    def _loop(self, op: Loop, first: int) -> None:
        numbers = range(first, first + op.count)
        for number in numbers[:WARM]:
            self.iterate(op, number)
        if not numbers[WARM:]:
            return
        captures = self.config.optimizer == "SGD"  # (AdamW has to be told, and then rounds otherwise)
        watched = numbers[WARM:-1] if captures else numbers[WARM:]
        with simulated.host_reads() as reads, simulated.early_frees() as frees, simulated.tracing() as log:
            for number in watched:
                for name, call in self.parts(op, number):
                    simulated.mark(name)
                    call()
            simulated.mark("end")
        check_reads(self.config, reads, len(watched))
        check_frees(frees)
        check_memory(log)
        check_collectives(self.config, log, len(self.optimizer.layout.buckets))
        if captures:
            self._capture(op, numbers[-1])
        if self.config.watch == "time":
            logs: list[Any] = [None] * self.config.ranks
            dist.all_gather_object(logs, log, group=self.ranks)
            check_overlap(self.config, logs)

    def _capture(self, op: Loop, number: int) -> None:
        """An iteration: what a graph would take of it is in ``captured``."""
        self.fetched[number] = self.fetch(number)
        parts = self.parts(op, number)
        first = "step" if self.config.mode in OWN_STEP else "zero_grad"
        at = next(position for position, (name, _) in enumerate(parts) if name == first)
        for _, call in parts[:at]:
            call()
        if "lazy" in self.config.mode:
            self.optimizer.wait_for_parameters()  # of the step before
        with simulated.captured() as forbidden:
            for _, call in parts[at:]:
                call()
            self.optimizer.wait_for_parameters()
        if forbidden:
            raise Noticed(f"the capture of a graph would forbid {forbidden}")


def check_reads(config: Configuration, reads: Iterable[HostRead], count: int) -> None:
    """Of unused parameters sharded gradients hear once per backward (docs/limits.md, "`shard_gradients`").

    Also under DDP, and there also if its graph is static and a parameter is frozen.
    """
    own = [f"{read.kind} at {read.line}" for read in reads if read.origin == "shardstep"]
    if config.reduces and tells_usage(config):
        told = [line for line in own if "usage_exchange.py" in line]
        own = [line for line in own if line not in told] + told[count:]
    if own:
        raise Noticed(f"the host waited: {own}")


def tells_usage(config: Configuration) -> bool:
    return config.find_unused or config.static_graph


def check_frees(frees: Iterable[Any]) -> None:
    own = [one for one in frees if any("/shardstep/" in line for line in (one.made_at, one.use, one.freed_at))]
    if own:
        raise Noticed(f"freed early: {own}")


def check_memory(log: Log) -> None:
    new = [one for one in log.entries if one.kind == "allocate" and one.name == "new" and "/shardstep/" in one.line]
    if new:
        raise Noticed(f"new memory: {[(one.bytes, one.line) for one in new]}")


def check_collectives(config: Configuration, log: Log, buckets: int) -> None:
    """By kind. All-reduces under DDP are not counted: they have DDP's buckets, and parameters that are not ours.

    What ranks tell each other of unused parameters is one more (docs/limits.md, "Accelerators").
    """
    for part, entries in _parts(log):
        if part == "zero_grad" and any(one.kind in ("kernel", "copy", "collective") for one in entries):
            raise Noticed(f"zero_grad launched {[(one.name, one.line) for one in entries]}")
        sent = Counter(_kind(one.name) for one in entries if one.kind == "collective" and "/shardstep/" in one.line)
        if config.uses_ddp:
            del sent["all_reduce"]
        most = {"zero_grad": 0, "clip": 1}.get(part, buckets + (config.reduces and tells_usage(config)))
        if any(count > most for count in sent.values()):
            raise Noticed(f"{part} has sent {dict(sent)} for {buckets} buckets")


def _kind(name: str) -> str:
    return next((kind for kind in ("gather", "reduce_scatter", "all_reduce") if kind in name), name)


def _parts(log: Log) -> list[tuple[str, list[Entry]]]:
    """What was launched after each mark."""
    found: list[tuple[str, list[Entry]]] = []
    for entry in log.entries:
        if entry.kind == "mark":
            found.append((entry.name, []))
        elif found:
            found[-1][1].append(entry)
    return found


def check_overlap(config: Configuration, logs: Sequence[Log]) -> None:
    shares = [hidden(logs, seed) for seed in range(3)]
    if min(shares) < HIDDEN[config.mode]:
        raise Noticed(f"{HIDDEN[config.mode]} of the communication should be hidden, but {shares} are")


def hidden(logs: Sequence[Log], seed: int) -> float:
    """The part of the time of collectives in which the stream that computes has something to do."""
    timeline = Timeline(logs, balanced(logs, seed))
    travels = [(one.start, one.end) for one in timeline.of(kind="collective")]
    computes = [(one.start, one.end) for one in timeline.of(stream="default") if one.kind != "collective"]
    return overlap(travels, computes) / sum(end - start for start, end in travels)
