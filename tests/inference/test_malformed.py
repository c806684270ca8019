"""Bundles with anything in them, and bundles that change while they are served."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import numpy as np
import pytest

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.base.files.artifact import FileEntry
from nvt_torchrec.base.files.atomic import read_json
from nvt_torchrec.base.files.validation import parse_strict_json
from nvt_torchrec.inference.__main__ import main
from nvt_torchrec.inference.model.bundle import FORMAT as BUNDLE_FORMAT
from nvt_torchrec.inference.model.bundle import write_bundle
from nvt_torchrec.inference.predictor import Predictor
from tests.inference.bundles import ROWS, make_bundle
from tests.inference.conftest import Trained
from tests.mutations import edit_json, expect_own_errors, flip_bit
from tests.shell import python


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """Of weights that nobody trained."""
    return make_bundle(tmp_path / "bundle")


def _put(bundle: Path, name: str, content: np.ndarray) -> None:
    """Put an array into a bundle as if it had been written so."""
    np.save(bundle / name, content)
    value = read_json(bundle / "bundle.json", "a bundle")
    file = bundle / name
    value["files"][name] = FileEntry.from_file(file).to_dict()
    BUNDLE_FORMAT.write(bundle / "bundle.json", value)


def test_descriptions(bundle: Path) -> None:
    file = bundle / "bundle.json"

    def sign() -> None:
        with contextlib.suppress(ValueError):
            value = parse_strict_json(file.read_bytes())
            if isinstance(value, dict) and "format" in value:
                edit_json(file, lambda value: value.update(blake2b=BUNDLE_FORMAT.digest(value)))

    def use() -> None:
        Predictor.load(bundle, check=True).predict(ROWS)

    expect_own_errors(file, use, rounds=150, after=sign)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("weights/module.bottom.0.weight.npy", np.zeros((4, 3), np.float32)),
        ("weights/module.bottom.0.weight.npy", np.zeros((0, 2), np.float32)),
        ("weights/module.bottom.0.weight.npy", np.zeros((4, 2), np.float64)),
        ("weights/module.bottom.0.bias.npy", np.zeros(1, np.float32)),
        ("weights/module.top.0.weight.npy", np.zeros((6, 8), np.float32)),
        ("weights/module.top.1.weight.npy", np.zeros((2, 6), np.float32)),
        ("weights/table.npy", np.zeros((61, 3), np.float32)),
        ("weights/table.npy", np.zeros((61, 0), np.float32)),
        ("weights/table.npy", np.zeros((62, 4), np.float32)),
        ("weights/table.npy", np.zeros((61, 4), object)),
    ],
)
def test_arrays_that_make_no_model(bundle: Path, name: str, content: np.ndarray) -> None:
    """With the right digests; found when it is opened, not by the first request."""
    if content.dtype == object:
        content[:] = os  # would be pickled
        content = content.astype(str).astype(object)
    _put(bundle, name, content)
    with pytest.raises(BadInputError, match="damaged"):
        Predictor.load(bundle, check=True)


def test_every_file_that_is_read_is_listed(bundle: Path) -> None:
    """Otherwise comparing digests would say nothing of it."""
    value = read_json(bundle / "bundle.json", "a bundle")
    for name in ("weights/table.npy", "weights/module.top.1.bias.npy"):
        files = {key: entry for key, entry in value["files"].items() if key != name}
        BUNDLE_FORMAT.write(bundle / "bundle.json", {**value, "files": files})
        with pytest.raises(BadInputError, match=f"does not list {name}"):
            Predictor.load(bundle)
    files = value["files"] | {"../workflow/metadata.json": value["files"]["workflow/metadata.json"]}
    BUNDLE_FORMAT.write(bundle / "bundle.json", {**value, "files": files})
    with pytest.raises(BadInputError, match=r"\.\./workflow/metadata.json' is not inside"):
        Predictor.load(bundle)


def test_a_bundle_by_a_relative_path(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(bundle / "weights")
    expected = Predictor.load(bundle).predict(ROWS)
    np.testing.assert_array_equal(Predictor.load("..", check=True).predict(ROWS), expected)


@pytest.mark.parametrize("file", ["weights/table.npy", "workflow/compiled/tables.npy"])
def test_commands_compare_digests(bundle: Path, tmp_path: Path, file: str, capsys) -> None:
    flip_bit(bundle / file, -2)
    rows = tmp_path / "rows.tsv"
    rows.write_text("1\t\t7\t5\n")
    flags = ["predict", "--bundle", str(bundle), "--input", str(rows)]
    assert main([*flags, "--output", str(tmp_path / "a.parquet")]) == 2
    assert (
        f"{file}: not the file that was written (its sha256 digest differs)"
        in capsys.readouterr().err
    )
    assert main([*flags, "--output", str(tmp_path / "b.parquet"), "--skip_digests"]) == 0


@pytest.mark.usefixtures("warm_trials")
def test_a_byte_of_any_weight_is_noticed(bundle: Path, tmp_path: Path, capsys) -> None:
    """By each command; those of layers, which are read at once, also without ``check``."""
    for file in sorted((bundle / "weights").glob("*.npy")):
        whole = file.read_bytes()
        flip_bit(file, -3)
        commands = [
            ["predict", "--bundle", bundle, "--input", file, "--output", tmp_path / "x.parquet"],
            ["publish", bundle, "--to", tmp_path / "served"],
            ["export", "--bundle", bundle, "--output", tmp_path / "onnx"],
            ["lineage", bundle],
        ]
        for command in commands:
            assert main([str(part) for part in command]) == 2
            assert f"{file.name}: not the file that was written" in capsys.readouterr().err
        if file.name != "table.npy":
            with pytest.raises(BadInputError, match=f"{file.name}: not the file that was written"):
                Predictor.load(bundle)
        file.write_bytes(whole)


def test_a_file_that_is_cut_short_while_it_is_served(bundle: Path) -> None:
    """In a process of its own: this was a SIGBUS."""
    program = (
        "import os, sys; from tests.inference.test_malformed import *\n"
        "for name, size in ('weights/table.npy', 200), ('workflow/compiled/text_begins.npy', 0):\n"
        "    file = Path(sys.argv[1], name); whole = file.read_bytes()\n"
        "    predictor = Predictor.load(sys.argv[1]); predictor.predict(ROWS)\n"
        "    os.truncate(file, size)\n"
        "    with pytest.raises(BadInputError, match=name + ': was written to or truncated'):\n"
        "        predictor.predict(ROWS)\n"
        "    file.write_bytes(whole)\n"
    )
    done = python("-c", program, bundle, warm=True)
    assert done.returncode == 0, done.stderr


def test_a_file_that_is_written_over_or_replaced(bundle: Path) -> None:
    predictor = Predictor.load(bundle)
    expected = predictor.predict(ROWS)
    table = bundle / "weights" / "table.npy"
    content = table.read_bytes()
    other = table.with_name("other.npy")
    other.write_bytes(content[:128] + bytes(len(content) - 128))
    kept = table.with_name("kept.npy")
    os.link(table, kept)
    other.rename(table)  # harms nobody: what is mapped stays
    np.testing.assert_array_equal(predictor.predict(ROWS), expected)
    kept.write_bytes(content[:128] + bytes(len(content) - 128))
    with pytest.raises(BadInputError, match="written to"):
        predictor.predict(ROWS)


def test_a_bus_error_is_printed(tmp_path: Path) -> None:
    """In the milliseconds between the look at a file and its use nothing else is possible."""
    program = (
        "import os, signal; from nvt_torchrec.inference.__main__ import main;"
        f"main(['serve', '--bundle', {str(tmp_path)!r}]);"
        "os.kill(os.getpid(), signal.SIGBUS)"
    )
    done = python("-c", program, warm=True)
    assert done.returncode == -7
    assert "Fatal Python error: Bus error" in done.stderr


@pytest.mark.parametrize("tables", ["float32", "float16", "int8"])
def test_weights_that_are_not_finite(trained: Trained, tmp_path: Path, tables: str) -> None:
    """Of a run that diverged: refused when they are opened, not when rows are scored."""
    path = tmp_path / "bundle"
    write_bundle(trained.workflow, trained.checkpoint, path, tables=tables)
    Predictor.load(path, check=True)
    table = "ranges" if tables == "int8" else "table"
    for name in (f"weights/{table}.npy", "weights/module.top.1.bias.npy"):
        array = np.load(path / name)
        before = array.flat[-1]
        array.flat[-1] = np.nan if name.endswith("bias.npy") else np.inf
        _put(path, name, array)
        with pytest.raises(BadInputError, match=f"{name} holds values that are not finite"):
            Predictor.load(path, check=True)
        array.flat[-1] = before
        _put(path, name, array)
    Predictor.load(path, check=True)


def test_scores_that_are_not_finite(bundle: Path, tmp_path: Path, capsys) -> None:
    """Of weights that are: refused with the row whose embedding it is."""
    array = np.load(bundle / "weights/table.npy")
    array[-1] = 3e38
    _put(bundle, "weights/table.npy", array)
    predictor = Predictor.load(bundle)
    ids = predictor.workflow.transform(predictor.read(ROWS)).ids.column(1)
    rows = [ROWS[int(ids.argmin())]] * 3 + [ROWS[int(ids.argmax())]]
    with pytest.raises(BadInputError, match="row 3: the model computed the probability nan"):
        predictor.predict(rows)
    file = tmp_path / "rows.tsv"
    file.write_text("".join(f"{r['int_0']}\t\t{r['cat_0']}\t{r['cat_1']}\n" for r in rows))
    flags = ["--bundle", str(bundle), "--input", str(file), "--output", str(tmp_path / "x")]
    assert main(["predict", *flags, "--skip_digests"]) == 2
    assert "row 3: the model computed the probability nan" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
