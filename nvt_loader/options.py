"""Options of the loader and their checks, and checks that no row is lost or repeated."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from nvt_torchrec.base.errors import SchemaError, SettingsError
from nvt_torchrec.formats.etl_output import EtlOutput
from nvt_torchrec.formats.manifest import Manifest
from nvt_torchrec.nvt_loader.parquet.arrow_reader import count_kept
from nvt_torchrec.nvt_loader.parquet.dataset import REWRITE, Dataset
from nvt_torchrec.nvt_loader.plan import SHUFFLES, Plan
from nvt_torchrec.nvt_loader.selection import Selection, select


def check_options(
    shuffle: str, rank: int, world_size: int, undersampling_rate: float | None
) -> None:
    """Check options of :class:`nvt_loader.loader.KJTLoader`, each within its range.

    Raises:
        SettingsError: One is out of its range.
    """
    if not 0 <= rank < world_size:
        raise SettingsError(
            f"rank = {rank} with world_size = {world_size}", "ranks are 0 … world_size - 1"
        )
    if shuffle not in SHUFFLES:
        raise SettingsError(f"shuffle = {shuffle!r}", f"choose one of {', '.join(SHUFFLES)}")
    if undersampling_rate is not None and not 0 <= undersampling_rate <= 1:
        raise SettingsError(f"undersampling_rate = {undersampling_rate}", "choose 0 … 1")


def check_least(least: int, **settings: int | None) -> None:
    """Raise :class:`SettingsError` if a setting that is given is less than ``least``."""
    for name, value in settings.items():
        if value is not None and value < least:
            raise SettingsError(f"{name} = {value}", f"choose {least} or more")


def configure(
    dataset: Dataset,
    table_sizes: Iterable[int] | None,
    selection: Selection | None,
    **options: Any,
) -> Dataset:
    """Check a dataset against the ETL's manifest, and add a loader's options.

    Args:
        dataset: The files and columns.
        table_sizes: Rows of the embedding tables; None: the schema's.
        selection: The files to read; None: all.
        options: Further fields of the dataset.

    Raises:
        SchemaError: The split has another number of rows than the manifest says.
        SettingsError: Another number of table sizes than of columns.
    """
    schema = dataset.schema
    if table_sizes is not None:
        sizes = tuple(table_sizes)
        if len(sizes) != len(schema.categorical):
            raise SettingsError(
                f"{len(sizes)} table sizes for {len(schema.categorical)} categorical columns",
                "give one size for each column",
            )
        schema = dataclasses.replace(schema, table_sizes=sizes)
    check_manifest(dataset)
    if selection is not None:
        dataset = select(dataset, selection)
    dataset = dataclasses.replace(dataset, schema=schema, **options)
    return dataset if dataset.undersampling is None else count_kept(dataset)


def processors() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def choose_device(device: torch.device | str | None) -> torch.device:
    """Return a device with its number; None is the current CUDA device, or the CPU without one."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def check_manifest(dataset: Dataset) -> None:
    """Compare a split's footers with the ETL's ``OUT/manifest.json``, where there is one.

    Raises:
        SchemaError: The split has other rows than the ETL wrote.
        BadInputError: The manifest is damaged, or a day is being added.
    """
    parents = dataset.directory.absolute().parents
    if len(parents) < 3 or parents[0].name != "split":
        return
    output = EtlOutput.of_splits(parents[0])
    whole = sum(1 for _ in dataset.directory.glob("*.parquet"))
    if not output.manifest.is_file() or len(dataset.files) == 1 != whole:
        return
    output.check_whole()
    expected = Manifest.read(output.manifest).splits.get(dataset.directory.name, {}).get("rows")
    rows = sum(group.rows for group in dataset.row_groups)
    if expected is not None and expected != rows:
        raise SchemaError(
            f"{dataset.directory}: {rows} rows, but the ETL wrote {expected} ({output.manifest})",
            f"if a day was added just now, start again; else {REWRITE}",
        )


def check_sum(rows: int, plan: Plan, first_step: int, world_size: int) -> None:
    """Compare the rows of all ranks' epochs with the plan's (collective).

    Raises:
        SchemaError: They are not the same; on every rank.
    """
    if world_size > 1:
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        total = torch.tensor(rows, dtype=torch.int64, device=device)
        dist.all_reduce(total)
        rows = int(total)
    expected = plan.epoch_rows - min(first_step, plan.full_steps) * plan.global_batch
    if rows != expected:
        raise SchemaError(
            f"the ranks together got {rows} rows in this epoch, {expected} were planned",
            "did every rank finish its epoch, and are all on the same data?",
        )
