"""Raw types: what a column of a log may hold, within which limits, and what follows from it.

A new raw type is a class and its line in :data:`RAW_TYPES`.
"""

from __future__ import annotations

from nvt_torchrec.formats.feature_spec.raw_types.base import RawType
from nvt_torchrec.formats.feature_spec.raw_types.integers import Bool, Hex32, Int, Int32
from nvt_torchrec.formats.feature_spec.raw_types.numbers import Float, Label, Weight
from nvt_torchrec.formats.feature_spec.raw_types.string import String
from nvt_torchrec.formats.feature_spec.raw_types.time import Time

#: By name. Labels, weights and times are read, but no column of a specification has their type.
RAW_TYPES: dict[str, RawType] = {
    kind.name: kind
    for kind in (Label(), Int32(), Float(), Hex32(), Int(), Bool(), Time(), Weight(), String())
}
#: The names of those that dense and categorical columns can have.
DENSE_RAW_TYPES = tuple(name for name, kind in RAW_TYPES.items() if kind.dense)
CATEGORICAL_RAW_TYPES = tuple(name for name, kind in RAW_TYPES.items() if kind.categorical)
