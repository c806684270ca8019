"""Train every model on data sets with published tables, by the commands and defaults of a user.

The files lie in --data_path, a directory for each data set; docs/quality.md says which, and where
they come from. Data sets whose files are missing are left out. Beside the models stand LightGBM
and CatBoost with early stopping, a logistic regression with C chosen on valid, and what others
report. Each run is kept in build/bench/published.jsonl, and ours are not done again until the
package has changed; the table is made of the kept runs.

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

#: The other programs, by the names of benchmarks.published_peers; and what the table calls them.
PEERS = {
    "regression": "logistic regression, C chosen on valid",
    "lightgbm": "LightGBM, early stopping",
    "catboost": "CatBoost, early stopping",
}
#: Peers whose result depends on no seed: one run says all.
_WITHOUT_SEED = ("regression", "lightgbm")
#: The directory of the code whose changes make other results.
PACKAGE = "nvt_torchrec"
#: What identifies a run among the kept ones.
_KEY = ("data", "rows", "system", "seed", "flags", "version")
_HEADINGS = ("", "test AUROC", "of the seeds", "log loss", "CPU s", "source")


@dataclasses.dataclass(frozen=True)
class PublishedSettings(Settings):
    """The settings of the benchmark."""

    data_path: str = flag("the directory of the data sets", str(BUILD / "published-data"))
    only: tuple[str, ...] = flag("data sets", tuple(DATA), choices=tuple(DATA))
    models: tuple[str, ...] = flag("models", tuple(MODELS), choices=tuple(MODELS))
    peers: tuple[str, ...] = flag("other programs", tuple(PEERS), choices=tuple(PEERS))
    seeds: int = flag("seeds, from 0 on; the table has the medians", 5, minimum=1)


@dataclasses.dataclass(frozen=True)
class Job:
    """One run: what identifies its result, and its command.

    Attributes:
        key: Data set with the digest of its rows, system, seed, and flags and code of our runs.
        command: Program and arguments.
        log_path: Where our trainer writes its metrics; None for a peer, which prints them.
    """

    key: dict[str, Any]
    command: list[str]
    log_path: Path | None = None

    def run(self) -> dict[str, Any]:
        """Run it; return the key with AUROC, log loss and times, or with the error."""
        if self.log_path:
            shutil.rmtree(self.log_path, ignore_errors=True)
        done = run(self.command, timeout=24 * 3600, result=self._read if self.log_path else None)
        if done.error:
            return {**self.key, "error": done.error}
        values = {name: done.output[name] for name in ("auroc", "log_loss")}
        return {**self.key, **values, "cpu_s": done.cpu_s, "wall_s": done.wall_s}

    def _read(self) -> dict[str, Any]:
        assert self.log_path
        events = read_events(self.log_path / METRICS_FILE)
        tests = [e for e in events if e["event"] == "evaluation" and e["split"] == "test"]
        return tests[-1]


class Results:
    """The runs that are done, in a file of JSON lines.

    A later run of the same key counts; failed ones are done again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._runs: dict[str, dict[str, Any]] = {}
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                self._add(json.loads(line))

    def find(self, job: Job) -> dict[str, Any] | None:
        """Return the result of a job that is done; None if it is not, or failed."""
        found = self._runs.get(_text(job.key))
        return None if found is None or "error" in found else found

    def add(self, result: dict[str, Any]) -> None:
        """Keep a result."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
        self._add(result)

    def _add(self, result: dict[str, Any]) -> None:
        key = {name: result[name] for name in _KEY if name in result}
        self._runs[_text(key)] = result


def _text(key: dict[str, Any]) -> str:
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
            log.warning("%s is left out: %s", name, error)
            continue
        found: dict[str, list[dict[str, Any]]] = {}
        for job in _list_jobs(name, data, split, settings, peers, flags):
            result = results.find(job)
            if result is None:
                result = job.run()
                results.add(result)
                log.info("%s", _describe(result))
            found.setdefault(job.key["system"], []).append(result)
        failed |= any("error" in result for runs in found.values() for result in runs)
        tables.append(format_table(data.title, found, data.figures, notes))
    print("\n\n".join([describe_machine(), *tables]))
    return 1 if failed or not tables else 0


def _is_ready(peer: str) -> bool:
    """Return whether a peer can be run; CatBoost needs an environment of its own."""
    if peer != "catboost":
        return True
    try:
        build_environment(peer)
    except ClickLogError as error:
        log.warning("%s is left out: %s", peer, error)
        return False
    return True


def _make_split(name: str, data: PublishedData, folder: Path) -> tuple[Path, list[str]]:
    """Run the ETL on a data set, once; return its splits, and notes on files that differ.

    Raises:
        BadInputError: A file is missing.
    """
    root = BUILD / "published" / name
    raw, spec, output = root / "raw", root / "spec.toml", root / "out"

    def make() -> None:
        raw.mkdir()
        path = data.write(folder, raw)
        given: str | Path = spec
        if data.spec.startswith("["):
            spec.write_text(data.spec, encoding="utf-8")
        elif data.spec:
            given = data.spec
        else:
            run_etl("guess", path, *data.guess, "--output", spec)
        run_etl("run", "--spec", given, "--input_path", path, "--output_path", output)

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
    """Yield the runs of a data set: all systems with the first seed, then with the next."""
    schema = TableSchema.read(split)
    sizes = dict(zip(schema.categorical, schema.table_sizes, strict=True))
    columns = {
        "label": schema.label,
        "dense": list(schema.dense),
        "categorical": list(schema.categorical),
        "sizes": sizes,
    }
    manifest = json.loads((split.parents[1] / "manifest.json").read_text(encoding="utf-8"))
    same = {"data": name, "rows": _digest_rows(manifest)}
    version = _read_version()
    for seed in range(settings.seeds):
        for model in settings.models:
            if MODELS[model].attends and not data.histories:
                continue
            given = ["--binary_path", str(split), "--model", model, "--seed", str(seed), *flags]
            log_path = BUILD / "published" / name / "runs" / f"{model}-{seed}"
            command = [sys.executable, str(ROOT / "train_torchrec.py"), *given]
            key = {**same, "system": model, "seed": seed, "flags": flags, "version": version}
            yield Job(key, [*command, "--log_path", str(log_path)], log_path)
        for peer in peers:
            if seed and peer in _WITHOUT_SEED:
                continue
            python = find_python(peer) if peer == "catboost" else sys.executable
            program = Path(__file__).with_name("published_peers.py")
            command = [str(python), str(program), peer, str(split), json.dumps(columns), str(seed)]
            yield Job({**same, "system": peer, "seed": seed}, command)


def _digest_rows(manifest: dict[str, Any]) -> str:
    """Return a digest of what the ETL made: another one if rows, split or spec have changed."""
    made = json.dumps([manifest["workflow_digest"], manifest["splits"]], sort_keys=True)
    return hashlib.sha256(made.encode()).hexdigest()[:12]


def _read_version() -> str:
    """Return git's digest of the package, with one of the changes since its commit."""
    tree = _git("rev-parse", "--short=12", f"HEAD:{PACKAGE}").strip()
    changes = _git("diff", "HEAD", "--", PACKAGE)
    return f"{tree}-{hashlib.sha256(changes.encode()).hexdigest()[:8]}" if changes else tree


def _git(*arguments: str) -> str:
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
    found: dict[str, list[dict[str, Any]]],
    figures: Sequence[Published],
    notes: Sequence[str] = (),
) -> str:
    """Return the table of a data set, in Markdown: medians over the seeds, then what others report.

    Args:
        title: Its heading.
        found: The results by system.
        figures: Those of others.
        notes: Lines below it.
    """
    rows = [list(_HEADINGS)]
    for system, results in found.items():
        name = PEERS.get(system, f"**{system}**")
        done = [result for result in results if "error" not in result]
        if not done:
            rows.append([name, "failed", "", "", "", results[0]["error"]])
            continue
        values = {key: [result[key] for result in done] for key in ("auroc", "log_loss", "cpu_s")}
        auroc, log_loss, cpu = map(statistics.median, values.values())
        spread = ""
        if len(done) > 1:
            spread = f"{min(values['auroc']):.5f} – {max(values['auroc']):.5f}"
        rows.append([name, f"{auroc:.5f}", spread, f"{log_loss:.4f}", f"{cpu:,.0f}", ""])
    for figure in figures:
        loss = "" if figure.log_loss is None else f"{figure.log_loss:g}"
        name = f"published: {figure.system}"
        rows.append([name, f"{figure.auroc:g}", "", loss, "", figure.source])
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, "|" + " --- |" * len(_HEADINGS))
    seeds = max((len(results) for results in found.values()), default=0)
    below = [f"Medians of {seeds} seeds." if seeds > 1 else "One seed.", *notes]
    return "\n".join([f"### {title}", "", *lines, "", *below])


if __name__ == "__main__":
    sys.exit(main())
