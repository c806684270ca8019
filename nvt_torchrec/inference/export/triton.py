"""A model repository for NVIDIA's Triton Inference Server, with its ONNX Runtime backend.

Layout::

    click_probability/config.pbtxt     inputs: a tensor for each column;
                                       outputs: a probability for each label
    click_probability/1/model.onnx     written by :mod:`inference.export.onnx_file`
"""

from __future__ import annotations

import json
from pathlib import Path

from nvt_torchrec.base.files.atomic import new_directory
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.inference.export.onnx_file import write_model
from nvt_torchrec.inference.named_tensors import MODEL_NAME, OUTPUT, list_inputs_without_tables
from nvt_torchrec.inference.predictor import name_by_label

#: The most rows that Triton puts into one batch.
_MAX_BATCH = 4096
#: Kind of tensor → Triton's name for it.
_TYPES = {
    "string": "TYPE_STRING",
    "int64": "TYPE_INT64",
    "float64": "TYPE_FP64",
    "float32": "TYPE_FP32",
}


def export_triton(bundle: Path, output: Path) -> None:
    """Write a model repository into a new directory.

    Args:
        bundle: The bundle's directory.
        output: The directory to create; pass it to ``tritonserver --model-repository``.

    Raises:
        SettingsError: ONNX's operators cannot encode a column, the file would be too large, or its
            probabilities differ from the bundle's.
        OutputError: ``output`` exists or cannot be written.
    """
    with new_directory(output) as temporary:
        version = temporary / MODEL_NAME / "1"
        version.mkdir(parents=True)
        predictor = write_model(bundle, version)
        text = format_config(predictor.row_spec, predictor.labels)
        (temporary / MODEL_NAME / "config.pbtxt").write_text(text)


def format_config(spec: FeatureSpec, labels: tuple[str, ...]) -> str:
    """Return the content of ``config.pbtxt``."""
    tensors = []
    for column in list_inputs_without_tables(spec):
        for name, (kind, rank) in column.tensors.items():
            size = column.get_second_size(name)
            tensors.append(_describe_tensor(name, _TYPES[kind], rank, size))
    inputs = ",\n".join(tensors)
    names = name_by_label(OUTPUT, labels)
    outputs = ",\n".join(_describe_tensor(name, "TYPE_FP32", 1, 1) for name in names)
    return f"""name: "{MODEL_NAME}"
backend: "onnxruntime"
max_batch_size: {_MAX_BATCH}
input [
{inputs}
]
output [
{outputs}
]
dynamic_batching {{ max_queue_delay_microseconds: 500 }}
instance_group [ {{ kind: KIND_CPU, count: 1 }} ]
"""


def _describe_tensor(name: str, kind: str, rank: int, size: int) -> str:
    """Describe a tensor. Its ``dims`` leave out the batch dimension.

    Triton allows no empty ``dims``: a tensor [rows] of the file is [rows, 1] for clients.
    """
    quoted = json.dumps(name, ensure_ascii=False)
    shape = f"dims: [ {size} ]"
    if rank == 1:
        shape += ", reshape: { shape: [ ] }"
    return f"  {{ name: {quoted}, data_type: {kind}, {shape} }}"
