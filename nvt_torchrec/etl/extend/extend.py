"""Extend an output: count new days, append their values to the workflow, encode them, and switch.

Each day makes a generation, which is committed before the next day begins. So the result does not
depend on how days are grouped into commands.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from typing import TYPE_CHECKING, Any

from nvt_torchrec.base.errors import BadInputError, SchemaError, SettingsError
from nvt_torchrec.base.files.journal import list_changes
from nvt_torchrec.base.files.validation import resolve_inside
from nvt_torchrec.clicklog.readers.days import DayFile
from nvt_torchrec.etl.engine_choice import choose_engine
from nvt_torchrec.etl.extend import stage
from nvt_torchrec.etl.extend.claim import DISCARDED, NEXT, Claim, claim_extension, switch
from nvt_torchrec.etl.extend.new_days import (
    check_not_repeated,
    check_row_count,
    find_new_days,
)
from nvt_torchrec.etl.extend.new_events import drop_known_files
from nvt_torchrec.etl.extend.stage import parse_part_name
from nvt_torchrec.etl.finish.accounting import check_rows, number_parts
from nvt_torchrec.etl.finish.make_manifest import make_manifest
from nvt_torchrec.etl.labels.label_sources import find_label_files, find_waiting
from nvt_torchrec.etl.settings import ExtendSettings
from nvt_torchrec.etl.stages import Stages
from nvt_torchrec.etl.state.output import EVENTS, TABLES, name_errors
from nvt_torchrec.etl.state.run_record import (
    adapt_plan,
    plan_record,
)
from nvt_torchrec.etl.tables.table_sources import (
    TableSources,
    describe_files,
    describe_sources,
    find_recorded_files,
    find_tables,
    list_paths,
    parse_paths,
)
from nvt_torchrec.etl.units.unit_plan import UnitPlan
from nvt_torchrec.etl.units.writing import UnitResult
from nvt_torchrec.formats.etl_output import PREVIOUS, EtlOutput
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.split import Split
from nvt_torchrec.formats.histories import link_histories
from nvt_torchrec.formats.manifest import Manifest
from nvt_torchrec.formats.vectors import IN_WORKFLOW, VECTORS, link_vectors
from nvt_torchrec.formats.workflow_description import WorkflowDescription
from nvt_torchrec.workflows.description import inspect

if TYPE_CHECKING:
    from nvt_torchrec.etl.engines.engine import Engine, Report

log = logging.getLogger(__name__)

_RESTORE = (
    "restore it from a copy (`python -m etl check` lists what is wrong), or run the ETL again"
)


def extend(settings: ExtendSettings) -> Manifest:
    """Add days to the output of a run.

    Returns:
        The manifest of the newest generation.

    Raises:
        BadInputError: A file is missing or damaged, or a day cannot be added.
        BadRowError: A row is malformed; the message names file, line, column and value.
        SchemaError: NVTabular's own operators made the output.
        SettingsError: Days cannot be added to an output with such a split.
        OutputError: The output is in use or cannot be written, or holds an interrupted extension.
    """
    paths = EtlOutput(settings.output_path)
    with claim_extension(settings.output_path, restart=settings.restart) as claim:
        manifest = Manifest.read(paths.manifest)
        if settings.undo:
            return _undo(paths, manifest, claim)
        spec = check_extendable(paths, manifest)
        interrupted = claim.unfinished_day()
        days: list[DayFile] = []
        tables: TableSources = {}
        labels: TableSources = {}
        if settings.input_path:
            table_paths = parse_paths(settings.table)
            tables = find_tables(spec, settings.input_path, table_paths, needed=False)
            label_paths = parse_paths(settings.label_path, "--label_path")
            labels = find_label_files(spec, settings.input_path, label_paths)
        elif interrupted:
            settings = dataclasses.replace(settings, input_path=interrupted.path)
            tables = find_recorded_files(interrupted.settings.get("tables", {}))
            labels = find_recorded_files(interrupted.settings.get("labels", {}))
        if settings.input_path:
            without = list_paths(tables) | list_paths(labels)
            days = find_new_days(settings, manifest, without=without)
        for day in days:
            by_days = spec.split.by == "days"
            _Day(settings, day, tables, labels, by_days, manifest, claim).add()
            manifest = Manifest.read(paths.manifest)
        if not days:
            log.info("%s: has these days already, nothing to do", settings.output_path)
        return manifest


def _undo(paths: EtlOutput, manifest: Manifest, claim: Claim) -> Manifest:
    """Switch back to the generation before the newest one, and return its manifest."""
    previous = EtlOutput(paths.root / PREVIOUS)
    remedy = "restore it from a copy, or run the ETL again without the days that you want to remove"
    resolve_inside(paths.root, PREVIOUS, paths.root, remedy)
    before = Manifest.read(previous.manifest) if previous.manifest.exists() else None
    if claim.undoing and (before is None or before.generation > manifest.generation):
        # An interrupted undo was finished when the output was claimed.
        log.info(
            "%s: is generation %s again, by an earlier command", paths.root, manifest.generation
        )
        return manifest
    if before is None or before.generation != (manifest.generation or 0) - 1:
        raise BadInputError(
            f"{paths.root}: the generation before generation {manifest.generation} is missing",
            f"only one generation is kept, when a day is added: {remedy}",
        )
    check_extendable(previous, before)
    claim.end()
    work = claim.begin(undoing=True)
    switch(paths.root, work, before.generation, undo=True)
    with contextlib.suppress(OSError):  # kept, because running trainings may read it
        os.rename(work / DISCARDED, previous.root)
    log.info("%s: is generation %d again", paths.root, before.generation)
    return before


@dataclasses.dataclass
class _Day:
    """The stages of adding a day; each continues where an interrupted process stopped.

    Attributes:
        settings: The settings of the extension.
        day: The new day.
        tables: The files of the joined tables and of the event sources.
        labels: The files of the labels.
        by_days: Whether the output is split by days, so that the new day is halved into valid and
            test; otherwise the spec's rule divides its rows.
        manifest: The manifest of the current generation.
        claim: The claim of the output.
    """

    settings: ExtendSettings
    day: DayFile
    tables: TableSources
    labels: TableSources
    by_days: bool
    manifest: Manifest
    claim: Claim

    def __post_init__(self) -> None:
        self.output = self.settings.output_path
        self.paths = EtlOutput(self.output)
        before = self.manifest["settings"]
        spec = inspect(self.paths.workflow).spec
        settings = self.settings.day_settings(spec, before["block_mb"], before["limit_rows"])
        self.reading = choose_engine(settings, [self.day])

    def add(self) -> None:
        """Add the day: make the next generation, and switch the output to it."""
        if not self.settings.allow_repeated_day:
            check_not_repeated(self.day, self.manifest)
        waiting = self._find_waiting()
        tables = drop_known_files(self.tables, self.reading.spec, self.manifest)
        joined = describe_sources(tables, self.reading.spec)
        joined |= describe_files(self.labels, "labels")
        self.files = [self.day, *waiting]
        record = plan_record(self._describe_settings() | joined, self.files)
        interrupted = self.claim.unfinished_day()
        if interrupted:
            changed = list_changes(adapt_plan(interrupted, record), record)
            if changed:
                log.warning(
                    "settings or inputs differ from those of the interrupted extension, which "
                    "begins again: %s",
                    changed[0],
                )
                self.claim.end()
        work = self.claim.begin()
        self.next = EtlOutput(work / NEXT)
        self.stages = Stages(
            self.reading,
            record,
            work,
            self.next,
            self.paths,
            tables=tables,
            labels=self.labels,
        )
        # In a split by days, the current parts of valid and test become parts of train.
        renamed: dict[str, str] = {}
        first_parts = self.manifest["next_parts"]
        if self.by_days:
            renamed, first_parts = stage.rename_parts(self.manifest["files"], first_parts)
        plan = self.stages.read([*waiting, self.day], halved=self.by_days)
        plan = plan.assign_day(self.day.day)
        factor = self.settings.max_rows_factor
        check_row_count(self.day, plan.estimate_file(self.day.source), self.manifest, factor)
        plan = self.stages.divide(plan)
        splits = " and ".join(dict.fromkeys(unit.split for unit in plan.units))
        log.info("%s: %.1f MB for %s", self.day.name, plan.text_bytes() / 1e6, splits)

        def extend_workflow(engine: Engine, report: Report) -> WorkflowDescription:
            return self._extend_workflow(engine, plan, report)

        counted = None if self.by_days else "train"
        results = self.stages.count_and_encode(plan, counted, extend_workflow)
        manifest = self._stage(plan, renamed, first_parts, results)
        switch(self.output, work, manifest.generation)
        self.claim.end()
        self._log_generation(manifest)

    def _log_generation(self, manifest: Manifest) -> None:
        """Log the rows of the day by split; warn if none of them is for training."""
        counts = manifest["by_day_and_split"][str(self.day.day)]
        rows = ", ".join(f"{split} {count['rows']:,} rows" for split, count in counts.items())
        log.info(
            "%s: %s is generation %d: %s", self.output, self.day.name, manifest["generation"], rows
        )
        split = self.reading.spec.split
        if split.by == "time" and not counts.get("train", {}).get("rows"):
            log.warning(
                "warning: none of its rows is for training, because none is before %s: the cuts "
                "of a split by time do not move\n  -> to train on newer rows, run the ETL again "
                "over all files with a later valid_from and test_from in the spec's [split]",
                split.valid_from,
            )

    def _find_waiting(self) -> list[DayFile]:
        """Return the files of earlier days with rows that wait for their clicks."""
        if not self.reading.spec.label_files:
            return []
        from nvt_torchrec.etl.labels.label_state import EarlierLabels

        earlier = EarlierLabels.read(self.paths.extension, self.reading.spec)
        return find_waiting(self.manifest, earlier.record.waiting)

    def _describe_settings(self) -> dict[str, Any]:
        """Return the JSON-ready settings that the result depends on."""
        described = {
            "day": self.day.day,
            "generation": self.manifest["generation"] + 1,
            "parent": self.manifest["workflow_digest"],
        }
        if self.by_days:
            described |= {"valid_days": [self.day.day], "test_days": [self.day.day]}
        described |= {
            "limit_rows": self.reading.limit_rows,
            "block_mb": self.reading.block_mb,
            "on_bad_rows": self.settings.on_bad_rows,
        }
        if self.settings.keep_days:
            described["keep_days"] = self.settings.keep_days
        return described

    def _extend_workflow(
        self, engine: Engine, plan: UnitPlan, report: Report
    ) -> WorkflowDescription:
        from nvt_torchrec.workflows.extend_workflow import extend_workflow

        blocks = plan.blocks if self.by_days else plan.train_blocks
        return extend_workflow(
            self.paths.workflow,
            self.paths.extension,
            engine.count_day(self.day.day, blocks, report),
            self.next.workflow,
            self.next.extension,
            threads=self.settings.threads,
            tables=self.stages.work / TABLES,
        )

    def _stage(
        self,
        plan: UnitPlan,
        renamed: dict[str, str],
        first_parts: dict[str, int],
        results: list[UnitResult],
    ) -> Manifest:
        """Complete the next generation in its own directory; return its manifest.

        Args:
            plan: The units.
            renamed: Current name → new name of the existing parts that are renamed.
            first_parts: The number of the new day's first part in each split.
            results: The results of all units.
        """
        from nvt_torchrec.etl.units.part_files import write_descriptions

        day = self.day
        before = self.manifest
        description = inspect(self.next.workflow)
        results, new = number_parts(results, first_parts)
        if not any(result.rows for result in results):
            raise BadInputError(
                f"{day.source}: no well-formed row",
                "correct the file, and begin again with --restart",
            )
        with self.stages.timer("describe"), name_errors(self.next.splits):
            days = sorted({*map(int, before.by_day), day.day})
            dropped: set[int] = set()
            if self.settings.keep_days:
                dropped = set(days[: -self.settings.keep_days])
            files = [part.file for part in before.files if part.day not in dropped]
            splits = stage.link_parts(self.output, self.stages.work, files, renamed, new)
            link_histories([self.paths.splits, self.stages.work / EVENTS], splits)
            for vector in description.spec.vectors:
                link_vectors(self.next.workflow / IN_WORKFLOW, splits / VECTORS, vector.name)
            without = stage.list_rejected_files(self.paths.rejected, before.inputs, dropped)
            stage.link_files(self.paths.rejected, self.next.rejected, without)
            written = check_rows(results, splits)
            day_manifest = make_manifest(
                self.stages.record,
                [day],
                results,
                written,
                description,
                generation=before.generation + 1,
            )
            manifest = stage.make_next_manifest(
                stage.move_waiting(before, results),
                day_manifest,
                self.by_days,
                renamed,
                first_parts,
                dropped,
            )
            for split, counts in manifest["splits"].items():
                if not counts["rows"]:
                    raise BadInputError(
                        f"{day.source}: no well-formed row is left for {split}",
                        "correct the file, and begin again with --restart",
                    )
            if dropped:
                names = ", ".join(map(str, sorted(dropped)))
                log.info("%s: the parquet of days %s is dropped", self.output, names)
            write_descriptions(
                splits, [file["file"] for file in manifest["files"]], description.table_schema
            )
        self.stages.check_inputs(self.files)
        return self.stages.finish(manifest, description, plan, day_manifest.rows["in"])


def check_extendable(paths: EtlOutput, manifest: Manifest) -> FeatureSpec:
    """Check that the manifest, the workflow, its state and the parts belong to one generation.

    Returns:
        The feature spec of the output.

    Raises:
        BadInputError: A file is missing or damaged, or belongs to another generation.
        SchemaError: NVTabular's own operators made the output.
        SettingsError: Days cannot be added to an output with such a split.
    """
    if manifest.settings.get("engine") == "nvtabular":
        raise SchemaError(
            f"{paths.manifest}: made with --engine nvtabular, which keeps no counts to extend",
            "fit the log again with `python -m etl run --engine cpu` or `--engine dask`",
        )
    description = inspect(paths.workflow)
    _check_split(paths, description.spec.split, manifest.split or {})
    if description.digest != manifest["workflow_digest"]:
        raise BadInputError(
            f"{paths.workflow}: its digest is {description.digest[:12]}…, but the data were made "
            f"with workflow {manifest['workflow_digest'][:12]}…",
            _RESTORE,
        )
    for file in manifest.files:
        parse_part_name(file.file)  # refuses a name that points out of the directory
        difference = paths.part_difference(file)
        if difference:
            raise BadInputError(difference, _RESTORE)
    paths.check_described(manifest, _RESTORE)
    return description.spec


def _check_split(paths: EtlOutput, split: Split, rule: dict[str, Any]) -> None:
    """Check that the split tells where the rows of a new day go, and moves no existing row."""
    if split.by == "files":
        raise SettingsError(
            f"{paths.root}: its rows are split by files, so the split does not tell where the rows "
            "of a new file go",
            "run the ETL again over all files, with the new ones in the spec's [split]; or, to add "
            'days from now on, run it with by = "days", "share" or "column"',
        )
    if split.by == "time" and not split.valid_from:
        raise SettingsError(
            f"{paths.root}: its rows are split by time with shares: a new day would move the cuts, "
            "and existing rows would change their split",
            "set the cuts themselves in the [split] of the spec, now "
            f'valid_from = "{rule.get("valid_from")}", test_from = "{rule.get("test_from")}", and '
            'run the ETL again; or, to add days from now on, run it with by = "days", "share" or '
            '"column"',
        )
