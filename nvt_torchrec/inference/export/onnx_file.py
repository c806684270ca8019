"""``model.onnx``: raw columns to the probability, for any program that runs ONNX.

Its operators are standard ones: those of :mod:`.graph` encode the columns, and the model is what
PyTorch's exporter makes of :class:`Scores`.
"""

from __future__ import annotations

import dataclasses
import logging
import warnings
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import torch
from onnx_ir.tape import Tape
from torch import nn

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.base.files.atomic import new_directory
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.feature_spec.raw_types.time import EPOCHS
from nvt_torchrec.formats.feature_spec.read_plan import Read
from nvt_torchrec.formats.workflow_description import WorkflowDescription
from nvt_torchrec.inference.export.graph import ML_OPSET, OPSET, Encoded, encode
from nvt_torchrec.inference.export.onnx_operators import Graph, vocabulary_bytes
from nvt_torchrec.inference.model.bundle import WORKFLOW, bundle_digest
from nvt_torchrec.inference.named_tensors import DTYPES, MISSING_OF, OUTPUT, inputs_of, to_columns
from nvt_torchrec.inference.predictor import Predictor, name_by_label
from nvt_torchrec.models.contract import stack_raw_inputs
from nvt_torchrec.workflows.compiled.dense import normalization
from nvt_torchrec.workflows.description import inspect

FILE = "model.onnx"
PRODUCER = "nvt-torchrec"
#: Of ONNX 1.16, which has the operators of :data:`.graph.OPSET`.
IR_VERSION = 10
#: From this size on, weights are a file beside the model: a protobuf has less than 2 GiB.
_WEIGHTS_APART = 1 << 30
#: Vocabularies can only be in it, beside smaller weights.
_MOST_VOCABULARY_BYTES = (1 << 30) - (1 << 26)
_PROBES, _LONGEST_LIST = 500, 4
#: Values of dense columns with which the file is tried.
_NUMBERS = (-5, -1, 0, 1, 2, 3, 7, 50, 99, 2_000_000_000)
_TOLERANCE = 1e-5


class Scores(nn.Module):
    """Dense values and ids → for each label probabilities [rows]; see :class:`.graph.Encoded`."""

    def __init__(self, description: WorkflowDescription, predictor: Predictor) -> None:
        super().__init__()
        spec, model = predictor.row_spec, predictor.model
        self.of_histories = len(predictor.workflow.optional)
        self.most = model.config.max_events
        self.histories = [*model.config.features][len(model.config.categorical) :]
        self.lists = model.config.lists
        self.rows, self.head = model.table.rows, model.head
        self.transforms = [spec.transform_of(column) for column in spec.dense]
        center, scale = normalization(spec, description.statistics)
        self.center, self.scale = torch.from_numpy(center), torch.from_numpy(scale)
        self.fill = torch.tensor([float(column.fill) for column in spec.dense], dtype=torch.float64)
        lists = [column.multi_hot for column in spec.categorical]
        self.order = torch.tensor(lists).argsort(stable=True).argsort()
        self.places = dict(zip(spec.categorical_names, self.order.tolist(), strict=True))
        self.first_singles = model.first[~torch.tensor(lists)]
        self.first_lists = model.first[torch.tensor(lists)]

    def forward(self, columns: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return the probabilities of :attr:`Encoded.columns`."""
        columns = [*columns]
        dense = columns.pop(0) if self.transforms else None
        embedded: list[torch.Tensor] = []
        singles: tuple[torch.Tensor, ...] = ()
        if len(self.first_singles):
            ids = columns.pop(0)
            embedded.append(self.rows(ids + self.first_singles))
            singles = ids.unbind(1)
        lists, lengths = columns[: len(self.first_lists)], columns[len(self.first_lists) :]
        plain = len(lists) - self.of_histories
        of_lists: dict[str, list[torch.Tensor]] = {}
        for j, (first, ids, length) in enumerate(
            zip(self.first_lists, lists, lengths, strict=True)
        ):
            place, end = torch.arange(ids.shape[1]), length.unsqueeze(1)
            present = place < end
            if j >= plain:  # the newest events of a history
                present = present & (place >= end - self.most)
                if (name := self.histories[j - plain]) in self.lists:
                    newest = end - torch.arange(self.most, 0, -1)
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
        return torch.sigmoid(self.head(self._dense(dense, vectors), vectors, more)).unbind(1)

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
    spec = description.spec.drop_events()
    description = dataclasses.replace(description, spec=spec)
    workflow = dataclasses.replace(predictor.workflow, spec=spec, events=None)
    predictor = Predictor(workflow, predictor.model)
    graph = Graph()
    encoded = encode(graph, description, bundle / WORKFLOW, predictor.row_spec)
    size = vocabulary_bytes(graph)
    if size > _MOST_VOCABULARY_BYTES:
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
    _check(directory / FILE, predictor, encoded.known)
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
        _gather_rows(body, node)
    for inner, outer in zip(body.inputs, encoded.columns, strict=True):
        inner.replace_all_uses_with(outer)
    nodes, initializers, outputs = list(body), list(body.initializers.values()), list(body.outputs)
    body.initializers.clear()
    body.outputs.clear()
    body.remove(nodes)
    of_names = dict(zip(names, outputs, strict=True))
    return assemble(
        encoded.inputs, of_names, [*graph.nodes, *nodes], [*graph.initializers, *initializers]
    )


def _gather_rows(body: ir.Graph, node: ir.Node) -> None:
    """Choose columns as rows of the transposed: ONNX Runtime copies single values, 5 times slower.

    So the products of pairs are chosen.
    """
    if node.op_type != "Gather" or node.attributes.get_int("axis") != 1:
        return
    index, shape = node.inputs[1], node.outputs[0].shape
    if (
        index is None
        or index.const_value is None
        or index.const_value.size < 2
        or len(shape or ()) != 2
    ):
        return
    tape = Tape()
    flipped = tape.op("Transpose", [node.inputs[0]], {"perm": [1, 0]})
    rows = tape.op("Gather", [flipped, index], {"axis": 0})
    chosen = tape.op("Transpose", [rows], {"perm": [1, 0]})
    body.insert_before(node, tape.nodes)
    node.outputs[0].replace_all_uses_with(chosen)
    body.remove(node)


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


def _check(file: Path, predictor: Predictor, known: dict[str, list]) -> None:
    """Compare with the predictor, by known, unseen and missing values. Raises SettingsError."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    inputs = inputs_of(predictor.row_spec)
    history_of = {name: h.name for h in predictor.workflow.histories for name in h.features}
    probes = _probes(predictor.row_spec, known, history_of)
    for count in (1, _PROBES):
        some = {name: values[:count] for name, values in probes.items()}
        encoded = predictor.workflow.transform(predictor.read(to_columns(inputs, some)))
        expected = predictor.predict_encoded(encoded.dense, encoded.ids)
        got = np.stack(session.run(name_by_label(OUTPUT, predictor.labels), some))
        difference = float(np.abs(got - expected.T).max())
        if not difference <= _TOLERANCE:
            raise SettingsError(
                f"{FILE}: its probabilities differ from the bundle's by {difference:g}, at most "
                f"{_TOLERANCE:g} is right; it was not written",
                "serve the bundle itself: python -m inference serve --bundle BUNDLE",
            )


def _probes(
    spec: FeatureSpec, known: dict[str, list], history_of: dict[str, str]
) -> dict[str, np.ndarray]:
    """Return tensors of rows, by name; the lists of a history are of the same lengths."""
    rng, tensors = np.random.default_rng(0), {}
    lengths: dict[str, np.ndarray] = {}
    plan = spec.read_plan(label=False)
    of_source = {spec.sources_of(name)[0]: values for name, values in known.items()}
    for column in inputs_of(spec):
        reads = [read for read in plan.reads if read.source == column.name]
        values = of_source.get(column.name, []) + [
            value for read in reads for value in RAW_TYPES[read.raw].probes
        ]
        if column.kind == "string":
            texts = [v.decode() if isinstance(v, bytes) else _as_text(reads, v) for v in values]
            values = [text for text in texts if text and _is_read(reads, text)]
        else:
            units = [(RAW_TYPES[read.raw], EPOCHS.get(read.time_format, 1)) for read in reads]
            numbers = [*_NUMBERS, *(v for v in values if not isinstance(v, bytes))]
            values = [v for v in numbers if all(kind.contains(v * unit) for kind, unit in units)]
        shape = (_PROBES, _LONGEST_LIST) if column.multi_hot else (_PROBES,)
        if column.multi_hot:
            drawn = rng.integers(0, _LONGEST_LIST + 1, _PROBES)
            name = history_of.get(column.name, column.name)
            tensors[column.lengths] = lengths.setdefault(name, drawn)
        else:
            values.append(MISSING_OF[column.kind])
        array = np.array(values, DTYPES[column.kind])
        tensors[column.name] = array[rng.integers(len(values), size=shape)]
    return tensors


def _as_text(reads: list[Read], value: int | str) -> str:
    return value if isinstance(value, str) else RAW_TYPES[reads[0].raw].log_text(value)


def _is_read(reads: list[Read], text: str) -> bool:
    try:
        return all(RAW_TYPES[read.raw].from_log_text(text) is not None for read in reads)
    except ValueError:
        return False
