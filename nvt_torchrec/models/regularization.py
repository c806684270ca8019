"""The settings of a model's layers that change training alone.

Knows no torch, so that the registry of models can name them.
"""

from __future__ import annotations

from typing import Any

from nvt_torchrec.base.errors import SchemaError
from nvt_torchrec.base.files.validation import convert

#: Flags of the trainer. A model whose layers are folded (:func:`.layers.fold_layers`) has none.
REGULARIZATION = ("batch_norm", "dropout")


def check_regularization(batch_norm: Any, dropout: Any) -> dict[str, Any]:
    """Return the arguments of :class:`.layers.Layers` of these names, as a file says them.

    Raises:
        SchemaError: No layers can be trained with this dropout.
        ValueError: One is of another type.
    """
    share = convert(float, dropout, "dropout")
    if not 0 <= share < 1:
        raise SchemaError(f"no model has a dropout of {share}")
    return {"batch_norm": convert(bool, batch_norm, "batch_norm"), "dropout": share}
