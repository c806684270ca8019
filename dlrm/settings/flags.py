"""The trainer's command line."""

from __future__ import annotations

from collections.abc import Sequence

from nvt_torchrec.base import command_line
from nvt_torchrec.dlrm.settings.train_settings import TrainSettings


def build_parser() -> command_line.Parser:
    """Make the parser, without the arguments that :class:`TrainSettings` declares."""
    return command_line.Parser(
        prog="python train_torchrec.py",
        usage="python train_torchrec.py FLAGS",
        description="Train a sharded TorchRec DLRM on the parquet that `python -m etl run` wrote.",
        epilog="With several processes: torchx run -s local_cwd dist.ddp -j 1x8 "
        "--script train_torchrec.py -- FLAGS, or: torchrun --nproc-per-node 8 "
        "train_torchrec.py FLAGS. docs/flags.md compares the flags with those of other trainers.",
    )


def parse_settings(argv: Sequence[str]) -> TrainSettings:
    """Parse the trainer's command line.

    Raises:
        SettingsError: A flag is unknown (with the one that was probably meant), a value is not
            allowed, or settings contradict each other.
    """
    return command_line.parse(build_parser(), argv, TrainSettings)[0]
