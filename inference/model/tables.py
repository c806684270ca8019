"""The embedding tables of a model as one, in float32, float16 or int8.

int8 is uint8 with a scale and a minimum for each row: of a row x, q = round((x − min) / scale) with
scale = (max − min) / 255, as FBGEMM's 8-bit row-wise quantization has it (Guan et al. 2019, "Post-
Training 4-bit Quantization on Embedding Tables", arXiv:1911.02079, §2), so a value is off by half a
scale at most. Rows are looked up as they are and become float32 afterwards; sums are float32.
"""

from __future__ import annotations

import dataclasses

import torch
from torch.nn import functional

from clicklog.errors import SettingsError
from clicklog.files.mapping import MappedArray

KINDS = {"float32": torch.float32, "float16": torch.float16, "int8": torch.uint8}
_LARGEST_FLOAT16 = 65504.0
_CHUNK_ROWS = 1 << 18


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of all tables.

    Attributes:
        values: [rows, embedding dim], of a type of :data:`KINDS`.
        ranges: float32 [rows, 2], scale and minimum of each row, for int8; else None.
        mapped: the files that these are mapped from, if they are.
    """

    values: torch.Tensor
    ranges: torch.Tensor | None = None
    mapped: tuple[MappedArray, ...] = ()

    @property
    def kind(self) -> str:
        """One of :data:`KINDS`."""
        return next(kind for kind, dtype in KINDS.items() if dtype == self.values.dtype)

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.values.device

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self.values.nbytes + (0 if self.ranges is None else self.ranges.nbytes)

    def to(self, device: torch.device) -> Table:
        """On another device; itself if it is there."""
        if torch.device(device) == self.device:
            return self
        ranges = None if self.ranges is None else self.ranges.to(device)
        return Table(self.values.to(device), ranges)

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """float32 [*, embedding dim] of int64 [*]."""
        values = functional.embedding(index, self.values)
        if self.ranges is not None:
            ranges = functional.embedding(index, self.ranges)
            return torch.addcmul(ranges[..., 1:], values.float(), ranges[..., :1])
        return values.float()

    def sums(self, index: torch.Tensor, begins: torch.Tensor) -> torch.Tensor:
        """Sums of rows, float32 [bags, embedding dim].

        Args:
            index: int64 [n], the rows of all bags.
            begins: int64 [bags], where in ``index`` each bag begins.
        """
        if self.kind == "float32":
            return functional.embedding_bag(index, self.values, begins, mode="sum")
        end = torch.tensor([len(index)], device=index.device)
        bag = torch.repeat_interleave(torch.diff(begins, append=end), output_size=len(index))
        sums = torch.zeros(len(begins), self.values.shape[1], device=index.device)
        return sums.index_add_(0, bag, self.rows(index))

    def convert(self, kind: str) -> Table:
        """In another type; itself if it is of that type.

        Raises:
            SettingsError: it is not float32, or holds what the type cannot.
        """
        if kind == self.kind:
            return self
        if self.kind != "float32":
            raise SettingsError(
                f"tables are {self.kind}, {kind} is asked for",
                "make the bundle again, from the checkpoint",
            )
        rows, width = self.values.shape
        values = torch.empty(rows, width, dtype=KINDS[kind], device=self.device)
        ranges = torch.empty(rows, 2, device=self.device) if kind == "int8" else None
        for at in range(0, rows, _CHUNK_ROWS):
            piece = slice(at, at + _CHUNK_ROWS)
            chunk = self.values[piece]
            if kind == "float16" and not bool((chunk.abs() <= _LARGEST_FLOAT16).all()):
                raise SettingsError(
                    f"a weight is beyond {_LARGEST_FLOAT16:g}, the largest float16",
                    "keep float32, or take int8",
                )
            if ranges is None:
                values[piece] = chunk
            else:
                values[piece], ranges[piece] = _quantize(chunk)
        return Table(values, ranges)


def _quantize(chunk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    low, high = chunk.amin(1, keepdim=True), chunk.amax(1, keepdim=True)
    scale = (high - low) / 255
    steps = (chunk - low) / torch.where(scale > 0, scale, 1)
    return steps.round_().clamp_(0, 255).to(torch.uint8), torch.cat([scale, low], 1)
