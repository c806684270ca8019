"""Train a model: check the settings, fill in the missing ones, and run the training."""

from __future__ import annotations

import contextlib
import logging

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.training.checkpoint.ancestor import read_finished_run
from nvt_torchrec.training.checkpoint.directories import (
    claim_directories,
    list_checkpoints,
    lock_files,
)
from nvt_torchrec.training.checkpoint.saving import check_destination
from nvt_torchrec.training.data import choices
from nvt_torchrec.training.launch.distributed import Group, call_on_rank_0, process_group
from nvt_torchrec.training.loop.selection import choose_regularization, is_open
from nvt_torchrec.training.loop.trainer import Trainer
from nvt_torchrec.training.loop.trials import Choice
from nvt_torchrec.training.loop.tuning import tune
from nvt_torchrec.training.reporting.progress import TrainResult
from nvt_torchrec.training.settings.train_settings import TrainSettings
from nvt_torchrec.training.sharding.model_config import model_config
from nvt_torchrec.training.sharding.planning import choose_sharding

log = logging.getLogger(__name__)


def train(settings: TrainSettings, group: Group | None = None) -> TrainResult:
    """Train as ``settings`` say, evaluate, and write the checkpoints (collective).

    It may be called several times in a process, in any thread, by one thread at a time.

    Args:
        settings: The settings of the run.
        group: This process among all that train together. Without it, the process joins those that
            torchrun has started, or trains alone, and destroys its process group afterwards.

    Returns:
        The run's metrics, steps and checkpoint.

    Raises:
        SettingsError: The settings do not fit the data or the device, the tables do not fit into
            memory, the loss is no longer finite, or this process already has a process group.
        BadInputError, SchemaError: The data cannot be read, or do not match their schema.
        OutputError: The checkpoint or the log cannot be written, would overwrite something, or
            another run is writing there.
        SystemExit: SIGTERM stopped the run (only in the main thread); a checkpoint of its last step
            is written.
    """
    if settings.plan_only:
        raise SettingsError(
            "plan_only: train() trains, and cannot only plan",
            "leave it out, or run nvt-train --plan_only N",
        )
    with process_group() if group is None else contextlib.nullcontext(group) as ranks:
        return _train(settings, ranks)


def _train(settings: TrainSettings, group: Group) -> TrainResult:
    schema = choices.read_schema(settings)
    settings = choices.choose_label(settings, schema)
    choices.check_gauc_column(settings, schema)
    choices.check_log_q_correction(settings, schema)
    if settings.save_checkpoint_path:
        done = read_finished_run(settings)
        if done:
            if group.rank == 0:
                log.info(
                    "%s: this run is already complete, nothing to do", settings.save_checkpoint_path
                )
            return TrainResult(
                status="already done",
                checkpoint=settings.save_checkpoint_path,
                steps=done["steps"],
                samples=done["samples"],
                train_seconds=0.0,
                metrics=done["metrics"],
                baselines=done.get("baselines", {}),
            )
        check_destination(settings.save_checkpoint_path)
    given = settings
    settings = choices.choose_order(choices.choose_sizes(given, schema, group.world_size))
    if schema.histories or schema.vectors:
        call_on_rank_0(group, choices.check_stores, settings)
    with claim_directories(lock_files(settings), group):
        choice = Choice(settings)
        resumed = given.checkpoint_dir and list_checkpoints(given.checkpoint_dir)
        if given.tune and not resumed:
            choice = tune(given, settings, schema, group)
        elif settings.size == "tiny" and is_open(given) and not resumed:
            choice = choose_regularization(given, settings, schema, group)
        config = model_config(choice.settings, schema)
        settings = choose_sharding(choice.settings, config, group.device.type)
        trainer = Trainer(settings, config, group)
        if settings.mode == "test":
            return trainer.test()
        if choice.training:
            choice.training.load(trainer)
        return trainer.train(choice.baselines)
