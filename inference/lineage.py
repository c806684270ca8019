"""Where a bundle comes from: checkpoint, workflow generation, days, settings and versions.

All of it is read from the bundle, and compared with the checkpoint, the workflow and the output of
the ETL where they are given. A statement is verified if the files that it is about were read now
and agree; what could not be compared is listed as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nvt_torchrec.base.errors import ClickLogError
from nvt_torchrec.base.files.artifact import check_digests
from nvt_torchrec.clicklog.readers.days import find_days
from nvt_torchrec.clicklog.readers.lines import filesystem_of
from nvt_torchrec.dlrm.checkpoint.record import MODEL_FILE, CheckpointRecord, digest_of
from nvt_torchrec.formats.etl_output import EtlOutput
from nvt_torchrec.formats.manifest import Manifest
from nvt_torchrec.formats.workflow_description import WorkflowDescription
from nvt_torchrec.inference.model.bundle import WORKFLOW, BundleDescription, bundle_digest, describe
from nvt_torchrec.workflows.description import inspect


@dataclasses.dataclass
class Lineage:
    """The line of descent of a bundle.

    Attributes:
        bundle: Path, digest, type of the tables, bytes.
        checkpoint: What the bundle records of the checkpoint; None if it does not.
        workflow: Digest and generations.
        days: Every day that the workflow counted, or that the manifest lists: generation, whether
            the checkpoint was trained on it, and its files with rows and fingerprints.
        verified: What was compared and agrees.
        unverified: What could not be compared, and why.
        wrong: What was compared and differs.
    """

    bundle: dict[str, Any]
    checkpoint: dict[str, Any] | None
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
            self.wrong.append(f"{what}: {_short(actual)}, not {_short(expected)}")

    def verify(self, what: str, check: Callable[[], None]) -> None:
        """Record whether files agree with their digests; otherwise ``check`` raises."""
        try:
            check()
            self.verified.append(what)
        except ClickLogError as error:
            self.wrong.append(f"{what}: {error.what}")


def read_lineage(
    bundle: Path,
    checkpoint: Path | None = None,
    workflow: Path | None = None,
    output: Path | None = None,
) -> Lineage:
    """Read the line of descent of a bundle, and compare it with the files that are given.

    Args:
        bundle: Directory of the bundle.
        checkpoint: Directory of the checkpoint that it is said to be made from.
        workflow: Directory of the workflow, or of one that was extended since; None: that of
            ``output``.
        output: Output directory of the ETL; None: the one that ``workflow`` lies in, if any.

    Raises:
        BadInputError: The bundle is missing, or what describes it is damaged; ``checkpoint``,
            ``workflow`` or ``output`` is missing, or an extension of ``output`` was interrupted.
    """
    if workflow is None and output is not None:
        workflow = EtlOutput(output).workflow
    if output is None and workflow is not None and EtlOutput(workflow.parent).manifest.exists():
        output = workflow.parent
    if output is not None:
        EtlOutput(output).check_whole()
    description = describe(bundle)
    inner = inspect(bundle / WORKFLOW)
    lineage = Lineage(
        bundle={
            "path": str(bundle),
            "digest": bundle_digest(bundle),
            "tables": description.tables,
            "bytes": sum(entry.bytes for entry in description.files.values()),
        },
        checkpoint=None if description.origin is None else dataclasses.asdict(description.origin),
        workflow={
            "digest": description.workflow_digest,
            "generation": description.generation,
            "generations": [dataclasses.asdict(generation) for generation in inner.lineage],
            "versions": inner.versions,
        },
        days=[],
    )
    _check_bundle(lineage, bundle, description, inner)
    _check_checkpoint(lineage, description, inner, checkpoint)
    _check_workflow(lineage, inner, workflow)
    _add_days(lineage, description, inner, output)
    return lineage


def _check_bundle(
    lineage: Lineage, bundle: Path, description: BundleDescription, inner: WorkflowDescription
) -> None:

    def check_files() -> None:
        check_digests(bundle, description.files, "")
        inner.verify()

    lineage.verify(f"bundle: the SHA-256 of its {len(description.files)} files", check_files)
    lineage.compare("bundle: the digest of its workflow", inner.digest, description.workflow_digest)
    what = "bundle: the generation of its workflow"
    lineage.compare(what, inner.generation, description.generation)


def _check_checkpoint(
    lineage: Lineage,
    description: BundleDescription,
    inner: WorkflowDescription,
    checkpoint: Path | None,
) -> None:
    trained_with = description.model.workflow_digest
    if trained_with:
        what = "checkpoint: trained on the data of this workflow"
        lineage.compare(what, trained_with, description.workflow_digest)
    else:
        lineage.unverified.append("checkpoint: it records no workflow that it was trained on")
    origin = description.origin
    if origin is None:
        lineage.unverified.append(
            "checkpoint: the bundle was made before checkpoints were recorded: make it again"
        )
    else:
        # a generation that adds nothing has the digest of its parent, and encodes rows as that does
        same = {record.number for record in inner.lineage if record.digest == inner.digest}
        trained_on = origin.checkpoint.generation
        what = f"checkpoint: trained on generation {trained_on} of the workflow"
        if trained_on is None:
            lineage.unverified.append("checkpoint: it records no generation")
        elif trained_on in same:
            lineage.verified.append(what)
        else:
            lineage.wrong.append(f"{what}, which is at generation {inner.generation}")
    if checkpoint is None:
        lineage.unverified.append("checkpoint: its files (pass --checkpoint)")
        return
    if origin is not None:
        what = f"checkpoint: the digest of {checkpoint / MODEL_FILE}"
        lineage.compare(what, digest_of(checkpoint), origin.checkpoint.digest)
    from nvt_torchrec.dlrm.checkpoint.store import check_contents  # imports TorchRec: seconds

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
    if ancestor is None and outer.digest != inner.digest:
        lineage.wrong.append(
            f"workflow: {workflow} (digest {_short(outer.digest)}) is not the bundle's "
            f"({_short(inner.digest)}), and does not descend from it"
        )
        return
    what = f"workflow: {workflow} is the same"
    if outer.digest != inner.digest:
        what = (
            f"workflow: {workflow} was extended since: generation {outer.generation} descends from "
            f"generation {ancestor.number}"
        )
    lineage.verified.append(what)
    for before, after in zip(inner.lineage, outer.lineage, strict=False):
        if before != after:
            lineage.wrong.append(f"workflow: generation {before.number} is another in the bundle")


def _add_days(
    lineage: Lineage,
    description: BundleDescription,
    inner: WorkflowDescription,
    output: Path | None,
) -> None:
    trained = None if description.origin is None else description.origin.checkpoint.days
    generations = {day: record.number for record in inner.lineage for day in record.days}
    inputs = [] if output is None else Manifest.read(EtlOutput(output).manifest).inputs
    lineage.days = [
        {
            "day": day,
            "generation": generations.get(day),
            "trained": None if trained is None else day in trained,
            "files": [
                {"path": entry.path, "fingerprint": entry.fingerprint, "rows": entry.rows}
                for entry in inputs
                if entry.day == day
            ],
        }
        for day in sorted({*generations, *(trained or ()), *(entry.day for entry in inputs)})
    ]
    if output is None:
        lineage.unverified.append("days: their files (pass --output_path)")
    for entry in inputs:
        _check_file(lineage, entry.path, entry.fingerprint)


def _check_file(lineage: Lineage, path: str, then: dict[str, Any]) -> None:
    """Compare size and time of change of a raw file with those of the manifest."""
    what = f"days: {path}, {then.get('size')} bytes"
    try:
        filesystem, name = filesystem_of(path)
        now = find_days(path)[0] if filesystem.isfile(name) else None
    except (ClickLogError, OSError) as error:
        lineage.unverified.append(f"{what}: {error}")
        return
    if now is None:
        lineage.unverified.append(f"{what}: it is not there now")
    elif now.size != then.get("size"):
        lineage.wrong.append(f"{what}: it has {now.size} bytes now")
    elif str(now.modified) != str(then.get("modified")):
        lineage.unverified.append(f"{what}: the size is the same, the time of change is another")
    else:
        lineage.verified.append(f"{what}: size and time of change")


def _short(value: Any) -> str:
    text = str(value)
    return f"{text[:12]}…" if len(text) > 40 else text
