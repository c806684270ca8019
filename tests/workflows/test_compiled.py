"""The compiled workflow against NVTabular's ``Workflow.transform``: the same ids, the same bits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nvt_torchrec.nvt_compat  # noqa: F401

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from nvt_torchrec.base.errors import SchemaError
from nvt_torchrec.formats.feature_spec import CategoricalColumn, DenseColumn, FeatureSpec
from nvt_torchrec.formats.feature_spec.toml_file import load_spec
from nvt_torchrec.formats.rows import (
    Jagged,
    RawRows,
    add_missing,
    get_dense_dtype,
    is_missing,
    make_empty_mask,
    make_empty_rows,
)
from nvt_torchrec.workflows import compiled
from nvt_torchrec.workflows.compiled import tables
from nvt_torchrec.workflows.store import load
from nvt_torchrec.workflows.vocabulary import fit_vocabulary
from nvt_torchrec.workflows.workflow_frames import to_frame
from nvt_torchrec.workflows.writer import Fitted, write_workflow
from tests.workflows.random_specs import as_columns, examples, feature_specs, raw_rows

#: Values at the ends of each type, beside each other, and such that only the upper half differs.
_VALUES = {
    "hex32": [0, 1, 2, 3, 2**31 - 1, 2**31, 2**32 - 1, 0xDEADBEEF, 1 << 16, 1 << 24],
    "int": [0, 1, -1, 2**53, -(2**53), 2**32, 2**32 + 1, 2**32 - 1, -(2**32), 3 << 40, 7, 8, 9],
    "bool": [0, 1],
    "string": ["a", "b", "A", "0", "00", "é", "日本語", "x" * 7, "x" * 8, "x" * 9, "x" * 300,
               "x" * 299 + "y", "abcdefgh1", "abcdefgh2", "\x00", "\x00\x00", "🙂", " "],
}  # fmt: skip
_INTEGERS = [0, 1, -1, -2, -3, -4, 5, 65533, 65534, 65535, 10**6, 2**31 - 1, -(2**31)]
_FLOATS = [0.0, -0.0, 0.5, -1.999, -2.0, -2.001, 1e-300, -1e300, 1e300, 65534.5, 1e9]
_STATISTICS = st.fixed_dictionaries(
    {
        "mean": st.sampled_from([0.0, 1.0, float(np.log(8)), -3.5, 1e6]),
        "std": st.sampled_from([0.0, 1.0, 0.1, 1e-9, 123.456]),
    }
)


def save(
    directory: Path, spec: FeatureSpec, rng: np.random.Generator, statistics: dict | None = None
) -> None:
    """Write a workflow whose vocabularies hold some of the values, none, or all."""
    vocabularies = {}
    for name, (column, *_) in spec.vocabularies.items():
        pool = np.array(_VALUES[column.raw], object)
        kept = pool[rng.random(len(pool)) < rng.choice([0.0, 0.5, 1.0])].tolist()
        counts = dict(zip(kept, rng.integers(1, 9, len(kept)), strict=True))
        vocabularies[name] = fit_vocabulary(*as_columns(counts, column.raw), column, 0)
    if statistics is None:
        statistics = {name: {"mean": 1.5, "std": 2.0} for name in spec.dense_names}
    write_workflow(directory, spec, Fitted(statistics, vocabularies))


def odd_rows(spec: FeatureSpec, rows: int, rng: np.random.Generator) -> RawRows:
    """Known and unknown values of every kind, columns that are all missing or never."""
    columns = []
    missing = make_empty_mask(len(spec.categorical), rows), make_empty_mask(len(spec.dense), rows)
    for j, column in enumerate(spec.categorical):
        absent = rng.random(rows) < rng.choice([0.0, 0.3, 1.0], p=[0.3, 0.5, 0.2])
        lengths = np.where(absent, 0, rng.integers(0, 4, rows) if column.multi_hot else 1)
        values = _categories(column, int(lengths.sum()) if column.multi_hot else rows, rng)
        if column.multi_hot:
            columns.append(Jagged(np.concatenate([[0], np.cumsum(lengths)]), values))
        else:
            columns.append(_blank(values, absent))
        add_missing(missing[0], j, absent)
    dense = np.zeros((len(spec.dense), rows), get_dense_dtype(spec))
    for j, column in enumerate(spec.dense):
        absent = rng.random(rows) < rng.choice([0.0, 0.3, 1.0])
        pool = _INTEGERS if column.raw == "int32" else _FLOATS
        pool = pool if rng.random() < 0.5 else pool[:7]  # without values beyond the logarithms
        dense[j] = np.where(absent, 0, np.array(pool)[rng.integers(0, len(pool), rows)])
        add_missing(missing[1], j, absent)
    label = rng.integers(0, 2, rows).astype(np.uint8)
    columns = np.array(columns) if spec.is_criteo_format else columns
    return raw_rows(label, columns, missing[0], dense, missing[1])


def _categories(column: CategoricalColumn, count: int, rng: np.random.Generator):
    pool = _VALUES[column.raw]
    drawn = [pool[i] for i in rng.integers(0, len(pool), count)]
    if column.raw == "string":
        # a slice, as a block of a larger table would be
        return pa.array(["before", *drawn], pa.string()).slice(1)
    return np.array(drawn, np.uint32 if column.raw == "hex32" else np.int64)


def _blank(values, absent: np.ndarray):
    """As readers leave missing values."""
    if isinstance(values, np.ndarray):
        return np.where(absent, 0, values).astype(values.dtype)
    cells = zip(values.to_pylist(), absent, strict=True)
    return pa.array(["" if a else v for v, a in cells], pa.string())


def check(path: Path, rows: RawRows) -> None:
    """Compiled and NVTabular's transform of the same rows agree, in the counts as well."""
    workflow = compiled.load(path, verify=True)
    encoded = workflow.transform(rows)
    spec = workflow.spec
    expected = load(path, raw=False).transform(to_frame(rows, spec))
    table = compiled.to_table(encoded, workflow.schema)
    table.validate(full=True)
    assert table.schema.equals(workflow.schema.arrow)
    assert len(encoded) == table.num_rows == len(rows)
    absent = rows.categorical_missing
    for j, column in enumerate(spec.categorical):
        ids = table[column.name].to_pylist()
        wanted = [list(x) if column.multi_hot else x for x in expected[column.name]]
        assert ids == wanted, column
        assert encoded.null[j] == np.count_nonzero(is_missing(absent, j))
        flat = [i for row in ids for i in row] if column.multi_hot else ids
        assert encoded.oov[j] == sum(2 <= i < column.reserved_ids for i in flat)
        assert max(flat, default=0) < workflow.schema.table_sizes[j]
    for name in [spec.label, *spec.dense_names]:
        wanted = expected[name].to_numpy()
        assert wanted.dtype == np.float32
        np.testing.assert_array_equal(table[name].to_numpy(), wanted, err_msg=name)


@examples(40)
@given(spec=feature_specs(), rows=st.integers(1, 40), seed=st.integers(0, 10**6), data=st.data())
@pytest.mark.filterwarnings("ignore:overflow encountered in:RuntimeWarning:pandas")
def test_as_nvtabular(
    tmp_path_factory: pytest.TempPathFactory,
    spec: FeatureSpec,
    rows: int,
    seed: int,
    data: st.DataObject,
) -> None:
    """Every raw type, policy and dense transform; several reads of one workflow."""
    directory, rng = tmp_path_factory.mktemp("compiled"), np.random.default_rng(seed)
    statistics = {name: data.draw(_STATISTICS) for name in spec.normalized_names}
    save(directory, spec, rng, statistics)
    check(directory, odd_rows(spec, rows, rng))


@examples(15)
@given(
    policy=st.sampled_from(
        [{}, {"freq_threshold": 3}, {"max_table_size": 9, "num_buckets": 4}, {"hash_buckets": 7}]
    ),
    columns=st.integers(1, 3),
    rows=st.integers(1, 60),
    seed=st.integers(0, 10**6),
)
def test_criteo_logs_as_nvtabular(
    tmp_path_factory: pytest.TempPathFactory, policy: dict, columns: int, rows: int, seed: int
) -> None:
    """Criteo's kind of log, whose columns are encoded in one call."""
    spec = FeatureSpec(
        "label",
        tuple(DenseColumn(f"d{i}", fill=i) for i in range(2)),
        tuple(CategoricalColumn(f"c{i}", **policy) for i in range(columns)),
    )
    assume(spec.is_criteo_format)
    directory, rng = tmp_path_factory.mktemp("compiled"), np.random.default_rng(seed)
    save(directory, spec, rng)
    check(directory, odd_rows(spec, rows, rng))


@pytest.mark.parametrize("raw", ["int32", "float"])
def test_many_columns(tmp_path: Path, raw: str) -> None:
    """Masks of several words, tables of fewer logarithms; chains of operators side by side."""
    rng = np.random.default_rng(6)
    transforms = ["", "log", "log", "normalize", "log"]
    spec = FeatureSpec(
        "label",
        tuple(
            DenseColumn(f"d{i}", fill=i % 4, raw=raw, transform=transforms[i % 5 if i < 66 else 0])
            for i in range(129)
        ),
        tuple(CategoricalColumn(f"c{i}", multi_hot=i % 9 == 5) for i in range(130)),
    )
    statistics = {name: {"mean": rng.random(), "std": 2.0} for name in spec.normalized_names}
    save(tmp_path, spec, rng, statistics)
    check(tmp_path, odd_rows(spec, 60, rng))


@pytest.mark.parametrize("raw", ["hex32", "int", "string"])
def test_large_vocabularies(tmp_path: Path, raw: str) -> None:
    """Tables with collisions, in several batches of the vocabulary: each value finds its id."""
    rng = np.random.default_rng(5)
    known = np.unique(rng.integers(0, 2**32 if raw == "hex32" else 2**53, 60_000))
    known = rng.permutation(known)
    unknown = np.setdiff1d(known + 1, known)
    spec = FeatureSpec("label", (), (CategoricalColumn("c", raw=raw),))

    def values(numbers: np.ndarray):
        if raw == "string":
            return pa.array([f"value {number}" for number in numbers], pa.string())
        return numbers.astype(np.uint32 if raw == "hex32" else np.int64)

    column = values(known) if raw == "string" else known
    fitted = fit_vocabulary(column, np.arange(len(known), 0, -1), spec.categorical[0], 0)
    write_workflow(tmp_path, spec, Fitted({}, {"c": fitted}))
    workflow = compiled.load(tmp_path)
    asked = np.concatenate([known, unknown])
    rows = raw_rows(np.zeros(len(asked), np.uint8), [values(asked)])
    ids = workflow.transform(rows).ids.column(0)
    assert (ids[: len(known)] == np.arange(len(known)) + 3).all()
    assert (ids[len(known) :] == 2).all()


def test_strings_with_equal_hashes(tmp_path: Path) -> None:
    """Strings are told apart by their bytes: two in the vocabulary, and one that is not."""
    rng = np.random.default_rng(4)
    first = rng.integers(0x20, 0x7F, (4000, 8), np.uint8)
    second = rng.integers(0x20, 0x7F, 8, np.uint8).view(np.uint64)
    # the state after the first 8 bytes; the second 8 bytes are made to cancel its difference
    states = [int(tables.mix64(np.uint64(16) ^ word)) for word in first.view(np.uint64)[:, 0]]
    equal = []
    for head, state in zip(first, states, strict=True):
        tail = np.uint64(states[0] ^ state) ^ second
        if (tail.view(np.uint8) < 0x80).all():
            equal.append((head.tobytes() + tail.tobytes()).decode())
    assert len(set(equal)) >= 3
    spec = FeatureSpec("label", (), (CategoricalColumn("c", raw="string"),))
    fitted = fit_vocabulary(pa.array(equal[:2]), np.array([2, 1]), spec.categorical[0], 0)
    write_workflow(tmp_path, spec, Fitted({}, {"c": fitted}))
    words = np.load(tmp_path / "compiled" / "tables.npy")
    used = np.flatnonzero(words[1::2])
    assert len(set(words[::2][used])) == 1  # the hashes are equal indeed
    rows = raw_rows(np.zeros(3, np.uint8), [pa.array(equal[:3])])
    assert compiled.load(tmp_path).transform(rows).ids.column(0).tolist() == [3, 4, 2]


def test_no_rows(tmp_path: Path) -> None:
    for spec in (load_spec(), load_spec("retail")):
        path = tmp_path / str(spec.is_criteo_format)
        save(path, spec, np.random.default_rng(0))
        workflow = compiled.load(path)
        table = compiled.to_table(workflow.transform(make_empty_rows(spec)), workflow.schema)
        assert table.num_rows == 0
        assert table.schema.equals(workflow.schema.arrow)
        without = workflow.transform(make_empty_rows(spec, label=False))
        assert len(without.labels) == 0
        with pytest.raises(SchemaError, match="without labels"):
            compiled.to_table(without, workflow.schema)


def test_threads_share_one_workflow(tmp_path: Path) -> None:
    """The same answers from many threads at once, on blocks of their own."""
    spec = load_spec("retail")
    save(tmp_path, spec, np.random.default_rng(3))
    workflow = compiled.load(tmp_path)
    blocks = [odd_rows(spec, 3000 + 10 * i, np.random.default_rng(i)) for i in range(8)]
    alone = [compiled.to_table(workflow.transform(rows), workflow.schema) for rows in blocks]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(workflow.transform, blocks * 4))
    for i, encoded in enumerate(together):
        assert compiled.to_table(encoded, workflow.schema).equals(alone[i % len(blocks)])
