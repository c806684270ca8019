"""The trainer's settings: one dataclass that validates itself, and the command line made of it.

The names and defaults are those of TorchRec's ``nvt_dataloader`` example, except that an unset
``--num_embeddings`` or ``--num_embeddings_per_feature`` means: from the data. Knows no torch, so
that ``--help`` and a mistyped flag answer at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from clicklog.errors import SettingsError
from clicklog.splits import SPLITS

#: Flags that people know from other trainers or mistype, and what they are called here.
_HINTS = {
    "---adagrad": "it takes two dashes: --adagrad (three are a typo in the example's README)",
    "--shuffle": "it is called --shuffle_training_set here, as in dlrm_main",
    "--lr": "it is called --learning_rate here",
    "--optimizer": "SGD is the default; --adagrad trains with Adagrad",
}


def _sizes(text: str) -> tuple[int, ...]:
    """``"512,256"`` → (512, 256)."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no comma separated list of integers"
        ) from None


def _flag(group: str, default: Any, text: str, parse: Any = None) -> Any:
    """A settings field that is also a flag; ``parse`` makes its value, None for a switch."""
    return dataclasses.field(
        default=default, metadata={"group": group, "help": text, "parse": parse}
    )


@dataclasses.dataclass(frozen=True)
class TrainSettings:
    """Everything a training run is told. Raises :class:`SettingsError` for what makes no sense.

    Each field is the flag of the same name; ``--help`` describes them.
    """

    binary_path: str = _flag(
        "data",
        "/data/criteo_1tb/criteo_binary/split/",
        "the ETL's OUT/criteo_binary/split: holds train, valid and test",
        str,
    )
    batch_size: int = _flag("data", 32, "samples per step and rank", int)
    shuffle_training_set: bool = _flag(
        "data", False, "read the row groups of the training set in a new order every epoch"
    )
    seed: int = _flag("data", 0, "seed of the initial weights and of the shuffling", int)

    num_embeddings: int | None = _flag(
        "model", None, "rows of every embedding table (default: from the data)", int
    )
    num_embeddings_per_feature: tuple[int, ...] | None = _flag(
        "model", None, "rows of each table, comma separated (default: from the data)", _sizes
    )
    embedding_dim: int = _flag("model", 128, "width of the embedding tables", int)
    dense_arch_layer_sizes: tuple[int, ...] = _flag(
        "model", (512, 256, 128), "layers for the dense features; ends with embedding_dim", _sizes
    )
    over_arch_layer_sizes: tuple[int, ...] = _flag(
        "model", (1024, 1024, 512, 256, 1), "layers above the interaction; ends with 1", _sizes
    )

    epochs: int = _flag("optimization", 1, "passes over the training set", int)
    learning_rate: float = _flag("optimization", 15.0, "learning rate", float)
    adagrad: bool = _flag(
        "optimization",
        False,
        "row-wise Adagrad for the tables and Adagrad for the dense layers (default: SGD)",
    )
    change_lr: bool = _flag("optimization", False, "change the learning rate on the way")
    lr_change_point: float = _flag(
        "optimization", 0.80, "after which share of all steps, over all epochs, it changes", float
    )
    lr_after_change_point: float = _flag(
        "optimization", 3.0, "the learning rate from that point on", float
    )

    throughput_check_freq_within_epoch: int = _flag(
        "reporting", 1000, "steps between two lines of progress (and at the end of an epoch)", int
    )
    validation_freq_within_epoch: int = _flag(
        "reporting",
        10000,
        "steps between two evaluations of valid (and after each epoch; test once, at the end)",
        int,
    )
    log_path: str | None = _flag(
        "reporting", None, "directory to which metrics.jsonl is written (appended)", str
    )
    save_checkpoint_path: str | None = _flag(
        "reporting", None, "directory of the checkpoint that is written at the end", str
    )

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_layers()
        self._check_combinations()

    def _check_numbers(self) -> None:
        for name in (
            "batch_size",
            "epochs",
            "embedding_dim",
            "throughput_check_freq_within_epoch",
            "validation_freq_within_epoch",
        ):
            if getattr(self, name) < 1:
                raise SettingsError(f"--{name} {getattr(self, name)}", "it must be at least 1")
        for name in ("learning_rate", "lr_after_change_point"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise SettingsError(f"--{name} {value}", "it must be a positive number")
        if not 0 <= self.lr_change_point <= 1:
            raise SettingsError(
                f"--lr_change_point {self.lr_change_point}",
                "it is a share of all steps, between 0 and 1",
            )
        if not 0 <= self.seed < 2**63:
            raise SettingsError(f"--seed {self.seed}", "it must be between 0 and 2**63 - 1")
        if self.num_embeddings is not None and self.num_embeddings < 1:
            raise SettingsError(f"--num_embeddings {self.num_embeddings}", "it must be at least 1")

    def _check_layers(self) -> None:
        for name in (
            "num_embeddings_per_feature",
            "dense_arch_layer_sizes",
            "over_arch_layer_sizes",
        ):
            sizes = getattr(self, name)
            if sizes is not None and (not sizes or min(sizes) < 1):
                raise SettingsError(f"--{name} {_text(sizes)}", "each size must be at least 1")
        if self.embedding_dim % 4:
            raise SettingsError(
                f"--embedding_dim {self.embedding_dim}",
                "FBGEMM's tables need a multiple of 4",
            )
        last = self.dense_arch_layer_sizes[-1]
        if last != self.embedding_dim:
            raise SettingsError(
                f"--dense_arch_layer_sizes {_text(self.dense_arch_layer_sizes)} ends with {last}, "
                f"but --embedding_dim is {self.embedding_dim}",
                "DLRM lets the dense features interact with the embeddings: make the two equal",
            )
        over = self.over_arch_layer_sizes
        if over[-1] != 1:
            raise SettingsError(
                f"--over_arch_layer_sizes {_text(over)} ends with {over[-1]}",
                "the last layer is the logit of the click: end with 1",
            )
        if len(over) < 2:
            raise SettingsError(
                f"--over_arch_layer_sizes {_text(over)}", "TorchRec's DLRM needs two or more layers"
            )

    def _check_combinations(self) -> None:
        if self.num_embeddings is not None and self.num_embeddings_per_feature is not None:
            raise SettingsError(
                "--num_embeddings and --num_embeddings_per_feature are both set",
                "give one of them, or none: then the sizes come from the data",
            )
        for name in ("lr_change_point", "lr_after_change_point"):
            if not self.change_lr and getattr(self, name) != _default(name):
                raise SettingsError(
                    f"--{name} {getattr(self, name)} has no effect without --change_lr",
                    "add --change_lr",
                )

    def split_path(self, split: str) -> Path:
        """Directory of one split: train, valid or test."""
        return Path(self.binary_path) / split

    def check_data(self) -> None:
        """Check that ``binary_path`` is what the ETL writes, before anything is loaded.

        Raises:
            SettingsError: it is missing, or is something else; with a hint at what to give.
        """
        path = Path(self.binary_path)
        flag = f"--binary_path {self.binary_path}"
        if not path.is_dir():
            raise SettingsError(
                f"{flag}: no such directory", "it is OUT/criteo_binary/split of: python -m etl run"
            )
        missing = [split for split in SPLITS if not (path / split).is_dir()]
        if not missing:
            return
        inner = path / "criteo_binary" / "split"
        if all((inner / split).is_dir() for split in SPLITS):
            hint = f"give the directory of the splits: --binary_path {inner}"
        elif "valid" in missing and (path / "validation").is_dir():
            hint = "there is a directory 'validation'; the ETL calls it 'valid': rename it"
        elif any(path.glob("*/*.bin")) or any(path.glob("*.bin")):
            hint = "these are binary files of TorchRec's example; this reads the ETL's parquet"
        else:
            hint = "it is OUT/criteo_binary/split of: python -m etl run"
        raise SettingsError(f"{flag}: holds no {', '.join(missing)}", hint)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return dataclasses.asdict(self)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(message, "see: python train_torchrec.py --help")


def _default(name: str) -> Any:
    return TrainSettings.__dataclass_fields__[name].default


def _text(value: Any) -> Any:
    return ",".join(map(str, value)) if isinstance(value, tuple) else value


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
        if field.default is not None:
            text += f" (default: {_text(field.default)})"
        metavar = {int: "N", float: "X", str: "DIR", _sizes: "N,N,…"}[parse]
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
