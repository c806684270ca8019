"""The head of a custom model as an ONNX file, which a bundle contains instead of the user's code.

PyTorch's exporter converts the head (:class:`.head.Head`) to the file, and ONNX Runtime executes
it. So serving a bundle never imports a module that a file names.

The file may come from an untrusted source. So only standard operators are allowed, except for those
that contain a graph (``Loop``, ``If``, ``Scan``), so that the number of operators limits the amount
of computation. References to other files are not allowed either.
"""

from __future__ import annotations

import hashlib
import logging
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.base.versions import import_name
from nvt_torchrec.models.config import ModelConfig
from nvt_torchrec.models.contract import Columns, find_raw_columns
from nvt_torchrec.models.head import Head

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir

#: The version of ONNX's operators, which ONNX 1.15 and later support.
OPSET = 20
#: The number of rows of the example inputs of an export. The file accepts any number of rows, but
#: PyTorch's exporter would treat a dimension of 0 or 1 as a constant.
_EXPORT_ROWS = 3
#: The maximum number of rows computed by a single thread, as in
#: :data:`inference.model.torch_threads.ONE_THREAD_ROWS`.
_ONE_THREAD_ROWS = 128
#: The name of the file's only output.
_OUTPUT = "logits"
#: The name of the input that holds the data's vectors.
DENSE_VECTORS = "dense_vectors"


class _ListHead(nn.Module):
    """A head that takes a list of tensors, because the exporter names inputs by position."""

    def __init__(self, head: Head, names: list[str]) -> None:
        super().__init__()
        self.head = head
        self.names = names

    def forward(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        dense, vectors, *rest = inputs
        more = dict(zip(self.names, rest, strict=True))
        return self.head(dense, vectors, more, more.pop(DENSE_VECTORS, None))


def make_example_inputs(
    module: object, columns: Columns, rows: int
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return inputs of zeros for a module (:mod:`.contract`).

    Returns:
        ``dense`` [rows, dense columns], ``vectors`` [rows, vectors, embedding dim], and the other
        inputs of ``forward`` by name, except for ``dense_vectors``.

    Raises:
        ValueError: The module takes ids or lengths of a column that is not categorical.
    """
    more = {}
    for argument, names in find_raw_columns(module).items():
        for name in names:
            if name not in columns.categorical:
                known = ", ".join(columns.categorical)
                raise ValueError(f"{argument} of {name!r:.60}: the categorical columns are {known}")
        more[argument] = torch.zeros(rows, len(names), dtype=torch.int64)
    if columns.lists:
        shape = rows, len(columns.lists), columns.max_events
        more["lists"] = torch.zeros(*shape, columns.embedding_dim)
        more["present"] = torch.zeros(shape, dtype=torch.bool)
    dense = torch.zeros(rows, len(columns.dense))
    return dense, torch.zeros(rows, len(columns.vectors), columns.embedding_dim), more


def export_head(head: Head, config: ModelConfig) -> bytes:
    """Export a head to an ONNX file.

    The inputs of the file are ``dense``, ``vectors`` (only the embeddings of ``config.features``),
    the other inputs of the module, and ``dense_vectors`` [rows, all inputs] if the data have
    vectors. Its output is ``logits`` [rows, labels].

    Raises:
        NotImplementedError: The module needs an operator that the exporter cannot convert.
        ValueError: The file contains something that is not allowed in a bundle.
        UnsupportedStackError: The exporter is not installed.
        Exception: PyTorch's exporter fails for another reason.
    """
    to_proto = import_name("onnx_ir", "to_proto")
    import_name("onnxscript", "opset20")  # the exporter needs it; this error has a remedy
    dense, vectors, more = make_example_inputs(head.module, config, _EXPORT_ROWS)
    if config.dense_vectors:
        more[DENSE_VECTORS] = torch.zeros(_EXPORT_ROWS, config.vector_inputs)
    inputs = [dense, vectors[:, : len(config.features)], *more.values()]
    rows = torch.export.Dim("rows", min=1)
    # The exporter warns that torchvision is missing.
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = _ListHead(head, [*more]).eval()
        # torch.onnx.export would do this step, too, but hides its errors behind those of the next
        # step.
        exported = torch.export.export(
            module, (inputs,), dynamic_shapes=([{0: rows} for _ in inputs],)
        )
        graph_model = _convert(exported, ["dense", "vectors", *more])
    for node in list(graph_model.graph):
        transpose_gather(graph_model.graph, node)
    model = to_proto(graph_model)
    _remove_metadata(model)
    content = model.SerializeToString(deterministic=True)
    _check(content)
    return content


def _convert(exported: torch.export.ExportedProgram, names: list[str]) -> ir.Model:
    """Convert an exported module to ONNX.

    Some operators can only be converted directly, and others, such as four-dimensional attention,
    only after decomposition. So try both.

    Args:
        exported: The module.
        names: The names of its inputs.

    Raises:
        NotImplementedError: Neither way converts an operator; the message names it.
    """
    try:
        return _convert_operators(exported, names)
    except torch.onnx.OnnxExporterError as error:
        try:
            return _convert_operators(exported.run_decompositions(), names)
        except torch.onnx.OnnxExporterError:
            # The innermost cause of the first error names the operator that the user called.
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            raise NotImplementedError(str(cause)) from error


def _convert_operators(exported: torch.export.ExportedProgram, names: list[str]) -> ir.Model:
    program = torch.onnx.export(
        exported,
        input_names=names,
        output_names=[_OUTPUT],
        opset_version=OPSET,
        dynamo=True,
        verbose=False,
    )
    assert program is not None
    return program.model


def _remove_metadata(model: onnx.ModelProto) -> None:
    """Remove the names and lines of the user's source files, which a bundle must not disclose."""
    del model.metadata_props[:]
    model.doc_string = model.graph.doc_string = ""
    del model.graph.metadata_props[:]
    for node in model.graph.node:
        node.doc_string = ""
        del node.metadata_props[:]
    for value in (*model.graph.value_info, *model.graph.input, *model.graph.output):
        value.doc_string = ""
        del value.metadata_props[:]
    for tensor in model.graph.initializer:
        tensor.doc_string = ""
        del tensor.metadata_props[:]


def digest_graph(content: bytes) -> str:
    """Return a digest of the operators of a head, not including its weights."""
    model = _read(content)
    hashed = hashlib.sha256()
    for node in model.graph.node:
        hashed.update(node.SerializeToString(deterministic=True))
    return hashed.hexdigest()


def find_lookups(content: bytes) -> set[str]:
    """Return the names of a module's parameters that are looked up by ids."""
    prefix = "head.module."
    names = set()
    for node in _read(content).graph.node:
        if node.op_type == "Gather" and node.input[0].startswith(prefix):
            names.add(node.input[0].removeprefix(prefix))
    return names


def _check(content: bytes) -> None:
    """Check that an ONNX file is allowed in a bundle. Raises ValueError."""
    # Imported here, because serving models of this project does not need ONNX.
    check_graph = import_name("nvt_torchrec.models.onnx_checks", "check_graph")
    check_graph(content, _OUTPUT, OPSET)


def _read(content: bytes) -> onnx.ModelProto:
    """Parse an ONNX file."""
    return import_name("onnx", "load_model_from_string")(content)


def transpose_gather(graph: ir.Graph, node: ir.Node) -> None:
    """Replace ``Gather(axis=1)`` of a matrix by Transpose, Gather(axis=0), Transpose.

    ONNX Runtime gathers along the last axis one value at a time, which is five times slower. DLRM's
    pairwise products are such a gather. Other nodes are not changed.
    """
    if node.op_type != "Gather" or node.attributes.get_int("axis") != 1:
        return
    indices = node.inputs[1]
    shape = node.outputs[0].shape
    # Computed indices, or a single constant index, are not worth it.
    if indices is None or indices.const_value is None or indices.const_value.size < 2:
        return
    if shape is None or len(shape) != 2:
        return
    tape = import_name("onnx_ir.tape", "Tape")()
    columns = tape.op("Transpose", [node.inputs[0]], {"perm": [1, 0]})
    gathered = tape.op("Gather", [columns, indices], {"axis": 0})
    result = tape.op("Transpose", [gathered], {"perm": [1, 0]})
    graph.insert_before(node, tape.nodes)
    node.outputs[0].replace_all_uses_with(result, replace_graph_outputs=True)
    graph.remove(node)


class OnnxHead(nn.Module):
    """A head executed by ONNX Runtime on the CPU.

    It is called like :class:`.head.Head`, and has no parameters.

    Attributes:
        content: The ONNX file.
        labels: The number of labels.
        raw_columns: The columns whose ids and lengths it takes.
        inputs: The names of its inputs. The file may lack some of them, because the exporter leaves
            out inputs that the module does not use.

    Raises:
        ValueError: The file is damaged or not allowed in a bundle.
    """

    def __init__(self, content: bytes, config: ModelConfig) -> None:
        super().__init__()
        _check(content)
        self.content = content
        self.labels = len(config.labels)
        self._config = config
        self.raw_columns = find_raw_columns(config.own)
        self.inputs: tuple[str, ...] = ("dense", "vectors", *self.raw_columns)
        if config.lists:
            self.inputs += ("lists", "present")
        if config.dense_vectors:
            self.inputs += (DENSE_VECTORS,)
        self._one_thread = _open_session(content, 1)
        self._all_threads: Any = None  # opened at the first call with many rows
        self._names = [value.name for value in self._one_thread.get_inputs()]
        unknown = {*self._names} - {*self.inputs}
        if unknown:
            raise ValueError(f"unknown inputs {sorted(unknown)!r:.80}")

    def forward(
        self,
        dense: torch.Tensor,
        vectors: torch.Tensor,
        more: Mapping[str, torch.Tensor] | None = None,
        dense_vectors: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the logits [B, T] of rows.

        Args:
            dense: The dense values [B, N].
            vectors: The embeddings [B, F, D].
            more: The arguments ``ids``, ``lengths``, ``lists`` and ``present`` that the module
                takes.
            dense_vectors: The vectors of the data [B, all inputs], each followed by its indicator;
                None if the data have none.

        Raises:
            BadInputError: ONNX Runtime cannot compute the logits.
        """
        given = {"dense": dense, "vectors": vectors, **(more or {})}
        if dense_vectors is not None:
            given[DENSE_VECTORS] = dense_vectors
        # ONNX Runtime ignores strides.
        inputs = {name: np.ascontiguousarray(given[name].cpu().numpy()) for name in self._names}
        try:
            (logits,) = self._choose_session(len(dense)).run([_OUTPUT], inputs)
        except Exception as error:  # ONNX Runtime has a separate class for each status
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise BadInputError(
                f"the bundle's model cannot compute {len(dense)} rows: {reason:.300}",
                "make the bundle again from the checkpoint: python -m inference bundle",
            ) from error
        expected = (len(dense), self.labels)
        if logits.shape != expected or logits.dtype != np.float32:
            raise BadInputError(
                f"the bundle's model computes {logits.dtype} {list(logits.shape)} for {len(dense)} "
                f"rows, not float32 {list(expected)}",
                "make the bundle again from the checkpoint: python -m inference bundle",
            )
        return torch.from_numpy(logits).to(dense.device)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the constructor's arguments, because sessions cannot be pickled."""
        return type(self), (self.content, self._config)

    def _choose_session(self, rows: int) -> Any:
        """Return the session for a number of rows; each session has a fixed number of threads."""
        threads = torch.get_num_threads()
        if rows <= _ONE_THREAD_ROWS or threads == 1:
            return self._one_thread
        # Two threads may both open a session here; the last one stays, and either works.
        if self._all_threads is None:
            self._all_threads = _open_session(self.content, threads)
        return self._all_threads


def _open_session(content: bytes, threads: int) -> Any:
    """Open an ONNX file from memory. Raises ValueError."""
    open_session = import_name("onnxruntime", "InferenceSession")
    options = import_name("onnxruntime", "SessionOptions")()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4  # log only fatal errors; all others are raised
    # Threads that spin while waiting would take a core from other workers.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        return open_session(content, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime has a separate class for each status
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"ONNX Runtime cannot open the model: {reason:.300}") from None
