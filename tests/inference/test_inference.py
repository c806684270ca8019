"""``python -m inference predict``: files of any kind → parquet of scores."""

from __future__ import annotations

import gzip
import json
import os
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nvt_torchrec.base.auroc import auroc
from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.inference import bulk
from nvt_torchrec.inference.__main__ import main
from nvt_torchrec.inference.predictor import Predictor
from tests.inference.conftest import Trained
from tests.inference.test_predictor import read_dicts, trainers_scores
from tests.logs import random_rows, write_day


def test_raw_rows_score_as_in_the_trainers_evaluation(
    trained: Trained, tmp_path: Path, capsys
) -> None:
    output = tmp_path / "predictions.parquet"
    flags = [*trained.flags, "--input", str(trained.raw / "day_2"), "--output", str(output)]
    assert main(["predict", *flags, "--evaluate"]) == 0
    got = pq.read_table(output)
    assert got.schema.names == ["row", "probability", "label"]
    assert got.schema.types == [pa.int64(), pa.float32(), pa.uint8()]
    assert got["row"].to_pylist() == list(range(201))
    labels = [int(row[0]) for row in trained.days[2]]
    assert got["label"].to_pylist() == labels
    expected = trainers_scores(trained.parquet, trained.checkpoint)
    np.testing.assert_allclose(got["probability"].to_numpy(), expected, atol=1e-6)
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed["samples"] == 201
    assert printed["auroc"] == pytest.approx(auroc(expected, np.array(labels)), abs=1e-5)
    loss = -np.mean(np.log(np.where(np.array(labels) == 1, expected, 1 - expected)))
    assert printed["log_loss"] == pytest.approx(loss, abs=1e-5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["predictions.parquet"]


def test_csv_parquet_and_id_columns(shop: Trained, shop_predictor: Predictor, tmp_path: Path):
    """Columns outside of the spec and in it; quoted text; types of parquet; pieces and threads."""
    expected = trainers_scores(shop.parquet, shop.checkpoint)
    frame = pd.read_csv(shop.raw / "day_2.csv", dtype=str, keep_default_na=False)
    frame.insert(3, "request", [f'r"{i},x' for i in range(len(frame))])
    frame.to_csv(tmp_path / "rows.csv.gz", index=False)
    rows = pd.DataFrame(read_dicts(shop.raw / "day_2.csv", shop_predictor.spec))
    table = pa.Table.from_pandas(rows.assign(request=np.arange(len(rows)) * 10))
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=37)
    pq.write_table(table.drop(["clicked"]), tmp_path / "bare.parquet")
    for name, requests in (
        ("rows.csv.gz", frame["request"].tolist()),
        ("rows.parquet", [10 * i for i in range(400)]),
        ("bare.parquet", [10 * i for i in range(400)]),
    ):
        for workers, piece_bytes in ((1, 1 << 20), (3, 3000)):
            output = tmp_path / f"{name}.{workers}"
            scored = bulk.predict_file(
                shop_predictor,
                str(tmp_path / name),
                output,
                id_columns=("request", "country"),
                workers=workers,
                piece_bytes=piece_bytes,
            )
            assert scored.rows == 400
            got = pq.read_table(output)
            label = [] if name.startswith("bare") else ["label"]
            assert got.schema.names == ["row", "request", "country", "probability", *label]
            assert got["row"].to_pylist() == list(range(400))
            assert got["request"].to_pylist() == requests
            countries = [value or "" for value in got["country"].to_pylist()]
            assert countries == frame["country"].tolist()
            np.testing.assert_allclose(got["probability"].to_numpy(), expected, atol=1e-6)
    lines = [json.dumps(row) for row in read_dicts(shop.raw / "day_2.csv", shop_predictor.spec)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    bulk.predict_file(shop_predictor, str(tmp_path / "rows.jsonl"), tmp_path / "of_json")
    got = pq.read_table(tmp_path / "of_json")["probability"].to_numpy()
    np.testing.assert_allclose(got, expected, atol=1e-6)
    (tmp_path / "bare.csv").write_text(",".join(frame) + "\n")  # a header, which was a traceback
    with pytest.raises(BadInputError, match=r"bare\.csv has no rows"):
        bulk.predict_file(shop_predictor, str(tmp_path / "bare.csv"), tmp_path / "none")


def test_without_labels_with_unseen_and_missing_values(trained: Trained, tmp_path: Path) -> None:
    rows = random_rows(50, 99)
    rows[0] = ["0", *["-77"] * 13, *["ffffffff"] * 26]
    rows[1] = ["0", *[""] * 39]
    text = "\n".join("\t".join(row[1:]) for row in rows).encode()
    (tmp_path / "rows.gz").write_bytes(gzip.compress(text))
    output = tmp_path / "p.parquet"
    flags = [*trained.flags, "--input", str(tmp_path / "rows.gz"), "--output", str(output)]
    assert main(["predict", *flags, "--evaluate"]) == 2
    assert main(["predict", *flags, "--id_columns", "cat_1"]) == 0
    got = pq.read_table(output)
    assert got.schema.names == ["row", "cat_1", "probability"]
    assert got["cat_1"].to_pylist() == [row[15] for row in rows]
    scores = got["probability"].to_numpy()
    assert ((scores > 0) & (scores < 1)).all()


def test_bad_rows(trained: Trained, predictor: Predictor, tmp_path: Path, capsys) -> None:
    rows = [list(row) for row in trained.days[2]]
    rows[9][30] = "xyz"
    rows[150][3] = "1.5"
    write_day(tmp_path / "day", rows)
    output = tmp_path / "p.parquet"
    flags = [*trained.flags, "--input", str(tmp_path / "day"), "--output", str(output)]
    assert main(["predict", *flags]) == 2
    assert "day, line 10: column cat_16: 'xyz'" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["day"]
    assert main(["predict", *flags, "--on_bad_rows", "quarantine", "--id_columns", "cat_0"]) == 0
    got = pq.read_table(output)
    good = [i for i in range(201) if i not in (9, 150)]
    assert got["row"].to_pylist() == good
    assert got["cat_0"].to_pylist() == [rows[i][14] for i in good]
    expected = trainers_scores(trained.parquet, trained.checkpoint)[good]
    np.testing.assert_allclose(got["probability"], expected, atol=1e-6)
    header, first, second = (tmp_path / "p.parquet.rejected.tsv").read_text().splitlines()
    assert header == "line\treason\traw"
    assert first.split("\t", 2)[0] == "10"
    assert first.split("\t", 2)[2] == "\t".join(rows[9])
    assert second.startswith("151\tcolumn int_2: '1.5'")


@pytest.mark.parametrize("bad", [range(60), range(201)])
@pytest.mark.parametrize("kind", ["day", "day.parquet", "day.jsonl"])
def test_a_piece_without_a_good_row(trained: Trained, predictor, tmp_path: Path, kind, bad) -> None:
    rows = [[*row[:20], "bad!" if i in bad else row[20], *row[21:]] for i, row in
            enumerate(trained.days[2])]  # fmt: skip
    names = predictor.spec.file_columns(label=True)
    table = pa.table({name: [row[i] or None for row in rows] for i, name in enumerate(names)})
    if kind == "day":
        write_day(tmp_path / kind, rows)
    elif kind == "day.parquet":
        pq.write_table(table, tmp_path / kind, row_group_size=20)
    else:
        lines = map(json.dumps, table.to_pylist())
        (tmp_path / kind).write_text("".join(f"{line}\n" for line in lines))
    scored = bulk.predict_file(
        predictor, str(tmp_path / kind), tmp_path / "p", reject=True, piece_bytes=4000,
        file_format="json" if kind == "day.jsonl" else None,
    )  # fmt: skip
    assert (scored.rows, scored.rejected) == (201 - len(bad), len(bad))
    assert pq.read_table(tmp_path / "p")["row"].to_pylist() == list(range(len(bad), 201))


@pytest.mark.parametrize("kind", ["fifo", "/dev/zero"])
def test_what_is_no_regular_file(predictor: Predictor, tmp_path: Path, kind: str) -> None:
    """It has no end, or no beginning."""
    os.mkfifo(tmp_path / "fifo")
    for file_format in (None, "parquet", "json"):
        with pytest.raises(BadInputError, match="not a regular file"):
            bulk.predict_file(
                predictor, str(tmp_path / kind), tmp_path / "p", file_format=file_format
            )


def test_many_pieces_and_an_interrupted_run(
    trained: Trained, predictor: Predictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few pieces are written together: the same rows. An interrupted run leaves nothing."""
    rows = [list(row) for row in trained.days[0]]
    rows[5][20] = rows[150][20] = "bad!"
    write_day(tmp_path / "day", rows)
    output = tmp_path / "p.parquet"

    def score() -> bulk.Scored:
        return bulk.predict_file(
            predictor, str(tmp_path / "day"), output, reject=True, workers=2, piece_bytes=4000
        )

    scored = score()
    whole, rejected = pq.read_table(output), scored.rejected_file.read_bytes()
    assert (scored.rows, scored.rejected) == (len(whole), 2) == (len(rows) - 2, 2)
    assert rejected.count(b"\n") == 3
    output.unlink()
    scored.rejected_file.unlink()
    monkeypatch.setattr(bulk, "PART_PIECES", 2)
    genuine = bulk._score

    def work(predictor, piece, *rest):
        if piece.first > len(rows) // 2:
            raise KeyboardInterrupt
        return genuine(predictor, piece, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(bulk, "_score", work)
        with pytest.raises(KeyboardInterrupt):
            score()
    assert [path.name for path in tmp_path.iterdir()] == ["day"]
    assert score() == scored
    assert pq.read_table(output) == whole
    assert scored.rejected_file.read_bytes() == rejected


def test_an_output_is_not_overwritten(trained: Trained, tmp_path: Path, capsys) -> None:
    (tmp_path / "p.parquet").write_text("precious")
    flags = [
        *trained.flags,
        "--input",
        str(trained.raw / "day_2"),
        "--output",
        str(tmp_path / "p.parquet"),
    ]
    assert main(["predict", *flags]) == 2
    assert "p.parquet exists" in capsys.readouterr().err
    assert (tmp_path / "p.parquet").read_text() == "precious"
    flags[-1] = "/proc/none/p.parquet"
    assert main(["predict", *flags]) == 2
    assert "/proc/none/p.parquet: cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--id_columns", "cat_77"], "column cat_77 of --id_columns is missing\n.*did you mean"),
        (["--id_columns", "row"], "'row' is in the output already"),
        (["--bundle", "b"], "no model, or two\n.*--bundle, or both"),
        (["--device", "cuda:77"], "--device cuda:77: .*\n.*cpu"),
        (["--input", "tests"], "tests: a directory\n.*one of its files"),
        (["--format", "csv"], "column .* is not in the header"),
        (["--output", "scores.csv"], r"scores are written as parquet\n.*scores\.parquet"),
    ],
)
def test_flags(trained: Trained, tmp_path: Path, capsys, flags: list[str], message: str) -> None:
    output = tmp_path / "p.parquet"
    given = [*trained.flags, "--input", str(trained.raw / "day_2"), "--output", str(output)]
    assert main(["predict", *given, *flags]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not any(tmp_path.iterdir())
