"""The models of this project, by the value of ``--model``; add another one to :data:`MODELS`.

PyTorch is imported where it is used, so that ``--help`` answers at once.
"""

from __future__ import annotations

import dataclasses
import importlib
from types import ModuleType

from nvt_torchrec.models.interactions import INTERACTIONS, sizes_of


@dataclasses.dataclass(frozen=True)
class KnownModel:
    """A model of this project.

    Attributes:
        module: The module of its function ``build`` (:mod:`.contract`). A function
            ``choose_settings(flags, columns)`` of it, if any, makes settings of the flags' values.
        flags: The flags of the trainer that are settings of the model.
        vector_scale: The default of ``--vector_scale``.
    """

    module: str
    flags: tuple[str, ...]
    vector_scale: float = 1.0

    def load(self) -> ModuleType:
        """Import the module."""
        return importlib.import_module(f"nvt_torchrec.models.{self.module}")


_LAYERS = "over_arch_layer_sizes"

#: The default first.
MODELS = {
    "dlrm": KnownModel(
        "dlrm",
        (
            *("dense_arch_layer_sizes", _LAYERS, "interaction_type"),
            *(name for kind in INTERACTIONS.values() for name in sizes_of(kind)),
        ),
    ),
    "deepfm": KnownModel("deepfm", (_LAYERS,)),
    "dcn_v2": KnownModel(
        "dcn_v2", (_LAYERS, "dcn_num_layers", "dcn_low_rank_dim"), vector_scale=4.0
    ),
    "final_mlp": KnownModel("final_mlp", (_LAYERS,), vector_scale=4.0),
}
DEFAULT_MODEL = next(iter(MODELS))
#: The flags that are settings of a model.
MODEL_FLAGS = tuple(dict.fromkeys(name for model in MODELS.values() for name in model.flags))
