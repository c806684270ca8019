"""Run the ETL, from the days of a log to a finished output directory."""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING

from nvt_torchrec.clicklog.readers.days import DayFile, find_days
from nvt_torchrec.etl.engine_choice import choose_engine
from nvt_torchrec.etl.finish.accounting import check_rows, check_splits, move_parts, number_parts
from nvt_torchrec.etl.finish.make_manifest import make_manifest
from nvt_torchrec.etl.labels.label_sources import find_label_files
from nvt_torchrec.etl.settings import EtlSettings
from nvt_torchrec.etl.stages import Stages
from nvt_torchrec.etl.state import output
from nvt_torchrec.etl.state.run_record import plan_record, read_finished
from nvt_torchrec.etl.tables.table_sources import (
    describe_files,
    describe_sources,
    find_tables,
    list_paths,
    parse_paths,
)
from nvt_torchrec.etl.units import split_pass
from nvt_torchrec.etl.units.unit_plan import UnitPlan
from nvt_torchrec.formats.etl_output import EtlOutput
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.histories import link_histories
from nvt_torchrec.formats.manifest import Manifest
from nvt_torchrec.formats.splits import SPLITS
from nvt_torchrec.formats.vectors import IN_WORKFLOW, VECTORS, link_vectors
from nvt_torchrec.formats.workflow_description import WorkflowDescription

if TYPE_CHECKING:
    from nvt_torchrec.etl.engines.engine import Engine, Report
    from nvt_torchrec.workflows.writer import Fitted

log = logging.getLogger(__name__)


def run(settings: EtlSettings) -> Manifest:
    """Run the ETL.

    Returns:
        The manifest of the run.

    Raises:
        BadInputError: An input file is missing, empty or damaged.
        BadRowError: A row is malformed; the message names file, line, column and value.
        OutputError: The output directory is the output of other settings or files, holds something
            else, or cannot be written.
    """
    spec = settings.spec
    table_paths = parse_paths(settings.table)
    tables = find_tables(spec, settings.input_path, table_paths)
    label_paths = parse_paths(settings.label_path, "--label_path")
    labels = find_label_files(spec, settings.input_path, label_paths)
    days = find_days(
        settings.input_path,
        settings.days,
        split=spec.split,
        without=list_paths(tables) | list_paths(labels),
    )
    settings = choose_engine(settings, days)
    joined = describe_sources(tables, spec) | describe_files(labels, "labels")
    record = plan_record(settings.to_dict() | joined, days)
    with output.claim_output(settings.output_path, restart=settings.restart) as work:
        if output.is_finished(settings.output_path):
            return read_finished(settings.output_path, record)
        output_paths = EtlOutput(settings.output_path)
        stages = Stages(settings, record, work, output_paths, tables=tables, labels=labels)
        return _run(stages, days)


def _run(stages: Stages, days: list[DayFile]) -> Manifest:
    """Do the stages of a run in a claimed output directory."""
    from nvt_torchrec.etl.units.part_files import write_descriptions
    from nvt_torchrec.workflows.description import inspect

    spec = stages.settings.spec
    paths = stages.target
    plan = stages.read(days)
    _log_plan(plan, spec)
    plan = stages.divide(plan)
    rule = None if spec.split.by == "days" else split_pass.describe(plan, spec)
    if rule and spec.split.by == "time":
        log.info("valid from %s on, test from %s on (UTC)", rule["valid_from"], rule["test_from"])

    def write_workflow(engine: Engine, report: Report) -> WorkflowDescription:
        return _write_fitted(stages, engine.fit(plan.train_blocks, report), plan)

    results = stages.count_and_encode(plan, "train", write_workflow)
    check_splits(results, spec)
    description = inspect(paths.workflow)
    with stages.timer("describe"):
        results, names = number_parts(results)
        with output.name_errors(paths.splits):
            move_parts(stages.work / output.PARTS, paths.splits, names)
            link_histories([stages.work / output.EVENTS], paths.splits)
            for vector in spec.vectors:
                link_vectors(paths.workflow / IN_WORKFLOW, paths.splits / VECTORS, vector.name)
        written = check_rows(results, paths.splits)
        write_descriptions(paths.splits, list(names.values()), description.table_schema)
    stages.check_inputs(days)
    manifest = make_manifest(stages.record, days, results, written, description, split=rule)
    for digest, count in Counter(file.digest for file in manifest.inputs).items():
        if count > 1:
            copies = [file.path for file in manifest.inputs if file.digest == digest]
            log.warning("warning: %s have the same content", ", ".join(copies))
    manifest = stages.finish(manifest, description, plan, manifest["rows"]["in"])
    output.release(paths.root)
    log.info("wrote %s", paths.manifest)
    return manifest


def _write_fitted(stages: Stages, fitted: Fitted, plan: UnitPlan) -> WorkflowDescription:
    """Write the workflow and, unless NVTabular fitted it, its state for extensions."""
    from nvt_torchrec.workflows.extend_workflow import write_base_state
    from nvt_torchrec.workflows.writer import write_workflow

    description = write_workflow(
        stages.target.workflow,
        stages.settings.spec,
        fitted,
        threads=stages.settings.threads,
        days=tuple(plan.train_days),
        tables=stages.work / output.TABLES,
    )
    if stages.settings.engine != "nvtabular":
        write_base_state(stages.target.extension, description, fitted, plan.train_days)
    return description


def _log_plan(plan: UnitPlan, spec: FeatureSpec) -> None:
    """Log the days and the size of each split."""
    if spec.split.by not in ("days", "files"):
        log.info("%.1f MB, divided by %s", plan.text_bytes() / 1e6, spec.split.by)
        return
    titles = {day.day: day.name for day in plan.days}
    for split in SPLITS:
        units = [unit for unit in plan.units if unit.split == split]
        days = [titles[day] for day in sorted({unit.day for unit in units})]
        names = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
        size = plan.text_bytes(split) / 1e6
        log.info("%-5s %s: %.1f MB", split, names, size)
    if len(plan.days) == 1 and spec.split.by == "days":
        log.info("one day only: 80 % for training, 10 % each for validation and test")
