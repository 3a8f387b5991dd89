"""What is claimed of every class that shardstep takes. Each function runs on every rank.

Oracle: the plain class in the same process, on the same gradients, never interrupted; everything bit by bit.

If a class is random, ranks that own different tensors draw other numbers than the plain one does over all of them.
Then the oracle on a rank is the plain class over the tensors that this rank owns, from the same seed, and that all
ranks hold the same weights is checked apart.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import ParameterList
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shardstep import ZeroRedundancyOptimizer, checkpoint
from tests.optimizers import training
from tests.optimizers.catalogue import Subject, switch_off_compilers
from tests.optimizers.training import END, SAVED_AT, Course, Facts, Model, start

Finding = dict[str, Any]


def trains_and_saves(rank: int, world_size: int, subject: Subject, facts: Facts, folder: str) -> Finding:
    """Build, train, compare, save in the middle, go on. Returns what was found, or how it was refused."""
    _prepare()
    course = facts.course
    ours = Model(course)
    before = [param.detach().clone() for param in ours.params]
    try:
        optimizer = sharded(subject, course, ours)
    except ValueError as error:
        _assert_same([param.detach() for param in ours.params], before, "the weights after a refusal")
        return {"refused": str(error)}
    only = comparable_positions(optimizer) if facts.random else None
    theirs = Model(course)
    torch.manual_seed(0)
    plain = start(training.plain(subject, course, theirs.params, only))
    start(optimizer)
    _train_both(optimizer, plain, ours, theirs, range(SAVED_AT), course)
    check_equal(optimizer, plain, ours, theirs, only, "in the middle")
    check_memory(optimizer, plain, theirs, only)
    checkpoint.save(Path(folder) / "checkpoint", optimizer, ours, extra={"step": SAVED_AT})
    optimizer.consolidate_state_dict(to=0)
    if rank == 0:
        torch.save({"optim": optimizer.state_dict(), "model": ours.state_dict()}, Path(folder) / "one-file.pt")
    _train_both(optimizer, plain, ours, theirs, range(SAVED_AT, END), course)
    check_equal(optimizer, plain, ours, theirs, only, "at the end")
    if callable(getattr(plain, "eval", None)):
        optimizer.eval()
        plain.eval()
        check_equal(optimizer, plain, ours, theirs, only, "after eval()")
    return finding_of(optimizer)


def trains_in_float64(rank: int, world_size: int, subject: Subject, facts: Facts) -> Finding:
    """The same in another dtype: weights and states."""
    _prepare()
    course = facts.course._replace(dtype=torch.float64)
    ours, theirs = Model(course), Model(course)
    try:
        optimizer = sharded(subject, course, ours)
    except ValueError as error:
        return {"refused": str(error)}
    only = comparable_positions(optimizer) if facts.random else None
    torch.manual_seed(0)
    plain = start(training.plain(subject, course, theirs.params, only))
    _train_both(start(optimizer), plain, ours, theirs, range(END), course)
    check_equal(optimizer, plain, ours, theirs, only, "in float64")
    return finding_of(optimizer)


def resumes(rank: int, world_size: int, subject: Subject, facts: Facts, folder: str) -> None:
    """Fresh optimizers over other weights, at another number of ranks, load what was saved and go on to the end."""
    _prepare()
    course = facts.course
    saved, given = (torch.load(Path(folder) / "one-file.pt", weights_only=False) for _ in range(2))
    for way in ("checkpoint", "one file"):
        ours = Model(course, seed=5)
        optimizer = sharded(subject, course, ours)
        if way == "checkpoint":
            assert checkpoint.load(Path(folder) / "checkpoint", optimizer, ours) == {"step": SAVED_AT}
        else:
            ours.load_state_dict(given["model"])
            optimizer.load_state_dict(given["optim"])
        only = comparable_positions(optimizer) if facts.random else None
        theirs, plain = _expected(subject, facts, saved, only)
        training.train(start(optimizer), ours.params, range(SAVED_AT, END), course.drive)
        check_equal(optimizer, plain, ours, theirs, only, f"resumed from the {way}")
    _assert_same(given["optim"], saved["optim"], "a dict that was loaded, after further steps:")
    if not facts.random:
        _plain_takes_it(subject, facts, saved)


def _expected(subject: Subject, facts: Facts, saved: dict[str, Any], only: Sequence[int] | None) -> tuple[Model, Any]:
    """What a resumed run has to end with: what the plain one does, uninterrupted.

    A plain class that does not go on from its own state dict is no measure for that; then, and if it is random, what
    counts is what the plain one makes of the state that was saved.
    """
    course, model = facts.course, Model(facts.course)
    if facts.random or facts.resumes:
        weights = list(saved["model"].values())
        state_dict = _copy(saved["optim"])
        params, plain = training.resume_plain(subject, course, weights, _part_of(state_dict, only), only)
    else:
        params, plain = training.run_plain(subject, course)
    model.weights = ParameterList(params)
    return model, plain


def _plain_takes_it(subject: Subject, facts: Facts, saved: dict[str, Any]) -> None:
    """The plain class goes on from what the sharded one has saved, in one file and as a checkpoint."""
    if facts.resumes:
        return
    weights = list(saved["model"].values())
    params, _ = training.resume_plain(subject, facts.course, weights, _copy(saved["optim"]))
    expected, _ = training.run_plain(subject, facts.course)
    _assert_same(
        [p.detach() for p in params], [p.detach() for p in expected], "the plain class, from the sharded dict:"
    )


def _part_of(state_dict: dict[str, Any], only: Sequence[int] | None) -> dict[str, Any]:
    """A plain state dict of the parameters at some positions."""
    if only is None:
        return state_dict
    groups, new = [], {}
    for group in state_dict["param_groups"]:
        kept = [position for position in group["params"] if position in only]
        for position in kept:
            new[position] = len(new)
        if kept:
            groups.append({**group, "params": [new[position] for position in kept]})
    state = {new[key]: value for key, value in state_dict["state"].items() if key in new}
    return {**state_dict, "param_groups": groups, "state": state}


# --- building -------------------------------------------------------------------------------------------------------


def _prepare() -> None:
    switch_off_compilers()
    warnings.simplefilter("ignore")


def sharded(subject: Subject, course: Course, model: Model) -> ZeroRedundancyOptimizer:
    torch.manual_seed(0)
    groups = training.groups_of(subject, course, model.params)
    return ZeroRedundancyOptimizer(groups, subject.cls, **subject.options)


def comparable_positions(optimizer: ZeroRedundancyOptimizer) -> list[int]:
    """Of a random optimizer: what this rank owns whole, and what is cut, which the probe found not to be random."""
    whole = {piece.param for piece in optimizer.layout.pieces(optimizer.rank) if piece.whole}
    return sorted(whole | _cut_positions(optimizer))


def _cut_positions(optimizer: ZeroRedundancyOptimizer) -> set[int]:
    return {spec.index for spec in optimizer.layout.specs if spec.granularity == "element"}


def finding_of(optimizer: ZeroRedundancyOptimizer) -> Finding:
    sharded = optimizer.engine.sharded
    return {
        "cut": [spec.granularity == "element" for spec in sharded.layout.specs],
        "reasons": sorted({verdict.reason for verdict in sharded.builder._verdicts if verdict.reason}),
        "splits": sharded.plan.owns_active and sharded.builder.splittable,
    }


def _train_both(optimizer: Any, plain: Any, ours: Model, theirs: Model, steps: Iterable[int], course: Course) -> None:
    for step in steps:
        training.train(optimizer, ours.params, [step], course.drive)
        training.train(plain, theirs.params, [step], course.drive)


# --- comparing ------------------------------------------------------------------------------------------------------


def check_equal(
    optimizer: ZeroRedundancyOptimizer, plain: Any, ours: Model, theirs: Model, only: Sequence[int] | None, when: str
) -> None:
    """Weights on every rank, and every parameter's full state."""
    optimizer.check_replicas()
    compared = range(len(ours.params)) if only is None else only
    for position in compared:
        mine, other = ours.params[position].detach(), theirs.params[position].detach()
        _assert_same(mine, other, f"weights {when}: parameter {position}")
    for position, param in enumerate(ours.params):
        state = optimizer.full_state(param)  # collective
        if position in compared:
            _assert_same(state, dict(plain.state.get(theirs.params[position], {})), f"state {when}: {position}")


def check_memory(optimizer: ZeroRedundancyOptimizer, plain: Any, theirs: Model, only: Sequence[int] | None) -> None:
    """The ranks hold together what the plain optimizer holds alone.

    Except for scalars, of which each piece of a parameter has its own, and for tables that all parameters share, of
    which each rank has one.
    """
    # If the plain optimizer has only this rank's tensors (see above), the others are with the other ranks' ones.
    alone = set() if only is None else set(only) - _cut_positions(optimizer)
    keys_here = [theirs.params[position] for position in alone]
    here = [plain.state[key] for key in keys_here]
    everywhere = [value for key, value in plain.state.items() if not any(key is one for one in keys_here)]
    mine = list(optimizer.optim.state.values())
    held = _sum_over_ranks(optimizer.memory().state)
    expected = _sum_over_ranks(_bytes_but_scalars(here) + _scalar_bytes(mine)) + _bytes_but_scalars(everywhere)
    shared = _bytes(_shared_tensors(everywhere)) * (optimizer.world_size - 1)
    told = f"memory: the ranks hold {held} bytes of state, the plain optimizer {expected} (and {shared} shared)"
    assert expected <= held <= expected + shared, told


def _scalar_bytes(state: Any) -> int:
    return _bytes(tensor for tensor in _flat_tensors(state) if tensor.numel() == 1)


def _bytes_but_scalars(state: Any) -> int:
    return _bytes(_flat_tensors(state)) - _scalar_bytes(state)


def _sum_over_ranks(number: int) -> int:
    total = torch.tensor(number)
    dist.all_reduce(total)
    return int(total)


def _flat_tensors(value: Any) -> list[Tensor]:
    """All plain tensors in nested data; of tensor subclasses those that they are made of."""
    if isinstance(value, Tensor):
        if not is_traceable_wrapper_subclass(value):
            return [value]
        names, _ = value.__tensor_flatten__()
        return [tensor for name in names for tensor in _flat_tensors(getattr(value, name))]
    items = value.values() if isinstance(value, Mapping) else value if _is_sequence(value) else ()
    return [tensor for item in items for tensor in _flat_tensors(item)]


def _shared_tensors(states: Iterable[Any]) -> list[Tensor]:
    """Those that the states of several parameters have in common."""
    seen: dict[int, int] = {}
    found = []
    for position, state in enumerate(states):
        for tensor in _flat_tensors(state):
            if seen.setdefault(tensor.data_ptr(), position) != position:
                found.append(tensor)
    return found


def _bytes(tensors: Iterable[Tensor]) -> int:
    sizes: dict[int, int] = {}
    for tensor in tensors:
        sizes[tensor.data_ptr()] = max(sizes.get(tensor.data_ptr(), 0), tensor.nbytes)
    return sum(sizes.values())


def _copy(value: Any) -> Any:
    """As through a file. (torchao's states cannot be copied by copy.deepcopy.)"""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping, Tensor))


def _assert_same(ours: Any, expected: Any, where: str) -> None:
    """Equal through dicts and sequences, in every bit. Lists and tuples are alike: see "Limits" in the README."""
    if isinstance(expected, Tensor):
        assert isinstance(ours, Tensor), f"{where}: {ours!r} is no tensor"
        kinds = (ours.dtype, ours.shape), (expected.dtype, expected.shape)
        assert kinds[0] == kinds[1], f"{where}: {kinds[0]} is not {kinds[1]}"
        for mine, other in zip(_flat_tensors(ours), _flat_tensors(expected), strict=True):
            alike = mine.dtype == other.dtype and torch.equal(_bits(mine), _bits(other))
            assert alike, f"{where}: {_distance(mine, other)}"
    elif isinstance(expected, Mapping):
        assert isinstance(ours, Mapping), f"{where}: {ours!r} is no mapping"
        # A clock that heavyball keeps with the first parameter of a group: here with the first of each rank.
        alike = set(ours) ^ set(expected) <= {"step"}
        assert alike, f"{where}: keys {list(ours)} are not {list(expected)}"
        for key in (key for key in expected if key in ours):
            _assert_same(ours[key], expected[key], f"{where}[{key!r}]")
    elif _is_sequence(expected):
        ours, expected = list(ours), list(expected)
        assert len(ours) == len(expected), f"{where}: {len(ours)} items are not {len(expected)}"
        for position, (mine, other) in enumerate(zip(ours, expected, strict=True)):
            _assert_same(mine, other, f"{where}[{position}]")
    else:
        assert type(ours) is type(expected), f"{where}: {ours!r} is not {expected!r}"
        assert ours == expected or ours != ours, f"{where}: {ours!r} is not {expected!r}"


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _distance(mine: Tensor, other: Tensor) -> str:
    if mine.shape != other.shape:
        return f"shape {tuple(mine.shape)} is not {tuple(other.shape)}"
    count = int((mine != other).sum())
    if not mine.is_floating_point():
        return f"{count} of {mine.numel()} elements differ"
    return f"{count} of {mine.numel()} elements differ, by up to {float((mine - other).abs().max()):.3g}"
