"""Read DCP's ``.metadata`` without running what is in it.

The file is a pickle. This reader makes nothing but the few plain classes that DCP's metadata consists of; anything else
in it is refused before it is called. See SECURITY.md.
"""

from __future__ import annotations

import io
import pathlib
import pickle
from typing import Any

import torch

from shardstep.manifest import CheckpointError

_METADATA = "torch.distributed.checkpoint.metadata"
_STORAGE = "torch.distributed.checkpoint.filesystem"
# Plain data classes: making one of them calls nothing that its fields could steer.
_CLASSES = {
    _METADATA: (
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    ),
    _STORAGE: ("_StorageInfo", "_StoragePrefix"),
    "torch": ("Size",),
    "collections": ("OrderedDict",),
}
_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path")
_LAYOUTS = ("strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "_mkldnn", "jagged")


def _layout(name: str) -> torch.layout:
    """torch pickles a layout as the call of a function with its name."""
    plain = str(name).removeprefix("torch.")
    if plain not in _LAYOUTS:
        raise pickle.UnpicklingError(f"{name!r} is no layout")
    return getattr(torch, plain)


class _SafeUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module == "torch.serialization" and name == "_get_layout":
            return _layout
        if module.split(".")[0] == "pathlib" and name in _PATHS:
            return pathlib.PurePosixPath  # where it was saved: a text, never opened
        raise pickle.UnpicklingError(f"{module}.{name} is nothing that a checkpoint's metadata consists of")


def loads(data: bytes, path: Any) -> Any:
    """The metadata in ``data``. CheckpointError, which names ``path``, if that is not what it is."""
    import torch.distributed.checkpoint.metadata as dcp_metadata

    try:
        found = _SafeUnpickler(io.BytesIO(data)).load()
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(f"{path} expects the metadata of a DCP checkpoint but cannot be read: {error}") from error
    if not isinstance(found, dcp_metadata.Metadata) or not isinstance(found.state_dict_metadata, dict):
        raise CheckpointError(f"{path} expects the metadata of a DCP checkpoint but holds a {type(found).__name__}.")
    return found
