"""Model of Triton's Python backend: raw columns → probability. Copied as ``1/model.py``.

Beside it is ``bundle/``.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

from nvt_torchrec.base.errors import ClickLogError
from nvt_torchrec.base.files.validation import strict_json
from nvt_torchrec.inference.predictor import Predictor
from nvt_torchrec.inference.server.batching import join

BUNDLE = Path(__file__).resolve().parent / "bundle"


class TritonPythonModel:
    """The interface of Triton's Python backend."""

    def initialize(self, args: dict[str, str]) -> None:
        """Open the bundle, on the GPU of an instance of KIND_GPU, and compare its digests.

        Args:
            args: Triton's arguments: ``model_instance_kind``, ``model_instance_device_id``.
        """
        gpu = args["model_instance_kind"] == "GPU"
        device = f"cuda:{args['model_instance_device_id']}" if gpu else "cpu"
        self._predictor = Predictor.load(BUNDLE, device=device, check=True)
        spec = self._predictor.spec
        self._lists = {read.source: read.multi_hot for read in spec.read_plan(label=False).reads}

    def execute(self, requests: list) -> list:
        """Return a response for each request: an error for one with a bad row."""
        responses: list = [None] * len(requests)
        good = {}
        for index, request in enumerate(requests):
            try:
                good[index] = self._encode(request)
            except (ClickLogError, ValueError) as error:
                responses[index] = pb_utils.InferenceResponse(
                    output_tensors=[], error=pb_utils.TritonError(str(error))
                )
        if good:
            scores = self._predictor.predict_encoded(*join(list(good.values())))
            ends = np.cumsum([len(rows) for rows in good.values()])
            for index, part in zip(good, np.split(scores, ends[:-1]), strict=True):
                tensors = [pb_utils.Tensor("probability", part.reshape(-1, 1))]
                error = None
                if not np.isfinite(part).all():
                    tensors, error = [], pb_utils.TritonError("the model computed the score NaN")
                responses[index] = pb_utils.InferenceResponse(output_tensors=tensors, error=error)
        return responses

    def finalize(self) -> None:
        """Release the model."""
        self._predictor = None

    def _encode(self, request):
        columns = {}
        for name, lists in self._lists.items():
            values = pb_utils.get_input_tensor_by_name(request, name).as_numpy().reshape(-1)
            if values.dtype == object:  # TYPE_STRING: bytes
                values = [value.decode() for value in values]
                if lists:
                    values = [strict_json(value) if value else None for value in values]
            columns[name] = values
        predictor = self._predictor
        return predictor.workflow.transform(predictor.read(columns))
