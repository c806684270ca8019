"""JSON lines, which are read as parquet is."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nvt_torchrec.base.errors import BadInputError, BadRowError
from nvt_torchrec.clicklog.readers.json_rows import read_lines
from nvt_torchrec.etl.__main__ import main
from nvt_torchrec.etl.commands.guess import guess
from nvt_torchrec.formats.feature_spec.toml_file import load_spec
from nvt_torchrec.formats.rows import UNLIMITED, RawRows
from tests.logs import read_block
from tests.spec_logs import open_file, spec_of

SPEC = """
[input]
format = "json"
[label]
name = "click"
[[dense]]
names = "price"
raw = "float"
[[categorical]]
names = "user"
raw = "string"
[[categorical]]
names = "tags"
raw = "int"
multi_hot = true
[[categorical]]
names = "page"
from = "seen.page"
raw = "string"
"""


def read(path: Path, lines: list[str], *, max_bad_rows: int = 0) -> RawRows:
    path.write_text("".join(f"{line}\n" for line in lines))
    spec = spec_of(SPEC, path.parent)
    day = open_file(path, spec)
    blocks = day.cut(day.begin, day.end, 1 << 20)
    return read_block(blocks[0], spec, label=day.label, max_bad_rows=max_bad_rows)


ROW = '{"click": 1, "user": "a", "price": 1.5, "tags": [1, 2], "seen": {"page": "2024-01-01"}}'


def test_values(tmp_path: Path) -> None:
    other = '{"click": 0, "user": 12345678901, "tags": [], "seen": null, "more": [[{}]]}'
    rows = read(tmp_path / "log.jsonl", [ROW, other, '{"click": 0, "tags": null}'])
    assert rows.labels.tolist() == [[1, 0, 0]]
    assert rows.dense[0].tolist() == [1.5, 0, 0]
    users, tags, pages = rows.categorical
    assert users.to_pylist() == ["a", "12345678901", ""]
    assert (tags.offsets.tolist(), tags.values.tolist()) == ([0, 2, 2, 2], [1, 2])
    assert pages.to_pylist() == ["2024-01-01", "", ""]


def test_bad_rows_are_left_out(tmp_path: Path) -> None:
    deep = f'{{"click": {"[" * 100_000}}}'
    lines = [ROW, "", deep, "[1]", '{"click": 2}', '{"click": 1, "price": "x"}', '{"click":', ROW]
    rows = read(tmp_path / "log.json", lines, max_bad_rows=UNLIMITED)
    assert rows.line.tolist() == [0, 7]
    assert [row.line for row in rows.bad] == [1, 2, 3, 4, 5, 6]
    assert rows.bad[3].text == b'{"click": 2}'
    with pytest.raises(BadRowError, match=r"log.json, line 3: expected a JSON object"):
        read(tmp_path / "log.json", [ROW, ROW, '{"click":'])


@pytest.mark.parametrize(
    ("price", "message"),
    [
        ("NaN", "NaN is not a number in JSON"),
        ("-Infinity", "expected a JSON object"),
        ('2, "pri\\u0063e": 3', "the key 'price' occurs twice"),
        ("true", "column price: 'true': expected a number"),
    ],
)
def test_values_that_programs_read_differently(price: str, message: str, tmp_path: Path) -> None:
    """They are refused, as the server refuses them."""
    lines = [ROW, ROW.replace("1.5", price)]
    with pytest.raises(BadRowError, match=f"line 2: .*{message}"):
        read(tmp_path / "log.json", lines)
    named = ROW.replace('"a"', '"NaN: NaN, [Inf]"')
    assert read(tmp_path / "log.json", [ROW, named]).categorical[0][1].as_py() == "NaN: NaN, [Inf]"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (ROW.replace('"user"', '"usr"'), "first rows have no key user.*\n.*mean 'usr'"),
        ("[", "line 1: expected a JSON object.*\n.*jq -c"),
        (ROW.replace("[1, 2]", "7"), "column tags is of type int64"),
    ],
)
def test_files_that_cannot_be_read(line: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=message):
        read(tmp_path / "log.json", [line])


def test_arrow_and_python_read_the_same(tmp_path: Path) -> None:
    lines = [ROW.encode(), b'{"user": "2024-01-01T10:00:00Z", "price": 3, "tags": [7]}']
    by_arrow, bad = read_lines(lines)
    by_python, also_bad = read_lines([*lines, b"{"])
    assert by_arrow.to_pylist() == by_python.select(by_arrow.schema.names).to_pylist()
    assert (len(bad), len(also_bad)) == (0, 1)


def test_a_log_is_what_it_is_as_parquet(tmp_path: Path) -> None:
    rows = [
        {
            "click": i % 3 // 2,
            "user": f"u{i % 23}",
            "at": f"2024-01-{1 + i % 28:02d} {i % 24:02d}:00:00",
            "ids": [i % 5, i % 7],
            "seen": {"page": "xyz"[i % 4 % 3]},
            "price": i / 7,
        }
        for i in range(300)
    ]
    (tmp_path / "log.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "log.parquet")
    parts = []
    for name in ("log.jsonl", "log.parquet"):
        path, spec, out = tmp_path / name, tmp_path / f"{name}.toml", tmp_path / f"{name}.out"
        spec.write_text(guess(str(path))[0])
        flags = ["--spec", str(spec), "--input_path", str(path), "--output_path", str(out)]
        assert main(["run", *flags, "--engine", "cpu"]) == 0
        splits = out / "criteo_binary" / "split"
        parts.append([pq.read_table(splits / s / "part.0.parquet") for s in ("train", "test")])
    assert load_spec(tmp_path / "log.jsonl.toml").categorical_names == [
        "user", "at_hour", "at_weekday", "ids", "seen_page"
    ]  # fmt: skip
    assert all(a.equals(b) for a, b in zip(*parts, strict=True))
