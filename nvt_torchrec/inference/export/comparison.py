"""Check that an exported file gives the bundle's probabilities, of rows of usual and odd values."""

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
    MISSING_OF,
    OUTPUT,
    inputs_without_tables,
    list_inputs,
    to_columns,
)
from nvt_torchrec.inference.predictor import Predictor, name_by_label
from nvt_torchrec.workflows.compiled.compiled_workflow import EncodedRows
from nvt_torchrec.workflows.compiled.dense import get_normalization

#: How many rows are compared.
_ROWS = 500
#: The length of the longest lists in them.
_MAX_LENGTH = 4
#: This many of the first rows have dense values near the mean of the training. For most others the
#: model is so sure that its probability hides what is wrong with the file.
_USUAL_ROWS = 250
#: How many standard deviations lie between these values and the mean.
_DEVIATIONS = (-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0)
#: Further values of dense columns.
_NUMBERS = (-5, -1, 0, 1, 2, 3, 7, 50, 99, 2_000_000_000)
#: Two probabilities may always differ by this much.
_TOLERANCE = 1e-5
#: ONNX Runtime adds float32 in another order, by which a sum changes as if each term were off by
#: up to this share of it. :func:`_estimate_rounding` finds out what that does to a probability:
#: far less than the tolerance, unless large terms cancel each other out. (A share of clicks, of a
#: standard deviation of 0.02, is 4,950 of them if somebody passes 99.)
_ROUNDING = 1e-6
#: How often values and weights are changed by that share, in random directions.
_DRAWS = 5
#: A probability may differ by this many times the largest change that was found.
_ROUNDING_FACTOR = 2.0


def check_file(
    file: Path, predictor: Predictor, description: WorkflowDescription, known: dict[str, list]
) -> None:
    """Compare the probabilities of rows with known, unseen and missing values.

    Args:
        file: The exported file, with an input for each column of the log.
        predictor: The predictor that it was exported from.
        description: The predictor's workflow.
        known: A few values of each categorical column's vocabulary.

    Raises:
        SettingsError: They differ by more than rounding can explain.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    inputs = inputs_without_tables(predictor.row_spec)
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
    """Return by how much rounding may change probabilities, float32 [rows, labels].

    A rounded sum is the exact sum of terms that differ in their last digits (Higham 2002,
    "Accuracy and Stability of Numerical Algorithms", §3.1). So the model is asked again, with
    values and weights that are changed by as much.

    Args:
        predictor: The predictor.
        encoded: The rows.
        expected: Their probabilities, float32 [rows, labels].
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

    # The head of an own model is a file of ONNX, which has no weights here. It is a part of the
    # exported file as it is, so that only what precedes it may be rounded in another way.
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
        logits = disturbed.logits(dense, disturb(embedded), ids, dense_vectors)
        differences = np.abs(torch.sigmoid(logits).numpy() - expected)
        largest = np.maximum(largest, differences)
    return _ROUNDING_FACTOR * largest


def _make_probes(
    predictor: Predictor, description: WorkflowDescription, known: dict[str, list]
) -> dict[str, np.ndarray]:
    """Return the tensors of :data:`_ROWS` rows, by the names of the file's inputs.

    Args:
        predictor: The predictor.
        description: Its workflow.
        known: A few values of each categorical column's vocabulary.
    """
    spec = drop_tables(predictor.row_spec)
    plan = spec.read_plan(label=False)
    usual = _find_usual_numbers(spec, description)
    known_of_source = {spec.field_sources(name)[0]: values for name, values in known.items()}
    history_of: dict[str, str] = {}
    for history in predictor.workflow.histories:
        for name in history.features:
            history_of[name] = history.name

    rng = np.random.default_rng(0)
    tensors: dict[str, np.ndarray] = {}
    lengths: dict[str, np.ndarray] = {}
    for column in list_inputs(spec):
        reads = [read for read in plan.reads if read.source == column.name]
        values = [*known_of_source.get(column.name, [])]
        for read in reads:
            values += RAW_TYPES[read.raw].probes
        if column.kind == "string":
            values = _choose_texts(reads, values)
        else:
            values = _choose_numbers(reads, values)
        shape: tuple[int, ...] = (_ROWS,)
        if column.multi_hot:
            shape = (_ROWS, _MAX_LENGTH)
            drawn = rng.integers(0, _MAX_LENGTH + 1, _ROWS)
            # All values of a history belong to the same events: their lists are equally long.
            name = history_of.get(column.name, column.name)
            tensors[column.lengths] = lengths.setdefault(name, drawn)
        else:
            values.append(MISSING_OF[column.kind])
        choices = np.array(values, DTYPES[column.kind])
        tensors[column.name] = choices[rng.integers(len(values), size=shape)]
        if column.kind != "string" and usual.get(column.name):
            choices = np.array(usual[column.name], DTYPES[column.kind])
            tensors[column.name][:_USUAL_ROWS] = rng.choice(choices, _USUAL_ROWS)
    if predictor.workflow.vectors is not None:
        for store in predictor.workflow.vectors.stores:
            numbers = rng.integers(NO_VECTOR, store.count, _ROWS, np.int32)
            vectors = np.empty((_ROWS, store.vectors.num_inputs), np.float32)
            store.take(numbers, vectors)
            vectors[numbers == NO_VECTOR] = np.nan
            tensors[store.vectors.name] = np.ascontiguousarray(vectors[:, :-1])
    return tensors


def _choose_texts(reads: list[Read], values: list) -> list[str]:
    """Return those of some values, as texts of the log, that all reads of a column accept."""
    texts = []
    for value in values:
        if isinstance(value, bytes):
            text = value.decode()
        elif isinstance(value, str):
            text = value
        else:
            text = RAW_TYPES[reads[0].raw].log_text(value)
        if text and _is_read(reads, text):
            texts.append(text)
    return texts


def _is_read(reads: list[Read], text: str) -> bool:
    """Return whether each read of a column finds a value in a text."""
    try:
        return all(RAW_TYPES[read.raw].from_log_text(text) is not None for read in reads)
    except ValueError:
        return False


def _choose_numbers(reads: list[Read], values: list) -> list:
    """Return those of some values and of :data:`_NUMBERS` that all reads of a column accept."""
    numbers = []
    for value in [*_NUMBERS, *values]:
        if isinstance(value, bytes):
            continue
        if all(_contains(read, value) for read in reads):
            numbers.append(value)
    return numbers


def _contains(read: Read, number: float) -> bool:
    """Return whether a number of the log is one of the raw type's; times may be in seconds."""
    return RAW_TYPES[read.raw].contains(number * EPOCHS.get(read.time_format, 1))


def _find_usual_numbers(
    spec: FeatureSpec, description: WorkflowDescription
) -> dict[str, list[float]]:
    """Return numbers near the mean of the training, by the column of the log."""
    plan = spec.read_plan(label=False)
    center, scale = get_normalization(description.spec, description.statistics)
    usual: dict[str, list[float]] = {}
    for j, column in enumerate(spec.dense):
        if column.derive:
            continue
        kind = RAW_TYPES[column.raw]
        normalized = center[j] + scale[j] * np.array(_DEVIATIONS)
        # Mean and deviation are those of transformed values.
        numbers = spec.get_transform(column).x(normalized, np)
        if kind.is_whole:
            numbers = np.rint(numbers)
        source = plan.reads[plan.dense[j][0]].source
        usual[source] = [x for x in numbers.tolist() if kind.contains(x)]
    return usual
