"""Which calls of ``zero_grad`` throw away what other ranks may have sent: a rule that all ranks follow alike.

Where nothing is reported with a bucket, the ranks have to compare how many each has sent once an iteration was aborted,
and that makes the host wait. A rank whose forward failed has sent nothing and others have, so nobody can tell from what
happened here. But every rank calls ``zero_grad`` equally often, and loops repeat themselves:

- An interval is what lies between two steps. A call of ``zero_grad`` in it has a position, and throws away whatever was
  reduced since the call, or the step, before it.
- A call at a position where usually nothing is thrown away is no abort. Any other is: the ranks compare before the next
  round. ``zero_grad`` in a loop, once or twice, is of the first kind from the third iteration on. When an iteration
  fails there is no step, so the next calls have positions that no usual interval has.
- What is usual is what the last two intervals have in common (the first one counts alone). An interval with an abort is
  learned only if the ranks, when they compared, have found themselves alike.
"""

from __future__ import annotations

Pattern = tuple[bool, ...]  # by call of zero_grad in an interval: whether it threw something away


class ZeroGradRule:
    """Counts the calls of one optimizer. Its answers depend on nothing but what all ranks do alike."""

    def __init__(self) -> None:
        self.usual: Pattern = ()
        self._last: Pattern | None = None  # of the last interval that was learned
        self._calls: list[bool] = []  # of this interval
        self._has_round = False  # since the last call, or step
        self._is_doubtful = False  # whether the ranks may have done different things in this interval
        self._is_first = True  # before the first step: no interval between two

    def round_begins(self) -> None:
        """Gradients are about to be reduced."""
        self._has_round = True

    def is_abort(self) -> bool:
        """``zero_grad`` is called: whether other ranks may have sent what this one has not, or the other way round."""
        position = len(self._calls)
        usually_nothing = position < len(self.usual) and not self.usual[position]
        self._calls.append(self._has_round)
        self._has_round = False
        self._is_doubtful |= not usually_nothing
        return not usually_nothing

    @property
    def pattern(self) -> int:
        """What this rank has done in this interval, as one number, for the ranks to compare."""
        return int("1" + "".join(str(int(one)) for one in self._calls[-60:]), 2)

    def ranks_are_alike(self) -> None:
        """They have compared, and all have sent the same in the same pattern."""
        self._is_doubtful = False

    def stepped(self) -> None:
        """A step was made: the interval ends."""
        pattern = tuple(self._calls)
        if not self._is_doubtful and not self._is_first:
            self.usual = pattern if self._last is None else _in_common(self._last, pattern)
            self._last = pattern
        self._calls, self._has_round, self._is_doubtful, self._is_first = [], False, False, False


def _in_common(one: Pattern, other: Pattern) -> Pattern:
    """The positions up to the first one at which two intervals differ."""
    common: list[bool] = []
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            break
        common.append(mine)
    return tuple(common)
