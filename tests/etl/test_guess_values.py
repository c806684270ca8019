"""What ``python -m etl guess`` finds in the values of one column, and between columns."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvt_torchrec.etl.guess.dialect import find_dialect, split_rows
from nvt_torchrec.etl.guess.values import find_time_format, profile


@pytest.mark.parametrize(
    ("texts", "name", "expected"),
    [
        (["2024-01-31", "2024-02-01"], "x", ""),
        (["2024-01-31 10:11:12.5", "2024-02-01T00:00Z"], "x", ""),
        (["2024-01-31 10:11:12.123456789 UTC", "2024-02-01T00:00:00+0000"], "x", ""),
        (["2024-13-31"], "when", None),
        (["14102123", "14103000"], "hour", "%y%m%d%H"),
        (["20141021"], "date", "%Y%m%d"),
        (["978300760"], "timestamp", "epoch_s"),
        (["978300760"], "price", None),
        (["978300760"], "candidate_id", None),
        (["978300760"], "", "epoch_s"),
        (["1700000000000"], "event_time", "epoch_ms"),
        (["12/31/2020", "1/2/2021"], "x", "%m/%d/%Y"),
        (["31/12/2020 10:00", "1/2/2021 9:05"], "x", "%d/%m/%Y %H:%M"),
        (["01/03/2024", "09/03/2024"], "x", "%d/%m/%Y"),  # nearer to each other than by %m/%d
        (["1/5/24 9:05", "2/29/24 10:00"], "x", "%m/%d/%y %H:%M"),
        (["2017-11-07 9:30", "2017-11-08 10:00"], "x", "%Y-%m-%d %H:%M"),
        (["2015-02-24 11:35:52 -0800"], "x", "%Y-%m-%d %H:%M:%S %z"),
        (["09 1, 2016", "11 29, 2014"], "x", "%m %d, %Y"),
        (["1/5/2024 3:05 PM", "12/31/2024 12:59 am"], "x", None),
        (["05-Jan-2024", "31-DEC-2024"], "x", "%d-%b-%Y"),
        (["10/Oct/2000:13:55:36 -0700"], "x", "%d/%b/%Y:%H:%M:%S %z"),
        (["99"], "hour", None),
        (["9" * 400], "time", None),
    ],
)
def test_formats_of_times(texts: list[str], name: str, expected: str | None) -> None:
    assert find_time_format(texts, name) == expected


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text(max_size=12), min_size=1, max_size=30))
def test_any_texts_have_a_profile(values: list[str]) -> None:
    found = profile(values, "x")
    assert found.rows == len(values)
    assert 0 <= found.missing <= found.rows
    assert (found.kind == "empty") == (found.missing == found.rows)


def test_integers_of_more_digits_than_python_reads() -> None:
    assert profile(["9" * 5000, "1", "-" + "8" * 4301], "x").kind == profile(["9" * 50], "x").kind


_FIELD = st.text(
    st.characters(codec="utf-8", exclude_characters='\r\n"|;,\t \x01\x00^~:#%!*'), max_size=6
)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(*[_FIELD.filter(bool)] * 4), min_size=2, max_size=20),
    st.sampled_from(["\t", ",", ";", "|", "::", "\x01"]),
)
def test_the_delimiter_is_found(rows: list[tuple[str, ...]], delimiter: str) -> None:
    text = "".join(delimiter.join(row) + "\n" for row in rows)
    dialect = find_dialect(text, "log")
    assert dialect.delimiter == delimiter
    assert split_rows(text, dialect) == [list(row) for row in rows]
