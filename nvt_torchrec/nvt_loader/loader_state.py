"""The state of a loader: a few numbers in a checkpoint that say where to resume."""

from __future__ import annotations

from typing import Any

from nvt_torchrec.base.errors import SchemaError, SettingsError
from nvt_torchrec.nvt_loader.epoch import Order, Position
from nvt_torchrec.nvt_loader.parquet.dataset import Dataset
from nvt_torchrec.nvt_loader.plan import Plan

#: The version of a loader's state. It must change whenever the order of the rows does, because a
#: state only counts the steps that were trained.
STATE_VERSION = 2


def describe_state(
    dataset: Dataset, plan: Plan, order: Order, epoch: int, step: int
) -> dict[str, Any]:
    """Return the state of a loader before a step of an epoch. It is the same on all ranks."""
    return {
        "version": STATE_VERSION,
        **identify(dataset, plan, order),
        "virtual_shards": plan.virtual_shards,
        "epoch": epoch,
        "step": step,
    }


def identify(dataset: Dataset, plan: Plan, order: Order) -> dict[str, Any]:
    """Return the values that must be equal in a state and in the loader that loads it."""
    undersampling = dataset.undersampling
    identity = {
        "data": dataset.compute_fingerprint(),
        "global_batch": plan.global_batch,
        "shuffle": order.shuffle,
        "shuffle_window": plan.window_rows if order.shuffle == "rows" else None,
        "seed": order.seed,
        "drop_last": plan.drop_last,
        "undersampling_rate": None if undersampling is None else undersampling[0],
    }
    if dataset.stores:
        identity["max_events"] = dataset.max_events
    return identity


def find_next_step(
    position: Position, trained_steps: int | None, total_steps: int
) -> tuple[int, int]:
    """Return the epoch and the step that follow the trained steps.

    Args:
        position: The progress of the newest iterator.
        trained_steps: The number of trained steps of its epoch; None if all drawn steps were
            trained.
        total_steps: The number of steps of an epoch.

    Raises:
        SettingsError: ``trained_steps`` is more than the steps drawn, or less than the steps before
            the resume.
    """
    step = position.step if trained_steps is None else trained_steps
    if not position.first <= step <= position.step:
        raise SettingsError(
            f"trained_steps = {step} in an epoch of which steps {position.first} to "
            f"{position.step} were drawn",
            "count from the beginning of the epoch, including the steps before a resume",
        )
    if step == total_steps and step > 0:
        return position.epoch + 1, 0
    return position.epoch, step


def check_state(state: dict[str, Any], mine: dict[str, Any], name: str) -> None:
    """Check that a state belongs to the same data and settings.

    Args:
        state: The state.
        mine: The identity of the loader, from :func:`identify`.
        name: The name of the data, for errors.

    Raises:
        SchemaError: The data have changed since the state was written.
        SettingsError: A setting has changed, or the state has another version.
    """
    if state.get("version") != STATE_VERSION:
        raise SettingsError(
            f"loader state of version {state.get('version')}, not {STATE_VERSION}",
            "resume with the version of this project that wrote it",
        )
    changed = []
    for key, now in mine["data"].items():
        then = state["data"].get(key)
        if then != now:
            changed.append(f"{key} {then} → {now}")
    if changed:
        raise SchemaError(
            f"{name}: the data have changed since the loader state was written: "
            f"{', '.join(changed)}",
            "resume on the same files, or start a new run",
        )
    for key, value in mine.items():
        if state[key] != value:
            raise SettingsError(
                f"{key} = {value}, but {state[key]} in the loader state",
                "resume with the same settings; the world size may change if batch_size * "
                "world_size stays the same",
            )
