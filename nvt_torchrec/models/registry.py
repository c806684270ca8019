"""The models of this project by the value of ``--model``. New models are added to :data:`MODELS`.

PyTorch is imported inside functions, so that ``--help`` is fast.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
from types import ModuleType

from nvt_torchrec.models.interactions import INTERACTIONS, list_sizes
from nvt_torchrec.models.regularization import REGULARIZATION

#: The maximum of ``vector_scale``: products of two vectors stay far below the maximum of float32.
MAX_VECTOR_SCALE = 1e6


@dataclasses.dataclass(frozen=True)
class KnownModel:
    """A model of this project, whose function ``build`` is in the module with the model's name.

    Attributes:
        flags: The flags of the trainer that are settings of the model.
        vector_scale: The default of ``--vector_scale``.
        attends: Whether the model takes the events of histories one by one.
    """

    flags: tuple[str, ...]
    vector_scale: float = 1.0
    attends: bool = False


#: The flags of the layers at the end, which all models have.
_LAYER_FLAGS = ("over_arch_layer_sizes", *REGULARIZATION)
#: The flags of the sizes of all interactions of a DLRM.
_INTERACTION_SIZES = tuple(
    itertools.chain.from_iterable(list_sizes(kind) for kind in INTERACTIONS.values())
)

MODELS = {
    "dlrm": KnownModel(
        ("dense_arch_layer_sizes", *_LAYER_FLAGS, "interaction_type", *_INTERACTION_SIZES)
    ),
    "deepfm": KnownModel(_LAYER_FLAGS),
    "dcn_v2": KnownModel((*_LAYER_FLAGS, "dcn_num_layers", "dcn_low_rank_dim"), vector_scale=4.0),
    "final_mlp": KnownModel(_LAYER_FLAGS, vector_scale=4.0),
    "din": KnownModel(_LAYER_FLAGS, attends=True),
}
DEFAULT_MODEL = "dlrm"
#: The flags that are settings of any model, each once.
MODEL_FLAGS = tuple(
    dict.fromkeys(itertools.chain.from_iterable(model.flags for model in MODELS.values()))
)


def list_model_flags(model: str) -> tuple[str, ...]:
    """Return the flags that are settings of a model; a custom model has none."""
    return MODELS[model].flags if model in MODELS else ()


def load_model(name: str) -> ModuleType:
    """Import the module of a model of this project.

    The module has a function ``build`` (:mod:`.contract`). It may also have a function
    ``choose_settings(flags, columns)``, which returns the settings of ``build`` for the values of
    the flags.
    """
    return importlib.import_module(f"nvt_torchrec.models.{name}")
