"""--hash_indices and --max_table_size: tables with fewer rows than the data have ids."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nvt_torchrec.base.errors import SchemaError, SettingsError
from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.models.contract import fold_ids
from nvt_torchrec.training.settings.train_settings import fill_sizes, parse_settings
from nvt_torchrec.training.sharding.model_config import model_config
from tests.training.runs import (
    EXAMPLE_SGD,
    assert_same,
    config_of,
    events,
    train_here,
    train_until_pulled,
)

LIMITED = ["--max_table_size=40", "--hash_indices"]


def test_reserved_ids_and_those_below_the_size_keep_their_rows():
    ids = torch.arange(100, dtype=torch.int32)
    folded = fold_ids(ids, torch.tensor(40)).tolist()
    assert folded[:40] == list(range(40))
    assert folded[40:] == [3 + (i - 3) % 37 for i in range(40, 100)]
    assert folded[40] == 3
    assert fold_ids(torch.tensor([0, 1, 2]), torch.tensor(3)).tolist() == [0, 1, 2]


def sizes(data: Path, *flags: str) -> tuple[int, ...]:
    settings = parse_settings([*flags])
    schema = TableSchema.read(data)
    return model_config(fill_sizes(settings, 100, 1), schema).num_embeddings


def test_sizes(data):
    """The data need 10, 50, 200 and 3 rows."""
    assert sizes(data, *LIMITED) == (10, 40, 40, 3)
    given = "--num_embeddings_per_feature=7,60,150,3"
    assert sizes(data, given, "--hash_indices") == (7, 60, 150, 3)
    assert sizes(data, given, *LIMITED) == (7, 40, 40, 3)
    with pytest.raises(SettingsError, match=r"cat_2 needs 200 rows.*gets 150\n.*--hash_indices"):
        sizes(data, "--num_embeddings_per_feature=10,60,150,3")
    with pytest.raises(SettingsError, match="cat_0 needs 10 rows and gets 3, which the reserved"):
        sizes(data, "--num_embeddings_per_feature=3,60,200,3", "--hash_indices")
    with pytest.raises(SettingsError, match="cat_2: its ids share rows"):
        sizes(data, *LIMITED, "--gauc_column=cat_2")
    assert sizes(data, *LIMITED, "--gauc_column=cat_0")
    with pytest.raises(SettingsError, match="--loader merlin does not support --hash_indices"):
        parse_settings([*LIMITED, "--loader=merlin"])


def flags(data: Path, path: Path, *more: str) -> list[str]:
    paths = [f"--binary_path={data}", f"--checkpoint_dir={path}", f"--log_path={path / 'log'}"]
    rest = ["--checkpoint_freq=5", "--batch_size=32", "--learning_rate=0.1"]
    return [*EXAMPLE_SGD, *paths, *rest, f"--save_checkpoint_path={path / 'final'}", *more]


def test_a_run_keeps_its_tables(data, tmp_path, monkeypatch):
    """Resumed bitwise, continued and tested without the flags: the checkpoint knows them."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    result = train_here(*flags(data, whole, *LIMITED))
    config = config_of(whole / "final")
    assert (config.num_embeddings, config.hash_indices) == ((10, 40, 40, 3), True)
    train_until_pulled(monkeypatch, 12, *flags(data, broken, *LIMITED))
    train_here(*flags(data, broken), "--resume")
    assert_same(broken / "final", whole / "final")

    tested = train_here(
        f"--binary_path={data}", "--mode=test", f"--load_checkpoint_path={whole / 'final'}",
        f"--log_path={tmp_path / 'tested'}",
    )  # fmt: skip
    assert tested.metrics["test"]["log_loss"] == pytest.approx(
        result.metrics["test"]["log_loss"], abs=1e-6
    )
    assert events(whole / "log", "start")[-1]["settings"]["max_table_size"] == 40

    other = tmp_path / "other"
    with pytest.raises(SchemaError, match=r"another model: .*hash_indices was True"):
        train_here(
            *flags(data, other, f"--load_checkpoint_path={whole / 'final'}", "--no-hash_indices")
        )
