"""One case on one rank: runs a program on both sides, operation by operation, and compares them after each."""

from __future__ import annotations

import copy
import pickle
import shutil
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh

from shardstep import checkpoint
from tests.accelerator import simulated
from tests.differential import leftovers
from tests.differential import programs as p
from tests.differential.configurations import SIXTEEN, Configuration, Fails, invalid
from tests.differential.eight_bits import EightBits
from tests.differential.monitors import Watched
from tests.differential.sides import Alone, Plain, Sharded, Side, raises_expected, ranks_of, share

LARGE = 2**22


class Mismatch(AssertionError):
    """The two sides differ."""


class Trial:
    """``run`` executes a program; ``counts`` says which operations really ran."""

    def __init__(self, config: Configuration, folder: Path) -> None:
        self.folder, self.counts = folder, Counter[str]()
        self.groups: list[Any] = []  # that this trial has made
        self.number = self.saves = 0  # of the next batch, of checkpoints
        self.frozen: set[str] = set()
        self.added = False
        self.done = 0  # operations
        self.unsynced = False  # gradients of a backward in no_sync, which nobody has reduced yet
        self.synced = 0  # reduced backwards since the gradients were cleared
        self.stepped = False
        self.refrozen = False  # since the last step
        self.saved: Any = None  # by Save
        self.exact, self.coarse = True, False  # bits; to the rounding of float32, not of float64
        self._begin(config)

    def _begin(self, config: Configuration) -> None:
        """The process group of this configuration, and both sides on its ranks. Collective over all processes."""
        self.config, world = config, dist.get_world_size()
        self.joined = False  # whether there was a Join context
        self.members = ranks_of(config.ranks, config.group, world)
        known = set(dist.distributed_c10d._world.pg_map)
        self.ranks: Any = dist.group.WORLD
        if config.ranks < world:
            self.ranks = dist.new_group(self.members)
        over = self.ranks
        if config.mesh is not None:
            over = DeviceMesh(config.device, torch.tensor(self.members).view(config.mesh))
        alone: Any = None
        if config.masters == "stochastic":  # the reference, see sides.Plain
            alone = [dist.new_group([rank]) for rank in range(world)][dist.get_rank()]
        self.groups += [group for group in dist.distributed_c10d._world.pg_map if group not in known]
        self.is_member = dist.get_rank() in self.members
        self.exact = self.exact and config.bit_equal()
        self.coarse = (
            self.coarse or torch.float32 in (config.dtype, config.reduce_dtype) or config.model == "two dtypes"
        )
        if not self.is_member:
            return
        self.rank = self.members.index(dist.get_rank())
        arguments = config, self.ranks, self.rank, self.frozen, self.added
        self.plain = Plain(*arguments, alone=alone)
        kind = Sharded if config.device == "cpu" else Watched
        self.ours = kind(*arguments, over if config.mesh or config.ranks < world else None)
        self.sides: tuple[Side, Side] = (self.plain, self.ours)
        if config.optimizer == "ScheduleFree":
            self.plain.optimizer.train()

    def run(self, program: p.Program) -> None:
        for position, op in enumerate(program):
            try:
                if self.is_member or isinstance(op, p.Resume):
                    self._do(op)
            except Exception as error:
                error.add_note(f"in operation {position}: {op!r}")
                raise
        try:
            if self.is_member:
                self._do(p.Look())
        except Exception as error:
            error.add_note("in the comparison at the end")
            raise

    def _do(self, op: p.Operation) -> None:
        op = self._applied(op)
        if op is None:
            return
        if self.config.pace == "uneven" and self.is_member and (self.number + self.rank + self.done) % 4 == 0:
            time.sleep(0.02)
        self.done += 1
        getattr(self, f"_{type(op).__name__.lower()}")(op)
        self.counts[type(op).__name__] += 1
        if self.is_member:
            self._compare_weights()
            if self.config.watch == "all":
                self._compare_groups()

    def _applied(self, op: p.Operation) -> p.Operation | None:
        """What an operation is in this configuration, which a Resume may have changed; None if it has none."""
        config = self.config
        if isinstance(op, p.Backward):
            skip, only = (op.skip, op.only) if config.may_skip else ((), None)
            sync, scaled = op.sync or not config.may_accumulate, op.scaled and config.may_scale
            # (torch's fused optimizers make state in a step that finds an inf, and ours does not.)
            bad = op.bad if scaled and config.optimizer != "fused" else None
            return p.Backward(skip, only, sync, scaled, bad, op.late)
        if isinstance(op, p.Uneven):
            clip = None if config.uses_ddp else op.clip
            op = replace(op, clip=clip, closure=op.closure and not config.steps_in_backward)
        if isinstance(op, p.Uneven) and self.refrozen:
            # Known, and wrong until issue 28: ranks compare what is frozen in the next backward, and a rank without
            # any input does not come. The others wait until the time-out.
            op = replace(op, batches=tuple(max(count, 1) for count in op.batches))
        if isinstance(op, p.RaiseInStep) and config.masters == "stochastic":
            op = p.RaiseInStep()  # (a step that failed has drawn no random numbers)
        if isinstance(op, p.Raise) and self.joined:
            # Known, and wrong until issue 28: after a Join context a batch that fails on one rank cannot be skipped.
            op = replace(op, rank=None)
        if isinstance(op, p.Loop):
            adds_up = config.may_accumulate and not (config.sixteen and config.reduces)
            adds_up = adds_up and config.optimizer != "ScheduleFree"  # (its steps use the memory of gradients)
            before = tuple(sync for sync in op.before if not (sync and config.steps_in_backward)) if adds_up else ()
            op = replace(op, clip=op.clip if config.may_clip else "", before=before)
        if isinstance(op, p.Save) and op.asynchronous and not config.may_save_beside:
            return p.Save()
        if isinstance(op, p.Resume) and op.how == "asynchronous" and not config.may_save_beside:
            return replace(op, how="checkpoint")
        needed = {
            p.Clip: config.may_clip,
            p.DropGradient: not config.steps_in_backward and not self.unsynced,
            p.Unscale: config.may_scale,
            p.ScalerStep: config.may_scale,
            p.Edit: config.may_edit,
            p.Swap: config.may_edit,
            p.LoadModel: config.may_edit,
            p.Rewrap: config.uses_ddp,
            p.Uneven: config.may_join and (self.stepped or config.built == "last"),
            p.Raise: not config.uses_ddp or op in (p.Raise(), p.Raise("forward")),
            # On a device gathers are enqueued. Through sockets the second such step of a program hangs until the
            # time-out where a rank owns nothing (known, and wrong until issue 28: see docs/log.md).
            p.RaiseInStep: not config.steps_in_backward
            and config.device == "cpu"
            and config.transport == "shared memory",
            # torch's Adagrad makes no state for a group that is added. What Peculiar's steps write into a group only
            # its owners have, and add_param_group compares it (known, and wrong: see docs/log.md).
            p.AddGroup: config.optimizer not in ("Adagrad", "Peculiar"),
        }
        return op if needed.get(type(op), True) else None

    # --- operations -----------------------------------------------------------------------------------------------

    def _backward(self, op: p.Backward) -> None:
        overwritten = self.config.optimizer == "ScheduleFree"  # its steps use the memory of gradients
        rounded = self.config.sixteen and self.config.reduces  # sums of 16 bits in another order are other numbers
        if self.synced and (overwritten or rounded):
            self._zerograd(p.ZeroGrad())
        losses = [side.backward(op, self.number) for side in self.sides]
        self.number += 1
        self._same("the loss", losses[1], losses[0])
        if op.sync:
            self.synced += 1
            self.exact = self.exact and not (self.synced > 1 and self.config.reduces)
        self.unsynced = not op.sync
        if op.sync and self.config.steps_in_backward:
            self.plain.step()
            self.stepped, self.refrozen = True, False
        if self.config.watch == "all" and not self.unsynced and op.bad is None:
            self._compare_gradients()

    def _clip(self, op: p.Clip) -> None:
        self.exact = self.exact and not self.config.reduces and op.how != "ours"  # (which adds up in another order)
        norms = [side.clip(op) for side in self.sides]
        if norms[0] is not None and norms[1] is not None:
            self._same("the norm", norms[1].to(norms[0].dtype), norms[0])
        if self.config.watch == "all":
            self._compare_gradients()

    def _dropgradient(self, op: p.DropGradient) -> None:
        for side in self.sides:
            named = side.params()
            named[op.index % len(named)][1].grad = None

    def _unscale(self, op: p.Unscale) -> None:
        for side in self.sides:
            side.scaler.unscale_(side.optimizer)

    def _scalerstep(self, op: p.ScalerStep) -> None:
        for side in self.sides:
            side.scaler.step(side.optimizer)
            side.scaler.update()
        self._same("the scale", self.ours.scaler.get_scale(), self.plain.scaler.get_scale())
        self.stepped, self.refrozen = True, False

    def _step(self, op: p.Step) -> None:
        arguments = {} if op.factor is None else {"factor": op.factor}
        versions = self._frozen_versions()
        if not op.closure:
            if not self.config.steps_in_backward:
                self.plain.step(**arguments)
            if op.late == self.rank:
                time.sleep(0.05)
            self.ours.step(**arguments)
            if op.late is not None and self.config.device == "cpu":  # (the device knows no order of host threads)
                self._read_in_threads()
        else:
            losses = [side.step(closure=self._closure(side), **arguments) for side in self.sides]
            self._same("the loss", losses[1], losses[0])
            self.number += 1
            self.synced, self.unsynced = 1, False
        self.stepped, self.refrozen = True, False
        if versions != self._frozen_versions():  # a graph from before the step may need them
            raise Mismatch("a step wrote to a frozen parameter")
        self.ours.optimizer.check_replicas()
        if self.config.watch == "all":
            self._compare_state(self.number % len(self.ours.params()))

    def _read_in_threads(self) -> None:
        """At the same time, in the same order: whoever comes first must not make the others take what was before."""
        with ThreadPoolExecutor(3) as threads:
            found = list(threads.map(lambda _: [param * 1 for _, param in self.ours.params()], range(3)))
        for params in found:
            self._same("what a thread reads", params, [param * 1 for _, param in self.plain.params()])

    def _loop(self, op: p.Loop) -> None:
        if op.clip or True in op.before:
            self.exact = self.exact and not self.config.reduces and op.clip != "ours"
        for side in self.sides:
            side.loop(op, self.number)
        self.number += op.count
        self.synced, self.unsynced, self.stepped, self.refrozen = 1, False, True, False

    def _frozen_versions(self) -> list[int]:
        return [param._version for _, param in self.ours.params() if not param.requires_grad]

    def _closure(self, side: Side) -> Callable[[], Tensor]:
        def closure() -> Tensor:
            side.zero_grad()
            return side.backward(p.Backward(), self.number)

        return closure

    def _zerograd(self, op: p.ZeroGrad) -> None:
        for side in self.sides:
            side.zero_grad(op.set_to_none, op.by)
        self.synced, self.unsynced = 0, False

    def _schedule(self, op: p.Schedule) -> None:
        for side in self.sides:
            side.schedule()

    def _setlr(self, op: p.SetLr) -> None:
        for side in self.sides:
            groups = side.optimizer.param_groups
            group = groups[op.group % len(groups)]
            group["lr"] = group["lr"] * op.factor

    def _freeze(self, op: p.Freeze) -> None:
        named = self.ours.params()
        self.frozen = self.frozen | {named[op.index % len(named)][0]}
        if len(self.frozen) == len(named):
            self.frozen = set()  # DDP wants something to do
        self._freeze_sides()

    def _unfreeze(self, op: p.Unfreeze) -> None:
        self.frozen = set()
        self._freeze_sides()

    def _freeze_sides(self) -> None:
        self.refrozen = True
        for side in self.sides:
            side.zero_grad()
            side.freeze(self.frozen)
        self.synced, self.unsynced = 0, False

    def _rewrap(self, op: p.Rewrap) -> None:
        for side in self.sides:
            side.zero_grad()
            side.ddp_cap = op.ddp_cap
            side.rewrap()
        self.synced, self.unsynced = 0, False

    def _rebuild(self, op: p.Rebuild) -> None:
        for side in self.sides:
            side.zero_grad()
        self.plain.scheduler = None
        self.plain.rewrap()
        self.ours.rebuild(self.number)
        self.synced, self.unsynced = 0, False

    def _move(self, op: p.Move) -> None:
        cleared = op.cleared and self.config.device != "cpu"
        for side in self.sides[: 1 if cleared else 2]:
            side.zero_grad()
        self.plain.rewrap()
        self.ours.relocate(cleared)
        self.synced, self.unsynced = 0, False

    def _addgroup(self, op: p.AddGroup) -> None:
        if not self.added:
            for side in self.sides:
                side.zero_grad()
                side.add_group()
        self.added = True
        self.synced, self.unsynced = 0, False

    @torch.no_grad()
    def _edit(self, op: p.Edit) -> None:
        for side in self.sides:
            named = side.params()
            named[op.index % len(named)][1].mul_(op.factor)

    @torch.no_grad()
    def _swap(self, op: p.Swap) -> None:
        kept = [(param, param.clone()) for _, param in self.ours.params()]
        for param, _ in kept:
            param.mul_(op.factor)
        for param, _ in kept:
            self.ours.optimizer.full_state(param)
        self.ours.optimizer.consolidate_state_dict()
        for param, before in kept:
            param.copy_(before)

    def _loadmodel(self, op: p.LoadModel) -> None:
        for side in self.sides:
            side.model.load_state_dict({name: value * 0.5 for name, value in side.model.state_dict().items()})

    def _raise(self, op: p.Raise) -> None:
        here = op.rank is None or op.rank == self.rank
        if here:
            raises_expected(lambda: self.ours.backward(p.Backward(), self.number, op.place))
        else:
            self.ours.backward(p.Backward(), self.number)
        self.number += 1
        for side in self.sides:
            side.zero_grad()
        self.synced, self.unsynced = 0, False

    def _raiseinstep(self, op: p.RaiseInStep) -> None:
        Fails.told = op.when
        try:  # with a closure all buckets are stepped at once, so that it fails at the same place on every rank
            self.ours.optimizer.step(closure=lambda: None)
        except RuntimeError as error:
            if "own step failed" not in str(error):
                raise
        else:
            raise Mismatch("a step that fails raised nothing")
        finally:
            Fails.told = ""
        if op.when == "after":
            self.plain.step()
        for side in self.sides:
            side.step()

    def _uneven(self, op: p.Uneven) -> None:
        counts = [op.batches[rank % len(op.batches)] for rank in range(self.config.ranks)]
        self.joined, contexts = True, [side.join() for side in self.sides]
        for _ in range(op.epochs):
            for side, context in zip(self.sides, contexts, strict=True):
                side.uneven(counts[self.rank], self.number, op, context)
            self.number += max(counts)
            self._spread_plain(counts.index(max(counts)))
        self.synced, self.unsynced, self.stepped = 0, False, True
        self.exact = self.exact and not self.config.reduces
        self.ours.optimizer.check_replicas()

    def _spread_plain(self, source: int) -> None:
        """The plain optimizer of a rank that ran out of inputs was not stepped: it takes over another one's."""
        box = [(self.plain.model.state_dict(), self.plain.state_dict(), list(self.plain.masters.values()))]
        dist.broadcast_object_list(box, self.members[source], group=self.ranks)
        weights, state, masters = box[0]
        self._set_plain(weights, state, masters)

    def _set_plain(self, weights: dict[str, Any], state: dict[str, Any], masters: list[Tensor]) -> None:
        self.plain.model.load_state_dict(weights)
        self.plain.optimizer.load_state_dict(state)
        with torch.no_grad():
            for own, given in zip(self.plain.masters.values(), masters, strict=True):
                own.copy_(given)

    def _switch(self, op: p.Switch) -> None:
        for side in self.sides:
            side.optimizer.eval()
        self._compare_weights()
        for side in self.sides:
            side.optimizer.train()

    # --- state ----------------------------------------------------------------------------------------------------

    def _consolidate(self, op: p.Consolidate) -> None:
        optimizer = self.ours.optimizer
        to = op.to % optimizer.world_size
        optimizer.consolidate_state_dict(to=to)
        if optimizer.rank == to:
            self._same("state_dict()", _without_masters(optimizer.state_dict()), self._plain_state_dict())

    def _plain_state_dict(self) -> dict[str, Any]:
        return _without_empty(self.plain.state_dict())

    def _exchange(self, op: p.Exchange) -> None:
        optimizer = self.ours.optimizer
        to = op.to % optimizer.world_size
        optimizer.consolidate_state_dict(to=to)
        box = [optimizer.state_dict() if optimizer.rank == to else None]
        dist.broadcast_object_list(box, self.members[to], group=self.ranks)
        theirs = copy.deepcopy(self._plain_state_dict())
        for position, (_, param) in enumerate(self.plain.params()):
            if "master_weight" in (found := self.plain.state_of(param)):
                theirs["state"][position]["master_weight"] = found["master_weight"].detach().clone()
        for group, saved in zip(theirs["param_groups"], box[0]["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key not in group})
        self.plain.optimizer.load_state_dict(_without_masters(box[0]))
        optimizer.load_state_dict(theirs)

    def _resume(self, op: p.Resume) -> None:
        if self.is_member:
            self.plain.adopt()
            if op.how in ("sharded", "get_state_dict") and (self.frozen or self.config.optimizer == "Peculiar"):
                # DCP has no place for the state of what is frozen, and no key for an option that a step adds.
                op = replace(op, how="checkpoint")
        first = self.members[0]
        op = share(op, first)
        self.saves = share(self.saves, first) + 1  # (whoever did not take part has not counted)
        path, saved = self.folder / str(self.saves), None
        if self.is_member:
            saved = self._write(op.how, path)
            masters = list(self.plain.masters.values())
            saved = (saved, self.plain.model.state_dict(), self.plain.state_dict(), masters, self.stepped)
        saved, weights, state, masters, self.stepped = share(saved if self.is_member else (None,) * 5, first)
        self.number, self.frozen, self.added = share((self.number, self.frozen, self.added), first)
        self.synced, self.unsynced, self.exact, self.coarse = share((0, False, self.exact, self.coarse), first)
        if self.saved is not None:
            self.saved[0].wait()
        self.plain = self.ours = self.sides = self.saved = None  # type: ignore[assignment]
        self._begin(self._configured(op))
        if self.is_member:
            self._set_plain(weights, state, masters)
            self._read(op.how, path, saved)
            if op.how in ("sharded", "get_state_dict"):  # DCP loads the options that a new optimizer has, no others
                for group in self.plain.optimizer.param_groups:
                    group.pop("initial_lr", None)
            self._consolidate(p.Consolidate())

    def _configured(self, op: p.Resume) -> Configuration:
        """Another configuration, as near to what is asked for as it can be."""
        wanted = self.config
        precision = None
        if op.masters is not None and wanted.masters in (torch.float32, "remainder") and "bfloat16" in wanted.precision:
            precision = f"{wanted.precision.split()[0]} {op.masters}"
        changed = {"mode": op.mode}, {"ranks": op.ranks}, {"cap": op.cap}, {"shard": op.shard}, {"precision": precision}
        for changes in changed:
            given = {key: value for key, value in changes.items() if value is not None}
            if given.get("mode") in ("sharded", "sharded lazy"):
                given |= {"static_graph": False, "gradient_views": False, "ddp_cap": None, "find_unused": False}
            else:
                given |= {"reducing": "as it is"} if "mode" in given else {}
            changed = replace(wanted, **given)
            wanted = wanted if invalid(changed) else changed
        return wanted

    def _write(self, how: str, path: Path) -> Any:
        optimizer, model = self.ours.optimizer, self.ours.model
        if how in ("checkpoint", "resume"):
            checkpoint.save(path, optimizer, self.ours.wrapped, extra={"number": self.number})
        elif how == "asynchronous":
            checkpoint.save(path, optimizer, model, extra={"number": self.number}, asynchronous=True).wait()
        elif how == "sharded":
            form = {"model": model.state_dict(), "optim": optimizer.sharded_state_dict(model)}
            dcp.save(form, checkpoint_id=path, process_group=self.ranks)
        elif how == "get_state_dict":
            weights, state = get_state_dict(self.ours.wrapped, optimizer)
            dcp.save({"model": weights, "optim": state}, checkpoint_id=path, process_group=self.ranks)
        else:
            optimizer.consolidate_state_dict(to=0)
            return (model.state_dict(), optimizer.state_dict()) if optimizer.rank == 0 else None
        return None

    def _read(self, how: str, path: Path, saved: Any) -> None:
        optimizer, model = self.ours.optimizer, self.ours.model
        if how in ("checkpoint", "asynchronous"):
            extra = checkpoint.load(path, optimizer, self.ours.wrapped)
            self._same("extra", extra, {"number": self.number})
        elif how == "resume":
            found = checkpoint.resume(path.parent, optimizer, model)
            self._same("the directory", found and found[0].name, path.name)
        elif how == "sharded":
            form = {"model": model.state_dict(), "optim": optimizer.sharded_state_dict(model)}
            dcp.load(form, checkpoint_id=path, process_group=self.ranks)
            model.load_state_dict(form["model"])
            optimizer.load_sharded_state_dict(form["optim"], model)
        elif how == "get_state_dict":
            weights, state = get_state_dict(self.ours.wrapped, optimizer)
            dcp.load({"model": weights, "optim": state}, checkpoint_id=path, process_group=self.ranks)
            set_state_dict(self.ours.wrapped, optimizer, model_state_dict=weights, optim_state_dict=state)
        else:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])

    def _plain(self, op: p.Plain) -> None:
        path = self.folder / f"plain {self.saves}"
        self.saves += 1
        checkpoint.save(path, self.ours.optimizer, self.ours.model)
        if self.rank == 0:
            fresh = Alone(self.config, self.frozen, self.added)
            checkpoint.load(path, fresh.optimizer, fresh.model)
            self._same("a plain model", fresh.model.state_dict(), self.plain.model.state_dict())
            expected = Alone(self.config, self.frozen, self.added)  # (torch's own loading casts some numbers)
            expected.optimizer.load_state_dict(self.plain.state_dict())
            ours, theirs = fresh.optimizer.state_dict(), expected.optimizer.state_dict()
            self._same("a plain optimizer", _without_empty(ours), _without_empty(theirs))
        if op.back:
            self._load_plain(path.with_name(f"theirs {self.saves}"))

    def _load_plain(self, path: Path) -> None:
        """Ours loads what a plain optimizer has saved."""
        for side in self.sides:
            side.zero_grad()
        self.synced, self.unsynced = 0, False
        if self.rank == 0:
            checkpoint.save(path, self.plain.optimizer, self.plain.model)
        dist.barrier(self.ranks)
        checkpoint.load(path, self.ours.optimizer, self.ours.model)

    def _save(self, op: p.Save) -> None:
        path = self.folder / f"saved {self.saves}"
        self.saves += 1
        extra = {"large": torch.zeros(LARGE)} if op.beside else {}  # so that it takes a while
        options = {"extra": extra, "keep": 2, "asynchronous": op.asynchronous}
        handle = checkpoint.save(path, self.ours.optimizer, self.ours.model, **options)
        if op.beside and self.rank == 0:
            checkpoint.save(self.folder / f"beside {self.saves}", torch.optim.SGD([torch.ones(3)], lr=0.1), keep=2)
        self.plain.adopt()
        masters = list(self.plain.masters.values())
        saved = copy.deepcopy((self.plain.model.state_dict(), self.plain.state_dict(), masters))
        self.saved = handle, path, saved, op.beside, self.added

    def _restore(self, op: p.Restore) -> None:
        if self.saved is None or self.saved[-1] != self.added or self.config.optimizer == "Peculiar":
            return  # (a rank that has no piece of a group lacks the option that steps write, and refuses the saved one)
        handle, path, saved, beside, _ = self.saved
        handle.wait()
        self._check_saved(path, saved[0], beside)
        for side in self.sides:
            side.zero_grad()
        self.synced, self.unsynced = 0, False
        self._set_plain(*saved)
        checkpoint.load(path, self.ours.optimizer, self.ours.model)

    def _check_saved(self, path: Path, weights: dict[str, Any], beside: bool) -> None:
        """What one can ask about a checkpoint without an optimizer, on one rank as well."""
        if self.rank == self.saves % self.config.ranks:
            checkpoint.verify(path)
            if not beside:
                self._same("the newest", checkpoint.latest(path.parent), path)
                self._same("extra", checkpoint.load_extra(path), {})
            fresh = Alone(self.config, self.frozen, self.added)
            checkpoint.load_model(path, fresh.model)
            self._same("the model alone", fresh.model.state_dict(), weights)

    def _copymodel(self, op: p.CopyModel) -> None:
        for side in self.sides:
            side.zero_grad()
        self.synced, self.unsynced = 0, False
        for copied in (copy.deepcopy(self.ours.model), pickle.loads(pickle.dumps(self.ours.model))):
            self._same("a copy of the model", copied.state_dict(), self.plain.model.state_dict())

    # --- comparisons ----------------------------------------------------------------------------------------------

    def _look(self, op: p.Look) -> None:
        self._compare_groups()
        if not self.unsynced and self.config.optimizer != "ScheduleFree":  # (which overwrites gradients)
            self._compare_gradients()
        for position in range(len(self.ours.params())):
            self._compare_state(position)
        self.ours.optimizer.check_replicas()
        self._consolidate(p.Consolidate())
        if self.stepped:
            self._compare_memory()
        for bucket in self.ours.optimizer.layout.buckets:  # so that ranks own parameters in their own order
            if bucket.cuts is not None and list(bucket.params) != sorted(bucket.params):
                raise Mismatch(f"a bucket that is cut has the parameters {bucket.params}")
        if self.config.mode == "views":  # as torch allocates: other kernels would have other bits
            for name, param in self.ours.params():
                if param.numel() and param.data_ptr() % 64:
                    raise Mismatch(f"{name} begins at {param.data_ptr() % 64} bytes past a multiple of 64")

    def _compare_weights(self) -> None:
        theirs = dict(self.plain.model.named_parameters())
        for name, param in self.ours.params():
            self._same(name, param.detach(), theirs[name].detach())

    def _compare_gradients(self) -> None:
        if self.config.steps_in_backward:
            return
        theirs = dict(self.plain.params())
        for name, param in self.ours.params():
            ours, expected = self.ours.gradient(param), theirs[name].grad
            if not param.requires_grad:
                continue
            if ours is None and expected is not None and not expected.any():
                continue  # (DDP may leave zeros where nobody has used a parameter)
            if ours is not None and self.config.reducing == "float32":
                ours = ours.to(param.dtype)
            self._same(f"the gradient of {name}", ours, expected)

    def _compare_state(self, position: int) -> None:
        name, param = self.ours.params()[position]
        ours = self.ours.optimizer.full_state(param)
        theirs = self.plain.state_of(dict(self.plain.params())[name])
        self._same(f"the state of {name}", ours, theirs)

    def _compare_groups(self) -> None:
        for ours, theirs in zip(self.ours.optimizer.param_groups, self.plain.optimizer.param_groups, strict=True):
            others = {"params", "steps", "differentiable", "initial_lr"}  # what steps write, only owners have
            for key in theirs.keys() - others:
                self._same(f"the option {key}", ours.get(key), theirs[key])

    def _compare_memory(self) -> None:
        """The state of a rank: 1/N of the plain one's, to the alignment; whole tensors are only as even as they are."""
        report, ranks = self.ours.optimizer.memory(), self.ours.optimizer.world_size
        if self.config.masters == "stochastic":
            return
        plain = sum(
            part.nbytes for state in self.plain.optimizer.state.values() for value in state.values()
            if isinstance(value, Tensor) and value.dim() for part in _parts(value)
        )  # fmt: skip
        held = torch.tensor([float(report.state)])
        dist.all_reduce(held, group=self.ranks)
        replicas = 1 if self.config.mesh is None or len(self.config.mesh) == 1 else self.config.mesh[0]
        if held.item() < plain * replicas:
            raise Mismatch(f"all ranks hold {held.item()} bytes of state, the plain optimizer {plain}")
        slack = 400 * len(self.ours.params())
        if self.config.shard == "element" and report.state > plain / ranks + slack:
            raise Mismatch(f"a rank holds {report.state} bytes of state, the plain optimizer {plain}, {ranks} ranks")

    def _same(self, what: str, ours: Any, theirs: Any) -> None:
        found = difference(ours, theirs, None if self.exact else self._close(theirs))
        if found:
            raise Mismatch(f"{what}{found} (rank {self.rank}, {'bits' if self.exact else 'rounding'})")

    def _close(self, value: Any) -> tuple[float, float]:
        """rtol and atol where gradients are summed in another order.

        Optimizers divide by the size of a gradient, so the rounding of one near zero becomes a larger one of its
        weight: far above the last bit, and far below what a wrong gradient does (1e-3 and more).
        """
        if self.config.dtype in SIXTEEN.values():
            return 2e-2, 1e-2
        return (1e-3, 1e-5) if self.coarse else (1e-7, 1e-8)


def difference(ours: Any, theirs: Any, close: tuple[float, float] | None, where: str = "") -> str:
    """The first place at which two nested values differ; empty if they do not."""
    if isinstance(theirs, EightBits) and isinstance(ours, EightBits):
        ours, theirs = ours.unpacked(), theirs.unpacked()
    if isinstance(theirs, Tensor) and isinstance(ours, Tensor):
        ours, theirs = ours.detach().cpu(), theirs.detach().cpu()
        if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
            return f"{where} is {ours.dtype} {tuple(ours.shape)} but {theirs.dtype} {tuple(theirs.shape)} is expected"
        rtol, atol = close or (0.0, 0.0)
        if torch.allclose(ours, theirs, rtol, atol, equal_nan=True):
            return ""
        return (
            f"{where} differs by {(ours.double() - theirs.double()).abs().max().item():.3g} of {theirs.abs().max():.3g}"
        )
    if isinstance(theirs, dict) and isinstance(ours, dict):
        if (ours.keys() ^ theirs.keys()) - {"differentiable", "initial_lr"}:  # (of torch's loading, of schedulers)
            return f"{where} has the keys {list(ours)} but {list(theirs)} are expected"
        both = [key for key in theirs if key in ours]
        found = (difference(ours[key], theirs[key], close, f"{where}[{key!r}]") for key in both)
        return next(filter(None, found), "")
    if isinstance(theirs, (list, tuple)) and type(ours) is type(theirs) and len(ours) == len(theirs):
        pairs = enumerate(zip(ours, theirs, strict=True))
        return next(filter(None, (difference(a, b, close, f"{where}[{at}]") for at, (a, b) in pairs)), "")
    if close and isinstance(theirs, float) and isinstance(ours, float):
        return "" if abs(ours - theirs) <= close[1] + close[0] * abs(theirs) else f"{where} is {ours!r} but {theirs!r}"
    return "" if type(ours) is type(theirs) and ours == theirs else f"{where} is {ours!r} but {theirs!r} is expected"


def _parts(value: Tensor) -> list[Tensor]:
    """The memory of a tensor, or of what a tensor subclass consists of."""
    return [value.codes, value.scale] if isinstance(value, EightBits) else [value]


def _without_masters(state_dict: dict[str, Any]) -> dict[str, Any]:
    """As the plain optimizer has it."""
    entries = {key: {name: value for name, value in entry.items() if name != "master_weight"}
               for key, entry in state_dict["state"].items()}  # fmt: skip
    return {**state_dict, "state": entries}


def _without_empty(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Without entries that somebody made by looking for one."""
    return {**state_dict, "state": {key: entry for key, entry in state_dict["state"].items() if entry}}


def run(config: Configuration, program: p.Program, folder: Path) -> dict[str, int]:
    """Run one case. Collective over all processes. Returns how often each operation ran."""
    before = leftovers.Before()
    trial = Trial(config, folder)
    trial.run(program)
    if config.device != "cpu":
        simulated.check()
    counts, member = dict(trial.counts), trial.is_member
    # torch's get_state_dict keeps the slots of a sharded optimizer mapped (seen; issue 24 takes our part of it out).
    slots = not any(isinstance(op, p.Resume) and op.how == "get_state_dict" for op in program)
    dist.barrier()
    groups = trial.groups
    del trial
    if member:
        before.check(slots)
    for group in groups:  # their threads wake up a hundred times a second
        dist.destroy_process_group(group)
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    return counts
