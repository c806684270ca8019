"""Train every model on data sets with published results, with a user's commands and defaults.

The files are in --data_path, in a directory for each data set; docs/quality.md lists them, and
where they come from. Data sets whose files are missing are skipped. The models are compared with
LightGBM and CatBoost with early stopping, with a logistic regression whose C is chosen on valid,
and with published figures. The results of all runs are kept in build/bench/published.jsonl, and the
tables are made of them; runs of our models are repeated only when the package has changed.

Everything after -- goes to train_torchrec.py.

    python -m benchmarks.published --only frappe --models dlrm --seeds 1
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.data import make_once
from benchmarks.etl.systems import build_environment, find_python
from benchmarks.harness import describe_machine, run_benchmark, run_etl, split_flags
from benchmarks.process import BUILD, ROOT, run
from benchmarks.published_data import DATA, Published, PublishedData
from nvt_torchrec.base.command_line import Settings, flag
from nvt_torchrec.base.errors import BadInputError, ClickLogError
from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.models.registry import MODELS
from nvt_torchrec.training.reporting.metrics_log import METRICS_FILE
from nvt_torchrec.training.reporting.page import read_events

log = logging.getLogger("benchmarks")

#: Program of benchmarks.published_peers → its name in the table.
PEERS = {
    "regression": "logistic regression, C chosen on valid",
    "lightgbm": "LightGBM, early stopping",
    "catboost": "CatBoost, early stopping",
}
#: Peers whose result does not depend on the seed, so that one run is enough.
_WITHOUT_SEED = ("regression", "lightgbm")
#: The directory of the code whose changes may change results.
PACKAGE = "nvt_torchrec"
#: The fields that identify a kept result.
_KEY = ("data", "rows", "system", "seed", "flags", "version")
_HEADINGS = ("", "test AUROC", "of the seeds", "log loss", "CPU s", "source")


@dataclasses.dataclass(frozen=True)
class PublishedSettings(Settings):
    """The settings of the benchmark."""

    data_path: str = flag("directory of the data sets", str(BUILD / "published-data"))
    only: tuple[str, ...] = flag("data sets to use", tuple(DATA), choices=tuple(DATA))
    models: tuple[str, ...] = flag("models to train", tuple(MODELS), choices=tuple(MODELS))
    peers: tuple[str, ...] = flag(
        "other programs to compare with", tuple(PEERS), choices=tuple(PEERS)
    )
    seeds: int = flag("number of seeds, from 0 on; the table shows medians", 5, minimum=1)


@dataclasses.dataclass(frozen=True)
class Job:
    """One run: the key of its result, and its command.

    Attributes:
        key: The data set, the digest of its rows, system and seed; for our runs also the flags and
            the version of the code.
        command: The program and its arguments.
        log_path: The directory of our trainer's metrics; None for a peer, which prints them.
    """

    key: dict[str, Any]
    command: list[str]
    log_path: Path | None = None

    def run(self) -> dict[str, Any]:
        """Run the command; return the key with AUROC, log loss and times, or with the error."""
        if self.log_path:
            shutil.rmtree(self.log_path, ignore_errors=True)
        done = run(self.command, timeout=24 * 3600, result=self._read if self.log_path else None)
        if done.error:
            return {**self.key, "error": done.error}
        values = {name: done.output[name] for name in ("auroc", "log_loss")}
        return {**self.key, **values, "cpu_s": done.cpu_s, "wall_s": done.wall_s}

    def _read(self) -> dict[str, Any]:
        """Return the last evaluation on test from the trainer's log."""
        assert self.log_path
        last: dict[str, Any] = {}
        for event in read_events(self.log_path / METRICS_FILE):
            if event["event"] == "evaluation" and event["split"] == "test":
                last = event
        return last


class Results:
    """The results of finished runs, kept in a file of JSON lines.

    The last result of a key counts.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._runs: dict[str, dict[str, Any]] = {}
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                self._add(json.loads(line))

    def find(self, job: Job) -> dict[str, Any] | None:
        """Return the result of a job; None if the job has not run or has failed."""
        result = self._runs.get(_format_key(job.key))
        return None if result is None or "error" in result else result

    def add(self, result: dict[str, Any]) -> None:
        """Add a result to the file."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
        self._add(result)

    def _add(self, result: dict[str, Any]) -> None:
        key = {name: result[name] for name in _KEY if name in result}
        self._runs[_format_key(key)] = result


def _format_key(key: dict[str, Any]) -> str:
    return json.dumps(key, sort_keys=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return exit status 1 if a run failed."""
    arguments, flags = split_flags(sys.argv[1:] if argv is None else argv)
    return run_benchmark(
        "published", __doc__, PublishedSettings, lambda settings: _run(settings, flags), arguments
    )


def _run(settings: PublishedSettings, flags: list[str]) -> int:
    results = Results(BUILD / "published.jsonl")
    peers = [name for name in settings.peers if _is_ready(name)]
    failed = False
    tables = []
    for name in settings.only:
        data = DATA[name]
        try:
            split, notes = _make_split(name, data, Path(settings.data_path) / name)
        except BadInputError as error:
            log.warning("%s is skipped: %s", name, error)
            continue
        results_by_system: dict[str, list[dict[str, Any]]] = {}
        for job in _list_jobs(name, data, split, settings, peers, flags):
            result = results.find(job)
            if result is None:
                result = job.run()
                results.add(result)
                log.info("%s", _describe(result))
            failed |= "error" in result
            results_by_system.setdefault(job.key["system"], []).append(result)
        tables.append(format_table(data.title, results_by_system, data.figures, notes))
    print("\n\n".join([describe_machine(), *tables]))
    return 1 if failed or not tables else 0


def _is_ready(peer: str) -> bool:
    """Return True if a peer can run; build the separate environment that CatBoost needs."""
    if peer != "catboost":
        return True
    try:
        build_environment(peer)
    except ClickLogError as error:
        log.warning("%s is skipped: %s", peer, error)
        return False
    return True


def _make_split(name: str, data: PublishedData, folder: Path) -> tuple[Path, list[str]]:
    """Run the ETL on a data set, once; return its splits, and notes on files that differ.

    Raises:
        BadInputError: A file is missing.
    """
    root = BUILD / "published" / name
    raw = root / "raw"
    spec_file = root / "spec.toml"
    output = root / "out"

    def make() -> None:
        raw.mkdir()
        path = data.write(folder, raw)
        spec: str | Path = spec_file
        if data.spec.startswith("["):  # the text of a spec
            spec_file.write_text(data.spec, encoding="utf-8")
        elif data.spec:  # the name of a bundled spec
            spec = data.spec
        else:
            run_etl("guess", path, *data.guess, "--output", spec_file)
        run_etl("run", "--spec", spec, "--input_path", path, "--output_path", output)

    files = sorted(folder.glob("*")) if folder.is_dir() else []
    stamps = {file.name: (file.stat().st_size, file.stat().st_mtime_ns) for file in files}
    make_once(root, f"{name}, {stamps}", make)
    return output / "criteo_binary" / "split", data.compare_digests(folder, raw)


def _list_jobs(
    name: str,
    data: PublishedData,
    split: Path,
    settings: PublishedSettings,
    peers: Sequence[str],
    flags: list[str],
) -> Iterator[Job]:
    """Yield the runs of a data set: all systems with the first seed, then with the next one."""
    schema = TableSchema.read(split)
    sizes = dict(zip(schema.categorical, schema.table_sizes, strict=True))
    columns = {
        "label": schema.label,
        "dense": list(schema.dense),
        "categorical": list(schema.categorical),
        "sizes": sizes,
    }
    manifest = json.loads((split.parents[1] / "manifest.json").read_text(encoding="utf-8"))
    data_key = {"data": name, "rows": _digest_rows(manifest)}
    version = _read_version()
    for seed in range(settings.seeds):
        for model in settings.models:
            if MODELS[model].attends and not data.histories:
                continue
            log_path = BUILD / "published" / name / "runs" / f"{model}-{seed}"
            command = [sys.executable, str(ROOT / "train_torchrec.py"), "--binary_path", str(split)]
            command += ["--model", model, "--seed", str(seed), *flags, "--log_path", str(log_path)]
            key = {**data_key, "system": model, "seed": seed, "flags": flags, "version": version}
            yield Job(key, command, log_path)
        for peer in peers:
            if seed and peer in _WITHOUT_SEED:
                continue
            python = find_python(peer) if peer == "catboost" else sys.executable
            program = Path(__file__).with_name("published_peers.py")
            command = [str(python), str(program), peer, str(split), json.dumps(columns), str(seed)]
            yield Job({**data_key, "system": peer, "seed": seed}, command)


def _digest_rows(manifest: dict[str, Any]) -> str:
    """Return a digest of the ETL's output, which changes with the rows, the split or the spec."""
    content = json.dumps([manifest["workflow_digest"], manifest["splits"]], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:12]


def _read_version() -> str:
    """Return git's digest of the package, and a digest of its uncommitted changes if any."""
    tree = _run_git("rev-parse", "--short=12", f"HEAD:{PACKAGE}").strip()
    changes = _run_git("diff", "HEAD", "--", PACKAGE)
    if not changes:
        return tree
    return f"{tree}-{hashlib.sha256(changes.encode()).hexdigest()[:8]}"


def _run_git(*arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout


def _describe(result: dict[str, Any]) -> str:
    name = f"{result['data']}, {result['system']}, seed {result['seed']}"
    if "error" in result:
        return f"{name} failed: {result['error']}"
    return (
        f"{name}: AUROC {result['auroc']:.5f}, log loss {result['log_loss']:.4f}, "
        f"{result['cpu_s']:.1f} CPU s"
    )


def format_table(
    title: str,
    results_by_system: dict[str, list[dict[str, Any]]],
    figures: Sequence[Published],
    notes: Sequence[str] = (),
) -> str:
    """Format a data set's table in Markdown: medians over the seeds, then published figures.

    Args:
        title: The heading.
        results_by_system: The results of each system.
        figures: The published figures.
        notes: Lines below the table.
    """
    rows = [list(_HEADINGS)]
    for system, results in results_by_system.items():
        name = PEERS.get(system, f"**{system}**")
        done = [result for result in results if "error" not in result]
        if not done:
            rows.append([name, "failed", "", "", "", results[0]["error"]])
            continue
        aurocs = [result["auroc"] for result in done]
        auroc = statistics.median(aurocs)
        log_loss = statistics.median(result["log_loss"] for result in done)
        cpu_s = statistics.median(result["cpu_s"] for result in done)
        spread = ""
        if len(done) > 1:
            spread = f"{min(aurocs):.5f} – {max(aurocs):.5f}"
        rows.append([name, f"{auroc:.5f}", spread, f"{log_loss:.4f}", f"{cpu_s:,.0f}", ""])
    for figure in figures:
        loss = "" if figure.log_loss is None else f"{figure.log_loss:g}"
        name = f"published: {figure.system}"
        rows.append([name, f"{figure.auroc:g}", "", loss, "", figure.source])
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, "|" + " --- |" * len(_HEADINGS))
    num_seeds = max((len(results) for results in results_by_system.values()), default=0)
    seeds_note = f"Medians of {num_seeds} seeds." if num_seeds > 1 else "One seed."
    return "\n".join([f"### {title}", "", *lines, "", seeds_note, *notes])


if __name__ == "__main__":
    sys.exit(main())
