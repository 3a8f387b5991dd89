"""When ``zero_grad`` makes the ranks compare: never in a loop that goes well, always after an iteration that failed."""

from __future__ import annotations

import pytest

from shardstep.grads.zero_grads import ZeroGradRule

# One iteration of a loop: z is zero_grad, b a backward (a round), s a step.
LOOPS = {
    "before backward": "zbs",
    "after the step": "bsz",
    "twice": "zbsz",
    "three times": "zzbsz",
    "accumulation": "zbbs",
    "without": "bs",
}
# The discriminator of a GAN: the generator's backward reaches it, too, and its gradients are thrown away.
GAN = "zbsb"


class Ranks:
    """Two ranks that do what a loop says; they compare before a round after an abort, as the scheduler has them do."""

    def __init__(self) -> None:
        self.rules = [ZeroGradRule(), ZeroGradRule()]
        self.sent = [0, 0]
        self.after_abort = False
        self.compared = 0

    def run(self, iteration: str, failing_at: int | None = None) -> None:
        """One iteration; from ``failing_at`` on rank 1 does not reduce, and nobody steps until the next zero_grad."""
        failed = False
        for place, what in enumerate(iteration):
            failed |= place == failing_at
            if what == "z":
                answers = {rule.is_abort() for rule in self.rules}
                assert len(answers) == 1, "the ranks decide alike"
                self.after_abort |= answers.pop()
            elif what == "b":
                self._round(ranks=[0] if failed else [0, 1])
            elif not failed:
                assert self.sent[0] == self.sent[1]
                for rule in self.rules:
                    rule.stepped()

    def _round(self, ranks: list[int]) -> None:
        """A rank that is there for it compares first; the other one, which failed, would at its next round."""
        if self.after_abort and ranks == [0, 1]:
            self.compared += 1
            if len({(*pair,) for pair in zip(self.sent, (rule.pattern for rule in self.rules), strict=True)}) == 1:
                for rule in self.rules:
                    rule.ranks_are_alike()
            self.sent, self.after_abort = [max(self.sent)] * 2, False
        for rank in ranks:
            self.rules[rank].round_begins()
            self.sent[rank] += 1


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_that_goes_well_does_not_compare_after_the_second_iteration(loop: str) -> None:
    ranks = Ranks()
    for number in range(12):
        before = ranks.compared
        ranks.run(LOOPS[loop])
        assert ranks.compared == before or number < 2


@pytest.mark.parametrize("when", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("loop", [*(name for name in LOOPS if name != "without"), "gan"])
def test_after_an_iteration_that_failed_on_one_rank_all_compare_before_the_next_round(loop: str, when: int) -> None:
    iteration = LOOPS.get(loop, GAN)
    for place in [place for place, what in enumerate(iteration) if what == "b"]:
        ranks = Ranks()
        for _ in range(when):
            ranks.run(iteration)
        ranks.run(iteration, failing_at=place)
        assert ranks.sent[0] > ranks.sent[1], "the case that this is about"
        if "z" not in iteration[place:] and iteration[0] != "z":
            ranks.run("z")  # what such a program does about it
        before = ranks.compared
        for _ in range(4):
            ranks.run(iteration)  # (asserts that the ranks are even again)
        assert ranks.compared > before


def test_gradients_that_are_always_thrown_away_are_compared_each_time() -> None:
    """Nobody can know whether another rank has reduced them."""
    ranks = Ranks()
    for number in range(6):
        before = ranks.compared
        ranks.run(GAN)
        assert ranks.compared == before + 1 or number == 0


def test_a_call_too_many_now_and_then_hides_no_failure_after_it() -> None:
    """At the end of an epoch, say: what is usual is what two intervals have in common."""
    ranks = Ranks()
    for _ in range(4):
        ranks.run("zbs")
    ranks.run("z")
    ranks.run("zbs")  # the interval with a call too many
    ranks.run("zbs", failing_at=1)
    before = ranks.compared
    ranks.run("zbs")
    assert ranks.compared == before + 1


def test_an_interval_in_which_the_ranks_differed_is_not_learned() -> None:
    ranks = Ranks()
    for _ in range(4):
        ranks.run("zbs")
    usual = ranks.rules[0].usual
    ranks.run("zbs", failing_at=1)
    ranks.run("zbs")
    assert [rule.usual for rule in ranks.rules] == [usual, usual] == [(False,), (False,)]
