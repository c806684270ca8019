"""Where the tensors of a checkpoint are, ``tensors.json``, and reading parts of them.

torch.distributed.checkpoint keeps what is where in ``.metadata``, a pickle, and unpickling runs the
code that a pickle names. So ``tensors.json`` holds the same, and ``.metadata`` is left to torch's
tools.
Tensors are read by ``torch.load(weights_only=True)``, whatever the world size and the sharding plan
that they were written with: a rank reads the chunks that its own parts overlap, each once.
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
    """A part of a tensor, and where its bytes are.

    Attributes:
        offsets: Its first index in each dimension of the tensor.
        sizes: Its size in each dimension.
        file: The name of the file that holds it, in the checkpoint's directory.
        begin, length: Its bytes in the file.
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
            minimum = math.prod(chunk.sizes) * _DTYPES[self.dtype].itemsize
            if not inside or chunk.length < minimum:
                raise ValueError(
                    f"{chunk} is not a part of a tensor {self.dtype} {list(self.size)}"
                )
        together = sum(math.prod(chunk.sizes) for chunk in self.chunks)
        if together != math.prod(self.size):
            raise ValueError(f"its parts have {together} numbers, not those of {list(self.size)}")


Tensors = dict[str, StoredTensor]


def write_tensors(directory: Path, metadata: Metadata) -> None:
    """Write ``tensors.json`` for what torch has written and describes by ``metadata``."""
    stored = {
        (index.fqn, tuple(index.offset or ())): where
        for index, where in metadata.storage_data.items()
    }
    tensors = {}
    described: dict[str, Any] = metadata.state_dict_metadata
    for name, tensor in described.items():
        chunks = []
        for chunk in tensor.chunks:
            offsets = tuple(chunk.offsets)
            where = stored[name, offsets]
            sizes, file = tuple(chunk.sizes), where.relative_path
            chunks.append(Chunk(offsets, sizes, file, where.offset, where.length))
        dtype = str(tensor.properties.dtype).removeprefix("torch.")
        tensors[name] = StoredTensor(dtype, tuple(tensor.size), tuple(chunks))
    content = {name: dataclasses.asdict(tensor) for name, tensor in tensors.items()}
    write_json(directory / TENSORS_FILE, content)


def read_tensors(directory: Path) -> Tensors:
    """Return the tensors of a checkpoint by name, checked: each has bytes of its own.

    Raises:
        BadInputError: The checkpoint is damaged, or holds other things than tensors.
    """
    file = directory / TENSORS_FILE
    value = read_json(file, "a checkpoint's tensors", AGAIN)
    tensors = parse(dict[str, StoredTensor], value, file, AGAIN)
    check_places(directory, tensors)
    return tensors


def check_places(directory: Path, tensors: Tensors) -> None:
    """Check that each chunk has bytes of its own, so that no tensor is larger than what is stored.

    Raises:
        BadInputError: A file is missing or too short, or two chunks share bytes.
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
            raise BadInputError(f"{directory / file}: missing or too short", AGAIN)
    if shared:
        what = f"{directory / shared.file}: two chunks share the bytes from {shared.begin} on"
        raise BadInputError(what, AGAIN)


@dataclasses.dataclass(frozen=True)
class Window:
    """A rectangle of a stored tensor, and where it is read to.

    Attributes:
        name: The name of the tensor in the checkpoint.
        offsets: Its first index in each dimension.
        target: A tensor of its size.
    """

    name: str
    offsets: tuple[int, ...]
    target: torch.Tensor


def read_windows(path: Path, tensors: Tensors, windows: list[Window]) -> None:
    """Read windows of a checkpoint's tensors; each chunk is read once.

    Raises:
        BadInputError: The checkpoint is damaged: chunks do not cover a window, or hold other
            tensors than ``tensors.json`` says.
        OSError, EOFError, RuntimeError, pickle.UnpicklingError: A chunk cannot be read.
    """
    wanted: dict[Chunk, list[Window]] = {}
    for window in windows:
        covered = 0
        for chunk in tensors[window.name].chunks:
            sizes = [end - begin for begin, end in _overlap(chunk, window)]
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
            source, target = tensor, window.target
            for dim, (begin, end) in enumerate(_overlap(chunk, window)):
                source = source.narrow(dim, begin - chunk.offsets[dim], end - begin)
                target = target.narrow(dim, begin - window.offsets[dim], end - begin)
            target.copy_(source)


def read_chunk(path: Path, chunk: Chunk) -> torch.Tensor:
    """Read a part of a tensor to main memory; see :func:`read_windows` for errors."""
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


def _overlap(chunk: Chunk, window: Window) -> list[tuple[int, int]]:
    """Return the indices that a chunk and a window have in common, by dimension."""
    return [
        (max(a, b), min(a + m, b + n))
        for a, m, b, n in zip(
            chunk.offsets, chunk.sizes, window.offsets, window.target.shape, strict=True
        )
    ]
