"""Refused values: what to pass instead, and which key of the spec would take them, both tried."""

from __future__ import annotations

import datetime
import json
import pickle
import re
import tomllib
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvt_torchrec.base.errors import BadInputError, BadRowError, SchemaError
from nvt_torchrec.formats.spec.feature_spec import (
    CategoricalColumn,
    DenseColumn,
    FeatureSpec,
    InputFormat,
)
from nvt_torchrec.formats.spec.reading import Derivation, Read, Reading
from nvt_torchrec.inference import InvalidRowError, Predictor
from nvt_torchrec.inference.bulk import predict_file
from nvt_torchrec.inference.inputs.columns import convert_values
from nvt_torchrec.inference.inputs.remedies import remedy_of
from nvt_torchrec.inference.server.app import RefusedError, parse_body
from nvt_torchrec.inference.server.served import Served
from tests.clicklog.test_field_rules import _TEXTS
from tests.inference.test_export import untrained

NEW_RUN = ", which takes effect with another ETL run and training"
SPEC = FeatureSpec(
    "label",
    (DenseColumn("count"), DenseColumn("price", raw="float")),
    (
        CategoricalColumn("hex"),
        CategoricalColumn("user", raw="string"),
        CategoricalColumn("tags", raw="int", multi_hot=True),
        CategoricalColumn(
            "hour", raw="int", reading=Reading(("when",)), derive=Derivation("hour", "epoch_s")
        ),
    ),
    input=InputFormat("csv"),
)
ROW = {"count": 1, "price": 0.5, "hex": "1b", "user": "u", "tags": [3], "when": 1414670400}


@pytest.fixture(scope="module")
def predictor(tmp_path_factory: pytest.TempPathFactory) -> Predictor:
    return untrained(tmp_path_factory.mktemp("remedies"), SPEC, 1)


def to(keys: str, column: str) -> str:
    return f"set {keys} for column {column} in the spec{NEW_RUN}"


@pytest.mark.parametrize(
    ("column", "value", "remedy"),
    [
        ("count", "7", "pass 7"),
        ("count", " 7", "pass 7, or " + to("trim = true", "count")),
        ("count", "260.0", "pass 260, or " + to("lenient = true", "count")),
        ("count", "1,000", "pass 1000, or " + to('thousands = ","', "count")),
        ("count", "?", "pass null if it means a missing value, or " + to('nulls = ["?"]', "count")),
        ("count", "much", "pass null if it means a missing value"),
        ("count", 18.5, to('raw = "float"', "count")),
        ("count", 2**31, to('raw = "float"', "count")),
        ("count", True, None),
        ("count", "12x", ""),
        ("price", "1.5", "pass 1.5"),
        ("price", "1e3", "pass 1000"),
        ("price", float("inf"), "pass null if it means a missing value"),
        ("price", "\udcff1", ""),
        ("hex", "xyz", to('raw = "string"', "hex")),
        ("hex", " 1B", 'pass "1B", or ' + to("trim = true", "hex")),
        # no "pass 123456789": that would be another value than these digits are
        ("hex", "123456789", to('trim = true and raw = "int"', "hex")),
        ("hex", 2**32, to('raw = "int"', "hex")),
        ("user", 12, 'pass "12"'),
        ("user", 1.5, 'pass "1.5"'),
        ("tags", "12", "pass a list of its values, such as [12]"),
        ("tags", 12, "pass a list of its values, such as [12]"),
        ("tags", [1, None], "leave missing values out of the list"),
        ("tags", [1, "7"], "pass 7"),
        ("tags", ["?"], "pass a list without it if it means a missing value, or "
         + to('nulls = ["?"]', "tags")),
        ("tags", {"a": 1}, ""),
        ("when", "2014-10-30 12:00", "pass 1414670400 if it means that time, or "
         + to("no time_format", "when")),
        ("when", 1414670400000, "pass 1414670400 if it means that time, or "
         + to('time_format = "epoch_ms"', "when")),
        ("when", datetime.time(12), ""),
    ],
)  # fmt: skip
def test_what_is_said_of_a_value(predictor: Predictor, column: str, value, remedy) -> None:
    rows = [ROW, {**ROW, column: value}]
    if remedy is None:  # it is taken
        predictor.read(rows)
        return
    columns = {name: [row[name] for row in rows] for name in ROW}
    for given_rows in (rows, columns, rows + [ROW] * 20):
        with pytest.raises(InvalidRowError) as caught:
            predictor.read(given_rows)
        error = caught.value
        assert (error.row, error.column, error.remedy) == (1, column, remedy)
        assert str(error) == f"row 1, column {column}: {error.reason}" + (
            f"\n  -> {remedy}" if remedy else ""
        )
        assert str(pickle.loads(pickle.dumps(error))) == str(error)
    try:
        body = json.dumps({"rows": rows}, allow_nan=False).encode()
    except (TypeError, ValueError):  # JSON has no such value
        return
    with pytest.raises(RefusedError) as refused:
        parse_body(body, predictor, 100)
    assert refused.value.status == 422
    where = {"error": "invalid row", "row": 1, "column": column, "reason": error.reason}
    assert refused.value.details == where | ({"remedy": remedy} if remedy else {})


def test_frames(predictor: Predictor) -> None:
    frame = pd.DataFrame([ROW] * 3, index=["a", "b", "c"]).astype({"count": object})
    frame.loc["b", "count"] = "1,000"
    expected = "pass 1000, or " + to('thousands = ","', "count")
    with pytest.raises(InvalidRowError) as caught:
        predictor.read(frame)
    assert (caught.value.row, caught.value.remedy) == (1, expected)
    texts = {**{name: [value] * 2 for name, value in ROW.items()}, "count": ["1,000", None]}
    for table in (pa.table(texts), pa.RecordBatch.from_pydict(texts)):
        with pytest.raises(SchemaError, match=r"column count is of type \w+, not") as wrong:
            predictor.read(table)
        assert wrong.value.remedy == f"convert it first; for '1,000': {expected}"
    big = pa.table({**texts, "count": pa.array([1, 2**40])})
    with pytest.raises(InvalidRowError) as caught:
        predictor.read(big)
    assert (caught.value.row, caught.value.remedy) == (1, to('raw = "float"', "count"))


@settings(deadline=None, max_examples=300)
@given(
    st.one_of(
        _TEXTS.flatmap(lambda text: st.sampled_from([text, f" {text}"])),
        st.integers(-(2**64), 2**64),
        st.floats(),
    ),
    st.sampled_from(["int32", "int", "float", "hex32", "string", "time"]),
    st.booleans(),
)
def test_what_is_said_is_true(value, raw: str, lenient: bool) -> None:
    """What is to be passed is taken, and the keys take the value."""
    rules = {"lenient": lenient} if raw in ("int32", "int", "float") else {}
    read = Read("x", raw, time_format="epoch_ms" if raw == "time" else "", **rules)
    try:
        convert_ok = not convert_values([value], read).code.any()
    except InvalidRowError:
        convert_ok = False
    if convert_ok:
        return
    said = remedy_of(value, read)
    if match := re.match(r"pass (.+?)(?: if it means that time)?(?:, or set |$)", said):
        instead = match[1].removesuffix(" if it means a missing value")
        assert not convert_values([json.loads(instead)], read).code.any()
    if match := re.search("set (.+) for column x in the spec", said):
        keys = match[1].replace("no time_format", 'time_format = ""')
        changes = tomllib.loads(keys.replace(" and ", "\n"))
        plain = {key: tuple(v) if isinstance(v, list) else v for key, v in changes.items()}
        assert not convert_values([value], Read(**{**vars(read), **plain})).code.any()


def test_files_say_when_keys_take_effect(predictor: Predictor, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    header = "count,price,hex,user,tags,when\n"
    path.write_text(header + "1,0.5,1b,u,3,1414670400\n1,?,1b,u,3,1414670400\n")
    said = (
        "set nulls, trim, lenient, thousands, or decimal in [input] for column price in the "
        "spec{}; its keys take effect with another ETL run and training: until then, write "
        "files as it says"
    )
    quarantine = ", or leave such rows out with --on_bad_rows quarantine"
    for score in (
        lambda: predictor.predict(path),
        lambda: predict_file(predictor, str(path), tmp_path / "scores.parquet"),
    ):
        with pytest.raises(BadRowError) as caught:
            score()
        assert "line 3: column price: '?'" in caught.value.what
        assert caught.value.remedy == "correct the file, or " + said.format(quarantine)
    scored = predict_file(predictor, str(path), tmp_path / "scores.parquet", reject=True)
    assert said.format("") in scored.rejected_file.read_text()
    path.write_text(header.replace(",", ";") + "1;1;1;1;1;1\n")
    with pytest.raises(BadInputError, match=r"of the spec; its keys take effect with another"):
        predictor.predict(path)


def test_a_server_starts_with_derived_columns(predictor: Predictor) -> None:
    Served(predictor).warm_up()  # by the columns of the raw log: there is none named hour
