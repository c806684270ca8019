"""Tables that are joined to the log by a key: what is known of a user, an item, a campaign."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.formats.feature_spec.columns import CategoricalColumn, DenseColumn, InputFormat
from nvt_torchrec.formats.feature_spec.field_checks import check, one_of


@dataclasses.dataclass(frozen=True)
class TableRule:
    """A table whose columns are columns of the rows that have its key.

    Attributes:
        name: Of the table; columns of the spec name it.
        path: Its files, relative to the directory of the log: a name or a glob. A run may name
            others (``--table``).
        key: The columns of the log that hold the key; each is compared as its feature is read.
        key_names: The columns of the table with the key, in the order of ``key``; (): the same
            names.
        input: The format of its files; None: by the ending of their names, text with a header.
    """

    name: str
    path: str
    key: tuple[str, ...]
    key_names: tuple[str, ...] = ()
    input: InputFormat | None = None

    def __post_init__(self) -> None:
        inside = not self.path.startswith("/") and ".." not in self.path.split("/")
        names = self.key_names or self.key
        check(
            self,
            f"table {self.name}: ",
            ("name", self.name.isidentifier(), "use letters, digits and _ alone"),
            ("path", self.path, 'name its files, such as path = "items.csv"'),
            (
                "path",
                inside and "://" not in self.path,
                f"write a path in the directory of the log, and pass --table {self.name}=PATH",
            ),
            ("key", self.key and all(self.key), 'name columns of the log, such as key = ["item"]'),
            ("key", len(set(self.key)) == len(self.key), "a column stands there twice"),
            ("key_names", len(names) == len(self.key), "name a column for each one of the log"),
            ("key_names", all(names) and len(set(names)) == len(names), "name each column once"),
        )

    @property
    def own_key(self) -> tuple[str, ...]:
        """The columns of the table with the key."""
        return self.key_names or self.key


def check_tables(
    rules: Sequence[TableRule], columns: Sequence[DenseColumn | CategoricalColumn]
) -> None:
    """Check that each table is there once, and that all that columns name are there.

    Raises:
        SettingsError: One is not.
    """
    names = [rule.name for rule in rules]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise SettingsError(f"tables of the same name: {', '.join(twice)}")
    for column in columns:
        if column.table and column.table not in names:
            remedy = one_of(names) if names else f"add a [[table]] of name {column.table!r}"
            raise SettingsError(f"column {column.name}: table = {column.table!r}", remedy)
