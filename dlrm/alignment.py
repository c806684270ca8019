"""Inputs of the dense layers padded to multiples of 8, without changing their weights.

Tensor cores multiply 16-bit numbers, and TensorFloat-32, at full speed only where rows begin at
multiples of 16 bytes. The 13 dense features and the 479 inputs of the top layers of MLPerf's DLRM
do not. Zeros beside them, and beside the columns of the weight, change no sum.
"""

from __future__ import annotations

import functools

import torch
from torch import nn
from torchrec.models.dlrm import DLRM

from nvt_torchrec.dlrm.layers import ALIGNMENT, PairProducts


def align_inputs(dlrm: DLRM, *, aligned: bool) -> None:
    """Let the first layers below and above the interaction compute with padded inputs, or not.

    Parameters and state dicts stay as they are: a layer pads its weight in each call.
    """
    if isinstance(dlrm.inter_arch, PairProducts):
        dlrm.inter_arch.aligned = aligned
    for part in (dlrm.dense_arch, dlrm.over_arch):
        layer = next((one for one in part.modules() if isinstance(one, nn.Linear)), None)
        if layer is None:  # there are no dense features
            continue
        vars(layer).pop("forward", None)
        if aligned and layer.in_features % ALIGNMENT:
            layer.forward = functools.partial(_aligned_linear, layer)


def _aligned_linear(layer: nn.Linear, values: torch.Tensor) -> torch.Tensor:
    """Compute ``layer``; ``values`` may already have zeros behind the layer's inputs."""
    width = layer.in_features + -layer.in_features % ALIGNMENT
    values = nn.functional.pad(values, (0, width - values.shape[1]))
    weight = nn.functional.pad(layer.weight, (0, width - layer.in_features))
    return nn.functional.linear(values, weight, layer.bias)
