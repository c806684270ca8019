"""``model.onnx``: raw columns to the probability, for any program that runs ONNX.

Its operators are standard ones: those of :mod:`.graph` encode the columns, and the model is what
PyTorch's exporter makes of :class:`Scores`; of an own model, what the bundle holds follows it.
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
from nvt_torchrec.formats.workflow_description import WorkflowDescription
from nvt_torchrec.inference.export.comparison import check_file
from nvt_torchrec.inference.export.graph import ML_OPSET, Encoded, encode
from nvt_torchrec.inference.export.onnx_operators import Graph, vocabulary_bytes
from nvt_torchrec.inference.model.bundle import WORKFLOW, bundle_digest
from nvt_torchrec.inference.named_tensors import OUTPUT
from nvt_torchrec.inference.predictor import Predictor, name_by_label
from nvt_torchrec.models.contract import fold_ids, stack_raw_inputs
from nvt_torchrec.models.onnx_head import OPSET, OnnxHead, transpose_gather
from nvt_torchrec.workflows.compiled.dense import normalization
from nvt_torchrec.workflows.description import inspect

FILE = "model.onnx"
PRODUCER = "nvt-torchrec"
#: Of ONNX 1.16, which has the operators of :data:`models.onnx_head.OPSET`.
IR_VERSION = 10
#: From this size on, weights are a file beside the model: a protobuf has less than 2 GiB.
_WEIGHTS_APART = 1 << 30
#: Vocabularies can only be in it, beside smaller weights.
_MAX_VOCABULARY_BYTES = (1 << 30) - (1 << 26)


class Scores(nn.Module):
    """Dense values and ids → for each label probabilities [rows]; see :class:`.graph.Encoded`.

    If the head is a file of ONNX, it returns what this file takes, named by :attr:`head_inputs`.
    """

    def __init__(self, description: WorkflowDescription, predictor: Predictor) -> None:
        super().__init__()
        spec, model = predictor.row_spec, predictor.model
        self.of_histories = len(predictor.workflow.optional)
        self.maximum = model.config.max_events
        self.histories = [*model.config.features][len(model.config.categorical) :]
        self.lists = model.config.lists
        self.rows, self.head = model.table.rows, model.head
        self.head_inputs: tuple[str, ...] = ()
        if isinstance(model.head, OnnxHead):
            self.head_inputs = model.head.inputs
        self.transforms = [spec.transform_of(column) for column in spec.dense]
        center, scale = normalization(spec, description.statistics)
        self.center, self.scale = torch.from_numpy(center), torch.from_numpy(scale)
        self.fill = torch.tensor([float(column.fill) for column in spec.dense], dtype=torch.float64)
        lists = [column.multi_hot for column in spec.categorical]
        self.order = torch.tensor(lists).argsort(stable=True).argsort()
        self.places = dict(zip(spec.categorical_names, self.order.tolist(), strict=True))
        self.first_singles = model.first[~torch.tensor(lists)]
        self.first_lists = model.first[torch.tensor(lists)]
        self.hash_indices = model.config.hash_indices
        rows = torch.tensor(model.config.feature_rows)
        self.rows_singles = rows[~torch.tensor(lists)]
        self.rows_lists = rows[torch.tensor(lists)]

    def forward(self, columns: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return the probabilities of :attr:`Encoded.columns`."""
        columns = [*columns]
        dense = columns.pop(0) if self.transforms else None
        embedded: list[torch.Tensor] = []
        singles: tuple[torch.Tensor, ...] = ()
        if len(self.first_singles):
            ids = self._fold(columns.pop(0), self.rows_singles)
            embedded.append(self.rows(ids + self.first_singles))
            singles = ids.unbind(1)
        lists, lengths = columns[: len(self.first_lists)], columns[len(self.first_lists) :]
        plain = len(lists) - self.of_histories
        of_lists: dict[str, list[torch.Tensor]] = {}
        for j, (first, ids, length) in enumerate(
            zip(self.first_lists, lists, lengths, strict=True)
        ):
            ids = self._fold(ids, self.rows_lists[j])
            place, end = torch.arange(ids.shape[1]), length.unsqueeze(1)
            present = place < end
            if j >= plain:  # the newest events of a history
                present = present & (place >= end - self.maximum)
                if (name := self.histories[j - plain]) in self.lists:
                    newest = end - torch.arange(self.maximum, 0, -1)
                    there = newest >= 0
                    last = torch.full_like(newest, ids.shape[1] - 1)
                    newest = torch.minimum(newest.clamp(min=0), last)
                    events = self.rows(ids.gather(1, newest) + first) * there.unsqueeze(-1)
                    of_lists[name] = [events, there]
            sums = (self.rows(ids + first) * present.unsqueeze(-1)).sum(1, keepdim=True)
            if j >= plain:
                sums = sums / present.sum(1).clamp(min=1).view(-1, 1, 1)
            embedded.append(sums)
        vectors = embedded[0] if len(embedded) == 1 else torch.cat(embedded, 1)[:, self.order]
        counts = [*map(torch.ones_like, singles), *lengths]
        more = stack_raw_inputs(
            self.head.raw_columns,
            ids=lambda name: singles[self.places[name]],
            lengths=lambda name: counts[self.places[name]],
        )
        if self.lists:
            found = zip(*(of_lists[name] for name in self.lists), strict=True)
            more |= zip(("lists", "present"), (torch.stack(each, 1) for each in found), strict=True)
        values = self._dense(dense, vectors)
        if self.head_inputs:
            return values, vectors, *(more[name] for name in self.head_inputs[2:])
        return torch.sigmoid(self.head(values, vectors, more)).unbind(1)

    def _fold(self, ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return fold_ids(ids, rows) if self.hash_indices else ids

    def _dense(self, x: torch.Tensor | None, vectors: torch.Tensor) -> torch.Tensor:
        if x is None:
            return vectors.new_zeros(vectors.shape[0], 0)
        filled = torch.where(x.isnan(), self.fill, x).unbind(1)
        y = [transform.y(x, torch) for transform, x in zip(self.transforms, filled, strict=True)]
        return ((torch.stack(y, 1) - self.center) / self.scale).to(torch.float32)


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
    """Write ``model.onnx``, and perhaps its tables, into a directory; return the bundle's model."""
    predictor, description = Predictor.load(bundle, check=True), inspect(bundle / WORKFLOW)
    spec = description.spec.drop_events().drop_tables()
    description = dataclasses.replace(description, spec=spec)
    workflow = dataclasses.replace(predictor.workflow, spec=spec, events=None, tables=None)
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
    model = _spliced(graph, encoded, Scores(description, predictor), names)
    model.metadata_props.update({
        "bundle": bundle_digest(bundle), "workflow": description.digest,
        "label": ",".join(predictor.labels),
    })  # fmt: skip
    weights = sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value)
    apart = f"{FILE}.data" if weights >= _WEIGHTS_APART else None
    ir.save(model, directory / FILE, external_data=apart)
    check_file(directory / FILE, predictor, description, encoded.known)
    return predictor


def _spliced(graph: Graph, encoded: Encoded, scores: Scores, names: list[str]) -> ir.Model:
    """Return a model of the nodes that encode, followed by those that score, with named outputs."""
    rows, lists = torch.export.Dim("rows", min=1), len(encoded.lists)
    integers = torch.zeros(2, 3, dtype=torch.int64)
    columns, shapes = [], [{0: rows} for _ in encoded.columns]
    if scores.transforms:
        columns.append(torch.zeros(2, len(scores.transforms), dtype=torch.float64))
    if len(scores.first_singles):
        columns.append(torch.zeros(2, len(scores.first_singles), dtype=torch.int64))
    for place in range(len(columns), len(columns) + lists):
        shapes[place][1] = torch.export.Dim(f"length_{place}", min=1)
    columns += [integers.clone() for _ in range(lists)] + [integers[:, 0] for _ in range(lists)]
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it misses torchvision
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            scores.eval(), (columns,), dynamic_shapes=(shapes,), opset_version=OPSET, dynamo=True,
            verbose=False,
        )  # fmt: skip
    assert program is not None
    body = program.model.graph
    for node in list(body):
        transpose_gather(body, node)
    for inner, outer in zip(body.inputs, encoded.columns, strict=True):
        inner.replace_all_uses_with(outer)
    nodes, initializers, outputs = list(body), list(body.initializers.values()), list(body.outputs)
    body.initializers.clear()
    body.outputs.clear()
    body.remove(nodes)
    if isinstance(scores.head, OnnxHead):
        given = dict(zip(scores.head_inputs, outputs, strict=True))
        outputs = _append_head(scores.head, given, nodes, initializers)
    of_names = dict(zip(names, outputs, strict=True))
    return assemble(
        encoded.inputs, of_names, [*graph.nodes, *nodes], [*graph.initializers, *initializers]
    )


def _append_head(
    head: OnnxHead,
    given: dict[str, ir.Value],
    nodes: list[ir.Node],
    initializers: list[ir.Value],
) -> list[ir.Value]:
    """Append the nodes of a head, and those that make probabilities of its logits.

    Args:
        head: The head of an own model.
        given: What it takes, by name.
        nodes: To which its nodes are appended.
        initializers: To which its weights are appended.

    Returns:
        The probabilities of each label, [rows].
    """
    body = ir.from_proto(onnx.ModelProto.FromString(head.content)).graph
    for value in body.inputs:
        value.replace_all_uses_with(given[str(value.name)])
    (logits,) = body.outputs
    of_head, weights = list(body), list(body.initializers.values())
    body.initializers.clear()
    body.outputs.clear()
    body.remove(of_head)
    tape = Tape()
    probabilities = tape.op("Sigmoid", [logits])
    outputs = []
    for label in range(head.labels):
        index = ir.Value(name=f"label {label}", const_value=ir.tensor(np.int64(label)))
        weights.append(index)
        outputs.append(tape.op("Gather", [probabilities, index], {"axis": 1}))
    for value in outputs:
        value.dtype, value.shape = ir.DataType.FLOAT, ir.Shape(["rows"])
    nodes += [*of_head, *tape.nodes]
    initializers += weights
    return outputs


def assemble(
    inputs: list[ir.Value],
    outputs: dict[str, ir.Value],
    nodes: list[ir.Node],
    constants: list[ir.Value],
) -> ir.Model:
    """Return a model of nodes; what is between inputs and outputs is named as no column is."""
    for k, value in enumerate([*constants, *(value for n in nodes for value in n.outputs)]):
        value.name = f"/{k}"
    for name, value in outputs.items():
        value.name = name
    for k, node in enumerate(nodes):  # of two graphs
        node.name = f"{k}: {node.name or node.op_type}"
    whole = ir.Graph(
        inputs, [*outputs.values()], nodes=nodes, initializers=constants, name=PRODUCER,
        opset_imports={"": OPSET, "ai.onnx.ml": ML_OPSET},
    )  # fmt: skip
    return ir.Model(whole, ir_version=IR_VERSION, producer_name=PRODUCER)
