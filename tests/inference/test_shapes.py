"""Layers that do not fit are found without the memory that their product would take."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nvt_torchrec.inference.model.scoring import ServingModel
from nvt_torchrec.inference.model.tables import Table


class _Largest(TorchDispatchMode):
    """Remembers the largest tensor in memory that an operation gave."""

    elements = 0

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        given = function(*arguments, **(named or {}))
        if isinstance(given, torch.Tensor) and given.device.type != "meta":
            self.elements = max(self.elements, given.numel())
        return given


def test_two_layers_whose_products_are_many() -> None:
    wide = [(torch.ones(4000, 1), torch.ones(4000))]
    top = [(torch.ones(1, 3), torch.ones(1))]
    layers = {"top": top, "branch1": wide, "branch2": wide}
    model = ServingModel.make(Table(torch.ones(5, 1)), (5,), layers)
    with _Largest() as largest, pytest.raises(ValueError, match="layers do not match"):
        model.check(0)
    assert largest.elements < 10_000
