"""The weights of a trained model: from a training checkpoint, or from a bundle's arrays."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from clicklog.errors import SchemaError, SettingsError
from clicklog.schema import TableSchema
from clicklog.versions import check_training_stack
from inference.model.scoring import Layer, ServingModel
from inference.model.tables import Table

if TYPE_CHECKING:
    from dlrm.config import ModelConfig
    from dlrm.model import Scorer


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """What of a model has to fit a workflow.

    Attributes:
        dense: names of the dense features, in order.
        categorical: names of the categorical features, in order.
        num_embeddings: rows of each feature's table.
        workflow_digest: of the workflow whose data the model was trained on; "" if unknown.
    """

    dense: tuple[str, ...]
    categorical: tuple[str, ...]
    num_embeddings: tuple[int, ...]
    workflow_digest: str

    def __post_init__(self) -> None:
        if len(self.categorical) != len(self.num_embeddings):
            raise ValueError(f"{len(self.categorical)} columns, {len(self.num_embeddings)} tables")


def usable(device: torch.device | str) -> torch.device:
    """The device. Raises SettingsError if there is none such."""
    try:
        chosen = torch.device(device)
        torch.empty(1, device=chosen)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise SettingsError(f"--device {device}: {reason}", "the CPU always works: cpu") from error
    return chosen


def shape_of_checkpoint(record: dict[str, Any]) -> ModelShape:
    """From a checkpoint's ``model.json``."""
    from dlrm.config import ModelConfig

    config = ModelConfig.from_dict(record.get("model"))
    digest = record["training"].get("workflow_digest") or ""
    return ModelShape(config.dense, config.categorical, config.num_embeddings, str(digest))


def read_checkpoint(path: Path | str, device: torch.device) -> tuple[ServingModel, ModelShape]:
    """The model of a training checkpoint, whatever its world size and sharding plan.

    Raises:
        BadInputError: the checkpoint is missing, incomplete or damaged.
        SchemaError: it is no checkpoint of this program.
        UnsupportedStackError: TorchRec is not installed.
    """
    check_training_stack()
    from dlrm.checkpoint.store import load_model, read_model_file  # they bring TorchRec: seconds

    shape = shape_of_checkpoint(read_model_file(path))
    scorer, config = load_model(path, device)
    return from_scorer(scorer, config), shape


def from_scorer(scorer: Scorer, config: ModelConfig) -> ServingModel:
    """The weights of a :class:`dlrm.model.Scorer`, on its memory.

    Raises:
        SchemaError: the model makes several ids of one, for benchmarks; a workflow does not.
    """
    if config.multi_hot_sizes:
        raise SchemaError(
            "a model with multi_hot_sizes cannot be served",
            "serve one that was trained without --multi_hot_sizes; train_torchrec.py --mode test "
            "evaluates it",
        )
    dlrm = scorer.dlrm
    layers = {"top": _layers(dlrm.over_arch)}
    if config.dense:
        layers["bottom"] = _layers(dlrm.dense_arch)
    if config.interaction_type == "dcn":
        cross = dlrm.inter_arch.crossnet
        inner = [kernel.detach() for kernel in cross.V_kernels]
        layers["cross_in"] = [(weight, weight.new_zeros(len(weight))) for weight in inner]
        layers["cross_out"] = [
            (kernel.detach(), bias.detach())
            for kernel, bias in zip(cross.W_kernels, cross.bias, strict=True)
        ]
    elif config.interaction_type == "projection":
        layers["branch1"] = _layers(dlrm.inter_arch.interaction_branch1)
        layers["branch2"] = _layers(dlrm.inter_arch.interaction_branch2)
    return ServingModel.make(Table(scorer.tables), config.num_embeddings, layers)


def _layers(module: torch.nn.Module) -> list[Layer]:
    linear = [part for part in module.modules() if isinstance(part, torch.nn.Linear)]
    return [(layer.weight.detach(), layer.bias.detach()) for layer in linear]


def check_pair(
    schema: TableSchema, digest: str, shape: ModelShape, workflow: Path | str, model: Path | str
) -> None:
    """Check that a model was trained on what a workflow writes.

    Args:
        schema: of the data that the workflow writes.
        digest: of the workflow.
        shape: of the model.
        workflow: names the workflow in errors.
        model: names the model in errors.

    Raises:
        SchemaError: it was not.
    """
    remedy = "pass the workflow whose data the model was trained on"
    if shape.workflow_digest and shape.workflow_digest != digest:
        raise SchemaError(
            f"{model} was trained on data of another workflow (digest "
            f"{shape.workflow_digest[:12]}…) than {workflow} (digest {digest[:12]}…)",
            "pass the OUT/workflow beside the OUT/criteo_binary it was trained on",
        )
    for what, ours, theirs in (
        ("dense columns", schema.dense, shape.dense),
        ("categorical columns", schema.categorical, shape.categorical),
    ):
        if ours != theirs:
            raise SchemaError(
                f"{what} of {workflow}: {', '.join(ours)}; of {model}: {', '.join(theirs)}", remedy
            )
    for name, needed, rows in zip(
        schema.categorical, schema.table_sizes, shape.num_embeddings, strict=True
    ):
        if needed > rows:
            raise SchemaError(
                f"column {name}: {workflow} gives ids up to {needed - 1}, the table in "
                f"{model} has {rows} rows",
                remedy,
            )
