"""The state of a loader, and whether another loader may continue from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nvt_torchrec.base.errors import SchemaError, SettingsError

#: Since version 2 shards begin at row groups and windows are permuted in another way. The number of
#: virtual shards is part of the state, because it once depended on the world size.
STATE_VERSION = 2


def check_state(state: dict[str, Any], mine: dict[str, Any], directory: Path) -> None:
    """Refuse a state of other data or settings.

    Raises:
        SchemaError: The data have changed since the state was written.
        SettingsError: A setting has changed, or the state has another version.
    """
    if state.get("version") != STATE_VERSION:
        raise SettingsError(
            f"loader state of version {state.get('version')}, not {STATE_VERSION}",
            "resume with the version of this project that wrote it",
        )
    then, now = state["data"], mine["data"]
    changed = [f"{key} {then[key]} → {now[key]}" for key in now if then[key] != now[key]]
    if changed:
        raise SchemaError(
            f"{directory}: the data have changed since the loader state was written: "
            f"{', '.join(changed)}",
            "resume on the same files, or start a new run",
        )
    for key, value in mine.items():
        if state[key] != value:
            raise SettingsError(
                f"{key} = {value}, but {state[key]} in the loader state",
                "resume with the same settings; batch_size * world_size counts, not the world size",
            )
