"""``python -m etl import --trust_pickle``: workflows that NVTabular 23.08 pickled."""

from __future__ import annotations

import pickle
from pathlib import Path

import nvt_torchrec.nvt_compat  # noqa: F401

import numpy as np
import nvtabular
import pandas as pd
import pytest
from merlin.core.utils import Serial
from nvtabular import ops

from nvt_torchrec import workflows
from nvt_torchrec.base.errors import BadInputError, OutputError, SchemaError
from nvt_torchrec.etl.__main__ import main
from nvt_torchrec.etl.pickled_workflow import import_workflow

DENSE, INTEGERS, TEXT = ["int_0", "int_1"], ["cat_0", "cat_1"], ["word"]


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    rows = 400
    columns = {"label": (rng.random(rows) < 0.3).astype(np.float32)}
    for name in DENSE:
        values = rng.integers(-2, 50, rows).astype(np.float64)
        values[rng.random(rows) < 0.1] = np.nan
        columns[name] = values
    for name in INTEGERS:
        values = (rng.zipf(1.5, rows) % 40).astype(np.float64)
        values[rng.random(rows) < 0.1] = np.nan
        columns[name] = values
    words = np.array([f"w{one}" for one in rng.zipf(1.5, rows) % 30], dtype=object)
    words[rng.random(rows) < 0.1] = None
    columns["word"] = words
    return pd.DataFrame(columns)


def plus_two(column):
    """TorchRec's script adds 2 before its LogOp."""
    return column + 2


def _cats(names: list[str], **options):
    return names >> ops.Categorify(**options)


def _saved(frame: pd.DataFrame, nodes, directory: Path) -> nvtabular.Workflow:
    workflow = nvtabular.Workflow(nodes)
    with Serial():  # another test's cluster may be at hand, and NormalizeMinMax fails on those
        workflow.fit(nvtabular.Dataset(frame, cpu=True))
    workflow.save(str(directory / "nvt"))
    return workflow


def test_columns_with_other_chains(frame, tmp_path: Path) -> None:
    """A transform for each column; the more frequent one is that of the spec."""
    dense = (DENSE[:1] >> ops.FillMissing(0) >> ops.Normalize()) + (
        DENSE[1:] >> ops.FillMissing(-1) >> ops.LambdaOp(plus_two) >> ops.LogOp()
    )
    theirs = _saved(frame, _nodes(tmp_path, dense), tmp_path)
    spec = import_workflow(tmp_path / "nvt", tmp_path / "out", trust_pickle=True).spec
    assert {column.name: spec.transform_of(column).name for column in spec.dense} == {
        "int_0": "normalize", "int_1": "log"
    }  # fmt: skip
    expected = theirs.transform(frame.copy())
    ours = workflows.load(tmp_path / "out" / "workflow").transform(frame.copy())
    for name in DENSE:
        np.testing.assert_allclose(ours[name], expected[name], rtol=1e-5, atol=1e-6)


def _nodes(directory: Path, dense=None, **options):
    dense = dense or (DENSE >> ops.FillMissing(0) >> ops.Normalize())
    cats = _cats(INTEGERS + TEXT, out_path=str(directory / "fit"), **options)
    return cats + dense + ["label"]


@pytest.mark.parametrize(
    ("chain", "transform"),
    [
        (lambda: DENSE >> ops.FillMissing(0) >> ops.Normalize(), "normalize"),
        (
            lambda: DENSE >> ops.FillMissing(-1) >> ops.LambdaOp(plus_two) >> ops.LogOp(),
            "log",
        ),
        (
            lambda: (
                DENSE
                >> ops.FillMissing(0)
                >> ops.Clip(min_value=-2)
                >> ops.LambdaOp(lambda column: column + 2)
                >> ops.LogOp()
                >> ops.Normalize()
            ),
            "log_normalize",
        ),
    ],
)
@pytest.mark.parametrize("options", [{}, {"freq_threshold": 3}, {"max_size": 9}])
def test_ids_and_numbers_stay(frame, tmp_path: Path, chain, transform: str, options) -> None:
    """Also the order of equal counts, which is anyone's guess in a foreign vocabulary."""
    theirs = _saved(frame, _nodes(tmp_path, chain(), **options), tmp_path)
    description = import_workflow(tmp_path / "nvt", tmp_path / "out", trust_pickle=True)
    assert description.spec.dense_transform == transform
    assert description.spec.label == "label"
    raw = {column.name: column.raw for column in description.spec.categorical}
    assert raw == {"cat_0": "int", "cat_1": "int", "word": "string"}
    policy = description.spec.categorical[0]
    assert policy.freq_threshold == options.get("freq_threshold", 0)
    assert policy.max_table_size == options.get("max_size", 0)
    fresh = frame.copy()
    fresh.loc[0, "cat_0"], fresh.loc[1, "word"] = 12345, "unheard"
    expected = theirs.transform(fresh.copy())
    ours = workflows.load(tmp_path / "out" / "workflow").transform(fresh.copy())
    for name in INTEGERS + TEXT:
        np.testing.assert_array_equal(ours[name], expected[name])
        assert description.vocabularies[name].table_size == 1 + max(
            theirs.transform(frame.copy())[name].max(), 2
        )
    for name in DENSE:
        np.testing.assert_allclose(ours[name], expected[name], rtol=1e-5, atol=1e-6)
    assert not list((tmp_path / "out").glob(".*"))
    assert not list((tmp_path / "out").rglob("*.pkl"))


def test_the_directory_may_move(frame, tmp_path: Path) -> None:
    """The pickle names the vocabularies' paths of the day it was saved."""
    _saved(frame, _nodes(tmp_path), tmp_path)
    (tmp_path / "nvt").rename(tmp_path / "moved")
    for path in (tmp_path / "fit").rglob("*.parquet"):
        path.unlink()
    import_workflow(tmp_path / "moved", tmp_path / "out", trust_pickle=True)
    for path in (tmp_path / "moved").rglob("*.parquet"):
        path.unlink()
    workflows.load(tmp_path / "out" / "workflow").transform(frame.copy())


def test_with_a_spec(frame, tmp_path: Path) -> None:
    """The spec says how the raw rows are written; the workflow, what becomes of them."""
    _saved(frame, _nodes(tmp_path, freq_threshold=2), tmp_path)
    spec = tmp_path / "spec.toml"
    spec.write_text(
        '[label]\nname = "label"\n[[dense]]\nnames = "int_{0..1}"\n'
        '[[categorical]]\nnames = ["word"]\nraw = "string"\n'
        '[[categorical]]\nnames = "cat_{0..1}"\nraw = "hex32"\n'
    )
    found = import_workflow(
        tmp_path / "nvt", tmp_path / "out", trust_pickle=True, spec=str(spec)
    ).spec
    assert found.categorical_names == ["word", "cat_0", "cat_1"]
    assert [column.raw for column in found.categorical] == ["string", "hex32", "hex32"]
    assert {column.freq_threshold for column in found.categorical} == {2}
    spec.write_text(spec.read_text().replace("int_{0..1}", "int_{0..2}"))
    arguments = {"trust_pickle": True, "spec": str(spec)}
    with pytest.raises(SchemaError, match="differ in columns: int_2"):
        import_workflow(tmp_path / "nvt", tmp_path / "other", **arguments)
    spec.write_text(spec.read_text().replace("{0..2}", "{0..1}").replace("string", "hex32"))
    with pytest.raises(SchemaError, match="column word: hex32 in the spec, its vocabulary is text"):
        import_workflow(tmp_path / "nvt", tmp_path / "other", **arguments)


def test_only_with_the_flag_and_said_aloud(frame, tmp_path: Path, caplog, capsys) -> None:
    _saved(frame, _nodes(tmp_path), tmp_path)
    arguments = ["import", "--input_path", str(tmp_path / "nvt"), "--output_path"]
    assert main([*arguments, str(tmp_path / "out")]) == 2
    assert "opening it runs the code in it" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main([*arguments, str(tmp_path / "out"), "--trust_pickle"]) == 0
    assert "--num_embeddings_per_feature" in capsys.readouterr().out
    assert "running the code in this pickle" in caplog.text
    with pytest.raises(OutputError, match="exists"):
        import_workflow(tmp_path / "nvt", tmp_path / "out", trust_pickle=True)


def test_arrays_are_not_imported_any_more(tmp_path: Path, capsys) -> None:
    (tmp_path / "day_0_dense.npy").touch()
    assert main(["import", "--input_path", str(tmp_path), "--output_path", "out"]) == 2
    assert "no workflow.pkl" in (said := capsys.readouterr().err)
    assert "python -m etl run" in said
    assert main(["import", "--input_path", "in", "--output_path", "out", "--modulo"]) == 2
    assert "python -m etl run" in capsys.readouterr().err


class _Bomb:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self):
        return open, (self.mark, "w")


def test_nothing_is_run_without_the_flag(frame, tmp_path: Path) -> None:
    _saved(frame, _nodes(tmp_path), tmp_path)
    (tmp_path / "nvt" / "workflow.pkl").write_bytes(pickle.dumps(_Bomb(tmp_path / "mark")))
    with pytest.raises(BadInputError, match="trust_pickle"):
        import_workflow(tmp_path / "nvt", tmp_path / "out", trust_pickle=False)
    assert not (tmp_path / "mark").exists()
    with pytest.raises(BadInputError):  # the test's other half: with the flag, it is run
        import_workflow(tmp_path / "nvt", tmp_path / "out", trust_pickle=True)
    assert (tmp_path / "mark").exists()


def test_a_pickle_that_cannot_be_opened(frame, tmp_path: Path) -> None:
    _saved(frame, _nodes(tmp_path), tmp_path)
    (tmp_path / "nvt" / "workflow.pkl").write_bytes(b"cno_such_module\nthing\n.")
    with pytest.raises(BadInputError, match=r"workflow\.pkl: cannot be opened: ModuleNotFound"):
        import_workflow(tmp_path / "nvt", tmp_path / "out", trust_pickle=True)


def _fill_first(directory: Path):
    return INTEGERS >> ops.FillMissing(0) >> ops.Categorify(out_path=str(directory / "fit"))


@pytest.mark.parametrize(
    ("nodes", "what"),
    [
        (_fill_first, "cat_0: FillMissing before Categorify"),
        (lambda d: [["cat_0", "cat_1"]] >> ops.Categorify(out_path=str(d)), "column groups"),
        (
            lambda d: _cats(INTEGERS, num_buckets=5, max_size=20, out_path=str(d)),
            r"Categorify\(num_buckets=5\)",
        ),
        (lambda d: INTEGERS >> ops.HashBucket(10), "column cat_0: HashBucket first"),
        (
            lambda d: DENSE >> ops.FillMissing(0) >> ops.NormalizeMinMax(),
            "column int_0: NormalizeMinMax in its chain",
        ),
        (lambda d: DENSE >> ops.Normalize(), "column int_0: Normalize first"),
        (lambda d: DENSE >> ops.FillMissing(0), "column int_0: FillMissing without a transform"),
        (
            lambda d: DENSE >> ops.FillMissing(0, add_binary_cols=True) >> ops.Normalize(),
            "column int_0: FillMissing; needed",
        ),
        (
            lambda d: DENSE >> ops.FillMissing(0) >> ops.Clip(min_value=0) >> ops.LogOp(),
            r"column int_0: FillMissing >> Clip >> LogOp makes .*, this project's log makes",
        ),
        (lambda d: ["int_0", "int_1"], "pass through as they are"),
    ],
)
def test_operators_that_are_not_ours(frame, tmp_path: Path, nodes, what: str) -> None:
    more = _cats(TEXT, out_path=str(tmp_path / "fit"))
    _saved(frame, nodes(tmp_path) + more + ["label"], tmp_path)
    with pytest.raises(SchemaError, match=what):
        import_workflow(tmp_path / "nvt", tmp_path / "out", trust_pickle=True)
    assert not (tmp_path / "out" / "workflow").exists()
    assert not list((tmp_path / "out").glob(".*")) if (tmp_path / "out").exists() else True
