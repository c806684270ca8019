"""``python -m etl export``: write rows with their histories as lists, for other programs."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from nvt_torchrec.base.arrays import to_offsets
from nvt_torchrec.base.command_line import Settings, flag
from nvt_torchrec.base.errors import BadInputError, SettingsError
from nvt_torchrec.base.files.atomic import new_directory
from nvt_torchrec.base.progress_bars import show_progress
from nvt_torchrec.formats.etl_output import EtlOutput
from nvt_torchrec.formats.histories import HistoryStore
from nvt_torchrec.formats.manifest import Manifest
from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.formats.splits import SPLITS

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger(__name__)

_RESTORE = (
    "restore it from a copy (`python -m etl check` lists what is wrong), or run the ETL again"
)
#: For the command's help.
DESCRIPTION = (
    "Write train.parquet, valid.parquet and test.parquet into a new directory. They hold the "
    "encoded columns and, for each column of a history, a list column HISTORY__COLUMN (the naming "
    "of TorchEasyRec) with the ids of the row's newest events, oldest first."
)


@dataclasses.dataclass(frozen=True)
class ListExportSettings(Settings):
    """The settings of ``python -m etl export``."""

    source: Path = flag("an output of `python -m etl run`", metavar="OUT", positional=True)
    output_path: Path = flag("directory to create")
    max_events: int = flag("length limit of a list; the newest events are kept", 50, minimum=1)
    pad: bool = flag("pad each list to --max_events, with id 0 before the events", False)


SETTINGS = (ListExportSettings,)


def run(settings: ListExportSettings) -> None:
    """Write the files.

    Raises:
        BadInputError: The source is not an output, or one of its files is missing or damaged.
        SchemaError: A row's pointer leads outside the store of its history.
        SettingsError: The output has no histories.
        OutputError: The directory exists, or cannot be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    output = EtlOutput(settings.source)
    output.check_whole()
    manifest = Manifest.read(output.manifest)
    output.check_described(manifest, _RESTORE, below="criteo_binary/")
    schema = TableSchema.read(output.splits)
    if not schema.histories:
        raise SettingsError(
            f"{settings.source} has no histories",
            "other programs can read its parquet, OUT/criteo_binary/split, directly",
        )
    sizes = dict(zip(schema.categorical, schema.table_sizes, strict=True))
    fields = list(schema.arrow)[: len(schema.floats) + len(schema.categorical)]
    names = [field.name for field in fields]
    stores = []
    for history in schema.histories:
        store_sizes = [sizes[name] for name in history.columns]
        stores.append(HistoryStore(output.splits, history, store_sizes))
        for name in history.features:
            fields.append(pa.field(name.replace(".", "__", 1), pa.list_(pa.int32())))
    for part in manifest.files:
        difference = output.part_difference(part)
        if difference:
            raise BadInputError(difference, _RESTORE)
    total = sum(part.rows for part in manifest.files)
    with new_directory(settings.output_path) as temporary, show_progress("export", total) as bar:
        for split in SPLITS:
            with pq.ParquetWriter(temporary / f"{split}.parquet", pa.schema(fields)) as writer:
                parts = [part for part in manifest.files if part.split == split]
                for part in parts:
                    for batch in _read(output.splits / part.file):
                        columns = [batch[name] for name in names]
                        for store in stores:
                            columns += _make_lists(store, batch, settings)
                        writer.write_table(pa.Table.from_arrays(columns, schema=pa.schema(fields)))
                        bar.update(len(batch))
    log.info(
        "%s: %d rows, lists of at most %d events", settings.output_path, total, settings.max_events
    )


def _read(part: Path) -> Iterator[pa.RecordBatch]:
    """Yield the record batches of a part; verify the checksum of each page."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(part, page_checksum_verification=True) as file:
            yield from file.iter_batches()
    except (OSError, pa.ArrowException) as error:
        raise BadInputError(f"{part}: cannot be read: {error}", _RESTORE) from error


def _make_lists(
    store: HistoryStore, batch: pa.RecordBatch, settings: ListExportSettings
) -> list[pa.Array]:
    """Return the histories of a batch's rows: a list array for each column of the history."""
    import pyarrow as pa

    maximum = settings.max_events
    key_name, count_name = store.history.pointers
    keys = batch[key_name].to_pylist()
    num_events = batch[count_name].to_pylist()
    found = [store.read_newest(key, n, maximum) for key, n in zip(keys, num_events, strict=True)]
    counts = np.array([len(row[0]) for row in found], np.int64)
    lengths = np.full(len(found), maximum) if settings.pad else counts
    offsets = to_offsets(lengths)
    # The events of a row are the last ids of its list; before them is the padding.
    indices = np.arange(counts.sum()) + np.repeat(offsets[1:] - np.cumsum(counts), counts)
    columns = []
    for values in zip(*found, strict=True):
        ids = np.zeros(offsets[-1], np.int32)
        ids[indices] = np.concatenate(values)
        columns.append(pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(ids)))
    return columns
