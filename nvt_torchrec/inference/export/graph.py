"""Encode raw columns with ONNX operators, as the compiled workflow does.

A vocabulary becomes a LabelEncoder, which also maps missing values to their id. :func:`encode`
refuses columns that no standard operator can encode, such as hashed strings.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pyarrow as pa

from nvt_torchrec.base.arrays import to_numpy
from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.formats.feature_spec import CategoricalColumn, FeatureSpec
from nvt_torchrec.formats.feature_spec.columns import FIRST_OOV_ID, NULL_ID
from nvt_torchrec.formats.feature_spec.derivations import DERIVATIONS, Derivation, DerivedValue
from nvt_torchrec.formats.feature_spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.feature_spec.raw_types.base import parse_number
from nvt_torchrec.formats.feature_spec.raw_types.time import EPOCHS
from nvt_torchrec.formats.feature_spec.read_plan import Read
from nvt_torchrec.formats.feature_spec.spec_variants import drop_tables
from nvt_torchrec.formats.vocabularies import read_columns
from nvt_torchrec.formats.workflow_description import COPY_AGAIN, WorkflowDescription
from nvt_torchrec.inference.export.onnx_operators import (
    Graph,
    add_label_encoder,
    hash_murmur3,
    parse_bool,
    parse_hex,
)
from nvt_torchrec.inference.named_tensors import (
    MISSING,
    MISSING_VALUES,
    get_tensor_type,
    list_inputs,
    list_vector_inputs,
)

#: The version of the domain ai.onnx.ml; LabelEncoder takes tensors of keys since version 4.
ML_OPSET = 4
#: The name of the node that fails on malformed hexadecimal values. ONNX Runtime shows the name of
#: the failing node in its error, so the name is the error message.
HEX_ERROR = "hexadecimal digits must be lower case, and 8 or without leading zeros"
#: The most values of a vocabulary that are kept for checking the exported file.
_MAX_KNOWN = 20
#: Kind of tensor → ONNX data type.
_TYPES = {
    "string": ir.DataType.STRING,
    "int64": ir.DataType.INT64,
    "float64": ir.DataType.DOUBLE,
    "float32": ir.DataType.FLOAT,
}
# Reasons for which columns are refused.
_NO_ONNX = "derived by a class that has no ONNX form (compute_onnx)"
_HASHED_STRINGS = "strings are hashed (hash_buckets, num_buckets)"
_TRIMMED = "spaces around strings are removed (trim)"
_TEXT_TIMES = "times are strings (time_format)"
_MIXED = "read both as strings and as numbers, or both as lists and as single values"


@dataclasses.dataclass(frozen=True)
class Encoded:
    """Encoded columns, as values of the graph.

    Attributes:
        inputs: The raw columns.
        dense: Double [rows, dense columns], NaN where missing; None without dense columns.
        singles: Ids, int64 [rows, single-valued columns]; None without single-valued columns.
        lists: Ids, int64 [rows, length] for each multi-hot column.
        lengths: Int64 [rows] for each multi-hot column.
        vectors: Float [rows, width] for each vector, a row of NaN where it is missing.
        known: A few values of each categorical column's vocabulary.
    """

    inputs: list[ir.Value]
    dense: ir.Value | None
    singles: ir.Value | None
    lists: list[ir.Value]
    lengths: list[ir.Value]
    vectors: list[ir.Value]
    known: dict[str, list]

    @property
    def columns(self) -> list[ir.Value]:
        """The inputs of :class:`.onnx_scores.Scores`, in order."""
        tables = [value for value in (self.dense, self.singles) if value is not None]
        return [*tables, *self.lists, *self.lengths, *self.vectors]


def encode(
    graph: Graph, description: WorkflowDescription, path: Path, spec: FeatureSpec
) -> Encoded:
    """Add the nodes that turn raw columns into dense values and ids.

    Args:
        graph: The graph to which the nodes are added.
        description: The workflow's description.
        path: The directory of the workflow, which contains the vocabularies.
        spec: The columns, the histories' columns (multi-hot), and the vectors. All of them become
            inputs.

    Raises:
        SettingsError: Standard operators cannot encode a column.
    """
    vectors = []
    for vector in list_vector_inputs(spec):
        vector_type = ir.TensorType(_TYPES[vector.kind])
        vector_shape = ir.Shape(["rows", vector.width])
        vectors.append(ir.Value(name=vector.name, type=vector_type, shape=vector_shape))
    spec = drop_tables(spec)
    _check_columns(spec)
    plan = spec.read_plan(label=False)
    columns = list_inputs(spec)
    inputs: dict[str, ir.Value] = {}
    for column in columns:
        for name, (kind, rank) in column.tensors.items():
            shape = ir.Shape(["rows", f"length of {column.name}"][:rank])
            inputs[name] = ir.Value(name=name, type=ir.TensorType(_TYPES[kind]), shape=shape)
    # A column of the log may be read in several ways, for example with different null strings.
    kinds = {column.name: column.kind for column in columns}
    sources = []
    for read in plan.reads:
        value = _mark_missing(graph, inputs[read.source], read, kinds[read.source])
        sources.append((value, read))
    features = []
    for feature, indices in zip(spec.features, plan.dense + plan.categorical, strict=True):
        features.append(_derive(graph, feature.derive, [sources[index] for index in indices]))
    dense = features[: len(spec.dense)]
    raw = dict(zip(spec.categorical_names, features[len(spec.dense) :], strict=True))
    ids, known = _encode_categorical(graph, description, path, spec, raw)
    _check_hexadecimal(graph, spec, raw, ids)

    singles = []
    lists = []
    lengths = []
    for category in spec.categorical:
        if not category.multi_hot:
            singles.append(ids[category.name])
            continue
        lists.append(ids[category.name])
        for source in spec.field_sources(category.name):
            lengths.append(inputs[f"{source}.length"])
    return Encoded(
        inputs=[*inputs.values(), *vectors],
        dense=_join_dense(graph, spec, dense),
        singles=_join_columns(graph, singles),
        lists=lists,
        lengths=lengths,
        vectors=vectors,
        known=known,
    )


def _check_columns(spec: FeatureSpec) -> None:
    """Check that standard operators can encode all columns.

    Raises:
        SettingsError: They cannot. The message names the columns and a remedy.
    """
    refused: dict[str, list[str]] = {}
    for column in spec.features:
        if column.derive:
            derived = type(DERIVATIONS[column.derive.kind])
            if derived.compute_onnx is DerivedValue.compute_onnx:
                refused.setdefault(_NO_ONNX, []).append(column.name)
    for category in spec.categorical:
        if category.raw == "string" and category.oov_ids > 1:
            refused.setdefault(_HASHED_STRINGS, []).append(category.name)
    # Column of the log → (is it read as a string, is it read as a list) of each read.
    ways: dict[str, set[tuple[bool, bool]]] = {}
    for read in spec.read_plan(label=False).reads:
        is_text = get_tensor_type(read) == "string"
        ways.setdefault(read.source, set()).add((is_text, read.multi_hot))
        if is_text and read.trim:
            refused.setdefault(_TRIMMED, []).append(read.source)
        if is_text and read.raw == "time":
            refused.setdefault(_TEXT_TIMES, []).append(read.source)
    for source, distinct in ways.items():
        if len(distinct) > 1:
            refused.setdefault(_MIXED, []).append(source)
    if refused:
        reasons = [f"{', '.join(names)}: {reason}" for reason, names in refused.items()]
        raise SettingsError(
            f"columns that ONNX's operators cannot encode: {'; '.join(reasons)}",
            "serve the bundle (`python -m inference serve` answers the same protocol), or train "
            "with a spec without these columns",
        )


def _join_columns(graph: Graph, columns: list[ir.Value]) -> ir.Value | None:
    """Stack columns [rows] into [rows, columns]; return None for no columns.

    With few rows, ONNX Runtime spends most of its time on starting nodes. Concat, Reshape and
    Transpose are three nodes; the usual way, an Unsqueeze of each column, is one node per column.
    """
    if not columns:
        return None
    joined = graph.Reshape(graph.Concat(*columns, axis=0), [len(columns), -1])
    return graph.Transpose(joined, perm=[1, 0])


def _join_dense(graph: Graph, spec: FeatureSpec, columns: list[ir.Value]) -> ir.Value | None:
    """Stack dense columns as double [rows, columns], NaN where missing; None for no columns."""
    is_whole = [RAW_TYPES[column.raw].is_whole for column in spec.dense]
    if all(is_whole):  # converting the stacked columns takes fewer nodes than converting each
        table = _join_columns(graph, columns)
        return None if table is None else _to_double(graph, table)
    doubles = []
    for value, whole in zip(columns, is_whole, strict=True):
        doubles.append(_to_double(graph, value) if whole else value)
    return _join_columns(graph, doubles)


def _mark_missing(graph: Graph, value: ir.Value, read: Read, input_kind: str) -> ir.Value:
    """Replace a column's null values by "", MISSING or NaN, and convert it to the type of a read.

    Args:
        graph: The graph.
        value: The column of the log.
        read: How it is read.
        input_kind: The kind of the input, which is wider if it is read in several ways.
    """
    kind = get_tensor_type(read)
    if kind == "float64" and input_kind == "int64":
        value = _to_double(graph, value)
    if read.multi_hot:
        return value  # a missing list has length 0
    for null in _list_nulls(read, input_kind):
        missing = MISSING_VALUES[kind]
        null = type(missing)(null)  # Equal compares only values of the same type
        value = graph.Where(graph.Equal(value, null), missing, value)
    return value


def _list_nulls(read: Read, input_kind: str) -> Sequence[str | int | float]:
    """Return the values of the input that mean "missing"."""
    if input_kind == "string":
        return read.nulls
    numbers = []
    for text in read.nulls:
        number = parse_number(text)
        # The input is int64, so it never holds a number beyond that range.
        if number is None or abs(number) >= -MISSING:
            continue
        if get_tensor_type(read) != "int64" or float(number).is_integer():
            numbers.append(number)
    return numbers


def _to_double(graph: Graph, value: ir.Value) -> ir.Value:
    """Convert int64 values to double, and MISSING to NaN."""
    numbers = graph.convert(value, "DOUBLE")
    return graph.Where(graph.Equal(value, MISSING), np.nan, numbers)


def _derive(graph: Graph, how: Derivation | None, sources: list[tuple[ir.Value, Read]]) -> ir.Value:
    """Derive a column from its sources, as :func:`clicklog.text.assemble.derive` does."""
    if how is None:
        return sources[0][0]
    values = []
    is_missing = []
    for value, read in sources:
        kind = get_tensor_type(read)
        if kind == "float64":
            is_missing.append(graph.IsNaN(value))
        else:
            is_missing.append(graph.Equal(value, MISSING_VALUES[kind]))
        if how.reads == "time":
            value = graph.Mul(value, EPOCHS[read.time_format])
        values.append(value)
    result = DERIVATIONS[how.kind].compute_onnx(graph, values, how)
    missing = MISSING_VALUES[get_tensor_type(Read("", how.gives))]
    return graph.Where(functools.reduce(graph.Or, is_missing), missing, result)


def _encode_categorical(
    graph: Graph,
    description: WorkflowDescription,
    path: Path,
    spec: FeatureSpec,
    raw: dict[str, ir.Value],
) -> tuple[dict[str, ir.Value], dict[str, list]]:
    """Encode categorical columns; return their ids and a few of their known values, by name."""
    ids: dict[str, ir.Value] = {}
    known: dict[str, list] = {}
    for columns in spec.vocabularies.values():
        names = [column.name for column in columns]
        keys, key_ids = _read_vocabulary(columns[0], description, path)
        column_ids = _look_up(graph, [raw[name] for name in names], columns[0], keys, key_ids)
        ids.update(zip(names, column_ids, strict=True))
        step = len(keys) // _MAX_KNOWN + 1
        sampled_keys = np.array(keys[::step], object).tolist()
        known.update(dict.fromkeys(names, sampled_keys))
    return ids, known


def _look_up(
    graph: Graph,
    values: list[ir.Value],
    column: CategoricalColumn,
    keys: np.ndarray | list[bytes],
    key_ids: np.ndarray,
) -> list[ir.Value]:
    """Look up the ids of columns that share a vocabulary.

    Args:
        graph: The graph.
        values: The columns, [rows] or [rows, length].
        column: One of the columns; all have the same raw type and number of out-of-vocabulary ids.
        keys: The values of the vocabulary, and the value that represents a missing one.
        key_ids: The id of each key.
    """
    flat = values[0]
    if len(values) > 1:
        # All columns go through one LabelEncoder, so that the file holds the vocabulary once.
        flat = _flatten(graph, values)
    is_hashed = column.oov_ids > 1
    if column.raw == "bool":
        flat = parse_bool(graph, flat)
    elif column.raw == "hex32" and is_hashed:
        flat = parse_hex(graph, flat)
    if is_hashed:
        ids = add_label_encoder(graph, flat, keys, key_ids, default=-1)
        buckets = graph.Mod(hash_murmur3(graph, flat), column.oov_ids)
        ids = graph.Where(graph.Less(ids, 0), graph.Add(buckets, FIRST_OOV_ID), ids)
    else:
        ids = add_label_encoder(graph, flat, keys, key_ids, default=FIRST_OOV_ID)
    if len(values) == 1:
        return [ids]
    sizes = [graph.Reshape(graph.Size(value), [1]) for value in values]
    parts = graph.op_multi_out(
        "Split", [ids, graph.Concat(*sizes, axis=0)], {"axis": 0}, num_outputs=len(values)
    )
    shaped = []
    for part, value in zip(parts, values, strict=True):
        shaped.append(graph.Reshape(part, graph.Shape(value)))
    return shaped


def _flatten(graph: Graph, values: list[ir.Value]) -> ir.Value:
    """Concatenate the values of all columns, [all values]."""
    return graph.Concat(*(graph.Reshape(value, [-1]) for value in values), axis=0)


def _read_vocabulary(
    column: CategoricalColumn, description: WorkflowDescription, path: Path
) -> tuple[np.ndarray | list[bytes], np.ndarray]:
    """Read a column's vocabulary; return its values and the missing value, with their ids.

    Strings are as in the log. Hexadecimal values are numbers if the column is hashed, because the
    graph then computes the numbers anyway. Otherwise they are strings: of eight digits, and also
    without leading zeros.
    """
    vocabulary = description.vocabularies[column.name]
    kind = RAW_TYPES[column.raw]
    arrow_types = {vocabulary.name: pa.string() if kind.is_text else pa.int64()}
    (values,) = read_columns(path / vocabulary.file, arrow_types, COPY_AGAIN)
    ids = np.arange(len(values)) + column.reserved_ids
    if kind.is_text:
        return [*values.cast(pa.binary()).to_pylist(), b""], np.append(ids, NULL_ID)
    numbers = to_numpy(values)
    if column.raw == "hex32" and column.oov_ids == 1:
        # A number of fewer than eight digits has two spellings; both are keys.
        is_short = numbers < 1 << 28
        keys = [b"%08x" % number for number in numbers.tolist()]
        keys += [b"%x" % number for number in numbers[is_short].tolist()]
        return [*keys, b""], np.concatenate([ids, ids[is_short], [NULL_ID]])
    return np.append(numbers, MISSING), np.append(ids, NULL_ID)


def _check_hexadecimal(
    graph: Graph, spec: FeatureSpec, texts: dict[str, ir.Value], ids: dict[str, ir.Value]
) -> None:
    """Make the graph fail on strings such as ``68FD1E64``, ``068fd1e64`` and ``xyz``.

    They are not spelled like the vocabulary's keys, and would silently count as out of vocabulary.
    The node that fails is named after the reason.
    """
    names = [c.name for c in spec.categorical if c.raw == "hex32" and c.oov_ids == 1]
    if not names:
        return
    flat_texts = _flatten(graph, [texts[name] for name in names])
    flat_ids = _flatten(graph, [ids[name] for name in names])
    unknown = graph.Compress(flat_texts, graph.Equal(flat_ids, FIRST_OOV_ID), axis=0)
    is_valid = graph.RegexFullMatch(unknown, pattern="[0-9a-f]{8}|0|[1-9a-f][0-9a-f]{0,6}")
    num_invalid = graph.ReduceSum(graph.convert(graph.Not(is_valid), "INT64"), keepdims=0)
    # ONNX has no operator that raises an error. A Gather from [0] fails at index 1 and returns 0 at
    # index 0. The 0 is added to ids because a runtime removes nodes whose result is not used.
    inputs = [graph.add_constant([0]), graph.Min(num_invalid, 1)]
    zero = graph.op("Gather", inputs, name=HEX_ERROR)
    ids[names[0]] = graph.Add(ids[names[0]], zero)
