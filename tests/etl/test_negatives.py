"""Negative rows: what may be drawn, and that all else is as if the log held them."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from nvt_torchrec.base.errors import BadInputError, SettingsError
from nvt_torchrec.etl.extend.extend import extend
from nvt_torchrec.etl.run import run
from nvt_torchrec.etl.settings import ExtendSettings
from nvt_torchrec.formats.manifest import Manifest
from nvt_torchrec.formats.splits import SPLITS
from nvt_torchrec.inference.encoder import Encoder
from nvt_torchrec.workflows.description import inspect
from tests.etl.event_logs import read_lists
from tests.etl.findings import bad
from tests.etl.negative_logs import (
    ALL,
    BY_DAYS,
    BY_TIME,
    DAY,
    STARS,
    TABLE,
    Like,
    Product,
    expand,
    load_negative_spec,
    make_likes,
    make_products,
    read_drawn,
    without_negatives,
    write_csv,
)
from tests.etl.runs import QUARANTINE, failing, read_split, settings, tree

#: Which items there are at the time of a row, and how likely each is.
RULES = {
    "of the log": ("", ""),
    "of a table": ('from = "items"\npopularity = 0.75', TABLE),
}


def write_log(raw: Path, likes: list[Like], products: list[Product]) -> None:
    """Write a file for each day, and the table."""
    raw.mkdir()
    for day in sorted({like.time // DAY for like in likes}):
        write_csv(raw / f"day_{day}.csv", [like for like in likes if like.time // DAY == day])
    write_csv(raw / "items.csv", products)


def find_first_times(likes: list[Like], products: list[Product] | None) -> dict[int, int]:
    """Return, by item, since when there is one."""
    first: dict[int, int] = {}
    rows = [(product.id, product.since) for product in products or []]
    if products is None:
        rows = [(int(like.item), like.time) for like in likes if like.item]
    for item, time in rows:
        first[item] = min(time, first.get(item, time))
    return first


@pytest.mark.parametrize("split", [BY_DAYS, BY_TIME])
@pytest.mark.parametrize(("negatives", "table"), RULES.values(), ids=RULES)
def test_items_that_there_were_and_the_user_does_not_have(
    tmp_path: Path, split: str, negatives: str, table: str
) -> None:
    likes, products = make_likes(400, 3), make_products()
    write_log(tmp_path / "raw", likes, products)
    if not table and split == BY_DAYS:  # nothing names a time: all items are there from the begin
        first = dict.fromkeys(find_first_times(likes, None), -1)
    else:
        first = find_first_times(likes, products if table else None)
    spec = load_negative_spec(tmp_path, split, negatives=negatives, more=table)
    run(settings(tmp_path / "raw", tmp_path / "out", spec))
    owned = {(like.user, int(like.item)) for like in likes if like.liked and like.item}
    seen = []
    for name in SPLITS:
        rows = expand(likes, read_drawn(tmp_path / "out", name))
        seen += rows
        for like in [row for row in rows if row.item]:
            drawn = [int(row.item) for row in rows if row.number == like.number][1:]
            allowed = {item for item, time in first.items() if time < like.time}
            allowed -= {int(likes[like.number].item)}
            if like.user:
                allowed -= {item for user, item in owned if user == like.user}
            assert set(drawn) <= allowed
            assert len(set(drawn)) == len(drawn)
            is_positive = likes[like.number].liked and likes[like.number].item
            assert len(drawn) == (min(3, len(allowed)) if is_positive else 0)
    assert {row.number for row in seen} == set(range(len(likes)))
    counts = Manifest.read(tmp_path / "out/manifest.json").rows
    num_drawn = len(seen) - len(likes)
    assert counts == {"in": 400, "out": len(seen), "rejected": 0, "drawn": num_drawn}
    assert num_drawn > 400
    assert bad(tmp_path / "out") == []


@pytest.mark.parametrize(("negatives", "table"), RULES.values(), ids=RULES)
def test_a_log_that_holds_the_rows_gives_the_same(
    tmp_path: Path, negatives: str, table: str
) -> None:
    """The vocabularies byte for byte, the parquet value for value, those of tables, too."""
    likes, products = make_likes(400, 3), make_products()
    write_log(tmp_path / "raw", likes, products)
    spec = load_negative_spec(tmp_path, BY_TIME, negatives=negatives, more=table)
    run(settings(tmp_path / "raw", tmp_path / "out", spec, block_mb=1))
    rows = []
    for name in SPLITS:
        rows += expand(likes, read_drawn(tmp_path / "out", name))
    write_log(tmp_path / "expanded", rows, products)
    run(settings(tmp_path / "expanded", tmp_path / "expected", without_negatives(spec)))
    for name in SPLITS:
        found, expected = (read_split(tmp_path / out, name) for out in ("out", "expected"))
        # A log that holds the rows does not say how likely they were.
        found = found.drop(columns="log_q_correction", errors="ignore")
        pd.testing.assert_frame_equal(found, expected)
    for file in (tmp_path / "expected").glob("workflow/artifacts/**/*.parquet"):
        other = tmp_path / "out" / file.relative_to(tmp_path / "expected")
        assert other.read_bytes() == file.read_bytes(), file.name


EVENTS = """
[events]
time = "time"
time_format = "epoch_s"
[[aggregate]]
of = "user"
values = ["count", "since", "sum(hour)", "distinct(item)"]
transform = "normalize"
[[aggregate]]
of = "item"
values = ["count", "rate"]
smoothing = 2
transform = "normalize"
[[history]]
name = "recent"
of = "user"
columns = "item"
"""


def test_what_was_drawn_is_no_event(tmp_path: Path) -> None:
    """Aggregates of a row that was drawn are those of its user and of its own item."""
    likes = make_likes(300, 3)
    write_log(tmp_path / "raw", likes, make_products())
    spec = load_negative_spec(tmp_path, BY_TIME, more=EVENTS)
    run(settings(tmp_path / "raw", tmp_path / "out", spec))
    statistics = inspect(tmp_path / "out/workflow").statistics
    for name in SPLITS:
        rows = expand(likes, read_drawn(tmp_path / "out", name))
        there, lists = read_split(tmp_path / "out", name), read_lists(tmp_path / "out", name)
        values: dict[str, list[float]] = {column.name: [] for column in spec.aggregates}
        for index, row in enumerate(rows):
            before = [like for like in likes if like.time < row.time]
            of_user = [like for like in before if row.user and like.user == row.user]
            of_item = [
                like
                for like in before
                if row.item and like.item and int(like.item) == int(row.item)
            ]
            hour = [like for like in before if like.time // 3600 < row.time // 3600]
            prior = sum(like.liked for like in hour) / len(hour) if hour else math.nan
            liked = sum(like.liked for like in of_item)
            values["user_count"].append(len(of_user))
            last = max((like.time for like in of_user), default=math.nan)
            values["user_since"].append(row.time - last)
            values["user_hour_sum"].append(sum(like.hour for like in of_user))
            items = {int(like.item) for like in of_user if like.item}
            values["user_item_distinct"].append(len(items))
            values["item_count"].append(len(of_item))
            values["item_liked_rate"].append((liked + 2 * prior) / (len(of_item) + 2))
            assert len(lists["recent.item"][index]) == len(of_user)
        for column in spec.aggregates:
            of, raw = statistics[column.name], values[column.name]
            filled = np.where(np.isnan(raw), column.fill, raw)
            expected = (filled - of["mean"]) / (of["std"] or 1)
            np.testing.assert_allclose(there[column.name], expected, 1e-5, 1e-5, column.name)


def test_workers_of_a_cluster_draw_the_same(tmp_path: Path, dask_client) -> None:
    write_log(tmp_path / "raw", make_likes(300, 3), make_products())
    spec = load_negative_spec(
        tmp_path, BY_TIME, negatives='from = "items"\npopularity = 1', more=TABLE + EVENTS
    )
    run(settings(tmp_path / "raw", tmp_path / "one", spec))
    address = dask_client.scheduler.address
    run(settings(tmp_path / "raw", tmp_path / "other", spec, scheduler=address))
    for name in SPLITS:
        one, other = (read_split(tmp_path / out, name) for out in ("one", "other"))
        pd.testing.assert_frame_equal(one, other)


@pytest.mark.parametrize(("negatives", "table"), RULES.values(), ids=RULES)
def test_a_day_that_is_added_is_drawn_from_all_days(
    tmp_path: Path, negatives: str, table: str
) -> None:
    """Its rows avoid what users had on earlier days; ``--undo`` leads back."""
    likes, products = make_likes(500, 4), make_products()
    raw, days = tmp_path / "raw", tmp_path / "days"
    spec = load_negative_spec(tmp_path, negatives=negatives, more=table)
    write_log(raw, [like for like in likes if like.time < 3 * DAY], products)
    run(settings(raw, tmp_path / "out", spec))
    before = tree(tmp_path / "out")
    once = tmp_path / "once"
    write_log(tmp_path / "all", likes, products)
    run(settings(tmp_path / "all", once, spec))
    added = [like for like in likes if like.time >= 3 * DAY]
    days.mkdir()
    write_csv(days / "day_3.csv", added)
    options = {"output_path": tmp_path / "out", "engine": "cpu"}
    extend(ExtendSettings(input_path=str(days / "day_3.csv"), **options))
    owned = {(like.user, int(like.item)) for like in likes if like.liked and like.item}
    drawn = []
    for name in ("valid", "test"):
        rows = expand(added, read_drawn(tmp_path / "out", name))
        drawn += [row for row in rows if row != likes[row.number]]
        if not table:  # how often items of the table are drawn stays as it was in the first run
            assert rows == expand(added, read_drawn(once, name))
    assert len(drawn) > len(added)
    assert not {(row.user, int(row.item)) for row in drawn if row.user} & owned
    assert bad(tmp_path / "out") == []
    extend(ExtendSettings(undo=True, **options))
    after = tree(tmp_path / "out")
    assert {name: after[name] for name in before} == before


def test_an_interrupted_run_draws_the_same(tmp_path: Path) -> None:
    write_log(tmp_path / "raw", make_likes(300, 3), make_products())
    spec = load_negative_spec(tmp_path, negatives='from = "items"', more=TABLE)
    run(settings(tmp_path / "raw", tmp_path / "whole", spec))
    for function in ("etl.engines.host.encode_block", "etl.finish.report.write_report"):
        with failing(f"nvt_torchrec.{function}", OSError("stop")):
            run(settings(tmp_path / "raw", tmp_path / "out", spec))
    run(settings(tmp_path / "raw", tmp_path / "out", spec))
    whole, resumed = tree(tmp_path / "whole"), tree(tmp_path / "out")
    whole.pop("manifest.json"), resumed.pop("manifest.json")  # has paths
    assert resumed == whole


def test_another_seed_draws_other_items(tmp_path: Path) -> None:
    write_log(tmp_path / "raw", make_likes(300, 3), make_products())
    drawn = []
    for number, seed in enumerate((1, 1, 2)):
        spec = load_negative_spec(tmp_path, negatives=f"seed = {seed}")
        run(settings(tmp_path / "raw", tmp_path / str(number), spec))
        drawn.append(read_drawn(tmp_path / str(number), "train"))
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]
    assert [row[0] for row in drawn[0]] == [row[0] for row in drawn[2]]


def test_with_days_an_item_of_the_same_day_is_not_there(tmp_path: Path) -> None:
    likes = make_likes(400, 4)
    write_log(tmp_path / "raw", likes, make_products())
    events = EVENTS.replace("[[aggregate]]", 'cut = "day"\n[[aggregate]]', 1)
    run(settings(tmp_path / "raw", tmp_path / "out", load_negative_spec(tmp_path, more=events)))
    first = find_first_times(likes, None)
    count = 0
    for name in SPLITS:
        rows = expand(likes, read_drawn(tmp_path / "out", name))
        for row in [row for row in rows if row != likes[row.number]]:
            assert first[int(row.item)] < row.time // DAY * DAY
            count += 1
    assert count > 300


def test_malformed_rows_are_no_positives(tmp_path: Path) -> None:
    likes = make_likes(300, 3)
    write_log(tmp_path / "raw", likes, make_products())
    with open(tmp_path / "raw/day_0.csv", "a") as file:
        file.write("300,1000,u1,99,5,no hour,t1\n")  # the only row with this item
    spec = load_negative_spec(tmp_path)
    run(settings(tmp_path / "raw", tmp_path / "out", spec, **QUARANTINE))
    drawn = Counter(item for name in SPLITS for _, item, _ in read_drawn(tmp_path / "out", name))
    assert drawn[99] == 0
    assert Manifest.read(tmp_path / "out/manifest.json").rows["rejected"] == 1


def test_popular_items_are_drawn_more_often(tmp_path: Path) -> None:
    """In proportion to (1 + c) to the power, where c are training rows with label 1."""
    rng = np.random.default_rng(0)
    likes = []
    for number in range(6000):
        item = str(rng.choice([0, 1, 2, 3], p=[0.6, 0.3, 0.08, 0.02]))
        likes.append(Like(number, 60 * number % (3 * DAY), f"u{number}", item, 5, 1, "t"))
    likes.sort(key=lambda like: like.time // DAY)
    write_log(tmp_path / "raw", likes, make_products())
    spec = load_negative_spec(tmp_path, negatives="popularity = 0.5")
    spec = dataclasses.replace(spec, negatives=dataclasses.replace(spec.negatives, per_positive=1))
    run(settings(tmp_path / "raw", tmp_path / "out", spec))
    drawn: Counter[tuple[int, int]] = Counter()
    trained = Counter()
    for number, item, label in read_drawn(tmp_path / "out", "train"):
        own = int(next(like for like in likes if like.number == number).item)
        if label:
            trained[item] += 1
        else:
            drawn[own, item] += 1
    weights = {item: math.sqrt(1 + count) for item, count in trained.items()}
    for own, count in trained.items():
        others = sum(weight for item, weight in weights.items() if item != own)
        for item in set(trained) - {own}:
            share = weights[item] / others
            tolerance = 4 * math.sqrt(share * (1 - share) / count)
            assert abs(drawn[own, item] / count - share) < tolerance, (own, item)


def test_what_is_kept_is_checked_before_a_day_is_added(tmp_path: Path) -> None:
    likes = make_likes(400, 4)
    spec = load_negative_spec(tmp_path)
    write_log(tmp_path / "raw", [like for like in likes if like.time < 3 * DAY], make_products())
    run(settings(tmp_path / "raw", tmp_path / "out", spec))
    write_csv(tmp_path / "day_3.csv", [like for like in likes if like.time >= 3 * DAY])
    file = tmp_path / "out/extension/negatives/pairs.npy"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.unlink()  # the state of a run may share it
    file.write_bytes(content)
    (finding,) = bad(tmp_path / "out")
    assert "pairs.npy: not the file that was written" in finding
    with pytest.raises(BadInputError, match=r"pairs\.npy: not the file"):
        extend(
            ExtendSettings(
                output_path=tmp_path / "out", input_path=str(tmp_path / "day_3.csv"), engine="cpu"
            )
        )


@pytest.mark.parametrize(
    ("label", "negatives", "more", "match"),
    [
        (ALL, "", EVENTS, "aggregate item_liked_rate: its label is 1 in all rows"),
        (STARS + "\nvalue = 1", "", "", "value = 1"),
        (STARS, 'from = "products"', TABLE, "from = 'products'"),
        (
            STARS,
            'from = "items"',
            TABLE.replace('{item = "id"}', '"user"'),
            "the key of table items",
        ),
        (
            STARS,
            "",
            '[[categorical]]\nnames = "both"\nfrom = ["item", "user"]\nderive = "cross"\n'
            "hash_buckets = 9",
            "column both depends on item, user",
        ),
        (STARS, "", EVENTS.replace('of = "item"', 'of = ["user", "item"]'), "it reveals the label"),
        (STARS, "popularity = -1", "", "popularity = -1"),
    ],
)
def test_negatives_that_a_spec_may_not_ask_for(
    tmp_path: Path, label: str, negatives: str, more: str, match: str
) -> None:
    with pytest.raises(SettingsError, match=match) as caught:
        load_negative_spec(tmp_path, label=label, negatives=negatives, more=more)
    assert caught.value.remedy


def test_a_table_without_the_items_of_the_log_is_refused(tmp_path: Path) -> None:
    products = [dataclasses.replace(product, id=product.id + 100) for product in make_products()]
    write_log(tmp_path / "raw", make_likes(300, 3), products)
    table = TABLE[: TABLE.index("[[dense]]")]  # no column is joined
    spec = load_negative_spec(tmp_path, negatives='from = "items"', more=table)
    with pytest.raises(SettingsError, match="table items has 0 of the"):
        run(settings(tmp_path / "raw", tmp_path / "out", spec))


def test_a_log_of_positives_has_no_column_of_its_label(tmp_path: Path) -> None:
    """Its rows have label 1, and those that are drawn 0; rows to score need neither."""
    likes = [like for like in make_likes(400, 3) if like.item and like.user]
    write_log(tmp_path / "raw", likes, make_products())
    events = EVENTS.replace(', "rate"]\nsmoothing = 2', "]")
    spec = load_negative_spec(tmp_path, BY_TIME, label=ALL, more=events)
    manifest = run(settings(tmp_path / "raw", tmp_path / "out", spec))
    splits = manifest["splits"].values()
    assert sum(split["positives"] for split in splits) == len(likes)
    assert sum(split["rows"] for split in splits) == len(likes) + manifest.rows["drawn"]
    encoder = Encoder.load(tmp_path / "out/workflow")
    columns = {"user": ["u1"], "item": [3], "number": [1.0], "hour": [2.0], "tags": ["t1"]}
    dense, ids = encoder.encode(pd.DataFrame(columns))
    assert len(dense) == 1
    assert ids.stride() == 1
