"""The part of ``model.onnx`` that PyTorch's exporter makes: from encoded rows to probabilities."""

from __future__ import annotations

import torch
from torch import nn

from nvt_torchrec.formats.workflow_description import WorkflowDescription
from nvt_torchrec.inference.predictor import Predictor
from nvt_torchrec.models.contract import fold_ids, stack_raw_inputs
from nvt_torchrec.models.onnx_head import DENSE_VECTORS, OnnxHead
from nvt_torchrec.workflows.compiled.dense import get_normalization


class Scores(nn.Module):
    """Compute the probabilities of encoded rows; PyTorch's exporter turns it into ONNX nodes.

    If the head is an ONNX file, ``forward`` stops before the head and returns its inputs, in the
    order of :attr:`head_inputs`.

    Args:
        description: The workflow's description, which has the statistics of dense columns.
        predictor: The model, and the columns of a row.
    """

    def __init__(self, description: WorkflowDescription, predictor: Predictor) -> None:
        super().__init__()
        spec = predictor.row_spec
        model = predictor.model
        config = model.config
        self.look_up = model.table.look_up
        self.head = model.head
        self.head_inputs: tuple[str, ...] = ()
        if isinstance(model.head, OnnxHead):
            self.head_inputs = model.head.inputs

        self.transforms = [spec.get_transform(column) for column in spec.dense]
        center, scale = get_normalization(spec, description.statistics)
        self.center = torch.from_numpy(center)
        self.scale = torch.from_numpy(scale)
        self.fill = torch.tensor([float(column.fill) for column in spec.dense], dtype=torch.float64)

        # Single-valued columns come first, then lists. `position` maps each column of the spec to
        # its position in that order; `first_*` is the row of the joined table at which its ids
        # begin, and `rows_*` is the number of rows of its own table.
        is_list = torch.tensor([column.multi_hot for column in spec.categorical])
        self.order = is_list.argsort(stable=True).argsort()
        self.position = dict(zip(spec.categorical_names, self.order.tolist(), strict=True))
        self.first_singles = model.first[~is_list]
        self.first_lists = model.first[is_list]
        table_rows = torch.tensor(config.feature_rows)
        self.rows_singles = table_rows[~is_list]
        self.rows_lists = table_rows[is_list]
        self.hash_indices = config.hash_indices

        # The columns of histories are the last lists.
        self.histories = [*config.features][len(config.categorical) :]
        self.num_plain_lists = len(self.first_lists) - len(predictor.workflow.optional)
        self.max_events = config.max_events
        self.lists = config.lists
        self.vectors = config.dense_vectors

    def forward(self, columns: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return the probabilities [rows] of each label.

        Args:
            columns: The columns in the order of :attr:`.graph.Encoded.columns`.
        """
        columns = list(columns)
        num_columns = len(columns) - len(self.vectors)
        columns, given_vectors = columns[:num_columns], columns[num_columns:]
        dense = columns.pop(0) if self.transforms else None
        embedded: list[torch.Tensor] = []
        singles: tuple[torch.Tensor, ...] = ()
        if len(self.first_singles):
            ids = self._fold(columns.pop(0), self.rows_singles)
            embedded.append(self.look_up(ids + self.first_singles))
            singles = ids.unbind(1)

        num_lists = len(self.first_lists)
        lists, lengths = columns[:num_lists], columns[num_lists:]
        # For each history that the model takes as a list: its newest events, and which exist.
        newest: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for j, length in enumerate(lengths):
            ids = self._fold(lists[j], self.rows_lists[j]) + self.first_lists[j]
            end = length.unsqueeze(1)
            if j < self.num_plain_lists:
                embedded.append(self._sum_list(ids, end))
                continue
            embedded.append(self._average_history(ids, end))
            history = self.histories[j - self.num_plain_lists]
            if history in self.lists:
                newest[history] = self._take_newest(ids, end)

        vectors = embedded[0]
        if len(embedded) > 1:
            vectors = torch.cat(embedded, 1)[:, self.order]
        counts = [*map(torch.ones_like, singles), *lengths]
        more = stack_raw_inputs(
            self.head.raw_columns,
            ids=lambda name: singles[self.position[name]],
            lengths=lambda name: counts[self.position[name]],
        )
        if self.lists:
            more["lists"] = torch.stack([newest[name][0] for name in self.lists], 1)
            more["present"] = torch.stack([newest[name][1] for name in self.lists], 1)
        dense_vectors = None
        if given_vectors:
            dense_vectors = self._add_indicators(given_vectors)
        normalized = self._normalize(dense, vectors)
        if self.head_inputs:
            if dense_vectors is not None:
                more[DENSE_VECTORS] = dense_vectors
            return normalized, vectors, *(more[name] for name in self.head_inputs[2:])
        return torch.sigmoid(self.head(normalized, vectors, more, dense_vectors)).unbind(1)

    def _add_indicators(self, given: list[torch.Tensor]) -> torch.Tensor:
        """Join vectors, each followed by its indicator: [rows, sum of (width + 1)].

        The indicator is 1 if the vector exists, else 0.
        A row of NaN is a missing vector. A row that is only partly NaN makes the probability NaN.
        """
        parts = []
        for values, vector in zip(given, self.vectors, strict=True):
            is_missing = values.isnan().all(1, keepdim=True)
            # The workflow stores vectors in this type, so the model was trained on rounded values.
            rounded = values.to(getattr(torch, vector.dtype)).to(torch.float32)
            parts.append(torch.where(is_missing, 0.0, rounded))
            parts.append(1 - is_missing.to(torch.float32))
        return torch.cat(parts, 1)

    def _fold(self, ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return fold_ids(ids, rows) if self.hash_indices else ids

    def _sum_list(self, ids: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
        """Sum the embeddings of each list, [rows, 1, D].

        Args:
            ids: Rows of the joined table, [rows, length]; arbitrary after the end of a list.
            end: The length of each list, [rows, 1].
        """
        present = torch.arange(ids.shape[1]) < end
        return (self.look_up(ids) * present.unsqueeze(-1)).sum(1, keepdim=True)

    def _average_history(self, ids: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
        """Average the embeddings of the newest ``max_events`` events, [rows, 1, D]."""
        position = torch.arange(ids.shape[1])
        present = (position < end) & (position >= end - self.max_events)
        sums = (self.look_up(ids) * present.unsqueeze(-1)).sum(1, keepdim=True)
        return sums / present.sum(1).clamp(min=1).view(-1, 1, 1)

    def _take_newest(
        self, ids: torch.Tensor, end: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather the newest ``max_events`` events of each row, the newest one last.

        Returns:
            Their embeddings [rows, max_events, D], 0 for events that do not exist; and a mask of
            the events that exist, bool [rows, max_events].
        """
        position = end - torch.arange(self.max_events, 0, -1)
        exists = position >= 0
        # Gather needs a valid position even for an event that does not exist. The upper limit is a
        # tensor because the length of the lists is only known when the file runs.
        last = torch.full_like(position, ids.shape[1] - 1)
        position = torch.minimum(position.clamp(min=0), last)
        events = self.look_up(ids.gather(1, position)) * exists.unsqueeze(-1)
        return events, exists

    def _normalize(self, x: torch.Tensor | None, vectors: torch.Tensor) -> torch.Tensor:
        """Fill, transform and normalize dense columns; return float32 [rows, columns]."""
        if x is None:
            return vectors.new_zeros(vectors.shape[0], 0)
        filled = torch.where(x.isnan(), self.fill, x).unbind(1)
        transformed = []
        for transform, column in zip(self.transforms, filled, strict=True):
            transformed.append(transform.apply(column, torch))
        # The workflow normalizes in float64 too; the model takes float32.
        return ((torch.stack(transformed, 1) - self.center) / self.scale).to(torch.float32)
