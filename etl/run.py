"""A run of the ETL, from the days of a log to a finished output directory."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from nvt_torchrec.base.files.journal import refuse_changes
from nvt_torchrec.clicklog.readers.days import DayFile, find_days
from nvt_torchrec.etl import output, split_pass
from nvt_torchrec.etl.engines.hardware import cores
from nvt_torchrec.etl.engines.start import resolve
from nvt_torchrec.etl.finish import (
    check_rows,
    check_splits,
    move_parts,
    quarantine,
    without_empty_parts,
)
from nvt_torchrec.etl.plan import Plan
from nvt_torchrec.etl.results import UnitResult
from nvt_torchrec.etl.settings import EtlSettings
from nvt_torchrec.etl.stages import Stages
from nvt_torchrec.etl.state import already_finished, begin_or_resume, plan_record
from nvt_torchrec.formats.etl_output import EtlOutput
from nvt_torchrec.formats.manifest import Manifest
from nvt_torchrec.formats.spec.feature_spec import FeatureSpec
from nvt_torchrec.formats.splits import SPLITS
from nvt_torchrec.formats.workflow_description import WorkflowDescription

if TYPE_CHECKING:
    from nvt_torchrec.workflows.writer import Fitted

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
    settings = resolve(settings)
    days = _files(settings)
    now = plan_record(settings.to_dict(), days)
    with output.claimed(settings.output_path, restart=settings.restart) as work:
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
        self.paths = EtlOutput(self.settings.output_path)
        self.parts = self.work / output.PARTS
        self.stages = Stages(self.settings, self.work, self.paths, self.resumed)

    def execute(self) -> Manifest:
        spec = self.settings.spec
        plan = self.stages.read(self.days)
        _log_plan(plan, spec)
        plan = self.stages.divide(plan)
        if spec.split.by == "time":
            rule = split_pass.describe(plan, spec)
            log.info(
                "valid from %s on, test from %s on (UTC)", rule["valid_from"], rule["test_from"]
            )
        results = self.stages.count_and_encode(
            plan,
            "train",
            lambda engine, report: self._fit(engine.fit(plan.train_blocks, report), plan),
        )
        quarantine(results, spec, self.work, self.paths.rejected, self.settings.max_bad_fraction)
        check_splits(results, spec)
        if self.settings.shuffle != "none":
            with self.stages.timer("shuffle"):
                self._shuffle(results)
        return self._finish(plan, results)

    def _fit(self, fitted: Fitted, plan: Plan) -> WorkflowDescription:
        """Write the workflow and, unless it is NVTabular's, its state for extensions."""
        from nvt_torchrec.workflows.extension.workflow import write_base_state
        from nvt_torchrec.workflows.writer import Descent, write_workflow

        description = write_workflow(
            self.paths.workflow,
            self.settings.spec,
            fitted,
            threads=self.settings.workers or cores(),
            descent=Descent(tuple(plan.train_days)),
        )
        if self.settings.engine != "nvtabular":
            write_base_state(self.paths.extension, description, fitted, plan.train_days)
        return description

    def _shuffle(self, results: list[UnitResult]) -> None:
        from nvt_torchrec.etl.shuffle.training_rows import Part, shuffle

        train = [result for result in results if result.unit.split == "train" and result.has_part]
        total = sum(result.rows for result in train)
        with tqdm(desc="shuffle", total=total, unit=" rows", unit_scale=True, disable=None) as bar:
            shuffle(
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
        from nvt_torchrec.workflows import inspect

        spec, splits = self.settings.spec, self.paths.splits
        description = inspect(self.paths.workflow)
        with self.stages.timer("describe"):
            plan, results, names = without_empty_parts(plan, results)
            with output.named_errors(splits):
                move_parts(self.parts, splits, names)
            sizes = check_rows(plan, results, splits)
            write_descriptions(splits, list(names.values()), description.table_schema)
        refuse_changes(
            self.record,
            plan_record(self.settings.to_dict(), _files(self.settings)),
            self.paths.root,
            "the inputs were changed during the run; begin again with --restart",
        )
        rule = None if spec.split.by == "days" else split_pass.describe(plan, spec)
        manifest = make_manifest(self.record, self.days, results, sizes, description, rule)
        for digest, count in Counter(file.digest for file in manifest.inputs).items():
            if count > 1:
                same = [file.path for file in manifest.inputs if file.digest == digest]
                log.warning("warning: %s have the same content", ", ".join(same))
        self.stages.finish(manifest, description, plan, manifest["rows"]["in"])
        output.release(self.paths.root)
        log.info("wrote %s", self.paths.manifest)
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
        names = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
        size = plan.text_bytes(split) / 1e6
        log.info("%-5s %s: %.1f MB in %d parts", split, names, size, len(units))
    if len(plan.days) == 1 and spec.split.by == "days":
        log.info("one day only: 80 % for training, 10 % each for validation and test")
