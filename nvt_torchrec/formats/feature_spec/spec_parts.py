"""A spec for JSON, without parts that it does not have."""

from __future__ import annotations

from typing import Any


def drop_absent_parts(value: dict[str, Any]) -> None:
    """Remove parts that a spec does not have from its form for JSON.

    So a spec without them, and its digest, are as they were before there were any.

    Args:
        value: What ``dataclasses.asdict`` gives; it is changed.
    """
    columns = [*value["dense"], *value["categorical"]]
    if value["events"]:
        del value["events"]["between"], value["events"]["optional"]
    else:
        del value["events"], value["histories"]
        for column in value["dense"]:
            del column["aggregate"]
    if not value["event_sources"]:
        del value["event_sources"]
    if not value["tables"]:
        del value["tables"]
        for column in columns:
            del column["table"]
    if not value["negatives"]:
        del value["negatives"]
        for rule in value["label_rules"]:
            del rule["value"]
    if not value["vectors"]:
        del value["vectors"]
    if not value["label_files"]:
        del value["label_files"]
    for column in columns:
        aggregate = column.get("aggregate")
        for part in ("column", "source"):
            if aggregate and not aggregate[part]:
                del aggregate[part]
