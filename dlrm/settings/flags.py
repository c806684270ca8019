"""The trainer's command line, made of :class:`dlrm.settings.train_settings.TrainSettings`."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
from collections.abc import Sequence
from typing import Any, NoReturn

from clicklog.errors import SettingsError
from dlrm.settings.train_settings import TrainSettings, as_text

#: Flags of other trainers that are always done here, and need no setting.
ALWAYS = {"--pin_memory": "always so on GPUs; taken because dlrm_main has the flag"}

#: Flags of other trainers or their READMEs, and what they are called here; docs/flags.md has all.
RENAMED = {
    "--lr": "--learning_rate",
    "--warmup_steps": "--lr_warmup_steps",
    "--decay_steps": "--lr_decay_steps",
    "--decay_start_step": "--lr_decay_start",
    "--dataset": "--binary_path",
    "--in_memory_binary_criteo_path": "--binary_path",
    "--top_mlp_sizes": "--over_arch_layer_sizes",
    "--bottom_mlp_sizes": "--dense_arch_layer_sizes",
    "--shuffle": "--shuffle_training_set",
    "--shuffle_batch_order": "--shuffle_training_set",
    "--interaction_op": "--interaction_type",
    "--synthetic_dataset": "--dataset_type synthetic",
    "--num_numerical_features": "--synthetic_dataset_numerical_features",
    "--output_dir": "--save_checkpoint_path",
    "--fp16": "--amp",
    "--Adam_embedding_optimizer": "--optimizer adam",
    "--Adam_MLP_optimizer": "--optimizer adam",
}
#: Their flags that have no place here, and why.
LEFT_OUT = {
    "--auc_device": "AUROC is exact, over all ranks, on rank 0's CPU",
    "--backend": "nccl on GPUs, gloo on CPUs",
    "--base_device": "GPUs if there are any; `CUDA_VISIBLE_DEVICES=` hides them",
    "--bottom_features_ordered": "every checkpoint loads on any number of ranks",
    "--collect_multi_hot_freqs_stats": "the ETL's report has the frequencies of all ids",
    "--dataset_name": "`--binary_path` says which data, and Kaggle's log has a spec of its own",
    "--embedding_type": "FBGEMM's tables on all devices; `--sharding_file` chooses their kernels",
    "--feature_spec": "`.merlin/schema.json` lies beside the data",
    "--freeze_embeddings": "for debugging their kernels",
    "--freeze_mlps": "for debugging their kernels",
    "--loss_scale": "bfloat16 needs none",
    "--mmap_mode": "row groups are read as they are needed",
    "--optimized_mlp": "it is Apex's; `--compile_dense` fuses the layers",
    "--self_interaction": "later versions have none either",
    "--synthetic_dataset_use_feature_spec": "paste the ETL's sizes into "
    "`--synthetic_dataset_table_sizes`",
    "--synthetic_multi_hot_criteo_path": "list columns of the parquet are multi-hot",
    "--warmup_factor": "it is 0, as by default there: the warm-up begins at 0",
}
_TYPO = "it takes two dashes: --adagrad (three are a typo in the example's README)"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(message, "see: python train_torchrec.py --help")


class _Named(argparse.Action):
    """Keeps the last value of a flag; two of its names with two values contradict each other."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._by: str | None = None

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        before = getattr(namespace, self.dest, values)
        if self._by not in (None, option_string) and before != values:
            raise SettingsError(
                f"{self._by} {before} and {option_string} {values} are one setting",
                f"give it once, as {self.option_strings[0]}",
            )
        self._by = option_string
        setattr(namespace, self.dest, values)


def build_parser() -> argparse.ArgumentParser:
    """The command line of :class:`TrainSettings`, in groups."""
    parser = _Parser(
        prog="train_torchrec.py",
        usage="python train_torchrec.py FLAGS",
        description="Train a sharded TorchRec DLRM on the parquet that `python -m etl run` wrote.",
        epilog="With several processes: torchx run -s local_cwd dist.ddp -j 1x8 "
        "--script train_torchrec.py -- FLAGS, or: torchrun --nproc-per-node 8 "
        "train_torchrec.py FLAGS. docs/flags.md compares the flags with those of other trainers.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    groups: dict[str, argparse._ArgumentGroup] = {}
    for field in dataclasses.fields(TrainSettings):
        name = field.metadata["group"]
        if name not in groups:
            groups[name] = parser.add_argument_group(name)
        _add(groups[name], field)
    for flag, text in ALWAYS.items():
        groups["data"].add_argument(flag, action="store_true", help=text)
    return parser


def _add(group: argparse._ArgumentGroup, field: dataclasses.Field) -> None:
    parse, text, also = (field.metadata[key] for key in ("parse", "help", "also"))
    names = [f"--{field.name}", *([f"--{also}"] if also else [])]
    if parse is None:
        group.add_argument(*names, action="store_true", help=text)
        return
    if field.default is not None:
        text += f" (default: {_short(field.default)})"
    common = {"action": _Named, "dest": field.name, "help": text.replace("%", "%%")}
    if isinstance(parse, tuple):
        group.add_argument(*names, choices=parse, **common)
        return
    metavar = {int: "N", float: "X", str: "PATH"}.get(parse, "N,N,…")
    group.add_argument(*names, type=parse, metavar=metavar, **common)


def _short(value: Any) -> Any:
    if isinstance(value, tuple) and len(value) > 5 and len(set(value)) == 1:
        return f"{len(value)} times {value[0]}"
    return as_text(value)


def known_flags() -> set[str]:
    """Every flag that the command line takes."""
    return {
        flag
        for action in build_parser()._actions
        for flag in action.option_strings
        if flag.startswith("--") and flag != "--help"
    }


def parse_settings(argv: Sequence[str]) -> TrainSettings:
    """Command line → settings.

    Raises:
        SettingsError: an unknown flag (with the one that was probably meant), a value that is no
            number, or settings that make no sense.
    """
    values, unknown = build_parser().parse_known_args(list(argv))
    if unknown:
        raise SettingsError(f"unknown argument {unknown[0]}", _hint(unknown[0].split("=")[0]))
    for flag in ALWAYS:
        vars(values).pop(flag.removeprefix("--"), None)
    return TrainSettings(**vars(values))


def _hint(flag: str) -> str:
    if flag in RENAMED:
        return f"it is called {RENAMED[flag]} here"
    if flag in LEFT_OUT:
        return f"leave it out: {LEFT_OUT[flag].replace('`', '')}"
    if flag == "---adagrad":
        return _TYPO
    close = difflib.get_close_matches(flag, known_flags(), n=1)
    return f"did you mean {close[0]}?" if close else "see: train_torchrec.py --help"
