"""``model.onnx``: from raw columns to the probability, for any program that runs ONNX.

All operators belong to the ONNX standard. The file consists of the nodes of :mod:`.graph`, which
encode the columns, then those that PyTorch's exporter makes of :class:`.onnx_scores.Scores` and, if
the model is a user's own, the nodes of the ONNX file in the bundle.
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

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.base.files.atomic import new_directory
from nvt_torchrec.formats.feature_spec.spec_variants import drop_events, drop_tables
from nvt_torchrec.inference.export.comparison import check_file
from nvt_torchrec.inference.export.graph import ML_OPSET, Encoded, encode
from nvt_torchrec.inference.export.onnx_operators import Graph, count_vocabulary_bytes
from nvt_torchrec.inference.export.onnx_scores import Scores
from nvt_torchrec.inference.model.bundle import WORKFLOW, compute_bundle_digest
from nvt_torchrec.inference.named_tensors import OUTPUT
from nvt_torchrec.inference.predictor import Predictor, name_by_label
from nvt_torchrec.models.onnx_head import OPSET, OnnxHead, transpose_gather
from nvt_torchrec.workflows.description import inspect

FILE = "model.onnx"
PRODUCER = "nvt-torchrec"
#: The IR version of ONNX 1.16, which has the operators of :data:`models.onnx_head.OPSET`.
IR_VERSION = 10
#: A protobuf is limited to 2 GiB, so weights of at least this size go into a separate file.
_MIN_SEPARATE_WEIGHT_BYTES = 1 << 30
#: Vocabularies are attributes of nodes, which ONNX always keeps in the model's own file. They may
#: take the other half of its 2 GiB, less 64 MiB for everything else.
_MAX_VOCABULARY_BYTES = (1 << 30) - (1 << 26)


def export_onnx(bundle: Path, output: Path) -> None:
    """Write ``model.onnx`` into a new directory, and check its probabilities.

    Args:
        bundle: The bundle's directory.
        output: The directory to create.

    Raises:
        SettingsError: ONNX's operators cannot encode a column, the file would be too large, or its
            probabilities differ from the bundle's.
        OutputError: ``output`` exists or cannot be written.
    """
    with new_directory(output) as temporary:
        write_model(bundle, temporary)


def write_model(bundle: Path, directory: Path) -> Predictor:
    """Write ``model.onnx``, and large weights as a second file; return the exported predictor.

    Raises:
        SettingsError: ONNX's operators cannot encode a column, the file would be too large, or its
            probabilities differ from the bundle's.
    """
    predictor = Predictor.load(bundle, check=True)
    description = inspect(bundle / WORKFLOW)
    # An ONNX file has no event log and no tables: callers pass aggregates, histories and the
    # columns of tables as inputs.
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
    size = count_vocabulary_bytes(graph)
    if size > _MAX_VOCABULARY_BYTES:
        raise SettingsError(
            f"{bundle}: its vocabularies take {size >> 20} MiB, but an ONNX file must stay below "
            "2 GiB",
            "train with smaller vocabularies: max_table_size, freq_threshold or hash_buckets",
        )
    names = name_by_label(OUTPUT, predictor.labels)
    model = _build_model(graph, encoded, Scores(description, predictor), names)
    model.metadata_props["bundle"] = compute_bundle_digest(bundle)
    model.metadata_props["workflow"] = description.digest
    model.metadata_props["label"] = ",".join(predictor.labels)
    weight_bytes = 0
    for value in model.graph.initializers.values():
        if value.const_value:
            weight_bytes += value.const_value.nbytes
    weights_file = f"{FILE}.data" if weight_bytes >= _MIN_SEPARATE_WEIGHT_BYTES else None
    ir.save(model, directory / FILE, external_data=weights_file)
    check_file(directory / FILE, predictor, description, encoded.known)
    return predictor


def _build_model(graph: Graph, encoded: Encoded, scores: Scores, names: list[str]) -> ir.Model:
    """Join the nodes that encode rows and the nodes that score them into one model.

    Args:
        graph: The nodes that encode rows.
        encoded: The outputs of these nodes, which are the inputs of ``scores``.
        scores: The module to export.
        names: The name of each label's probability.
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
    return assemble_model(
        encoded.inputs,
        dict(zip(names, outputs, strict=True)),
        [*graph.nodes, *nodes],
        [*graph.initializers, *initializers],
    )


def _export_scores(scores: Scores, encoded: Encoded) -> ir.Graph:
    """Export the module with PyTorch's exporter, for any number of rows and any list lengths."""
    # The example has two rows, and lists of three, because the exporter takes sizes of 0 and 1 for
    # constants.
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

    A node or an initializer belongs to one graph: it must leave it before it can join another.
    """
    nodes = list(graph)
    outputs = list(graph.outputs)
    initializers = list(graph.initializers.values())
    graph.initializers.clear()
    graph.outputs.clear()
    graph.remove(nodes)
    return nodes, initializers, outputs


def _build_head(
    head: OnnxHead, given: dict[str, ir.Value]
) -> tuple[list[ir.Node], list[ir.Value], list[ir.Value]]:
    """Build the nodes of a user's own head, followed by those that turn its logits into outputs.

    Args:
        head: The head.
        given: The head's inputs, by name.

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
        output.dtype = ir.DataType.FLOAT
        output.shape = ir.Shape(["rows"])
        outputs.append(output)
    return [*nodes, *tape.nodes], initializers, outputs


def assemble_model(
    inputs: list[ir.Value],
    outputs: dict[str, ir.Value],
    nodes: list[ir.Node],
    constants: list[ir.Value],
) -> ir.Model:
    """Make one model of nodes that may come from several graphs.

    Args:
        inputs: The inputs, which keep their names.
        outputs: The outputs by their names.
        nodes: The nodes, in order.
        constants: The initializers.
    """
    # Two graphs may use the same names, so all values except inputs and outputs are renamed. The
    # "/" keeps the new names apart from names of columns, which cannot contain one.
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
