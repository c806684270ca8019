"""``python -m etl import``: take over what other tools preprocessed.

TorchRec's .npy sets, TorchRec's and NVIDIA's split binary sets, and workflows that NVTabular 23.08
pickled.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from clicklog.errors import SettingsError

#: For the command's help.
DESCRIPTION = (
    "Takes over TorchRec's .npy sets, TorchRec's and NVIDIA's split binary sets (as parquet in "
    "OUT) and workflows that NVTabular 23.08 pickled (as OUT/workflow)."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments; :func:`run` takes what they parse to."""
    add = parser.add_argument
    add(
        "--input_path",
        type=Path,
        required=True,
        metavar="DIR",
        help="of day_0_dense.npy …, of train/label.bin …, or of a workflow.pkl",
    )
    add("--output_path", type=Path, required=True, metavar="OUT", help="absent or empty directory")
    add(
        "--num_embeddings_per_feature",
        metavar="LIST",
        help="rows of the embedding tables, comma-separated (default: as feature_spec.yaml says, "
        "else 1 + the largest id of the data)",
    )
    add(
        "--modulo",
        action="store_true",
        help="take ids modulo these sizes, as hashes=… of TorchRec's iterator does",
    )
    add(
        "--workers",
        type=int,
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="threads (default: the cores, here %(default)s)",
    )
    again = parser.add_mutually_exclusive_group()
    again.add_argument("--resume", action="store_true", help="go on with an unfinished import")
    again.add_argument("--restart", action="store_true", help="discard an unfinished import")
    add(
        "--trust_pickle",
        action="store_true",
        help="open a workflow.pkl: this RUNS whatever code is in it; only if you trust its origin",
    )
    add(
        "--spec",
        metavar="TOML",
        help="of the raw rows that a workflow.pkl was fitted on (default: what the workflow tells: "
        "integers are int, text is string)",
    )


def run(args: argparse.Namespace) -> None:
    """Import; says what was written.

    Raises:
        BadInputError: nothing that can be taken over, or damaged.
        SettingsError, OutputError: the settings or the output directory.
    """
    if args.workers < 1:
        raise SettingsError(f"--workers {args.workers}: at least 1")
    if (args.input_path / "workflow.pkl").exists():
        _refuse(
            args, ("num_embeddings_per_feature", "modulo", "resume", "restart"), "a workflow.pkl"
        )
        from etl.importers.workflow import import_workflow

        description = import_workflow(
            args.input_path, args.output_path, trust_pickle=args.trust_pickle, spec=args.spec
        )
        print(f"{args.output_path / 'workflow'}: digest {description.digest}")
        sizes = description.table_schema.num_embeddings_per_feature
        print(f"--num_embeddings_per_feature {sizes}")
        return
    _refuse(args, ("trust_pickle", "spec"), "no workflow.pkl")
    _run_arrays(args)


def _refuse(args: argparse.Namespace, flags: tuple[str, ...], what: str) -> None:
    """Flags that say nothing about what is imported."""
    for flag in flags:
        if getattr(args, flag):
            raise SettingsError(
                f"--{flag} is set, and {args.input_path} holds {what}",
                "drop the flag, or mend the path",
            )


def _run_arrays(args: argparse.Namespace) -> None:
    from tqdm import tqdm

    from etl.importers.arrays import find_source
    from etl.importers.parts import ImportSettings, import_arrays

    source = find_source(args.input_path)
    settings = ImportSettings(
        input_path=args.input_path,
        output_path=args.output_path,
        table_sizes=_sizes(args.num_embeddings_per_feature),
        modulo=args.modulo,
        workers=args.workers,
        resume=args.resume,
        restart=args.restart,
    )
    total = sum(one.end - one.begin for one in source.sets)
    print(f"{args.input_path}: {source.kind}, {total} rows")
    with tqdm(desc="import", total=total, unit="rows", unit_scale=True, disable=None) as bar:
        manifest = import_arrays(source, settings, bar.update)
    for split, counts in manifest["splits"].items():
        print(f"{split:5} {counts['rows']} rows")
    print(f"--num_embeddings_per_feature {manifest['num_embeddings_per_feature']}")


def _sizes(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise SettingsError(
            f"--num_embeddings_per_feature {text}", "numbers with commas between them"
        ) from None
