"""Files of the compiled workflow: damaged, missing, of another workflow; and how fast they open."""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nvt_torchrec.base.errors import BadInputError, ClickLogError, SchemaError
from nvt_torchrec.formats.feature_spec import CategoricalColumn, FeatureSpec
from nvt_torchrec.workflows import compiled
from nvt_torchrec.workflows.__main__ import main
from nvt_torchrec.workflows.description import inspect
from nvt_torchrec.workflows.vocabulary import FittedVocabulary, fit_vocabulary
from nvt_torchrec.workflows.writer import Fitted, write_workflow
from tests.mutations import edit_json, flip_bit
from tests.shell import python
from tests.workflows.random_specs import raw_rows

SPEC = FeatureSpec(
    "label", (), tuple(CategoricalColumn(f"c_{raw}", raw=raw) for raw in ("hex32", "int", "string"))
)
_VALUES = {
    "c_hex32": np.array([3, 2**32 - 1]),
    "c_int": np.array([-5, 2**40]),
    "c_string": pa.array(["a", "bc"], pa.string()),
}


def _vocabularies(changed: dict | None = None) -> dict[str, FittedVocabulary]:
    values = {**_VALUES, **(changed or {})}
    return {
        column.name: fit_vocabulary(
            values[column.name], np.full(len(values[column.name]), 2), column, 0
        )
        for column in SPEC.categorical
    }


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "workflow"
    write_workflow(path, SPEC, Fitted({}, _vocabularies()))
    compiled.load(path, verify=True)
    return path


def _edit_plan(path: Path, edit: Callable[[dict], None]) -> None:
    edit_json(path / "compiled" / "compiled.json", edit)


def _expect_refusal(
    path: Path, message: str, error: type[ClickLogError] = BadInputError, *, verify: bool = False
) -> None:
    with pytest.raises(error, match=message):
        compiled.load(path, verify=verify)


def test_nothing_there(tmp_path: Path, saved: Path) -> None:
    _expect_refusal(tmp_path / "nowhere", "no such file")
    with pytest.raises(BadInputError, match="no such file"):
        compiled.build(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
    shutil.rmtree(saved / "compiled")
    _expect_refusal(saved, r"not compiled\n.*python -m workflows compile /")


@pytest.mark.parametrize("name", ["tables.npy", "text.npy", "text_begins.npy"])
def test_damaged_arrays(saved: Path, name: str) -> None:
    file = saved / "compiled" / name
    whole = file.read_bytes()
    file.unlink()
    _expect_refusal(saved, rf"{name}: missing or damaged.*\n.*workflows compile")
    for bytes_ in (b"", whole[:50], whole[:-1], whole[:128], b"\x80\x04pickle" + whole):
        file.write_bytes(bytes_)
        _expect_refusal(saved, f"{name}: missing or damaged")
    for dtype in (np.float64, object):
        np.save(file, np.zeros(3, dtype), allow_pickle=True)
        _expect_refusal(saved, f"{name}: missing or damaged")
    file.write_bytes(whole)
    flip_bit(file, -1)
    _expect_refusal(saved, f"{name}: .*checksum", verify=True)
    file.write_bytes(whole)
    compiled.load(saved, verify=True)


def test_damaged_tables_give_ids_not_crashes(saved: Path) -> None:
    """Unverified nonsense in the tables is never read past their ends, and lookups come back."""
    rows = parse_text(["3,5,a", "77,77,unknown", "ffffffff,-5,bc"] * 20)
    rng = np.random.default_rng(0)
    for name in ("tables.npy", "text_begins.npy"):
        array = np.load(saved / "compiled" / name)
        for seed in range(20):
            noise = rng.integers(1, 2**64, array.shape, np.uint64).view(array.dtype)
            np.save(saved / "compiled" / name, noise if seed else np.full_like(array, 2**40 + 3))
            ids = compiled.load(saved).transform(rows).ids
            assert ids.values.shape == (3, 60)
        np.save(saved / "compiled" / name, array)
    assert compiled.load(saved).transform(rows).ids.values[0, :3].tolist() == [3, 2, 4]


def _put(path: Path, name: str, array: np.ndarray) -> None:
    """Put an array into a compiled workflow, with its checksum."""
    np.save(path / "compiled" / name, array)
    entry = {"length": len(array), "crc32": zlib.crc32(array)}
    _edit_plan(path, lambda plan: plan["arrays"].update({name: entry}))


def test_offsets_that_are_not_in_the_text(saved: Path) -> None:
    """With the right checksums. In a process of its own: one was a segmentation fault."""
    program = (
        "import sys; from tests.workflows.test_compiled_files import *;"
        "find_no_text_outside(Path(sys.argv[1]))"
    )
    done = python("-c", program, saved, warm=True)
    assert done.returncode == 0, done.stderr


def find_no_text_outside(saved: Path) -> None:
    rows = parse_text(["3,5,a", "3,5,bc", "3,5," + "x" * 9])
    for begins in (
        lambda n: [2**63 - 1, -(2**63) + n - 1, n],  # the difference is n - 1 once it overflows
        lambda n: [2**63 - 1] * 3,
        lambda n: [-1, 0, n],
        lambda n: [0, n, n - 1],
        lambda n: [1, 1, n],
        lambda n: [0, 1, n + 1],
        lambda n: [0, 2**40, n],
    ):
        _put(saved, "text_begins.npy", np.array(begins(3), np.int64))
        assert compiled.load(saved).transform(rows).ids.column(2).max() <= 4


@pytest.mark.parametrize("column", [0, 1, 2])
def test_ids_that_are_outside_of_their_table(saved: Path, column: int) -> None:
    """Their checksums are right; they count as out of vocabulary."""
    workflow = compiled.load(saved)
    whole = np.array(workflow._words)
    begin, slots, wide = workflow._regions[column][:3]
    table = slice(begin + wide, begin + slots * (1 + wide), 1 + wide)
    rows = parse_text(["3,-5,a", "ffffffff,1099511627776,bc"])
    shift = np.uint64(0 if wide else 32)
    for number in (5, 2**31 - 1, 2**32 - 1, 1):  # the last id is 4; negative ones; the null's
        words = whole.copy()
        full = np.flatnonzero(words[table] >> shift)
        words[table][full] &= np.uint64(0 if wide else 2**32 - 1)
        words[table][full] |= np.uint64(number) << shift
        _put(saved, "tables.npy", words)
        assert set(compiled.load(saved).transform(rows).ids.column(column).tolist()) == {2}


def parse_text(lines: list[str]):
    """Rows of hex, int, string; as the readers would give them."""
    fields = [line.split(",") for line in lines]
    categorical = [
        np.array([int(f[0], 16) for f in fields], np.uint32),
        np.array([int(f[1]) for f in fields]),
        pa.array([f[2] for f in fields], pa.string()),
    ]
    return raw_rows(np.zeros(len(lines), np.uint8), categorical)


def test_plans_that_do_not_fit(saved: Path) -> None:
    whole = (saved / "compiled" / "compiled.json").read_text()

    def expect(edit: Callable[[dict], None], error: type, match: str) -> None:
        _edit_plan(saved, edit)
        _expect_refusal(saved, match, error)
        (saved / "compiled" / "compiled.json").write_text(whole)

    expect(lambda plan: plan.update(format="x"), BadInputError, "not a compiled workflow")
    expect(lambda plan: plan.update(format_version=99), SchemaError, "format version 99")
    expect(lambda plan: plan.update(workflow_digest="ab"), SchemaError, "another workflow")
    expect(lambda plan: plan.update(tables=[]), BadInputError, "damaged")
    expect(lambda plan: plan["tables"].pop("c_int"), BadInputError, "compiled.json.*damaged")
    for key, value in (
        ("begin", -1), ("begin", 10**9), ("slots", 0), ("text", 3), ("values", 10**6),
        ("wide", False),
    ):  # fmt: skip
        expect(
            lambda plan, key=key, value=value: plan["tables"]["c_string"].update({key: value}),
            BadInputError,
            "compiled.json.*damaged",
        )
    (saved / "compiled" / "compiled.json").write_text("{")
    _expect_refusal(saved, r"compiled.json: cannot be read")


def test_of_another_workflow(saved: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    fitted = Fitted({}, _vocabularies({"c_int": np.array([1, 2])}))
    write_workflow(other, SPEC, fitted)
    shutil.rmtree(other / "compiled")
    shutil.copytree(saved / "compiled", other / "compiled")
    _expect_refusal(other, "compiled from another workflow", SchemaError)
    assert main(["compile", str(other)]) == 0
    assert compiled.load(other, verify=True).digest == inspect(other).digest


def test_vocabularies_that_are_not_what_is_described(saved: Path) -> None:
    """Building refuses them, and leaves nothing that could be loaded."""
    description = inspect(saved)

    def expect(name: str, values, match: str) -> None:
        file = saved / description.vocabularies[name].file
        whole = file.read_bytes()
        pq.write_table(pa.table({name: values}), file)
        with pytest.raises(BadInputError, match=match):
            compiled.build(saved, description)
        file.write_bytes(whole)
        _expect_refusal(saved, "not compiled")
        assert not list((saved / "compiled").glob(".*"))

    expect("c_hex32", pa.array([1, 1]), r"unique.c_hex32.*the vocabulary has value 1 twice")
    expect("c_int", pa.array([2**40, 2**40]), "twice")
    expect("c_hex32", pa.array([1, 2**32]), "values of over 32 bits")
    expect("c_hex32", pa.array([1, 2, 3]), "values instead of 2")
    expect("c_hex32", pa.array([1]), "values instead of 2")
    expect("c_int", pa.array(["a", "b"]), "expected .*int64.* without nulls")
    expect("c_string", pa.array(["a", None]), "without nulls")
    file = saved / description.vocabularies["c_int"].file
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(BadInputError, match=r"unique.c_int.parquet: damaged"):
        compiled.build(saved, description)


def test_a_damaged_vocabulary_is_not_compiled(saved: Path) -> None:
    """A flipped bit would make a known value out of vocabulary."""
    file = next((saved / "artifacts").rglob("unique.*.parquet"))
    flip_bit(file)
    with pytest.raises(BadInputError, match="not the file that was written"):
        compiled.build(saved)
