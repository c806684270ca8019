"""Whether an exported file computes what the bundle computes, by rows of known and odd values."""

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
from nvt_torchrec.formats.workflow_description import WorkflowDescription
from nvt_torchrec.inference.named_tensors import DTYPES, MISSING_OF, OUTPUT, inputs_of, to_columns
from nvt_torchrec.inference.predictor import Predictor, name_by_label
from nvt_torchrec.workflows.compiled.compiled_workflow import EncodedRows
from nvt_torchrec.workflows.compiled.dense import normalization

_ROWS, _LONGEST_LIST = 500, 4
#: The first rows have dense values such as those of the training: the model is sure of most others,
#: whatever is wrong with the file.
_USUAL_ROWS = 250
#: By how many standard deviations these values are beside the mean.
_DEVIATIONS = (-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0)
#: Further values of dense columns.
_NUMBERS = (-5, -1, 0, 1, 2, 3, 7, 50, 99, 2_000_000_000)
#: The largest difference of two probabilities that is right for every row.
_TOLERANCE = 1e-5
#: ONNX Runtime adds float32 in another order, and each sum then is off by up to so much of its
#: terms. A difference may be twice the largest that values and weights which are off by as much
#: make, in so many draws. It is far below the tolerance, unless large terms cancel each other out:
#: a share of clicks, of a standard deviation of 0.02, is 4,950 of them if somebody passes 99.
_ROUNDING, _DRAWS, _ROUNDING_FACTOR = 1e-6, 5, 2.0


def check_file(
    file: Path, predictor: Predictor, description: WorkflowDescription, known: dict[str, list]
) -> None:
    """Compare probabilities of known, unseen and missing values.

    Args:
        file: The exported file.
        predictor: What it was exported from.
        description: The predictor's workflow.
        known: A few values of each categorical column's vocabulary.

    Raises:
        SettingsError: They differ by more than rounding.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    inputs = inputs_of(predictor.row_spec)
    probes = _make_probes(predictor, description, known)
    for count in (1, _ROWS):
        some = {name: values[:count] for name, values in probes.items()}
        encoded = predictor.workflow.transform(predictor.read(to_columns(inputs, some)))
        expected = predictor.predict_encoded(encoded.dense, encoded.ids)
        got = np.stack(session.run(name_by_label(OUTPUT, predictor.labels), some), axis=1)
        differences = np.abs(got - expected)
        allowed = _TOLERANCE + _estimate_rounding(predictor, encoded, expected)
        if not (differences <= allowed).all():
            row, label = np.unravel_index((differences - allowed).argmax(), differences.shape)
            raise SettingsError(
                f"{file.name}: its probabilities differ from the bundle's by "
                f"{differences[row, label]:g}, at most {allowed[row, label]:g} is right; it was "
                "not written",
                "serve the bundle itself: python -m inference serve --bundle BUNDLE",
            )


@torch.inference_mode()
def _estimate_rounding(
    predictor: Predictor, encoded: EncodedRows, expected: np.ndarray
) -> np.ndarray:
    """Return by how much rounding may change probabilities, float32 [rows, labels].

    Rounded sums are the exact sums of terms that are off in their last digits (Higham 2002,
    "Accuracy and Stability of Numerical Algorithms", §3.1). So the model is asked again, with
    values and weights that are off by as much.
    """
    model, largest = predictor.model, np.zeros_like(expected)
    ids = model.fold(encoded.ids)
    embedded = model.lookup(ids)
    generator = torch.Generator().manual_seed(0)

    def disturb(values: torch.Tensor) -> torch.Tensor:
        signs = torch.randint(0, 2, values.shape, generator=generator) * 2 - 1
        return values * (1 + _ROUNDING * signs)

    has_weights = any(True for _ in model.head.parameters())
    for _ in range(_DRAWS):
        head = model.head
        if has_weights:  # a file of ONNX, which an own model is, follows as it is
            head = copy.deepcopy(head)
            for weight in head.parameters():
                weight.copy_(disturb(weight))
        dense = disturb(torch.from_numpy(encoded.dense)).numpy()
        disturbed = dataclasses.replace(model, head=head)
        logits = disturbed.logits(dense, disturb(embedded), ids)
        differences = np.abs(torch.sigmoid(logits).numpy() - expected)
        largest = np.maximum(largest, differences)
    return _ROUNDING_FACTOR * largest


def _make_probes(
    predictor: Predictor, description: WorkflowDescription, known: dict[str, list]
) -> dict[str, np.ndarray]:
    """Return tensors of rows, by name; the lists of a history are of the same lengths."""
    spec = predictor.row_spec
    history_of = {name: h.name for h in predictor.workflow.histories for name in h.features}
    usual = _find_usual_numbers(spec, description)
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
        shape = (_ROWS, _LONGEST_LIST) if column.multi_hot else (_ROWS,)
        if column.multi_hot:
            drawn = rng.integers(0, _LONGEST_LIST + 1, _ROWS)
            name = history_of.get(column.name, column.name)
            tensors[column.lengths] = lengths.setdefault(name, drawn)
        else:
            values.append(MISSING_OF[column.kind])
        array = np.array(values, DTYPES[column.kind])
        tensors[column.name] = array[rng.integers(len(values), size=shape)]
        if column.kind != "string" and usual.get(column.name):
            array = np.array(usual[column.name], DTYPES[column.kind])
            tensors[column.name][:_USUAL_ROWS] = rng.choice(array, _USUAL_ROWS)
    return tensors


def _find_usual_numbers(
    spec: FeatureSpec, description: WorkflowDescription
) -> dict[str, list[float]]:
    """Return numbers near the mean of the training, by the column of the log."""
    plan = spec.read_plan(label=False)
    center, scale = normalization(description.spec, description.statistics)
    usual: dict[str, list[float]] = {}
    for j, column in enumerate(spec.dense):
        if column.derive:
            continue
        kind = RAW_TYPES[column.raw]
        deviations = np.array(_DEVIATIONS)
        numbers = spec.transform_of(column).x(center[j] + scale[j] * deviations, np)
        if kind.is_whole:
            numbers = np.rint(numbers)
        source = plan.reads[plan.dense[j][0]].source
        usual[source] = [x for x in numbers.tolist() if kind.contains(x)]
    return usual


def _as_text(reads: list[Read], value: int | str) -> str:
    return value if isinstance(value, str) else RAW_TYPES[reads[0].raw].log_text(value)


def _is_read(reads: list[Read], text: str) -> bool:
    try:
        return all(RAW_TYPES[read.raw].from_log_text(text) is not None for read in reads)
    except ValueError:
        return False
