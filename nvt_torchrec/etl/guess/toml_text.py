"""Write a guessed spec as TOML with comments."""

from __future__ import annotations

import itertools
import json
import re
import textwrap
from collections.abc import Sequence
from typing import Any

from nvt_torchrec.etl.guess.dialect import AS_PARQUET
from nvt_torchrec.etl.guess.label_choice import is_determined
from nvt_torchrec.etl.guess.names import is_called
from nvt_torchrec.etl.guess.roles import Feature, Guess
from nvt_torchrec.etl.guess.sample import SampledFile
from nvt_torchrec.etl.guess.tables_of_log import GuessedTable
from nvt_torchrec.formats.feature_spec.aggregates import DEFAULT_VALUES

_WIDTH = 100
#: Minimum mean count of the values of the column of items.
_MIN_MEAN_COUNT = 2


def to_toml(
    guess: Guess,
    sample: SampledFile,
    path: str,
    *,
    events: list[str],
    tables: Sequence[GuessedTable] = (),
) -> str:
    """Return a feature spec as text.

    Args:
        guess: The roles of the columns.
        sample: The sample of the log.
        path: Names the log.
        events: Lines about events to insert, see :func:`comment_events`.
        tables: The tables that are joined to the log.
    """
    lines = _comment(_describe_sample(sample, path))
    if sample.positional and sample.named:
        lines.append("# The header repeats names, so columns are named by position here.")
    if sample.malformed:
        problem = f"Malformed lines, not counted here: {sample.malformed}, see --on_bad_rows."
        if sample.quoted_breaks:
            problem += f" {sample.quoted_breaks} lines end within quotes: {AS_PARQUET}."
        lines += _comment(problem)
    input_keys = dict(sample.input)
    columns = _list_columns(guess, sample)
    if columns:
        input_keys.pop("header", None)
        input_keys["columns"] = columns
    if input_keys:
        lines += ["", "[input]", *_write_keys(input_keys)]
    heading = "[label]" if len(guess.labels) == 1 else "[[label]]"
    for rule, why in guess.labels:
        lines += ["", *_comment(why), heading, *_write_keys(rule)]
    lines += ["", *_comment(guess.split.why), "[split]", *_write_keys(guess.split.keys)]
    for table in tables:
        lines += ["", *_comment(table.why), "[[table]]", *_write_keys(table.keys)]
    for (kind, options, _), features in itertools.groupby(guess.features, _describe_block):
        lines += ["", *_write_block(kind, options, list(features))]
    lines += events
    if guess.unread:
        lines += ["", "# Not read:"]
        for name, reason in guess.unread.items():
            lines += _comment(f"{_to_printable(name)}: {reason}", "#   ")
    return "\n".join(lines) + "\n"


def propose_events(guess: Guess, sample: SampledFile) -> list[str]:
    """Propose aggregates and a history of what happened before each row.

    The item is the single-valued column with the most distinct values, among those whose values
    recur.

    Returns:
        Lines of a spec; [] without a time, a user and an item.
    """
    profiles = {column.source: column for column in sample.columns if column.name}
    names = {}  # source → name in the spec, for categorical columns with one value per row
    for feature in guess.features:
        is_single = not {"multi_hot", "derive"} & feature.options.keys()
        if feature.kind == "categorical" and is_single:
            names[feature.source] = feature.name
    columns = [profiles[source] for source in names if source in profiles]
    users = [column for column in columns if is_called(column.name, "user")]
    items = []
    for column in columns:
        # A column that is determined by the user, such as a home town, is not an item.
        is_of_user = users and is_determined(column, users[0])
        if column not in users and column.mean_count >= _MIN_MEAN_COUNT and not is_of_user:
            items.append(column)
    split = guess.split.keys
    # Valid and test must be later than train: the events of a random split would hold labels of
    # other splits.
    is_later = split["by"] in ("time", "days")
    is_later |= split["by"] == "files" and isinstance(split["valid"], (str, list))
    if not (is_later and guess.time and users and items):
        return []
    item = max(items, key=lambda column: column.distinct)
    time = {"time": guess.time.source}
    if guess.time.time_format:
        time["time_format"] = guess.time.time_format
    history = {"name": "recent", "of": [users[0].source], "columns": [names[item.source]]}
    blocks = ["[events]", *_write_keys(time)]
    for column in (users[0], item):
        aggregate = {"of": [column.source], "values": list(DEFAULT_VALUES)}
        blocks += ["[[aggregate]]", *_write_keys(aggregate)]
    return [*blocks, "[[history]]", *_write_keys(history)]


def comment_events(lines: list[str], *, wanted: bool) -> list[str]:
    """Return lines of :func:`propose_events` below a comment; comment them out unless wanted."""
    if not lines:
        return []
    heading = "What happened before a row, see docs/events.md"
    hint = 'if labels become known only later, add known = "1h" to [events]'
    if wanted:
        return ["", *_comment(f"{heading}; {hint}."), *lines]
    heading += f": uncomment it, or call guess with --events; {hint}."
    return ["", *_comment(heading), *(f"# {line}" for line in lines)]


def _describe_sample(sample: SampledFile, path: str) -> str:
    """Return the first comment, which says what the spec was made from."""
    name = path.rstrip("/").rsplit("/", 1)[-1]
    part = "all" if sample.whole else "some"
    file = sample.file.removeprefix(f"{sample.root or path.rstrip('/')}/")[-80:]
    rows = "its rows" if sample.file == path else f"the rows of {_to_printable(file)}"
    return (
        f"First spec for {_to_printable(name)}, made from {part} of {rows} "
        f"({sample.columns[0].rows:,}). Review it. Counts and shares are of these rows."
    )


def _to_printable(text: str) -> str:
    """Return a text that is safe in a comment: on one line, and not too long."""
    return "".join(character if character.isprintable() else "?" for character in text)[:80]


def _list_columns(guess: Guess, sample: SampledFile) -> list[str]:
    """Return ``columns`` of ``[input]`` for a text without a header, "" for unread columns.

    Without such a key, the columns have the order of the spec; if that is right, it is [].
    """
    read = [rule.get("from", rule["name"]) for rule, _ in guess.labels]
    if "column" in guess.split.keys:
        read.append(guess.split.keys["column"])
    read += [feature.source for feature in guess.features if "table" not in feature.options]
    if not sample.positional or list(dict.fromkeys(read)) == guess.names:
        return []
    return [name if name in read else "" for name in guess.names]


def _describe_block(feature: Feature) -> tuple[str, dict[str, Any], str]:
    """Return the kind, the keys and the name of a feature's block.

    Neighbours with the same result share a block. The name is "" unless a feature needs a separate
    block: a vector, a derived column, or a column that is renamed.
    """
    is_renamed = feature.name != feature.source
    options = feature.options
    if is_renamed:
        options = {"from": feature.source, **options}
    has_own_block = is_renamed or feature.kind == "vector" or "derive" in options
    return feature.kind, options, feature.name if has_own_block else ""


def _write_block(kind: str, options: dict[str, Any], features: list[Feature]) -> list[str]:
    """Return the lines of a block; the comment is above it, or behind each of several names."""
    if len(features) == 1:
        (feature,) = features
        names: dict[str, Any] = {"names": [feature.name]}
        if kind == "vector":
            names = {"name": feature.name}
        return [*_comment(feature.why), f"[[{kind}]]", *_write_keys(names | options)]
    width = max(len(_write_value(feature.name)) for feature in features) + 1
    lines = [f"[[{kind}]]", "names = ["]
    for feature in features:
        lines.append(f"    {_write_value(feature.name) + ',':{width}} # {feature.why}")
    return [*lines, "]", *_write_keys(options)]


def _comment(text: str, mark: str = "# ") -> list[str]:
    """Return the lines of a wrapped comment."""
    words: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.wrap(text, _WIDTH, initial_indent=mark, subsequent_indent=mark, **words)


def _write_keys(options: dict[str, Any]) -> list[str]:
    """Return a line for each key, or several for a long list."""
    lines = []
    for key, value in options.items():
        text = f"{key} = {_write_value(value)}"
        if isinstance(value, list) and len(text) > _WIDTH:
            lines += [f"{key} = [", *(f"    {_write_value(item)}," for item in value), "]"]
        else:
            lines.append(text)
    return lines


def _write_value(value: Any) -> str:
    """Return a value in TOML. All but tables are written as in JSON, which has the same escapes."""
    if isinstance(value, dict):
        items = [f"{_write_key(key)} = {_write_value(item)}" for key, item in value.items()]
        return f"{{{', '.join(items)}}}"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _write_key(key: str) -> str:
    """Return a key in TOML: quoted if it has characters that a bare key cannot have."""
    return key if re.fullmatch("[A-Za-z0-9_-]+", key) else _write_value(key)
