"""Weights of a run that diverged are refused when they are opened, not when rows are scored."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.base.files.artifact import FileEntry
from nvt_torchrec.base.files.atomic import read_json, write_json
from nvt_torchrec.inference import Predictor, write_bundle
from tests.inference.conftest import Trained


@pytest.mark.parametrize("tables", ["float32", "float16", "int8"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_bundles(trained: Trained, tmp_path: Path, tables: str, value: float) -> None:
    path = tmp_path / "bundle"
    write_bundle(trained.workflow, trained.checkpoint, path, tables=tables)
    Predictor.load(path, check=True)
    table = "ranges" if tables == "int8" else "table"
    for name in (f"weights/{table}.npy", "weights/top.1.bias.npy"):
        array = np.load(path / name)
        before = array.flat[-1]
        array.flat[-1] = value
        _write(path, name, array)
        with pytest.raises(BadInputError, match=f"{name} holds values that are not finite"):
            Predictor.load(path, check=True)
        array.flat[-1] = before
        _write(path, name, array)
    Predictor.load(path, check=True)


def _write(bundle: Path, name: str, array: np.ndarray) -> None:
    """As if the bundle had been made so."""
    np.save(bundle / name, array)
    value = read_json(bundle / "bundle.json", "a bundle")
    value["files"][name]["sha256"] = FileEntry.of(bundle / name).sha256
    write_json(bundle / "bundle.json", value)
