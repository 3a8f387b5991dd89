"""When everything would have run on a device: the logs of all ranks (``simulated.tracing``), with durations.

Nothing is measured. Every kernel and collective gets a duration, which a seed or the test decides. It starts when the
host has launched it, its stream has come to it, and what the stream waits for is done. A collective starts when the
last rank is ready for it, so clocks meet between ranks. Launching takes the host a little; a host that waits goes on
when what it waits for is done.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any, NamedTuple

from tests.accelerator.simulated import Entry, Log

Duration = Callable[[Entry], float]  # in microseconds
LAUNCHED = ("kernel", "copy", "collective")


class Interval(NamedTuple):
    rank: int
    kind: str  # kernel, copy or collective; "host waits" and "mark" are on the host
    name: str
    device: int
    stream: str
    start: float
    end: float
    bytes: int
    line: str
    at: int  # its place in the rank's log: in which order the host launched


def by_bytes(seed: int = 0, *, communication: float = 1.0) -> Duration:
    """5 us and 1 us per 10 kB, give or take a fifth, by the seed; collectives take ``communication`` times as long."""

    def duration(entry: Entry) -> float:
        chance = zlib.crc32(repr((seed, entry.name, entry.group, entry.order, entry.bytes)).encode()) / 2**32
        return (5 + entry.bytes / 1e4) * (0.8 + 0.4 * chance) * (communication if entry.kind == "collective" else 1.0)

    return duration


def balanced(logs: Sequence[Log], seed: int = 0, *, of: str = "kernel") -> Duration:
    """Durations with which the first rank computes as long as it communicates."""
    plain, total = by_bytes(seed), defaultdict[str, float](float)
    for entry in logs[0].entries:
        total[entry.kind] += plain(entry)
    return by_bytes(seed, communication=total[of] / total["collective"])


class Timeline:
    """When each kernel and collective of all ranks runs.

    Args:
        logs: of every rank, in the order of the ranks.
        duration: of an entry, in microseconds.
        launching: what a launch costs the host, in microseconds.
    """

    def __init__(self, logs: Sequence[Log], duration: Duration | None = None, *, launching: float = 0.1) -> None:
        self._logs = logs
        self._needs: dict[Any, list[Any]] = {}
        self._takes: dict[Any, float] = defaultdict(float)
        for rank, log in enumerate(logs):
            self._read(rank, log, duration or by_bytes(), launching)
        self._end: dict[Any, float] = {}
        self._start: dict[Any, float] = {}
        try:
            for node in TopologicalSorter(self._needs).static_order():
                self._start[node] = max((self._end[need] for need in self._needs.get(node, ())), default=0.0)
                self._end[node] = self._start[node] + self._takes[node]
        except CycleError as error:
            raise AssertionError(
                "the ranks would wait for each other for ever: their collectives are crossed"
            ) from error
        self.intervals = [interval for rank in range(len(logs)) for interval in self._intervals_of(rank)]

    # Nodes: ("host", rank, place), ("run", rank, place), and ("meet", group, order) for a collective of all ranks.
    def _read(self, rank: int, log: Log, duration: Duration, launching: float) -> None:
        tails: dict[int, list[Any]] = defaultdict(list)  # what the next launch on a stream comes after
        launched: dict[int, list[tuple[int, Any]]] = defaultdict(list)  # by stream: number and node

        def last(stream: int, number: int) -> list[Any]:
            return next(([node] for other, node in reversed(launched[stream]) if other <= number), [])

        for place, entry in enumerate(log.entries):
            host = ("host", rank, place)
            self._needs[host] = [("host", rank, place - 1)] if place else []
            if entry.kind == "wait":
                tails[entry.order] += last(entry.stream, entry.number)
            elif entry.kind == "host waits":
                self._needs[host] += last(entry.stream, entry.number)
            elif entry.kind in LAUNCHED:
                self._takes[host] = launching
                run = ("run", rank, place)
                self._needs[run] = [host, *tails[entry.stream]]
                node = self._node(rank, place, entry)
                if node == run:
                    self._takes[run] = duration(entry)
                else:
                    self._takes[node] = max(self._takes[node], duration(entry))
                    needs = self._needs.setdefault(node, [])
                    needs.append(run)
                    before = ("meet", entry.group, entry.order - 1)
                    if before in self._needs and before not in needs:
                        needs.append(before)
                tails[entry.stream] = [node]
                launched[entry.stream].append((entry.number, node))

    @staticmethod
    def _node(rank: int, place: int, entry: Entry) -> Any:
        meets = entry.kind == "collective" and entry.order >= 0
        return ("meet", entry.group, entry.order) if meets else ("run", rank, place)

    def _intervals_of(self, rank: int) -> Iterable[Interval]:
        log = self._logs[rank]
        for place, entry in enumerate(log.entries):
            if entry.kind in LAUNCHED:
                node = self._node(rank, place, entry)
                device, stream = log.streams[entry.stream]
            elif entry.kind in ("host waits", "mark"):
                node, device, stream = ("host", rank, place), -1, "host"
            else:
                continue
            start = self._end[("host", rank, place - 1)] if stream == "host" and place else self._start[node]
            times = (start, self._end[node])
            yield Interval(rank, entry.kind, entry.name, device, stream, *times, entry.bytes, entry.line, place)

    # --- questions ----------------------------------------------------------------------------------------------------

    def of(
        self,
        rank: int = 0,
        *,
        kind: str | None = None,
        name: str = "",
        stream: str | None = None,
        between: tuple[str, str] | None = None,
    ) -> list[Interval]:
        """Those of a rank, in the order in which the host launched them.

        Args:
            name: part of the name.
            stream: the beginning of the stream's name ("default", "side", "simccl").
            between: two marks; what the host launched between them.
        """
        first, last = (self._place(rank, one) for one in between) if between else (-1, float("inf"))
        return [
            one
            for one in self.intervals
            if one.rank == rank
            and (one.kind in LAUNCHED if kind is None else one.kind == kind)
            and name in one.name
            and (stream is None or one.stream.startswith(stream))
            and first < one.at < last
        ]

    def _place(self, rank: int, name: str) -> int:
        return next(one.at for one in self.intervals if (one.rank, one.kind, one.name) == (rank, "mark", name))

    def hidden(self, rank: int = 0, *, between: tuple[str, str] | None = None, by: str = "kernel") -> float:
        """Which part of the time of communication the rank computes in (``by``: what counts as computing)."""
        travels = _union((one.start, one.end) for one in self.of(rank, kind="collective", between=between))
        computes = _union((one.start, one.end) for one in self.of(rank, kind=by))
        return overlap(travels, computes) / sum(end - start for start, end in travels)


def _union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def overlap(ones: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> float:
    """How long some of the ones and some of the others run at the same time. Each list without overlaps of its own."""
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in ones for b in others)


def overlaps(one: Interval, other: Interval) -> bool:
    return one.start < other.end and other.start < one.end
