"""Files, dtypes and shapes of the arrays of a workflow's event state."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.workflow_description import EVENT_STATE_FILE
from nvt_torchrec.workflows.event_groups import GroupSums, plan_groups
from nvt_torchrec.workflows.event_sums import GroupEvents
from nvt_torchrec.workflows.history_tail import HistoryTail

#: The file of the rates over all events.
RATES = "rates.npy"
#: The directory of the state, relative to the workflow; and the file that is written last.
DIRECTORY, STATE_FILE = EVENT_STATE_FILE.split("/")


def list_event_files(spec: FeatureSpec) -> list[str]:
    """Return the files of the state, relative to the workflow; empty for a spec without events."""
    if not spec.events:
        return []
    return [f"{DIRECTORY}/{name}" for name in (*list_arrays(spec), STATE_FILE)]


def list_arrays(spec: FeatureSpec) -> list[str]:
    """Return the files of arrays, relative to the directory of the state."""
    names = [RATES]
    for number, group in enumerate(plan_groups(spec)):
        names += list_group_files(number, group)
    for rule in spec.histories:
        names += list_history_files(rule.name)
    return names


def list_group_files(number: int, group: GroupSums) -> list[str]:
    """Return the files of a group, in the order of the attributes of its events."""
    if not group.aggregates:  # only histories use its events
        return []
    return [f"{number}.{name}.npy" for name in GroupEvents.list_array_names(group)]


def list_history_files(name: str) -> list[str]:
    """Return the files of a history, in the order of the attributes of its newest events."""
    return [f"{name}.{field.name}.npy" for field in dataclasses.fields(HistoryTail)]


def get_array_type(name: str) -> tuple[type, int]:
    """Return the dtype and the number of dimensions of an array."""
    if name == RATES:
        return np.float64, 2
    kinds = {
        "sums": (np.int64, 2),
        "picks": (np.float64, 2),
        "previous": (np.int64, 2),
        "ids": (np.int32, 2),
    }
    attribute = name.split(".")[-2]
    return kinds.get(attribute, (np.int64, 1))


def check_shapes(spec: FeatureSpec, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check that the arrays of a state fit each other and the spec.

    Raises:
        ValueError: The shapes of some arrays contradict each other or the spec.
    """
    if shapes[RATES][0] != 1 + len(spec.labels) or not shapes[RATES][1]:
        raise ValueError(f"{RATES} has the rates of other labels")
    for number, group in enumerate(plan_groups(spec)):
        if not group.aggregates:
            continue
        actual = [shapes[name] for name in list_group_files(number, group)]
        keys, _, known, *_ = actual
        if actual != GroupEvents.list_shapes(group, keys[0], known[0]):
            raise ValueError(f"the files of group {number} differ in their numbers of events")
    for rule in spec.histories:
        keys, offsets, known, ids = (shapes[name] for name in list_history_files(rule.name))
        if offsets[0] != keys[0] + 1 or ids != (len(rule.columns), *known):
            raise ValueError(f"the files of {rule.name} differ in their numbers of events")
