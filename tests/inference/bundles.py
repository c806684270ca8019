"""Small bundles that nobody trained, of any generation, whose probabilities are exact.

All weights are small integers and no dense value is used, so that every sum is exact in float32:
the probability of a row does not depend on the rows that share its batch.
"""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nvt_torchrec.formats.feature_spec import CategoricalColumn, DenseColumn, FeatureSpec
from nvt_torchrec.formats.vocabularies import Generation
from nvt_torchrec.inference.model.bundle import save_bundle
from nvt_torchrec.inference.model.scoring import JoinedTable, ServingModel
from nvt_torchrec.inference.model.served_checkpoint import CheckpointOrigin, Origin
from nvt_torchrec.inference.publish import PublishSettings, steps
from nvt_torchrec.models.head import build_head
from nvt_torchrec.workflows.description import inspect
from nvt_torchrec.workflows.vocabulary import FittedVocabulary
from nvt_torchrec.workflows.writer import Fitted, write_workflow
from tests.training.shapes import dlrm

SPEC = FeatureSpec(
    "label",
    (DenseColumn("int_0"), DenseColumn("int_1")),
    (CategoricalColumn("cat_0"), CategoricalColumn("cat_1", raw="int")),
)
VALUES, DIM = 50, 4
#: As JSON holds them; every value of ``cat_0`` once.
ROWS = [
    {"int_0": i, "int_1": None, "cat_0": f"{i % VALUES:x}", "cat_1": i % 7}
    for i in range(VALUES + 5)
]


def make_workflow(
    path: Path,
    *,
    seed: int = 0,
    generation: int = 0,
    equal: int = 1,
    columns: int = 2,
    parent: str = "",
) -> Path:
    """Write a workflow whose ids depend on the seed, with generations of a day each.

    The last ``equal`` generations are equal. ``parent`` is the digest of the generation before; ""
    for one that there is not.
    """
    spec = dataclasses.replace(SPEC, categorical=SPEC.categorical[:columns])
    rng = np.random.default_rng(seed)
    values = {"cat_0": rng.permutation(VALUES), "cat_1": rng.permutation(5)}
    observed = dict.fromkeys(("null", "oov", "unique"), 0)
    vocabularies = {
        name: FittedVocabulary(values[name], np.ones_like(values[name]), observed)
        for name in spec.categorical_names
    }
    statistics = {name: {"mean": 1.0, "std": 2.0} for name in SPEC.dense_names}
    fitted = Fitted(statistics, vocabularies)
    digest = write_workflow(path, spec, fitted).digest
    digests = [hashlib.sha256(bytes([number])).hexdigest() for number in range(generation)]
    digests[generation + 1 - equal :] = [digest] * (equal - 1)
    if parent:
        digests[-1] = parent
    counts = {name: len(vocabulary) for name, vocabulary in vocabularies.items()}
    ancestors = [Generation(n, other, (n,), counts, {}) for n, other in enumerate(digests)]
    write_workflow(path, spec, fitted, days=(generation,), ancestors=tuple(ancestors))
    return path


def make_bundle(
    path: Path,
    *,
    seed: int = 0,
    generation: int = 0,
    equal: int = 1,
    rows: int = VALUES + 3 + 5 + 3,
    columns: int = 2,
    origin: Origin | None = None,
    parent: str = "",
) -> Path:
    """Write a bundle whose ids and weights depend on the seed.

    Args:
        path: The directory to make; the workflow is put beside it.
        seed: Makes it another bundle.
        generation: The generation of the workflow.
        equal: How many of the last generations are equal.
        rows: The number of rows of its tables, for a larger file.
        columns: The number of categorical columns, 1 or 2.
        origin: Where it claims to come from; None: from a checkpoint of this generation.
        parent: The digest of the workflow that its own was extended from.
    """
    workflow = path.with_name(f"{path.name}.workflow")
    lineage = {"generation": generation, "equal": equal, "parent": parent}
    make_workflow(workflow, seed=seed, columns=columns, **lineage)
    generator = torch.Generator().manual_seed(seed)

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(-2, 3, shape, generator=generator).float()

    sizes = (VALUES + 3, rows - VALUES - 3)[:columns]
    interacting = columns * (columns + 1) // 2
    names = tuple(SPEC.dense_names), tuple(SPEC.categorical_names)[:columns]
    config = dlrm(*names, sizes, DIM, (DIM,), (6, 1))
    weights = {
        "bottom.0.weight": torch.zeros(DIM, 2),
        "bottom.0.bias": integers(DIM),
        "top.0.weight": integers(6, DIM + interacting),
        "top.0.bias": integers(6),
        "top.1.weight": integers(1, 6) / 64,
        "top.1.bias": integers(1) / 4,
    }
    head = build_head(config)
    head.module.load_state_dict(weights)
    model = ServingModel.make(JoinedTable(integers(sum(sizes), DIM)), config, head)
    origin = origin or make_origin(generation, (generation,))
    digest = inspect(workflow).digest
    made_from = dataclasses.replace(origin.checkpoint, workflow_digest=digest)
    save_bundle(path, workflow, model, dataclasses.replace(origin, checkpoint=made_from))
    return path


def make_origin(generation: int | None, days: tuple[int, ...]) -> Origin:
    """The origin of a bundle whose checkpoint is not at hand."""
    settings, versions = {"learning_rate": 0.1, "batch_size": 64}, {"torch": "2.13.0"}
    checkpoint = CheckpointOrigin(
        "c" * 128, 120, 7680, "", generation, days, "b" * 128, settings, versions
    )
    return Origin(checkpoint, {"nvt-torchrec": "0.1"})


def publish(bundle: Path, to: Path, **flags: Any) -> steps.Published:
    """Do what ``python -m inference publish`` does."""
    return steps.publish(PublishSettings(to=to, bundle=bundle, **flags))
