"""The embedding tables of a model, joined into one, in float32, float16 or int8.

int8 is uint8 with a scale and a minimum for each row: a row x becomes q = round((x − min) / scale)
with scale = (max − min) / 255, as in FBGEMM's 8-bit row-wise quantization (Guan et al. 2019, "Post-
Training 4-bit Quantization on Embedding Tables", arXiv:1911.02079, §2). So the error of a value is
half a scale at most. Rows are converted to float32 after the lookup; sums are float32.
"""

from __future__ import annotations

import dataclasses

import torch
from torch.nn import functional

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.base.files.mapping import MappedArray

KINDS = {"float32": torch.float32, "float16": torch.float16, "int8": torch.uint8}
_LARGEST_FLOAT16 = 65504.0
_CHUNK_ROWS = 1 << 18


@dataclasses.dataclass(frozen=True)
class Table:
    """The rows of all tables.

    Attributes:
        values: [rows, embedding dim], of a type of :data:`KINDS`.
        ranges: Float32 [rows, 2], scale and minimum of each row, for int8; else None.
        mapped: The mapped files that hold them; empty if they are in memory.
    """

    values: torch.Tensor
    ranges: torch.Tensor | None = None
    mapped: tuple[MappedArray, ...] = ()

    @property
    def kind(self) -> str:
        """The type, a key of :data:`KINDS`."""
        return next(kind for kind, dtype in KINDS.items() if dtype == self.values.dtype)

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self.values.device

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return self.values.nbytes + (0 if self.ranges is None else self.ranges.nbytes)

    def to(self, device: torch.device) -> Table:
        """Return the table on a device; this one if it is there already."""
        if torch.device(device) == self.device:
            return self
        ranges = None if self.ranges is None else self.ranges.to(device)
        return Table(self.values.to(device), ranges)

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """Look up rows: float32 [*, embedding dim] of an index int64 [*]."""
        values = functional.embedding(index, self.values)
        if self.ranges is not None:
            ranges = functional.embedding(index, self.ranges)
            return torch.addcmul(ranges[..., 1:], values.float(), ranges[..., :1])
        return values.float()

    def sums(self, index: torch.Tensor, begins: torch.Tensor) -> torch.Tensor:
        """Return sums of rows, float32 [bags, embedding dim].

        Args:
            index: Int64 [n], the rows of all bags.
            begins: Int64 [bags], the position in ``index`` at which each bag begins.
        """
        if self.kind == "float32":
            return functional.embedding_bag(index, self.values, begins, mode="sum")
        end = torch.tensor([len(index)], device=index.device)
        bag = torch.repeat_interleave(torch.diff(begins, append=end), output_size=len(index))
        sums = torch.zeros(len(begins), self.values.shape[1], device=index.device)
        return sums.index_add_(0, bag, self.rows(index))

    def convert(self, kind: str) -> Table:
        """Return the table in another type; this one if it is of that type already.

        Raises:
            SettingsError: The table is not float32, or has values that the type cannot hold.
        """
        if kind == self.kind:
            return self
        if self.kind != "float32":
            raise SettingsError(
                f"the tables are {self.kind} and cannot become {kind}",
                "make the bundle again, from the checkpoint",
            )
        rows, width = self.values.shape
        values = torch.empty(rows, width, dtype=KINDS[kind], device=self.device)
        ranges = torch.empty(rows, 2, device=self.device) if kind == "int8" else None
        for at in range(0, rows, _CHUNK_ROWS):
            rows_here = slice(at, at + _CHUNK_ROWS)
            chunk = self.values[rows_here]
            if kind == "float16" and not bool((chunk.abs() <= _LARGEST_FLOAT16).all()):
                raise SettingsError(
                    f"a weight is larger than {_LARGEST_FLOAT16:g}, the largest float16",
                    "use float32 or int8",
                )
            if ranges is None:
                values[rows_here] = chunk
            else:
                values[rows_here], ranges[rows_here] = _quantize(chunk)
        return Table(values, ranges)


def _quantize(chunk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    low, high = chunk.amin(1, keepdim=True), chunk.amax(1, keepdim=True)
    scale = (high - low) / 255
    steps = (chunk - low) / torch.where(scale > 0, scale, 1)
    return steps.round_().clamp_(0, 255).to(torch.uint8), torch.cat([scale, low], 1)
