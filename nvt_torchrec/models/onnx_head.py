"""The head of an own model as ONNX: what a bundle holds in place of the user's code.

PyTorch's exporter makes it of what follows the lookup (:class:`.head.Head`), and ONNX Runtime
executes it, so that serving a bundle imports no module that a file names. A file of ONNX may come
from a stranger: only operators of the standard are allowed, none that holds a graph of its own
(``Loop``, ``If``, ``Scan``), so that the number of operators bounds how often something is
computed, and no data outside of the file.
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

#: The version of ONNX's operators: that of ONNX 1.15 and later.
OPSET = 20
#: The rows that a head is exported with; it takes any number.
_EXPORT_ROWS = 3
#: Rows up to which one thread computes (:data:`inference.model.torch_threads.ONE_THREAD_ROWS`).
_ONE_THREAD_ROWS = 128
_OUTPUT = "logits"


class _ListHead(nn.Module):
    """A head that takes one list of tensors: the exporter names them in that order."""

    def __init__(self, head: Head, names: list[str]) -> None:
        super().__init__()
        self.head, self.names = head, names

    def forward(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        dense, vectors, *more = inputs
        return self.head(dense, vectors, dict(zip(self.names, more, strict=True)))


def make_example_inputs(
    module: object, columns: Columns, rows: int
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return what a module of the contract is given: zeros, for some rows.

    Returns:
        ``dense``, ``vectors``, and by name what else ``forward`` takes.

    Raises:
        ValueError: It takes ids or lengths of what is no categorical column.
    """
    more = {}
    for argument, names in find_raw_columns(module).items():
        if unknown := [name for name in names if name not in columns.categorical]:
            known = ", ".join(columns.categorical)
            raise ValueError(f"{argument} of {unknown[0]!r:.60}: categorical columns are {known}")
        more[argument] = torch.zeros(rows, len(names), dtype=torch.int64)
    if columns.lists:
        shape = rows, len(columns.lists), columns.max_events
        more["lists"] = torch.zeros(*shape, columns.embedding_dim)
        more["present"] = torch.zeros(shape, dtype=torch.bool)
    dense = torch.zeros(rows, len(columns.dense))
    return dense, torch.zeros(rows, len(columns.vectors), columns.embedding_dim), more


def export_head(head: Head, config: ModelConfig) -> bytes:
    """Export what follows the lookup: of ``dense``, ``vectors`` … the ``logits`` [rows, labels].

    ``vectors`` are the embeddings of ``config.features`` alone.

    Raises:
        NotImplementedError: It needs operators that a bundle does not hold.
        UnsupportedStackError: The exporter is not installed.
        Exception: What PyTorch's exporter raises.
    """
    to_proto = import_name("onnx_ir", "to_proto")
    import_name("onnxscript", "opset20")  # the exporter needs it
    dense, vectors, more = make_example_inputs(head.module, config, _EXPORT_ROWS)
    inputs = [dense, vectors[:, : len(config.features)], *more.values()]
    rows = torch.export.Dim("rows", min=1)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it misses torchvision
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = _ListHead(head, [*more]).eval()
        # apart from the second step, whose errors hide those of the first
        exported = torch.export.export(
            module, (inputs,), dynamic_shapes=([{0: rows} for _ in inputs],)
        )
        names = ["dense", "vectors", *more]
        try:
            graph_model = _convert(exported, names)
        except torch.onnx.OnnxExporterError as error:
            try:  # some operators are converted in one form only, as attention in 4 dimensions
                graph_model = _convert(exported.run_decompositions(), names)
            except torch.onnx.OnnxExporterError:
                cause: BaseException = error
                while cause.__cause__ is not None:  # the first error names the operator
                    cause = cause.__cause__
                raise NotImplementedError(str(cause)) from error
    for node in list(graph_model.graph):
        transpose_gather(graph_model.graph, node)
    model = to_proto(graph_model)
    _strip(model)
    content = model.SerializeToString(deterministic=True)
    _check(content)
    return content


def _convert(exported: torch.export.ExportedProgram, names: list[str]) -> ir.Model:
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


def _strip(model: onnx.ModelProto) -> None:
    """Remove what names the user's files and lines: it has no place in a bundle."""
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
    """Return a digest of what a head computes, without its weights."""
    model = _read(content)
    hashed = hashlib.sha256()
    for node in model.graph.node:
        hashed.update(node.SerializeToString(deterministic=True))
    return hashed.hexdigest()


def find_lookups(content: bytes) -> set[str]:
    """Return the names of a module's parameters that are looked up by ids."""
    prefix = "head.module."
    data = {node.input[0] for node in _read(content).graph.node if node.op_type == "Gather"}
    return {name.removeprefix(prefix) for name in data if name.startswith(prefix)}


def _check(content: bytes) -> None:
    """Check what a bundle may hold (:func:`.onnx_checks.check_graph`). Raises ValueError."""
    # imported here, because models of this project are served without ONNX
    check_graph = import_name("nvt_torchrec.models.onnx_checks", "check_graph")
    check_graph(content, _OUTPUT, OPSET)


def _read(content: bytes) -> onnx.ModelProto:
    return import_name("onnx", "load_model_from_string")(content)


def transpose_gather(graph: ir.Graph, node: ir.Node) -> None:
    """Replace ``Gather(axis=1)`` of a matrix by Transpose, Gather(axis=0), Transpose.

    ONNX Runtime gathers along the last axis one value at a time, five times slower. The products
    of pairs are chosen so.
    """
    if node.op_type != "Gather" or node.attributes.get_int("axis") != 1:
        return
    index, shape = node.inputs[1], node.outputs[0].shape
    if index is None or index.const_value is None or index.const_value.size < 2:
        return
    if len(shape or ()) != 2:
        return
    tape = import_name("onnx_ir.tape", "Tape")()
    flipped = tape.op("Transpose", [node.inputs[0]], {"perm": [1, 0]})
    rows = tape.op("Gather", [flipped, index], {"axis": 0})
    chosen = tape.op("Transpose", [rows], {"perm": [1, 0]})
    graph.insert_before(node, tape.nodes)
    node.outputs[0].replace_all_uses_with(chosen, replace_graph_outputs=True)
    graph.remove(node)


class OnnxHead(nn.Module):
    """What follows the lookup, executed by ONNX Runtime on the CPU.

    It is called as :class:`.head.Head` is, and has no parameters.

    Attributes:
        content: The file of ONNX.
        raw_columns: The columns whose ids and lengths it takes.
        inputs: The names of what it is given; the file may leave some of them out.

    Raises:
        ValueError: The file is damaged, or not one that a bundle holds.
    """

    def __init__(self, content: bytes, config: ModelConfig) -> None:
        super().__init__()
        _check(content)
        self.content, self.labels, self._config = content, len(config.labels), config
        self.raw_columns = find_raw_columns(config.own)
        self._one_thread = _open_session(content, 1)
        self._all_threads: Any = None
        self._names = [value.name for value in self._one_thread.get_inputs()]
        lists = ("lists", "present") if config.lists else ()
        self.inputs: tuple[str, ...] = ("dense", "vectors", *self.raw_columns, *lists)
        if unknown := {*self._names} - {*self.inputs}:
            raise ValueError(f"inputs {sorted(unknown)!r:.80}, which no model gets")

    def forward(
        self,
        dense: torch.Tensor,
        vectors: torch.Tensor,
        more: Mapping[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Return logits [B, T] of dense values [B, N], embeddings [B, F, D], and further inputs.

        Raises:
            BadInputError: ONNX Runtime cannot compute them.
        """
        given = {"dense": dense, "vectors": vectors, **(more or {})}
        # arrays whose rows are contiguous: ONNX Runtime reads no strides
        inputs = {name: np.ascontiguousarray(given[name].cpu().numpy()) for name in self._names}
        try:
            (logits,) = self._session(len(dense)).run([_OUTPUT], inputs)
        except Exception as error:  # of ONNX Runtime, which has a class for each status
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
        """Return what a copy is made of: sessions cannot be pickled."""
        return type(self), (self.content, self._config)

    def _session(self, rows: int) -> Any:
        threads = torch.get_num_threads()
        if rows <= _ONE_THREAD_ROWS or threads == 1:
            return self._one_thread
        if self._all_threads is None:  # two threads may both make one: the last one stays
            self._all_threads = _open_session(self.content, threads)
        return self._all_threads


def _open_session(content: bytes, threads: int) -> Any:
    """Open a file of ONNX from memory. Raises ValueError."""
    open_session = import_name("onnxruntime", "InferenceSession")
    options = import_name("onnxruntime", "SessionOptions")()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 4  # errors are raised as well
    # a waiting thread must not take a core from other workers
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        return open_session(content, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # of ONNX Runtime, which has a class for each status
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"not a model that ONNX Runtime opens: {reason:.300}") from None
