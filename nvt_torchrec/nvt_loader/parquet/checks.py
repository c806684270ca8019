"""Convert columns and check their values: nulls, infinity, NaN, labels, ids outside their table.

The values themselves are checked before a model sees the rows. The minimum and maximum in a footer
are not enough: they describe the file as it was written, not what its pages contain now. A check
costs one reduction per chunk or, if pages hold dictionary indices, per dictionary.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from nvt_torchrec.base.arrays import to_arrow, to_numpy
from nvt_torchrec.base.errors import SchemaError
from nvt_torchrec.base.parquet.footer import Footer, list_leaf_columns
from nvt_torchrec.nvt_loader.parquet.dataset import Dataset

#: The bits of infinity as a float32. Without the sign bit, the bits of NaN are larger. So a
#: magnitude is finite if its bits, read as an integer, are smaller than this.
INFINITY_BITS = 0x7F800000

#: One more than the bits of 1.0. Positive floats have the same order as their bits, and the sign
#: bit makes the bits of negative floats larger. So a label is in [0, 1] if its bits, read as an
#: unsigned integer, are smaller than this.
LABEL_BITS = 0x3F800001

#: The bits of a float32 without its sign.
MAGNITUDE_MASK = 0x7FFFFFFF

#: The remedy for null values.
FILL_REMEDY = "the ETL fills missing values; run it again"


class Checker:
    """Converts and checks the columns of a split's files. It is thread-safe.

    Columns are identified by their index in the schema: labels, weight, log-Q correction, dense,
    categorical, pointers of histories, numbers of vectors.

    Attributes:
        limits: uint64 [columns], the exclusive upper bound of the bits of each column's values,
            read as unsigned integers: the table size for ids, :data:`LABEL_BITS` for labels,
            :data:`INFINITY_BITS` for weights and for the magnitudes of dense columns. Pointers of
            histories and numbers of vectors are not limited here; they are checked when the events
            or vectors are read.
        signed: bool [float columns], whether a column may hold negative values: dense columns and
            the log-Q correction may, labels and the weight may not.
    """

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        schema = dataset.schema
        self._first_id = len(schema.floats)
        self._lists = {schema.columns.index(name) for name in schema.multi_hot}
        self._newest_leaves: tuple[pa.Schema | None, dict[int, int]] = (None, {})
        num_pointers = len(schema.integers) - len(schema.categorical)
        limits = [LABEL_BITS] * len(schema.labels)
        limits += [INFINITY_BITS] * (self._first_id - len(schema.labels))
        limits += schema.table_sizes
        limits += [2**32] * num_pointers
        self.limits = np.array(limits, np.uint64)
        signed = {*schema.dense, schema.log_q_correction}
        self.signed = np.array([name in signed for name in schema.floats])

    def find_plain_leaves(self, footer: Footer) -> dict[int, int]:
        """Find the columns that a file stores in the loader's own types, without lists and nulls.

        Returns:
            For the index of each such column, its leaf in the file's Parquet schema.
        """
        schema, leaves = self._newest_leaves
        # The files of a split usually have the same schema, so one cached result is enough.
        if schema is not None and schema.equals(footer.schema):
            return leaves
        leaves = {}
        names_of_leaves = list_leaf_columns(footer.schema)
        for number, name in enumerate(self._dataset.schema.columns):
            plain = pa.field(name, pa.from_numpy_dtype(self.find_dtype(number)), nullable=False)
            if footer.schema.field(name) == plain and number not in self._lists:
                leaves[number] = names_of_leaves.index(name)
        self._newest_leaves = footer.schema, leaves
        return leaves

    def find_dtype(self, number: int) -> type[np.number]:
        """Return the dtype of a column in a batch."""
        return np.float32 if number < self._first_id else np.int32

    def convert(self, column: pa.Array, number: int, where: str) -> pa.Array:
        """Convert a column of a file to its dtype in batches, and check its values.

        Args:
            column: The column.
            number: The index of the column in the schema.
            where: The file, for errors.

        Raises:
            SchemaError: A value is null, infinite or NaN, or an id is outside its table.
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
        # Check ids before narrowing them to int32, which would wrap large ids around.
        self.check(values, number, where)
        if values.dtype == self.find_dtype(number):
            return column
        flat = to_arrow(values.astype(np.int32))
        if not is_list:
            return flat
        offsets = to_numpy(column.offsets)
        return pa.ListArray.from_arrays(to_arrow(offsets - offsets[0]), flat)

    def check(self, values: np.ndarray, number: int, where: str) -> None:
        """Check the values of a column.

        Raises:
            SchemaError: A value is infinite or NaN, a label is outside [0, 1], a weight is
                negative, or an id is outside its table. The message names file, column and value.
        """
        is_float = number < self._first_id
        # Fast path: one reduction over the bits. Read as an unsigned integer, a negative id exceeds
        # the size of any table.
        if values.dtype == self.find_dtype(number):
            bits = values.view(np.uint32)
            if is_float and self.signed[number]:
                bits = bits & np.uint32(MAGNITUDE_MASK)
            if bits.max(initial=0) < self.limits[number]:
                return
        name = self._dataset.schema.columns[number]
        if is_float:
            # These raise no error for -0.0, which is a valid label or weight but has large bits.
            if number < len(self._dataset.schema.labels):
                refuse_labels(values, name, where)
            else:
                refuse_floats(values, name, where)
            return
        size = int(self.limits[number])
        outside = values[(values < 0) | (values >= size)]
        if outside.size:
            raise SchemaError(
                f"{where}: column {name} holds id {outside[0]}, outside its "
                f"table of {size} rows (in {outside.size} of {values.size} ids)",
                "table sizes come from .merlin/schema.json, which is not from the same ETL run as "
                "the data; run the ETL again",
            )


def refuse_floats(column: np.ndarray, name: str, where: str) -> None:
    """Refuse infinite, NaN and negative values.

    A single training step would spread infinity or NaN to the whole model.

    Raises:
        SchemaError: A value is infinite, NaN or negative. The message names file, column and value.
    """
    bad = column[~np.isfinite(column)]
    if bad.size:
        raise SchemaError(
            f"{where}: column {name} holds {bad[0]} (in {bad.size} of {column.size} values)",
            "the ETL writes finite numbers only; run it again",
        )
    if column.min(initial=0) < 0:
        raise SchemaError(
            f"{where}: column {name} holds a negative weight, {column.min():g}",
            "weights are 0 or more: correct the column in the log, and run the ETL again",
        )


def refuse_labels(column: np.ndarray, name: str, where: str) -> None:
    """Refuse labels outside [0, 1], for which the loss has no minimum.

    Raises:
        SchemaError: A label is outside [0, 1]. The message names file, column and value.
    """
    outside = column[~((column >= 0) & (column <= 1))]
    if outside.size:
        raise SchemaError(
            f"{where}: column {name} holds {outside[0]:g}, and labels are from 0 to 1 (in "
            f"{outside.size} of {column.size} values)",
            "convert a rating or count to 0 or 1 with a threshold, for example threshold = 4 in "
            "[label] of the spec, and run the ETL again",
        )
