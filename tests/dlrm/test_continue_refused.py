"""``--continue_from``: checkpoints, data and settings that are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from nvt_torchrec.base.errors import BadInputError, SchemaError, SettingsError
from nvt_torchrec.dlrm.checkpoint.record import CheckpointRecord
from tests.dlrm.continuing import flags, train_checkpoints
from tests.dlrm.generations import DIGESTS, table_sizes, write_output, write_workflow
from tests.dlrm.runs import train_here
from tests.dlrm.test_checkpoint import change_model_file


@pytest.fixture(scope="module")
def checkpoint(outputs, tmp_path_factory) -> Path:
    kind = ("sgd", 1, "table_wise")
    return train_checkpoints(tmp_path_factory.mktemp("trained"), outputs[0], [kind])[kind]


def refusal(data: Path, checkpoint: Path, *more: str, optimizer: str = "sgd", error=SchemaError):
    with pytest.raises(error) as caught:
        train_here(*flags(data, optimizer, f"--continue_from={checkpoint}", *more))
    return str(caught.value)


@pytest.fixture
def copy(checkpoint, tmp_path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))


def test_what_is_no_ancestor_is_refused(outputs, copy, tmp_path):
    record = CheckpointRecord.read(copy).training
    change_model_file(copy, training={**record, "workflow_digest": "f" * 64})
    text = refusal(outputs[2], copy)
    assert (
        f"of workflow {'f' * 12}… (generation 0), which is none of the generations 0 to 2" in text
    )
    assert "train from scratch" in text
    change_model_file(copy, training={**record, "workflow_digest": None})
    assert "does not name the workflow of its data" in refusal(outputs[2], copy)
    change_model_file(copy, training={**record, "workflow_digest": DIGESTS[2]})
    assert "none of the generations 0 to 1" in refusal(outputs[1], copy), "a descendant"


def test_data_without_a_lineage(outputs, copy, tmp_path):
    data = write_output(tmp_path / "out", 2)
    file = tmp_path / "out" / "workflow" / "metadata.json"
    value = json.loads(file.read_text())
    del value["lineage"]
    value["files"] = {k: v for k, v in value["files"].items() if not k.startswith("lineage/")}
    file.write_text(json.dumps(value))
    assert "names no generations" in refusal(data, copy)
    shutil.rmtree(file.parent)
    assert "no such file" in refusal(data, copy, error=BadInputError)
    write_workflow(file.parent, 2)
    (file.parent / "lineage" / "reused.2.parquet").unlink()
    assert "reused.2.parquet: missing" in refusal(data, copy, error=BadInputError)


def test_another_model_is_refused(outputs, copy):
    assert "embedding_dim was 8, is 16" in refusal(
        outputs[2], copy, "--embedding_dim=16", "--dense_arch_layer_sizes=16"
    )
    text = refusal(outputs[2], copy, "--over_arch_layer_sizes=8,1")
    assert "over_arch_layer_sizes was (16, 1), is (8, 1)" in text
    text = refusal(outputs[2], copy, optimizer="adam", error=SettingsError)
    assert "optimizer was sgd, is adam\n  -> give --optimizer sgd" in text


def test_a_table_in_which_new_values_would_share_rows(outputs, copy):
    sizes = ",".join(map(str, (33, *table_sizes(2)[1:])))
    more = ["--hash_indices", f"--num_embeddings_per_feature={sizes}"]
    text = refusal(outputs[2], copy, *more, error=SettingsError)
    assert "column cat_0 has 33 ids in the checkpoint's generation and 43 now" in text
