"""Check a loader's arguments, and that an epoch neither loses nor repeats rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import get_worker_info

from nvt_torchrec.base.errors import SchemaError, SettingsError
from nvt_torchrec.formats.etl_output import EtlOutput
from nvt_torchrec.formats.manifest import Manifest
from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.nvt_loader.parquet.dataset import Dataset
from nvt_torchrec.nvt_loader.parquet.files import REWRITE
from nvt_torchrec.nvt_loader.plan import SHUFFLES

#: The type of each argument, its description in errors, and the minimum of a number. Two minima are
#: checked elsewhere: of virtual_shards by the plan, and of loader_memory by the division of memory.
_RULES: dict[str, tuple[Any, str, int]] = {
    "rank": (Integral, "an integer", 0),
    "world_size": (Integral, "an integer", 1),
    "batch_size": (Integral, "an integer", 1),
    "seed": (Integral, "an integer", 0),
    "virtual_shards": (Integral | None, "an integer", 0),
    "shuffle_window": (Integral, "an integer", 1),
    "schema": (TableSchema | None, "a TableSchema", 0),
    "table_sizes": (Iterable | None, "an integer for each categorical column", 0),
    "undersampling_rate": (Real | None, "a number from 0 to 1", 0),
    "limit_batches": (Integral | None, "an integer", 1),
    "loader_memory": (Integral | None, "an integer", 0),
    "decode_threads": (Integral | None, "an integer", 1),
    "transforms": (Iterable, "a list of functions of a batch", 0),
    "label": (str | Sequence | None, "the name of a label, or a list of names", 0),
    "max_events": (Integral, "an integer", 0),
    "histories": (str | Path | None, "a directory", 0),
    "vectors": (str | Path | None, "a directory", 0),
}


def check_arguments(arguments: dict[str, Any]) -> None:
    """Check the given arguments of :class:`nvt_loader.loader.KJTLoader`; ignore all others.

    Raises:
        SettingsError: An argument has a wrong type or is out of range.
    """
    for name, (kind, description, minimum) in _RULES.items():
        if name not in arguments:
            continue
        value = arguments[name]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise SettingsError(
                f"{name} = {value!r:.60}, of type {type(value).__name__}", f"give {description}"
            )
        if isinstance(value, Real) and value < minimum:
            raise SettingsError(f"{name} = {value}", f"choose {minimum} or more")
    rank = arguments["rank"]
    world_size = arguments["world_size"]
    if rank >= world_size:
        raise SettingsError(
            f"rank = {rank} with world_size = {world_size}", "ranks are 0 … world_size - 1"
        )
    shuffle = arguments.get("shuffle", False)
    if shuffle not in (False, True, *SHUFFLES):
        raise SettingsError(f"shuffle = {shuffle!r}", f"choose one of {', '.join(SHUFFLES)}")
    rate = arguments.get("undersampling_rate")
    if rate is not None and rate > 1:
        raise SettingsError(f"undersampling_rate = {rate}", "choose a number from 0 to 1")


def choose_device(device: torch.device | str | None) -> torch.device:
    """Return a device with its index. None means the current CUDA device, or the CPU without one.

    Raises:
        SettingsError: The device is not one that torch knows.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        remedy = "give 'cpu', 'cuda' or 'cuda:0'"
        raise SettingsError(f"device = {device!r}: {error}", remedy) from None
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def refuse_workers(loader: object) -> None:
    """Refuse to iterate a loader inside a worker of torch's DataLoader.

    Raises:
        SettingsError: This process is such a worker.
    """
    if get_worker_info() is not None:
        raise SettingsError(
            f"{type(loader).__name__} inside a DataLoader worker: each would deliver all rows",
            "iterate the loader directly; it decodes in its own background thread",
        )


def check_manifest(dataset: Dataset) -> None:
    """Compare the number of rows of a split with the ETL's ``OUT/manifest.json``, if it exists.

    Raises:
        SchemaError: The numbers of rows differ.
        BadInputError: The manifest is damaged, or a day is being added.
    """
    directory = Path(dataset.source.name).absolute()
    if dataset.files is None or directory.parent.name != "split" or not directory.is_dir():
        return
    output = EtlOutput.from_splits(directory.parent)
    if not output.manifest.is_file():
        return
    output.check_whole()
    expected = Manifest.read(output.manifest).splits.get(directory.name, {}).get("rows")
    rows = sum(dataset.source.row_counts)
    if expected is not None and expected != rows:
        raise SchemaError(
            f"{directory}: {rows} rows, but the ETL wrote {expected} ({output.manifest})",
            f"if a day has just been added, start again; otherwise {REWRITE}",
        )


def check_rank_rows(rows: int, expected: int, rank: int, epoch: int) -> None:
    """Compare the number of rows that a rank got in an epoch with the planned number.

    Raises:
        SchemaError: The numbers differ.
    """
    if rows != expected:
        raise SchemaError(
            f"rank {rank} got {rows} rows in epoch {epoch}, {expected} were planned",
            "this is a defect of the loader: do not trust the metrics of this epoch",
        )


def check_sum(rows: int, expected: int, world_size: int) -> None:
    """Compare the number of rows that all ranks got with the planned number (collective).

    Raises:
        SchemaError: The numbers differ. All ranks raise it.
    """
    if world_size > 1:
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        total = torch.tensor(rows, dtype=torch.int64, device=device)
        dist.all_reduce(total)
        rows = int(total)
    if rows != expected:
        raise SchemaError(
            f"the ranks together got {rows} rows in this epoch, {expected} were planned",
            "let every rank finish its epoch, and give all ranks the same data",
        )
