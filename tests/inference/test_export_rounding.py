"""An exported file may differ from its bundle by rounding, and by nothing else."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.formats.feature_spec import CategoricalColumn, DenseColumn, FeatureSpec
from nvt_torchrec.inference.export import comparison
from nvt_torchrec.inference.export.onnx_file import FILE, export_onnx
from nvt_torchrec.inference.predictor import Predictor
from nvt_torchrec.workflows.description import inspect
from nvt_torchrec.workflows.vocabulary import FittedVocabulary
from nvt_torchrec.workflows.writer import Fitted, write_workflow
from tests.inference.test_export import random_bundle

#: Shares of clicks, such as ``user_rate``. A value far from them is thousands of standard
#: deviations, and the model adds up terms as large, which nearly cancel each other out.
NAMES = [f"share_{k}" for k in range(6)]
SPEC = FeatureSpec(
    "label",
    tuple(DenseColumn(name, raw="float", transform="normalize") for name in NAMES),
    (CategoricalColumn("c", raw="int"),),
)


def _with_weights_off_by(predictor: Predictor, share: float) -> Predictor:
    """Return a predictor whose weights are larger or smaller by a share of each."""
    head = copy.deepcopy(predictor.model.head)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in head.parameters():
            signs = torch.randint(0, 2, weight.shape, generator=generator) * 2 - 1
            weight *= 1 + share * signs
    return Predictor(predictor.workflow, dataclasses.replace(predictor.model, head=head))


def test_rounding_of_large_terms_is_right_and_other_weights_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = FittedVocabulary(np.arange(9), np.ones(9, int), {"null": 0, "oov": 0, "unique": 0})
    statistics = {name: {"mean": 0.1, "std": 0.0002} for name in NAMES}
    write_workflow(tmp_path / "workflow", SPEC, Fitted(statistics, {"c": values}))
    exported = random_bundle(tmp_path / "workflow", tmp_path / "bundle", 0)
    export_onnx(tmp_path / "bundle", tmp_path / "export")
    description, file = inspect(tmp_path / "workflow"), tmp_path / "export" / FILE

    rounded = _with_weights_off_by(exported, 2e-7)  # two units in the last place
    comparison.check_file(file, rounded, description, {})
    with monkeypatch.context() as changed:  # as it was: beyond the tolerance of usual rows
        changed.setattr(comparison, "_ROUNDING_FACTOR", 0.0)
        with pytest.raises(SettingsError, match=r"differ from the bundle's by 0\.000\d+; rounding"):
            comparison.check_file(file, rounded, description, {})

    wrong = _with_weights_off_by(exported, 5e-4)
    with pytest.raises(SettingsError, match="was not written"):
        comparison.check_file(file, wrong, description, {})
