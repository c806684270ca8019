"""Options of the loader: their checks, and what follows from them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from typing import Any

import torch

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.nvt_loader import accounting
from nvt_torchrec.nvt_loader.parquet.arrow_reader import count_kept
from nvt_torchrec.nvt_loader.parquet.dataset import Dataset
from nvt_torchrec.nvt_loader.plan import SHUFFLES
from nvt_torchrec.nvt_loader.selection import Selection, select


def check_options(
    *,
    batch_size: int,
    rank: int,
    world_size: int,
    shuffle: str,
    seed: int,
    shuffle_window: int,
    id_dtype: str,
    undersampling_rate: float | None,
    limit_batches: int | None,
    decode_threads: int | None,
) -> None:
    """Check options of :class:`nvt_loader.loader.KJTLoader`, each within its range.

    Raises:
        SettingsError: one is out of its range.
    """
    _check(batch_size=(batch_size, 1), seed=(seed, 0), shuffle_window=(shuffle_window, 1))
    if limit_batches is not None:
        _check(limit_batches=(limit_batches, 1))
    if decode_threads is not None:
        _check(decode_threads=(decode_threads, 1))
    if not 0 <= rank < world_size:
        raise SettingsError(
            f"rank = {rank} with world_size = {world_size}", "ranks are 0 … world_size - 1"
        )
    for name, value, known in (
        ("shuffle", shuffle, SHUFFLES),
        ("id_dtype", id_dtype, ("int32", "int64")),
    ):
        if value not in known:
            raise SettingsError(f"{name} = {value!r}", f"choose one of {', '.join(known)}")
    if undersampling_rate is not None and not 0 <= undersampling_rate <= 1:
        raise SettingsError(f"undersampling_rate = {undersampling_rate}", "choose 0 … 1")


def configure(
    dataset: Dataset,
    table_sizes: Iterable[int] | None,
    selection: Selection | None,
    **options: Any,
) -> Dataset:
    """Check a dataset against the ETL's manifest, and add a loader's options.

    Args:
        dataset: the files and columns.
        table_sizes: rows of the embedding tables; None: the schema's.
        selection: the files to read; None: all.
        options: further fields of the dataset.

    Raises:
        SchemaError: the split has another number of rows than the manifest says.
        SettingsError: another number of table sizes than of columns.
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
    accounting.check_manifest(dataset)
    if selection is not None:
        dataset = select(dataset, selection)
    dataset = dataclasses.replace(dataset, schema=schema, **options)
    return dataset if dataset.undersampling is None else count_kept(dataset)


def _check(**settings: tuple[int, int]) -> None:
    for name, (value, least) in settings.items():
        if value < least:
            raise SettingsError(f"{name} = {value}", f"choose {least} or more")


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
