"""``python -m etl run``: its arguments, and what it prints."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from clicklog.spec.feature_spec import DENSE_TRANSFORMS, POLICIES, FeatureSpec, load_spec
from etl.settings import ENGINES, ON_BAD_ROWS, SHUFFLES, EtlSettings

DESCRIPTION = (
    "Fits a Workflow on all days but the last, saves it to OUT/workflow, and writes "
    "OUT/criteo_binary/split/{train,valid,test}. The last day is halved into valid and test; a "
    "log of one day is cut 80/10/10. Interrupted, it goes on with --resume where it was."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments; :func:`run` takes what they parse to."""
    add = parser.add_argument
    add("--input_path", required=True, metavar="RAW", help="directory of day_0, day_1 …; one file")
    add("--output_path", required=True, type=Path, metavar="OUT", help="absent or empty directory")
    add("--spec", metavar="TOML", help="feature spec, a file or a name (default: the Criteo log's)")
    cap = parser.add_mutually_exclusive_group()
    cap.add_argument(
        "--policy", metavar="NAME", help=f"vocabulary policy, one of {', '.join(POLICIES)}"
    )
    cap.add_argument(
        "--freq_threshold", type=int, metavar="T", help="values rarer than T are out of vocabulary"
    )
    cap.add_argument(
        "--max_table_size",
        type=int,
        metavar="M",
        help="rows of a table at most, the 3 reserved ids included: the most frequent values stay",
    )
    add("--dense", choices=DENSE_TRANSFORMS, help="transform of the dense columns")
    add("--days", metavar="LIST", help="use these days only, for example 0-3,7")
    add("--limit_rows", type=int, metavar="N", help="use the first N rows of each day only")
    add(
        "--on_bad_rows",
        choices=ON_BAD_ROWS,
        default="error",
        help="stop at the first malformed row (default), or leave such rows out and keep them in "
        "OUT/rejected",
    )
    add(
        "--max_bad_fraction",
        type=float,
        default=0.01,
        metavar="F",
        help="of all rows, that may be left out (0.01)",
    )
    add(
        "--max_line_kb",
        type=int,
        metavar="KB",
        help="KiB that a line may have; a longer one is a malformed row (default: the spec's 1024)",
    )
    add(
        "--shuffle",
        choices=SHUFFLES,
        default="none",
        help="order of the training rows: as they come (default), shuffled within each day's file, "
        "or over all of them",
    )
    add("--seed", type=int, default=0, help="of the shuffle (0)")
    add(
        "--engine",
        choices=ENGINES,
        default="auto",
        help="cpu: threads of this machine; dask: NVTabular, on GPUs or over a cluster; auto "
        "(default): dask where there is a GPU or a --scheduler",
    )
    add("--block_mb", type=int, default=64, metavar="MB", help="text per unit of work (64)")
    add(
        "--workers",
        type=int,
        metavar="N",
        help="threads or processes (default: one per core; with GPUs, one per GPU)",
    )
    add(
        "--max_decompressed_gb",
        type=float,
        metavar="GB",
        help="of text that a compressed day may become below OUT, while the run lasts (default: 4 "
        "times what its first bytes promise)",
    )
    add("--scheduler", metavar="ADDRESS", help="use a Dask cluster that runs already")
    again = parser.add_mutually_exclusive_group()
    again.add_argument(
        "--resume",
        action="store_true",
        help="go on with what an interrupted run left in OUT; without one, begin",
    )
    again.add_argument(
        "--restart", action="store_true", help="discard what an interrupted run left in OUT"
    )
    add("--dry_run", action="store_true", help="say what would be done and what it needs")


def run(args: argparse.Namespace) -> None:
    """Run the ETL, or say what it would do.

    Raises:
        ClickLogError: whatever :func:`etl.run.run` raises, or settings that make no sense.
    """
    from clicklog.etl_output import EtlOutput
    from clicklog.files.atomic import read_json
    from clicklog.readers.raw import parse_days

    settings = EtlSettings(
        input_path=args.input_path,
        output_path=args.output_path,
        spec=_spec(args),
        days=frozenset(parse_days(args.days)) if args.days is not None else None,
        **{name: getattr(args, name) for name in _PLAIN},
    )
    if args.dry_run:
        from etl.commands.dry_run import dry_run

        print(dry_run(settings))
        return
    import etl.run

    manifest = etl.run.run(settings)
    rows = manifest["rows"]
    print(f"{rows['in']} rows in, {rows['out']} out, {rows['rejected']} rejected")
    timings = read_json(EtlOutput(settings.output_path).timings, "the run's timings")
    if timings["rows_per_s"]:  # not of an interrupted run
        print(f"{timings['rows_per_s']} rows/s to fit and transform")
    print(f"--num_embeddings_per_feature {manifest['num_embeddings_per_feature']}")


#: Settings that are arguments of the same name and type.
_PLAIN = (
    "limit_rows", "block_mb", "engine", "workers", "scheduler", "on_bad_rows", "max_bad_fraction",
    "shuffle", "seed", "max_decompressed_gb", "resume", "restart",
)  # fmt: skip


def _spec(args: argparse.Namespace) -> FeatureSpec:
    spec = load_spec(args.spec)
    if args.policy is not None:
        spec = spec.with_policy_named(args.policy)
    if args.freq_threshold is not None:
        spec = spec.with_policy(freq_threshold=args.freq_threshold, max_table_size=0)
    if args.max_table_size is not None:
        spec = spec.with_policy(max_table_size=args.max_table_size, freq_threshold=0)
    if args.dense:
        spec = dataclasses.replace(spec, dense_transform=args.dense)
    if args.max_line_kb is not None:
        lines = dataclasses.replace(spec.input, max_line_kb=args.max_line_kb)
        spec = dataclasses.replace(spec, input=lines)
    return spec
