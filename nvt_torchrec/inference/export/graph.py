"""ONNX operators that encode raw columns as the compiled workflow does, except strings' hashes.

Vocabularies are LabelEncoders, which also give missing values their id. What a column needs that no
standard operator computes is refused by :func:`encode`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pyarrow as pa

from nvt_torchrec.base.arrays import to_numpy
from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.formats.feature_spec import CategoricalColumn, FeatureSpec
from nvt_torchrec.formats.feature_spec.columns import FIRST_OOV_ID, NULL_ID
from nvt_torchrec.formats.feature_spec.derivations import DERIVATIONS, Derivation, DerivedValue
from nvt_torchrec.formats.feature_spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.feature_spec.raw_types.base import number_of
from nvt_torchrec.formats.feature_spec.raw_types.time import EPOCHS
from nvt_torchrec.formats.feature_spec.read_plan import Read
from nvt_torchrec.formats.vocabularies import read_columns
from nvt_torchrec.formats.workflow_description import COPY_AGAIN, WorkflowDescription
from nvt_torchrec.inference.export.onnx_operators import (
    Graph,
    boolean,
    hexadecimal,
    label_encoder,
    murmur3,
)
from nvt_torchrec.inference.named_tensors import MISSING, MISSING_OF, Input, inputs_of, kind_of

ML_OPSET = 4
#: The name of a node that fails, which ONNX Runtime's errors show.
HEXADECIMAL = "hexadecimal digits must be lower case, and 8 or without leading zeros"
#: How many values of a vocabulary are kept for trying the file.
_KNOWN = 20
_TYPES = {
    "string": ir.DataType.STRING, "int64": ir.DataType.INT64, "float64": ir.DataType.DOUBLE,
}  # fmt: skip


def _check_columns(spec: FeatureSpec) -> None:
    """Check that standard operators encode all columns.

    Raises:
        SettingsError: They do not; names the columns and what to do instead.
    """
    reads = spec.read_plan(label=False).reads
    kinds: dict[str, set] = {}
    for read in reads:
        kinds.setdefault(read.source, set()).add((kind_of(read) == "string", read.multi_hot))
    hashed = [c.name for c in spec.categorical if c.raw == "string" and c.oov_ids > 1]
    refused = {
        "derived by a class that does not say how ONNX computes it (compute_onnx)": [
            c.name
            for c in spec.features
            if c.derive
            and type(DERIVATIONS[c.derive.kind]).compute_onnx is DerivedValue.compute_onnx
        ],
        "strings are hashed (hash_buckets, num_buckets)": hashed,
        "spaces around texts are removed (trim)": [
            read.source for read in reads if read.trim and kind_of(read) == "string"
        ],
        "times are texts (time_format)": [
            read.source for read in reads if read.raw == "time" and kind_of(read) == "string"
        ],
        "read as texts and as numbers, or as lists and single values": [
            name for name, ways in kinds.items() if len(ways) > 1
        ],
    }
    found = [f"{', '.join(names)}: {what}" for what, names in refused.items() if names]
    if found:
        raise SettingsError(
            f"columns that ONNX's operators cannot encode: {'; '.join(found)}",
            "serve the bundle (`python -m inference serve` answers the same protocol), or train "
            "with a spec without these",
        )


@dataclasses.dataclass(frozen=True)
class Encoded:
    """What the model takes: values of the graph, None where there is no such column.

    Attributes:
        inputs: The raw columns.
        dense: Double [rows, dense columns], NaN where missing.
        singles: Ids, int64 [rows, columns without lists].
        lists: Ids, int64 [rows, length] for each column of lists.
        lengths: Int64 [rows] for each column of lists.
        known: A few values of each categorical column's vocabulary.
    """

    inputs: list[ir.Value]
    dense: ir.Value | None
    singles: ir.Value | None
    lists: list[ir.Value]
    lengths: list[ir.Value]
    known: dict[str, list]

    @property
    def columns(self) -> list[ir.Value]:
        """What the model takes, in order."""
        some = [value for value in (self.dense, self.singles) if value is not None]
        return [*some, *self.lists, *self.lengths]


def encode(
    graph: Graph, description: WorkflowDescription, path: Path, spec: FeatureSpec
) -> Encoded:
    """Make the nodes from raw columns to dense values and ids, of the workflow at ``path``.

    ``spec`` has lists of the values of histories as well.

    Raises:
        SettingsError: There are columns that ONNX cannot encode.
    """
    _check_columns(spec)
    plan, read = spec.read_plan(label=False), inputs_of(spec)
    inputs = {
        name: ir.Value(name=name, type=ir.TensorType(_TYPES[kind]), shape=_shape(column, rank))
        for column in read
        for name, (kind, rank) in column.tensors.items()
    }
    kinds = {column.name: column.kind for column in read}
    sources = [_present(graph, inputs[r.source], r, kinds[r.source]) for r in plan.reads]
    values = [
        _feature(graph, column.derive, [(sources[index], plan.reads[index]) for index in places])
        for column, places in zip(spec.features, plan.dense + plan.categorical, strict=True)
    ]
    dense, categorical = values[: len(spec.dense)], values[len(spec.dense) :]
    ids: dict[str, ir.Value] = {}
    known: dict[str, list] = {}
    for columns in spec.vocabularies.values():
        of_columns = [categorical[spec.categorical.index(column)] for column in columns]
        keys, places = _vocabulary(columns[0], description, path)
        names = [column.name for column in columns]
        ids |= zip(names, _ids(graph, of_columns, columns[0], keys, places), strict=True)
        some = np.array(keys[:: len(keys) // _KNOWN + 1], object).tolist()
        known |= dict.fromkeys(names, some)
    texts = dict(zip(spec.categorical_names, categorical, strict=True))
    _check_hexadecimal(graph, spec, texts, ids)
    lists = [column for column in spec.categorical if column.multi_hot]
    singles = [ids[column.name] for column in spec.categorical if not column.multi_hot]
    return Encoded(
        list(inputs.values()),
        _dense(graph, [RAW_TYPES[column.raw].is_whole for column in spec.dense], dense),
        _table(graph, singles),
        [ids[column.name] for column in lists],
        [inputs[f"{source}.length"] for column in lists for source in spec.sources_of(column.name)],
        known,
    )


def _shape(column: Input, rank: int) -> ir.Shape:
    return ir.Shape(["rows", f"length of {column.name}"][:rank])


def _table(graph: Graph, columns: list[ir.Value]) -> ir.Value | None:
    """Return columns [rows] as [rows, columns], with fewer nodes than an Unsqueeze of each."""
    if not columns:
        return None
    joined = graph.Reshape(graph.Concat(*columns, axis=0), [len(columns), -1])
    return graph.Transpose(joined, perm=[1, 0])


def _dense(graph: Graph, whole: list[bool], columns: list[ir.Value]) -> ir.Value | None:
    if all(whole):  # converted together, with fewer nodes
        table = _table(graph, columns)
        return table and _as_double(graph, table)
    columns = [_as_double(graph, x) if w else x for x, w in zip(columns, whole, strict=True)]
    return _table(graph, columns)


def _present(graph: Graph, value: ir.Value, read: Read, kind: str) -> ir.Value:
    """Return a column as it is read, with "", MISSING or NaN where it is missing."""
    if kind_of(read) == "float64" and kind == "int64":
        value = _as_double(graph, value)
    if kind == "string":
        nulls: Sequence[Any] = read.nulls
    else:
        numbers = [number_of(text) for text in read.nulls]
        whole = kind_of(read) == "int64"
        finite = [n for n in numbers if n is not None and abs(n) < -MISSING]
        nulls = [n for n in finite if not whole or float(n).is_integer()]
    for null in () if read.multi_hot else nulls:
        missing = MISSING_OF[kind_of(read)]
        null = type(missing)(null)
        value = graph.Where(graph.Equal(value, null), missing, value)
    return value


def _as_double(graph: Graph, value: ir.Value) -> ir.Value:
    numbers = graph.convert(value, "DOUBLE")
    return graph.Where(graph.Equal(value, MISSING), np.nan, numbers)


def _feature(
    graph: Graph, how: Derivation | None, sources: list[tuple[ir.Value, Read]]
) -> ir.Value:
    """Return a column, derived as :func:`clicklog.text.assemble.derive` does."""
    values = [value for value, _ in sources]
    if how is None:
        return values[0]
    absent = []
    for value, read in sources:
        missing = MISSING_OF[kind_of(read)]
        is_number = kind_of(read) == "float64"
        absent.append(graph.IsNaN(value) if is_number else graph.Equal(value, missing))
    if how.reads == "time":
        values = [graph.Mul(time, EPOCHS[read.time_format]) for time, read in sources]
    result = DERIVATIONS[how.kind].compute_onnx(graph, values, how)
    missing = MISSING_OF[kind_of(Read("", how.gives))]
    return graph.Where(functools.reduce(graph.Or, absent), missing, result)


def _ids(
    graph: Graph,
    values: list[ir.Value],
    column: CategoricalColumn,
    keys: np.ndarray | list[bytes],
    places: np.ndarray,
) -> list[ir.Value]:
    """Return the ids of columns that share the vocabulary of ``column``, keys and their ids."""
    hashed = column.oov_ids > 1
    flat = values[0]
    if len(values) > 1:
        flat = graph.Concat(*(graph.Reshape(value, [-1]) for value in values), axis=0)
    if column.raw == "bool":
        flat = boolean(graph, flat)
    elif column.raw == "hex32" and hashed:
        flat = hexadecimal(graph, flat)
    ids = label_encoder(graph, flat, keys, places, -1 if hashed else FIRST_OOV_ID)
    if hashed:
        buckets = graph.Mod(murmur3(graph, flat), column.oov_ids)
        ids = graph.Where(graph.Less(ids, 0), graph.Add(buckets, FIRST_OOV_ID), ids)
    if len(values) == 1:
        return [ids]
    sizes = [graph.Reshape(graph.Size(value), [1]) for value in values]
    parts = graph.op_multi_out(
        "Split", [ids, graph.Concat(*sizes, axis=0)], {"axis": 0}, num_outputs=len(values)
    )
    return [
        graph.Reshape(part, graph.Shape(value)) for part, value in zip(parts, values, strict=True)
    ]


def _vocabulary(
    column: CategoricalColumn, description: WorkflowDescription, path: Path
) -> tuple[np.ndarray | list[bytes], np.ndarray]:
    """Return the values of a column's vocabulary, and the missing one, with their ids.

    Texts are as in the log. Hexadecimal numbers are numbers if the column is hashed, because these
    are computed anyway; else texts of eight digits, and without leading zeros.
    """
    vocabulary, kind = description.vocabularies[column.name], RAW_TYPES[column.raw]
    kinds = {vocabulary.name: pa.string() if kind.is_text else pa.int64()}
    (values,) = read_columns(path / vocabulary.file, kinds, COPY_AGAIN)
    ids = np.arange(len(values)) + column.reserved_ids
    if kind.is_text:
        return [*values.cast(pa.binary()).to_pylist(), b""], np.append(ids, NULL_ID)
    if column.raw == "hex32" and column.oov_ids == 1:
        numbers = to_numpy(values)
        short = numbers < 1 << 28
        keys = [b"%08x" % n for n in numbers.tolist()]
        keys += [b"%x" % n for n in numbers[short].tolist()]
        return [*keys, b""], np.concatenate([ids, ids[short], [NULL_ID]])
    return np.append(to_numpy(values), MISSING), np.append(ids, NULL_ID)


def _check_hexadecimal(
    graph: Graph, spec: FeatureSpec, texts: dict[str, ir.Value], ids: dict[str, ir.Value]
) -> None:
    """Make runs fail, with a node named after the reason, for texts that no vocabulary spells so.

    They would silently be out of vocabulary: ``68FD1E64``, ``068fd1e64``, or no digits at all.
    """
    names = [c.name for c in spec.categorical if c.raw == "hex32" and c.oov_ids == 1]
    if names:
        flat, places = (
            graph.Concat(*(graph.Reshape(values[name], [-1]) for name in names), axis=0)
            for values in (texts, ids)
        )
        unknown = graph.Compress(flat, graph.Equal(places, FIRST_OOV_ID), axis=0)
        spelled = graph.RegexFullMatch(unknown, pattern="[0-9a-f]{8}|0|[1-9a-f][0-9a-f]{0,6}")
        wrong = graph.ReduceSum(graph.convert(graph.Not(spelled), "INT64"), keepdims=0)
        only = [graph._value([0]), graph.Min(wrong, 1)]
        zero = graph.op("Gather", only, name=HEXADECIMAL)
        ids[names[0]] = graph.Add(ids[names[0]], zero)
