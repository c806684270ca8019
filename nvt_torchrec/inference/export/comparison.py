"""Check that an exported file gives the bundle's probabilities, for typical and odd values."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import numpy as np
import onnxruntime
import torch

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.feature_spec.raw_types.time import EPOCHS
from nvt_torchrec.formats.feature_spec.read_plan import Read
from nvt_torchrec.formats.feature_spec.spec_variants import drop_tables
from nvt_torchrec.formats.vectors import NO_VECTOR
from nvt_torchrec.formats.workflow_description import WorkflowDescription
from nvt_torchrec.inference.named_tensors import (
    DTYPES,
    MISSING_VALUES,
    OUTPUT,
    list_inputs,
    list_inputs_without_tables,
    to_columns,
)
from nvt_torchrec.inference.predictor import Predictor, name_by_label
from nvt_torchrec.workflows.compiled.compiled_workflow import EncodedRows
from nvt_torchrec.workflows.compiled.dense import get_normalization

#: The number of rows that are compared.
_ROWS = 500
#: The length of their longest lists.
_MAX_LENGTH = 4
#: The first rows have dense values near the training data's mean. For most other rows the model is
#: so sure that its probability, almost 0 or 1, would hide an error in the file.
_TYPICAL_ROWS = 250
#: The distances between these values and the mean, in standard deviations.
_DEVIATIONS = (-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0)
#: Additional values of numeric columns.
_NUMBERS = (-5, -1, 0, 1, 2, 3, 7, 50, 99, 2_000_000_000)
#: Two probabilities may always differ by this much.
_TOLERANCE = 1e-5
#: ONNX Runtime adds float32 values in another order, which changes a sum as if each term were off
#: by up to this relative error. :func:`_estimate_rounding` computes its effect on a probability:
#: far below the tolerance, unless large terms cancel each other out. (Large terms do occur: a share
#: of clicks with a standard deviation of 0.02 is 4,950 deviations large if a caller passes 99.)
_ROUNDING = 1e-6
#: The number of times that values and weights are disturbed by that error, in random directions.
_DRAWS = 5
#: A probability may differ by this many times the largest change that disturbing it caused.
_ROUNDING_FACTOR = 2.0


def check_file(
    file: Path, predictor: Predictor, description: WorkflowDescription, known: dict[str, list]
) -> None:
    """Compare the file's probabilities with the bundle's, for known, unseen and missing values.

    Args:
        file: The exported file, with an input for each column of the log.
        predictor: The predictor from which the file was exported.
        description: The description of the predictor's workflow.
        known: A few values of each categorical column's vocabulary.

    Raises:
        SettingsError: The probabilities differ by more than rounding can explain.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    inputs = list_inputs_without_tables(predictor.row_spec)
    probes = _make_probes(predictor, description, known)
    # A single row as well: an exporter may take a size of 1 for a constant.
    for num_rows in (1, _ROWS):
        rows = {name: values[:num_rows] for name, values in probes.items()}
        encoded = predictor.workflow.transform(predictor.read(to_columns(inputs, rows)))
        expected = predictor.predict_parts([encoded])
        got = np.stack(session.run(name_by_label(OUTPUT, predictor.labels), rows), axis=1)
        differences = np.abs(got - expected)
        allowed = _TOLERANCE + _estimate_rounding(predictor, encoded, expected)
        if not (differences <= allowed).all():
            row, label = np.unravel_index((differences - allowed).argmax(), differences.shape)
            raise SettingsError(
                f"{file.name}: its probabilities differ from the bundle's by "
                f"{differences[row, label]:g}; rounding explains at most {allowed[row, label]:g}. "
                "The file was not written",
                "serve the bundle itself: python -m inference serve --bundle BUNDLE",
            )


@torch.inference_mode()
def _estimate_rounding(
    predictor: Predictor, encoded: EncodedRows, expected: np.ndarray
) -> np.ndarray:
    """Estimate how much rounding may change each probability, float32 [rows, labels].

    A rounded sum is the exact sum of terms that differ in their last digits (Higham 2002,
    "Accuracy and Stability of Numerical Algorithms", §3.1). So the model scores the rows several
    times, with values and weights that are disturbed by that much.

    Args:
        predictor: The predictor.
        encoded: The rows.
        expected: The probabilities without disturbance, float32 [rows, labels].
    """
    model = predictor.model
    largest = np.zeros_like(expected)
    ids = model.fold(encoded.ids)
    embedded = model.lookup(ids)
    vectors = predictor.take_vectors([encoded])
    generator = torch.Generator().manual_seed(0)

    def disturb(values: torch.Tensor) -> torch.Tensor:
        signs = torch.randint(0, 2, values.shape, generator=generator) * 2 - 1
        return values * (1 + _ROUNDING * signs)

    # The head of a custom model is an ONNX file, whose weights PyTorch does not see. The
    # exported file contains its nodes unchanged, so only the steps before it can round differently.
    has_weights = len(list(model.head.parameters())) > 0
    for _ in range(_DRAWS):
        head = model.head
        if has_weights:
            head = copy.deepcopy(head)
            for weight in head.parameters():
                weight.copy_(disturb(weight))
        dense = disturb(torch.from_numpy(encoded.dense)).numpy()
        disturbed = dataclasses.replace(model, head=head)
        dense_vectors = None
        if vectors is not None:
            dense_vectors = disturb(torch.from_numpy(vectors)).numpy()
        logits = disturbed.compute_logits(dense, disturb(embedded), ids, dense_vectors)
        differences = np.abs(torch.sigmoid(logits).numpy() - expected)
        largest = np.maximum(largest, differences)
    return _ROUNDING_FACTOR * largest


def _make_probes(
    predictor: Predictor, description: WorkflowDescription, known: dict[str, list]
) -> dict[str, np.ndarray]:
    """Draw :data:`_ROWS` rows; return their tensors by the names of the file's inputs.

    Args:
        predictor: The predictor.
        description: The description of the predictor's workflow.
        known: A few values of each categorical column's vocabulary.
    """
    spec = drop_tables(predictor.row_spec)
    plan = spec.read_plan(label=False)
    typical = _find_typical_numbers(spec, description)
    known_by_source = {spec.field_sources(name)[0]: values for name, values in known.items()}
    history_by_column: dict[str, str] = {}
    for history in predictor.workflow.histories:
        for name in history.features:
            history_by_column[name] = history.name

    rng = np.random.default_rng(0)
    tensors: dict[str, np.ndarray] = {}
    lengths: dict[str, np.ndarray] = {}
    for column in list_inputs(spec):
        reads = [read for read in plan.reads if read.source == column.name]
        values = [*known_by_source.get(column.name, [])]
        for read in reads:
            values += RAW_TYPES[read.raw].probes
        if column.kind == "string":
            values = _choose_strings(reads, values)
        else:
            values = _choose_numbers(reads, values)
        shape: tuple[int, ...] = (_ROWS,)
        if column.multi_hot:
            shape = (_ROWS, _MAX_LENGTH)
            drawn = rng.integers(0, _MAX_LENGTH + 1, _ROWS)
            # All columns of a history describe the same events, so their lists are equally long.
            name = history_by_column.get(column.name, column.name)
            tensors[column.lengths] = lengths.setdefault(name, drawn)
        else:
            values.append(MISSING_VALUES[column.kind])
        choices = np.array(values, DTYPES[column.kind])
        tensors[column.name] = choices[rng.integers(len(values), size=shape)]
        if column.kind != "string" and typical.get(column.name):
            choices = np.array(typical[column.name], DTYPES[column.kind])
            tensors[column.name][:_TYPICAL_ROWS] = rng.choice(choices, _TYPICAL_ROWS)
    if predictor.workflow.vectors is not None:
        for store in predictor.workflow.vectors.stores:
            numbers = rng.integers(NO_VECTOR, store.count, _ROWS, np.int32)
            vectors = np.empty((_ROWS, store.vectors.num_inputs), np.float32)
            store.take(numbers, vectors)
            vectors[numbers == NO_VECTOR] = np.nan
            tensors[store.vectors.name] = np.ascontiguousarray(vectors[:, :-1])
    return tensors


def _choose_strings(reads: list[Read], values: list) -> list[str]:
    """Convert values to strings of the log; keep the strings that all reads of a column accept."""
    texts = []
    for value in values:
        if isinstance(value, bytes):
            text = value.decode()
        elif isinstance(value, str):
            text = value
        else:
            text = RAW_TYPES[reads[0].raw].to_log_text(value)
        if text and _is_accepted(reads, text):
            texts.append(text)
    return texts


def _is_accepted(reads: list[Read], text: str) -> bool:
    """Return True if every read of a column parses the string as a value that is not missing."""
    try:
        return all(RAW_TYPES[read.raw].parse_log_text(text) is not None for read in reads)
    except ValueError:
        return False


def _choose_numbers(reads: list[Read], values: list) -> list:
    """Return the numbers of :data:`_NUMBERS` and ``values`` that all reads of a column accept."""
    numbers = []
    for value in [*_NUMBERS, *values]:
        if isinstance(value, bytes):
            continue
        if all(_can_hold(read, value) for read in reads):
            numbers.append(value)
    return numbers


def _can_hold(read: Read, number: float) -> bool:
    """Return True if the read's raw type can hold the number, in the unit of the log."""
    return RAW_TYPES[read.raw].contains(number * EPOCHS.get(read.time_format, 1))


def _find_typical_numbers(
    spec: FeatureSpec, description: WorkflowDescription
) -> dict[str, list[float]]:
    """Return numbers near the mean of the training data, by the column of the log."""
    plan = spec.read_plan(label=False)
    center, scale = get_normalization(description.spec, description.statistics)
    typical: dict[str, list[float]] = {}
    for j, column in enumerate(spec.dense):
        if column.derive:
            continue
        kind = RAW_TYPES[column.raw]
        normalized = center[j] + scale[j] * np.array(_DEVIATIONS)
        # Mean and standard deviation belong to transformed values: undo the transform.
        numbers = spec.get_transform(column).invert(normalized, np)
        if kind.is_whole:
            numbers = np.rint(numbers)
        source = plan.reads[plan.dense[j][0]].source
        typical[source] = [x for x in numbers.tolist() if kind.contains(x)]
    return typical
