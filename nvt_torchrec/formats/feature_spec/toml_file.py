"""Feature specs as TOML files.

All keys of a spec. Optional keys say so, or show their default::

    dense_transform = "log_normalize"   # default of all dense columns; or "log", "log_plus_2",
                                        # "log1p_normalize", "normalize"

    [input]                       # optional
    format = "csv"                # tsv (default), csv, json, parquet
    header = true                 # the first line names the columns; default: true for csv
    columns = ["id", "", "age"]   # text without a header: the names of its fields, "" skips one
    delimiter = ";"               # csv only, 1 to 8 characters; default ","
    list_separator = "|"          # text only: between the values of a multi-hot column
    max_line_kb = 1024            # text only: a longer line is an error
    encoding = "latin-1"          # text only; or "cp1252" (Windows); default "utf-8"
    skip_lines = 1                # text only: lines before the header or the first row; default 0
    comment = "|"                 # text only: skip lines before the first row that begin with this
    skip_empty_lines = true       # text and JSON: skip empty lines at the end of a file
    decimal = ","                 # numbers in text are written as 1,5; default "."
    nulls = ["NA", "?"]           # default of all columns, see [[dense]]
    trim = true                   # default of all columns, and of the labels

    [label]                       # several: [[label]]; training uses the first one
    name = "label"
    from = "rating"               # default: the name
    positive = [">50K", "true"]   # texts that mean 1, all others mean 0
    negative = ["<=50K"]          # optional: texts that mean 0; others are then malformed
    threshold = 4                 # instead of positive: numbers of at least 4 mean 1
    # value = 1                   # instead of a column: rows of the log are 1, [negatives] are 0

    # from another file, docs/labels.md: 1 if a row of it with the same key came within 1 d
    # name = "clicked"
    # from = "clicks*.csv"        # a file or a glob in the directory of the log
    # key = ["impression_id"]     # columns of the log; {id = "impression_id"} where names differ
    # within = "1d"
    # time = "at"                 # the file's time, and time_format; default: as in the log
    # log_time = "time"           # the log's time; default: as in [events], or a [split] by time
    # log_time_format = "epoch_s" # of log_time; default ISO
    # input = {format = "csv"}    # as [input]; default: by the ending of the names, with a header

    [weight]                      # optional: the weight of a row in training and metrics
    name = "weight"

    [split]                       # how rows are divided into train, valid and test
    by = "days"                   # the default: the last day is halved into valid and test
    # by = "share"                # by a hash of file and row number: valid = 0.1, test = 0.1, seed
    # by = "column"               # by a hash of a value: column = "user", valid, test, seed
    # by = "time"                 # column = "time", time_format; valid_from = "2014-10-29" and
    #                             # test_from = "2014-10-30", or shares valid and test
    # by = "files"                # train = "part-*.csv", test = "test.csv", and valid = "…" or a
    #                             # share of the training rows; names or lists of names
    # by = "values"               # column = "set", and its texts: train = "train", test = "test",
    #                             # and valid = "valid" or a share of the training rows

    [[dense]]                     # numbers; missing values are replaced by `fill`
    names = "int_{0..12}"
    raw = "int32"                 # or "float"
    fill = 0
    transform = "log"             # default: dense_transform

    [[categorical]]               # categories; missing values have a separate id
    names = ["cat_0", "cat_1"]
    raw = "hex32"                 # up to 8 hexadecimal digits; or "int", "bool", "string" (UTF-8)
    multi_hot = false             # true: a list of values in each row
    vocabulary = "cats"           # optional: columns with the same one share ids and a table
    freq_threshold = 5            # optional: rarer values are out of vocabulary
    max_table_size = 40000000     # optional: largest number of ids, reserved ids included
    num_buckets = 10              # optional, with either of them: ids for hashed rare values
    hash_buckets = 1000           # instead of the three: no vocabulary, ids by hash only

    [events]                      # with aggregates or histories: docs/events.md
    time = "time"                 # the column with the time of a row; time_format as below;
                                  # default: the format of a [split] by the same column
    known = "1h"                  # an event counts from its time plus this; default: from its time
    # from = "arrived"            # instead: the column with the time from which it counts
    cut = "event"                 # or "day": events known before the row's day (UTC) count

    [[aggregate]]                 # dense columns user_count, user_rate and user_since
    of = ["user"]                 # columns of the file: the key; [] for all rows
    values = ["count", "rate", "since"]  # the default; or of a column of numbers: sum(amount),
                                  # mean, min, max, last; or of any column: distinct(item)
    window = "30d"                # optional: only events of this duration before the row count
    transform = "normalize"       # optional: default depends on the value
    label = "clicked"             # for rate; default: the first label
    source = "purchases"          # optional: aggregate events of this [[source]], not of the log
    smoothing = 20                # for rate, optional: the weight of the rate of all events

    [[history]]
    name = "recent"
    of = ["user"]
    columns = ["item"]            # categorical columns that are not multi_hot
    where = "clicked"             # optional: only events with this label
    kept = 1000                   # events per key that are kept for later days and inference

    [[table]]                     # docs/tables.md: columns joined to rows by a key
    name = "items"
    path = "items.csv"            # a file or a glob in the directory of the log
    key = "item"                  # columns of the log; {item = "item_id"} where names differ
    valid_from = "changed"        # optional: a column of the table, the time from which it counts
    time_format = "epoch_s"       # of valid_from; default ISO
    known = "1h"                  # a version counts from its time plus this; default: from its time
    log_time = "time"             # the log's time; default: as in [events], or a [split] by time
    # log_time_format = "epoch_s" # of log_time; default ISO
    # input = {format = "csv"}    # as [input]; default: by the ending of the names, with a header

    [[vector]]                    # docs/vectors.md: a vector for each key of a table
    name = "text"
    table = "items"               # the table that holds it
    from = "embedding"            # optional: the table's column; default: the name
    width = 384                   # the length of the vectors
    dtype = "float32"             # optional: the stored type; or "float16"

    [negatives]                   # docs/negatives.md: draw rows with label 0
    item = "item"                 # each row with label 1 is repeated with other items,
    user = "user"                 # for which its user has no row with label 1
    per_positive = 4              # the number of negatives per row
    from = "items"                # optional: the table with the items; default: those of the log
    popularity = 0.75             # optional: draw by rows with label 1; default 0: all items alike
    seed = 1                      # optional

    [[source]]                    # docs/sources.md: additional events, such as purchases
    name = "purchases"            # aggregates name it: source = "purchases"
    path = "purchases/*.csv"      # a file or a glob in the directory of the log
    time = "at"                   # the column with the time of an event; time_format as below
    known = "10m"                 # an event counts from its time plus this; default: from its time
    key = {user = "user_id"}      # {column of the log = column of the source} where names differ
    nulls = ["NA"]                # optional: texts that mean a missing value
    # input = {format = "csv"}    # as [input]; default: by the ending of the names, with a header

    # in [[dense]] and [[categorical]], all optional:
    table = "items"               # the column comes from this table, from the row with the same key
    from = "age"                  # the column of the file; default: the name
    nulls = ["?", "NA"]           # texts that mean a missing value
    trim = true                   # remove spaces and tabs around values
    lenient = true                # numbers also as +5, integers also as 260.0
    derive = "hour"               # categorical: hour, weekday of a time; bucket, log_square
                                  # of a number; cross of from = ["a", "b"];
                                  # dense: age in days of a time
    time_format = "%Y-%m-%d"      # of times: a pattern, epoch_s, epoch_ms, epoch_us; default ISO
    reference = "2024-01-01"      # for age: the time until which it is counted
    boundaries = [18, 25, 40]     # for bucket

How values are read, in text and in parquet's text columns:

- ``trim`` removes spaces and tabs, around a list and around its values too. ``nulls`` are compared
  after that. In a list, an empty value (except at its end) or a null text is malformed; a field
  that is a null text as a whole is a missing list. Lists of numbers may be in brackets: [1, 2].
  A number of parquet is missing if it equals a text in ``nulls`` that is a number.
- ``lenient`` accepts an integer in any form with an integral value in range (``260.0``, ``2.6e2``),
  and a plus sign. It has no effect on hex32, strings and times.
- ``decimal`` applies to all columns, labels and the weight: with ``","``, 1.5 is malformed.
- Labels are 0, 1, 0.0 or 1.0; with ``threshold`` any number. ``positive`` and ``negative`` are
  compared with the text, after ``trim``, and with the values of parquet's numbers and booleans
  (``true``, ``false``). Labels and weights must not be missing; weights are at least 0.
- Times are UTC; digits after the microseconds are ignored. ISO 8601 is ``2014-10-30``, or with
  ``T`` or a space ``2014-10-30 12:00``, optionally with seconds, their fraction, ``Z``, `` UTC`` or
  ``+02:00`` (``+0200``, ``+02``). Numbers since 1970 may have a fraction. In a pattern, ``%Y`` has
  4 and ``%y`` 2 digits (1969 to 2068), the other numbers have one or more; ``%b`` is Jan to Dec,
  ``%z`` is Z, +0200 or +02:00. A date that is not in the calendar is malformed.
- Parquet's integers can be read as strings of their digits, its timestamps and dates as times.
  Floats with a fraction cannot be read as integers, and floats cannot be read as strings.
- JSON has one object per line and is read like parquet, with times as text. A missing key is a
  missing value. Columns whose values have several types are read as text.

How text is read:

- Spaces around the names in a header are removed. A byte order mark is skipped.
- A line break ends a row even within quotes.
- Latin-1 is converted to UTF-8, also in errors and quarantine files.

Without a header and ``columns``, the fields of a line are the labels, the weight, the split's
column, the times of events, the dense and categorical columns, and the columns of keys, in the
order of the spec; columns with the same ``from`` are one field. With a header, and in JSON and
parquet, columns are found by name, fields of structs as ``s.c``; other columns are ignored.
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
#: The largest size of a spec file in bytes; a thousand columns of each kind take 200 KiB.
_MAX_BYTES = 4 << 20
#: The keys of ``[input]`` that are defaults of all columns.
_COLUMN_DEFAULTS = ("nulls", "trim")


def shipped_specs() -> dict[str, Any]:
    """Return the specs of this package by name, as paths that may be inside an archive."""
    files = (resources.files("nvt_torchrec.formats.feature_spec") / "presets").iterdir()
    named = {file.name.removesuffix(".toml"): file for file in files}
    return {name: named[name] for name in sorted(named)}


def load_spec(path: Path | str | None = None) -> FeatureSpec:
    """Read a feature spec.

    Args:
        path: A TOML file, or the name of a shipped spec; None for Criteo's spec.

    Raises:
        SettingsError: The file is missing or not TOML, or has an unknown or contradictory key.
    """
    source = _find_source(path or DEFAULT_SPEC)
    try:
        if isinstance(source, Path):
            content = read_regular(source, _MAX_BYTES)
        else:  # a shipped spec inside an archive
            content = source.read_bytes()
        value = tomllib.loads(content.decode())
    except FileNotFoundError as error:
        remedy = f"write one with `python -m etl guess`, or use {', '.join(shipped_specs())}"
        raise SettingsError(f"{source}: no such file", remedy) from error
    except (OSError, ValueError, RecursionError) as error:  # not TOML, or not UTF-8
        raise SettingsError(f"{source}: not a feature spec: {error}") from error
    return make_spec(value, str(source))


def make_spec(value: dict[str, Any], source: str) -> FeatureSpec:
    """Make a feature spec from the contents of a TOML file.

    Args:
        value: The contents, as ``tomllib`` returns them.
        source: The name of the file, for errors.

    Raises:
        SettingsError: There is an unknown or contradictory key.
    """
    try:
        return _read_blocks(value, source)
    except SettingsError as error:
        what = error.what.removeprefix(f"{source}: ")
        raise SettingsError(f"{source}: {what}", error.remedy) from None
    except (AttributeError, TypeError, ValueError) as error:
        raise SettingsError(f"{source}: not a feature spec: {error}") from error


def _find_source(path: Path | str) -> Any:
    """Return the file of a spec; the name of a shipped spec contains no "/" and no "."."""
    if isinstance(path, Path) or "/" in path or "." in path or Path(path).is_file():
        return Path(path)
    shipped = shipped_specs()
    if path not in shipped:
        raise SettingsError(
            f"spec {path!r}: not a feature spec: neither a file nor the name of a shipped spec",
            did_you_mean(path, shipped),
        )
    return shipped[path]


def _read_blocks(value: dict[str, Any], source: str) -> FeatureSpec:
    known = {
        "label", "dense", "categorical", "dense_transform", "input", "weight", "split",
        "events", "aggregate", "history", "table", "vector", "source", "negatives",
    }  # fmt: skip
    check_keys(value, known, source)
    input_block = value.get("input", {})
    check_keys(input_block, field_names(InputFormat) | set(_COLUMN_DEFAULTS), source)
    defaults = {key: item for key, item in input_block.items() if key in _COLUMN_DEFAULTS}
    layout = {key: item for key, item in input_block.items() if key not in _COLUMN_DEFAULTS}
    check_keys(value.get("weight", {}), {"name"}, source)
    label_blocks = _list_label_blocks(value)
    labels = _read_labels(label_blocks, defaults.get("trim", False), source)
    split = _read_split(value.get("split", {}), source)
    label_files = tuple(
        read_label_file(block, source) for block in label_blocks if is_from_file(block)
    )
    has_plain_label = labels == (LabelRule(labels[0].name),) and not label_files
    return FeatureSpec(
        label=labels[0].name,
        dense=(
            *read_columns(value.get("dense", []), DenseColumn, defaults, source),
            *read_aggregates(value.get("aggregate", []), labels[0].name, source),
        ),
        categorical=read_columns(value.get("categorical", []), CategoricalColumn, defaults, source),
        dense_transform=value.get("dense_transform", "log_normalize"),
        input=make_part(InputFormat, layout),
        label_rules=() if has_plain_label else labels,
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


def _list_label_blocks(value: dict[str, Any]) -> list[Any]:
    """Return the blocks ``[[label]]``, or the one block ``[label]``."""
    blocks = value.get("label", {})
    return blocks if isinstance(blocks, list) else [blocks]


def _read_labels(blocks: list[Any], trim: bool, source: str) -> tuple[LabelRule, ...]:
    """Return the rules of the labels; ``trim`` is the default of ``[input]``."""
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


def _read_split(block: Any, source: str) -> Split:
    """Return the rule of ``[split]``; its ``valid`` is a share, names of files, or values."""
    check_keys(block, set(map(spec_key, field_names(Split))), source)
    kind = "values" if block.get("by") == "values" else "files"
    options = {}
    for key, given in block.items():
        if key == "train" or (key in SPLITS and isinstance(given, str | list)):
            options[f"{key}_{kind}"] = as_list(given)
        else:
            options[key] = given
    return make_part(Split, options, "split: ")
