"""An extension: new days of a log are counted, appended to the workflow, encoded and switched to.

Each day is a generation of its own and is committed before the next begins, so the result does not
depend on how days are grouped into commands.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.base.files.journal import changes, refuse_changes
from nvt_torchrec.base.files.validation import path_inside
from nvt_torchrec.clicklog.readers.days import DayFile, find_days
from nvt_torchrec.etl.engines.hardware import cores
from nvt_torchrec.etl.engines.job import Report
from nvt_torchrec.etl.engines.start import resolve
from nvt_torchrec.etl.extend.checks import (
    check_extendable,
    check_flags,
    check_not_repeated,
    check_row_count,
    new_days,
)
from nvt_torchrec.etl.extend.claim import Claim, claimed
from nvt_torchrec.etl.extend.splits import Assignment, assign_all, renamed_parts
from nvt_torchrec.etl.extend.stage import (
    files_of_days,
    left_out,
    link_files,
    link_parts,
    next_manifest,
)
from nvt_torchrec.etl.extend.switch import NEXT, switch
from nvt_torchrec.etl.finish import check_rows, quarantine, without_empty_parts
from nvt_torchrec.etl.output import named_errors
from nvt_torchrec.etl.plan import Plan
from nvt_torchrec.etl.progress import RowsBar
from nvt_torchrec.etl.results import UnitResult
from nvt_torchrec.etl.settings import ExtendSettings
from nvt_torchrec.etl.stages import Stages
from nvt_torchrec.etl.state import before_resuming, begin_or_resume, plan_record
from nvt_torchrec.formats.etl_output import PREVIOUS, EtlOutput
from nvt_torchrec.formats.manifest import Manifest
from nvt_torchrec.formats.workflow_description import WorkflowDescription
from nvt_torchrec.workflows.description import inspect

if TYPE_CHECKING:
    from nvt_torchrec.etl.engines.engine import Engine

log = logging.getLogger(__name__)


def extend(settings: ExtendSettings) -> Manifest:
    """Add days to the output of a run.

    Returns:
        The manifest of the newest generation.

    Raises:
        BadInputError: A file is missing or damaged, or a day cannot be added.
        BadRowError: A row is malformed; the message names file, line, column and value.
        SchemaError: The output was made before outputs could be extended.
        SettingsError: Days cannot be added to the output's split, or not to these splits of it.
        OutputError: The output is in use or cannot be written, or holds an interrupted extension.
    """
    paths = EtlOutput(settings.output_path)
    with claimed(settings.output_path, restart=settings.restart) as claim:
        manifest = Manifest.read(paths.manifest)
        if settings.undo:
            return _undo(paths, manifest, claim)
        split = check_extendable(paths, manifest).split
        check_flags(settings, split)
        if not settings.input_path and (begun := claim.unfinished_day()):
            settings = dataclasses.replace(settings, input_path=begun.path)
        days = new_days(settings, manifest) if settings.input_path else []
        chosen: Sequence[Assignment | None] = [None] * len(days)
        if split.by == "days":
            chosen = assign_all(
                manifest["days"],
                [day.day for day in days],
                settings.valid_days,
                settings.test_days,
            )
        for day, assignment in zip(days, chosen, strict=True):
            _Day(settings, day, assignment, manifest, claim).add()
            manifest = Manifest.read(paths.manifest)
        if not days:
            log.info("%s: has all these days already, nothing to do", settings.output_path)
        return manifest


def _undo(paths: EtlOutput, manifest: Manifest, claim: Claim) -> Manifest:
    """Switch back to the generation before the newest one, and return its manifest."""
    previous = EtlOutput(paths.root / PREVIOUS)
    remedy = "restore it from a copy; to leave out days without it, run the ETL again without them"
    path_inside(paths.root, PREVIOUS, paths.root, remedy)
    before = Manifest.read(previous.manifest) if previous.manifest.exists() else None
    if before is None or before.generation != (manifest.generation or 0) - 1:
        raise BadInputError(
            f"{paths.root}: the generation before generation {manifest.generation} is not there",
            f"one is kept when a day is added: {remedy}",
        )
    check_extendable(previous, before)
    claim.end()
    switch(paths.root, claim.begin(), before.generation, undo=True)
    log.info("%s: is generation %d again", paths.root, before.generation)
    return before


@dataclasses.dataclass
class _Day:
    """The stages of adding a day; each continues where an earlier process stopped.

    ``assignment`` is None if the rows of a day are divided, each by itself.
    """

    settings: ExtendSettings
    day: DayFile
    assignment: Assignment | None
    manifest: Manifest
    claim: Claim

    def __post_init__(self) -> None:
        self.output = self.settings.output_path
        self.paths = EtlOutput(self.output)
        before = self.manifest["settings"]
        self.reading = resolve(
            self.settings.day_settings(
                inspect(self.paths.workflow).spec, before["block_mb"], before["limit_rows"]
            )
        )

    def add(self) -> None:
        """Add the day: make the next generation, and switch the output to it."""
        if not self.settings.allow_repeated_day:
            check_not_repeated(self.day, self.manifest)
        self.record = plan_record(self._described(), [self.day])
        self._discard_other_plan()
        self.work = self.claim.begin()
        self.next = EtlOutput(self.work / NEXT)
        resumed = begin_or_resume(self.work, self.record, self.output)
        self.stages = Stages(self.reading, self.work, self.next, resumed)
        renamed, first_parts = self._renamed()
        plan = self.stages.read(
            [self.day],
            splits=self.assignment[self.day.day] if self.assignment else (),
            first_parts=first_parts,
        )
        factor = self.settings.max_rows_factor
        check_row_count(self.day, plan.estimated_rows(), self.manifest, factor)
        plan = self.stages.divide(plan)
        log.info(
            "%s: %.1f MB in %d blocks for %s",
            self.day.name,
            plan.text_bytes() / 1e6,
            len(plan.blocks),
            " and ".join(dict.fromkeys(unit.split for unit in plan.units)),
        )
        results = self.stages.count_and_encode(
            plan,
            "train" if self.assignment is None else None,
            lambda engine, report: self._extend_workflow(engine, plan, report),
        )
        quarantine(
            results,
            self.reading.spec,
            self.work,
            self.next.rejected,
            self.settings.max_bad_fraction,
            shown=self.paths.rejected,
        )
        self._measure_drift(plan)
        manifest = self._stage(plan, renamed, first_parts, results)
        switch(self.output, self.work, manifest.generation)
        self.claim.end()
        counts = manifest["by_day_and_split"][str(self.day.day)]
        rows = ", ".join(f"{split} {count['rows']:,} rows" for split, count in counts.items())
        log.info(
            "%s: %s is generation %d: %s", self.output, self.day.name, manifest["generation"], rows
        )

    def _discard_other_plan(self) -> None:
        """Begin again where what was interrupted was another day, file or setting."""
        begun = self.claim.unfinished_day()
        if begun is None:
            return
        if changed := changes(before_resuming(begun, self.record), self.record):
            log.warning("begun with other settings or inputs, so beginning again: %s", changed[0])
            self.claim.end()

    def _described(self) -> dict[str, Any]:
        """Return what the result depends on beside the input, JSON-ready."""
        return {
            "day": self.day.day,
            "generation": self.manifest["generation"] + 1,
            "parent": self.manifest["workflow_digest"],
            **self._described_days(),
            "statistics": self.settings.statistics,
            "retire_after_days": self.settings.retire_after_days,
            "limit_rows": self.reading.limit_rows,
            "block_mb": self.reading.block_mb,
            "on_bad_rows": self.settings.on_bad_rows,
            **({"keep_days": self.settings.keep_days} if self.settings.keep_days else {}),
        }

    def _described_days(self) -> dict[str, list[int]]:
        """Return the days of valid and test from now on; nothing where rows are divided."""
        if self.assignment is None:
            return {}
        return {
            f"{split}_days": [day for day, own in self.assignment.items() if split in own]
            for split in ("valid", "test")
        }

    def _renamed(self) -> tuple[dict[str, str], dict[str, int]]:
        """Return the new names of parts there are, and the number of each split's next part."""
        if self.assignment is None:
            return {}, self.manifest["next_parts"]
        return renamed_parts(self.manifest["files"], self.assignment, self.manifest["next_parts"])

    def _extend_workflow(self, engine: Engine, plan: Plan, report: Report) -> WorkflowDescription:
        from nvt_torchrec.workflows.extension.workflow import extend_workflow

        blocks = plan.train_blocks if self.assignment is None else plan.blocks
        return extend_workflow(
            self.paths.workflow,
            self.paths.extension,
            engine.count_day(self.day.day, blocks, report),
            self.next.workflow,
            self.next.extension,
            update_statistics=self.settings.statistics == "update",
            retire_after_days=self.settings.retire_after_days,
            threads=self.settings.workers or cores(),
        )

    def _measure_drift(self, plan: Plan) -> None:
        """Compare the day with the days counted before, as ``python -m etl drift`` does."""
        from nvt_torchrec.etl.drift import measure_drift, result_name

        (file,) = plan.days
        if (self.next.drift / f"{result_name(file.source)}.json").exists():  # by an earlier process
            return
        with self.stages.timer("drift"), RowsBar("drift", plan) as bar:
            drift = measure_drift(
                self.output,
                file,
                workers=self.settings.workers or cores(),
                report=bar.update,
            )
        drift.write(self.next.drift)
        if drift.flags:
            log.warning(
                "warning: %s differs from the days before: %s\n  -> look at %s",
                self.day.name,
                ", ".join(drift.flags),
                self.paths.drift / f"{drift.name}.json",
            )

    def _stage(
        self,
        plan: Plan,
        renamed: dict[str, str],
        first_parts: dict[str, int],
        results: list[UnitResult],
    ) -> Manifest:
        """Make the next generation ready beside OUT; return its manifest."""
        from nvt_torchrec.etl.parquet import write_descriptions

        description = inspect(self.next.workflow)
        plan, results, new = without_empty_parts(plan, results, first_parts)
        next_parts = dict(first_parts)
        for file in new.values():
            next_parts[file.split("/")[0]] += 1
        with self.stages.timer("describe"), named_errors(self.next.splits):
            dropped = left_out(self.manifest, self.day, self.assignment, self.settings.keep_days)
            files = [part.file for part in self.manifest.files if part.day not in dropped]
            splits = link_parts(self.output, self.work, files, renamed, new)
            without = files_of_days(self.paths.rejected, self.manifest.inputs, dropped)
            link_files(self.paths.rejected, self.next.rejected, without)
            link_files(self.paths.drift, self.next.drift, without)
            sizes = check_rows(plan, results, splits)
            manifest = next_manifest(
                self.manifest, self.record, self.day, results, sizes, description,
                self.assignment, renamed, next_parts, dropped,
            )  # fmt: skip
            self._check_splits(manifest)
            if dropped:
                names = ", ".join(map(str, sorted(dropped)))
                log.info("%s: the parquet of days %s is left out", self.output, names)
            write_descriptions(
                splits,
                [file["file"] for file in manifest["files"]],
                description.table_schema,
                listed_in=self.paths.splits,
            )
        refuse_changes(
            self.record,
            plan_record(self._described(), find_days(self.day.path, {self.day.day})),
            self.output,
            "the input was changed while it was added; begin again with --restart",
        )
        rows = sum(result.lines for result in results)
        self.stages.finish(manifest, description, plan, rows)
        return manifest

    def _check_splits(self, manifest: Manifest) -> None:
        if not manifest["by_day"][str(self.day.day)]["rows"]:
            raise BadInputError(
                f"{self.day.source}: no well-formed row",
                "correct the file, and begin again with --restart",
            )
        for split, counts in manifest["splits"].items():
            if not counts["rows"]:
                raise BadInputError(
                    f"{self.day.source}: no well-formed row is left for {split}",
                    "correct the file, or choose other days with --valid_days and --test_days; "
                    "begin again with --restart",
                )
