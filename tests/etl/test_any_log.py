"""Logs of random specs, and random logs of the shipped ones, from raw text to parquet."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path

import nvt_torchrec.nvt_compat  # noqa: F401

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from merlin.io import Dataset

from nvt_torchrec.clicklog.in_memory.frames import read_columns
from nvt_torchrec.clicklog.text.line_layout import find_layout
from nvt_torchrec.clicklog.text.tokenizer import parse_rows
from nvt_torchrec.etl.run import run
from nvt_torchrec.formats.feature_spec.split import BY_DAYS
from nvt_torchrec.formats.splits import SPLITS
from nvt_torchrec.workflows import compiled
from nvt_torchrec.workflows.description import inspect
from nvt_torchrec.workflows.store import load
from tests.clicklog.random_logs import random_logs, random_rows
from tests.clicklog.reference_reader import BadFieldError, as_lists, parse, split
from tests.clicklog.test_read_plan import line_of
from tests.etl.runs import QUARANTINE, read_split
from tests.etl.runs import settings as settings_of
from tests.workflows.random_specs import Oracle

_SETTINGS = settings(
    max_examples=5,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # an example takes too long to shrink it
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def good_lines(lines: list[str], spec, names: list[str]) -> list[str]:
    """The lines that plain Python can read."""
    good = []
    for line in lines:
        try:
            parse(split(line, spec), spec, names)
        except (BadFieldError, csv.Error):
            continue
        good.append(line)
    return good


@pytest.mark.parametrize("engine", ["cpu", "nvtabular"])
def test_random_specs(
    engine: str, engine_options, tmp_path_factory: pytest.TempPathFactory
) -> None:
    options = engine_options(engine) | QUARANTINE | {"max_bad_fraction": 1.0}

    @_SETTINGS
    @given(st.data())
    def check(data) -> None:
        log = data.draw(random_logs())
        spec = dataclasses.replace(log.spec, split=BY_DAYS)
        names = [name if name in spec.sources(label=True) else "" for name in log.names]
        if not spec.input.header:
            own = dataclasses.replace(spec.input, columns=tuple(names))
            spec = dataclasses.replace(spec, input=own)
        head = f"{line_of(log.names, spec)}\n" * bool(spec.input.header)
        days = [
            [line_of(row, spec) for row in data.draw(random_rows(log, maximum=40))]
            for _ in range(2)
        ]
        half = (len(days[1]) + 1) // 2  # of all rows, malformed ones too
        parts = {"train": days[0], "valid": days[1][:half], "test": days[1][half:]}
        parts = {part: good_lines(lines, spec, log.names) for part, lines in parts.items()}
        assume(all(parts.values()))
        base = tmp_path_factory.mktemp("random")
        (base / "raw").mkdir()
        ending = ".csv" if spec.input.format == "csv" else ""
        for day, lines in enumerate(days):
            text = head + "".join(f"{line}\n" for line in lines)
            (base / "raw" / f"day_{day}{ending}").write_text(text, newline="")
        manifest = run(settings_of(base / "raw", base / "out", spec, **options))
        bad = sum(map(len, days)) - sum(map(len, parts.values()))
        assert manifest["rows"]["rejected"] == bad
        layout = find_layout((head or f"{parts['train'][0]}\n").encode(), "x", spec)
        rows = {}
        for name, lines in parts.items():
            text = "".join(f"{line}\n" for line in lines).encode()
            rows[name] = parse_rows(text, spec, layout)
            expected = [parse(split(line, spec), spec, log.names) for line in lines]
            assert as_lists(rows[name], spec) == expected
        oracle = Oracle(spec, [rows["train"]])
        for name in SPLITS:
            found = read_split(base / "out", name)
            assert found.columns.tolist() == spec.columns
            for column, values in oracle.transform(rows[name]).items():
                got = [one.tolist() if isinstance(one, np.ndarray) else one
                       for one in found[column].tolist()]  # fmt: skip
                if column in spec.dense_names:
                    np.testing.assert_allclose(got, values, rtol=1e-4, atol=1e-4)
                else:
                    assert got == values
            if engine == "cpu":
                check_raw(base / "out" / "workflow", [split(one, spec) for one in parts[name]],
                          log.names, found)  # fmt: skip

    check()


def check_raw(workflow: Path, fields: list[list[str]], names: list[str], expected) -> None:
    """Compare what the saved workflow and the Predictor make of raw text with the ETL's parquet."""
    columns = [name for name in names if name]
    values = [[field for field, name in zip(row, names, strict=True) if name] for row in fields]
    raw = pd.DataFrame(values, columns=columns, dtype=object)
    raw[raw == ""] = np.nan  # as pd.read_csv(dtype=str)
    spec = inspect(workflow).spec
    labels = [*spec.labels, *([spec.weight] if spec.weight else [])]
    for label in (True, False):
        got = load(workflow, label=label).transform(raw)
        wanted = expected if label else expected.drop(columns=labels)
        assert list(got.columns) == list(wanted.columns)
        for name in wanted.columns:
            # NVTabular computes logarithms in float64, so float32 may differ in its last bit
            rounded = 3e-7 if name in spec.dense_names else 0
            for a, b in zip(got[name], wanted[name], strict=True):
                np.testing.assert_allclose(a, b, rtol=rounded, atol=rounded, err_msg=name)
    dataset = load(workflow).transform(Dataset(raw, cpu=True)).to_ddf().compute()
    assert list(dataset.columns) == list(expected.columns)
    for name in spec.categorical_names:
        assert list(map(as_list, dataset[name])) == list(map(as_list, expected[name])), name
    encoded = compiled.load(workflow).transform(read_columns(raw, spec))
    lists = [column.name for column in spec.categorical if column.multi_hot]
    for name, ids, lengths in zip(
        spec.categorical_names, encoded.ids.columns, encoded.ids.lengths, strict=True
    ):
        if name in lists:
            ids = np.split(ids, lengths.cumsum()[:-1])
        assert list(map(as_list, ids)) == list(map(as_list, expected[name])), name


def as_list(value):
    return value.tolist() if isinstance(value, np.ndarray) else value
