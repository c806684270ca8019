"""The report's numbers are those of the log, counted in plain Python, and its page is whole."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from nvt_torchrec.base.auroc import column_auroc
from nvt_torchrec.etl.finish import report as report_data
from nvt_torchrec.etl.finish.report import collect
from nvt_torchrec.etl.run import run
from nvt_torchrec.formats.feature_spec.toml_file import load_spec
from nvt_torchrec.formats.manifest import Manifest
from nvt_torchrec.formats.splits import SPLITS
from nvt_torchrec.workflows.description import inspect
from tests.etl.runs import QUARANTINE, cut, read_split, settings
from tests.layout import find_overflows
from tests.logs import CRITEO, write_day, write_log
from tests.spec_logs import write_spec_log

ROWS = [300, 200, 151]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list]:
    directory = tmp_path_factory.mktemp("report")
    days = write_log(directory / "raw", ROWS)
    days[0][0][-1] = days[1][0][-1] = "<b>"  # not hexadecimal: two bad rows
    for day in (0, 1):
        write_day(directory / "raw" / f"day_{day}", days[day])
    run(settings(directory / "raw", directory / "out", **QUARANTINE))
    return directory / "out", [days[0][1:], days[1][1:], days[2]]


@pytest.fixture(scope="module")
def retail(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("retail")
    spec = load_spec("retail")
    write_spec_log(directory / "raw", spec, rows=400)
    run(settings(directory / "raw", directory / "out", spec))
    return directory / "out"


def data_of(output: Path) -> tuple[dict, report_data.ReportData]:
    manifest = Manifest.read(output / "manifest.json")
    return manifest, collect(output, manifest, inspect(output / "workflow"))


class Page(HTMLParser):
    """Checks that tags are closed in their order; collects texts and attributes."""

    VOID = frozenset({"meta", "line", "rect", "i", "br"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.texts, self.attributes = [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.attributes += [(tag, *attribute) for attribute in attrs]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list) -> None:
        self.attributes += [(tag, *attribute) for attribute in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.mark.parametrize("which", ["done", "retail"])
def test_the_page_is_whole_and_loads_nothing(which: str, request: pytest.FixtureRequest):
    value = request.getfixturevalue(which)
    text = ((value[0] if which == "done" else value) / "report.html").read_text()
    page = Page(text)
    assert not {tag for tag, *_ in page.attributes} & {"script", "link", "img", "iframe"}
    assert not {name for _, name, _ in page.attributes} & {"src", "href", "onload"}
    assert "://" not in text
    assert "url(" not in text
    assert "@import" not in text
    assert "prefers-color-scheme: dark" in text
    assert "<b>" not in "".join(re.findall(r"<td class=\"mono.*?</td>", text))
    for heading in ("Rows and click rate by day", "Each column alone", "Missing values",
                    "Dense columns", "Categorical columns", "Most frequent values",
                    "Rejected rows", "Time per stage", "Settings and versions"):  # fmt: skip
        assert any(heading in one for one in page.texts), heading


def test_missing_and_unseen_shares(done: tuple[Path, list]):
    output, days = done
    splits = cut(days)
    _, data = data_of(output)
    for j, column in enumerate(data.dense):
        for split in SPLITS:
            fields = [row[1 + j] for row in splits[split]]
            assert column.missing[split] == fields.count("") / len(fields)
    for j, column in enumerate(data.categorical):
        train = {row[14 + j] for row in splits["train"]}
        for split in SPLITS:
            fields = [row[14 + j] for row in splits[split]]
            unseen = sum(field not in train for field in fields if field)
            assert column.missing[split] == fields.count("") / len(fields)
            assert column.oov[split] == unseen / len(fields)
    assert any(column.oov["test"] for column in data.categorical)


def test_most_frequent_values_and_how_many_make_99_percent(done: tuple[Path, list]):
    output, days = done
    train = cut(days)["train"]
    _, data = data_of(output)
    for j, column in enumerate(data.categorical):
        counts = Counter(row[14 + j] for row in train)
        counts.pop("", None)
        expected = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        assert [(value, n) for value, n, *_ in column.top] == expected[: report_data.TOP]
        assert [s for _, _, s, _ in column.top] == [n / len(train) for _, n in expected[:5]]
        assert column.values == len(counts)
        wanted, seen, maximum = 0.99 * sum(counts.values()), 0, 0
        while seen < wanted:
            seen += expected[maximum][1]
            maximum += 1
        assert column.values_for_99 == maximum


def test_each_column_alone_and_the_click_rates_of_frequent_values(done: tuple[Path, list]):
    output, days = done
    _, data = data_of(output)
    train = cut(days)["train"]
    labels = np.array([float(row[0]) for row in train])
    for j, column in enumerate(data.categorical):
        written = read_split(output, "train")[column.name]
        assert column.auroc == column_auroc(pa.array(written), labels)
        for value, *_, rate in column.top:
            assert rate == pytest.approx(labels[[row[14 + j] == value for row in train]].mean())
    text = (output / "report.html").read_text()
    ranked = sorted([*data.dense, *data.categorical], key=lambda column: -column.auroc)
    best = f"649 rows, 2 rejected; the best single column is {ranked[0].name}, with AUROC"
    assert f"{best} {ranked[0].auroc:.3f} alone: a model of all columns should be above" in text
    assert 'label <span class="mono">label</span>; split by days: train 0 to 1, valid 2' in text
    section = text.split("Each column alone</h2>")[1].split("<h2>")[0]
    names = re.findall(r"<td>(\w+)</td>", section)
    assert names == [column.name for column in ranked]


def test_click_rates_of_values_that_columns_share_are_of_all_of_them(retail: Path):
    _, data = data_of(retail)
    train = read_split(retail, "train")
    (column,) = (column for column in data.categorical if column.name == "recent_products")
    labels = train["clicked"].to_numpy()
    in_lists = labels.repeat(train["recent_products"].map(len))
    ids = np.concatenate([train["product"], *train["recent_products"]])
    for i, (*_, rate) in enumerate(column.top):
        hits = np.concatenate([labels, in_lists])[ids == 3 + i]
        assert rate == pytest.approx(hits.mean())
    assert 0.3 < column.auroc < 0.7


def test_columns_that_give_the_label_away_are_warnings(tmp_path: Path):
    days = write_log(tmp_path / "raw", [300, 100])
    for day, rows in enumerate(days):
        for row in rows:
            row[0] = str(int(row[1][-1:] in tuple("01234")))
            row[1], row[14] = str(5 * int(row[0])), "aaaaaaaa" if row[0] == "1" else ""
        write_day(tmp_path / "raw" / f"day_{day}", rows)
    run(settings(tmp_path / "raw", tmp_path / "out"))
    text = re.sub(r"<.*?>", "", (tmp_path / "out" / "report.html").read_text())
    for name in ("int_0", "cat_0"):
        assert f"Warning: {name} alone has AUROC 1.000: it may give label away. Remedy: un" in text
    assert text.count("Warning: ") == 2
    assert "with AUROC 1.000 alone." in text
    assert text.index("the best single column") < text.index("Warning") < text.index("rows read")


@pytest.mark.parametrize("which", ["done", "retail"])
def test_nothing_is_cut_or_scrolls_sideways(which: str, tmp_path: Path, request):
    value = request.getfixturevalue(which)
    text = ((value[0] if which == "done" else value) / "report.html").read_text()
    page = tmp_path / "report.html"
    page.write_text(text.replace("recent_products", "products_looked_at_in_the_last_30_days"))
    assert find_overflows(page, tmp_path) == []


@pytest.mark.parametrize("transform", ["log_normalize", "log", "normalize"])
def test_dense_values_before_are_the_raw_ones(tmp_path: Path, transform: str):
    days = write_log(tmp_path / "raw", [80, 40])
    spec = dataclasses.replace(CRITEO, dense_transform=transform)
    run(settings(tmp_path / "raw", tmp_path / "out", spec))
    description = inspect(tmp_path / "out" / "workflow")
    minimum = -(10**9) if transform == "normalize" else -2
    written = read_split(tmp_path / "out", "train")
    for j, name in enumerate(CRITEO.dense_names):
        raw = [max(int(row[1 + j] or 0), minimum) for row in days[0]]
        values = written[name].to_numpy(np.float64)
        assert report_data.undo_transform(values, name, description).tolist() == raw


def test_shares_of_list_columns_are_of_ids_and_hashed_columns_have_none(retail: Path):
    manifest, data = data_of(retail)
    by_name = {column.name: column for column in data.categorical}
    for split in SPLITS:
        ids = read_split(retail, split)["recent_products"]
        total = sum(map(len, ids))
        unseen = sum(int((one == 2).sum()) for one in ids)
        assert total > manifest["splits"][split]["rows"]
        assert by_name["recent_products"].oov[split] == unseen / total
    assert by_name["user"].oov is None
    assert by_name["user"].values is None
    assert by_name["user"].top == []
    assert by_name["product"].top == by_name["recent_products"].top


def test_rows_and_click_rate_of_each_day(done: tuple[Path, list]):
    output, days = done
    titles = re.findall(r"<title>day (.*?)</title>", (output / "report.html").read_text())
    clicks = [sum(row[0] == "1" for row in day) for day in days]
    assert titles == [
        *(f"{i}: {len(day)}" for i, day in enumerate(days)),
        *(f"{i}: {n / len(day):.2%}" for i, (n, day) in enumerate(zip(clicks, days, strict=True))),
    ]


def test_the_page_says_what_was_rejected_and_how_long_it_took(done: tuple[Path, list]):
    output, _ = done
    text = (output / "report.html").read_text()
    assert "2 of 651 rows break the spec" in text
    timings = json.loads((output / "timings.json").read_text())
    for stage in timings["seconds"]:
        assert f"<td>{stage}</td>" in text
    sizes = json.loads((output / "manifest.json").read_text())["num_embeddings_per_feature"]
    assert f"--num_embeddings_per_feature {sizes}" in text
