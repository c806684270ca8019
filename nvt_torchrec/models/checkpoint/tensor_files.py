"""Read the tensors of a checkpoint, whose locations in the files are in ``tensors.json``.

torch.distributed.checkpoint describes its files in ``.metadata``, which is a pickle, and unpickling
may run arbitrary code. So ``tensors.json`` contains the same information, and ``.metadata`` is only
for torch's tools.

Tensors are read by ``torch.load(weights_only=True)``, whatever the world size and the sharding plan
of the run that wrote them: a rank reads the chunks that overlap with its own parts, each once.
"""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.utils import _create_file_view

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.base.files.atomic import read_json, write_json
from nvt_torchrec.base.files.validation import parse
from nvt_torchrec.models.checkpoint.record import AGAIN, TENSORS_FILE

#: The dtypes of tensors by their names in ``tensors.json``.
_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
#: The names of torch's files. Other names might lead out of the checkpoint's directory.
_FILE_NAME = re.compile(r"__\d+_\d+\.distcp")


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A part of a tensor, and the location of its bytes.

    Attributes:
        offsets: Its first index in each dimension of the tensor.
        sizes: Its size in each dimension.
        file: The name of its file in the checkpoint's directory.
        begin: The offset of its bytes in the file.
        length: The number of its bytes.
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
    """A tensor of a checkpoint.

    Attributes:
        dtype: The name of its dtype.
        size: Its size in each dimension.
        chunks: The parts that it consists of.
    """

    dtype: str
    size: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES or min(self.size, default=0) < 0:
            raise ValueError(f"a tensor {self.dtype!r:.60} {list(self.size)}")
        total = 0
        for chunk in self.chunks:
            numbers = math.prod(chunk.sizes)
            is_stored = chunk.length >= numbers * _DTYPES[self.dtype].itemsize
            if not self._contains(chunk) or not is_stored:
                raise ValueError(
                    f"{chunk} is not a part of a tensor {self.dtype} {list(self.size)}"
                )
            total += numbers
        if total != math.prod(self.size):
            raise ValueError(f"the parts of a tensor {list(self.size)} have {total} numbers")

    def _contains(self, chunk: Chunk) -> bool:
        """Return whether a chunk is inside of the tensor in each dimension."""
        if not len(chunk.offsets) == len(chunk.sizes) == len(self.size):
            return False
        for offset, length, size in zip(chunk.offsets, chunk.sizes, self.size, strict=True):
            if not 0 <= offset <= offset + length <= size:
                return False
        return True


Tensors = dict[str, StoredTensor]


def write_tensors(directory: Path, metadata: Metadata) -> None:
    """Write ``tensors.json`` for the files that torch has written and ``metadata`` describes."""
    storage: dict[tuple[str, tuple[int, ...]], Any] = {}
    for index, info in metadata.storage_data.items():
        storage[index.fqn, tuple(index.offset or ())] = info
    tensors = {}
    described: dict[str, Any] = metadata.state_dict_metadata
    for name, tensor in described.items():
        chunks = []
        for chunk in tensor.chunks:
            offsets = tuple(chunk.offsets)
            sizes = tuple(chunk.sizes)
            info = storage[name, offsets]
            chunks.append(Chunk(offsets, sizes, info.relative_path, info.offset, info.length))
        dtype = str(tensor.properties.dtype).removeprefix("torch.")
        tensors[name] = StoredTensor(dtype, tuple(tensor.size), tuple(chunks))
    content = {name: dataclasses.asdict(tensor) for name, tensor in tensors.items()}
    write_json(directory / TENSORS_FILE, content)


def read_tensors(directory: Path) -> Tensors:
    """Return the tensors of a checkpoint by name, after checking their locations in the files.

    Raises:
        BadInputError: The checkpoint is damaged, or contains something other than tensors.
    """
    file = directory / TENSORS_FILE
    value = read_json(file, "a checkpoint's tensors", AGAIN)
    tensors = parse(dict[str, StoredTensor], value, file, AGAIN)
    check_locations(directory, tensors)
    return tensors


def check_locations(directory: Path, tensors: Tensors) -> None:
    """Check that all chunks are in existing files and do not share bytes.

    So all tensors together are not larger than the files, even if ``tensors.json`` was tampered
    with.

    Raises:
        BadInputError: A file is missing or too short, or two chunks share bytes.
    """
    chunks: list[Chunk] = []
    for tensor in tensors.values():
        chunks += tensor.chunks
    ends: dict[str, int] = {}
    shared = None
    for chunk in sorted(chunks, key=lambda chunk: (chunk.file, chunk.begin, chunk.length)):
        if chunk.begin < ends.get(chunk.file, 0):
            shared = chunk
        ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.begin + chunk.length)
    for file, end in ends.items():
        if not (directory / file).is_file() or (directory / file).stat().st_size < end:
            raise BadInputError(f"{directory / file}: missing or too short", AGAIN)
    if shared:
        raise BadInputError(
            f"{directory / shared.file}: two chunks share the bytes from {shared.begin} on", AGAIN
        )


@dataclasses.dataclass(frozen=True)
class Window:
    """A rectangular part of a stored tensor, and the tensor to read it into.

    Attributes:
        name: The name of the stored tensor.
        offsets: The first index of the part in each dimension.
        target: The tensor to read into, which has the size of the part.
    """

    name: str
    offsets: tuple[int, ...]
    target: torch.Tensor


def read_windows(path: Path, tensors: Tensors, windows: list[Window]) -> None:
    """Read windows of a checkpoint's tensors. Each chunk of the files is read once.

    Raises:
        BadInputError: The checkpoint is damaged: the chunks do not cover a window, or a chunk does
            not have the size in ``tensors.json``.
        OSError, EOFError, RuntimeError, pickle.UnpicklingError: A chunk cannot be read.
    """
    wanted: dict[Chunk, list[Window]] = {}
    for window in windows:
        # Chunks do not overlap, so the sizes of their intersections with the window add up.
        covered = 0
        for chunk in tensors[window.name].chunks:
            sizes = [end - begin for begin, end in _intersect(chunk, window)]
            if all(size > 0 for size in sizes):
                wanted.setdefault(chunk, []).append(window)
                covered += int(np.prod(sizes, dtype=np.int64))
        if covered != window.target.numel():
            raise BadInputError(
                f"{path}: {window.name} has no values from {list(window.offsets)} on", AGAIN
            )
    for chunk, overlapping in wanted.items():
        tensor = read_chunk(path, chunk)
        for window in overlapping:
            source = tensor
            target = window.target
            for dim, (begin, end) in enumerate(_intersect(chunk, window)):
                source = source.narrow(dim, begin - chunk.offsets[dim], end - begin)
                target = target.narrow(dim, begin - window.offsets[dim], end - begin)
            target.copy_(source)


def read_chunk(path: Path, chunk: Chunk) -> torch.Tensor:
    """Read a chunk into main memory. It raises the same errors as :func:`read_windows`."""
    with open(path / chunk.file, "rb") as stream:
        part: Any = _create_file_view(stream, chunk.begin, chunk.length)
        tensor = torch.load(part, map_location="cpu", weights_only=True)
    if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != chunk.sizes:
        raise BadInputError(
            f"{path / chunk.file}: the bytes from {chunk.begin} on are not a tensor "
            f"{list(chunk.sizes)}",
            AGAIN,
        )
    return tensor


def _intersect(chunk: Chunk, window: Window) -> list[tuple[int, int]]:
    """Return the common indices [begin, end) of a chunk and a window in each dimension.

    If they have no index in common, end is not greater than begin.
    """
    overlap = []
    for dim, size in enumerate(window.target.shape):
        begin = max(chunk.offsets[dim], window.offsets[dim])
        end = min(chunk.offsets[dim] + chunk.sizes[dim], window.offsets[dim] + size)
        overlap.append((begin, end))
    return overlap
