"""Checks that no row is lost or repeated: manifest, footers, plan and batches agree."""

from __future__ import annotations

import torch
import torch.distributed as dist

from nvt_torchrec.base.errors import SchemaError
from nvt_torchrec.formats.etl_output import EtlOutput
from nvt_torchrec.formats.manifest import Manifest
from nvt_torchrec.nvt_loader.parquet.dataset import Dataset
from nvt_torchrec.nvt_loader.plan import Plan

REMEDY = "restore the split's files, or run the ETL again"


def check_manifest(dataset: Dataset) -> None:
    """Compare a split's footers with the ETL's ``OUT/manifest.json``, where there is one.

    Raises:
        SchemaError: the split has other rows than the ETL wrote.
        BadInputError: the manifest is damaged.
    """
    parents = dataset.directory.absolute().parents
    if len(parents) < 3 or parents[0].name != "split":
        return
    output = EtlOutput.of_splits(parents[0])
    if not output.manifest.is_file() or len(dataset.files) == 1 != len(
        list(dataset.directory.glob("*.parquet"))
    ):
        return
    splits = Manifest.read(output.manifest).splits
    expected = splits.get(dataset.directory.name, {}).get("rows")
    found = sum(group.rows for group in dataset.row_groups)
    if expected is not None and expected != found:
        raise SchemaError(
            f"{dataset.directory}: {found} rows, but the ETL wrote {expected} ({output.manifest})",
            REMEDY,
        )


def check_rank(found: int, expected: int, rank: int, epoch: int) -> None:
    """Compare the rows of one rank's epoch with the plan. Raises :class:`SchemaError`."""
    if found != expected:
        raise SchemaError(
            f"rank {rank} got {found} rows in epoch {epoch}, {expected} were planned",
            "this is a defect of the loader: the epoch's metrics cannot be trusted",
        )


def check_sum(found: int, plan: Plan, first_step: int, world_size: int) -> None:
    """Compare the rows of all ranks' epochs with the plan's (collective).

    Raises:
        SchemaError: they are not the same; on every rank.
    """
    if world_size > 1:
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        total = torch.tensor(found, dtype=torch.int64, device=device)
        dist.all_reduce(total)
        found = int(total)
    expected = plan.epoch_rows - min(first_step, plan.full_steps) * plan.global_batch
    if found != expected:
        raise SchemaError(
            f"the ranks together got {found} rows in this epoch, {expected} were planned",
            "did every rank finish its epoch, and are all on the same data?",
        )
