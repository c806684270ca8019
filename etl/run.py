"""A run of the ETL, from the days of a log to a finished output directory."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import shutil
from pathlib import Path
from typing import Any

from tqdm import tqdm

from nvt_torchrec.base.errors import OutputError
from nvt_torchrec.base.files.atomic import write_json
from nvt_torchrec.base.files.journal import Journal, refuse_changes
from nvt_torchrec.clicklog.readers.raw import DayFile, find_days
from nvt_torchrec.etl import fitted, output, split_pass, staging
from nvt_torchrec.etl.engines import choice
from nvt_torchrec.etl.engines.hardware import cores
from nvt_torchrec.etl.finish import (
    check_rows,
    check_splits,
    move_parts,
    quarantine,
    without_empty_parts,
)
from nvt_torchrec.etl.labels import one_label_remedy, one_label_splits
from nvt_torchrec.etl.plan import Plan, make_plan
from nvt_torchrec.etl.progress import RowsBar, StageTimer
from nvt_torchrec.etl.results import UnitResult
from nvt_torchrec.etl.settings import EtlSettings
from nvt_torchrec.etl.state import (
    already_finished,
    begin_or_resume,
    check_cuts,
    plan_record,
    recorded,
)
from nvt_torchrec.formats.etl_output import EtlOutput
from nvt_torchrec.formats.manifest import Manifest
from nvt_torchrec.formats.spec.feature_spec import FeatureSpec
from nvt_torchrec.formats.splits import SPLITS

log = logging.getLogger(__name__)


def run(settings: EtlSettings) -> Manifest:
    """Run the ETL.

    Returns:
        The manifest of the run.

    Raises:
        BadInputError: An input file is missing, empty or damaged.
        BadRowError: A row is malformed; the message names file, line, column and value.
        OutputError: The output directory holds something else, or cannot be written.
    """
    settings = choice.resolve(settings)
    days = _files(settings)
    now = plan_record(settings.to_dict(), days)
    with output.claimed(
        settings.output_path, resume=settings.resume, restart=settings.restart
    ) as work:
        if output.is_finished(settings.output_path):
            remedy = "choose another --output_path, or add new days with `python -m etl extend`"
            return already_finished(settings.output_path, now, remedy)
        resumed = begin_or_resume(work, now, settings.output_path)
        return _Run(settings, days, work, now, resumed).execute()


def _files(settings: EtlSettings) -> list[DayFile]:
    return find_days(settings.input_path, settings.days, split=settings.spec.split)


@dataclasses.dataclass
class _Run:
    """The stages of a run; each continues where an earlier process stopped."""

    settings: EtlSettings
    days: list[DayFile]
    work: Path
    record: dict[str, Any]
    resumed: bool

    def __post_init__(self) -> None:
        self.output = self.settings.output_path
        self.paths = EtlOutput(self.output)
        self.workflow, self.split_root = self.paths.workflow, self.paths.splits
        self.parts = self.work / output.PARTS
        self.stage = StageTimer()

    def execute(self) -> Manifest:
        with self.stage("read the input"):
            threads = self.settings.workers or cores()
            plan = make_plan(
                staging.staged(self.days, self.settings, self.work, threads),
                self.settings.spec,
                block_bytes=self.settings.block_mb << 20,
                limit_rows=self.settings.limit_rows,
            )
        _log_plan(plan, self.settings.spec)
        plan = self._prepared(plan)
        check_cuts(self.work, plan.units, self.settings.input_path)
        done = self._fit_and_transform(plan)
        quarantine(
            done,
            self.settings.spec,
            self.work,
            self.paths.rejected,
            self.settings.max_bad_fraction,
        )
        check_splits(done, self.settings.spec)
        if self.settings.shuffle != "none":
            with self.stage("shuffle"):
                self._shuffle(done)
        return self._finish(plan, done)

    def _prepared(self, plan: Plan) -> Plan:
        """Return the plan with what the division of rows needs; nothing is read by days."""
        if self.settings.spec.split.by == "days":
            return plan
        with self.stage("split"), RowsBar("split", plan) as bar:
            plan = split_pass.prepared(
                plan,
                self.settings.spec,
                self.work,
                threads=self.settings.workers or cores(),
                reject=self.settings.reject,
                report=bar.update,
            )
        rule = split_pass.describe(plan, self.settings.spec)
        if self.settings.spec.split.by == "time":
            log.info(
                "valid from %s on, test from %s on (UTC)", rule["valid_from"], rule["test_from"]
            )
        return plan

    def _fit_and_transform(self, plan: Plan) -> list[UnitResult]:
        """Return the results of all units, in the order of the plan."""
        results = recorded(self.work, plan.units)
        finished = {result.unit for result in results}
        missing = [unit for unit in plan.units if unit not in finished]
        shuffling = Journal(self.work / output.SHUFFLE).begun
        if shuffling and any(unit.split == "train" for unit in missing):
            raise OutputError(  # a part that is encoded again would not be shuffled
                f"{self.work}: records of finished parts are damaged", "begin again with --restart"
            )
        is_fitted = fitted.is_whole(self.paths, self.work)
        if self.resumed:
            state = "fitted" if is_fitted else "not fitted"
            log.info("%s; %d of %d parts are written", state, len(finished), len(plan.units))
        with contextlib.ExitStack() as stack:
            if missing or not is_fitted:
                with self.stage("start workers"):
                    engine = stack.enter_context(choice.start(self.settings, self.work))
            if not is_fitted:
                with self.stage("fit"), RowsBar("fit", plan, "train") as bar:
                    self._fit(engine, plan, bar, parts_done=bool(results))
                stack.enter_context(output.deleted_meanwhile(self.work / output.FIT))
            if missing:
                done = sum(result.lines for result in results)
                with self.stage("transform"), RowsBar("transform", plan, initial=done) as bar:
                    for result in engine.transform(missing, self.workflow):
                        bar.update(result.lines)
                        results.append(result)
        by_unit = {result.unit: result for result in results}
        return [by_unit[unit] for unit in plan.units]

    def _fit(self, engine: choice.Engine, plan: Plan, bar: RowsBar, *, parts_done: bool) -> None:
        from nvt_torchrec.workflows import inspect

        for directory in (self.workflow, self.paths.extension):
            shutil.rmtree(directory, ignore_errors=True)
        engine.fit(plan.train_blocks, plan.train_days, self.paths, bar.update)
        before, now = fitted.recorded_digest(self.work), inspect(self.workflow).digest
        if parts_done and before not in (None, now):
            raise OutputError(
                f"{self.workflow}: fitted again, it has digest {now}; the finished parts were "
                f"encoded with {before}",
                "discard them and begin again with --restart",
            )
        fitted.record_workflow(self.work, now)

    def _shuffle(self, results: list[UnitResult]) -> None:
        from nvt_torchrec.etl.shuffle.training_rows import Part, shuffle

        train = [result for result in results if result.unit.split == "train" and result.has_part]
        total = sum(result.rows for result in train)
        with tqdm(desc="shuffle", total=total, unit=" rows", unit_scale=True, disable=None) as bar:
            shuffle(
                self.parts,
                self.parts,
                [Part(result.unit.file, result.rows, result.unit.day) for result in train],
                mode=self.settings.shuffle,
                seed=self.settings.seed,
                work=self.work / output.SHUFFLE,
                workers=self.settings.workers or cores(),
                report=bar.update,
            )

    def _finish(self, plan: Plan, results: list[UnitResult]) -> Manifest:
        from nvt_torchrec.etl.manifest import make_manifest
        from nvt_torchrec.etl.parquet import write_descriptions
        from nvt_torchrec.etl.report.page import write_report
        from nvt_torchrec.workflows import inspect

        description = inspect(self.workflow)
        with self.stage("describe"):
            plan, results, names = without_empty_parts(plan, results)
            files = list(names.values())
            with output.named_errors(self.split_root):
                move_parts(self.parts, self.split_root, names)
            sizes = check_rows(plan, results, self.split_root)
            write_descriptions(self.split_root, files, description.table_schema)
        refuse_changes(
            self.record,
            plan_record(self.settings.to_dict(), _files(self.settings)),
            self.output,
            "the inputs were changed during the run; begin again with --restart",
        )
        spec = self.settings.spec
        rule = None if spec.split.by == "days" else split_pass.describe(plan, spec)
        manifest = make_manifest(self.record, self.days, results, sizes, description, rule)
        timings = self.stage.timings(
            resumed=self.resumed, rows=manifest["rows"]["in"], text_bytes=plan.text_bytes()
        )
        write_json(self.paths.timings, timings)
        write_report(self.paths.report, manifest, description)
        manifest.write(self.paths.manifest)
        output.release(self.output)
        log.info("wrote %s", self.paths.manifest)
        if warnings := one_label_splits(manifest["splits"]):
            remedy = one_label_remedy(manifest["splits"], manifest.split)
            log.warning("warning: %s\n  -> %s", "\nwarning: ".join(warnings), remedy)
        return manifest


def _log_plan(plan: Plan, spec: FeatureSpec) -> None:
    if spec.split.by not in ("days", "files"):
        log.info(
            "rows of %d files (%.1f MB in %d blocks) are divided by %s",
            len(plan.days),
            plan.text_bytes() / 1e6,
            len(plan.blocks),
            spec.split.by,
        )
        return
    titles = {day.day: day.name for day in plan.days}
    for split in SPLITS:
        units = [unit for unit in plan.units if unit.split == split]
        days = [titles[day] for day in sorted({unit.day for unit in units})]
        log.info(
            "%-5s %s: %.1f MB in %d parts",
            split,
            _range(days),
            plan.text_bytes(split) / 1e6,
            len(units),
        )
    if len(plan.days) == 1 and spec.split.by == "days":
        log.info("one day only: 80 % for training, 10 % each for validation and test")


def _range(names: list[str]) -> str:
    """``day 0-22``, or the first and the last name."""
    if len(names) == 1:
        return names[0]
    if all(name.startswith("day ") for name in names):
        return f"{names[0]}-{names[-1].removeprefix('day ')}"
    return f"{names[0]} to {names[-1]}"
