"""Refused values: what to pass instead, and the keys of the spec to try."""

from __future__ import annotations

import json
import pickle

import pandas as pd
import pytest

from nvt_torchrec.base.errors import SchemaError
from nvt_torchrec.clicklog.in_memory.value_errors import InvalidRowError
from nvt_torchrec.formats.feature_spec import (
    CategoricalColumn,
    DenseColumn,
    FeatureSpec,
    InputFormat,
)
from nvt_torchrec.formats.feature_spec.derivations import Derivation
from nvt_torchrec.formats.feature_spec.read_plan import Reading
from nvt_torchrec.inference.predictor import Predictor
from nvt_torchrec.inference.server.bodies import RefusedError, parse_body
from nvt_torchrec.inference.server.reload import Served
from nvt_torchrec.inference.server.serve_settings import ServerSettings
from tests.inference.test_export import untrained

NEW_RUN = "; changes of the spec take effect after another ETL run and training"
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


@pytest.mark.parametrize(
    ("column", "value", "remedy"),
    [
        ("count", "7.5", "pass an integer or a missing value (null), or set nulls, trim, lenient"),
        ("count", 2**31, 'set raw = "float" for column count in the spec' + NEW_RUN),
        ("price", float("inf"), ""),
        ("hex", 2**32, 'set raw = "int" for column hex in the spec' + NEW_RUN),
        ("user", 12, "pass a string or a missing value (null)"),
        ("tags", [1, None], "remove missing values from the lists of column tags"),
        (
            "when",
            "2014-10-30 12:00",
            "pass a time or a missing value (null), or set time_format, nulls or trim for column "
            "when in the spec; it reads epoch_s, such as 1414670400" + NEW_RUN,
        ),
    ],
)
def test_what_is_said_of_a_value(predictor: Predictor, column: str, value, remedy: str) -> None:
    rows = [ROW, {**ROW, column: value}]
    columns = {name: [row[name] for row in rows] for name in ROW}
    for given_rows in (rows, columns, rows + [ROW] * 20):
        with pytest.raises(InvalidRowError) as caught:
            predictor.read(given_rows)
        error = caught.value
        assert (error.row, error.column) == (1, column)
        assert error.remedy.startswith(remedy)
        assert bool(error.remedy) == bool(remedy)
        assert str(error).startswith(f"row 1, column {column}: {error.reason}")
        assert str(error).endswith(error.remedy)
        assert str(pickle.loads(pickle.dumps(error))) == str(error)
    if value == float("inf"):  # JSON has no such value
        return
    body = bytearray(json.dumps({"rows": rows}), "utf-8")
    with pytest.raises(RefusedError) as refused:
        parse_body(body, {"content-type": "application/json"}, predictor, ServerSettings())
    where = {"error": "invalid row", "row": 1, "column": column, "reason": error.reason}
    assert refused.value.details == where | ({"remedy": error.remedy} if remedy else {})


def test_texts_that_pandas_took_for_numbers(predictor: Predictor) -> None:
    for users in ([7, 12], [7, None]):
        frame = pd.DataFrame([ROW, ROW]).assign(user=users)
        with pytest.raises(SchemaError, match="column user is of type") as error:
            predictor.read(frame)
        assert "pandas.read_csv needs dtype=str" in error.value.remedy


def test_a_server_starts_with_derived_columns(predictor: Predictor) -> None:
    Served(predictor).warm_up()  # by the columns of the raw log: there is none named hour
