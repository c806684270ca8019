"""A model repository for NVIDIA's Triton Inference Server, with its Python backend.

Layout::

    click_probability/config.pbtxt     inputs: a tensor for each column; output: probability
    click_probability/1/model.py       :mod:`inference.export.triton_model`
    click_probability/1/bundle/        the bundle

Triton's Python needs this package, in the version that made the repository, with ``[serve]``.
Triton's tensors have no missing values: they are NaN in a TYPE_FP64 column and the empty string in
a TYPE_STRING column. A list is passed as its JSON text. Features are derived by the model.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from nvt_torchrec.base.files.atomic import new_directory
from nvt_torchrec.clicklog.in_memory.values import read_as_text
from nvt_torchrec.formats.feature_spec.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.raw_types import RAW_TYPES
from nvt_torchrec.inference.model.bundle import BUNDLE_FILE, describe
from nvt_torchrec.inference.predictor import Predictor

NAME = "click_probability"
_MAX_BATCH = 4096


def export_triton(bundle: Path, output: Path) -> None:
    """Write a model repository into a new directory.

    Args:
        bundle: Directory of a bundle.
        output: Directory to make; pass it to ``tritonserver --model-repository``.

    Raises:
        BadInputError, SchemaError: ``bundle`` is not a bundle, or damaged.
        OutputError: ``output`` exists or cannot be written.
    """
    spec = Predictor.load(bundle, check=True).spec
    with new_directory(output) as temporary:
        version = temporary / NAME / "1"
        version.mkdir(parents=True)
        (temporary / NAME / "config.pbtxt").write_text(config(spec))
        for name in (*describe(bundle).files, BUNDLE_FILE):  # not what else lies there
            target = version / "bundle" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(bundle / name, target)
        shutil.copyfile(Path(__file__).with_name("triton_model.py"), version / "model.py")


def config(spec: FeatureSpec) -> str:
    """Return the text of ``config.pbtxt``: an input for each column of the log that is read."""
    reads = spec.read_plan(label=False).reads
    text = read_as_text(reads)
    text |= {read.source for read in reads if RAW_TYPES[read.raw].takes_text or read.multi_hot}
    inputs = ",\n".join(
        _tensor(name, "TYPE_STRING" if name in text else "TYPE_FP64")
        for name in spec.sources(label=False)
    )
    return f"""name: "{NAME}"
backend: "python"
max_batch_size: {_MAX_BATCH}
input [
{inputs}
]
output [
{_tensor("probability", "TYPE_FP32")}
]
dynamic_batching {{ max_queue_delay_microseconds: 500 }}
instance_group [ {{ kind: KIND_CPU, count: 1 }} ]
"""


def _tensor(name: str, kind: str) -> str:
    quoted = json.dumps(name, ensure_ascii=False)
    return f"  {{ name: {quoted}, data_type: {kind}, dims: [ 1 ] }}"
