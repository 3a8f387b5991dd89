"""Programs for a configuration, drawn by hypothesis: iterations as people write them, and what happens in between."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tests.differential import programs as p
from tests.differential.configurations import FAILING, MODES, Configuration
from tests.differential.models import BRANCHES

Phrase = tuple[p.Operation, ...]


@st.composite
def programs(draw: Any, config: Configuration, turn: int = 0) -> p.Program:
    """An iteration and a change in turns. The first and the last are iterations: there is state, and it is used.

    ``turn`` chooses the first two changes, so that over many configurations every kind has its turn: hypothesis alone
    draws some of them hardly ever.
    """
    kinds = changes(config)
    own = ("RaiseInStep", "Switch", "Swap") if config.sixteen else ("RaiseInStep", "Switch")  # of few configurations
    few = [kind for name, kind in kinds.items() if name in own]
    rare = [kind for name, kind in kinds.items() if name.startswith("Raise ")]  # also of few, and it needs several
    others = list(kinds.values())
    chosen = [others[turn % len(others)], others[(turn // 2 + 5) % len(others)], kinds["Loop"], *few]
    waits = config.device == "cpu"  # five seconds for each batch that one rank skips
    chosen += [rare[turn % len(rare)]] if rare and not (waits and turn % 3) else []
    if config.device != "cpu":  # where each configuration has one program
        chosen += [kinds["Uneven"] if "Uneven" in kinds and turn % 2 else others[(7 * turn + 3) % len(others)]]
    free = draw(st.lists(st.one_of(*others), max_size=2))
    found = [(draw(iterations(config)), draw(kind)) for kind in chosen]
    found += [(draw(iterations(config)), phrase) for phrase in free]
    last = draw(iterations(config))
    return tuple(op for phrases in (*found, (last,)) for phrase in phrases for op in phrase)


@st.composite
def iterations(draw: Any, config: Configuration) -> Phrase:
    """Clear, backward (several times if gradients are accumulated), clip or unscale, step, schedule."""
    ops: list[p.Operation] = list(draw(_clearing(config)))
    if draw(st.integers(0, 5)) == 5:
        return (*ops, p.Step(closure=True), *draw(_scheduling()))
    scaled = config.may_scale and draw(st.integers(0, 3)) == 3
    bad = draw(st.sampled_from((None, None, 0, config.ranks - 1))) if scaled else None
    accumulated = ((), (), (), (False,), (False, False), (True,), (True, False)) if config.may_accumulate else ((),)
    if config.may_accumulate and config.reduces:
        accumulated += ((True, False), (True, False))  # what was reduced, and what was not yet, come together
    for sync in (*draw(st.sampled_from(accumulated)), True):
        ops.append(draw(_backward(config, sync, scaled, bad if sync else None)))
    if scaled:
        clips = draw(st.sampled_from(((), (p.Unscale(),), (p.Unscale(), draw(_clipping(config))))))
        ops += [*clips, p.ScalerStep()]
    else:
        if config.may_clip and draw(st.integers(0, 2)) == 2:
            ops.append(draw(_clipping(config)))
        if not config.steps_in_backward and draw(st.integers(0, 7)) == 7:
            ops.append(p.DropGradient(draw(st.integers(0, 11))))
        if draw(st.integers(0, 7)) < 7:  # a step is left out now and then: gradients go on adding up
            late = draw(st.sampled_from((None, None, None, 0, config.ranks - 1)))
            factor = draw(st.sampled_from((None, 0.5))) if config.optimizer == "Tempered" else None
            ops.append(p.Step(factor=factor, late=late))
    return (*ops, *draw(_scheduling()))


def _clearing(config: Configuration) -> Any:
    return st.sampled_from(
        ((p.ZeroGrad(),), (p.ZeroGrad(),), (p.ZeroGrad(),), (p.ZeroGrad(set_to_none=False),),
         (p.ZeroGrad(), p.ZeroGrad()), (p.ZeroGrad(by="model"),), ())
    )  # fmt: skip


def _scheduling() -> Any:
    return st.sampled_from(((), (), (), (p.Schedule(),), (p.SetLr(group=1),), (p.SetLr(),)))


@st.composite
def _backward(draw: Any, config: Configuration, sync: bool, scaled: bool, bad: int | None) -> p.Backward:
    skip, only = (), None
    if config.may_skip:
        skip = draw(st.sampled_from(((), (), (0,), (1,), (2,), (0, 1), tuple(range(BRANCHES)))))
        only = draw(st.sampled_from((None, 0, config.ranks - 1))) if skip else None
    late = draw(st.sampled_from((None, None, 0, config.ranks - 1))) if config.ranks > 1 else None
    return p.Backward(skip=skip, only=only, sync=sync, scaled=scaled, bad=bad, late=late)


def _clipping(config: Configuration) -> Any:
    ways = ("torch",) if config.sixteen else ("torch", "ours", "value")
    orders = (2.0, 1.0) if config.model == "odd" else (2.0, 2.0, float("inf"), 1.0)  # (no elements have no maximum)
    norms = st.sampled_from(orders)
    return st.builds(p.Clip, max_norm=st.sampled_from((0.01, 0.3, 1e6)), norm_type=norms, how=st.sampled_from(ways))


def changes(config: Configuration) -> dict[str, Any]:
    """What happens between iterations, as far as this configuration allows it: strategies by name."""
    index = st.integers(0, 11)
    found = {
        "Freeze": _phrase(st.builds(p.Freeze, index=index)),
        "Unfreeze": st.builds(lambda first: (p.Freeze(first), p.Unfreeze()), index),
        "AddGroup": _phrase(st.just(p.AddGroup())),
        "Consolidate": _phrase(st.builds(p.Consolidate, to=st.integers(0, 3))),
        "Exchange": _phrase(st.builds(p.Exchange, to=st.integers(0, 3))),
        "Resume": resumes(config),
        "Raise": _phrase(st.just(p.Raise())),
        "CopyModel": _phrase(st.just(p.CopyModel())),
        "Move": st.sampled_from(((p.Move(),), (p.ZeroGrad(), p.Backward(), p.Move(cleared=True)))),
        "Rebuild": _phrase(st.just(p.Rebuild())),
        "Loop": _phrase(loops(config)),
        "Save": st.builds(
            lambda asynchronous, beside, between: (p.Save(asynchronous, beside), *between, p.Restore()),
            st.booleans(),
            st.sampled_from((False, False, True)),
            st.one_of(iterations(config), _phrase(st.builds(p.Freeze, index=index)), st.just(())),
        ),
    }
    if config.uses_ddp:
        found["Rewrap"] = _phrase(st.builds(p.Rewrap, ddp_cap=st.sampled_from((None, 0.0003, 0.001))))
    else:
        rank = st.sampled_from((None, 0, config.ranks - 1))
        found["Raise in backward"] = _phrase(st.builds(p.Raise, place=st.just("backward"), rank=rank))
        found["Raise on one rank"] = _phrase(st.builds(p.Raise, place=st.just("forward"), rank=rank))
    if config.may_edit:
        found["Edit"] = _phrase(st.builds(p.Edit, index=index))
        found["Swap"] = _phrase(st.just(p.Swap()))
        found["LoadModel"] = _phrase(st.just(p.LoadModel()))
    if not config.sixteen:
        found["Plain"] = _phrase(st.builds(p.Plain, back=st.booleans()))
    if config.optimizer in FAILING and not config.steps_in_backward:
        when = st.sampled_from(("before", "after"))
        found["RaiseInStep"] = when.map(lambda when: (p.ZeroGrad(), p.Backward(), p.RaiseInStep(when), p.Step()))
    if config.optimizer == "ScheduleFree":
        found["Switch"] = _phrase(st.just(p.Switch()))
    if config.may_join:
        found["Uneven"] = st.builds(
            lambda batches, clip, epochs, closure: (p.ZeroGrad(), p.Uneven(batches, clip, epochs, closure)),
            st.sampled_from(((2, 1), (1, 3), (1, 2, 0), (0, 2), (2, 2))),
            st.sampled_from((None, 0.05, 0.05)) if not config.uses_ddp and not config.sixteen else st.none(),
            st.sampled_from((1, 1, 2)),
            st.booleans(),
        )
    return found


def loops(config: Configuration) -> Any:
    clips = st.sampled_from(("", "", "torch") if config.sixteen else ("", "", "torch", "ours"))
    if config.device != "cpu":
        return st.builds(p.Loop, count=st.integers(2, 5), clip=clips, aside=st.booleans())
    before = st.sampled_from(((), (False,), (True,), (True, False), (True, False)))
    late = st.sampled_from((None, 0, config.ranks - 1))
    return st.builds(p.Loop, count=st.integers(2, 3), clip=clips, before=before, late=late)


def resumes(config: Configuration) -> Any:
    ways = ("checkpoint", "asynchronous", "resume", "sharded", "get_state_dict", "torch")
    return _phrase(
        st.builds(
            p.Resume,
            how=st.sampled_from(ways),
            ranks=st.sampled_from((None, 1, 2, 3, 4)),
            mode=st.sampled_from((None, *MODES)),
            cap=st.sampled_from((None, 0.0003, 0.002)),
            shard=st.sampled_from((None, None, "element", "tensor")),
            masters=st.sampled_from((None, "float32", "remainder")) if config.sixteen else st.none(),
        )
    )


def _phrase(operation: Any) -> Any:
    return operation.map(lambda op: (op,))
