"""The stages that `etl run` and `etl extend` share: read, divide, count, encode, finish.

Each stage continues where an interrupted process stopped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import shutil
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvt_torchrec.base.errors import BadInputError, ClickLogError, OutputError
from nvt_torchrec.base.files.atomic import read_json, write_json
from nvt_torchrec.base.files.journal import refuse_changes
from nvt_torchrec.base.files.validation import parse
from nvt_torchrec.base.freed_memory import release_memory
from nvt_torchrec.base.progress_bars import show_progress
from nvt_torchrec.clicklog.readers.days import DayFile, find_days
from nvt_torchrec.clicklog.readers.log_format import Block
from nvt_torchrec.etl.engine_choice import start_engine
from nvt_torchrec.etl.files_beside import FilesBeside, make_rows_bar
from nvt_torchrec.etl.finish.accounting import quarantine
from nvt_torchrec.etl.finish.make_manifest import one_label_remedy, one_label_splits
from nvt_torchrec.etl.labels.label_values import open_labels
from nvt_torchrec.etl.settings import EtlSettings
from nvt_torchrec.etl.stage_timer import StageTimer
from nvt_torchrec.etl.state import output, staging
from nvt_torchrec.etl.state.run_record import begin_or_resume, plan_record
from nvt_torchrec.etl.tables.table_sources import TableSources
from nvt_torchrec.etl.units import split_pass
from nvt_torchrec.etl.units.unit_plan import UnitPlan, make_plan
from nvt_torchrec.etl.units.writing import UnitResult, read_results
from nvt_torchrec.formats.etl_output import EtlOutput
from nvt_torchrec.formats.feature_spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.feature_spec.split import ANY_FILES
from nvt_torchrec.formats.manifest import Manifest
from nvt_torchrec.formats.workflow_description import WorkflowDescription

if TYPE_CHECKING:
    from nvt_torchrec.etl.engines.engine import Engine, Report
    from nvt_torchrec.etl.events.earlier_days import EarlierDays
    from nvt_torchrec.etl.labels.label_state import EarlierLabels

log = logging.getLogger(__name__)

#: Bad rows of a block that never end a run at once. Small logs are read to their end anyway, before
#: the share of bad rows is checked.
_MIN_REJECTED = 10_000


@dataclasses.dataclass
class Stages:
    """The stages of a run, or of the extension by a day.

    Attributes:
        settings: The engine, and how rows are read.
        record: Everything that the result depends on; see
            :func:`etl.state.run_record.plan_record`.
        work: The directory of the run's state.
        target: The output, to which the workflow, its state for extensions, and the descriptions
            are written.
        before: The output that is extended; None for a run.
        tables: The files of the joined tables and of the event sources.
        labels: The files of the labels that come from other files than the log.
        timer: Measures the stages.
        resumed: Whether an earlier process began this work.
    """

    settings: EtlSettings
    record: dict[str, Any]
    work: Path
    target: EtlOutput
    before: EtlOutput | None = None
    tables: TableSources = dataclasses.field(default_factory=dict)
    labels: TableSources = dataclasses.field(default_factory=dict)
    timer: StageTimer = dataclasses.field(default_factory=StageTimer)

    def __post_init__(self) -> None:
        self.resumed = begin_or_resume(self.work, self.record, self.settings.output_path)
        self._beside = FilesBeside(
            self.settings, self.work, self.before, self.tables, self.labels, self.timer
        )

    def _max_bad_rows(self, plan: UnitPlan) -> int:
        """Return how many bad rows of a block may be left out; 0 if one bad row is an error.

        More bad rows in one block than this exceed the accepted share of all rows, whatever the
        other blocks hold, so the run can end at once.
        """
        if not self.settings.reject:
            return 0
        maximum = self.settings.max_bad_fraction * plan.max_rows(self.settings.spec)
        return max(_MIN_REJECTED, int(maximum))

    def read(self, days: list[DayFile], *, halved: bool = False) -> UnitPlan:
        """Decompress compressed days, and plan the work; see :mod:`etl.units.unit_plan`."""
        settings = self.settings
        with self.timer("read the input"):
            files = staging.decompress_days(days, settings, self.work)
        ready = None
        if settings.spec.label_files:
            ready = self._beside.prepare_labels(files, self.earlier_labels)
        with self.timer("plan"):
            plan = make_plan(
                files,
                settings.spec,
                block_bytes=settings.block_mb << 20,
                limit_rows=settings.limit_rows,
                halved=halved,
                ready=ready,
            )
        if settings.spec.joined_tables:
            self._beside.store_tables(plan)
        if settings.spec.event_sources:
            newest = self._earlier_days.record.newest if self._earlier_days else None
            self._beside.store_sources(newest)
        if settings.spec.events or self.earlier_labels:
            return self._bound_times(plan)
        return plan

    @functools.cached_property
    def earlier_labels(self) -> EarlierLabels | None:
        """The state that earlier days keep of their clicks; None for a run."""
        if self.before is None or not self.settings.spec.label_files:
            return None
        from nvt_torchrec.etl.labels.label_state import EarlierLabels

        return EarlierLabels.read(self.before.extension, self.settings.spec)

    def _bound_times(self, plan: UnitPlan) -> UnitPlan:
        """Return the plan with bounds on the times of rows; rows outside them are malformed.

        The lower bound is the end of the earlier days. There is an upper bound only if malformed
        rows are left out: it excludes the few rows that come long after all others. Otherwise such
        rows are reported later, by :func:`etl.events.late_rows`.
        """
        from nvt_torchrec.etl.events.late_rows import find_late_start

        settings = self.settings
        time_type = RAW_TYPES["time"]
        first = int(time_type.minimum)
        again: frozenset[str] = frozenset()
        if self.earlier_labels:
            # All rows up to the cut are written, also those of files that are read again because
            # some of their rows waited for clicks.
            first = self.earlier_labels.record.cut + 1
            again = frozenset(self.earlier_labels.record.waiting)
        elif self._earlier_days:
            first = self._earlier_days.record.newest
        end = None
        if settings.reject and settings.spec.events:
            with self.timer("times"), make_rows_bar("times", plan) as bar:
                file = self.work / output.LATE_FILE
                end = find_late_start(
                    plan.blocks, settings.spec, file, settings.threads, bar.update
                )
        if end is None and self.before is None:
            return plan
        if end is None:
            end = int(time_type.maximum) + 1
        return plan.bound_times(first, end, again=again)

    def divide(self, plan: UnitPlan) -> UnitPlan:
        """Return the plan with the data that the division of rows needs.

        A split by days needs none, so it reads nothing.
        """
        spec = self.settings.spec
        if spec.split.by == "days":
            return plan
        labels = open_labels(self.work, spec)
        with self.timer("split"), make_rows_bar("split", plan) as bar:
            return split_pass.prepare_division(
                plan,
                spec,
                self.work,
                threads=self.settings.threads,
                max_bad_rows=self._max_bad_rows(plan),
                report=bar.update,
                leave_out=labels.add if labels else None,
            )

    def _sum_up_events(self, engine: Engine, plan: UnitPlan, counted: list[Block]) -> None:
        """Count blocks, and compute what happened before each row; see :mod:`etl.events`."""
        from nvt_torchrec.etl.events.prepare import prepare

        spec = self.settings.spec
        with show_progress("events", 2 * plan.estimated_rows()) as bar:
            engine.count(counted, bar.update)
            release_memory()  # most of the memory that counting took is free by now
            prepare(
                plan,
                spec,
                self.work,
                earlier=self._earlier_days,
                map_tasks=engine.map_tasks,
                max_bad_rows=self._max_bad_rows(plan),
                report=bar.update,
            )

    def count_and_encode(
        self,
        plan: UnitPlan,
        counted: str | None,
        write_workflow: Callable[[Engine, Report], WorkflowDescription],
    ) -> list[UnitResult]:
        """Make the workflow, encode all units with it, and store the rejected rows.

        Args:
            plan: The units.
            counted: The split whose rows are counted; None for all splits.
            write_workflow: Fits or extends a workflow, and writes it and its state to ``target``.

        Returns:
            The results of all units, in the order of the plan.
        """
        results = read_results(self.work, plan.units)
        done = {result.unit for result in results}
        missing = [unit for unit in plan.units if unit not in done]
        has_workflow = self._has_workflow()
        if self.settings.spec.negatives:
            self._beside.prepare_negatives(plan, self._max_bad_rows(plan))
        if self.resumed:
            state = "counted" if has_workflow else "not counted"
            log.info("%s; %d of %d parts are written", state, len(done), len(plan.units))
        with contextlib.ExitStack() as stack:
            if missing or not has_workflow:
                with self.timer("start workers"):
                    engine = stack.enter_context(
                        start_engine(self.settings, self.work, self._max_bad_rows(plan))
                    )
            if not has_workflow and self.settings.spec.events:
                blocks = plan.train_blocks if counted == "train" else plan.blocks
                with self.timer("events", engine):
                    self._sum_up_events(engine, plan, blocks)
            if not has_workflow:
                with self.timer("fit", engine), make_rows_bar("fit", plan, counted) as bar:
                    self._make_workflow(engine, bar.update, write_workflow, has_parts=bool(done))
                # The counts of a large log take as much disk space as its parts: delete them while
                # the parts are written.
                deleting = stack.enter_context(ThreadPoolExecutor(1, "delete"))
                deleting.submit(shutil.rmtree, self.work / output.FIT, ignore_errors=True)
            if missing:
                lines = sum(result.lines for result in results)
                timer = self.timer("transform", engine)
                with timer, make_rows_bar("transform", plan, initial=lines) as bar:
                    for result in engine.encode(missing, self.target.workflow):
                        bar.update(result.lines)
                        results.append(result)
        by_unit = {result.unit: result for result in results}
        results = [by_unit[unit] for unit in plan.units]
        quarantine(results, self.settings, self.work, self.target.rejected)
        if self.settings.spec.joined_tables:
            from nvt_torchrec.etl.tables.prepare_tables import keep_rejected

            keep_rejected(self.settings.spec, self.work, self.target.rejected)
        if self.settings.spec.label_files:
            self._keep_labels(results)
        if self.settings.spec.event_sources:
            from nvt_torchrec.etl.events.source_events import keep_rejected_events

            keep_rejected_events(self.settings.spec, self.work, self.target.rejected)
        return results

    def _keep_labels(self, results: list[UnitResult]) -> None:
        """Write the label state that later days need."""
        from nvt_torchrec.etl.labels.prepare_labels import keep_labels, keep_rejected_clicks

        waiting: Counter[str] = Counter()
        for result in results:
            waiting[result.unit.block.source] += result.waiting
        spec = self.settings.spec
        keep_labels(self.work, self.target.extension, spec, waiting)
        keep_rejected_clicks(spec, self.work, self.target.rejected)

    def _make_workflow(
        self,
        engine: Engine,
        report: Report,
        write_workflow: Callable[[Engine, Report], WorkflowDescription],
        *,
        has_parts: bool,
    ) -> None:
        """Write the workflow and the state of its events and negatives to ``target``.

        Args:
            engine: The engine.
            report: Called with the number of rows read since the last call.
            write_workflow: See :meth:`count_and_encode`.
            has_parts: Whether some units were encoded already; then the workflow must be the same.

        Raises:
            OutputError: The workflow differs from the one that encoded these units.
        """
        with output.name_errors(self.target.root):
            for directory in (self.target.workflow, self.target.extension):
                shutil.rmtree(directory, ignore_errors=True)
                directory.parent.mkdir(parents=True, exist_ok=True)
        before = self._recorded_digest()
        description = write_workflow(engine, report)
        if description.spec.events:
            self._write_events(engine, description)
        if description.spec.negatives:
            from nvt_torchrec.etl.negatives.prepare_negatives import keep_negatives

            with output.name_errors(self.target.root):
                keep_negatives(self.work, self.target.extension)
        if has_parts and before not in (None, description.digest):
            raise OutputError(
                f"{self.target.workflow}: counting the log again gave a workflow with digest "
                f"{description.digest}, but the finished parts were encoded with {before}",
                "discard the parts and begin again with --restart",
            )
        write_json(self.work / output.FITTED_FILE, {"digest": description.digest})

    def _write_events(self, engine: Engine, description: WorkflowDescription) -> None:
        """Write the events that inference needs, and those that later days need."""
        from nvt_torchrec.etl.events.prepare import write_event_output

        earlier = self._earlier_days.files if self._earlier_days else None
        write_event_output(self.work, description, self.target.extension, earlier, engine.map_tasks)

    @functools.cached_property
    def _earlier_days(self) -> EarlierDays | None:
        """The events of the earlier days; None for a run."""
        if self.before is None:
            return None
        from nvt_torchrec.etl.events.earlier_days import EarlierDays
        from nvt_torchrec.workflows import compiled

        # Verify the workflow's files first: EarlierDays reads the history events from them.
        compiled.load(self.before.workflow, verify=True)
        return EarlierDays.read(self.before.extension, self.settings.spec, self.before.workflow)

    def _recorded_digest(self) -> str | None:
        """Return the recorded digest of the finished workflow; None without a readable record."""
        file = self.work / output.FITTED_FILE
        try:
            return parse(dict[str, str], read_json(file, "the record of a fit"), file)["digest"]
        except (BadInputError, KeyError):
            return None

    def _has_workflow(self) -> bool:
        """Return True if the recorded workflow exists, and it and its state are intact."""
        from nvt_torchrec.etl.events.earlier_days import EarlierDays
        from nvt_torchrec.etl.negatives.prepare_negatives import check_stored
        from nvt_torchrec.workflows import compiled
        from nvt_torchrec.workflows.description import inspect
        from nvt_torchrec.workflows.extension_state import read_state

        try:
            description = inspect(self.target.workflow)
            if self._recorded_digest() != description.digest:
                return False
            description.verify()
            compiled.load(self.target.workflow, verify=True)
            if self.settings.engine != "nvtabular":
                read_state(self.target.extension, description)
            if description.spec.events:
                EarlierDays.read(self.target.extension, description.spec)
            if description.spec.negatives:
                check_stored(self.target.extension)
        except ClickLogError:
            return False
        return True

    def check_inputs(self, days: list[DayFile]) -> None:
        """Look up the input files again, and check that they did not change during the run.

        Raises:
            OutputError: A file was changed.
        """
        found: list[DayFile] = []
        for day in days:
            found += find_days(day.path, split=ANY_FILES)
        refuse_changes(
            self.record,
            plan_record(self.record["settings"], found),
            self.settings.output_path,
            "the inputs were changed during the run; begin again with --restart",
        )

    def finish(
        self, manifest: Manifest, description: WorkflowDescription, plan: UnitPlan, rows: int
    ) -> Manifest:
        """Write the timings, the report and, last, the manifest.

        Args:
            manifest: The manifest without its ``described``, the digests of described files.
            description: The description of the workflow.
            plan: The units.
            rows: The number of rows read by this run or extension, including malformed ones.

        Returns:
            The manifest as written.
        """
        from nvt_torchrec.etl.finish.report import write_report

        timings = self.timer.timings(resumed=self.resumed, rows=rows, text_bytes=plan.text_bytes())
        write_json(self.target.timings, timings)
        write_report(self.target.report, manifest, description)
        before = Manifest.read(self.before.manifest).described if self.before else {}
        manifest = dataclasses.replace(manifest, described=self.target.list_described(before))
        manifest.write(self.target.manifest)
        warnings = one_label_splits(manifest["splits"])
        if warnings:
            remedy = one_label_remedy(manifest["splits"], manifest.split)
            log.warning("warning: %s\n  -> %s", "\nwarning: ".join(warnings), remedy)
        return manifest
