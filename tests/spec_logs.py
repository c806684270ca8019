"""Random logs of any feature spec: small, the same for the same seed, as text or parquet."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nvt_torchrec.clicklog.readers.days import find_days
from nvt_torchrec.clicklog.readers.log_format import OpenDay, get_format
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.raw_types.time import EPOCHS, ISO
from nvt_torchrec.formats.feature_spec.read_plan import Read
from nvt_torchrec.formats.feature_spec.toml_file import load_spec
from nvt_torchrec.formats.rows import RawRows

_DAY = 86_400_000_000
_FIRST_DAY = 16_364 * _DAY  # 21 October 2014
_LONGEST_LIST = 4
_CARDINALITIES = (12, 90, 400, 7)
_MISSING = 0.1
_PARQUET_TYPES = {
    "int32": pa.int64(), "float": pa.float64(), "weight": pa.float64(), "int": pa.int64(),
    "hex32": pa.uint32(), "string": pa.string(),
}  # fmt: skip


def write_spec_log(
    directory: Path, spec: FeatureSpec, *, days: int = 3, rows: int = 300, seed: int = 0
) -> list[Path]:
    """Write a log of independent columns, of which some values are missing; return its files."""
    directory.mkdir(parents=True)
    files = [directory / name for name in _file_names(spec, days)]
    for day, file in enumerate(files):
        columns = _columns(spec, np.random.default_rng([seed, day]), day, rows)
        if spec.input.format == "parquet":
            types = {read.source: _type_of(read) for read in _reads(spec).values()}
            table = {name: pa.array(columns[name], types[name]) for name in columns}
            pq.write_table(pa.table(table), file, write_page_checksum=True)
        else:
            file.write_bytes(_text(spec, columns, rows).encode(spec.input.encoding))
    return files


def _file_names(spec: FeatureSpec, days: int) -> list[str]:
    split = spec.split
    if split.by == "files":
        return [*split.train_files, *split.valid_files, *split.test_files]
    ending = "" if spec.input.format == "tsv" else f".{spec.input.format}"
    return [f"day_{day}{ending}" for day in range(days)]


def _reads(spec: FeatureSpec) -> dict[str, Read]:
    """Return how each column of the file is read; of several ways, as a time or number."""
    reads: dict[str, Read] = {}
    for read in spec.read_plan(label=True).reads:
        if read.source not in reads or read.raw in ("time", "int32", "float"):
            reads[read.source] = read
    return reads


def _columns(
    spec: FeatureSpec, rng: np.random.Generator, day: int, rows: int
) -> dict[str, list[Any]]:
    shared = {column.name: column.vocabulary_name for column in spec.categorical}
    vocabularies = list(dict.fromkeys(shared.values()))
    plan, columns = spec.read_plan(label=True), {}
    key = None if plan.key is None else plan.reads[plan.key].source
    for number, (name, read) in enumerate(_reads(spec).items()):
        vocabulary = shared.get(name, name)
        number = vocabularies.index(vocabulary) if vocabulary in vocabularies else number
        size = _CARDINALITIES[number % len(_CARDINALITIES)]
        if read.multi_hot:
            lengths = rng.integers(1, _LONGEST_LIST + 1, rows)
            values = [
                [_category(code, read.raw, vocabulary) for code in rng.zipf(1.5, length) % size]
                for length in lengths
            ]
        else:
            values = _values(read, rng, day, rows, size, vocabulary)
        missing = rng.random(rows) < _MISSING
        if read.raw not in ("label", "weight") and name != key:
            values = [None if gone else v for gone, v in zip(missing, values, strict=True)]
        columns[name] = values
    return columns


def _values(
    read: Read, rng: np.random.Generator, day: int, rows: int, size: int, vocabulary: str
) -> list[Any]:
    if read.raw == "label":
        clicked = rng.random(rows) < 0.3
        rule = read.label
        if rule is not None and rule.positive:
            return [(rule.positive if c else rule.negative or ("no",))[0] for c in clicked]
        if rule is not None and rule.threshold is not None:
            return [rule.threshold + (0 if c else -1) for c in clicked]
        return clicked.astype(int).tolist()
    if read.raw == "weight":
        return (0.5 + rng.integers(0, 4, rows) / 2).tolist()
    if read.raw == "time":
        times = _FIRST_DAY + day * _DAY + rng.integers(0, 86_400, rows) * 1_000_000
        return [time_text(time, read.time_format) for time in times.tolist()]
    if read.raw == "int32":
        return (rng.geometric(0.02, rows) - 1).tolist()
    if read.raw == "float":
        return (rng.geometric(0.0005, rows) / 100).tolist()
    return [_category(code, read.raw, vocabulary) for code in rng.zipf(1.5, rows) % size]


def _category(code: int, raw: str, vocabulary: str) -> Any:
    value = int(code) * 0x1F3D5B79 % 2**31
    return value if raw in ("int", "hex32") else f"{vocabulary}{value:08x}"


def _type_of(read: Read) -> pa.DataType:
    if read.raw == "time":
        return pa.string()
    if read.raw == "label":
        return pa.string() if read.label and read.label.positive else pa.float64()
    own = _PARQUET_TYPES[read.raw]
    return pa.list_(own) if read.multi_hot else own


def _text(spec: FeatureSpec, columns: dict[str, list[Any]], rows: int) -> str:
    own, reads = spec.input, _reads(spec)

    def field(name: str, row: int) -> str:
        if name not in columns:
            return "unread"
        value, read = columns[name][row], reads[name]
        if value is None:
            return ""
        if read.multi_hot:
            return own.list_separator.join(show(read, item) for item in value)
        return show(read, value)

    def show(read: Read, value: Any) -> str:
        return f"{value:08x}" if read.raw == "hex32" else str(value).replace(".", read.decimal)

    names = spec.file_columns(label=True)
    lines = [own.delimiter.join(field(name, row) for name in names) for row in range(rows)]
    head = [own.delimiter.join(names)] if own.header else []
    return "".join(f"{line}\n" for line in [*["skipped"] * own.skip_lines, *head, *lines])


def time_text(time: int, format: str) -> str:
    """Write a time, in microseconds since 1970, in UTC. What a pattern lacks is left out."""
    if format in EPOCHS:
        whole, rest = divmod(time, EPOCHS[format])
        return f"{whole}" if not rest else repr(time / EPOCHS[format])
    moment = datetime.datetime.fromtimestamp(0, datetime.UTC) + datetime.timedelta(
        microseconds=time
    )
    return moment.replace(tzinfo=None).isoformat() if format == ISO else moment.strftime(format)


def spec_of(text: str, directory: Path) -> FeatureSpec:
    """Read a spec from its text, which is written to ``spec.toml`` in a directory."""
    (directory / "spec.toml").write_text(text)
    return load_spec(directory / "spec.toml")


def open_file(path: Path, spec: FeatureSpec) -> OpenDay:
    """Open a file as the only day of a log."""
    (file,) = find_days(str(path))
    return get_format(spec).open(file)


def stream_rows(
    path: str, spec: FeatureSpec, *, block_bytes: int, reject: bool = False
) -> Iterator[tuple[np.ndarray, RawRows]]:
    """Read a file in blocks of about ``block_bytes``, parsing each.

    Yields:
        Numbers of the rows, int64 [n] from 0 (a header is not a row), and the parsed rows.

    Raises:
        BadInputError: The file is missing, empty or truncated.
        BadRowError: A row breaks the spec (unless ``reject``).
    """
    for unparsed in get_format(spec).stream(path, block_bytes):
        rows = unparsed.parse(reject=reject)
        yield unparsed.first + rows.line, rows
