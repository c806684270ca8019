"""Train with several seeds and print mean, spread and the worst AUROC of the test set.

Everything after -- goes to train_torchrec.py; without --binary_path there, a synthetic log is made
and run through the ETL first, whose oracle is printed too. The seed is that of the initial weights
and of the order of the rows.

    python -m benchmarks.stability --seeds 16 -- --binary_path OUT/criteo_binary/split --adagrad
"""

from __future__ import annotations

import clicklog.interrupts  # noqa: F401  # before all that takes time: Ctrl-C is one line now

# isort: split
import argparse
import json
import logging
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, Metric, System, Table, start_logging
from benchmarks.process import run
from benchmarks.venvs import BUILD, PeerError
from clicklog.errors import SettingsError, run_command

log = logging.getLogger("benchmarks")

METRICS = (
    Metric("auroc", "AUROC", ".5f"),
    Metric("log_loss", "log loss", ".5f"),
    Metric("valid_auroc", "valid", ".5f"),
    Metric("samples_per_s", "samples/s"),
    Metric("wall_s", "wall s", ".1f"),
)
#: Used unless train_torchrec.py's flags are given: the demo's model.
_FLAGS = [
    *("--batch_size", "1024", "--adagrad", "--learning_rate", "0.05", "--embedding_dim", "16"),
    *("--dense_arch_layer_sizes", "64,16", "--over_arch_layer_sizes", "128,64,1"),
    "--shuffle_training_set",
]
_CASE = ""


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; exit status 1 if a run failed."""
    argv = sys.argv[1:] if argv is None else argv
    own, flags = argv, []
    if "--" in argv:
        own, flags = argv[: argv.index("--")], argv[argv.index("--") + 1 :]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.stability",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--seeds", type=int, default=16, help="how many, from 0 on (default: 16)")
    add("--ranks", type=int, default=1, help="processes of each run (default: 1)")
    add("--rows_per_day", type=int, default=40_000, help="of the synthetic log, 5 days")
    args = parser.parse_args(own)
    start_logging()
    return run_command(lambda: _run(args, flags))


def _run(args: argparse.Namespace, flags: list[str]) -> int:
    if args.seeds < 2:
        raise SettingsError(f"--seeds {args.seeds}", "a spread needs two or more")
    for flag in flags:
        if flag.split("=")[0] in ("--seed", "--log_path"):
            raise SettingsError(f"{flag} is set by this program", "leave it out")
    if not any(flag.split("=")[0] == "--binary_path" for flag in flags):
        flags = [*(flags or _FLAGS), "--binary_path", str(_make_data(args.rows_per_day))]
    logs = BUILD / "stability"
    shutil.rmtree(logs, ignore_errors=True)
    table = Table("stability", "Test AUROC by seed", METRICS, base="")
    table.measure([_system(args.ranks, seed, flags, logs) for seed in range(args.seeds)], repeats=1)
    found = [
        value for seed in range(args.seeds) for value in table.values(_name(seed), _CASE, "auroc")
    ]
    summary: dict[str, Any] = {}
    if len(found) > 1:
        summary = {
            "seeds": len(found),
            "mean": statistics.mean(found),
            "standard_deviation": statistics.stdev(found),
            "worst": min(found),
            "best": max(found),
            "oracle": _oracle(logs / "0"),
        }
        table.notes += ["", _text(summary)]
    table.print()
    print(f"written to {table.write(summary=summary, flags=flags)}")
    return 1 if table.failed else 0


def _text(summary: dict[str, Any]) -> str:
    text = (
        f"test AUROC over {summary['seeds']} seeds: mean {summary['mean']:.5f}, standard deviation "
        f"{summary['standard_deviation']:.5f}, worst {summary['worst']:.5f}, best "
        f"{summary['best']:.5f}"
    )
    return text + (f"; oracle {summary['oracle']:.5f}" if summary["oracle"] else "")


def _name(seed: int) -> str:
    return f"seed {seed}"


def _system(ranks: int, seed: int, flags: list[str], logs: Path) -> System:
    run = [sys.executable]
    if ranks > 1:
        run += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    log_path = logs / str(seed)
    own = ["--seed", str(seed), "--log_path", str(log_path)]
    command = [*run, str(ROOT / "train_torchrec.py"), *flags, *own]
    return System(_name(seed), _CASE, command, result=lambda: _result(log_path), timeout=24 * 3600)


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


def _oracle(directory: Path) -> float | None:
    oracle = _events(directory)[0].get("oracle") or {}
    return oracle.get("test", {}).get("auroc")


def _make_data(rows_per_day: int) -> Path:
    """A synthetic log after the ETL; made once per size."""
    root = BUILD / f"stability-data-{rows_per_day}"
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


if __name__ == "__main__":
    sys.exit(main())
