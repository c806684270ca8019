"""Runs of ``train_torchrec.py`` as a benchmark's systems, and the synthetic log they train on."""

from __future__ import annotations

import json
import logging
import shutil
import sys
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, Metric, System
from benchmarks.process import run
from benchmarks.venvs import BUILD, PeerError
from nvt_torchrec.base.errors import SettingsError

log = logging.getLogger("benchmarks")

METRICS = (
    Metric("auroc", "AUROC", ".5f"),
    Metric("log_loss", "log loss", ".5f"),
    Metric("valid_auroc", "valid", ".5f"),
    Metric("samples_per_s", "samples/s"),
    Metric("wall_s", "wall s", ".1f"),
)
#: The demo's model: small enough for a machine of few cores.
SMALL_MODEL = (
    *("--embedding_dim", "16", "--dense_arch_layer_sizes", "64,16"),
    *("--over_arch_layer_sizes", "128,64,1"),
)


def split_flags(argv: list[str]) -> tuple[list[str], list[str]]:
    """A benchmark's own arguments, and those after ``--``, which go to ``train_torchrec.py``."""
    at = argv.index("--") if "--" in argv else len(argv)
    return argv[:at], argv[at + 1 :]


def refuse(flags: list[str], own: tuple[str, ...]) -> None:
    """Raise :class:`SettingsError` for flags of the trainer that the benchmark sets itself."""
    for flag in flags:
        if flag.split("=")[0] in own:
            raise SettingsError(f"{flag} is set by this program", "leave it out")


def training_run(name: str, case: str, flags: list[str], log_path: Path, ranks: int = 1) -> System:
    """A run with the metrics of its log as result; ``log_path`` is emptied before."""
    start = [sys.executable]
    if ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return System(
        name,
        case,
        [*start, str(ROOT / "train_torchrec.py"), *flags, "--log_path", str(log_path)],
        before=lambda: shutil.rmtree(log_path, ignore_errors=True),
        result=lambda: _result(log_path),
        timeout=24 * 3600,
    )


def oracle_auroc(log_path: Path) -> float | None:
    """The best AUROC that the test set of a synthetic log allows, from a run's log."""
    oracle = _events(log_path)[0].get("oracle") or {}
    return oracle.get("test", {}).get("auroc")


def make_data(rows_per_day: int) -> Path:
    """The splits of a synthetic log of 5 days; made once per size."""
    root = BUILD / f"training-data-{rows_per_day}"
    split = root / "etl" / "criteo_binary" / "split"
    if (root / "etl" / "manifest.json").is_file():
        return split
    shutil.rmtree(root, ignore_errors=True)
    log.info("making a log of 5 x %d rows in %s", rows_per_day, root)
    raw, etl = root / "raw", root / "etl"
    for arguments in (
        ["synthesize", "--output_path", raw, "--days", 5, "--rows_per_day", rows_per_day],
        ["run", "--input_path", raw, "--output_path", etl],
    ):
        command = [sys.executable, "-m", "etl", *map(str, arguments)]
        done = run(command, cwd=ROOT, result=dict)
        if done.error:
            raise PeerError(f"etl {arguments[0]} failed: {done.error}", "see `python -m etl`")
    return split


def _events(directory: Path) -> list[dict[str, Any]]:
    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def _result(directory: Path) -> dict[str, Any]:
    events = _events(directory)
    last = {one["split"]: one for one in events if one["event"] == "evaluation"}
    end = next(one for one in events if one["event"] == "end")
    return {
        "auroc": last["test"]["auroc"],
        "log_loss": last["test"]["log_loss"],
        "valid_auroc": last["valid"]["auroc"],
        "samples_per_s": end["samples_per_s"],
    }
