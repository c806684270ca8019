"""Raw types: the kinds of values that a column of a log can hold, and how they are parsed.

To add a raw type, add a class and its line in :data:`RAW_TYPES`.
"""

from __future__ import annotations

from nvt_torchrec.formats.feature_spec.raw_types.base import RawType
from nvt_torchrec.formats.feature_spec.raw_types.integers import Bool, Hex32, Int, Int32
from nvt_torchrec.formats.feature_spec.raw_types.numbers import Float, Label, Weight
from nvt_torchrec.formats.feature_spec.raw_types.string import String
from nvt_torchrec.formats.feature_spec.raw_types.time import Time

#: The raw types by name. ``label``, ``weight`` and ``time`` are read, but are no types of columns.
RAW_TYPES: dict[str, RawType] = {
    kind.name: kind
    for kind in (Label(), Int32(), Float(), Hex32(), Int(), Bool(), Time(), Weight(), String())
}
#: The raw types that dense and categorical columns can have.
DENSE_RAW_TYPES = tuple(name for name, kind in RAW_TYPES.items() if kind.dense)
CATEGORICAL_RAW_TYPES = tuple(name for name, kind in RAW_TYPES.items() if kind.categorical)
