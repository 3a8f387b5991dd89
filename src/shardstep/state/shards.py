"""State in pieces: ``StateShard``, a state tensor in its full shape of which this rank holds some boxes.

torch.distributed.checkpoint (DCP) asks such an object three questions: what it writes, what it wants to read, and where
a box of it is in memory (the protocol ``torch.distributed._checkpointable._Checkpointable``). It is a tensor because
DCP's functions on state dicts take nothing else; any operation that needs the whole raises and names ``full_state``.

How a parameter's state is cut: a tensor with as many elements as the parameter is cut with it. A 0-dim tensor or a
plain value exists once per parameter. Any other shape, and a tensor subclass, needs a parameter that is whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import keystr, tree_leaves, tree_map, tree_map_with_path

from shardstep.layout.boxes import Box, boxes_of, whole
from shardstep.layout.specs import ParamSpec, Piece
from shardstep.params.sharded_parameters import ShardedParameters
from shardstep.state.subclasses import FindClass, closed, is_opened, opened

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

aten = torch.ops.aten

# What a checkpoint stores for a tensor that did not exist yet. No optimizer has such a value.
BLANK = "shardstep: no state yet"
# The key, in a parameter's state, of its float32 master. The local optimizer never sees it.
MASTER = "master_weight"


class StateShard(Tensor):
    """A tensor that is spread over the ranks: shape and dtype of the whole, memory of this rank's parts.

    The tensors in ``ZeroRedundancyOptimizer.sharded_state_dict``. ``torch.distributed.checkpoint`` saves it, loads into
    it, and copies it. What would need the whole raises; ``ZeroRedundancyOptimizer.full_state`` gives the whole.
    """

    boxes: tuple[Box, ...]
    local: Tensor  # this rank's boxes, one after the other, as the local optimizer has them
    writes: bool  # whether this rank saves its boxes (if several ranks hold a copy, one of them saves it)
    # A place to load into: saved as a mark, and no state unless something was loaded. Without memory (on the meta
    # A place to load into: saved as a mark, and no state unless something was loaded. It has no memory until then.
    blank: bool
    loaded: bool  # whether DCP asked where to load

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        boxes: Sequence[Box],
        local: Tensor,
        writes: bool = True,
        blank: bool = False,
        device: torch.device | None = None,
    ) -> StateShard:
        shard = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=local.dtype, device=device or local.device)
        shard.boxes, shard.local, shard.writes, shard.blank, shard.loaded = tuple(boxes), local, writes, blank, False
        return shard

    def parts(self) -> list[Tensor]:
        """This rank's memory for its boxes, each in the box's sizes."""
        if len(self.boxes) == 1 and self.local.shape == self.boxes[0].sizes:
            return [self.local.detach()]
        parts = self.local.detach().view(-1).split([box.numel for box in self.boxes])
        return [part.view(box.sizes) for box, part in zip(self.boxes, parts, strict=True)]

    def _prepare_to_load(self) -> None:
        if self.local.is_meta:
            self.local = torch.zeros_like(self.local, device=self.device)
        self.loaded = True

    # --- DCP's questions ------------------------------------------------------------------------------------------

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        """What this rank writes under the key ``fqn``."""
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        if not self.writes:
            return []
        if self.blank:  # DCP refuses to load a key that it has not saved, so something has to be there
            return [WriteItem(index=MetadataIndex(fqn), type=WriteItemType.BYTE_IO)]
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, box.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=_chunk(box), properties=properties, size=self.size()),
            )
            for box in self.boxes
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """What this rank wants to read. DCP asks only if its checkpoint has such an entry."""
        self._prepare_to_load()
        return [_chunk(box) for box in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """This rank's memory for the box that DCP means; of a blank that is saved, the mark."""
        if index.offset is None and self.blank:
            return BLANK  # type: ignore[return-value]
        offsets = [box.offsets for box in self.boxes]
        return self.parts()[offsets.index(tuple(index.offset or ()))]

    # --- a tensor as far as DCP's functions on state dicts need one -------------------------------------------------

    def __repr__(self, *, tensor_contents: object = None) -> str:
        held = sum(box.numel for box in self.boxes)
        return f"StateShard(shape {tuple(self.shape)}, {self.dtype}, {held} elements here)"

    def __deepcopy__(self, memo: dict[int, Any]) -> StateShard:
        memo[id(self)] = twin = self.clone()
        return twin  # type: ignore[return-value]

    def __reduce_ex__(self, proto: object) -> NoReturn:
        raise RuntimeError(_refusal("pickling"))

    def numpy(self, *args: object, **kwargs: object) -> NoReturn:
        raise RuntimeError(_refusal("numpy"))

    def tolist(self) -> NoReturn:
        raise RuntimeError(_refusal("tolist"))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore
        kwargs = kwargs or {}
        shard = args[0] if args else None
        if func is aten.copy_.default and all(isinstance(arg, StateShard) for arg in args[:2]):
            if not args[1].local.is_meta:
                args[0]._prepare_to_load()
                args[0].local.copy_(args[1].local, *args[2:], **kwargs)
            return args[0]
        if func is aten.new_empty.default and isinstance(shard, StateShard):
            # DCP's stager fills the result in, attribute by attribute.
            return StateShard(args[1], (), torch.empty(0, dtype=shard.dtype, device=kwargs.get("device")))
        if func not in _PART_BY_PART or not isinstance(shard, StateShard):
            raise RuntimeError(_refusal(str(func)))
        device = None
        if shard.local.is_meta:  # of a blank there is nothing to copy
            device = kwargs.get("device") or shard.device
            kwargs = {key: kwargs[key] for key in ("dtype", "memory_format") if key in kwargs}
        local = func(shard.local, *args[1:], **kwargs)
        twin = StateShard(shard.shape, shard.boxes, local, shard.writes, shard.blank, device)
        twin.loaded = shard.loaded
        return twin


_PART_BY_PART = (aten.detach.default, aten.clone.default, aten._to_copy.default, aten.alias.default)


def _refusal(what: str) -> str:
    return (
        f"{what} expects a whole tensor, but this state is sharded over the ranks. Save it with "
        "torch.distributed.checkpoint or shardstep.checkpoint; optimizer.full_state(param) gives the whole."
    )


def _chunk(box: Box) -> ChunkStorageMetadata:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))


def shard_of_range(shape: tuple[int, ...], start: int, stop: int, local: Tensor, **options: Any) -> StateShard:
    """Of a tensor of ``shape``, the elements from ``start`` to ``stop``, which are ``local`` (1D, contiguous)."""
    return StateShard(shape, boxes_of(shape, start, stop), local, **options)


def shard_of_whole(tensor: Tensor, **options: Any) -> StateShard:
    """A tensor that this rank has whole."""
    shape = tuple(tensor.shape)
    return StateShard(shape, [whole(shape)], tensor, **options)


def _to_another_process(shard: StateShard) -> tuple[Any, ...]:
    device = torch.device("cpu") if shard.local.is_meta else None
    return StateShard, (tuple(shard.shape), shard.boxes, shard.local, shard.writes, shard.blank, device)


# dcp.async_save with AsyncCheckpointerType.PROCESS sends it to a process of this rank, which writes it. Only
# multiprocessing's pickler may do so: a file that torch.save wrote would hold a part that looks like the whole.
ForkingPickler.register(StateShard, _to_another_process)


# --- places to load into ------------------------------------------------------------------------------------------


def is_unfilled(value: Any) -> bool:
    """Whether this is a place to load into that nothing was loaded into, or the mark that DCP saved of such a one."""
    if isinstance(value, StateShard):
        return value.blank and not value.loaded
    return isinstance(value, str) and value == BLANK


def filled(entry: Any) -> Any:
    """A parameter's state without the blanks that nothing was loaded into; None if there is nothing else."""
    if not isinstance(entry, Mapping):
        return entry
    if isinstance(entry.get(MASTER), StateShard) and _has_lost_its_master(entry):
        entry = {key: value for key, value in entry.items() if key != MASTER}
    places = [leaf for leaf in tree_leaves(dict(entry)) if isinstance(leaf, Tensor) or is_unfilled(leaf)]
    return None if places and all(map(is_unfilled, places)) else _without_blanks(entry)


def _has_lost_its_master(entry: Mapping[str, Any]) -> bool:
    """Whether DCP loaded the rest of the state and no master: the one that is there is older."""
    others = [leaf for leaf in tree_leaves(dict(entry)) if leaf is not entry[MASTER]]
    return not entry[MASTER].loaded and any(isinstance(leaf, StateShard) and leaf.loaded for leaf in others)


def _without_blanks(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_blanks(value) if isinstance(value, Mapping) else value
        for key, value in entry.items()
        if not is_unfilled(value)
    }


def is_sharded(entry: Mapping[str, Any]) -> bool:
    """Whether a parameter's state is in pieces, so that ranks have different ones."""
    return not entry or any(isinstance(leaf, StateShard) or is_unfilled(leaf) for leaf in tree_leaves(dict(entry)))


# --- cutting a parameter's state, and making shards of it -----------------------------------------------------------


def check_cut_with(leaf: Tensor, spec: ParamSpec, piece: Piece) -> None:
    """RuntimeError if a tensor of the live state is neither whole, nor one number, nor cut as its parameter is."""
    if not piece.whole and leaf.dim() > 0 and leaf.numel() != piece.numel:
        raise RuntimeError(
            f"the state of {spec.label} expects tensors of {piece.numel} elements or 0-dim ones, because the "
            f"parameter is cut, but got shape {tuple(leaf.shape)}. Build the optimizer with shard='tensor'."
        )


def sharded_entry(entry: Mapping[str, Any], spec: ParamSpec, piece: Piece, *, blank: bool = False) -> dict[str, Any]:
    """The state of this rank's piece of a parameter, with its tensors as ``StateShard``s of the whole."""

    def shard(leaf: Any) -> Any:
        options: dict[str, Any] = {}
        if isinstance(leaf, tuple) and any(isinstance(item, Tensor) for item in tree_leaves(leaf)):
            return [tree_map(shard, item, is_leaf=_is_tuple) for item in leaf]  # DCP does not look into tuples
        if not isinstance(leaf, Tensor):
            return leaf
        check_cut_with(leaf, spec, piece)
        if blank:
            options, leaf = {"blank": True, "device": leaf.device}, leaf.to("meta")
        if leaf.dim() == 0 or piece.whole:
            return shard_of_whole(leaf, writes=piece.start == 0, **options)
        return shard_of_range(spec.shape, piece.start, piece.stop, leaf.reshape(-1), **options)

    return tree_map(shard, opened(dict(entry)), is_leaf=_is_tuple)


def _is_tuple(value: Any) -> bool:
    return isinstance(value, tuple)


def with_masters(
    held: ShardedParameters, state: Mapping[Any, Any], only: int | None = None
) -> Mapping[Any, Mapping[str, Any]]:
    """The local optimizer's state by tensor, with the masters of parameters that were stepped. ``only``: of one."""
    entries = dict(state)
    for index, master in held.master_weights(only).items():
        tensor = held.pieces.tensors[index]
        entries[tensor] = {**entries.get(tensor, {}), MASTER: master}
    return entries


def unkeyed(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """The state that belongs to no parameter."""
    return {key: value for key, value in state.items() if not isinstance(key, Tensor)}


def sharded_states(
    held: ShardedParameters, optimizer: Optimizer, *, blanks: bool = True, shards: bool = True
) -> dict[int, dict[str, Any]]:
    """This rank's state by parameter index.

    ``blanks``: a trainable parameter without any gets places to load into. ``shards``: False leaves the state plain.
    """
    entries: dict[int, dict[str, Any]] = {}
    state = with_masters(held, optimizer.state)
    for index, piece in sorted(held.pieces.pieces.items()):
        spec, entry = held.layout.spec_of[index], state.get(held.pieces.tensors[index])
        if entry:
            entries[index] = sharded_entry(entry, spec, piece) if shards else dict(entry)
        elif blanks and held.given[index].requires_grad:
            # (Without places DCP would step the optimizer itself with zero gradients, which changes the state. A frozen
            # parameter has none: most checkpoints have no state for it, and DCP refuses to load a key that is missing.)
            entries[index] = sharded_entry(held.blank_state(index, optimizer.param_groups), spec, piece, blank=True)
    return entries


def local_part(
    entry: Any, spec: ParamSpec, piece: Piece, find_class: FindClass, where: str, *, keep: bool = False
) -> Any:
    """Copies of the part of one parameter's state, whole or in shards, that belongs to ``piece``.

    ``keep``: of shards no copies but their memory, which was made to be loaded into.
    """

    def cut(path: Any, leaf: Any) -> Any:
        name = f"state {where}{keystr(path)} of {spec.label}"
        if is_opened(leaf):
            raise ValueError(
                f"{name} is a tensor subclass, which cannot be cut with the parameter. Build the optimizer with "
                "shard='tensor'."
            )
        if isinstance(leaf, StateShard):
            local = _part_of_shard(leaf, spec, piece, name)
            return local if keep else local.detach().clone()
        if not isinstance(leaf, Tensor):
            return leaf
        if piece.whole or leaf.dim() == 0:
            return leaf.detach().clone()
        if leaf.numel() != spec.numel:
            raise ValueError(
                f"{name} expects {spec.numel} elements, as the parameter of shape {spec.shape} has, but got shape "
                f"{tuple(leaf.shape)}. A state of another shape needs shard='tensor'."
            )
        return leaf.detach().reshape(-1)[piece.start : piece.stop].clone()

    parts = tree_map_with_path(cut, opened(entry), is_leaf=None if piece.whole else is_opened)
    return closed(parts, find_class, spec.label)


def _part_of_shard(shard: StateShard, spec: ParamSpec, piece: Piece, name: str) -> Tensor:
    expected = [] if shard.dim() == 0 or piece.whole else boxes_of(spec.shape, piece.start, piece.stop)
    if expected and list(shard.boxes) != expected:
        raise ValueError(
            f"{name} expects elements {piece.start} to {piece.stop} of the parameter on this rank but got {shard!r}. "
            "Load into what this optimizer's sharded_state_dict() returns."
        )
    return shard.local
