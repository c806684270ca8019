"""Vectors: columns of tables whose rows hold lists of the same length, such as embeddings."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.formats.feature_spec.columns import check_name
from nvt_torchrec.formats.feature_spec.field_checks import check, format_choices
from nvt_torchrec.formats.feature_spec.table_rules import TableRule
from nvt_torchrec.formats.vectors import DTYPES, MAX_WIDTH, StoredVectors

#: The largest number of vectors; each needs a mapped file, and a layer in models.
MAX_VECTORS = 100


@dataclasses.dataclass(frozen=True)
class VectorColumn:
    """A column of a table that holds a vector for each key.

    Attributes:
        name: The name of the vector in the output.
        table: The name of the table. A row of the log gets the vector of the table's row with the
            same key.
        width: The length of the vector.
        dtype: The dtype in which it is stored, float32 or float16.
        source: The table's column; "" if it has the same name.
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
            ("table", self.table, 'name the [[table]] that holds it, such as table = "items"'),
            ("width", 1 <= self.width <= MAX_WIDTH, f"give an integer from 1 to {MAX_WIDTH}"),
            ("dtype", self.dtype in DTYPES, format_choices(DTYPES)),
        )

    @property
    def column(self) -> str:
        """The name of the table's column."""
        return self.source or self.name

    @property
    def stored(self) -> StoredVectors:
        """The name, width and dtype that the stored file has."""
        return StoredVectors(self.name, self.width, self.dtype)


def check_vectors(
    vectors: Sequence[VectorColumn], tables: Sequence[TableRule], names: Sequence[str]
) -> None:
    """Check that the names of vectors are unique and that their tables exist.

    Args:
        vectors: The vectors.
        tables: The tables of the spec.
        names: The names of everything else in the output.

    Raises:
        SettingsError: A name is used twice, a table does not exist, or there are too many vectors.
    """
    if len(vectors) > MAX_VECTORS:
        raise SettingsError(f"the spec has {len(vectors)} vectors", f"use at most {MAX_VECTORS}")
    table_names = [rule.name for rule in tables]
    taken = [*names]
    for vector in vectors:
        taken += [vector.name, vector.stored.pointer]
        if vector.table not in table_names:
            remedy = f"add a [[table]] with name = {vector.table!r}"
            if table_names:
                remedy = format_choices(table_names)
            raise SettingsError(f"vector {vector.name}: table = {vector.table!r}", remedy)
    if vectors and len(set(taken)) < len(taken):
        twice = next(name for name in taken if taken.count(name) > 1)
        raise SettingsError(f"names used twice: {twice}", "rename the vector")
