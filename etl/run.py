"""One run of the ETL, from the days of a log to a finished output directory."""

from __future__ import annotations

import contextlib
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
from clicklog.files.journal import refuse_changes
from clicklog.files.validation import parse
from clicklog.kernels import compile_seconds
from clicklog.readers.raw import DayFile, find_days
from clicklog.splits import SPLITS
from etl import output, staging
from etl.engines import choice as engines
from etl.finish import check_rows, move_parts, quarantine
from etl.labels import ONE_LABEL_REMEDY, one_label_splits
from etl.manifest import inputs_of, read_manifest
from etl.plan import Plan, make_plan
from etl.results import UnitResult
from etl.settings import EtlSettings
from etl.state import begin_or_resume, plan_record, recorded, with_defaults

log = logging.getLogger(__name__)


def run(settings: EtlSettings) -> dict[str, Any]:
    """Run the ETL; returns the manifest it wrote.

    Raises:
        BadInputError, BadRowError: the input, naming file, line, column and value.
        OutputError: the output directory holds something else, or cannot be written.
    """
    days = find_days(settings.input_path, settings.days)
    now = plan_record(settings.to_dict(), days)
    with output.claimed(
        settings.output_path, resume=settings.resume, restart=settings.restart
    ) as work:
        if output.is_finished(settings.output_path):
            return _already_finished(settings.output_path, now)
        resumed = begin_or_resume(work, now, settings.output_path)
        return _Run(settings, days, work, now, resumed).all()


def _already_finished(path: Path, now: dict[str, Any]) -> dict[str, Any]:
    manifest = read_manifest(EtlOutput(path).manifest)
    before = with_defaults({"settings": manifest["settings"], "inputs": inputs_of(manifest)})
    now = {key: now[key] for key in before}  # other versions may read it
    refuse_changes(before, now, path, "choose another --output_path")
    log.info("%s: finished already, nothing to do", path)
    return manifest


class _Run:
    """The stages of a run; each finds what an earlier process did of it."""

    def __init__(
        self,
        settings: EtlSettings,
        days: list[DayFile],
        work: Path,
        record: dict[str, Any],
        resumed: bool,
    ) -> None:
        self.settings, self.days, self.work = settings, days, work
        self.record, self.resumed = record, resumed
        self.output = settings.output_path
        self.paths = EtlOutput(self.output)
        self.workflow, self.split_root = self.paths.workflow, self.paths.splits
        self.parts = work / output.PARTS
        self.clock = _Clock()

    def all(self) -> dict[str, Any]:
        with self.clock("read the input"):
            threads = self.settings.workers or engines.cores()
            plan = make_plan(
                staging.staged(self.days, self.settings, self.work, threads),
                self.settings.spec,
                block_bytes=self.settings.block_mb << 20,
                limit_rows=self.settings.limit_rows,
            )
        _log_plan(plan)
        self._check_cuts(plan)
        done = self._fit_and_transform(plan)
        most = self.settings.max_bad_fraction
        quarantine(done, self.settings.spec, self.work, self.output, most)
        if self.settings.shuffle != "none":
            with self.clock("shuffle"):
                self._shuffle(done)
        return self._finish(plan, done)

    def _check_cuts(self, plan: Plan) -> None:
        """The units of a resumed run are those that it began with."""
        cuts = [[u.file, u.block.source, u.block.begin, u.block.end] for u in plan.units]
        path = self.work / output.CUTS_FILE
        if path.exists() and read_json(path, "the cuts of an unfinished run") != cuts:
            raise BadInputError(
                f"{self.settings.input_path}: its lines are not where they were, though sizes and "
                "times of its files are the same",
                "begin again with --restart",
            )
        write_json(path, cuts)

    def _fit_and_transform(self, plan: Plan) -> list[UnitResult]:
        """The results of all units, in their order."""
        results = recorded(self.work, plan.units)
        have = {result.unit for result in results}
        missing = [unit for unit in plan.units if unit not in have]
        fitted = self._is_fitted()
        if self.resumed:
            log.info(
                "%s; %d of %d parts are there",
                "fitted" if fitted else "not fitted",
                len(have),
                len(plan.units),
            )
        with contextlib.ExitStack() as stack:
            if missing or not fitted:
                with self.clock("start workers"):
                    engine = stack.enter_context(engines.started(self.settings, self.work))
            if not fitted:
                with self.clock("fit"), RowsBar("fit", plan, "train") as bar:
                    self._fit(engine, plan, bar, parts_done=bool(results))
            if missing:
                done = sum(result.lines for result in results)
                with self.clock("transform"), RowsBar("transform", plan, initial=done) as bar:
                    for result in engine.transform(missing, self.workflow):
                        bar.update(result.lines)
                        results.append(result)
        order = {unit: i for i, unit in enumerate(plan.units)}
        return sorted(results, key=lambda result: order[result.unit])

    def _is_fitted(self) -> bool:
        """Whether the saved workflow is the one that this run has fitted, and undamaged."""
        from workflows import compiled, inspect
        from workflows.description import verify

        try:
            description = inspect(self.workflow)
            if self._fitted_digest() != description.digest:
                return False
            verify(self.workflow, description)
            compiled.load(self.workflow, verify=True)
        except ClickLogError:
            return False
        return True

    def _fitted_digest(self) -> str | None:
        """The digest of the workflow that this run has fitted, if that is known."""
        file = self.work / output.FITTED_FILE
        try:
            return parse(dict[str, str], read_json(file, "the record of a fit"), file)["digest"]
        except (BadInputError, KeyError):
            return None

    def _fit(self, engine: engines.Engine, plan: Plan, bar: RowsBar, *, parts_done: bool) -> None:
        from workflows import inspect

        shutil.rmtree(self.workflow, ignore_errors=True)
        engine.fit(plan.train_blocks, self.workflow, bar.update)
        before, now = self._fitted_digest(), inspect(self.workflow).digest
        if parts_done and before not in (None, now):
            raise OutputError(
                f"{self.workflow}: fitted again, it has digest {now}; the parts that are done were "
                f"encoded with {before}",
                "discard what the run did and begin again with --restart",
            )
        write_json(self.work / output.FITTED_FILE, {"digest": now})
        # Of no use any more. Deleting takes a while, which transforming need not wait for.
        Thread(target=shutil.rmtree, args=(self.work / output.FIT, True)).start()

    def _shuffle(self, results: list[UnitResult]) -> None:
        from etl.shuffle.training_rows import Part, shuffle

        own = [result for result in results if result.unit.split == "train"]
        total = sum(result.rows for result in own)
        with tqdm(desc="shuffle", total=total, unit=" rows", unit_scale=True, disable=None) as bar:
            shuffle(
                self.parts,
                self.parts,
                [Part(result.unit.file, result.rows, result.unit.day) for result in own],
                mode=self.settings.shuffle,
                seed=self.settings.seed,
                work=self.work / output.SHUFFLE,
                workers=self.settings.workers or engines.cores(),
                report=bar.update,
            )

    def _finish(self, plan: Plan, results: list[UnitResult]) -> dict[str, Any]:
        from etl.manifest import make_manifest
        from etl.parquet import write_descriptions
        from etl.report.page import write_report
        from workflows import inspect

        description = inspect(self.workflow)
        with self.clock("describe"):
            files = [result.unit.file for result in results]
            with output.named_errors(self.split_root):
                move_parts(self.parts, self.split_root, files)
            sizes = check_rows(plan, results, self.split_root)
            write_descriptions(self.split_root, files, description.table_schema)
        refuse_changes(
            self.record,
            plan_record(self.settings.to_dict(), self._days_now()),
            self.output,
            "they were written to during the run; begin again with --restart",
        )
        manifest = make_manifest(self.record, self.days, results, sizes, description)
        write_json(self.paths.timings, self._timings(plan, manifest))
        write_report(self.paths.report, manifest, description)
        write_json(self.paths.manifest, manifest)
        output.release(self.output)
        log.info("wrote %s", self.paths.manifest)
        if found := one_label_splits(manifest["splits"]):
            log.warning("warning: %s\n  -> %s", "\nwarning: ".join(found), ONE_LABEL_REMEDY)
        return manifest

    def _days_now(self) -> list[DayFile]:
        return find_days(self.settings.input_path, self.settings.days)

    def _timings(self, plan: Plan, manifest: dict[str, Any]) -> dict[str, Any]:
        """Seconds per stage of this process; speeds only of a run without an interruption."""
        seconds = self.clock.seconds
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
        log.info("one day only: its first four fifths for training, the rest halved")


class RowsBar(tqdm):
    """Progress of a stage on a terminal: rows/s, MB of input/s, time left."""

    def __init__(self, what: str, plan: Plan, split: str | None = None, initial: int = 0) -> None:
        self.mb_per_row = plan.text_bytes(split) / max(1, plan.estimated_rows(split)) / 1e6
        total = plan.estimated_rows(split)
        super().__init__(
            desc=what, total=total, initial=initial, unit=" rows", unit_scale=True, disable=None
        )

    @property
    def format_dict(self) -> dict[str, Any]:
        """tqdm's, and the speed in MB/s."""
        value = super().format_dict
        rate = value["rate"] or (value["n"] - value["initial"]) / max(value["elapsed"], 1e-9)
        value["postfix"] = f"{rate * self.mb_per_row:.0f} MB/s"
        return value


class _Clock:
    """Seconds per stage; each is logged when it ends, and how long loops were compiled in it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, stage_name: str) -> Iterator[None]:
        begin, compiled = time.perf_counter(), compile_seconds()
        yield
        self.seconds[stage_name] = round(time.perf_counter() - begin, 3)
        compiled = compile_seconds() - compiled
        words = f", {compiled:.1f} s of it compiling" if compiled >= 0.1 else ""
        log.info("%s: %.1f s%s", stage_name, self.seconds[stage_name], words)
