"""Checkpoints of format 1: torch's distributed checkpoints, whose index and tensors are pickles.

Nothing is unpickled: `pickled.py` reads them as data, and the few classes that torch wrote are understood here."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.checkpointing.chunks import KINDS
from trainer.checkpointing.files import count, open_inside, shown
from trainer.checkpointing.pickled import PERSISTENT, Made, Name, Pairs, expect, read_pickle

INDEX = ".metadata"

CLASSES = "torch.distributed.checkpoint.metadata."
STORED_AT = "torch.distributed.checkpoint.filesystem._StorageInfo"
INDEX_NAMES = {
    *(f"{CLASSES}{name}" for name in ("Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata")),
    *(f"{CLASSES}{name}" for name in ("MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    *("torch.Size", "torch.serialization._get_layout", STORED_AT, "pathlib.PosixPath", "pathlib._local.PosixPath"),
    *(f"torch.{kind}" for kind in KINDS),
}
"""All that the index of a checkpoint of this project's tensors names. The path is of Python up to 3.12, and of 3.13."""

TENSOR = "torch._utils._rebuild_tensor_v2"
STORAGES = {
    **{"torch.DoubleStorage": torch.float64, "torch.FloatStorage": torch.float32, "torch.HalfStorage": torch.float16},
    **{"torch.BFloat16Storage": torch.bfloat16, "torch.LongStorage": torch.int64, "torch.IntStorage": torch.int32},
    **{"torch.ShortStorage": torch.int16, "torch.CharStorage": torch.int8, "torch.ByteStorage": torch.uint8},
    "torch.BoolStorage": torch.bool,
}
TENSOR_NAMES = {TENSOR, "collections.OrderedDict", *STORAGES}

Place = tuple[str, tuple[int, ...]]
"""A tensor's name, and where a chunk begins in it."""


def read_index(folder: Path) -> dict[str, Any]:
    """What the index says of each tensor, in the form that manifests have, and the `length` of each chunk's archive.
    ValueError where it is malformed, or names a class that does not belong into it."""
    with open_inside(folder, INDEX) as file:
        data = file.read()
    index = _state(read_pickle(data, INDEX_NAMES), f"{CLASSES}Metadata")
    places: dict[Place, dict[str, Any]] = {}
    for key, place in expect(Pairs, index["storage_data"]).items:
        key, place = _state(key, f"{CLASSES}MetadataIndex"), _state(place, STORED_AT)
        if place.get("transform_descriptors") is not None:
            raise ValueError("a tensor was transformed on its way to the file")
        places[expect(str, key["fqn"]), tuple(_size(key["offset"]))] = place
    return {
        name: _entry(name, tensor, places)
        for name, tensor in expect(Pairs, index["state_dict_metadata"]).named().items()
    }


def _entry(name: str, tensor: Any, places: dict[Place, dict[str, Any]]) -> dict[str, Any]:
    tensor = _state(tensor, f"{CLASSES}TensorStorageMetadata")
    properties = expect(Made, tensor["properties"])
    chunks = []
    for chunk in expect(list, tensor["chunks"]):
        chunk = _state(chunk, f"{CLASSES}ChunkStorageMetadata")
        offsets, sizes = _size(chunk["offsets"]), _size(chunk["sizes"])
        place = places.get((name, tuple(offsets)))
        if place is None:
            raise ValueError(f"a chunk of {shown(name)} is in no file")
        where = {"file": place["relative_path"], "start": place["offset"], "length": place["length"]}
        chunks.append({"offsets": offsets, "sizes": sizes, **where})
    dtype = expect(Name, next(iter(expect(tuple, properties.state)), None)).name
    return {"shape": _size(tensor["size"]), "dtype": dtype.removeprefix("torch."), "chunks": chunks}


def read_archive(data: bytes, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The tensor of `sizes` and `dtype` in an archive that `torch.save` wrote. ValueError if it holds anything else."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            (root,) = {name.partition("/")[0] for name in archive.namelist()}
            content = read_pickle(_record(archive, f"{root}/data.pkl", len(data)), TENSOR_NAMES)
            storage, offset, shape, stride = _tensor(content, dtype)
            values = _record(archive, f"{root}/data/{storage}", len(data))
            order = f"{root}/byteorder"
            if order in archive.namelist() and _record(archive, order, len(data)) != b"little":
                raise ValueError("its bytes are in another order")
    except ValueError:
        raise
    except Exception as error:  # zipfile has many for what is no archive
        raise ValueError(f"no archive of a tensor: {shown(str(error))}") from None
    flat = torch.frombuffer(bytearray(values), dtype=dtype) if values else torch.empty(0, dtype=dtype)
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride))
    if shape != sizes or len(stride) != len(shape) or last >= flat.numel():
        raise ValueError(f"a tensor of shape {shown(str(shape))} in an archive where {list(sizes)} belongs")
    return flat.as_strided(shape, stride, offset)


def _record(archive: zipfile.ZipFile, name: str, most: int) -> bytes:
    record = archive.getinfo(name)
    if record.compress_type != zipfile.ZIP_STORED or record.file_size > most:
        raise ValueError("an archive that is compressed, or larger than its file")
    return archive.read(record)


def _tensor(content: Any, dtype: torch.dtype) -> tuple[str, int, tuple[int, ...], tuple[int, ...]]:
    """The number of the record that holds a tensor's values; offset, shape and stride in elements."""
    if not isinstance(content, Made) or content.name != TENSOR or len(content.arguments) < 4:
        raise ValueError("an archive of something else than a tensor")
    storage, offset, shape, stride = content.arguments[:4]
    if not isinstance(storage, Made) or storage.name != PERSISTENT:
        raise ValueError("a tensor whose values are not in its archive")
    _, kind, number, *_ = expect(tuple, storage.arguments)
    if STORAGES.get(expect(Name, kind).name) != dtype:
        raise ValueError(f"a {shown(kind.name)} in an archive where {dtype} belongs")
    sizes, steps = (tuple(map(count, expect(tuple, numbers))) for numbers in (shape, stride))
    return expect(str, number), count(offset), sizes, steps


def _state(value: Any, name: str) -> dict[str, Any]:
    """The fields of an object that torch wrote as the class `name`."""
    if not isinstance(value, Made) or value.name != name:
        raise ValueError(f"something else where a {name} belongs")
    return _Fields(expect(Pairs, value.state).named())


class _Fields(dict):
    def __missing__(self, name: str) -> Any:
        raise ValueError(f"an object without {name}")


def _size(value: Any) -> list[int]:
    if not isinstance(value, Made) or value.name != "torch.Size":
        raise ValueError("something else where a shape belongs")
    (sizes,) = value.arguments or ((),)
    return list(map(count, expect(tuple, sizes)))
