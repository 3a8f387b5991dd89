"""Parameters as views of one flat buffer per bucket, so that nothing has to be packed."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shardstep.comm.byte_views import dense_stride
from shardstep.layout.specs import Bucket, Layout


class BucketViews:
    """One flat buffer per bucket, with every parameter a view of its range of it."""

    def __init__(self) -> None:
        self.buffers: list[Tensor] = []
        self._views: dict[int, Tensor] = {}

    def extend(self, layout: Layout, params: Mapping[int, Tensor]) -> None:
        """Make buffers for the buckets that a longer layout adds, and move their parameters into them."""
        for bucket in layout.buckets[len(self.buffers) :]:
            self.buffers.append(self._make(bucket, layout.world_size, params))
        self.bind(params)

    def relocate(self, layout: Layout, params: Mapping[int, Tensor]) -> None:
        """Parameters were moved to another device: have their buffers there. ``bind`` moves them in."""
        for bucket in layout.buckets:
            if self.buffers[bucket.position].device != params[bucket.params[0]].device:
                self.buffers[bucket.position] = self._make(bucket, layout.world_size, params)

    def _make(self, bucket: Bucket, world_size: int, params: Mapping[int, Tensor]) -> Tensor:
        like = params[bucket.params[0]]
        numel = max(bucket.numel, (bucket.equal_shard or 0) * world_size)
        buffer = torch.zeros(numel, dtype=like.dtype, device=like.device)
        for index, offset, size in zip(bucket.params, bucket.offsets, bucket.numels, strict=True):
            # In the order of its memory: a DDP that was built before has its gradient in that order.
            like = self._views.get(index, params[index])
            span = buffer[offset : offset + size]
            stride = dense_stride(like)
            self._views[index] = span.view(like.shape) if stride is None else span.as_strided(like.shape, stride)
        return buffer

    def bind(self, params: Mapping[int, Tensor]) -> None:
        """Make every parameter that is no view of its buffer one again, with the value that it has."""
        strayed = [
            (params[index], view)
            for index, view in self._views.items()
            if params[index].data_ptr() != view.data_ptr() or params[index].stride() != view.stride()
        ]
        # Values first: somebody may have swapped two parameters, or transposed one, within the buffer.
        values = [param.data.clone() for param, _ in strayed]
        for (param, view), value in zip(strayed, values, strict=True):
            view.copy_(value)
            param.data = view
