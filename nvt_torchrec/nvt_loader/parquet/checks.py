"""Convert columns and check their values: nulls, infinity and NaN, labels, ids of no table.

Everything is checked before a model sees the rows, and on the values themselves: a footer's minimum
and maximum say what was written, not what the pages hold now. A check costs one reduction for each
chunk or, where pages hold indices, for each dictionary.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from nvt_torchrec.base.arrays import to_arrow, to_numpy
from nvt_torchrec.base.errors import SchemaError
from nvt_torchrec.base.parquet.footer import Footer, columns_of_leaves
from nvt_torchrec.nvt_loader.parquet.dataset import Dataset

#: From this number on, the bits of a float32's magnitude mean infinity or NaN.
INFINITY_BITS = 0x7F800000

#: The bits of a label must stay below it: one more than those of 1.0.
LABEL_BITS = 0x3F800001

FILL_REMEDY = "the ETL fills missing values; run it again"


class Checker:
    """Converts and checks the columns of a split's files. Several threads may use it at once."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        schema = dataset.schema
        self._first_id = len(schema.floats)
        self._lists = {schema.columns.index(name) for name in schema.multi_hot}
        self._known: tuple[pa.Schema | None, dict[int, int]] = (None, {})
        #: What each number must stay below: an unsigned id, the bits of a label, of a weight or of
        #: a magnitude. The pointers of histories are checked where the events are read.
        others = self._first_id - len(schema.labels)
        pointers = len(schema.integers) - len(schema.categorical)
        bounds = [LABEL_BITS] * len(schema.labels) + [INFINITY_BITS] * others
        bounds += [*schema.table_sizes] + [2**32] * pointers
        self.limits = np.array(bounds, np.uint64)
        #: Whether a column may hold negative numbers: all floats but labels and the weight.
        self.signed = np.array([name in schema.dense for name in schema.floats])

    def plain_leaves(self, footer: Footer) -> dict[int, int]:
        """Find the columns of the loader's own types, none of whose values may be missing: for each
        the number of its leaf in the file."""
        known, leaves = self._known
        if known is None or not known.equals(footer.schema):  # most files are alike
            leaves = {}
            columns = columns_of_leaves(footer.schema)
            for number, name in enumerate(self._dataset.schema.columns):
                own = pa.field(name, pa.from_numpy_dtype(self.dtype(number)), nullable=False)
                if footer.schema.field(name) == own and number not in self._lists:
                    leaves[number] = columns.index(name)
            self._known = footer.schema, leaves
        return leaves

    def dtype(self, number: int) -> type[np.number]:
        """Return the type of a column's numbers in a batch."""
        return np.float32 if number < self._first_id else np.int32

    def column(self, column: pa.Array, number: int, where: str) -> pa.Array:
        """Convert a column of a file to the type that the loader hands out, and check its values.

        Raises:
            SchemaError: A null, infinity or NaN, or an id outside its table.
        """
        is_list = number in self._lists
        if is_list and not pa.types.is_list(column.type):
            column = column.cast(pa.list_(column.type.value_type))
        flat = column.flatten() if is_list else column
        nulls = column.null_count or flat.null_count
        if nulls:
            name = self._dataset.schema.columns[number]
            raise SchemaError(f"{where}: column {name} holds {nulls} null values", FILL_REMEDY)
        if number < self._first_id and flat.type != pa.float32():
            flat = column = column.cast(pa.float32(), safe=False)
        values = to_numpy(flat)
        self.check(values, number, where)
        if values.dtype == self.dtype(number):
            return column
        flat = to_arrow(values.astype(np.int32))
        if not is_list:
            return flat
        offsets = to_numpy(column.offsets)
        return pa.ListArray.from_arrays(to_arrow(offsets - offsets[0]), flat)

    def check(self, values: np.ndarray, number: int, where: str) -> None:
        """Check the numbers of a column.

        Raises:
            SchemaError: Infinity or NaN, a label outside [0, 1], a negative weight, or an id
                outside its table. The message names file, column, value and table size.
        """
        is_float = number < self._first_id
        if values.dtype == self.dtype(number):
            bits = values.view(np.uint32)  # a negative id is a large one
            if is_float and self.signed[number]:
                bits = bits & np.uint32(0x7FFFFFFF)
            if bits.max(initial=0) < self.limits[number]:
                return
        name = self._dataset.schema.columns[number]
        if is_float:
            is_label = number < len(self._dataset.schema.labels)
            refuse = refuse_labels if is_label else refuse_floats
            refuse(values, name, where)  # unless it is -0.0
            return
        size = int(self.limits[number])
        outside = values[(values < 0) | (values >= size)]
        if outside.size:
            raise SchemaError(
                f"{where}: column {name} holds id {outside[0]}, outside its "
                f"table of {size} rows (in {outside.size} of {values.size} ids)",
                "table sizes come from .merlin/schema.json, which belongs to another ETL run than "
                "the data; run the ETL again",
            )


def refuse_floats(column: np.ndarray, name: str, where: str) -> None:
    """Refuse infinity and NaN, which one training step spreads over the whole model; else, in a
    weight, negative numbers.

    Raises:
        SchemaError: The message names file, column and value.
    """
    found = column[~np.isfinite(column)]
    if found.size:
        raise SchemaError(
            f"{where}: column {name} holds {found[0]} (in {found.size} of {column.size} values)",
            "the ETL writes finite numbers only; run it again",
        )
    if column.min(initial=0) < 0:
        raise SchemaError(
            f"{where}: column {name} holds a negative weight, {column.min():g}",
            "weights are 0 or more: correct the column in the log, and run the ETL again",
        )


def refuse_labels(column: np.ndarray, name: str, where: str) -> None:
    """Refuse labels that are no probability: their loss has no minimum.

    Raises:
        SchemaError: The message names file, column and value.
    """
    outside = column[~((column >= 0) & (column <= 1))]
    if outside.size:
        raise SchemaError(
            f"{where}: column {name} holds {outside[0]:g}, and labels are from 0 to 1 (in "
            f"{outside.size} of {column.size} values)",
            "of a rating or a count write 1 from some number on and else 0, as the ETL does with "
            "threshold = 4, for example, in [label] of the spec",
        )
