"""What ``save`` returns."""

from __future__ import annotations

from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path


class SaveHandle:
    """A save that goes on in the background, or is done.

    Attributes:
        directory: where the checkpoint is when it is complete.
    """

    def __init__(self, directory: Path, started: Future[None] | None = None) -> None:
        self.directory = directory
        self.reported = False  # whether ``wait`` has raised what failed
        self._started = started

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._started is None or self._started.done()

    def wait(self, timeout: float | None = None) -> Path:
        """Wait until the checkpoint is complete and return its directory. Raises what failed on any rank.

        TimeoutError after ``timeout`` seconds, if given; the save goes on.
        """
        if self._started is not None:
            try:
                error = self._started.exception(timeout)
            except FutureTimeout:  # (before Python 3.11 another class)
                raise TimeoutError(f"{self.directory} is not complete after {timeout} s. The save goes on.") from None
            if error is not None:
                self.reported = True
                raise error
        return self.directory

    def failure(self) -> BaseException | None:
        """Wait for its end; what failed, if anything did."""
        return self._started.exception() if self._started is not None else None
