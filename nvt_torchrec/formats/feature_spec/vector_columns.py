"""Vectors: columns of tables that hold a list of numbers of one length, such as an embedding."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.formats.feature_spec.columns import check_name
from nvt_torchrec.formats.feature_spec.field_checks import check, format_choices
from nvt_torchrec.formats.feature_spec.table_rules import TableRule
from nvt_torchrec.formats.vectors import DTYPES, MAX_WIDTH, StoredVectors

#: The most vectors: each is a file that is mapped, and a layer of a model.
MAX_VECTORS = 100


@dataclasses.dataclass(frozen=True)
class VectorColumn:
    """A vector.

    Attributes:
        name: Its name.
        table: The table that has it, by whose key a row finds it.
        width: The numbers in it.
        dtype: How they are stored: float32 or float16.
        source: The table's column; "": that of its name.
    """

    name: str
    table: str
    width: int
    dtype: str = "float32"
    source: str = ""

    def __post_init__(self) -> None:
        check_name(self.name)
        check(
            self,
            f"vector {self.name}: ",
            ("table", self.table, 'name the [[table]] that has it, such as table = "items"'),
            ("width", 1 <= self.width <= MAX_WIDTH, f"from 1 to {MAX_WIDTH}"),
            ("dtype", self.dtype in DTYPES, format_choices(DTYPES)),
        )

    @property
    def column(self) -> str:
        """The table's column."""
        return self.source or self.name

    @property
    def stored(self) -> StoredVectors:
        """How its values are stored."""
        return StoredVectors(self.name, self.width, self.dtype)


def check_vectors(
    vectors: Sequence[VectorColumn], tables: Sequence[TableRule], names: Sequence[str]
) -> None:
    """Check that each vector has a name of its own, and a table that there is.

    Args:
        vectors: The vectors.
        tables: The tables of the spec.
        names: Of everything else in the output.

    Raises:
        SettingsError: One has not.
    """
    if len(vectors) > MAX_VECTORS:
        raise SettingsError(f"the spec has {len(vectors)} vectors", f"use at most {MAX_VECTORS}")
    table_names = [rule.name for rule in tables]
    taken = [*names]
    for vector in vectors:
        taken += [vector.name, vector.stored.pointer]
        if vector.table not in table_names:
            remedy = f"add a [[table]] of name {vector.table!r}"
            if table_names:
                remedy = format_choices(table_names)
            raise SettingsError(f"vector {vector.name}: table = {vector.table!r}", remedy)
    if vectors and len(set(taken)) < len(taken):
        twice = next(name for name in taken if taken.count(name) > 1)
        raise SettingsError(f"names used twice: {twice}", "rename the vector")
