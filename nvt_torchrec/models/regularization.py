"""The settings of a model's layers that change training alone.

Knows no torch, so that the registry of models can name them.
"""

from __future__ import annotations

#: Flags of the trainer. A model whose layers are folded (:func:`.layers.fold_layers`) has none.
REGULARIZATION = ("batch_norm", "dropout")
