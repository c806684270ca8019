"""The loader under TorchRec's training pipeline, which draws batches ahead of the trained one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.datasets.utils import Batch
from torchrec.distributed import TrainPipelineSparseDist
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.models.dlrm import DLRM, DLRMTrain

from nvt_torchrec.nvt_loader import KJTLoader
from tests.nvt_loader.data import write_split
from tests.nvt_loader.helper import assert_same, rows_of

ROWS, BATCH, STEPS = 757, 96, 8


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    root = tmp_path_factory.mktemp("split")
    write_split(root, {"train": [300, 450, 7]})
    return root / "train"


@pytest.fixture
def pipeline():
    """A pipeline of a small DLRM in this process, and a list of the batches that it trains."""
    trained: list = []

    class Recorded(DLRMTrain):
        def forward(self, batch):
            if isinstance(batch, Batch):  # the pipeline traces the model once, with a proxy
                trained.append(batch)
            return super().forward(batch)

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        tables = [
            EmbeddingBagConfig(
                name=f"t{i}", embedding_dim=4, num_embeddings=size, feature_names=[f"cat_{i}"]
            )
            for i, size in enumerate((10, 50, 200))
        ]
        bags = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
        model = DistributedModelParallel(
            Recorded(DLRM(bags, 3, [8, 4], [8, 1])), device=torch.device("cpu")
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        yield TrainPipelineSparseDist(model, optimizer, torch.device("cpu")), trained
    finally:
        dist.destroy_process_group()


def run(pipeline, iterator, steps: int = 10**6) -> int:
    """Train until the iterator ends, at most ``steps`` steps; how many."""
    for done in range(steps):
        try:
            pipeline.progress(iterator)
        except StopIteration:
            return done
    return steps


def test_every_epoch_is_trained_whole(train, pipeline):
    pipeline, trained = pipeline
    loader = KJTLoader(train, BATCH, shuffle=True, device="cpu")
    assert [run(pipeline, iter(loader)) for _ in range(3)] == [STEPS] * 3
    loader.check_epoch()
    for epoch in range(3):
        rows = rows_of(trained[epoch * STEPS : (epoch + 1) * STEPS])
        assert sorted(rows) == list(range(ROWS))


def test_what_was_drawn_but_not_trained_comes_again(train, pipeline):
    pipeline, trained = pipeline
    whole = list(KJTLoader(train, BATCH, shuffle=True, device="cpu"))
    loader = KJTLoader(train, BATCH, shuffle=True, device="cpu")
    assert run(pipeline, iter(loader), 3) == len(trained) == 3
    assert loader.state_dict()["step"] > 3  # the pipeline holds them
    state = loader.state_dict(trained_steps=3)
    resumed = KJTLoader(train, BATCH, shuffle=True, device="cpu")
    resumed.load_state_dict(state)
    assert_same(trained + list(resumed), whole)
