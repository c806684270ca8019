"""The trained model, arranged for scoring: one table of all embeddings, and what follows it.

What follows the lookup is the module that was trained; in bundles of an own model it is the ONNX
file that PyTorch's exporter made of the module (:mod:`models.onnx_head`). TorchRec looks up one
table after the other, which for a single row takes longer than everything else together. Here all
tables are one tensor, and one lookup serves all columns. Nothing of TorchRec is imported.

In tables of int8, a row x is uint8 q = round((x − min) / scale) with scale = (max − min) / 255, as
in FBGEMM's 8-bit row-wise quantization (Guan et al. 2019, "Post-Training 4-bit Quantization on
Embedding Tables", arXiv:1911.02079, §2). So the error of a value is half a scale at most. A weight
of the linear term is far larger than the values beside it, and stays float32. Rows are converted to
float32 after the lookup; sums are float32.
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

#: The types of embeddings, and that of the tensor which holds them.
KINDS = {"float32": torch.float32, "float16": torch.float16, "int8": torch.uint8}
_MAX_FLOAT16 = 65504.0
#: Rows that are converted at once, so that the float32 copies of a part are all that is added.
_CHUNK_ROWS = 1 << 18


@dataclasses.dataclass(frozen=True)
class JoinedTable:
    """The rows of all tables.

    Attributes:
        values: [rows, embedding dim], of a type of :data:`KINDS`.
        ranges: Float32 [rows, 2 or more], scale and minimum of each row, for int8; else None. Any
            further ones are the first values of the row, weights of the linear term.
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

    def to(self, device: torch.device) -> JoinedTable:
        """Return the table on a device; this one if it is there already."""
        if torch.device(device) == self.device:
            return self
        ranges = None if self.ranges is None else self.ranges.to(device)
        return JoinedTable(self.values.to(device), ranges)

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """Look up rows: float32 [*, embedding dim] of an index int64 [*]."""
        values = functional.embedding(index, self.values)
        if self.ranges is not None:
            ranges = functional.embedding(index, self.ranges)
            scale, minimum = ranges[..., :1], ranges[..., 1:2]
            values = torch.addcmul(minimum, values.float(), scale)
            num_exact = ranges.shape[-1] - 2
            if num_exact:
                values[..., :num_exact] = ranges[..., 2:]
            return values
        return values.float()

    def sums(self, index: torch.Tensor, begins: torch.Tensor) -> torch.Tensor:
        """Return sums of rows, float32 [bags, embedding dim].

        Args:
            index: Int64 [n], the rows of all bags.
            begins: Int64 [bags], the position in ``index`` at which each bag begins.
        """
        if self.kind == "float32":
            return functional.embedding_bag(index, self.values, begins, mode="sum")
        # Rows of other types are converted first; then bags are made of the converted ones.
        rows = self.rows(index)
        positions = torch.arange(len(index), device=index.device)
        return functional.embedding_bag(positions, rows, begins, mode="sum")

    def convert(self, kind: str, exact: int = 0) -> JoinedTable:
        """Return the table in another type; this one if it is of that type already.

        The first ``exact`` values of each row, weights of the linear term, stay float32.

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
        ranges = None
        if kind == "int8":
            ranges = torch.empty(rows, 2 + exact, device=self.device)
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
            if exact:
                # Zeros in their place: these large values would widen the range of the others.
                ranges[part, 2:] = chunk[:, :exact]
                chunk = functional.pad(chunk[:, exact:], (exact, 0))
            values[part], ranges[part, :2] = _quantize(chunk)
        return JoinedTable(values, ranges)


@dataclasses.dataclass(frozen=True)
class ServingModel:
    """A trained model whose tables are joined into one.

    Attributes:
        table: The rows of all tables.
        first: Int64 [features], the row of ``table`` with which the table of each feature begins.
        head: What follows the lookup, as in training.
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
        first = torch.tensor(
            [begins[config.table_by_column[own]] for own in config.features.values()]
        )
        head.eval().requires_grad_(False)
        if isinstance(head, Head) and head.dense_vectors is not None:
            head.dense_vectors.fold()
        # nn.Module finds parameters and modules by __getattr__, which Python calls last. As plain
        # attributes they are found in a third of the time, and a row needs dozens of them.
        for module in head.modules():
            vars(module).update({**module._parameters, **module._buffers, **module._modules})
        return cls(table, first.to(table.device), head, config)

    def convert(self, kind: str) -> ServingModel:
        """Return the model with its table in another type, see :meth:`JoinedTable.convert`."""
        return dataclasses.replace(
            self, table=self.table.convert(kind, self.config.first_order_width)
        )

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.table.device

    def lookup(self, ids: Ids) -> torch.Tensor:
        """Look up embeddings, float32 [n, features, embedding dim].

        The embeddings of a list are summed, as in training. The columns of histories come after the
        others; their vector is the mean of the embeddings of the newest events. If ``ids`` has no
        columns of histories, all histories are empty.

        Raises:
            BadInputError: The file of a mapped table was written to since it was opened.
        """
        for array in self.table.mapped:
            array.check()
        num_columns = len(self.config.categorical)
        if ids.count > num_columns:
            ids = ids.take_newest(num_columns, self.config.max_events)
        if ids.offsets is not None and len(ids) <= ONE_THREAD_ROWS and self._host_arrays:
            # A loop of our own takes a tenth of the time that PyTorch's calls take for a row.
            return self._sum_few_rows(ids, *self._host_arrays)
        first = self.first[: ids.count]
        if ids.offsets is None:
            vectors = self.table.rows(torch.from_numpy(ids.values).to(self.device).T + first)
        else:
            vectors = self._sum_lists(ids, first)
        num_empty = len(self.first) - ids.count
        return functional.pad(vectors, (0, 0, 0, num_empty)) if num_empty else vectors

    def _sum_lists(self, ids: Ids, first: torch.Tensor) -> torch.Tensor:
        """Return what :meth:`lookup` returns of ids with offsets, [n, columns, embedding dim]."""
        assert ids.offsets is not None
        num_columns = len(self.config.categorical)
        sizes = torch.from_numpy(ids.offsets[:, -1] - ids.offsets[:, 0]).to(self.device)
        rows = torch.from_numpy(ids.values).to(self.device) + first.repeat_interleave(sizes)
        begins = torch.from_numpy(ids.offsets[:, :-1].astype(np.int64)).to(self.device)
        sums = self.table.sums(rows, begins.view(-1)).view(*begins.shape, -1)
        if ids.count > num_columns:
            counts = torch.from_numpy(ids.get_lengths(num_columns).clip(1))
            sums[num_columns:] /= counts.to(sums).unsqueeze(2)
        return sums.transpose(0, 1)

    @functools.cached_property
    def _host_arrays(self) -> tuple[np.ndarray, np.ndarray] | None:
        """The table and ``first`` as :func:`sum_embeddings` takes them; None for other tables."""
        values = self.table.values
        if not (values.is_cpu and values.dtype == torch.float32 and values.is_contiguous()):
            return None
        return values.numpy(), self.first.numpy()

    def _sum_few_rows(self, ids: Ids, table: np.ndarray, first: np.ndarray) -> torch.Tensor:
        """Return what :meth:`lookup` returns of ids with offsets."""
        assert ids.offsets is not None
        sums = np.zeros((len(ids), len(first), table.shape[1]), np.float32)
        values, offsets = ids.values.astype(np.int64), ids.offsets.astype(np.int64)
        if not sum_embeddings(table, first, len(self.config.categorical), values, offsets, sums):
            raise IndexError(f"an id outside of the table of {len(table)} rows")
        return torch.from_numpy(sums)

    def fold(self, ids: Ids) -> Ids:
        """Return ids as the rows of their tables, where ``hash_indices`` lets them share rows."""
        if not self.config.hash_indices:
            return ids
        rows = np.array(self.config.feature_rows[: ids.count])
        if ids.offsets is None:
            rows = rows[:, np.newaxis]
        else:
            rows = rows.repeat(ids.offsets[:, -1] - ids.offsets[:, 0])
        folded = fold_ids(torch.from_numpy(ids.values), torch.from_numpy(rows))
        return dataclasses.replace(ids, values=folded.numpy())

    def read_more_inputs(self, ids: Ids) -> dict[str, torch.Tensor]:
        """Return the further inputs that a model takes, by name (:mod:`models.contract`).

        Raises:
            SchemaError: It takes the ids of a column, and a row has none or several.
        """
        index_of = self.config.categorical.index

        def lengths(name: str) -> torch.Tensor:
            return torch.from_numpy(ids.lengths[index_of(name)]).to(self.device)

        def read_ids(name: str) -> torch.Tensor:
            if (lengths(name) != 1).any():
                raise SchemaError(
                    f"column {name}: the model takes its ids, and a row has none or several",
                    "pass one id for each row",
                )
            return torch.from_numpy(ids.column(index_of(name))).to(self.device)

        more = stack_raw_inputs(self.head.raw_columns, ids=read_ids, lengths=lengths)
        if self.config.lists:
            more["lists"], more["present"] = self._look_up_events(ids)
        return more

    def _look_up_events(self, ids: Ids) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the newest events of the histories that the model takes as lists.

        Returns:
            Their embeddings, float32 [n, lists, max_events, embedding dim], 0 where there is no
            event; and whether there is one, bool [n, lists, max_events].
        """
        max_events = self.config.max_events
        shape = len(self.config.lists), len(ids), max_events
        rows, present = np.zeros(shape, np.int64), np.zeros(shape, bool)
        features = [*self.config.features]
        columns = [features.index(name) for name in self.config.lists]
        if ids.count == len(features):  # otherwise all histories are empty
            for j, column in enumerate(columns):
                rows[j], present[j] = ids.pad(column, max_events)
        first = self.first[columns].view(-1, 1, 1)
        embedded = self.table.rows(torch.from_numpy(rows).to(self.device) + first)
        exists = torch.from_numpy(present).to(self.device)
        return (embedded * exists.unsqueeze(3)).transpose(0, 1), exists.transpose(0, 1)

    def logits(
        self,
        dense: np.ndarray,
        embedded: torch.Tensor,
        ids: Ids,
        dense_vectors: np.ndarray | None = None,
    ) -> torch.Tensor:
        """Return logits, float32 [n, labels].

        Args:
            dense: The dense values, float32 [dense columns, n].
            embedded: What :meth:`lookup` returns of ``ids``.
            ids: The ids of the rows.
            dense_vectors: The vectors of the rows, each followed by its indicator, float32
                [n, ``config.vector_inputs``]; needed if the model takes any.
        """
        values = torch.from_numpy(dense).to(self.device).T
        more = self.read_more_inputs(ids)
        if dense_vectors is None:
            return self.head(values, embedded, more)
        return self.head(values, embedded, more, torch.from_numpy(dense_vectors).to(self.device))


def _quantize(chunk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows as uint8 [n, D], and their scales and minima, float32 [n, 2]."""
    low, high = chunk.amin(1, keepdim=True), chunk.amax(1, keepdim=True)
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
    singles: int,
    ids: np.ndarray,
    offsets: np.ndarray,
    out: np.ndarray,
) -> bool:
    """Sum embeddings in the order of the ids, as PyTorch's ``embedding_bag`` does.

    Args:
        table: float32 [rows, embedding dim].
        first: int64 [features], see :class:`ServingModel`.
        singles: The number of features before those of histories, whose sums are divided by their
            number of ids.
        ids, offsets: int64, see :class:`formats.rows.Ids`.
        out: float32 [n, features, embedding dim] of 0, to which sums are added.

    Returns:
        Whether all ids are in the table.
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
            if j >= singles and end - begin > 1:
                for d in range(table.shape[1]):
                    out[i, j, d] /= np.float32(end - begin)
    return True
