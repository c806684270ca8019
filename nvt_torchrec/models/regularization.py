"""The settings of a model's layers that only affect training.

This module does not import torch, so that the registry of models can import it.
"""

from __future__ import annotations

#: Flags of the trainer. Folding the layers (:func:`.layers.fold_layers`) removes these settings.
REGULARIZATION = ("batch_norm", "dropout")
