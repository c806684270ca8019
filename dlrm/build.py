"""Build the model of a run, shard it over the ranks, and make what trains it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torchrec.distributed import TrainPipelineSparseDist
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.models.dlrm import DLRM
from torchrec.optim.keyed import CombinedOptimizer

from nvt_torchrec.dlrm.config import ModelConfig
from nvt_torchrec.dlrm.launch.distributed import Group
from nvt_torchrec.dlrm.layers import align_inputs
from nvt_torchrec.dlrm.model import StepOutput, TrainBatch, TrainModel, build_dlrm
from nvt_torchrec.dlrm.optim.combined import combine_optimizers, fuse_table_optimizer
from nvt_torchrec.dlrm.settings.train_settings import TrainSettings
from nvt_torchrec.dlrm.sharding.distribute import shard_model
from nvt_torchrec.nvt_loader import KJTLoader

log = logging.getLogger(__name__)


def build(
    settings: TrainSettings,
    config: ModelConfig,
    group: Group,
    loaders: Mapping[str, KJTLoader] | None = None,
) -> tuple[DistributedModelParallel, CombinedOptimizer, dict[str, Any]]:
    """Build and shard the model (collective).

    ``loaders`` of the splits share the ranks' GPUs with the tables.

    Returns:
        The sharded model, its optimizer, and on rank 0 the plan (:func:`shard_model`).

    Raises:
        SettingsError: The tables do not fit into the ranks' memory.
    """
    if group.device.type == "cpu" and group.rank == 0:
        if settings.allow_tf32:
            log.warning("--allow_tf32 has no effect on a CPU")
        if settings.table_precision == "fp16":
            log.warning(
                "--table_precision fp16 on a CPU: FBGEMM rounds to the nearest number there, so "
                "small updates are lost; on GPUs it rounds stochastically"
            )
    precision = settings.table_precision
    dlrm = build_dlrm(config, seed=settings.seed, device=group.device, tables=precision)
    model = TrainModel(dlrm, group.world_size, settings.amp, settings.compile_dense)
    fuse_table_optimizer(model, settings)
    set_up_dense(dlrm, settings)
    held = _bytes_of(loaders or {})
    sharded, plan = shard_model(model, config, settings, group, held)
    return sharded, combine_optimizers(sharded, settings), plan


def _bytes_of(loaders: Mapping[str, KJTLoader]) -> int:
    """Return the bytes of a GPU that the loaders take: train's, and the one that is evaluated."""
    sizes = {split: loader.device_bytes for split, loader in loaders.items()}
    return sizes.pop("train", 0) + max(sizes.values(), default=0)


def set_up_dense(dlrm: DLRM, settings: TrainSettings) -> None:
    """Apply the settings that say how the dense layers are computed.

    On GPUs ``torch.compile(mode="reduce-overhead")`` replays them as CUDA graphs, which has not run
    on a GPU yet; :class:`dlrm.model.TrainModel` marks the steps and copies what it returns.
    """
    torch.backends.cuda.matmul.allow_tf32 = settings.allow_tf32
    device = next(dlrm.over_arch.parameters()).device
    on_tensor_cores = device.type == "cuda" and (settings.amp or settings.allow_tf32)
    align_inputs(dlrm, aligned=on_tensor_cores)
    if settings.compile_dense:
        for part in (dlrm.dense_arch, dlrm.inter_arch, dlrm.over_arch):
            part.forward = torch.compile(part.forward, dynamic=False, mode="reduce-overhead")


class OneRankPipeline:
    """Training steps of one rank, with the interface of TorchRec's pipeline.

    There are no messages between ranks that could overlap with computing, and TorchRec's pipeline
    spends time in each step on that (tracing, streams, waiting for sizes).

    Attributes:
        batches: The batches that are fetched and not trained yet: always none.
    """

    def __init__(self, model: DistributedModelParallel, optimizer: CombinedOptimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self.batches: tuple[TrainBatch, ...] = ()

    def progress(self, batches: Iterator[TrainBatch]) -> StepOutput:
        """Train the next batch, or evaluate it if the model is in evaluation mode.

        Raises:
            StopIteration: There is no next batch.
        """
        batch = next(batches)
        if not self._model.training:
            return self._model(batch)[1]
        self._optimizer.zero_grad()
        loss, output = self._model(batch)
        loss.backward()
        self._optimizer.step()
        return output


Pipeline = OneRankPipeline | TrainPipelineSparseDist


def make_pipeline(
    model: DistributedModelParallel, optimizer: CombinedOptimizer, group: Group
) -> Pipeline:
    """Return what trains and evaluates the model, batch by batch, on this rank."""
    if group.world_size == 1:
        return OneRankPipeline(model, optimizer)
    return TrainPipelineSparseDist(model, optimizer, group.device)
