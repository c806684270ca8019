"""A guess as a TOML file with comments."""

from __future__ import annotations

import itertools
import json
import textwrap
from typing import Any

from nvt_torchrec.etl.guess.label_and_split import find_time
from nvt_torchrec.etl.guess.names import is_called
from nvt_torchrec.etl.guess.roles import Feature, Guess
from nvt_torchrec.etl.guess.sample import SampledFile

_WIDTH = 100
#: How often the values of an item occur on average, at least.
_OFTEN = 2


def to_toml(guess: Guess, sample: SampledFile, path: str) -> str:
    """Return a feature spec as text."""
    lines = _comment(_about(sample, path))
    if sample.positional and sample.named:
        lines.append("# The header repeats names, so columns are named by position here.")
    if sample.malformed:
        lines.append(f"# Malformed lines besides: {sample.malformed}, see --on_bad_rows.")
    columns = _columns(guess, sample)
    keys = {key: value for key, value in sample.input.items() if not columns or key != "header"}
    if keys := keys | columns:
        lines += ["", "[input]", *_keys(keys)]
    mark = "[label]" if len(guess.labels) == 1 else "[[label]]"
    for rule, why in guess.labels:
        lines += ["", *_comment(why), mark, *_keys(rule)]
    lines += ["", *_comment(guess.split_why), "[split]", *_keys(guess.split)]
    for (kind, options, _), features in itertools.groupby(guess.features, _block_of):
        lines += ["", *_block(kind, options, list(features))]
    lines += _propose_events(guess, sample)
    if guess.unread:
        lines += ["", "# Not read:"]
        for name, reason in guess.unread.items():
            lines += _comment(f"{_shown(name)}: {reason}", "#   ")
    return "\n".join(lines) + "\n"


def _propose_events(guess: Guess, sample: SampledFile) -> list[str]:
    """Return what happened before a row as comments, of a log with a time, a user and an item.

    The item is the column of one value in a row that has the most values, each of them repeatedly.
    """
    profiles = {column.name: column for column in sample.columns}
    single = [
        profiles[feature.source]
        for feature in guess.features
        if feature.source in profiles
        and feature.kind == "categorical"
        and not {"multi_hot", "derive"} & feature.options.keys()
    ]
    users = [column for column in single if is_called(column.name, "user")]
    items = [column for column in single if column not in users and column.often >= _OFTEN]
    when = find_time(sample.columns)
    if guess.split["by"] not in ("time", "days") or not (when and users and items):
        return []
    item = max(items, key=lambda column: column.distinct)
    time = {"time": when.name}
    if when.time_format:
        time["time_format"] = when.time_format
    history = {"name": "recent", "of": [users[0].name], "columns": [item.name]}
    blocks = ["[events]", *_keys(time)]
    for column in (users[0], item):
        blocks += ["[[aggregate]]", *_keys({"of": [column.name]})]
    blocks += ["[[history]]", *_keys(history)]
    about = (
        "What happened before a row, see docs/events.md: uncomment it, and if labels are known "
        'later, add known = "1h" to [events].'
    )
    return ["", *_comment(about), *(f"# {line}" for line in blocks)]


def _about(sample: SampledFile, path: str) -> str:
    name = path.rstrip("/").rsplit("/", 1)[-1]
    part = "all" if sample.whole else "some"
    file = sample.file.removeprefix(f"{path.rstrip('/')}/")[-80:]
    rows = "its rows" if sample.file == path else f"the rows of {_shown(file)}"
    return (
        f"First spec for {_shown(name)}, made from {part} of {rows} "
        f"({sample.columns[0].rows:,}). Review it. Counts and shares are of these rows."
    )


def _shown(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text)[:80]


def _columns(guess: Guess, sample: SampledFile) -> dict[str, list[str]]:
    """Return ``columns`` of a text without a header; {} where the order of the spec says it."""
    read = [rule.get("from", rule["name"]) for rule, _ in guess.labels]
    read += [guess.split["column"]] if guess.split.get("column") else []
    read += [feature.source for feature in guess.features]
    if not sample.positional or list(dict.fromkeys(read)) == guess.names:
        return {}
    return {"columns": [name if name in read else "" for name in guess.names]}


def _block_of(feature: Feature) -> tuple[str, dict[str, Any], str]:
    """Return what neighbours in one block have in common; a derived column has its own block."""
    if feature.name != feature.source:
        return feature.kind, {"from": feature.source, **feature.options}, feature.name
    return feature.kind, feature.options, feature.name if "derive" in feature.options else ""


def _block(kind: str, options: dict[str, Any], features: list[Feature]) -> list[str]:
    if len(features) == 1:
        (feature,) = features
        return [*_comment(feature.why), f"[[{kind}]]", *_keys({"names": [feature.name], **options})]
    width = max(len(_value(feature.name)) for feature in features) + 1
    names = [f"    {_value(feature.name) + ',':{width}} # {feature.why}" for feature in features]
    return [f"[[{kind}]]", "names = [", *names, "]", *_keys(options)]


def _comment(text: str, mark: str = "# ") -> list[str]:
    words: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.wrap(text, _WIDTH, initial_indent=mark, subsequent_indent=mark, **words)


def _keys(options: dict[str, Any]) -> list[str]:
    lines = []
    for key, value in options.items():
        text = f"{key} = {_value(value)}"
        if isinstance(value, list) and len(text) > _WIDTH:
            lines += [f"{key} = [", *(f"    {_value(item)}," for item in value), "]"]
        else:
            lines.append(text)
    return lines


def _value(value: Any) -> str:
    """Return a value as TOML writes it: as JSON, whose escapes TOML has too."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
