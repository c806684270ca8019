"""What makes a step of a batch: TorchRec's pipeline, or, alone, nothing of the kind."""

from __future__ import annotations

from collections.abc import Iterator

from torchrec.distributed import TrainPipelineSparseDist
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer

from dlrm.launch.distributed import Group
from dlrm.model import StepOutput, TrainBatch


class OneRank:
    """Steps of one rank, one after the other, with the interface of TorchRec's pipeline.

    There are no other ranks whose messages could overlap with computing, and what the pipeline
    does to overlap them (tracing, streams, waiting for sizes) takes time in each step.

    Attributes:
        batches: fetched and not trained yet: never any.
    """

    def __init__(self, model: DistributedModelParallel, optimizer: CombinedOptimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self.batches: tuple[TrainBatch, ...] = ()

    def progress(self, batches: Iterator[TrainBatch]) -> StepOutput:
        """Train the next batch, or, with a model in evaluation mode, evaluate it.

        Raises:
            StopIteration: there is none.
        """
        batch = next(batches)
        if not self._model.training:
            return self._model(batch)[1]
        self._optimizer.zero_grad()
        loss, output = self._model(batch)
        loss.backward()
        self._optimizer.step()
        return output


def make_pipeline(
    model: DistributedModelParallel, optimizer: CombinedOptimizer, group: Group
) -> OneRank | TrainPipelineSparseDist:
    """What trains this model on this rank."""
    if group.world_size == 1:
        return OneRank(model, optimizer)
    return TrainPipelineSparseDist(model, optimizer, group.device)
