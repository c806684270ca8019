"""Feature specs as TOML files.

All keys of a spec; those that are optional say so, or show their default::

    dense_transform = "log_normalize"   # of columns without a transform; or "log", "log_plus_2",
                                        # "log1p_normalize", "normalize"

    [input]                       # optional
    format = "csv"                # tsv (default), csv, json, parquet
    header = true                 # the first line names the columns; default: csv true, tsv false
    columns = ["id", "", "age"]   # text without a header: the names of its fields, "" skips one
    delimiter = ";"               # csv only, 1 to 8 characters; default ","
    list_separator = "|"          # text only: between the values of a multi-hot column
    max_line_kb = 1024            # text only: a longer line is an error
    encoding = "latin-1"          # text only, or "cp1252" of Windows; default "utf-8"
    skip_lines = 1                # text only: lines before the header or the first row; default 0
    comment = "|"                 # text only: lines before the first row that begin so are skipped
    skip_empty_lines = true       # text only: empty lines at the end of a file are skipped
    decimal = ","                 # numbers as text are written as 1,5; default "."
    nulls = ["NA", "?"]           # default of all columns, see [[dense]]
    trim = true                   # default of all columns, and of the labels

    [label]                       # several: [[label]]; training takes the first one
    name = "label"
    from = "rating"               # default: the name
    positive = [">50K", "true"]   # texts that are 1, all others are 0
    negative = ["<=50K"]          # with it, any other text is a malformed row
    threshold = 4                 # instead of positive: numbers from 4 on are 1
    # value = 1                   # instead of a column: all rows are 1, those of [negatives] 0

    # from another file, docs/labels.md: 1 if a row of it came within 1 d after a row of its key
    # name = "clicked"
    # from = "clicks*.csv"        # a file or a glob in the directory of the log
    # key = ["impression_id"]     # columns of the log; {id = "impression_id"} where names differ
    # within = "1d"
    # time = "at"                 # the file's time, and time_format; default: as the log's
    # log_time = "time"           # the log's time; default: that of [events], or a [split] by time
    # log_time_format = "epoch_s" # of log_time; default ISO
    # input = {format = "csv"}    # as [input]; default: by the ending of the names, with a header

    [weight]                      # optional: weight of a row in training and metrics
    name = "weight"

    [split]                       # which rows are train, valid and test
    by = "days"                   # the default: the last day is halved into valid and test
    # by = "share"                # by a hash of file and row number: valid = 0.1, test = 0.1, seed
    # by = "column"               # by a hash of a value: column = "user", valid, test, seed
    # by = "time"                 # column = "time", time_format; valid_from = "2014-10-29" and
    #                             # test_from = "2014-10-30", or shares valid and test
    # by = "files"                # train = "part-*.csv", test = "test.csv", and valid = "…" or a
    #                             # share of the training rows; names or lists of names
    # by = "values"               # column = "set", and its texts: train = "train", test = "test",
    #                             # and valid = "valid" or a share of the training rows

    [[dense]]                     # numbers; missing values become `fill`
    names = "int_{0..12}"
    raw = "int32"                 # or "float"
    fill = 0
    transform = "log"             # default: dense_transform

    [[categorical]]               # categories; missing values have an id of their own
    names = ["cat_0", "cat_1"]
    raw = "hex32"                 # up to 8 hexadecimal digits; "int", "bool", "string" (UTF-8)
    multi_hot = false             # true: a list of values in each row
    vocabulary = "cats"           # optional: columns with the same name share ids, a table
    freq_threshold = 5            # optional: rarer values count as out of vocabulary
    max_table_size = 40000000     # optional: rows of the table, reserved ids included
    num_buckets = 10              # optional, with either of them: ids for hashed rare values
    hash_buckets = 1000           # instead of the three: no vocabulary, ids by hash alone

    [events]                      # with aggregates or histories: docs/events.md
    time = "time"                 # the column with the time of a row; time_format as below, or
                                  # that of [split] by time and the same column
    known = "1h"                  # an event counts from its time plus this; default: from its time
    # from = "arrived"            # instead: the column with the time from which it counts
    cut = "event"                 # or "day": what is known before the row's day (UTC) counts

    [[aggregate]]                 # dense columns user_count, user_rate and user_since
    of = ["user"]                 # columns of the file: the key; [] is all rows
    values = ["count", "rate", "since"]  # the default; or of a column of the file: sum(amount),
                                  # mean, min, max, last of numbers, distinct(item) of any values
    window = "30d"                # optional: events count so long
    transform = "normalize"       # optional: of these columns, instead of that of each value
    label = "clicked"             # of rate; default: the first label
    source = "purchases"          # optional: of the events of this [[source]], not of the log
    smoothing = 20                # of rate, optional: the weight of the rate of all events

    [[history]]
    name = "recent"
    of = ["user"]
    columns = ["item"]            # categorical columns of one value
    where = "clicked"             # optional: only events with this label
    kept = 1000                   # events of a key kept for further days and inference

    [[table]]                     # docs/tables.md: what is known of the key of a row
    name = "items"
    path = "items.csv"            # a file or a glob in the directory of the log
    key = "item"                  # columns of the log; {item = "item_id"} where names differ
    valid_from = "changed"        # optional: a column of the table; a row counts for later rows
    time_format = "epoch_s"       # of valid_from; default ISO
    known = "1h"                  # a version counts from its time plus this; default: from its time
    log_time = "time"             # the log's time; default: that of [events], or a [split] by time
    # log_time_format = "epoch_s" # of log_time; default ISO
    # input = {format = "csv"}    # as [input]; default: by the ending of the names, with a header

    [[vector]]                    # docs/vectors.md: a list of numbers of one length for each key
    name = "text"
    table = "items"               # the table that has it
    from = "embedding"            # optional: the table's column; default: the name
    width = 384                   # how many numbers it has
    dtype = "float32"             # or "float16": how they are stored; default "float32"

    [negatives]                   # docs/negatives.md: rows that are drawn, with label 0
    item = "item"                 # for each row with label 1, the same one with other items
    user = "user"                 # that this user has no row with label 1 with
    per_positive = 4
    from = "items"                # optional: the table with the items; default: those of the log
    popularity = 0.75             # optional: by rows with label 1; default 0: all items alike
    seed = 1                      # optional

    [[source]]                    # docs/sources.md: further events, such as purchases
    name = "purchases"            # aggregates name it: source = "purchases"
    path = "purchases/*.csv"      # a file or a glob in the directory of the log
    time = "at"                   # the column with the time of an event; time_format as below
    known = "10m"                 # an event counts from its time plus this; default: from its time
    key = {user = "user_id"}      # {column of the log = column of the source} where names differ
    nulls = ["NA"]                # optional: texts that mean a missing value
    # input = {format = "csv"}    # as [input]; default: by the ending of the names, with a header

    # in [[dense]] and [[categorical]], all optional:
    table = "items"               # the column is one of this table, of the row with the same key
    from = "age"                  # the column of the file; default: the name
    nulls = ["?", "NA"]           # texts that mean a missing value
    trim = true                   # remove spaces and tabs around values
    lenient = true                # numbers also as +5, integers also as 260.0
    derive = "hour"               # categorical: hour, weekday of a time; bucket, log_square
                                  # of a number; cross of from = ["a", "b"];
                                  # dense: age in days of a time
    time_format = "%Y-%m-%d"      # of times: a pattern, epoch_s, epoch_ms, epoch_us; default ISO
    reference = "2024-01-01"      # of age: counted from then back
    boundaries = [18, 25, 40]     # of bucket

How values are read, in text and in parquet's text columns:

- ``trim`` removes spaces and tabs, around a list and around its values too. ``nulls`` are compared
  after that; in a list, an empty value (but for one at its end) or one of them is malformed, a
  field that is one as a whole is a missing list. Lists of numbers may be in brackets: [1, 2].
  Of parquet's numbers, those that a text in ``nulls`` stands for are missing.
- ``lenient`` takes an integer in any form whose value is one (``260.0``, ``2.6e2``) and in range,
  and a plus sign. It does not matter for hex32, strings and times.
- ``decimal`` is that of all columns, labels and the weight: with ``","``, 1.5 is malformed.
- Labels are 0, 1, 0.0 or 1.0; with ``threshold`` any number. ``positive`` and ``negative`` are
  compared with the text, after ``trim``; of parquet's numbers and booleans (``true``, ``false``)
  with what they are. A label and a weight, a number of at least 0, may not be missing.
- Times are UTC; what is beyond microseconds is left out. ISO 8601 is ``2014-10-30``, or with ``T``
  or a space ``2014-10-30 12:00``, with or without seconds, their fraction, ``Z``, `` UTC`` or
  ``+02:00`` (``+0200``, ``+02``).
  Numbers since 1970 may have a fraction. In a pattern, ``%Y`` has 4 and ``%y`` 2 digits (1969 to
  2068), others one or more; ``%b`` is Jan to Dec, ``%z`` Z, +0200 or +02:00. A
  date that the calendar lacks is malformed.
- Parquet's integers are read as strings by their digits, its timestamps and dates as times. Floats
  with a fraction are no integers, and floats no strings.

- JSON is an object in each line, read as parquet is, with times as text. Values may be missing with
  their key; those of several types are read as text.

How text is read:

- The names of a header count without the spaces around them. A byte order mark is skipped.
- A line break within quotes ends a row, too.
- Latin-1 becomes UTF-8, also in errors and quarantine files.

Without a header and ``columns``, the fields of a line are labels, weight, the split's column, the
times of events, dense and categorical columns and those of keys, in the order of the spec, those
with the same ``from`` once. With a header,
and in JSON and parquet, columns are found by name, fields of structs as ``s.c``; further ones are
ignored.
"""

from __future__ import annotations

import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.base.files.validation import read_regular
from nvt_torchrec.formats.feature_spec.columns import CategoricalColumn, DenseColumn, InputFormat
from nvt_torchrec.formats.feature_spec.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.field_checks import did_you_mean
from nvt_torchrec.formats.feature_spec.read_plan import LabelRule
from nvt_torchrec.formats.feature_spec.split import Split, spec_key
from nvt_torchrec.formats.feature_spec.toml_columns import read_columns
from nvt_torchrec.formats.feature_spec.toml_events import (
    read_aggregates,
    read_events,
    read_history,
)
from nvt_torchrec.formats.feature_spec.toml_labels import is_from_file, read_label_file
from nvt_torchrec.formats.feature_spec.toml_negatives import read_negatives
from nvt_torchrec.formats.feature_spec.toml_parts import as_list, check_keys, field_names, make_part
from nvt_torchrec.formats.feature_spec.toml_tables import read_source, read_table, read_vector
from nvt_torchrec.formats.splits import SPLITS

DEFAULT_SPEC = "criteo_1tb"
#: Bytes of a file; a thousand columns of each kind take 200 KiB.
_MAX_BYTES = 4 << 20
#: Keys of ``[input]`` that are defaults of the columns.
_OF_ALL_COLUMNS = ("nulls", "trim")


def shipped_specs() -> dict[str, Any]:
    """Return the specs that come with this package, by name; paths may be inside an archive."""
    files = (resources.files("nvt_torchrec.formats.feature_spec") / "presets").iterdir()
    named = {file.name.removesuffix(".toml"): file for file in files}
    return {name: named[name] for name in sorted(named)}


def load_spec(path: Path | str | None = None) -> FeatureSpec:
    """Read a feature spec: a TOML file, or one of the shipped specs by name; Criteo's by default.

    Raises:
        SettingsError: The file is missing or not TOML, or has an unknown or contradictory key.
    """
    source = _source(path or DEFAULT_SPEC)
    try:
        content = (
            read_regular(source, _MAX_BYTES) if isinstance(source, Path) else source.read_bytes()
        )
        value = tomllib.loads(content.decode())
    except FileNotFoundError as error:
        remedy = f"write one by `python -m etl guess`, or use {', '.join(shipped_specs())}"
        raise SettingsError(f"{source}: no such file", remedy) from error
    except (OSError, ValueError, RecursionError) as error:  # not TOML, or not UTF-8
        raise SettingsError(f"{source}: not a feature spec: {error}") from error
    return make_spec(value, str(source))


def make_spec(value: dict[str, Any], source: str) -> FeatureSpec:
    """Make a feature spec of the keys of a TOML file.

    Args:
        value: The keys, as ``tomllib`` returns them.
        source: Names where they are from in errors.

    Raises:
        SettingsError: There is an unknown or contradictory key.
    """
    try:
        return _spec(value, source)
    except SettingsError as error:
        what = error.what.removeprefix(f"{source}: ")
        raise SettingsError(f"{source}: {what}", error.remedy) from None
    except (AttributeError, TypeError, ValueError) as error:
        raise SettingsError(f"{source}: not a feature spec: {error}") from error


def _source(path: Path | str) -> Any:
    """Return the file of a spec; a name of a shipped spec contains no "/" and no "."."""
    if isinstance(path, Path) or "/" in path or "." in path or Path(path).is_file():
        return Path(path)
    shipped = shipped_specs()
    if path not in shipped:
        raise SettingsError(
            f"spec {path!r}: not a feature spec: neither a file nor the name of a shipped spec",
            did_you_mean(path, shipped),
        )
    return shipped[path]


def _spec(value: dict[str, Any], source: str) -> FeatureSpec:
    known = {
        "label", "dense", "categorical", "dense_transform", "input", "weight", "split",
        "events", "aggregate", "history", "table", "vector", "source", "negatives",
    }  # fmt: skip
    check_keys(value, known, source)
    given = value.get("input", {})
    check_keys(given, field_names(InputFormat) | set(_OF_ALL_COLUMNS), source)
    defaults = {key: given[key] for key in _OF_ALL_COLUMNS if key in given}
    given = {key: item for key, item in given.items() if key not in _OF_ALL_COLUMNS}
    check_keys(value.get("weight", {}), {"name"}, source)
    labels = _labels(_label_blocks(value), defaults.get("trim", False), source)
    split = _split(value.get("split", {}), source)
    label_files = tuple(
        read_label_file(block, source) for block in _label_blocks(value) if is_from_file(block)
    )
    plain = labels == (LabelRule(labels[0].name),) and not label_files
    return FeatureSpec(
        label=labels[0].name,
        dense=(
            *read_columns(value.get("dense", []), DenseColumn, defaults, source),
            *read_aggregates(value.get("aggregate", []), labels[0].name, source),
        ),
        categorical=read_columns(value.get("categorical", []), CategoricalColumn, defaults, source),
        dense_transform=value.get("dense_transform", "log_normalize"),
        input=make_part(InputFormat, given),
        label_rules=() if plain else labels,
        weight=value.get("weight", {}).get("name", ""),
        split=split,
        events=read_events(value["events"], split, source) if "events" in value else None,
        histories=tuple(read_history(block, source) for block in value.get("history", [])),
        tables=tuple(read_table(block, source) for block in value.get("table", [])),
        event_sources=tuple(read_source(block, source) for block in value.get("source", [])),
        negatives=read_negatives(value["negatives"], source) if "negatives" in value else None,
        label_files=label_files,
        vectors=tuple(read_vector(block, source) for block in value.get("vector", [])),
    )


def _label_blocks(value: dict[str, Any]) -> list[Any]:
    """Return ``[label]`` or several ``[[label]]``."""
    blocks = value.get("label", {})
    return blocks if isinstance(blocks, list) else [blocks]


def _labels(blocks: list[Any], trim: bool, source: str) -> tuple[LabelRule, ...]:
    """Return the rules of labels."""
    rules = []
    for block in blocks:
        if is_from_file(block):
            rules.append(make_part(LabelRule, {"name": block.get("name", "label")}, "label: "))
            continue
        check_keys(block, {*field_names(LabelRule) - {"source"}, "from"}, source)
        options = {"name": "label", "trim": trim, **block}
        options["source"] = options.pop("from", "")
        rules.append(make_part(LabelRule, options, f"label {options['name']}: "))
    if not rules:
        raise SettingsError(f"{source}: no label", 'add [label] with name = "…"')
    return tuple(rules)


def _split(block: Any, source: str) -> Split:
    check_keys(block, set(map(spec_key, field_names(Split))), source)
    kind = "values" if block.get("by") == "values" else "files"
    options = {}
    for key, given in block.items():
        names = key == "train" or (key in SPLITS and isinstance(given, str | list))
        options[f"{key}_{kind}" if names else key] = as_list(given) if names else given
    return make_part(Split, options, "split: ")
