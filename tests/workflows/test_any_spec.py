"""Specs of every kind: what NVTabular fits and transforms, saved, loaded, against plain Python."""

from __future__ import annotations

import filecmp
import math
import sys
import types
from pathlib import Path
from unittest import mock

import nvt_torchrec.nvt_compat  # noqa: F401

import dask.dataframe as dd
import numpy as np
import nvtabular
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.rows import RawRows, is_missing, make_empty_rows
from nvt_torchrec.formats.workflow_description import WorkflowDescription
from nvt_torchrec.workflows.description import inspect
from nvt_torchrec.workflows.store import build, extract_fitted, load
from nvt_torchrec.workflows.vocabulary import fit_vocabulary
from nvt_torchrec.workflows.workflow_frames import to_frame
from nvt_torchrec.workflows.writer import Fitted, write_workflow
from tests.workflows.random_specs import (
    Oracle,
    as_columns,
    examples,
    feature_specs,
    random_raw_rows,
)

_SIZES = st.lists(st.integers(0, 30), min_size=1, max_size=4).filter(any)


def fit(spec: FeatureSpec, parts: list[RawRows], directory: Path) -> nvtabular.Workflow:
    """As the ETL does: a Workflow over the partitions of a Dask DataFrame."""
    meta = to_frame(make_empty_rows(spec), spec)
    frame = dd.from_map(to_frame, parts, spec=spec, meta=meta, enforce_metadata=False)
    workflow = build(spec, directory)
    return workflow.fit(nvtabular.Dataset(frame, cpu=True))


def save(workflow: nvtabular.Workflow, spec: FeatureSpec, path: Path) -> WorkflowDescription:
    return write_workflow(path, spec, extract_fitted(workflow, spec))


def check(frame: pd.DataFrame, expected: dict[str, list], spec: FeatureSpec) -> None:
    for name in spec.columns:
        got = frame[name].tolist()
        if name in spec.categorical_names:
            assert [list(x) if isinstance(x, np.ndarray) else x for x in got] == expected[name]
        else:
            np.testing.assert_allclose(got, expected[name], rtol=1e-5, atol=1e-5)


@examples(8)
@given(spec=feature_specs(), sizes=_SIZES, seed=st.integers(0, 10**6))
def test_fit_save_load_transform(
    tmp_path_factory: pytest.TempPathFactory, spec: FeatureSpec, sizes: list[int], seed: int
) -> None:
    directory = tmp_path_factory.mktemp("spec")
    parts = [random_raw_rows(spec, rows, seed + i) for i, rows in enumerate(sizes)]
    oracle = Oracle(spec, parts)
    fitted = fit(spec, parts, directory / "fit")
    description = save(fitted, spec, directory / "workflow")
    assert inspect(directory / "workflow") == description
    for column in spec.categorical:
        ids, vocabulary = oracle.ids[column.vocabulary_name], description.vocabularies[column.name]
        assert vocabulary.table_size == column.reserved_ids + len(ids)
        counts = oracle.counts[column.vocabulary_name]
        unique = sum(counts[value] for value in ids)
        assert vocabulary.observed == (
            {"null": 0, "oov": 0, "unique": 0}
            if column.hash_buckets
            else {
                "null": oracle.nulls[column.vocabulary_name],
                "oov": counts.total() - unique,
                "unique": unique,
            }
        )
    loaded = load(directory / "workflow")
    # rows with unseen values, and one of the partitions it was fitted on
    for rows in (random_raw_rows(spec, 12, seed + 99), max(parts, key=len)):
        frame, expected = to_frame(rows, spec), oracle.transform(rows)
        result = loaded.transform(frame)
        check(result, expected, spec)
        pd.testing.assert_frame_equal(result[spec.columns], fitted.transform(frame)[spec.columns])
    dataset = loaded.transform(nvtabular.Dataset(frame, cpu=True)).to_ddf().compute()
    pd.testing.assert_frame_equal(result[spec.columns], dataset[spec.columns])
    without = load(directory / "workflow", label=False).transform(frame.drop(columns=spec.label))
    assert spec.label not in without
    pd.testing.assert_frame_equal(result[spec.columns[1:]], without[spec.columns[1:]])


@examples(8)
@given(spec=feature_specs(), sizes=_SIZES, seed=st.integers(0, 10**6))
def test_written_without_nvtabular_is_the_same(
    tmp_path_factory: pytest.TempPathFactory, spec: FeatureSpec, sizes: list[int], seed: int
) -> None:
    """Counts that another engine made: the same digest, and the same bytes in every file."""
    directory = tmp_path_factory.mktemp("spec")
    parts = [random_raw_rows(spec, rows, seed + i) for i, rows in enumerate(sizes)]
    saved = save(fit(spec, parts, directory / "fit"), spec, directory / "saved")
    counted, vocabularies = Oracle(spec, parts), {}
    for name, columns in spec.vocabularies.items():
        counts = dict(sorted(counted.counts[name].items(), key=lambda item: hash(item)))
        found = as_columns(counts, columns[0].raw)
        vocabularies[name] = fit_vocabulary(*found, columns[0], counted.nulls[name])
    state = Fitted(saved.statistics, vocabularies)
    written = write_workflow(directory / "written", spec, state)
    assert written == saved
    files = sorted(p.relative_to(directory / "saved") for p in (directory / "saved").rglob("*.*"))
    match, mismatch, errors = filecmp.cmpfiles(
        directory / "saved", directory / "written", [str(f) for f in files], shallow=False
    )
    assert not mismatch
    assert not errors
    assert set(written.files) <= set(match)


@settings(deadline=None)
@given(spec=feature_specs(), rows=st.integers(0, 30), seed=st.integers(0, 10**6))
def test_frames_hold_what_was_read(spec: FeatureSpec, rows: int, seed: int) -> None:
    """pandas' columns and, as far as can be seen without a GPU, cuDF's."""
    raw = random_raw_rows(spec, rows, seed)
    cudf = types.SimpleNamespace(DataFrame=types.SimpleNamespace(from_arrow=lambda table: table))
    with mock.patch.dict(sys.modules, cudf=cudf):
        frame, table = (to_frame(raw, spec, gpu=gpu) for gpu in (False, True))
    assert list(frame.columns) == table.column_names == spec.columns
    for column, cells in zip(spec.categorical, Oracle(spec, []).cells(raw), strict=True):
        got = [x.tolist() if column.multi_hot else x for x in frame[column.name]]
        assert [None if pd.api.types.is_scalar(x) and pd.isna(x) else x for x in got] == cells
        assert table[column.name].to_pylist() == cells
        plain = pa.string() if column.raw == "string" else pa.int64()
        assert table[column.name].type == (pa.list_(plain) if column.multi_hot else plain)
    for j, name in enumerate(spec.dense_names):
        absent = is_missing(raw.dense_missing, j)
        expected = [None if a else x for x, a in zip(raw.dense[j].tolist(), absent, strict=True)]
        assert table[name].to_pylist() == expected
        assert [None if math.isnan(x) else x for x in frame[name]] == expected
    assert frame[spec.label].dtype == np.float32
