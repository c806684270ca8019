"""Going on from a checkpoint: exactly where training was.

What a resumed run shares with one that was never interrupted: weights, optimizer state, the step
(which the learning rate follows), the loader's place in the data, and the random number
generators. On the same number of ranks the result is therefore the same bit by bit (on CPUs); on
another number the same batches follow, summed in another order.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer

from clicklog.errors import BadInputError, ClickLogError, SchemaError, SettingsError
from clicklog.files.atomic import write_text
from clicklog.finite import flat, not_finite
from dlrm.checkpoint.origin import continued
from dlrm.checkpoint.store import (
    Reader,
    check_contents,
    is_momentary,
    not_read,
    read_model_file,
    reason,
)
from dlrm.checkpoint.writer import LATEST_FILE, set_aside
from dlrm.config import ModelConfig
from dlrm.data import Loader
from dlrm.launch.distributed import Group, gathered
from dlrm.settings.train_settings import table_optimizer

log = logging.getLogger(__name__)

#: Settings that the weights, or the steps of an epoch, depend on: a resumed run must share them.
_MUST_STAY = (
    "eps",
    "seed",
    "shuffle_training_set",
    "drop_last_training_batch",
    "limit_train_batches",
    "undersampling_rate",
    "hash_indices",
    "dataset_type",
    "dataset_subset",
    "shuffle_batches",
)
#: Settings that also change what is trained, but that one may want to change on the way.
_MAY_CHANGE = (
    "epochs",
    "learning_rate",
    "dense_learning_rate",
    "change_lr",
    "lr_change_point",
    "lr_after_change_point",
    "lr_warmup_steps",
    "lr_decay_start",
    "lr_decay_steps",
    "lr_policy",
    "decay_power",
    "decay_end_lr",
    "comm_precision",
    "max_steps",
    "amp",
)


def training_state(
    model: DistributedModelParallel, optimizer: CombinedOptimizer, group: Group
) -> dict[str, Any]:
    """All tensors of a run, to save or to load into: they share memory with it."""
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict()["state"],
        "random": {f"rank_{group.rank}": torch.get_rng_state()},
    }


def resume_from(
    found: list[Path],
    record: dict[str, Any],
    config: ModelConfig,
    loader: Loader,
    model: DistributedModelParallel,
    optimizer: CombinedOptimizer,
    group: Group,
) -> tuple[Path, dict[str, Any]]:
    """Load the newest checkpoint that is whole, undamaged and finite (collective).

    Newer ones are renamed, so that the run can write its own of these steps.

    Args:
        found: the checkpoints, oldest first; the same on all ranks.
        record: what the run would write now: its settings and
            :func:`dlrm.checkpoint.origin.origin_of`.
        config: the run's model.
        loader: of the training set; goes on where the checkpoint was.
        model, optimizer: filled.
        group: this rank; rank 0 says what is passed over and why.

    Returns:
        The checkpoint, and its training record with what is known of its data.

    Raises:
        BadInputError: none of them can be used.
        ClickLogError: one cannot be read now, or memory is short (on all ranks); none is renamed.
        SchemaError, SettingsError: the newest is of another model, of other data or settings.
    """
    refused: list[tuple[Path, str]] = []
    for path in reversed(found):
        try:
            training = _agreed(group, path, check_resumable, path, record, config, group)
            loader.load_state_dict(training["loader"])
            training |= continued(path, training, record)
            load_state(path, model, optimizer, group)
        except BadInputError as error:
            refused.append((path, error.what))
            continue
        if group.rank == 0:
            for newer, why in refused:
                log.warning("%s\n  -> passed over, renamed to %s", why, set_aside(newer).name)
            write_text(path.parent / LATEST_FILE, f"{path.name}\n")
        return path, training
    raise BadInputError(
        f"{found[0].parent}: none of its {len(found)} checkpoints can be used:\n  "
        + "\n  ".join(why for _, why in refused),
        "restore one from a copy, or start a new run in another directory",
    )


def _agreed(group: Group, path: Path, function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)``, which looks at a checkpoint; an error of one rank is raised on all.

    One that says nothing against the checkpoint becomes no BadInputError, so that no other
    checkpoint is taken for it (collective).
    """
    value = error = None
    try:
        value = function(*args)
    except (ClickLogError, OSError, MemoryError, RuntimeError) as found:
        error = not_read(path, found) if is_momentary(found) else found
    errors = [one for one in gathered(group, error) if one]
    if errors:  # what is not known weighs more than what is known to be bad
        raise min(errors, key=lambda one: isinstance(one, BadInputError))
    return value


def load_state(
    path: Path, model: DistributedModelParallel, optimizer: CombinedOptimizer, group: Group
) -> None:
    """Load weights, optimizer state and, on the same world size, random number generators.

    The world size and the sharding plan may differ from those it was written with (collective).

    Raises:
        BadInputError: the checkpoint is damaged, or holds values that are not finite.
        SchemaError: its tensors are not those of the run, for example row-wise Adagrad's moments
            of column shards under another plan.
    """
    dense = dict(optimizer.optimizers)["dense"]
    if not dense.state:
        dense.init_state()  # Adam's, which torch makes in the first step: without it none is loaded
        dense.zero_grad()
    state = training_state(model, optimizer, group)
    value = _agreed(group, path, read_model_file, path)
    if value["world_size"] != group.world_size:
        del state["random"]
    _load(path, state, value["files"], group)
    model.load_state_dict(state["model"])
    loaded = optimizer.state_dict()
    loaded["state"] = state["optimizer"]
    optimizer.load_state_dict(loaded)
    if "random" in state:
        torch.set_rng_state(state["random"][f"rank_{group.rank}"])


def load_weights(
    path: Path, model: DistributedModelParallel, config: ModelConfig, group: Group
) -> None:
    """Load the weights of a checkpoint, of any world size and plan (collective).

    Raises:
        BadInputError: there is no checkpoint, it is damaged, or holds values that are not finite.
        SchemaError: it is of another model.
    """
    value = _agreed(group, path, read_model_file, path)
    _check_model(path, value["model"], config)
    state = {"model": model.state_dict()}
    _load(path, state, value["files"], group)
    model.load_state_dict(state["model"])


def _load(path: Path, state: dict[str, Any], files: dict[str, Any], group: Group) -> None:
    """Fill the tensors of ``state`` from a checkpoint's ``files`` (collective)."""
    _agreed(group, path, _check_share, path, files, group)
    reader = Reader(path)
    _agreed(group, path, _check_sizes, path, state, reader)
    try:
        dcp.load(state, storage_reader=reader, process_group=group.cpu)
    except (
        *(OSError, MemoryError, EOFError, RuntimeError),
        *(pickle.UnpicklingError, CheckpointException),
    ) as error:
        if is_momentary(error):
            raise not_read(path, error) from error
        raise BadInputError(
            f"{path}: the checkpoint is damaged: {reason(error)}", "use another one"
        ) from error
    diverged = next(filter(None, gathered(group, not_finite(state))), None)
    if diverged:
        raise BadInputError(
            f"{path}: {diverged} holds values that are not finite: training had diverged",
            "use an earlier one",
        )


def _check_share(path: Path, files: dict[str, Any], group: Group) -> None:
    damaged = check_contents(path, files, rank=group.rank, world_size=group.world_size)
    if damaged:
        raise BadInputError(f"the checkpoint is damaged: {damaged}", "use another one")


def _check_model(path: Path, then: Any, config: ModelConfig) -> None:
    different = _differences(ModelConfig.from_dict(then).to_dict(), config.to_dict())
    if different:
        raise SchemaError(f"{path}: another model: {different}", "give the same model settings")


def check_resumable(
    path: Path, record: dict[str, Any], config: ModelConfig, group: Group
) -> dict[str, Any]:
    """The training record of a checkpoint, if a run may go on from it.

    Args:
        path: the checkpoint.
        record: what the run would write now: its settings.
        config: the run's model.
        group: this rank; rank 0 says which other settings changed.

    Raises:
        SchemaError: the model is another.
        SettingsError: a setting that the checkpoint's weights depend on is another.
    """
    value = read_model_file(path)
    _check_model(path, value["model"], config)
    training = value["training"]
    then, now = training["settings"], record["settings"]
    different = _differences(_fixed(then), _fixed(now))
    if different:
        raise SettingsError(
            f"{path}: other settings than now: {different}", "resume with the same settings"
        )
    for name in _MAY_CHANGE:
        if group.rank == 0 and then.get(name) != now[name]:
            log.warning("--%s is %s from here on; it was %s", name, now[name], then.get(name))
    return training


def _fixed(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings that a resumed run must share. The loader checks the global batch itself."""
    fixed = {name: settings.get(name) for name in _MUST_STAY}
    adagrad, optimizer = settings.get("adagrad"), settings.get("optimizer")
    return {"optimizer": table_optimizer(optimizer, adagrad), **fixed}


def _differences(then: dict[str, Any], now: dict[str, Any]) -> str:
    return "; ".join(
        f"{name} was {then.get(name)}, is {now[name]}"
        for name in now
        if then.get(name) != now[name]
    )


def _check_sizes(path: Path, state: dict[str, Any], reader: Reader) -> None:
    stored = reader.read_metadata().state_dict_metadata
    for name, tensor in flat(state):
        found = stored.get(name)
        if found is None:
            raise SchemaError(
                f"{path}: holds no {name!r}, which this run needs",
                "resume with the same optimizer and model",
            )
        if tuple(found.size) != tuple(tensor.shape):
            raise SchemaError(
                f"{path}: {name} is {list(found.size)}, in this run {list(tensor.shape)}",
                "row-wise Adagrad keeps a moment per column shard: resume with the same world "
                "size and --sharding",
            )
