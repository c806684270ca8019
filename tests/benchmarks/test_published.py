"""The benchmark on data sets with published tables: its rows, its peers, and what it keeps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks import published
from benchmarks.frappe_rebuilt import rebuild_train
from benchmarks.published import Results, format_table
from benchmarks.published_data import DATA, FRAPPE_COLUMNS, Published
from benchmarks.published_peers import Rows

USERS, ITEMS_OF_USER, LOG_ROWS = 12, 8, 240


def make_frappe() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return a log like Frappe's, as text, and the rows with negative ones that are made of it."""
    random = np.random.default_rng(0)
    log = pd.DataFrame({name: random.integers(0, 3, LOG_ROWS) for name in FRAPPE_COLUMNS})
    log["user"] = random.integers(0, USERS, LOG_ROWS)
    log["item"] = 10 * log["user"] + random.integers(0, ITEMS_OF_USER, LOG_ROWS)
    ids = pd.DataFrame()
    first = 0
    for name in FRAPPE_COLUMNS:
        numbers, values = pd.factorize(log[name])
        ids[name] = numbers + first
        first += len(values)
    rows = [ids.assign(label=1)]
    for _, of_user in ids.groupby("user"):
        twice = pd.concat([of_user, of_user])
        free = np.setdiff1d(ids["item"], of_user["item"])
        rows.append(twice.assign(item=random.choice(free, len(twice), replace=False), label=0))
    table = pd.concat(rows)[["label", *FRAPPE_COLUMNS]]
    return log.astype(str), table.iloc[random.permutation(len(table))].reset_index(drop=True)


def sort_rows(rows: pd.DataFrame, columns: tuple[str, ...]) -> list[list[int]]:
    return sorted(rows[list(columns)].to_numpy().tolist())


def write_libfm(rows: pd.DataFrame, path: Path) -> None:
    lines = []
    for label, *ids in rows.to_numpy().tolist():
        lines.append(" ".join([f"{1 if label else -1}", *(f"{number}:1" for number in ids)]))
    path.write_text("\n".join(lines) + "\n")


def test_frappe_is_rebuilt_but_for_the_items_of_negative_rows():
    log, table = make_frappe()
    train, known = table.iloc[:500], table.iloc[500:]
    found = rebuild_train(log, known)
    context = tuple(name for name in FRAPPE_COLUMNS if name != "item")
    for label, columns in ((1, FRAPPE_COLUMNS), (0, context)):
        expected = sort_rows(train[train["label"] == label], columns)
        assert sort_rows(found[found["label"] == label], columns) == expected
    whole = pd.concat([found, known])
    items = whole.groupby(["user", "item"])["label"].agg(["max", "size"])
    assert (items.loc[items["max"] == 0, "size"] == 1).all(), "a negative item once a user"
    mixed = whole[whole["label"] == 0].merge(whole[whole["label"] == 1], on=["user", "item"])
    assert mixed.empty, "no negative item that the user has used"
    assert found["label"].iloc[:50].nunique() == 2, "in random order"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with Frappe in the files of NFM and the original log; results go elsewhere."""
    log, table = make_frappe()
    data = tmp_path / "data" / "frappe"
    data.mkdir(parents=True)
    write_libfm(table.iloc[500:600], data / "frappe.validation.libfm")
    write_libfm(table.iloc[600:], data / "frappe.test.libfm")
    log.assign(cnt="1").to_csv(data / "frappe.csv", sep="\t", index=False)
    monkeypatch.setattr(published, "BUILD", tmp_path / "build")
    return data.parent


def test_rows_of_libfm_are_those_of_csv(folder, tmp_path):
    _, table = make_frappe()
    output = tmp_path / "output"
    output.mkdir()
    DATA["frappe"].write(folder / "frappe", output)
    text = (output / "test.csv").read_bytes().decode()
    assert text.startswith(f"label,{','.join(FRAPPE_COLUMNS)}\r\n")
    assert pd.read_csv(output / "test.csv").equals(table.iloc[600:].reset_index(drop=True))
    (note, *_) = DATA["frappe"].compare_digests(folder / "frappe", output)
    assert note.startswith("train.csv is not the published file (md5 ba7306e6")


def test_an_interrupted_run_goes_on_and_others_are_left_out(folder, monkeypatch, capsys):
    """The ETL and the peers are run; the trainer is not."""
    started: list[tuple[str, int]] = []
    whole = published.Job.run

    def run_job(job: published.Job) -> dict:
        started.append((job.key["system"], job.key["seed"]))
        if len(started) == 4:
            raise KeyboardInterrupt
        if job.log_path is None:
            return whole(job)
        auroc = 0.9 + 0.01 * job.key["seed"]
        return {**job.key, "auroc": auroc, "log_loss": 0.2, "cpu_s": 7.0, "wall_s": 8.0}

    monkeypatch.setattr(published.Job, "run", run_job)
    settings = ["--data_path", str(folder), "--only", "frappe,tags,last_fm"]
    settings += ["--models", "dlrm,din"]
    settings += ["--peers", "regression,lightgbm", "--seeds", "3"]
    assert published.main(settings) == 130
    assert published.main(settings) == 0
    # din has no histories here; regression and trees depend on no seed
    first = [("dlrm", 0), ("regression", 0), ("lightgbm", 0), ("dlrm", 1)]
    assert started == [*first, ("dlrm", 1), ("dlrm", 2)]
    text, said = capsys.readouterr()
    assert "### Frappe, BARS' frappe_x1" in text
    assert "| **dlrm** | 0.91000 | 0.90000 – 0.92000 | 0.2000 | 7 |  |" in text
    assert "| logistic regression, C chosen on valid | 0." in text
    assert "| LightGBM, early stopping | 0." in text
    assert "| published: DLRM | 0.983995 |  | 0.144441 |  | BARS 5b5e61f" in text
    assert "train.csv is not the published file" in text
    assert "last_fm is skipped: " in said
    assert "data/last_fm has no item_index2entity_id.txt" in said
    assert "data/tags has no train.csv or ml-tag.train.libfm" in said
    count = len(started)
    published.main([*settings, "--", "--epochs", "2"])
    assert started[count:] == [("dlrm", 0), ("dlrm", 1), ("dlrm", 2)], "with other flags"


def test_a_failed_run_is_done_again(tmp_path):
    job = published.Job({"data": "x", "rows": "1", "system": "dlrm", "seed": 0}, [])
    path = tmp_path / "results.jsonl"
    Results(path).add({**job.key, "error": "no memory"})
    assert Results(path).find(job) is None
    Results(path).add({**job.key, "auroc": 0.7})
    assert Results(path).find(job)["auroc"] == 0.7
    assert Results(path).find(published.Job({**job.key, "seed": 1}, [])) is None
    failed = {"dlrm": [{**job.key, "error": "no memory"}]}
    figures = [Published("KGCN", 0.796, None, "a paper")]
    text = format_table("x", failed, figures, ["a note"])
    assert "| **dlrm** | failed |  |  |  | no memory |" in text
    assert "| published: KGCN | 0.796 |  |  |  | a paper |" in text
    assert text.endswith("One seed.\na note")


def test_kgcns_split_has_a_negative_item_for_each_positive_one(tmp_path):
    lines = [f"{user}\t{10 * item}\t3" for user in range(2, 9) for item in range(user)]
    (tmp_path / "user_artists.dat").write_text("\n".join(["userID\tartistID\tweight", *lines]))
    items = "".join(f"{10 * item}\te{item}\n" for item in range(1, 30))
    (tmp_path / "item_index2entity_id.txt").write_text(items)
    DATA["last_fm"].write(tmp_path, tmp_path)
    parts = [pd.read_csv(tmp_path / f"{part}.csv") for part in ("train", "valid", "test")]
    rows = pd.concat(parts)
    assert [len(part) for part in parts] == [34, 11, 11]
    assert not rows.duplicated(["user", "item"]).any()
    counts = rows.groupby("user")["label"].agg(["sum", "size"])
    assert (counts["size"] == 2 * counts["sum"]).all()
    assert counts["sum"].tolist() == list(range(1, 8)), "item 0 is not in the graph"


def test_lists_of_ids_are_read_by_peers(tmp_path):
    lists = pa.array([[3, 4], [], [2]], pa.list_(pa.int32()))
    table = {"label": [1.0, 0.0, 1.0], "x": [0.5, 1.0, 2.0], "genres": lists, "item": [5, 6, 5]}
    (tmp_path / "train").mkdir()
    pq.write_table(pa.table(table), tmp_path / "train" / "part.0.parquet")
    columns = {"label": "label", "dense": ["x"], "categorical": ["genres", "item"]}
    rows = Rows(tmp_path, "train", columns)
    assert rows.take_first_ids().tolist() == [[3, 5], [0, 6], [2, 5]]
    dense = rows.make_indicators({"genres": 5, "item": 7}).toarray()
    assert dense[:, 0].tolist() == [0.5, 1.0, 2.0]
    assert [np.flatnonzero(row).tolist() for row in dense[:, 1:]] == [[3, 4, 10], [11], [2, 10]]


def test_the_page_says_which_files_with_their_digests():
    text = (Path(published.__file__).parents[1] / "docs" / "quality.md").read_text()
    rows = {line.split("`")[1]: line for line in text.splitlines() if line.startswith("| `")}
    assert set(rows) == set(DATA)
    for name, data in DATA.items():
        assert [digest for digest in data.digests.values() if f"`{digest}`" not in rows[name]] == []
