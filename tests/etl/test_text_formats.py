"""A log with every quirk of text, read by its spec alone, row by row."""

from __future__ import annotations

import gzip
from pathlib import Path

from nvt_torchrec.etl.run import run
from nvt_torchrec.formats.feature_spec.toml_file import load_spec
from tests.etl.runs import QUARANTINE, read_split, settings

SPEC = """
[input]
format = "csv"
delimiter = "^"
encoding = "latin-1"
skip_lines = 1
quoted_newlines = true
trim = true
nulls = ["?"]
[label]
name = "y"
positive = [">50K"]
[[dense]]
names = ["n"]
lenient = true
thousands = ","
[[categorical]]
names = ["name"]
raw = "string"
"""


def _day(first: int, rows: int, end: str = "\n") -> bytes:
    """Rows whose number is in ``n``; every seventh one is malformed."""
    lines = ['\ufeffa log with a stray " quote', "y^ n ^name"]
    for i in range(first, first + rows):
        label = " >50K" if i % 2 else "<=50K"
        number = "x" if i % 7 == 0 else ["+{}", "{}.0", " {:,} "][i % 3].format(1000 + i)
        lines.append(f'{label}^{number}^"{["ü", "a::b", "?"][i % 3]}\n{i % 3}"')
    marked, *rest = lines
    return marked.encode() + (end + end.join(rest)).encode("latin-1")


def test_every_quirk_of_text_is_read(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "day_0.csv").write_bytes(_day(0, 60))
    (raw / "day_1.csv.gz").write_bytes(gzip.compress(_day(60, 40, "\r\n")))
    (tmp_path / "spec.toml").write_text(SPEC)
    spec = load_spec(tmp_path / "spec.toml")
    options = QUARANTINE | {"max_bad_fraction": 0.5}
    manifest = run(settings(raw, tmp_path / "out", spec, **options))
    wrong = [i for i in range(100) if i % 7 == 0]
    assert manifest["rows"] == {"in": 100, "out": 100 - len(wrong), "rejected": len(wrong)}
    good = {
        "train": [i for i in range(60) if i % 7],
        "valid": [i for i in range(60, 80) if i % 7],
        "test": [i for i in range(80, 100) if i % 7],
    }
    for split, numbers in good.items():
        table = read_split(tmp_path / "out", split)
        assert table["y"].tolist() == [i % 2 for i in numbers]
        names = table["name"].tolist()
        assert [names[k] == names[0] for k in range(len(names))] == [
            i % 3 == numbers[0] % 3 for i in numbers
        ]
    first, *lines = (tmp_path / "out/rejected/day_1.csv.gz.tsv").read_text().splitlines()
    assert first == "file\tline\treason\traw"
    for i, line in zip((i for i in wrong if i >= 60), lines, strict=True):
        _, number, reason, text = line.split("\t", 3)
        assert int(number) == 2 + 1 + i - 60  # rows, after the skipped line and the header
        assert reason.startswith("column n: 'x': expected an integer or a missing value -> ")
        assert "set nulls, trim, lenient, thousands or raw" in reason
        assert text.endswith(f'{["ü", "a::b", "?"][i % 3]}\\n{i % 3}"')
