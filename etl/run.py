"""One run of the ETL, from the days of a log to a finished output directory."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from clicklog.errors import OutputError, SettingsError
from clicklog.files import lock, write_json, write_text
from clicklog.raw import DayFile, find_days
from clicklog.spec import FeatureSpec
from clicklog.splits import SPLITS
from etl.plan import Plan, make_plan, stage

if TYPE_CHECKING:
    from etl.engine_dask import UnitResult

log = logging.getLogger(__name__)

MANIFEST_FILE = "manifest.json"
#: Marks a directory whose run has not finished; everything below it may be replaced.
UNFINISHED_FILE = ".unfinished"
#: What a run creates in its output directory.
_OWN = (
    ".work", "criteo_binary", "workflow", "rejected.tsv", "report.html", MANIFEST_FILE
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class EtlSettings:
    """What a run is asked for.

    Attributes:
        input_path: directory of the days, local or remote.
        output_path: local directory, absent or empty.
        spec: the columns, vocabulary policies and dense transform.
        days: which days to use; None: all there are, without a gap.
        limit_rows: use the first so many lines of each day only.
        block_mb: MiB of text per unit of work.
        workers: processes; None: one per GPU, or per core.
        scheduler: address of a running Dask cluster to use instead of starting one.
        reject: leave bad rows out instead of stopping at the first.
    """

    input_path: str
    output_path: Path
    spec: FeatureSpec
    days: frozenset[int] | None = None
    limit_rows: int | None = None
    block_mb: int = 64
    workers: int | None = None
    scheduler: str | None = None
    reject: bool = False

    def __post_init__(self) -> None:
        # workers of another cluster may run elsewhere
        object.__setattr__(self, "output_path", self.output_path.absolute())
        for name, least in (("limit_rows", 1), ("block_mb", 1), ("workers", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise SettingsError(f"--{name} {value}: at least {least}")
        if self.workers and self.scheduler:
            raise SettingsError("--workers and --scheduler are both set", "a cluster has its own")

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form, without what cannot change the result."""
        return {
            "spec": self.spec.to_dict(),
            "days": None if self.days is None else sorted(self.days),
            "limit_rows": self.limit_rows,
            "block_mb": self.block_mb,
            "reject": self.reject,
        }


def run(settings: EtlSettings) -> dict[str, Any]:
    """Run the ETL; returns the manifest it wrote.

    Raises:
        BadInputError, BadRowError: the input, naming file, line, column and value.
        OutputError: the output directory holds something else, or cannot be written.
    """
    output = settings.output_path
    days = find_days(settings.input_path, settings.days)
    work, clock = output / ".work", _Clock()
    with _claimed(output):
        with clock("read the input"):
            plan = make_plan(
                _stage(days, work),
                settings.spec,
                block_bytes=settings.block_mb << 20,
                limit_rows=settings.limit_rows,
            )
        _log_plan(plan)
        results = _fit_and_transform(plan, settings, work, clock)
        with clock("describe"):
            manifest = _finish(settings, days, results, clock)
    log.info("wrote %s", output / MANIFEST_FILE)
    return manifest


@contextlib.contextmanager
def _claimed(output: Path) -> Iterator[None]:
    """Make the output directory ours: absent, empty, or left by a run that did not finish.

    The marker is locked while we run; the lock ends with the process, however that ends.
    """
    present = check_output(output)
    try:
        output.mkdir(parents=True, exist_ok=True)
        marker = open(output / UNFINISHED_FILE, "a", encoding="utf-8")  # noqa: SIM115
        lock(marker, output)
        if (output / MANIFEST_FILE).exists():  # it finished before it, or we, could take a breath
            (output / UNFINISHED_FILE).unlink()
            check_output(output)
        if present:
            log.info("%s: starting again a run that did not finish", output)
            _remove_own(output)
    except OSError as error:
        raise OutputError(
            f"{output}: cannot be written: {error.strerror}", "choose another --output_path"
        ) from error
    with marker:
        yield


def check_output(output: Path) -> set[str]:
    """The names in an output directory that a run may use: absent, empty, or not finished.

    Raises:
        OutputError: it holds something else, a finished run for example.
    """
    present = {path.name for path in output.iterdir()} if output.is_dir() else set()
    if present and UNFINISHED_FILE not in present:
        finished = " (a finished run)" if MANIFEST_FILE in present else ""
        raise OutputError(
            f"{output}: holds {', '.join(sorted(present)[:5])}{finished}",
            "choose an empty --output_path, or remove it first",
        )
    return present


def _remove_own(output: Path) -> None:
    for name in _OWN:
        path = output / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _stage(days: list[DayFile], work: Path) -> list[DayFile]:
    if not any(day.compressed for day in days):
        return days
    with tqdm(desc="decompress", unit="B", unit_scale=True, disable=None) as bar:
        return stage(days, work / "decompressed", bar.update)


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


def _fit_and_transform(plan: Plan, settings: EtlSettings, work: Path, clock: _Clock) -> list:
    from etl import engine_dask  # takes seconds to import: after the input was checked
    from etl.cluster import cluster
    from workflows import save

    workflow_path = settings.output_path / "workflow"
    with contextlib.ExitStack() as stack:
        with clock("start workers"):
            client, gpu = stack.enter_context(
                cluster(settings.scheduler, settings.workers, work / "dask")
            )
        with clock("fit"), _rows_bar("fit", plan, "train") as bar:
            workflow = engine_dask.fit(
                plan.train_blocks,
                settings.spec,
                work / "fit",
                client,
                gpu=gpu,
                reject=settings.reject,
                report=bar.update,
            )
            save(workflow, settings.spec, workflow_path)
        results = []
        with clock("transform"), _rows_bar("transform", plan) as bar:
            for result in engine_dask.transform(
                plan.units,
                workflow_path,
                _split_root(settings.output_path),
                client,
                gpu=gpu,
                reject=settings.reject,
            ):
                bar.update(result.rows)
                results.append(result)
    order = {unit: i for i, unit in enumerate(plan.units)}
    return sorted(results, key=lambda result: order[result.unit])


def _rows_bar(what: str, plan: Plan, split: str | None = None) -> tqdm:
    total = plan.estimated_rows(split)
    return tqdm(desc=what, total=total, unit="rows", unit_scale=True, disable=None)


def _split_root(output: Path) -> Path:
    return output / "criteo_binary" / "split"


def _finish(settings: EtlSettings, days: list[DayFile], results: list, clock: _Clock) -> dict:
    from etl.manifest import make_manifest
    from etl.parquet import write_descriptions
    from etl.report import write_report
    from workflows import inspect

    output = settings.output_path
    description = inspect(output / "workflow")
    schema = description.table_schema
    write_descriptions(_split_root(output), [result.unit.file for result in results], schema)
    rejected = _rejected_lines(results)
    if rejected:
        write_text(output / "rejected.tsv", "\n".join(["file\tline\twhat", *rejected, ""]))
    manifest = make_manifest(settings, days, results, description, clock.seconds)
    write_report(output / "report.html", manifest, description)
    shutil.rmtree(output / ".work", ignore_errors=True)
    write_json(output / MANIFEST_FILE, manifest)
    (output / UNFINISHED_FILE).unlink()
    return manifest


def _rejected_lines(results: list[UnitResult]) -> list[str]:
    """File, line number from 1, and reason of rejected rows; ``results`` in the order of files."""
    lines: list[str] = []
    seen: dict[str, int] = {}  # lines of each file before the unit
    for result in results:
        source = result.unit.block.source
        first = seen.get(source, 0) + 1
        lines += [f"{source}\t{first + line}\t{what}" for line, what in result.bad]
        if result.bad_count > len(result.bad):
            more = result.bad_count - len(result.bad)
            lines.append(f"{source}\t\tand {more} more up to line {first + _lines(result) - 1}")
        seen[source] = first - 1 + _lines(result)
    return lines


def _lines(result: UnitResult) -> int:
    return result.rows + result.bad_count


class _Clock:
    """Seconds per stage; each is logged when it ends."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, stage_name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.seconds[stage_name] = round(time.perf_counter() - begin, 3)
        log.info("%s: %.1f s", stage_name, self.seconds[stage_name])
