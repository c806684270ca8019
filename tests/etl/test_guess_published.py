"""What ``python -m etl guess`` makes of tables like published ones: labels, ids, outcomes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.etl.commands.guess import guess, guess_spec
from nvt_torchrec.etl.guess.names import contains_outcome, is_code
from nvt_torchrec.formats.feature_spec import FeatureSpec
from tests.etl.runs import etl_run
from tests.etl.test_guess import columns_of, guessed_with_text
from tests.lookalikes import tables

ROWS = 1500


def guess_table(name: str, directory: Path, delimiter: str = ",") -> tuple[FeatureSpec, str]:
    path = directory / "raw" / "log.csv"
    return guessed_with_text(
        tables.write_table(path, getattr(tables, name), ROWS, delimiter=delimiter)
    )


def test_a_last_column_of_0_and_1_is_the_label_rather_than_texts(tmp_path: Path) -> None:
    spec, text = guess_table("german_credit", tmp_path)
    assert spec.labels == ["credit_risk"]
    assert "status" in spec.categorical_names
    assert "also possible: status" in text
    assert "duration" in spec.dense_names  # of the loan: it is known before


def test_a_label_of_numbers_has_a_threshold(tmp_path: Path) -> None:
    spec, _ = guess_table("labelled_ratings", tmp_path)
    assert [(rule.name, rule.threshold) for rule in spec.label_rules] == [("label", 4)]
    assert {"user", "item", "sex"} <= set(spec.categorical_names)
    spec, _ = guess_table("feedback", tmp_path)
    assert [(rule.name, rule.threshold) for rule in spec.label_rules] == [("Feedback", 8)]


def test_what_a_user_is_like_is_no_label(tmp_path: Path) -> None:
    """Two texts of which each user has one, beside flags that differ within a user's rows."""

    def make(rng: random.Random, i: int) -> tables.Row:
        user = rng.randint(1, 200)
        return {
            "user_id": user,
            "premium": "yes" if user % 3 == 0 else "no",
            "answer": rng.choice(["yes", "no"]),
            "site": rng.choice("abc"),
        }

    spec, _ = guessed_with_text(tables.write_table(tmp_path / "raw" / "log.csv", make, ROWS))
    assert spec.labels == ["answer"]
    assert {"user_id", "premium"} <= set(spec.categorical_names)


def test_kinds_of_events_are_a_label_with_and_without_a_header(tmp_path: Path) -> None:
    spec, _ = guess_table("shop_events", tmp_path)
    assert spec.labels == ["event_type"]
    assert spec.label_rules[0].positive == ("purchase",)
    rng = random.Random(0)
    kinds = ["pv"] * 17 + ["buy", "cart", "fav"]
    rows = [
        f"{rng.randint(1, 300)},{rng.randint(1, 900)},{rng.randint(1, 200)},{rng.choice(kinds)},"
        f"{1_511_544_070 + 60 * i}\n"
        for i in range(ROWS)
    ]
    path = tmp_path / "UserBehavior.csv"
    path.write_text("".join(rows))
    spec, text = guessed_with_text(path)
    assert spec.label_rules[0].positive == ("buy",)
    assert "4 values: buy" in text
    assert [column.raw for column in spec.categorical if not column.derive] == ["int"] * 3


def test_columns_that_come_with_the_label_or_a_leak_are_left_out(tmp_path: Path) -> None:
    spec, text = guess_table("hotel_bookings", tmp_path)
    assert spec.labels == ["is_canceled"]
    assert spec.split.by == "share"
    assert "reservation_status_date: its name says that it comes with reservation_status" in text
    columns = columns_of(spec)
    assert columns.keys() >= {"lead_time", "previous_cancellations", "agent", "company"}
    assert (columns["agent"].raw, columns["company"].raw) == ("int", "int")
    spec, _ = guess_table("airlines", tmp_path)
    assert spec.labels[0] == "IsDepDelayed"
    late = {"IsArrDelayed", "ArrDelay", "DepDelay", "Cancelled"}
    assert not late & columns_of(spec).keys()
    assert {"UniqueCarrier", "CRSDepTime", "Distance"} <= columns_of(spec).keys()


def test_arrival_delays_come_with_a_label_of_departures(tmp_path: Path) -> None:
    """They give it away by their name: an AUROC of 0.95 alone is no proof."""
    path = tables.write_table(tmp_path / "raw" / "log.csv", tables.airlines, ROWS)
    spec, text = guessed_with_text(path, label="IsDepDelayed")
    assert spec.labels == ["IsDepDelayed"]
    assert not {"IsArrDelayed", "ArrDelay", "Cancelled"} & columns_of(spec).keys()
    assert "ArrDelay: known only with the label IsDepDelayed" in text


def test_how_long_a_call_took_is_left_out_where_it_is_strong(tmp_path: Path) -> None:
    spec, text = guess_table("bank_marketing", tmp_path)
    assert spec.labels == ["y"]
    assert "duration: a duration that has AUROC 0.8" in text
    assert "duration" not in columns_of(spec)
    assert {"campaign", "poutcome"} <= set(spec.categorical_names)


def test_a_time_after_the_row_is_left_out(tmp_path: Path) -> None:
    """The release of a product is before each row, and its delivery after."""
    spec, text = guess_table("orders", tmp_path)
    assert (spec.split.by, spec.split.column) == ("time", "purchase_timestamp")
    assert "delivered_at: it is later than purchase_timestamp, the time of the row" in text
    derived = [column.name for column in spec.categorical if column.derive]
    assert derived == ["release_date_weekday", "purchase_timestamp_hour"]


@pytest.mark.parametrize(
    ("name", "outcome", "expected"),
    [
        ("reservation_status_date", "reservation_status", True),
        ("ArrDelay", "IsDepDelayed", True),
        ("click_position", "click", True),
        ("cancellation_reason", "is_canceled", True),
        ("previous_cancellations", "is_canceled", False),
        ("hist_clicks", "click", False),
        ("days_since_click", "click", False),
        ("DepTime", "IsDepDelayed", False),
        ("credit_amount", "credit_risk", False),
        ("loan_amount", "loan_status", False),
        ("marital_status", "loan_status", False),
        ("class_of_worker", "class", False),
        ("f2", "f1", False),
    ],
)
def test_names_that_say_that_a_column_comes_with_an_outcome(
    name: str, outcome: str, expected: bool
) -> None:
    assert contains_outcome(name, outcome) == expected


def test_integers_of_users_and_items_are_ids(tmp_path: Path) -> None:
    spec, _ = guess_table("integer_ids", tmp_path)
    plain = {column.name: column.raw for column in spec.categorical if not column.derive}
    assert (plain, spec.dense) == ({"uid": "int", "iid": "int"}, ())
    assert is_code("vid")
    assert not is_code("bid")
    assert not is_code("YearsAtCompany")

    def make(rng: random.Random, i: int) -> tables.Row:
        return {"a": rng.randint(1, 300), "b": rng.randint(1, 500), "rating": rng.randint(1, 5)}

    path = tables.write_table(tmp_path / "raw" / "log.csv", make, ROWS)
    spec, _ = guessed_with_text(path)  # of names that say nothing
    assert spec.categorical_names == ["a", "b"]


def test_an_age_is_no_id_where_there_is_no_category(tmp_path: Path) -> None:
    def make(rng: random.Random, i: int) -> tables.Row:
        year = rng.randint(1940, 1999)
        return {"birthday": f"{year}-03-{1 + i % 28:02d}", "price": f"{rng.random():.3f}",
                "y": rng.randint(0, 1)}  # fmt: skip

    path = tables.write_table(tmp_path / "raw" / "log.csv", make, 400)
    spec, _ = guessed_with_text(path)
    assert (spec.dense_names, spec.categorical_names) == (
        ["birthday_age", "price"],
        ["price_bucket"],
    )


def test_types_behind_names_are_read_as_what_they_say(tmp_path: Path) -> None:
    spec, text = guess_table("recbole", tmp_path, "\t")
    columns = columns_of(spec)
    raw = {name: column.raw for name, column in columns.items() if not column.derive}
    assert raw == {
        "price": "int32",
        "user_id": "int",
        "item_id": "int",
        "age": "int",
        "zip_code": "string",
        "class": "string",
    }
    assert columns["class"].multi_hot
    assert columns["age"].reading.sources == ("age:token",)
    assert spec.label_rules[0].source == "rating:float"
    assert spec.split.column == "timestamp:float"
    assert "vector: lists of numbers" in text
    spec_file = str(tmp_path / "raw" / "spec.toml")
    assert etl_run(tmp_path / "raw/log.csv", tmp_path / "out", "--spec", spec_file) == 0


def test_line_breaks_in_quotes_are_named_as_the_cause(tmp_path: Path) -> None:
    def write(every: int) -> str:
        def make(rng: random.Random, i: int) -> tables.Row:
            text = '"red\nshoes"' if i % every == 0 else '"red"'
            return {"click": rng.randint(0, 1), "site": rng.choice("abc"), "title": text}

        return str(tables.write_table(tmp_path / "log.csv", make, 300))

    with pytest.raises(BadInputError, match="line 2 ends within quotes, and so do 99 others") as e:
        guess(write(3))
    assert "parquet" in e.value.remedy
    made = guess_spec(write(50), "", "", 8, events=False)
    assert "6 lines end within quotes" in made.notes
    assert "6 lines end within quotes" in " ".join(made.text.replace("\n#", "").split())
