"""The trainer's command line, made of :class:`dlrm.settings.TrainSettings`."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
from collections.abc import Sequence
from typing import NoReturn

from clicklog.errors import SettingsError
from dlrm.settings import TrainSettings, as_text

#: Flags that people know from other trainers or mistype, and what they are called here.
_HINTS = {
    "---adagrad": "it takes two dashes: --adagrad (three are a typo in the example's README)",
    "--shuffle": "it is called --shuffle_training_set here, as in dlrm_main",
    "--lr": "it is called --learning_rate here",
    "--warmup_steps": "it is called --lr_warmup_steps here, as in dlrm_main",
    "--decay_steps": "it is called --lr_decay_steps here, as in dlrm_main",
    "--decay_start_step": "it is called --lr_decay_start here, as in dlrm_main",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(message, "see: python train_torchrec.py --help")


def build_parser() -> argparse.ArgumentParser:
    """The command line of :class:`TrainSettings`, in groups."""
    parser = _Parser(
        prog="train_torchrec.py",
        description="Train a sharded TorchRec DLRM on the parquet that `python -m etl run` wrote.",
        epilog="With several processes: torchx run -s local_cwd dist.ddp -j 1x8 "
        "--script train_torchrec.py -- FLAGS, or: torchrun --nproc-per-node 8 "
        "train_torchrec.py FLAGS",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    groups: dict[str, argparse._ArgumentGroup] = {}
    for field in dataclasses.fields(TrainSettings):
        name, parse = field.metadata["group"], field.metadata["parse"]
        if name not in groups:
            groups[name] = parser.add_argument_group(name)
        text = field.metadata["help"]
        if parse is None:
            groups[name].add_argument(f"--{field.name}", action="store_true", help=text)
            continue
        if isinstance(parse, tuple):
            if field.default is not None:
                text += f" (default: {field.default})"
            groups[name].add_argument(f"--{field.name}", choices=parse, help=text)
            continue
        if field.default is not None:
            text += f" (default: {as_text(field.default)})"
        metavar = {int: "N", float: "X", str: "PATH"}.get(parse, "N,N,…")
        groups[name].add_argument(f"--{field.name}", type=parse, metavar=metavar, help=text)
    return parser


def parse_settings(argv: Sequence[str]) -> TrainSettings:
    """Command line → settings.

    Raises:
        SettingsError: an unknown flag (with the one that was probably meant), a value that is no
            number, or settings that make no sense.
    """
    parser = build_parser()
    values, unknown = parser.parse_known_args(list(argv))
    if unknown:
        flag = unknown[0].split("=")[0]
        known = [f"--{field.name}" for field in dataclasses.fields(TrainSettings)]
        hint = _HINTS.get(flag)
        if hint is None:
            close = difflib.get_close_matches(flag, known, n=1)
            hint = f"did you mean {close[0]}?" if close else "see: train_torchrec.py --help"
        raise SettingsError(f"unknown argument {unknown[0]}", hint)
    return TrainSettings(**vars(values))
