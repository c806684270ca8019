"""Where the tensors of a checkpoint are: ``tensors.json``, and the pickle of older checkpoints.

torch.distributed.checkpoint keeps that in ``.metadata``, a pickle, and unpickling runs the code
that a pickle names. ``tensors.json`` holds the same; reading a checkpoint uses nothing else. Of
checkpoints without it, ``.metadata`` is read into objects of this module that only hold data, which
then pass the same checks.

Both describe tensors only. torch.distributed.checkpoint would unpickle any other entry without
limits; it reads tensors by ``torch.load(weights_only=True)``.
"""

from __future__ import annotations

import dataclasses
import io
import math
import pickle
import re
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.base.files.atomic import read_json, write_json
from nvt_torchrec.base.files.validation import parse

TENSORS_FILE, PICKLE_FILE = "tensors.json", ".metadata"
_AGAIN = "the checkpoint is damaged: copy it again, or use another one"
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip
_FILE_NAME = re.compile(r"__\d+_\d+\.distcp")


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A part of a tensor, and the place of its bytes.

    Attributes:
        offsets: its first index in each dimension of the tensor.
        sizes: its size in each dimension.
        file: name of the file that holds it, in the checkpoint's directory.
        begin, length: its bytes in the file.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    begin: int
    length: int

    def __post_init__(self) -> None:
        if not _FILE_NAME.fullmatch(self.file):
            raise ValueError(f"{self.file!r:.60} is not a file of a checkpoint")
        if self.begin < 0 or self.length < 0:
            raise ValueError(f"{self.file}: bytes {self.begin} + {self.length}")


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint: a key of :data:`_DTYPES`, its size, and the parts it is made of."""

    dtype: str
    size: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES or min(self.size, default=0) < 0:
            raise ValueError(f"a tensor {self.dtype!r:.60} {list(self.size)}")
        for chunk in self.chunks:
            inside = len(chunk.offsets) == len(chunk.sizes) == len(self.size) and all(
                0 <= at <= at + n <= size
                for at, n, size in zip(chunk.offsets, chunk.sizes, self.size, strict=True)
            )
            least = math.prod(chunk.sizes) * _DTYPES[self.dtype].itemsize
            if not inside or chunk.length < least:
                raise ValueError(
                    f"{chunk} is not a part of a tensor {self.dtype} {list(self.size)}"
                )
        together = sum(math.prod(chunk.sizes) for chunk in self.chunks)
        if together != math.prod(self.size):
            raise ValueError(f"its parts have {together} numbers, not those of {list(self.size)}")


Tensors = dict[str, StoredTensor]


def write_tensors(directory: Path) -> None:
    """Write ``tensors.json`` beside the ``.metadata`` that torch has just written."""
    tensors = {name: dataclasses.asdict(item) for name, item in _read_pickle(directory).items()}
    write_json(directory / TENSORS_FILE, tensors)


def read_tensors(directory: Path) -> Tensors:
    """The tensors of a checkpoint, checked, by name.

    Raises:
        BadInputError: the checkpoint is damaged, or holds other things than tensors.
    """
    file = directory / TENSORS_FILE
    if not file.exists():
        return _read_pickle(directory)
    return parse(
        dict[str, StoredTensor], read_json(file, "a checkpoint's tensors", _AGAIN), file, _AGAIN
    )


def check_places(directory: Path, tensors: Tensors) -> None:
    """Check that each chunk has bytes of its own, so that no tensor is larger than what is stored.

    Raises:
        BadInputError: a file is missing or too short, or two chunks share bytes.
    """
    ends: dict[str, int] = {}
    chunks = [chunk for tensor in tensors.values() for chunk in tensor.chunks]
    shared = None
    for chunk in sorted(chunks, key=lambda chunk: (chunk.file, chunk.begin, chunk.length)):
        if chunk.begin < ends.get(chunk.file, 0):
            shared = chunk
        ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.begin + chunk.length)
    for file, end in ends.items():
        if not (directory / file).is_file() or (directory / file).stat().st_size < end:
            raise BadInputError(f"{directory / file}: missing or too short", _AGAIN)
    if shared:
        what = f"{directory / shared.file}: two chunks share the bytes from {shared.begin} on"
        raise BadInputError(what, _AGAIN)


class Reader(dcp.FileSystemReader):
    """Reads a checkpoint's tensors without unpickling anything to find them."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The place of every tensor. Raises :class:`BadInputError`."""
        directory = Path(self.path)
        described, stored = {}, {}
        tensors = read_tensors(directory)
        check_places(directory, tensors)
        for name, tensor in tensors.items():
            chunks = [ChunkStorageMetadata(_size(c.offsets), _size(c.sizes)) for c in tensor.chunks]
            properties = TensorProperties(dtype=_DTYPES[tensor.dtype])
            described[name] = TensorStorageMetadata(properties, _size(tensor.size), chunks)
            for chunk in tensor.chunks:
                place = _StorageInfo(chunk.file, chunk.begin, chunk.length)
                stored[MetadataIndex(name, chunk.offsets)] = place
        return Metadata(described, storage_data=stored)

    def read_chunk(self, chunk: Chunk) -> torch.Tensor:
        """Read a part of a tensor to main memory.

        Raises:
            BadInputError: it is not the part that ``tensors.json`` describes.
            OSError, EOFError, RuntimeError, pickle.UnpicklingError: it cannot be read.
        """
        place = _StorageInfo(chunk.file, chunk.begin, chunk.length)
        with open(Path(self.path) / chunk.file, "rb") as stream:
            part = self._slice_file(stream, place)
            tensor = torch.load(part, map_location="cpu", weights_only=True)
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != chunk.sizes:
            raise BadInputError(
                f"{Path(self.path) / chunk.file}: the bytes from {chunk.begin} on are not a tensor "
                f"{list(chunk.sizes)}",
                _AGAIN,
            )
        return tensor


def _size(numbers: tuple[int, ...]) -> torch.Size:
    return torch.Size(numbers)


# --- .metadata


class _Held:
    """An object of the pickle: the data it was made of, without behaviour."""

    arguments: tuple = ()
    state: Any = None

    def __new__(cls, *arguments: Any) -> _Held:
        held = super().__new__(cls)
        held.arguments = arguments
        return held

    def __setstate__(self, state: Any) -> None:
        self.state = state


#: The only names that torch's metadata may hold. Pickles of protocol 4 reach other modules by dots
#: in names, ``("torch.distributed.checkpoint.metadata", "os.system")``: no name here has a dot.
_KNOWN = frozenset(
    {
        *(("torch", name) for name in _DTYPES),
        ("torch", "Size"),
        ("torch", "device"),
        ("torch.serialization", "_get_layout"),
        ("torch._utils", "_get_layout"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("pathlib", "PosixPath"),
        ("collections", "OrderedDict"),
        *(
            ("torch.distributed.checkpoint.metadata", name)
            for name in (
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        ),
    }
)


class _Unpickler(pickle._Unpickler):
    """Makes only plain data and :class:`_Held`, and bounds memory by the size of the pickle.

    It is Python's, since the one in C allocates memory for the largest index in the pickle.
    """

    # a bytearray is allocated before its bytes are read; metadata holds none
    dispatch: ClassVar[dict[int, Any]] = {
        code: load
        for code, load in pickle._Unpickler.dispatch.items()
        if code != pickle.BYTEARRAY8[0]
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(f".metadata names {module}.{name}")
        if name in _DTYPES:
            return name
        return type(name, (_Held,), {})  # a new type: a pickle could set attributes of it


def _read_pickle(directory: Path) -> Tensors:
    file = directory / PICKLE_FILE
    try:
        value = _plain(_Unpickler(io.BytesIO(file.read_bytes())).load())
    except MemoryError:
        raise
    except Exception as error:  # a damaged pickle raises anything
        raise BadInputError(f"{file}: damaged: {error}", _AGAIN) from error
    return parse(dict[str, StoredTensor], value, file, _AGAIN)


def _plain(metadata: Any) -> dict[str, Any]:
    """The content of ``tensors.json``."""
    for name in metadata.state["state_dict_metadata"]:
        if not isinstance(name, str):
            raise ValueError(f"a tensor is named {name!r:.60}, which is not text")
    places = {}
    for index, place in metadata.state["storage_data"].items():
        found = place.state
        if found.get("transform_descriptors"):
            raise ValueError(f"{found['relative_path']} is transformed")
        key = index.state["fqn"], _numbers(index.state["offset"])
        places[key] = [found["relative_path"], found["offset"], found["length"]]
    return {
        name: {
            "dtype": tensor.state["properties"].state[0],
            "size": list(_numbers(tensor.state["size"])),
            "chunks": [_plain_chunk(name, chunk.state, places) for chunk in tensor.state["chunks"]],
        }
        for name, tensor in metadata.state["state_dict_metadata"].items()
    }


def _plain_chunk(name: str, chunk: dict[str, Any], places: dict) -> dict[str, Any]:
    offsets, sizes = _numbers(chunk["offsets"]), _numbers(chunk["sizes"])
    file, begin, length = places[name, offsets]
    return {
        "offsets": list(offsets),
        "sizes": list(sizes),
        "file": file,
        "begin": begin,
        "length": length,
    }


def _numbers(size: Any) -> tuple[int, ...]:
    """The numbers in a ``torch.Size``."""
    return tuple(size.arguments[0]) if size.arguments else ()
