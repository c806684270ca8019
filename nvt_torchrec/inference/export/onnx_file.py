"""``model.onnx``: raw columns to the probability, for any program that runs ONNX.

All operators are of the ONNX standard. Nodes of :mod:`.graph` encode the columns; the nodes that
PyTorch's exporter makes of :class:`Scores` follow, and after these, if the model is a user's own,
the nodes of the ONNX file that the bundle holds.
"""

from __future__ import annotations

import dataclasses
import logging
import warnings
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx_ir.tape import Tape
from torch import nn

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.base.files.atomic import new_directory
from nvt_torchrec.formats.feature_spec.spec_variants import drop_events, drop_tables
from nvt_torchrec.formats.workflow_description import WorkflowDescription
from nvt_torchrec.inference.export.comparison import check_file
from nvt_torchrec.inference.export.graph import ML_OPSET, Encoded, encode
from nvt_torchrec.inference.export.onnx_operators import Graph, vocabulary_bytes
from nvt_torchrec.inference.model.bundle import WORKFLOW, bundle_digest
from nvt_torchrec.inference.named_tensors import OUTPUT
from nvt_torchrec.inference.predictor import Predictor, name_by_label
from nvt_torchrec.models.contract import fold_ids, stack_raw_inputs
from nvt_torchrec.models.onnx_head import DENSE_VECTORS, OPSET, OnnxHead, transpose_gather
from nvt_torchrec.workflows.compiled.dense import get_normalization
from nvt_torchrec.workflows.description import inspect

FILE = "model.onnx"
PRODUCER = "nvt-torchrec"
#: Of ONNX 1.16, which has the operators of :data:`models.onnx_head.OPSET`.
IR_VERSION = 10
#: Weights of at least this size are a file beside the model: a protobuf has less than 2 GiB.
_WEIGHTS_APART = 1 << 30
#: Vocabularies are attributes of nodes, which ONNX keeps in the model's own file: the other half of
#: its 2 GiB, less 64 MiB for everything else.
_MAX_VOCABULARY_BYTES = (1 << 30) - (1 << 26)


class Scores(nn.Module):
    """Compute the probabilities of encoded rows; PyTorch's exporter turns it into nodes of ONNX.

    If the head is a file of ONNX, ``forward`` ends before it and returns the head's inputs, which
    :attr:`head_inputs` names.

    Args:
        description: The workflow, of which the statistics of dense columns are used.
        predictor: The model, and the columns of a row.
    """

    def __init__(self, description: WorkflowDescription, predictor: Predictor) -> None:
        super().__init__()
        spec, model = predictor.row_spec, predictor.model
        config = model.config
        self.rows, self.head = model.table.rows, model.head
        self.head_inputs: tuple[str, ...] = ()
        if isinstance(model.head, OnnxHead):
            self.head_inputs = model.head.inputs

        self.transforms = [spec.get_transform(column) for column in spec.dense]
        center, scale = get_normalization(spec, description.statistics)
        self.center, self.scale = torch.from_numpy(center), torch.from_numpy(scale)
        self.fill = torch.tensor([float(column.fill) for column in spec.dense], dtype=torch.float64)

        # Singles and lists come apart: `order` says where each column of the spec is among them,
        # and `first` at which row of the joined table its ids begin.
        is_list = torch.tensor([column.multi_hot for column in spec.categorical])
        self.order = is_list.argsort(stable=True).argsort()
        self.position = dict(zip(spec.categorical_names, self.order.tolist(), strict=True))
        self.first_singles, self.first_lists = model.first[~is_list], model.first[is_list]
        table_rows = torch.tensor(config.feature_rows)
        self.rows_singles, self.rows_lists = table_rows[~is_list], table_rows[is_list]
        self.hash_indices = config.hash_indices

        # The values of histories are the last columns of lists.
        self.histories = [*config.features][len(config.categorical) :]
        self.num_plain_lists = len(self.first_lists) - len(predictor.workflow.optional)
        self.max_events = config.max_events
        self.lists = config.lists
        self.vectors = config.dense_vectors

    def forward(self, columns: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return the probabilities [rows] of each label.

        Args:
            columns: Those of :attr:`.graph.Encoded.columns`.
        """
        columns = list(columns)
        num_columns = len(columns) - len(self.vectors)
        columns, given_vectors = columns[:num_columns], columns[num_columns:]
        dense = columns.pop(0) if self.transforms else None
        embedded: list[torch.Tensor] = []
        singles: tuple[torch.Tensor, ...] = ()
        if len(self.first_singles):
            ids = self._fold(columns.pop(0), self.rows_singles)
            embedded.append(self.rows(ids + self.first_singles))
            singles = ids.unbind(1)

        num_lists = len(self.first_lists)
        lists, lengths = columns[:num_lists], columns[num_lists:]
        # By history that the model takes as a list: its newest events, and which of them exist.
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
        """Return the vectors of rows as the model takes them, [rows, sum of (width + 1)].

        A row of NaN stands for a missing vector. If a part of it is NaN, so is the probability.
        """
        parts = []
        for values, vector in zip(given, self.vectors, strict=True):
            is_missing = values.isnan().all(1, keepdim=True)
            # as the workflow stores them
            rounded = values.to(getattr(torch, vector.dtype)).to(torch.float32)
            parts.append(torch.where(is_missing, 0.0, rounded))
            parts.append(1 - is_missing.to(torch.float32))
        return torch.cat(parts, 1)

    def _fold(self, ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return fold_ids(ids, rows) if self.hash_indices else ids

    def _sum_list(self, ids: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
        """Return the sum of the embeddings of each list, [rows, 1, D].

        Args:
            ids: Rows of the table, [rows, length]; anything after the end of a list.
            end: The length of each list, [rows, 1].
        """
        present = torch.arange(ids.shape[1]) < end
        return (self.rows(ids) * present.unsqueeze(-1)).sum(1, keepdim=True)

    def _average_history(self, ids: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
        """Return the mean of the embeddings of the newest ``max_events`` events, [rows, 1, D]."""
        position = torch.arange(ids.shape[1])
        present = (position < end) & (position >= end - self.max_events)
        sums = (self.rows(ids) * present.unsqueeze(-1)).sum(1, keepdim=True)
        return sums / present.sum(1).clamp(min=1).view(-1, 1, 1)

    def _take_newest(
        self, ids: torch.Tensor, end: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the newest events, the newest one last.

        Returns:
            Their embeddings [rows, max_events, D], 0 where there is no event; and whether there is
            one, bool [rows, max_events].
        """
        position = end - torch.arange(self.max_events, 0, -1)
        exists = position >= 0
        # Where there is no event, any position that Gather accepts. The last one is a tensor: the
        # length of the lists is known when the file runs.
        last = torch.full_like(position, ids.shape[1] - 1)
        position = torch.minimum(position.clamp(min=0), last)
        events = self.rows(ids.gather(1, position)) * exists.unsqueeze(-1)
        return events, exists

    def _normalize(self, x: torch.Tensor | None, vectors: torch.Tensor) -> torch.Tensor:
        """Return dense columns, filled, transformed and normalized, float32 [rows, columns]."""
        if x is None:
            return vectors.new_zeros(vectors.shape[0], 0)
        filled = torch.where(x.isnan(), self.fill, x).unbind(1)
        transformed = []
        for transform, column in zip(self.transforms, filled, strict=True):
            transformed.append(transform.y(column, torch))
        # In float64, as the workflow does; the model gets float32.
        return ((torch.stack(transformed, 1) - self.center) / self.scale).to(torch.float32)


def export_onnx(bundle: Path, output: Path) -> None:
    """Write ``model.onnx`` into a new directory, and check its probabilities.

    Args:
        bundle: Directory of a bundle.
        output: Directory to make.

    Raises:
        SettingsError: ONNX's operators cannot encode a column, the file would be too large, or
            gives other probabilities.
        OutputError: ``output`` exists or cannot be written.
    """
    with new_directory(output) as temporary:
        write_model(bundle, temporary)


def write_model(bundle: Path, directory: Path) -> Predictor:
    """Write ``model.onnx``, and perhaps its weights, into a directory; return the bundle's model.

    Raises:
        SettingsError: As :func:`export_onnx`.
    """
    predictor, description = Predictor.load(bundle, check=True), inspect(bundle / WORKFLOW)
    # A file of ONNX has no log and no tables: callers pass what they know of events and tables.
    spec = drop_tables(drop_events(description.spec))
    workflow = dataclasses.replace(predictor.workflow, events=None, tables=None, vectors=None)
    if predictor.model.config.dense_vectors:
        spec = dataclasses.replace(spec, vectors=description.spec.vectors)
        workflow = dataclasses.replace(workflow, vectors=predictor.workflow.vectors)
    description = dataclasses.replace(description, spec=spec)
    workflow = dataclasses.replace(workflow, spec=spec)
    predictor = Predictor(workflow, predictor.model)

    graph = Graph()
    encoded = encode(graph, description, bundle / WORKFLOW, predictor.row_spec)
    size = vocabulary_bytes(graph)
    if size > _MAX_VOCABULARY_BYTES:
        raise SettingsError(
            f"{bundle}: vocabularies of {size >> 20} MiB, and a file of ONNX has less than 2 GiB",
            "train with smaller ones: max_table_size, freq_threshold or hash_buckets",
        )
    names = name_by_label(OUTPUT, predictor.labels)
    model = _build_model(graph, encoded, Scores(description, predictor), names)
    model.metadata_props["bundle"] = bundle_digest(bundle)
    model.metadata_props["workflow"] = description.digest
    model.metadata_props["label"] = ",".join(predictor.labels)
    weight_bytes = 0
    for value in model.graph.initializers.values():
        if value.const_value:
            weight_bytes += value.const_value.nbytes
    weights_file = f"{FILE}.data" if weight_bytes >= _WEIGHTS_APART else None
    ir.save(model, directory / FILE, external_data=weights_file)
    check_file(directory / FILE, predictor, description, encoded.known)
    return predictor


def _build_model(graph: Graph, encoded: Encoded, scores: Scores, names: list[str]) -> ir.Model:
    """Return a model of the nodes that encode, followed by those that score.

    Args:
        graph: The nodes that encode.
        encoded: What they give, which ``scores`` takes.
        scores: The module that is exported.
        names: The names of the probabilities of each label.
    """
    body = _export_scores(scores, encoded)
    for inner, outer in zip(body.inputs, encoded.columns, strict=True):
        inner.replace_all_uses_with(outer)
    nodes, initializers, outputs = _take_apart(body)
    if isinstance(scores.head, OnnxHead):
        given = dict(zip(scores.head_inputs, outputs, strict=True))
        head_nodes, head_initializers, outputs = _build_head(scores.head, given)
        nodes += head_nodes
        initializers += head_initializers
    return assemble(
        encoded.inputs,
        dict(zip(names, outputs, strict=True)),
        [*graph.nodes, *nodes],
        [*graph.initializers, *initializers],
    )


def _export_scores(scores: Scores, encoded: Encoded) -> ir.Graph:
    """Return what PyTorch's exporter makes of the module, for any number of rows and lengths."""
    # Two rows and lists of three: the exporter takes sizes of 0 and 1 for constants.
    examples: list[torch.Tensor] = []
    if scores.transforms:
        examples.append(torch.zeros(2, len(scores.transforms), dtype=torch.float64))
    if len(scores.first_singles):
        examples.append(torch.zeros(2, len(scores.first_singles), dtype=torch.int64))
    first_list = len(examples)
    examples += [torch.zeros(2, 3, dtype=torch.int64) for _ in encoded.lists]
    examples += [torch.zeros(2, dtype=torch.int64) for _ in encoded.lengths]
    for vector in scores.vectors:
        examples.append(torch.zeros(2, vector.width))

    rows = torch.export.Dim("rows", min=1)
    shapes = [{0: rows} for _ in examples]
    for index in range(first_list, first_list + len(encoded.lists)):
        shapes[index][1] = torch.export.Dim(f"length_{index}", min=1)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns that torchvision is missing
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            scores.eval(),
            (examples,),
            dynamic_shapes=(shapes,),
            opset_version=OPSET,
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    for node in list(program.model.graph):
        transpose_gather(program.model.graph, node)
    return program.model.graph


def _take_apart(graph: ir.Graph) -> tuple[list[ir.Node], list[ir.Value], list[ir.Value]]:
    """Empty a graph; return its nodes, initializers and outputs.

    A node or an initializer belongs to one graph: to become part of another one, it must leave.
    """
    nodes, outputs = list(graph), list(graph.outputs)
    initializers = list(graph.initializers.values())
    graph.initializers.clear()
    graph.outputs.clear()
    graph.remove(nodes)
    return nodes, initializers, outputs


def _build_head(
    head: OnnxHead, given: dict[str, ir.Value]
) -> tuple[list[ir.Node], list[ir.Value], list[ir.Value]]:
    """Return the nodes of the head of an own model, and those from its logits to probabilities.

    Args:
        head: The head.
        given: Its inputs, by name.

    Returns:
        The nodes, their initializers, and the probabilities [rows] of each label.
    """
    body = ir.from_proto(onnx.ModelProto.FromString(head.content)).graph
    for value in body.inputs:
        value.replace_all_uses_with(given[str(value.name)])
    nodes, initializers, (logits,) = _take_apart(body)
    tape = Tape()
    probabilities = tape.op("Sigmoid", [logits])
    outputs = []
    for label in range(head.labels):
        index = ir.Value(name=f"label {label}", const_value=ir.tensor(np.int64(label)))
        initializers.append(index)
        output = tape.op("Gather", [probabilities, index], {"axis": 1})
        output.dtype, output.shape = ir.DataType.FLOAT, ir.Shape(["rows"])
        outputs.append(output)
    return [*nodes, *tape.nodes], initializers, outputs


def assemble(
    inputs: list[ir.Value],
    outputs: dict[str, ir.Value],
    nodes: list[ir.Node],
    constants: list[ir.Value],
) -> ir.Model:
    """Return a model of nodes that may come from several graphs.

    Args:
        inputs: The inputs, whose names stay.
        outputs: The outputs by their names.
        nodes: The nodes, in order.
        constants: The initializers.
    """
    # Names of two graphs may be the same. What lies between inputs and outputs gets new names with
    # a "/", which names of columns cannot have.
    values = list(constants)
    for node in nodes:
        values += node.outputs
    for k, value in enumerate(values):
        value.name = f"/{k}"
    for name, value in outputs.items():
        value.name = name
    for k, node in enumerate(nodes):
        node.name = f"{k}: {node.name or node.op_type}"
    graph = ir.Graph(
        inputs,
        list(outputs.values()),
        nodes=nodes,
        initializers=constants,
        name=PRODUCER,
        opset_imports={"": OPSET, "ai.onnx.ml": ML_OPSET},
    )
    return ir.Model(graph, ir_version=IR_VERSION, producer_name=PRODUCER)
