"""The JSON form of a spec, without the parts that the spec does not use."""

from __future__ import annotations

from typing import Any


def drop_absent_parts(value: dict[str, Any]) -> None:
    """Remove the parts that a spec does not use from its JSON form, in place.

    The JSON form, and so the digest, of a spec that uses none of the later features must stay the
    same as before these features were added.

    Args:
        value: The spec as ``dataclasses.asdict`` returns it.
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
