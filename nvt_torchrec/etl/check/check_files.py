"""Check the files of an output against its manifest and its workflow."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from nvt_torchrec.base.errors import BadInputError, ClickLogError, adapt_commands
from nvt_torchrec.etl.state.output import EXTENDING_FILE, UNFINISHED_FILE, WORK_DIRECTORY
from nvt_torchrec.formats.etl_output import EtlOutput
from nvt_torchrec.formats.manifest import Manifest, PartFile
from nvt_torchrec.formats.workflow_description import WorkflowDescription

#: The remedy for a missing or damaged file.
RESTORE = "restore the file, or run the ETL again"
#: Severity of a finding that makes training fail or gives wrong results.
ERROR = "error"
#: Severity of a finding that may give wrong results.
WARNING = "warning"
#: Severity of a finding that is only information.
NOTE = "note"
_SAME_COPY = "workflow and data are from different days: restore both from the same copy"
_OTHER_WORKFLOW = "the data were made with another workflow: restore it, or run the ETL again"


@dataclasses.dataclass(frozen=True)
class Finding:
    """A line of a check's report.

    Attributes:
        severity: :data:`ERROR`, :data:`WARNING` or :data:`NOTE`.
        kind: The kind of the finding, in one or two words; similar findings share it.
        where: The file, and the row group, row or column in it.
        what: The problem, with the wrong value.
        remedy: How to solve it.
    """

    severity: str
    kind: str
    where: str
    what: str
    remedy: str = ""

    def __str__(self) -> str:
        line = f"{self.severity}: {self.where}: {self.what}"
        if self.remedy:
            line += f" -> {adapt_commands(self.remedy)}"
        return " ".join(line.split())


@dataclasses.dataclass
class Output:
    """An output directory that is checked.

    Attributes:
        paths: The paths of its files.
        manifest: The manifest; None if it is damaged, or the run has not finished.
        parts: The parts whose size and footer agree with the manifest.
        findings: The findings so far.
    """

    paths: EtlOutput
    manifest: Manifest | None = None
    parts: list[PartFile] = dataclasses.field(default_factory=list)
    findings: list[Finding] = dataclasses.field(default_factory=list)

    def add(
        self, kind: str, where: Any, what: str, remedy: str = "", *, severity: str = ERROR
    ) -> None:
        """Add a finding."""
        what = what.removeprefix(f"{where}: ")
        self.findings.append(Finding(severity, kind, str(where), what, remedy))


def find(path: Path) -> Output:
    """Read the manifest of the output at ``path``.

    Raises:
        BadInputError: ``path`` holds no output, or an extension is just replacing it.
    """
    paths = EtlOutput(path)
    paths.check_whole()
    output = Output(paths)
    if paths.manifest.exists():
        try:
            output.manifest = Manifest.read(paths.manifest)
        except ClickLogError as error:
            output.add("manifest", paths.manifest, error.what, error.remedy)
    elif not (path / UNFINISHED_FILE).exists():
        what = f"has no {paths.manifest.name}" if path.is_dir() else "no such directory"
        raise BadInputError(f"{path}: {what}", "pass the OUT of a run")
    return output


def check_files(output: Output) -> None:
    """Check the parts, the files that describe them, and the workflow."""
    _check_unfinished(output)
    if output.manifest is not None:
        _check_parts(output, output.manifest)
        _check_described(output, output.manifest)
        _check_labels(output, output.manifest)
        _check_workflow(output, output.manifest)


def _check_unfinished(output: Output) -> None:
    """Find runs and extensions that have not finished."""
    unfinished = output.paths.root / UNFINISHED_FILE
    extending = output.paths.root / EXTENDING_FILE
    work = output.paths.root / WORK_DIRECTORY
    if unfinished.exists():
        remedy = "finish it with the same command, or begin again with --restart"
        output.add("unfinished", unfinished, "the run has not finished", remedy)
    elif extending.exists():
        what = "a day is being added, or adding it was interrupted; this is the output without it"
        remedy = "finish it with the same `python -m etl extend`"
        output.add("unfinished", extending, what, remedy, severity=NOTE)
    elif work.exists():
        output.add("leftover", work, "left by a run", "delete it", severity=WARNING)


def _check_parts(output: Output, manifest: Manifest) -> None:
    """Compare the parts with the manifest."""
    splits = output.paths.splits
    listed = {part.file: part for part in manifest.files}
    # The same pattern as in the loader.
    existing = {str(path.relative_to(splits)) for path in splits.glob("*/[!._]*.parquet")}
    for name in sorted(existing - listed.keys()):
        output.add("parts", name, "not in the manifest", "delete it, or else the loader reads it")
    for name, part in sorted(listed.items()):
        if name not in existing:
            output.add("parts", name, "missing, but listed in the manifest", RESTORE)
            continue
        difference = output.paths.part_difference(part)
        if difference:
            output.add("parts", name, difference.removeprefix(f"{splits / name}: "), RESTORE)
        else:
            output.parts.append(part)


def _check_described(output: Output, manifest: Manifest) -> None:
    """Compare the digests of schemas, footers and histories."""
    try:
        output.paths.check_described(manifest, RESTORE, below="criteo_binary/")
    except BadInputError as error:
        output.add("descriptions", output.paths.splits, error.what, error.remedy)


def _check_labels(output: Output, manifest: Manifest) -> None:
    """Find splits with only one label."""
    from nvt_torchrec.etl.finish.make_manifest import one_label, one_label_remedy  # imports numba

    for split, counted in manifest.splits.items():
        what = one_label(counted["rows"], counted["positives"])
        if what:
            remedy = one_label_remedy(manifest.splits, manifest.split)
            output.add("labels", output.paths.splits / split, what, remedy, severity=WARNING)


def _check_workflow(output: Output, manifest: Manifest) -> None:
    """Check the digests of the saved workflow, its generation, and the state for extensions."""
    from nvt_torchrec.workflows import compiled  # takes long to import
    from nvt_torchrec.workflows.description import inspect

    path = output.paths.workflow
    expected = manifest.workflow_digest
    if not path.exists():
        output.add("workflow", path, "missing, but inference needs it", RESTORE)
        return
    try:
        description = inspect(path)
        description.verify()
        if (path / "compiled").exists():
            compiled.load(path, verify=True)
    except ClickLogError as error:
        output.add("workflow", path, error.what, error.remedy)
        return
    if description.digest != expected:
        what = f"digest {description.digest[:12]}…, but the manifest says {expected[:12]}…"
        output.add("workflow", path, what, _OTHER_WORKFLOW)
    elif description.generation == manifest.generation:
        try:  # the workflow's history events may be from another day
            output.paths.check_described(manifest, _SAME_COPY, below="workflow/")
        except BadInputError as error:
            output.add("workflow", path, error.what, error.remedy)
    _check_generations(output, manifest, description)


def _check_generations(
    output: Output, manifest: Manifest, description: WorkflowDescription
) -> None:
    """Compare the generations of manifest and workflow, and check the state for extensions."""
    paths = output.paths
    if description.generation != manifest.generation:
        what = f"generation {description.generation}, but the manifest says {manifest.generation}"
        output.add("generations", paths.workflow, what, _SAME_COPY)
    elif manifest.settings.get("engine") != "nvtabular":
        from nvt_torchrec.etl.events.earlier_days import EarlierDays
        from nvt_torchrec.etl.labels.label_state import EarlierLabels
        from nvt_torchrec.etl.negatives.prepare_negatives import check_stored
        from nvt_torchrec.workflows.extension_state import read_state

        try:
            paths.check_described(manifest, _SAME_COPY, below="extension/")
            read_state(paths.extension, description)
            if description.spec.events:
                EarlierDays.read(paths.extension, description.spec)
            if description.spec.label_files:
                EarlierLabels.read(paths.extension, description.spec)
            if description.spec.negatives:
                check_stored(paths.extension)
        except ClickLogError as error:
            what = f"no day can be added: {error.what}"
            output.add("generations", paths.extension, what, error.remedy, severity=WARNING)
