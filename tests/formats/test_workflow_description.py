"""The description of a saved workflow: what all programs read of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.base.files.artifact import FileEntry
from nvt_torchrec.base.hashing import murmur3_int, murmur3_string
from nvt_torchrec.formats.feature_spec import CategoricalColumn, FeatureSpec
from nvt_torchrec.formats.vocabularies import Vocabulary
from nvt_torchrec.formats.workflow_description import WorkflowDescription, identify
from tests.mutations import edit_json, flip_bit
from tests.training.generations import SPEC, values_of, write_workflow


@pytest.fixture
def workflow(tmp_path) -> Path:
    path = tmp_path / "workflow"
    write_workflow(path, 2)
    return path


def change(path: Path, **values) -> None:
    edit_json(path / "metadata.json", lambda value: value.update(values))


def test_by_which_id_a_value_was_encoded_before(workflow):
    description = WorkflowDescription.read(workflow)
    spread, plain = SPEC.categorical[4], SPEC.categorical[0]
    ids = np.array([6, 30, 7, 38])
    expected = 2 + murmur3_int(values_of("cat_4")[ids - 6]) % 4
    assert description.oov_ids(spread, ids).tolist() == expected.tolist()
    assert len(set(expected.tolist())) > 1
    assert description.oov_ids(plain, ids).tolist() == [2, 2, 2, 2]
    assert description.oov_ids(spread, ids[:0]).tolist() == []
    with pytest.raises(BadInputError, match="33 values instead of more than 33"):
        description.oov_ids(spread, np.array([39]))


def test_values_that_are_text(tmp_path):
    column = CategoricalColumn("name", raw="string", freq_threshold=2, num_buckets=7)
    spec = FeatureSpec("label", (), (column,))
    values = pa.array(["a", "bcdef", "", "ü"])
    file = tmp_path / "values" / "unique.name.parquet"
    file.parent.mkdir()
    pq.write_table(pa.table({"name": values, "name_size": [1, 1, 1, 1]}), file)
    vocabulary = Vocabulary("name", "values/unique.name.parquet", 4, 13, {})
    files = {vocabulary.file: FileEntry.from_file(file)}
    description = WorkflowDescription(tmp_path, spec, {}, {"name": vocabulary}, {}, "", files, ())
    actual = description.oov_ids(column, np.array([12, 9, 10]))
    assert actual.tolist() == (2 + murmur3_string(values.take([3, 0, 1])) % 7).tolist()


def test_no_workflow(tmp_path):
    assert identify(tmp_path) is None
    (tmp_path / "metadata.json").write_text('{"versions": {"nvtabular": "23.8.0"}}')
    assert identify(tmp_path) is None, "saved by NVTabular itself"
    (tmp_path / "metadata.json").unlink()
    with pytest.raises(BadInputError, match=r"metadata\.json: no such file"):
        WorkflowDescription.read(tmp_path)


def test_a_damaged_file(workflow):
    file = workflow / WorkflowDescription.read(workflow).vocabularies["cat_4"].file
    flip_bit(file, 10)
    with pytest.raises(BadInputError, match=r"unique\.cat_4\.parquet: not the file that was"):
        WorkflowDescription.read(workflow).oov_ids(SPEC.categorical[4], np.array([6]))
    file.unlink()
    with pytest.raises(BadInputError, match=r"unique\.cat_4\.parquet: missing"):
        WorkflowDescription.read(workflow).oov_ids(SPEC.categorical[4], np.array([6]))


def test_a_lineage_of_an_earlier_version(workflow):
    """It is read unless an id was given to another value."""

    def set_reused(count: int) -> None:
        edit_json(
            workflow / "metadata.json",
            lambda value: value["lineage"][1].update(reused={"cat_0": count}),
        )

    now = WorkflowDescription.read(workflow).lineage[1].values
    set_reused(0)
    assert WorkflowDescription.read(workflow).lineage[1].values == now
    set_reused(1)
    with pytest.raises(BadInputError, match="generation 1: ids were given to other values"):
        WorkflowDescription.read(workflow)
