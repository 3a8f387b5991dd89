"""Asking the key-value store something when its host may have been cut off.

A connection to a host that is gone without a word waits for ever: no call of the store has a time limit for that. So
the question is asked on a thread, which is left behind if no answer comes. The connection serves one call at a time:
nothing is asked any more afterwards.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

Answer = TypeVar("Answer")


class StoreWatch:
    """Whether the store answers."""

    def __init__(self, seconds: float) -> None:
        """``seconds``: how long an answer may take, with everything that the question waits for itself."""
        self._seconds = seconds
        self.is_lost = False

    def ask(self, question: Callable[[], Answer]) -> Answer | None:
        """The answer; None if there is none, because the store is gone or does not answer in time."""
        if self.is_lost:
            return None
        answers: list[Answer] = []

        def put() -> None:
            try:
                answers.append(question())
            except RuntimeError:  # the store is gone with its host, and said so
                self.is_lost = True

        asking = threading.Thread(target=put, name="shardstep-store", daemon=True)
        asking.start()
        asking.join(self._seconds)
        self.is_lost = self.is_lost or asking.is_alive()
        return answers[0] if answers else None
