"""Do the ranks agree? If not, an error on every rank that names the first difference.

The ranks compare what they state on the process group's key-value store, not in a collective: a rank that is elsewhere
can then be waited for, with a timeout, and named, and a rank that failed can say so before it raises.
Nothing that comes from another rank is unpickled; facts travel as JSON.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property
from typing import Any, NamedTuple

from shardstep.comm.process_group import Group, rank_numbers
from shardstep.comm.store_watch import StoreLost, StoreWatch

# Seconds within which ranks that are in the same collective see it fail.
_SAME_TIME = 2.0
_PATIENCE = 3 * _SAME_TIME  # for an answer of the store, beyond what is waited for anyway
_STORE_IS_LOST = (
    " The store of the process group, on the host of its first rank, does not answer: that host may be gone."
)

# What a rank states: in order, a subject ("parameter 3 ('head.weight')") and its fields.
Facts = Sequence[tuple[str, Mapping[str, str]]]


class Difference(NamedTuple):
    """The first fact in which ranks differ."""

    subject: str
    field: str
    values: dict[str, list[int]]  # value -> ranks

    def __str__(self) -> str:
        return self.text(rank_numbers)

    def text(self, names_of: Callable[[Sequence[int]], str]) -> str:
        """The difference in words. ``names_of``: what ranks are called."""
        values = " but ".join(f"{value} on {names_of(ranks)}" for value, ranks in self.values.items())
        return f"{self.subject}: {self.field} is {values}"


class RankFailed(RuntimeError):
    """Another rank failed, in the same call or elsewhere. The message says which one and how."""

    def __init__(self, message: str, kind: str = "", place: int | None = None, short: str = "") -> None:
        super().__init__(message)
        self.kind = kind  # the name of the class of that rank's error
        self.place = place  # how far it came, if it said so
        self.short = short or message  # which rank failed, and how, and nothing about this one


class RankConsensus:
    """Where the ranks of one optimizer compare facts. Every comparison has a number, counted alike on every rank."""

    def __init__(self, group: Group, kind: str = "built") -> None:
        self.group = group
        self._number = 0
        self._note = self._reason = ""  # why the next, and the current, comparison is made
        self.someone_was_absent = False  # at the last comparison
        self._heard: RankFailed | None = None  # the last failure of another rank
        self._kind = kind
        self._watch = StoreWatch()

    def settle(self) -> None:
        """Fix which consensus this is, by how many were opened before: for one that another thread will use."""
        _ = self._instance

    @cached_property
    def _instance(self) -> str:
        """The k-th optimizer that compares on this group compares with the k-th of the other ranks.

        Copies are counted apart, and from their first comparison on: one may be made on one rank only, to look at.
        """
        return f"{self._kind}{self.group.store.add(f'shardstep/{self._kind}/{self.group.rank}', 1)}"

    def check_equal(self, call: str, facts: Facts) -> None:
        """Collective: call on every rank of the group. Return if all state the same, else raise on all.

        Args:
            call: what the user called, for messages.
            facts: what must be the same on every rank.
        """
        if self.group.world_size == 1:
            return
        try:
            self._watch.ask(lambda: self._compare(call, facts), self.group.timeout.total_seconds() + _PATIENCE)
        except StoreLost as error:
            raise RuntimeError(
                f"{call} expects to compare with all ranks, but could not: {error}.{_STORE_IS_LOST}"
            ) from error

    def _compare(self, call: str, facts: Facts) -> None:
        facts = [("call", {"method": call}), *facts]
        digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
        self._enter(call, {"digest": digest})
        verdict = self._await_verdict()
        self.someone_was_absent = "absent" in verdict
        if "failed" in verdict:
            rank, their_call, text, kind, place = verdict["failed"]
            short = f"{self.group.name_of(rank)} failed in {their_call}: {text}"
            self._heard = RankFailed(self._failure_text(call, rank, their_call, text), kind, place, short)
            raise self._heard
        if "absent" in verdict:
            raise RuntimeError(self._absence_text(call, verdict["absent"]))
        self._forget(self._number - 1)
        if verdict["digests"]:
            difference = self._first_difference(facts, digest, verdict).text(self.group.names_of)
            raise RuntimeError(
                f"{call} expects the same on every rank, but {difference}. "
                "Make the ranks alike and call it again on all of them."
            )

    def gather(self, call: str, facts: Facts, text: str) -> list[str]:
        """``check_equal``, and rank 0 hears everybody's ``text``, by rank; the others get nothing."""
        if self.group.world_size == 1:
            return [text]
        store, prefix = self.group.store, self._prefix(self._number + 1)
        store.set(f"{prefix}/text/{self.group.rank}", text)
        try:
            self.check_equal(call, facts)
        except RuntimeError:
            store.delete_key(f"{prefix}/text/{self.group.rank}")
            raise
        if self.group.rank != 0:
            return []
        keys = [f"{prefix}/text/{rank}" for rank in range(self.group.world_size)]
        texts = [store.get(key).decode() for key in keys]
        for key in keys:
            store.delete_key(key)
        return texts

    def announce(self, call: str, facts: Facts, text: str) -> str:
        """``check_equal``, and every rank hears rank 0's ``text``."""
        if self.group.world_size == 1:
            return text
        store, key = self.group.store, f"{self._prefix(self._number + 1)}/announced"
        if self.group.rank == 0:
            store.set(key, text)
        self.check_equal(call, facts)
        return store.get(key).decode()

    def report_failure(self, call: str, error: BaseException, place: int | None = None) -> None:
        """Tell the ranks that wait in ``check_equal`` that this one failed. Does not wait; the caller raises.

        ``place``: how far it came, for those who wait for it further on (``failure_before``).
        """
        if self.group.world_size == 1:
            return
        kind = type(error).__name__
        text = f"{kind}: {error}"
        entry: dict[str, Any] = {"error": text, "kind": kind}
        if place is not None:
            entry["place"] = place

        def report() -> None:
            self._enter(call, entry)
            self._publish({"failed": [self.group.rank, call, text, kind, place]})

        self._watch.ask_after_failure(report, _PATIENCE)  # no answer: ``error`` is what the user must see, not this

    def take_heard(self) -> RankFailed | None:
        """The failure of another rank that was heard of since the last call, if one was."""
        heard, self._heard = self._heard, None
        return heard

    def failure_before(self, place: int, among: Sequence[int], has_reported: bool) -> RankFailed | None:
        """The failure of a rank, ``among`` these, before it came to a place where this one waits for it; or None.

        Looks only; never waits. ``has_reported``: this rank has failed itself, and reported that.
        """
        number = self._number if has_reported else self._number + 1
        return self._watch.glance(lambda: self._find_failure(number, place, among), _SAME_TIME)

    def _find_failure(self, number: int, place: int, among: Sequence[int]) -> RankFailed | None:
        store, prefix = self.group.store, self._prefix(number)
        if not store.check([f"{prefix}/verdict"]):  # one question, however many ranks there are: nobody has failed
            return None
        for rank in among:
            key = f"{prefix}/entered/{rank}"
            entry = json.loads(store.get(key)) if rank != self.group.rank and store.check([key]) else {}
            if entry.get("place", place) < place:
                where = self.group.name_of(rank)
                return RankFailed(f"{where} failed before, in {entry['call']}: {entry['error']}", entry["kind"])
        return None

    def explain(self, but: str = "") -> str:
        """Where the other ranks are, if the store knows: for the message of a collective that failed.

        Looks only; never waits. Ranks that failed in ``but`` are where they should be.
        """
        store, found = self.group.store, []
        for rank in range(self.group.world_size):
            stuck = f"shardstep/{self._instance}/stuck/{rank}"
            if rank != self.group.rank and store.check([stuck]) and (place := store.get(stuck).decode()) != but:
                found.append(f"{self.group.name_of(rank)} was in {place}")
            key = f"{self._prefix(self._number + 1)}/entered/{rank}"
            if rank != self.group.rank and store.check([key]):
                entry = json.loads(store.get(key))
                what = f"waits in {entry['call']}"
                if "error" in entry:
                    what = f"failed in {entry['call']}: {entry['error']}"
                note = f" ({entry['note']})" if entry.get("note") else ""
                found.append(f"{self.group.name_of(rank)} {what}{note}")
        return "; ".join(found)

    def explain_absence(self, call: str, error: BaseException) -> str:
        """What to say after the collective that ``call`` consists of has failed here: who was not in it.

        Everybody who was fails as well, at nearly the same time, and leaves a word on the store.
        """
        answer = self._watch.ask_after_failure(lambda: (self._absent_from(call), self.explain()), _PATIENCE)
        if answer is None:  # the first error is all there is to tell
            return f"{call} failed: {error}.{_STORE_IS_LOST}"
        absent, meanwhile = answer
        if not absent:
            return f"{call} failed, on every rank: {error}"
        return (
            f"{call} expects a call on every rank of the group, but {self.group.names_of(absent)} did not take part"
            + (f" ({meanwhile})" if meanwhile else "")
            + f", so it failed: {error}. Call it on all {self.group.world_size} ranks, in the same order."
        )

    def _absent_from(self, call: str, among: Sequence[int] | None = None) -> list[int]:
        """The ranks, all or ``among`` these, that do not fail in ``call`` as well, at nearly the same time."""
        store, rank = self.group.store, self.group.rank
        others = [other for other in (range(self.group.world_size) if among is None else among) if other != rank]
        keys = {other: f"shardstep/{self._instance}/stuck/{other}" for other in others}
        store.set(f"shardstep/{self._instance}/stuck/{rank}", call)
        deadline = time.monotonic() + _SAME_TIME
        while time.monotonic() < deadline and not store.check(list(keys.values())):
            time.sleep(0.02)
        there = {other: store.get(key).decode() for other, key in keys.items() if store.check([key])}
        return [other for other in others if there.get(other) != call]

    def meanwhile(self, call: str = "", among: Sequence[int] | None = None) -> str:
        """Where the other ranks are, to follow the message of a collective that failed; empty if nothing is known.

        With ``call``: if nobody has said anything, who was not in it. Everybody who was fails as well. ``among``: the
        ranks that it is a collective of, if not all.
        """
        where = self._watch.ask_after_failure(lambda: self.explain(but=call), _PATIENCE)
        if where:
            return f" Meanwhile {where}."
        absent = self._watch.ask_after_failure(lambda: self._absent_from(call, among), _PATIENCE) if call else []
        if self._watch.is_lost:  # the first error is all there is to tell
            return _STORE_IS_LOST
        return f" It expects all ranks, but {self.group.names_of(absent)} did not come to it." if absent else ""

    @contextmanager
    def reporting(self, call: str, place: int | None = None) -> Iterator[None]:
        """If this rank fails here, the ranks that wait for it hear of it, before the error goes on to the user."""
        try:
            yield
        except Exception as error:
            self.report_failure(call, error, place)
            raise

    def leave_word(self, name: str, text: str) -> None:
        """Leave a word for the other ranks: when this returns, it is there. Waits for no rank."""
        store, key = self.group.store, f"shardstep/{self._instance}/word/{name}/{self.group.rank}"
        store.set(key, text)
        store.check([key])  # ``set`` only sends; the answer to this comes when it was taken

    def word_of(self, rank: int, name: str) -> str | None:
        """The word that a rank has left; None if it has not (yet). Does not wait."""
        store, key = self.group.store, f"shardstep/{self._instance}/word/{name}/{rank}"
        return store.get(key).decode() if store.check([key]) else None

    def note(self, text: str) -> None:
        """Say why this rank makes the next comparison, for messages here and on other ranks."""
        self._note = text

    def _failure_text(self, call: str, rank: int, their_call: str, error: str) -> str:
        if their_call == call:
            return f"{call} failed on {self.group.name_of(rank)}, so it is undone on every rank: {error}"
        why = f" ({self._reason})" if self._reason else ""
        return (
            f"{call}{why} expects a call on every rank of the group, but {self.group.name_of(rank)} did not call it: "
            f"it was in {their_call}, which failed there: {error}"
        )

    def _absence_text(self, call: str, absent: Sequence[int]) -> str:
        why = f" ({self._reason})" if self._reason else ""
        return (
            f"{call}{why} expects a call on every rank of the group, but {self.group.names_of(absent)} did not call it "
            f"within {self.group.timeout.total_seconds():g} s. Call it on all {self.group.world_size} ranks, in the "
            "same order."
        )

    def _prefix(self, number: int) -> str:
        return f"shardstep/{self._instance}/{number}"

    def _key(self, name: str) -> str:
        return f"{self._prefix(self._number)}/{name}"

    def _enter(self, call: str, entry: dict[str, Any]) -> None:
        self._number += 1
        self._reason, self._note = self._note, ""
        entry = {"call": call, "note": self._reason, **entry}
        store, size = self.group.store, self.group.world_size
        store.set(self._key(f"entered/{self.group.rank}"), json.dumps(entry))
        if store.add(self._key("count"), 1) == size:
            # The last to come has everything before it and decides; the others wait for one key only.
            self._publish(self._decide())

    def _decide(self) -> dict:
        store, ranks_by_digest, absent = self.group.store, {}, []
        for rank in range(self.group.world_size):
            key = self._key(f"entered/{rank}")
            if not store.check([key]):
                absent.append(rank)
                continue
            entry = json.loads(store.get(key))
            if "error" in entry:  # says more than who is absent
                return {"failed": [rank, entry["call"], entry["error"], entry["kind"], entry.get("place")]}
            ranks_by_digest.setdefault(entry["digest"], []).append(rank)
        if absent:
            return {"absent": absent}
        return {"digests": ranks_by_digest if len(ranks_by_digest) > 1 else {}}

    def _await_verdict(self) -> dict:
        if self._wait("verdict", self.group.timeout):
            return json.loads(self.group.store.get(self._key("verdict")))
        # Whoever came this very moment, or died before it decided, may still owe the verdict: give it here.
        return self._publish(self._decide())

    def _publish(self, verdict: dict) -> dict:
        """The first verdict counts, for everybody; return that."""
        return json.loads(self.group.store.compare_set(self._key("verdict"), "", json.dumps(verdict)))

    def _wait(self, name: str, timeout: timedelta) -> bool:
        try:
            self.group.store.wait([self._key(name)], timeout)
        except RuntimeError:  # the store's way to say that the time is over
            return self.group.store.check([self._key(name)])
        return True

    def _forget(self, number: int) -> None:
        """Delete what a comparison left in the store. Everybody is in the next one, so nobody reads it any more."""
        store, prefix = self.group.store, self._prefix(number)
        store.delete_key(f"{prefix}/entered/{self.group.rank}")
        if self.group.rank == 0:
            store.delete_key(f"{prefix}/count")
            store.delete_key(f"{prefix}/verdict")
            store.delete_key(f"{prefix}/announced")

    def _first_difference(self, facts: Facts, digest: str, verdict: dict) -> Difference:
        """Show the facts themselves: one rank of each opinion shows them, everybody compares."""
        store, rank = self.group.store, self.group.rank
        if rank == verdict["digests"][digest][0]:
            store.set(self._key(f"facts/{rank}"), json.dumps(facts))
        opinions = []
        for ranks in verdict["digests"].values():
            self._wait(f"facts/{ranks[0]}", self.group.timeout)
            opinions.append((ranks, json.loads(store.get(self._key(f"facts/{ranks[0]}")))))
        return first_difference(opinions)


def first_difference(opinions: Sequence[tuple[list[int], Facts]]) -> Difference:
    """The first subject and field in which the opinions, each held by some ranks, are not all the same."""
    longest = max(len(facts) for _, facts in opinions)
    for position in range(longest):
        rows = [(ranks, facts[position] if position < len(facts) else None) for ranks, facts in opinions]
        subjects = _group_by_value((ranks, row[0] if row else "absent") for ranks, row in rows)
        if len(subjects) > 1:
            named = next(row[0] for _, row in rows if row)
            return Difference(named, "this position", subjects)
        subject = rows[0][1][0]  # type: ignore[index]
        fields = dict.fromkeys(field for _, row in rows for field in row[1])  # type: ignore[index]
        for field in fields:
            values = _group_by_value((ranks, row[1].get(field, "absent")) for ranks, row in rows)  # type: ignore
            if len(values) > 1:
                return Difference(subject, field, values)
    raise AssertionError("facts with different digests differ")


def _group_by_value(pairs) -> dict[str, list[int]]:
    grouped: dict[str, list[int]] = {}
    for ranks, value in pairs:
        grouped.setdefault(value, []).extend(ranks)
    return {value: sorted(ranks) for value, ranks in sorted(grouped.items(), key=lambda item: min(item[1]))}
