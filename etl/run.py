"""A run of the ETL, from the days of a log to a finished output directory."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

from tqdm import tqdm

from clicklog.errors import BadInputError, ClickLogError, OutputError
from clicklog.etl_output import EtlOutput
from clicklog.files.atomic import read_json, write_json
from clicklog.files.journal import Journal, refuse_changes
from clicklog.files.validation import parse
from clicklog.kernels import compile_seconds
from clicklog.readers.raw import DayFile, find_days
from clicklog.splits import SPLITS
from etl import output, staging
from etl.engines import choice
from etl.engines.hardware import cores
from etl.finish import check_rows, move_parts, quarantine
from etl.labels import ONE_LABEL_REMEDY, one_label_splits
from etl.manifest import inputs_of, read_manifest
from etl.plan import Plan, make_plan
from etl.results import UnitResult
from etl.settings import EtlSettings
from etl.state import begin_or_resume, plan_record, recorded, with_defaults

log = logging.getLogger(__name__)


def run(settings: EtlSettings) -> dict[str, Any]:
    """Run the ETL.

    Returns:
        The manifest of the run.

    Raises:
        BadInputError: An input file is missing, empty or damaged.
        BadRowError: A row is malformed; the message names file, line, column and value.
        OutputError: The output directory holds something else, or cannot be written.
    """
    settings = choice.resolve(settings)
    days = find_days(settings.input_path, settings.days)
    now = plan_record(settings.to_dict(), days)
    with output.claimed(
        settings.output_path, resume=settings.resume, restart=settings.restart
    ) as work:
        if output.is_finished(settings.output_path):
            return _already_finished(settings.output_path, now)
        resumed = begin_or_resume(work, now, settings.output_path)
        return _Run(settings, days, work, now, resumed).execute()


def _already_finished(path: Path, now: dict[str, Any]) -> dict[str, Any]:
    manifest = read_manifest(EtlOutput(path).manifest)
    before = with_defaults({"settings": manifest["settings"], "inputs": inputs_of(manifest)})
    now = {key: now[key] for key in before}  # without versions: others may read the output
    refuse_changes(before, now, path, "choose another --output_path")
    log.info("%s: finished already, nothing to do", path)
    return manifest


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
        self.stage = _StageTimer()

    def execute(self) -> dict[str, Any]:
        with self.stage("read the input"):
            threads = self.settings.workers or cores()
            plan = make_plan(
                staging.staged(self.days, self.settings, self.work, threads),
                self.settings.spec,
                block_bytes=self.settings.block_mb << 20,
                limit_rows=self.settings.limit_rows,
            )
        _log_plan(plan)
        self._check_cuts(plan)
        done = self._fit_and_transform(plan)
        quarantine(done, self.settings.spec, self.work, self.output, self.settings.max_bad_fraction)
        if self.settings.shuffle != "none":
            with self.stage("shuffle"):
                self._shuffle(done)
        return self._finish(plan, done)

    def _check_cuts(self, plan: Plan) -> None:
        """Refuse to resume a run if its input would be cut into other units than before."""
        cuts = [[u.file, u.block.source, u.block.begin, u.block.end] for u in plan.units]
        path = self.work / output.CUTS_FILE
        if path.exists() and read_json(path, "the cuts of an unfinished run") != cuts:
            raise BadInputError(
                f"{self.settings.input_path}: the positions of lines changed since the run began, "
                "although sizes and times of the files are the same",
                "begin again with --restart",
            )
        write_json(path, cuts)

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
        fitted = self._is_fitted()
        if self.resumed:
            state = "fitted" if fitted else "not fitted"
            log.info("%s; %d of %d parts are written", state, len(finished), len(plan.units))
        with contextlib.ExitStack() as stack:
            if missing or not fitted:
                with self.stage("start workers"):
                    engine = stack.enter_context(choice.start(self.settings, self.work))
            if not fitted:
                with self.stage("fit"), RowsBar("fit", plan, "train") as bar:
                    self._fit(engine, plan, bar, parts_done=bool(results))
            if missing:
                done = sum(result.lines for result in results)
                with self.stage("transform"), RowsBar("transform", plan, initial=done) as bar:
                    for result in engine.transform(missing, self.workflow):
                        bar.update(result.lines)
                        results.append(result)
        by_unit = {result.unit: result for result in results}
        return [by_unit[unit] for unit in plan.units]

    def _is_fitted(self) -> bool:
        """Return whether workflow and state are those that this run fitted, and undamaged."""
        from workflows import compiled, inspect
        from workflows.description import verify
        from workflows.extension_state import read_state

        try:
            description = inspect(self.workflow)
            if self._fitted_digest() != description.digest:
                return False
            verify(self.workflow, description)
            compiled.load(self.workflow, verify=True)
            read_state(self.paths.extension, description)
        except ClickLogError:
            return False
        return True

    def _fitted_digest(self) -> str | None:
        """Return the digest of the workflow that this run fitted; None if it is not recorded."""
        file = self.work / output.FITTED_FILE
        try:
            return parse(dict[str, str], read_json(file, "the record of a fit"), file)["digest"]
        except (BadInputError, KeyError):
            return None

    def _fit(self, engine: choice.Engine, plan: Plan, bar: RowsBar, *, parts_done: bool) -> None:
        from workflows import inspect

        for directory in (self.workflow, self.paths.extension):
            shutil.rmtree(directory, ignore_errors=True)
        engine.fit(plan.train_blocks, plan.train_days, self.paths, bar.update)
        before, now = self._fitted_digest(), inspect(self.workflow).digest
        if parts_done and before not in (None, now):
            raise OutputError(
                f"{self.workflow}: fitted again, it has digest {now}; the finished parts were "
                f"encoded with {before}",
                "discard them and begin again with --restart",
            )
        write_json(self.work / output.FITTED_FILE, {"digest": now})
        # no longer needed; deleting takes a while, so it happens while units are transformed
        Thread(target=shutil.rmtree, args=(self.work / output.FIT, True)).start()

    def _shuffle(self, results: list[UnitResult]) -> None:
        from etl.shuffle.training_rows import Part, shuffle

        train = [result for result in results if result.unit.split == "train"]
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

    def _finish(self, plan: Plan, results: list[UnitResult]) -> dict[str, Any]:
        from etl.manifest import make_manifest
        from etl.parquet import write_descriptions
        from etl.report.page import write_report
        from workflows import inspect

        description = inspect(self.workflow)
        with self.stage("describe"):
            files = [result.unit.file for result in results]
            with output.named_errors(self.split_root):
                move_parts(self.parts, self.split_root, files)
            sizes = check_rows(plan, results, self.split_root)
            write_descriptions(self.split_root, files, description.table_schema)
        refuse_changes(
            self.record,
            plan_record(
                self.settings.to_dict(), find_days(self.settings.input_path, self.settings.days)
            ),
            self.output,
            "the inputs were changed during the run; begin again with --restart",
        )
        manifest = make_manifest(self.record, self.days, results, sizes, description)
        write_json(self.paths.timings, self._timings(plan, manifest))
        write_report(self.paths.report, manifest, description)
        write_json(self.paths.manifest, manifest)
        output.release(self.output)
        log.info("wrote %s", self.paths.manifest)
        if warnings := one_label_splits(manifest["splits"]):
            log.warning("warning: %s\n  -> %s", "\nwarning: ".join(warnings), ONE_LABEL_REMEDY)
        return manifest

    def _timings(self, plan: Plan, manifest: dict[str, Any]) -> dict[str, Any]:
        """Return the seconds per stage of this process, and speeds unless it resumed a run."""
        seconds = self.stage.seconds
        work = seconds.get("fit", 0.0) + seconds.get("transform", 0.0)
        speeds: dict[str, Any] = {"rows_per_s": None, "text_mb_per_s": None}
        if work and not self.resumed:
            speeds["rows_per_s"] = round(manifest["rows"]["in"] / work)
            speeds["text_mb_per_s"] = round(plan.text_bytes() / work / 1e6, 1)
        return {"resumed": self.resumed, "seconds": dict(seconds), **speeds}


def _log_plan(plan: Plan) -> None:
    for split in SPLITS:
        units = [unit for unit in plan.units if unit.split == split]
        days = sorted({unit.day for unit in units})
        log.info(
            "%-5s day %s: %.1f MB in %d parts",
            split,
            f"{days[0]}-{days[-1]}" if len(days) > 1 else days[0],
            plan.text_bytes(split) / 1e6,
            len(units),
        )
    if len(plan.days) == 1:
        log.info("one day only: 80 % for training, 10 % each for validation and test")


class RowsBar(tqdm):
    """A progress bar on a terminal: rows/s, MB of input per second, time left."""

    def __init__(self, what: str, plan: Plan, split: str | None = None, initial: int = 0) -> None:
        self.mb_per_row = plan.text_bytes(split) / max(1, plan.estimated_rows(split)) / 1e6
        total = plan.estimated_rows(split)
        super().__init__(
            desc=what, total=total, initial=initial, unit=" rows", unit_scale=True, disable=None
        )

    @property
    def format_dict(self) -> dict[str, Any]:
        """tqdm's fields, with the speed in MB/s."""
        value = super().format_dict
        rate = value["rate"] or (value["n"] - value["initial"]) / max(value["elapsed"], 1e-9)
        value["postfix"] = f"{rate * self.mb_per_row:.0f} MB/s"
        return value


class _StageTimer:
    """Measures and logs the seconds of each stage, and how many of them compiled loops."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        begin, compiled = time.perf_counter(), compile_seconds()
        yield
        self.seconds[name] = round(time.perf_counter() - begin, 3)
        compiled = compile_seconds() - compiled
        words = f", {compiled:.1f} s of it compiling" if compiled >= 0.1 else ""
        log.info("%s: %.1f s%s", name, self.seconds[name], words)
