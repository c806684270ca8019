"""The state of a run: its tensors in memory, as nested dicts that checkpoints store in files."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, TypeVar

import torch
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from nvt_torchrec.models.config import ModelConfig
from nvt_torchrec.training.launch.distributed import Group

T = TypeVar("T", dict[str, Any], torch.Tensor)


@dataclasses.dataclass(frozen=True)
class RunState:
    """The model and optimizer of a run, on this rank.

    Attributes:
        config: The model's shape.
        model: The sharded model.
        optimizer: Its optimizer.
        group: This rank.
        alone: Whether to save and load only the weights, without the optimizer's state.
    """

    config: ModelConfig
    model: DistributedModelParallel
    optimizer: CombinedOptimizer
    group: Group
    alone: bool = False

    def weights_alone(self) -> RunState:
        """Return this run with ``alone`` set."""
        return dataclasses.replace(self, alone=True)

    def tensors(self) -> dict[str, Any]:
        """Return all tensors, to save them or to load into them; they share the run's memory."""
        if self.alone:
            return {"model": self.model.state_dict()}
        self._make_state()
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict()["state"],
            "random": {f"rank_{self.group.rank}": torch.get_rng_state()},
        }

    def load(self, tensors: dict[str, Any]) -> None:
        """Load what :meth:`tensors` returns; random number generators may be missing."""
        self.model.load_state_dict(tensors["model"])
        if self.alone:
            return
        self._make_state()
        content = self.optimizer.state_dict()
        self.optimizer.load_state_dict({**content, "state": tensors["optimizer"]})
        if "random" in tensors:
            torch.set_rng_state(tensors["random"][f"rank_{self.group.rank}"])

    def _make_state(self) -> None:
        """Create the optimizers' state, if they have taken no step yet."""
        for _, part in self.optimizer.optimizers:
            if isinstance(part, KeyedOptimizerWrapper) and not part.state:
                _init_state(part)


def _init_state(optimizer: KeyedOptimizerWrapper) -> None:
    """Create the state that optimizers such as Adam only create in their first step.

    TorchRec's ``init_state`` takes such a step, with gradients of 0. Learning rate and weight decay
    are set to 0 for it, so that it changes no weight, and the step is not counted.
    """
    groups = optimizer.param_groups
    before = []
    for group in groups:
        before.append({name: group.get(name) for name in ("lr", "weight_decay")})
        group["lr"] = 0.0
        group["weight_decay"] = 0.0
    optimizer.init_state()
    optimizer.zero_grad()
    for group, values in zip(groups, before, strict=True):
        group.update(values)
    for state in optimizer.state.values():
        state["step"].zero_()


def list_local_tensors(state: Any) -> list[torch.Tensor]:
    """Return this rank's parts of a tensor or a nested dict of tensors; they share its memory."""
    if isinstance(state, ShardedTensor):
        return [shard.tensor for shard in state.local_shards()]
    if not isinstance(state, dict):
        return [state.detach()]
    tensors = []
    for value in state.values():
        tensors += list_local_tensors(value)
    return tensors


def count_bytes(state: dict[str, Any]) -> int:
    """Return the size of this rank's part of a nested dict of tensors, in bytes."""
    return sum(tensor.nbytes for tensor in list_local_tensors(state))


def copy_state(state: T) -> T:
    """Copy a tensor, or a nested dict of tensors, to main memory."""
    if isinstance(state, dict):
        return {key: copy_state(value) for key, value in state.items()}
    if not isinstance(state, ShardedTensor):
        return state.detach().to("cpu", copy=True)
    copies = copy.copy(state)
    copies._local_shards = []
    for shard in state.local_shards():
        metadata = ShardMetadata(
            shard.metadata.shard_offsets,
            shard.metadata.shard_sizes,
            f"rank:{torch.distributed.get_rank()}/cpu",
        )
        copies._local_shards.append(Shard(copy_state(shard.tensor), metadata))
    return copies
