"""Which parameters have a gradient on any rank: reported with a bucket, told at the end of a round, or presumed.

==========================  ============================================================================
CPU, gloo                   every rank reports with a bucket what it has used of it
elsewhere, if asked for     told once per round (``usage_exchange.py``) and read when gradients are asked for. Until
                            then what was not used here is uncertain: its shard holds zeros, or what others have
elsewhere                   a parameter that is trained and was not used is an error
==========================  ============================================================================
"""

from __future__ import annotations

from collections.abc import Sequence

from shardstep.comm.process_group import Group
from shardstep.grads import reports
from shardstep.grads.bucket_part import BucketPart
from shardstep.grads.iteration import InFlight, Leaving
from shardstep.grads.native import Native
from shardstep.grads.shards import GradientShards
from shardstep.grads.transports import ReduceTransports
from shardstep.grads.usage_exchange import UsageExchange
from shardstep.params.sharded_parameters import ShardedParameters


class UsedParameters:
    """Of one optimizer."""

    def __init__(
        self,
        sharded: ShardedParameters,
        shards: GradientShards,
        transports: ReduceTransports,
        group: Group,
        find_unused: bool,
    ) -> None:
        """``group``: the ranks that tell each other. ``find_unused``: whether the user has asked for it."""
        self._sharded, self._shards, self._transports = sharded, shards, transports
        self._find_unused = find_unused
        self._exchange = UsageExchange(group)

    @property
    def is_told_late(self) -> bool:
        """Whether it is not known before the end of a round which parameters have a gradient."""
        return self._find_unused and not self._transports.reports

    def _is_told(self, part: BucketPart) -> bool:
        return self._find_unused and not self._transports.of(part).reports

    # --- a round --------------------------------------------------------------------------------------------------

    def begin_round(self) -> None:
        self._exchange.begin_round()

    def here(self, part: BucketPart, leaving: Leaving) -> list[bool] | None:
        """For which parameters of a bucket that is sent this rank has a gradient; None: for all."""
        here = [gradient is not None for gradient in leaving.gradients]
        if self._is_told(part):
            self._exchange.add(part.bucket.params, here)
        elif not leaving.has_inputs and not self._transports.of(part).reports:  # the other ranks have them, or an error
            return [self._sharded.params[index].requires_grad for index in part.bucket.params]
        return None if all(here) else here

    def end_round(self, last: BucketPart) -> None:
        """Collective. All buckets of a round were sent, ``last`` as the last one."""
        transport = self._transports.of(last)
        if isinstance(transport, Native):
            self._exchange.end_round(transport, self._shards.buckets[last.bucket.position].device)

    def anywhere(self, sent: InFlight) -> set[int]:
        """The parameters of a bucket that was brought in for which any rank had a gradient, or may have had one."""
        indices = sent.part.bucket.params
        if self._is_told(sent.part):
            shard, used = self._shards.buckets[sent.part.bucket.position], _used(indices, sent.here)
            shard.uncertain = (shard.uncertain | (set(indices) - sent.kept)) - used
            return used | shard.uncertain
        if not self._transports.of(sent.part).reports:
            self._check_used(indices, sent)
            return _used(indices, sent.here)
        heard = sent.scatter.reports
        if sent.here is None or heard is None:
            return set(indices)
        anywhere = reports.present_anywhere(heard.messages, len(indices))
        return {index for index, there in zip(indices, anywhere, strict=True) if there}

    def _check_used(self, indices: Sequence[int], sent: InFlight) -> None:
        """RuntimeError if a parameter got no gradient in this backward, as far as it has come."""
        if sent.excused is None or sent.here is None:
            return
        for index, one in zip(indices, sent.here, strict=True):
            if not one and index not in sent.excused and self._sharded.params[index].requires_grad:
                raise RuntimeError(
                    "shard_gradients expects a gradient for every parameter that requires one, but "
                    f"{self._sharded.layout.spec_of[index].label} got none in this backward. Pass "
                    "find_unused_parameters=True if parameters may be unused."
                )

    # --- after it -------------------------------------------------------------------------------------------------

    def settle(self) -> list[int]:
        """Gradients are asked for. The parameters of which only now is known that another rank has used them."""
        if not any(shard.uncertain for shard in self._shards.buckets):
            self.forget()
            return []
        return self._shards.make_certain(self._exchange.read())

    def forget(self) -> None:
        """What was told is of no use any more."""
        self._exchange.forget()


def _used(indices: Sequence[int], here: list[bool] | None) -> set[int]:
    return set(indices) if here is None else {index for index, one in zip(indices, here, strict=True) if one}
