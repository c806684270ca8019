"""The blocks of the log and of other sources, which contain the events of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from nvt_torchrec.etl.events.event_files import EventFiles
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.events import EventKey
from nvt_torchrec.workflows.event_groups import plan_groups


@dataclasses.dataclass(frozen=True)
class EventLog:
    """The events of the log and of other sources. It is passed to workers with each task.

    Attributes:
        spec: The columns.
        files: The events of all blocks.
        names: The names of the log's blocks, in the order of the log.
        sources: The names of the blocks of each source, in the order of its files.
    """

    spec: FeatureSpec
    files: EventFiles
    names: Sequence[str]
    sources: Mapping[str, Sequence[str]]

    def list_event_blocks(self, source: str) -> Sequence[str]:
        """Return the names of the blocks of a source; "" stands for the log."""
        return self.sources[source] if source else self.names

    def list_row_blocks(self, key: int) -> Sequence[str]:
        """Return the blocks whose rows have a key; [] if only events have it."""
        return self.names if key < len(self.spec.row_keys) else []

    def list_blocks(self, key: int) -> list[str]:
        """Return the blocks whose rows or events have a key, without duplicates."""
        source = self.spec.event_keys[key].source
        source_blocks = self.sources[source] if source else []
        return [*self.list_row_blocks(key), *source_blocks]


def list_pair_keys(spec: FeatureSpec) -> list[list[int]]:
    """Return, for each group, the numbers of the keys that are pairs of its key and a value."""
    pair_keys = []
    for group in plan_groups(spec):
        pairs = [EventKey((*group.key, column), group.source) for column in group.distinct_columns]
        pair_keys.append([spec.event_keys.index(pair) for pair in pairs])
    return pair_keys
