"""The trained model, arranged for scoring: one joined table of all embeddings, and the head.

TorchRec looks up one table after the other, which for a single row takes longer than everything
else together. Here all tables are one tensor, so that one lookup serves all columns. The head,
everything after the lookup, is the module that was trained; in bundles of a custom model it is
the ONNX file that PyTorch's exporter made of the module (:mod:`models.onnx_head`). TorchRec is not
imported.

In int8 tables, a row x is stored as uint8 q = round((x − min) / scale) with scale = (max − min) /
255, as in FBGEMM's 8-bit row-wise quantization (Guan et al. 2019, "Post-Training 4-bit Quantization
on Embedding Tables", arXiv:1911.02079, §2). So the error of a value is at most half of its row's
scale. Weights of the linear term are far larger than the other values of a row, and stay float32.
Rows are converted to float32 after the lookup; sums are float32.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import torch
from numba import types
from torch.nn import functional

from nvt_torchrec.base.errors import SchemaError, SettingsError
from nvt_torchrec.base.files.mapping import MappedArray
from nvt_torchrec.base.kernels import compiled
from nvt_torchrec.formats.ids import Ids
from nvt_torchrec.inference.model.torch_threads import ONE_THREAD_ROWS
from nvt_torchrec.models.config import ModelConfig
from nvt_torchrec.models.contract import fold_ids, stack_raw_inputs
from nvt_torchrec.models.head import Head
from nvt_torchrec.models.onnx_head import OnnxHead

#: Type of the embeddings → type of the tensor that holds them.
KINDS = {"float32": torch.float32, "float16": torch.float16, "int8": torch.uint8}
_MAX_FLOAT16 = 65504.0
#: The rows that are converted at once; limits the memory for float32 copies.
_CHUNK_ROWS = 1 << 18


@dataclasses.dataclass(frozen=True)
class JoinedTable:
    """The rows of all tables, one table after the other.

    Attributes:
        values: [rows, embedding dim], of a type in :data:`KINDS`.
        ranges: For int8, float32 [rows, 2 or more]: scale and minimum of each row, followed by the
            row's weights of the linear term, which are its first values. Otherwise None.
        mapped: The mapped files of the tensors; empty if the tensors are in memory.
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

    def to(self, device: torch.device) -> JoinedTable:
        """Return the table on a device; this object if it is on that device."""
        if torch.device(device) == self.device:
            return self
        ranges = None if self.ranges is None else self.ranges.to(device)
        return JoinedTable(self.values.to(device), ranges)

    def look_up(self, indices: torch.Tensor) -> torch.Tensor:
        """Look up rows by their indices, int64 [*]; return float32 [*, embedding dim]."""
        values = functional.embedding(indices, self.values)
        if self.ranges is None:
            return values.float()
        ranges = functional.embedding(indices, self.ranges)
        scale = ranges[..., :1]
        minimum = ranges[..., 1:2]
        values = torch.addcmul(minimum, values.float(), scale)
        num_exact = ranges.shape[-1] - 2
        if num_exact:
            values[..., :num_exact] = ranges[..., 2:]
        return values

    def sum_bags(self, indices: torch.Tensor, begins: torch.Tensor) -> torch.Tensor:
        """Sum the rows of each bag, float32 [bags, embedding dim].

        Args:
            indices: Int64 [n], the rows of all bags, one bag after the other.
            begins: Int64 [bags], the position in ``indices`` at which each bag begins.
        """
        if self.kind == "float32":
            return functional.embedding_bag(indices, self.values, begins, mode="sum")
        # embedding_bag cannot convert rows: convert them first, then sum the converted ones.
        rows = self.look_up(indices)
        positions = torch.arange(len(indices), device=indices.device)
        return functional.embedding_bag(positions, rows, begins, mode="sum")

    def convert(self, kind: str, num_exact: int = 0) -> JoinedTable:
        """Return the table in another type; this object if it already has that type.

        Args:
            kind: The type, a key of :data:`KINDS`.
            num_exact: The number of values at the start of each row, weights of the linear term,
                that stay float32 in an int8 table.

        Raises:
            SettingsError: The table is not float32, or has values that the type cannot hold.
        """
        if kind == self.kind:
            return self
        if self.kind != "float32":
            raise SettingsError(
                f"the tables are {self.kind} and cannot be converted to {kind}",
                "make the bundle again from the checkpoint",
            )
        rows, width = self.values.shape
        values = torch.empty(rows, width, dtype=KINDS[kind], device=self.device)
        ranges = None
        if kind == "int8":
            ranges = torch.empty(rows, 2 + num_exact, device=self.device)
        for begin in range(0, rows, _CHUNK_ROWS):
            part = slice(begin, begin + _CHUNK_ROWS)
            chunk = self.values[part]
            if kind == "float16" and not bool((chunk.abs() <= _MAX_FLOAT16).all()):
                raise SettingsError(
                    f"a weight is larger than {_MAX_FLOAT16:g}, the largest float16",
                    "use float32 or int8",
                )
            if ranges is None:
                values[part] = chunk
                continue
            if num_exact:
                # Replace the large weights of the linear term by zeros: they would widen the range
                # of the row, and so increase the error of its other values.
                ranges[part, 2:] = chunk[:, :num_exact]
                chunk = functional.pad(chunk[:, num_exact:], (num_exact, 0))
            values[part], ranges[part, :2] = _quantize(chunk)
        return JoinedTable(values, ranges)


@dataclasses.dataclass(frozen=True)
class ServingModel:
    """A trained model whose tables are joined into one.

    Attributes:
        table: The rows of all tables.
        first: Int64 [features], the row of ``table`` at which the table of each feature begins.
        head: The layers after the lookup, as in training.
        config: The columns, labels and layers.
    """

    table: JoinedTable
    first: torch.Tensor
    head: Head | OnnxHead
    config: ModelConfig

    @classmethod
    def make(cls, table: JoinedTable, config: ModelConfig, head: Head | OnnxHead) -> ServingModel:
        """Make a model of its parts."""
        begins: dict[str, int] = {}
        num_rows = 0
        for name, rows in config.tables.items():
            begins[name] = num_rows
            num_rows += rows
        columns = config.features.values()
        first = torch.tensor([begins[config.table_by_column[column]] for column in columns])
        head.eval().requires_grad_(False)
        if isinstance(head, Head) and head.dense_vectors is not None:
            head.dense_vectors.fold()
        # nn.Module finds parameters and modules through __getattr__, which Python calls last.
        # Stored as plain attributes, they are found in a third of the time. Scoring a row takes
        # dozens of such accesses.
        for module in head.modules():
            vars(module).update({**module._parameters, **module._buffers, **module._modules})
        return cls(table, first.to(table.device), head, config)

    def convert(self, kind: str) -> ServingModel:
        """Return the model with its table in another type, as :meth:`JoinedTable.convert` does."""
        return dataclasses.replace(
            self, table=self.table.convert(kind, self.config.first_order_width)
        )

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.table.device

    def lookup(self, ids: Ids) -> torch.Tensor:
        """Look up embeddings, float32 [rows, features, embedding dim].

        As in training, the embeddings of a list are summed, and those of a history's newest events
        are averaged. The columns of histories follow the others. If ``ids`` lacks them, all
        histories are empty.

        Raises:
            BadInputError: The file of a mapped table was written to since it was opened.
        """
        for array in self.table.mapped:
            array.check()
        num_columns = len(self.config.categorical)
        if ids.count > num_columns:
            ids = ids.take_newest(num_columns, self.config.max_events)
        if ids.offsets is not None and len(ids) <= ONE_THREAD_ROWS and self._host_arrays:
            # The compiled loop takes a tenth of the time of PyTorch's calls for a single row.
            return self._sum_few_rows(ids, *self._host_arrays)
        first = self.first[: ids.count]
        if ids.offsets is None:
            vectors = self.table.look_up(torch.from_numpy(ids.values).to(self.device).T + first)
        else:
            vectors = self._sum_lists(ids, first)
        num_empty = len(self.first) - ids.count
        return functional.pad(vectors, (0, 0, 0, num_empty)) if num_empty else vectors

    def _sum_lists(self, ids: Ids, first: torch.Tensor) -> torch.Tensor:
        """Look up ids with offsets, as :meth:`lookup` does, [rows, columns, embedding dim]."""
        assert ids.offsets is not None
        num_columns = len(self.config.categorical)
        sizes = torch.from_numpy(ids.offsets[:, -1] - ids.offsets[:, 0]).to(self.device)
        rows = torch.from_numpy(ids.values).to(self.device) + first.repeat_interleave(sizes)
        begins = torch.from_numpy(ids.offsets[:, :-1].astype(np.int64)).to(self.device)
        sums = self.table.sum_bags(rows, begins.view(-1)).view(*begins.shape, -1)
        if ids.count > num_columns:
            counts = torch.from_numpy(ids.get_lengths(num_columns).clip(1))
            sums[num_columns:] /= counts.to(sums).unsqueeze(2)
        return sums.transpose(0, 1)

    @functools.cached_property
    def _host_arrays(self) -> tuple[np.ndarray, np.ndarray] | None:
        """The table and ``first`` for :func:`sum_embeddings`; None if the table is unsuitable."""
        values = self.table.values
        if not (values.is_cpu and values.dtype == torch.float32 and values.is_contiguous()):
            return None
        return values.numpy(), self.first.numpy()

    def _sum_few_rows(self, ids: Ids, table: np.ndarray, first: np.ndarray) -> torch.Tensor:
        """Look up ids with offsets, as :meth:`lookup` does, in a compiled loop."""
        assert ids.offsets is not None
        sums = np.zeros((len(ids), len(first), table.shape[1]), np.float32)
        values = ids.values.astype(np.int64)
        offsets = ids.offsets.astype(np.int64)
        if not sum_embeddings(table, first, len(self.config.categorical), values, offsets, sums):
            raise IndexError(f"an id is outside the table of {len(table)} rows")
        return torch.from_numpy(sums)

    def fold(self, ids: Ids) -> Ids:
        """Map ids to the rows of their tables, which several ids share with ``hash_indices``."""
        if not self.config.hash_indices:
            return ids
        rows = np.array(self.config.feature_rows[: ids.count])
        if ids.offsets is None:
            rows = rows[:, np.newaxis]
        else:
            rows = rows.repeat(ids.offsets[:, -1] - ids.offsets[:, 0])
        folded = fold_ids(torch.from_numpy(ids.values), torch.from_numpy(rows))
        return dataclasses.replace(ids, values=folded.numpy())

    def read_raw_inputs(self, ids: Ids) -> dict[str, torch.Tensor]:
        """Return the model's additional inputs, by name (:mod:`models.contract`).

        Raises:
            SchemaError: The model takes the ids of a column, but a row has no id or several.
        """
        find_column = self.config.categorical.index

        def read_lengths(name: str) -> torch.Tensor:
            return torch.from_numpy(ids.lengths[find_column(name)]).to(self.device)

        def read_ids(name: str) -> torch.Tensor:
            if (read_lengths(name) != 1).any():
                raise SchemaError(
                    f"column {name}: the model takes its ids, but a row has no id or several",
                    "pass one id for each row",
                )
            return torch.from_numpy(ids.column(find_column(name))).to(self.device)

        more = stack_raw_inputs(self.head.raw_columns, ids=read_ids, lengths=read_lengths)
        if self.config.lists:
            more["lists"], more["present"] = self._look_up_events(ids)
        return more

    def _look_up_events(self, ids: Ids) -> tuple[torch.Tensor, torch.Tensor]:
        """Look up the newest events of the histories that the model takes as lists.

        Returns:
            Their embeddings, float32 [rows, lists, max_events, embedding dim], 0 for events that do
            not exist; and a mask of the events that exist, bool [rows, lists, max_events].
        """
        max_events = self.config.max_events
        shape = len(self.config.lists), len(ids), max_events
        event_ids = np.zeros(shape, np.int64)
        present = np.zeros(shape, bool)
        features = [*self.config.features]
        columns = [features.index(name) for name in self.config.lists]
        if ids.count == len(features):  # otherwise all histories are empty
            for j, column in enumerate(columns):
                event_ids[j], present[j] = ids.pad(column, max_events)
        first = self.first[columns].view(-1, 1, 1)
        embedded = self.table.look_up(torch.from_numpy(event_ids).to(self.device) + first)
        exists = torch.from_numpy(present).to(self.device)
        return (embedded * exists.unsqueeze(3)).transpose(0, 1), exists.transpose(0, 1)

    def compute_logits(
        self,
        dense: np.ndarray,
        embedded: torch.Tensor,
        ids: Ids,
        dense_vectors: np.ndarray | None = None,
    ) -> torch.Tensor:
        """Return logits, float32 [rows, labels].

        Args:
            dense: The dense values, float32 [dense columns, rows].
            embedded: The result of :meth:`lookup` for ``ids``.
            ids: The ids of the rows.
            dense_vectors: The vectors of the rows, each followed by its indicator, float32
                [rows, ``config.vector_inputs``]; required if the model takes any.
        """
        values = torch.from_numpy(dense).to(self.device).T
        more = self.read_raw_inputs(ids)
        if dense_vectors is None:
            return self.head(values, embedded, more)
        return self.head(values, embedded, more, torch.from_numpy(dense_vectors).to(self.device))


def _quantize(chunk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize rows to uint8 [rows, D]; return them, and scale and minimum, float32 [rows, 2]."""
    low = chunk.amin(1, keepdim=True)
    high = chunk.amax(1, keepdim=True)
    scale = (high - low) / 255
    steps = (chunk - low) / torch.where(scale > 0, scale, 1)
    return steps.round_().clamp_(0, 255).to(torch.uint8), torch.cat([scale, low], 1)


_READ_INT64 = types.Array(types.int64, 1, "C", readonly=True)


@compiled(
    types.boolean(
        types.Array(types.float32, 2, "C", readonly=True),
        _READ_INT64,
        types.int64,
        _READ_INT64,
        types.Array(types.int64, 2, "C", readonly=True),
        types.Array(types.float32, 3, "C"),
    )
)
def sum_embeddings(
    table: np.ndarray,
    first: np.ndarray,
    num_columns: int,
    ids: np.ndarray,
    offsets: np.ndarray,
    out: np.ndarray,
) -> bool:
    """Sum embeddings in the order of the ids, as PyTorch's ``embedding_bag`` does.

    Args:
        table: Float32 [table rows, embedding dim].
        first: Int64 [features], the row at which the table of each feature begins.
        num_columns: The number of features before those of histories. The sums of histories are
            divided by their number of ids.
        ids: Int64 [all ids], feature by feature.
        offsets: Int64 [features, rows + 1], the positions in ``ids`` at which the ids of each row
            begin and end.
        out: Float32 [rows, features, embedding dim], zeros to which the sums are added.

    Returns:
        False if an id is outside the table.
    """
    for j in range(len(offsets)):
        for i in range(offsets.shape[1] - 1):
            begin, end = offsets[j, i], offsets[j, i + 1]
            for k in range(begin, end):
                row = first[j] + ids[k]
                if not 0 <= row < len(table):
                    return False
                for d in range(table.shape[1]):
                    out[i, j, d] += table[row, d]
            if j >= num_columns and end - begin > 1:
                for d in range(table.shape[1]):
                    out[i, j, d] /= np.float32(end - begin)
    return True
