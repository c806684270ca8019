"""Going on from a checkpoint: exactly where training was.

What a resumed run shares with one that was never interrupted: weights, optimizer state, the step
(which the learning rate follows), the loader's place in the data, and the random number
generators. On the same number of ranks the result is therefore the same bit by bit (on CPUs); on
another number the same batches follow, summed in another order.
"""

from __future__ import annotations

import functools
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

from nvt_torchrec.base.errors import BadInputError, ClickLogError, OutputError, SchemaError
from nvt_torchrec.base.files.atomic import write_text
from nvt_torchrec.base.finite import flat, not_finite
from nvt_torchrec.dlrm.checkpoint.compatibility import (
    check_model,
    check_resumable,
    log_changes,
    merge_origins,
)
from nvt_torchrec.dlrm.checkpoint.grown_state import read_grown
from nvt_torchrec.dlrm.checkpoint.growth import GrownTable
from nvt_torchrec.dlrm.checkpoint.store import (
    Reader,
    check_contents,
    is_momentary,
    not_read,
    read_model_file,
    reason,
)
from nvt_torchrec.dlrm.checkpoint.writer import LATEST_FILE, set_aside
from nvt_torchrec.dlrm.config import ModelConfig
from nvt_torchrec.dlrm.data import Loader
from nvt_torchrec.dlrm.launch.distributed import Group, from_rank_0, gathered

log = logging.getLogger(__name__)


def training_state(
    model: DistributedModelParallel, optimizer: CombinedOptimizer, group: Group
) -> dict[str, Any]:
    """Return all tensors of a run, to save them or to load into them: they share its memory."""
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict()["state"],
        "random": {f"rank_{group.rank}": torch.get_rng_state()},
    }


def check_may_continue(found: list[Path], launchers: list[str], group: Group) -> None:
    """Check that a run without ``--resume`` is a restart of the job that wrote the checkpoints.

    That torchrun restarted the ranks is not enough: their first start may have been refused here.

    Args:
        found: The checkpoints, oldest first.
        launchers: This run's :func:`dlrm.launch.distributed.launchers`.
        group: This rank (collective).

    Raises:
        OutputError: They are of another job (on all ranks).
    """
    same_job = group.rank == 0 and any(_wrote(launchers, path) for path in reversed(found))
    if not from_rank_0(group, same_job):
        raise OutputError(
            f"--checkpoint_dir {found[0].parent}: holds a run, up to {found[-1].name}",
            "add --resume to go on from there, or choose another directory",
        )


def _wrote(launchers: list[str], path: Path) -> bool:
    try:
        then = read_model_file(path)["training"].get("launchers", [])
    except ClickLogError:
        return False  # of a checkpoint that cannot be read the job is not known
    return not set(launchers).isdisjoint(then)


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
        found: The checkpoints, oldest first; the same on all ranks.
        record: What the run would write now: its settings and
            :func:`dlrm.checkpoint.compatibility.data_origin`.
        config: The run's model.
        loader: The loader of the training set; it continues where the checkpoint was.
        model: The sharded model, filled from the checkpoint.
        optimizer: The model's optimizer, filled likewise.
        group: This rank; rank 0 logs which checkpoints are passed over, and why.

    Returns:
        The checkpoint, and its training record with what is known of its data.

    Raises:
        BadInputError: None of them can be used.
        ClickLogError: One cannot be read now, or memory is short; none is renamed.
        SchemaError, SettingsError: The newest is of another model, of other data or settings.
        OutputError: A newer one cannot be renamed.
    """
    refused: list[tuple[Path, str]] = []
    for path in reversed(found):
        try:
            training = on_all_ranks(group, path, _read_training, path, record, config, loader)
            load_state(path, model, optimizer, group)
        except BadInputError as error:
            refused.append((path, error.what))
            continue
        on_all_ranks(group, path, _make_newest, path, refused, group)
        log_changes(training["settings"], record["settings"], group)
        return path, training
    raise BadInputError(
        f"{found[0].parent}: none of its {len(found)} checkpoints can be used:\n  "
        + "\n  ".join(why for _, why in refused),
        "restore one from a copy, or start a new run in another directory",
    )


def on_all_ranks(group: Group, path: Path, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function on every rank, and raise an error of any rank on all of them (collective).

    Args:
        group: This rank.
        path: The checkpoint that the function looks at.
        function: It must not be collective: a rank that fails would leave the others waiting in it.
        args: Its arguments.

    Returns:
        What the function returned on this rank.

    Raises:
        ClickLogError: The function's error. One that says nothing against the checkpoint is no
            BadInputError, so that no other checkpoint is taken in its place.
        RuntimeError: Any other error of the function.
    """
    value = error = cause = None
    try:
        value = function(*args)
    except (Exception, CheckpointException) as raised:  # the latter is no Exception
        error = cause = raised
        if is_momentary(raised) and not isinstance(raised, OutputError):
            error = not_read(path, raised)
        elif not isinstance(raised, ClickLogError):
            error = RuntimeError(f"{path}: {type(raised).__name__}: {raised}")
    errors = list(filter(None, gathered(group, error)))
    if errors:  # damage is certain only if no rank has another error
        raise min(errors, key=lambda found: isinstance(found, BadInputError)) from cause
    return value


def _make_newest(path: Path, refused: list[tuple[Path, str]], group: Group) -> None:
    if group.rank == 0:
        for newer, why in refused:
            log.warning("%s\n  -> passed over, renamed to %s", why, set_aside(newer).name)
        write_text(path.parent / LATEST_FILE, f"{path.name}\n")


def load_state(
    path: Path, model: DistributedModelParallel, optimizer: CombinedOptimizer, group: Group
) -> None:
    """Load weights, optimizer state and, on the same world size, random number generators.

    The world size and the sharding plan may differ from those it was written with (collective).

    Raises:
        BadInputError: The checkpoint is damaged, or holds values that are not finite.
        SchemaError: Its tensors are not those of the run, for example row-wise Adagrad's moments
            of column shards under another plan.
    """
    state = _state_to_fill(model, optimizer, group)
    value = on_all_ranks(group, path, read_model_file, path)
    if value["world_size"] != group.world_size:
        del state["random"]
    _load(path, state, value["files"], group)
    on_all_ranks(group, path, _fill, state, model, optimizer, group)


def load_grown_state(
    path: Path,
    tables: dict[str, GrownTable],
    model: DistributedModelParallel,
    optimizer: CombinedOptimizer | None,
    group: Group,
) -> None:
    """Load weights and optimizer state of a checkpoint whose tables are smaller (collective).

    The world size and the sharding plan may differ from those it was written with.

    Args:
        path: The checkpoint.
        tables: How each table follows from that of the checkpoint.
        model: The sharded model, as it is initialized.
        optimizer: Its optimizer, before the first step; None to load the weights alone.
        group: This rank.

    Raises:
        BadInputError: The checkpoint is damaged, or holds values that are not finite.
        SchemaError: Its tensors are not those of the run.
    """
    if optimizer is None:
        state = {"model": model.state_dict()}
    else:
        state = _state_to_fill(model, optimizer, group)
        del state["random"]
    value = on_all_ranks(group, path, read_model_file, path)
    read = functools.partial(read_grown, tables=tables)
    converted = any(gathered(group, _load(path, state, value["files"], group, read)))
    if converted and group.rank == 0:
        log.warning(
            "%s: its tables have other column shards: each row-wise Adagrad moment is the mean of "
            "those of the columns",
            path,
        )
    if optimizer is None:
        on_all_ranks(group, path, model.load_state_dict, state["model"])
    else:
        on_all_ranks(group, path, _fill, state, model, optimizer, group)


def _state_to_fill(
    model: DistributedModelParallel, optimizer: CombinedOptimizer, group: Group
) -> dict[str, Any]:
    dense = dict(optimizer.optimizers)["dense"]
    if not dense.state:
        dense.init_state()  # Adam's, which torch makes in the first step: without it none is loaded
        dense.zero_grad()
    return training_state(model, optimizer, group)


def _fill(
    state: dict[str, Any],
    model: DistributedModelParallel,
    optimizer: CombinedOptimizer,
    group: Group,
) -> None:
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
        BadInputError: There is no checkpoint, it is damaged, or holds values that are not finite.
        SchemaError: It is of another model.
    """
    value = on_all_ranks(group, path, read_model_file, path)
    check_model(path, value["model"], config)
    state = {"model": model.state_dict()}
    _load(path, state, value["files"], group)
    on_all_ranks(group, path, model.load_state_dict, state["model"])


def _read_equal(path: Path, state: dict[str, Any]) -> None:
    reader = Reader(path)
    _check_sizes(path, state, reader)
    dcp.load(state, storage_reader=reader, no_dist=True)


def _load(
    path: Path,
    state: dict[str, Any],
    files: dict[str, Any],
    group: Group,
    read: Callable[[Path, dict[str, Any]], Any] = _read_equal,
) -> Any:
    """Fill the tensors of ``state`` from a checkpoint's ``files`` (collective).

    Returns:
        What ``read``, which fills this rank's part, has returned.
    """
    on_all_ranks(group, path, _check_share, path, files, group)
    value = on_all_ranks(group, path, _read_tensors, path, state, read)
    diverged = next(filter(None, gathered(group, not_finite(state))), None)
    if diverged:
        raise BadInputError(
            f"{path}: {diverged} holds values that are not finite: training had diverged",
            "use an earlier one",
        )
    return value


def _check_share(path: Path, files: dict[str, Any], group: Group) -> None:
    damaged = check_contents(path, files, rank=group.rank, world_size=group.world_size)
    if damaged:
        raise BadInputError(f"the checkpoint is damaged: {damaged}", "use another one")


def _read_tensors(path: Path, state: dict[str, Any], read: Callable[..., Any]) -> Any:
    """Read this rank's parts of the tensors, without messages to other ranks."""
    try:
        return read(path, state)
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError, CheckpointException) as error:
        if is_momentary(error):
            raise
        raise BadInputError(
            f"{path}: the checkpoint is damaged: {reason(error)}", "use another one"
        ) from error


def _read_training(
    path: Path, record: dict[str, Any], config: ModelConfig, loader: Loader
) -> dict[str, Any]:
    """The training record of a checkpoint that a run may continue from; the loader is set to it."""
    training = check_resumable(path, record, config)
    loader.load_state_dict(training["loader"])
    return training | merge_origins(path, training, record)


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
