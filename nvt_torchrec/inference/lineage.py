"""Where a bundle comes from: checkpoint, workflow generation, days, settings and versions.

All of it is read from the bundle, and compared with the checkpoint and the workflow where they are
given. A statement is verified if the files that it is about were read now and agree; what could not
be compared is listed as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nvt_torchrec.base.errors import ClickLogError
from nvt_torchrec.base.files.artifact import check_digests
from nvt_torchrec.formats.day_names import days_text
from nvt_torchrec.formats.workflow_description import WorkflowDescription
from nvt_torchrec.inference.model.bundle import WORKFLOW, BundleDescription, bundle_digest, describe
from nvt_torchrec.models.checkpoint.record import MODEL_FILE, CheckpointRecord, digest_of
from nvt_torchrec.workflows.description import inspect
from nvt_torchrec.workflows.inspection import generations_table


@dataclasses.dataclass
class Lineage:
    """The line of descent of a bundle.

    Attributes:
        bundle: Path, digest, type of the tables, bytes, labels that it predicts.
        checkpoint: What the bundle records of the checkpoint.
        workflow: Digest and generations.
        days: Every day that the workflow counted or that the checkpoint was trained on:
            generation, and whether the checkpoint was trained on it.
        verified: What was compared and agrees.
        unverified: What could not be compared, and why.
        wrong: What was compared and differs.
    """

    bundle: dict[str, Any]
    checkpoint: dict[str, Any]
    workflow: dict[str, Any]
    days: list[dict[str, Any]]
    verified: list[str] = dataclasses.field(default_factory=list)
    unverified: list[str] = dataclasses.field(default_factory=list)
    wrong: list[str] = dataclasses.field(default_factory=list)

    def compare(self, what: str, actual: Any, expected: Any) -> None:
        """Record whether two values, which must be equal, are."""
        if actual == expected:
            self.verified.append(what)
        else:
            self.wrong.append(f"{what}: {actual!s:.12}, not {expected!s:.12}")

    def verify(self, what: str, check: Callable[[], None]) -> None:
        """Record whether files agree with their digests; otherwise ``check`` raises."""
        try:
            check()
            self.verified.append(what)
        except ClickLogError as error:
            self.wrong.append(f"{what}: {error.what}")


def read_lineage(
    bundle: Path, checkpoint: Path | None = None, workflow: Path | None = None
) -> Lineage:
    """Read the line of descent of a bundle, and compare it with the files that are given.

    Args:
        bundle: Directory of the bundle.
        checkpoint: Directory of the checkpoint that it is said to be made from.
        workflow: Directory of the workflow, or of one that was extended since.

    Raises:
        BadInputError: The bundle is missing, or what describes it is damaged; ``checkpoint`` or
            ``workflow`` is missing.
    """
    description = describe(bundle)
    inner = inspect(bundle / WORKFLOW)
    trained_days = description.origin.checkpoint.days
    generations = {day: record.number for record in inner.lineage for day in record.days}
    lineage = Lineage(
        bundle={
            "path": str(bundle),
            "digest": bundle_digest(bundle),
            "tables": description.tables,
            "bytes": sum(entry.bytes for entry in description.files.values()),
            "labels": list(description.model.labels),
        },
        checkpoint=dataclasses.asdict(description.origin),
        workflow={
            "digest": description.workflow_digest,
            "generation": description.generation,
            "generations": [dataclasses.asdict(generation) for generation in inner.lineage],
            "versions": inner.versions,
        },
        days=[
            {
                "day": day,
                "generation": generations.get(day),
                "trained": None if trained_days is None else day in trained_days,
            }
            for day in sorted({*generations, *(trained_days or ())})
        ],
    )

    def check_files() -> None:
        check_digests(bundle, description.files, "")
        inner.verify()

    lineage.verify(f"bundle: the SHA-256 of its {len(description.files)} files", check_files)
    lineage.compare("bundle: the digest of its workflow", inner.digest, description.workflow_digest)
    what = "bundle: the generation of its workflow"
    lineage.compare(what, inner.generation, description.generation)
    _check_checkpoint(lineage, description, inner, checkpoint)
    _check_workflow(lineage, inner, workflow)
    return lineage


def _check_checkpoint(
    lineage: Lineage,
    description: BundleDescription,
    inner: WorkflowDescription,
    checkpoint: Path | None,
) -> None:
    trained_with = description.origin.checkpoint.workflow_digest
    if trained_with:
        what = "checkpoint: trained on the data of this workflow"
        lineage.compare(what, trained_with, description.workflow_digest)
    else:
        lineage.unverified.append("checkpoint: it records no workflow that it was trained on")
    origin = description.origin.checkpoint
    if (trained_on := origin.generation) is None:
        lineage.unverified.append("checkpoint: it records no generation")
    else:
        # a generation that adds nothing has the digest of its parent, and encodes rows as that does
        same = {record.number for record in inner.lineage if record.digest == inner.digest}
        what = f"checkpoint: trained on generation {trained_on} of the workflow"
        if trained_on in same:
            lineage.verified.append(what)
        else:
            lineage.wrong.append(f"{what}, which is at generation {inner.generation}")
    if checkpoint is None:
        lineage.unverified.append("checkpoint: its files (pass --checkpoint)")
        return
    what = f"checkpoint: the digest of {checkpoint / MODEL_FILE}"
    lineage.compare(what, digest_of(checkpoint), origin.digest)
    from nvt_torchrec.models.checkpoint.reading import check_contents  # imports torch

    lineage.verify(
        "checkpoint: the digests of its files",
        lambda: check_contents(checkpoint, CheckpointRecord.read(checkpoint).files),
    )


def _check_workflow(lineage: Lineage, inner: WorkflowDescription, workflow: Path | None) -> None:
    if workflow is None:
        lineage.unverified.append("workflow: the one that was fitted (pass --workflow)")
        return
    outer = inspect(workflow)
    lineage.verify(f"workflow: the SHA-256 of the files of {workflow}", outer.verify)
    ancestor = outer.ancestor(inner.digest)
    if outer.digest == inner.digest:
        lineage.verified.append(f"workflow: {workflow} is the same")
    elif ancestor is not None:
        lineage.verified.append(
            f"workflow: {workflow} was extended since: generation {outer.generation} descends from "
            f"generation {ancestor.number}"
        )
    else:
        lineage.wrong.append(
            f"workflow: {workflow} (digest {outer.digest[:12]}) is not the bundle's "
            f"({inner.digest[:12]}), and does not descend from it"
        )


def text_of(lineage: Lineage) -> str:
    """Format the main facts, and what was compared; settings and versions are in the JSON."""
    bundle, workflow, record = lineage.bundle, lineage.workflow, lineage.checkpoint["checkpoint"]
    checkpoint = (
        f"{record['digest'][:12]}, {record['steps']} steps, {record['samples']} samples, "
        f"generation {record['generation']}, days {days_text(record['days'] or ())}"
    )
    if record["continued_from"]:
        checkpoint += f", continued from {record['continued_from'][:12]}"
    lines = [
        f"bundle      {bundle['path']}: {bundle['digest'][:12]}, {bundle['tables']}, "
        f"{bundle['bytes'] / 2**20:.1f} MiB, predicts {', '.join(bundle['labels'])}",
        f"checkpoint  {checkpoint}",
        f"workflow    {workflow['digest'][:12]}, generation {workflow['generation']}",
        generations_table(inspect(Path(bundle["path"]) / WORKFLOW)),
    ]
    for title, texts in (("verified", lineage.verified), ("not verified", lineage.unverified)):
        lines += [title, *(f"  {text}" for text in texts or ["nothing"])]
    return "\n".join(lines)
