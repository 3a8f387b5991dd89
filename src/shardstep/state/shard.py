"""What a sharded state dict holds: a state tensor in its full shape, of which this rank holds some boxes.

torch.distributed.checkpoint (DCP) asks such an object three questions: what it writes, what it wants to read, and where
a box of it lies in memory (the protocol ``torch.distributed._checkpointable._Checkpointable``). It is a tensor, because
DCP's functions on state dicts take nothing else; what would need the whole raises and names ``full_state``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from shardstep.layout.boxes import Box, boxes_of, whole

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

aten = torch.ops.aten

# What a checkpoint has for a tensor that did not exist yet. No optimizer has such a value.
BLANK = "shardstep: no state yet"


class Part(NamedTuple):
    """A box, and this rank's memory for it: a tensor of the box's sizes."""

    box: Box
    tensor: Tensor


class StateShard(Tensor):
    """A tensor that is spread over the ranks: shape and dtype of the whole, memory of this rank's parts.

    The tensors in ``ZeroRedundancyOptimizer.sharded_state_dict``. ``torch.distributed.checkpoint`` saves it, loads into
    it, and copies it. What would need the whole raises; ``ZeroRedundancyOptimizer.full_state`` gives the whole.
    """

    parts: tuple[Part, ...]
    local: Tensor  # the parts in one piece, as the local optimizer has it
    writes: bool  # whether this rank saves its parts (if many ranks hold a copy, one of them saves it)
    blank: bool  # made to be loaded into: saved as a mark, and no state unless something was loaded
    loaded: bool  # whether DCP asked where to load

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], parts: Sequence[Part], local: Tensor, writes: bool = True, blank: bool = False
    ) -> StateShard:
        shard = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=local.dtype, device=local.device)
        shard.parts, shard.local, shard.writes, shard.blank, shard.loaded = tuple(parts), local, writes, blank, False
        return shard

    def map(self, change: Callable[[Tensor], Tensor]) -> StateShard:
        """The same boxes over other memory."""
        local = change(self.local.detach())
        twin = StateShard(self.shape, _parts_of(local, self._boxes), local, self.writes, self.blank)
        twin.loaded = self.loaded
        return twin

    @property
    def _boxes(self) -> list[Box]:
        return [part.box for part in self.parts]

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
                index=MetadataIndex(fqn, part.box.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=_chunk(part.box), properties=properties, size=self.size()),
            )
            for part in self.parts
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """What this rank wants to read. DCP asks only if its checkpoint has such an entry."""
        self.loaded = True
        return [_chunk(part.box) for part in self.parts]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """This rank's memory for the box that DCP means; of a blank that is saved, the mark."""
        if index.offset is None and self.blank:
            return BLANK  # type: ignore[return-value]
        return next(part.tensor for part in self.parts if part.box.offsets == tuple(index.offset or ()))

    # --- a tensor as far as DCP's functions on state dicts need one -------------------------------------------------

    def __repr__(self, *, tensor_contents: object = None) -> str:
        held = sum(part.box.numel for part in self.parts)
        return f"StateShard(shape {tuple(self.shape)}, {self.dtype}, {held} elements here)"

    def __deepcopy__(self, memo: dict[int, Any]) -> StateShard:
        twin = self.map(Tensor.clone)
        memo[id(self)] = twin
        return twin

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
            for mine, other in zip(args[0].parts, args[1].parts, strict=True):
                mine.tensor.copy_(other.tensor, *args[2:], **kwargs)
            args[0].loaded = True
            return args[0]
        if func is aten.new_empty.default and isinstance(shard, StateShard):
            # DCP's stager fills the result in, attribute by attribute.
            return StateShard(args[1], (), torch.empty(0, dtype=shard.dtype, device=kwargs.get("device")))
        if func not in _PART_BY_PART or not isinstance(shard, StateShard):
            raise RuntimeError(_refusal(str(func)))
        return shard.map(lambda tensor: func(tensor, *args[1:], **kwargs))


def _rebuilt(shape: tuple[int, ...], boxes: list[Box], local: Tensor, writes: bool, blank: bool) -> StateShard:
    return StateShard(shape, _parts_of(local, boxes), local, writes, blank)


def _to_another_process(shard: StateShard) -> tuple[Any, ...]:
    boxes = [part.box for part in shard.parts]
    return _rebuilt, (tuple(shard.shape), boxes, shard.local, shard.writes, shard.blank)


# On its way to another process of this rank, which writes it: dcp.async_save with AsyncCheckpointerType.PROCESS. Only
# the pickler of multiprocessing knows of it; a file that torch.save wrote would be a part that looks like the whole.
ForkingPickler.register(StateShard, _to_another_process)

_PART_BY_PART = (aten.detach.default, aten.clone.default, aten._to_copy.default, aten.alias.default)


def _refusal(what: str) -> str:
    return (
        f"{what} expects a whole tensor, but this state is sharded over the ranks. Save it with "
        "torch.distributed.checkpoint or shardstep.checkpoint; optimizer.full_state(param) gives the whole."
    )


def _chunk(box: Box) -> ChunkStorageMetadata:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))


def _parts_of(local: Tensor, boxes: Sequence[Box]) -> list[Part]:
    if len(boxes) == 1 and local.shape == boxes[0].sizes:
        return [Part(boxes[0], local)]
    flat = local.view(-1)
    parts, start = [], 0
    for box in boxes:
        parts.append(Part(box, flat[start : start + box.numel].view(box.sizes)))
        start += box.numel
    return parts


def shard_of_range(
    shape: tuple[int, ...], start: int, stop: int, local: Tensor, *, writes: bool = True, blank: bool = False
) -> StateShard:
    """Of a tensor of ``shape``, the elements from ``start`` to ``stop``, which are ``local`` (1D, contiguous)."""
    parts = _parts_of(local.detach(), boxes_of(shape, start, stop))
    return StateShard(shape, parts, local, writes, blank)


def shard_of_whole(tensor: Tensor, *, writes: bool = True, blank: bool = False) -> StateShard:
    """A tensor that this rank has whole."""
    shape = tuple(tensor.shape)
    return StateShard(shape, [Part(whole(shape), tensor.detach())], tensor, writes, blank)


def filled(entry: Any) -> Any:
    """A parameter's state without the blanks that nothing was loaded into; None if there is nothing else."""
    if not isinstance(entry, Mapping):
        return entry
    tensors = [value for value in entry.values() if isinstance(value, Tensor) or _is_mark(value)]
    if tensors and all(map(is_unfilled, tensors)):
        return None
    return {key: filled(value) for key, value in entry.items() if not is_unfilled(value)}


def is_unfilled(value: Any) -> bool:
    """Whether this is a place to load into that nothing was loaded into, or what DCP saved of such a one."""
    return (isinstance(value, StateShard) and value.blank and not value.loaded) or _is_mark(value)


def _is_mark(value: Any) -> bool:
    return isinstance(value, str) and value == BLANK


def is_sharded(entry: Mapping[str, Any]) -> bool:
    """Whether a parameter's state is in pieces, so that ranks have different ones."""
    return not entry or any(
        is_sharded(value) if isinstance(value, Mapping) else isinstance(value, StateShard) or _is_mark(value)
        for value in entry.values()
    )
