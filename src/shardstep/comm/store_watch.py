"""Asking the key-value store something although its host may have been cut off.

A connection to a host that is gone without a word waits for ever: no call of the store has a time limit for that. So
the question is asked on a thread, which is left behind if no answer comes. The connection serves one call at a time:
nothing is asked any more afterwards.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

Answer = TypeVar("Answer")


class StoreLost(RuntimeError):
    """The store does not answer."""


class StoreWatch:
    """Whether the store answers."""

    def __init__(self) -> None:
        self.is_lost = False
        self._glancing: threading.Thread | None = None

    def ask(self, question: Callable[[], Answer], seconds: float) -> Answer:
        """The answer, or the error that the question ends with. StoreLost if neither comes in that time."""
        answers: list[Answer] = []
        errors: list[BaseException] = []

        def put() -> None:
            try:
                answers.append(question())
            except BaseException as error:  # raised again below, on the thread that asks
                errors.append(error)

        if not self.is_lost:
            asking = threading.Thread(target=put, name="shardstep-store", daemon=True)
            asking.start()
            asking.join(seconds)
        if errors:
            raise errors[0]
        if not answers:
            self.is_lost = True
            raise StoreLost(f"the store has not answered in {seconds:g} s")
        return answers[0]

    def glance(self, question: Callable[[], Answer], seconds: float) -> Answer | None:
        """The answer, if one comes in that time. None says nothing about the store: it may be busy.

        While one is still to come, no other question is asked this way.
        """
        answers: list[Answer] = []

        def put() -> None:
            with suppress(RuntimeError):
                answers.append(question())

        if self.is_lost or (self._glancing is not None and self._glancing.is_alive()):
            return None
        self._glancing = threading.Thread(target=put, name="shardstep-store", daemon=True)
        self._glancing.start()
        self._glancing.join(seconds)
        return answers[0] if answers else None

    def ask_after_failure(self, question: Callable[[], Answer], seconds: float) -> Answer | None:
        """The answer; None if there is none, also because the store is gone and said so."""
        try:
            return self.ask(question, seconds)
        except RuntimeError:
            self.is_lost = True
            return None
