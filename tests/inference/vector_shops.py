"""A log whose items have vectors, its workflow, and a model of random weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nvt_torchrec.etl.run import run
from nvt_torchrec.etl.settings import EtlSettings
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.toml_file import load_spec
from nvt_torchrec.inference.model.bundle import save_bundle
from nvt_torchrec.inference.predictor import Predictor
from nvt_torchrec.models.config import ModelConfig
from nvt_torchrec.training.sharding.initial_weights import fill_table
from nvt_torchrec.training.sharding.train_model import ModelWithTables
from nvt_torchrec.workflows import compiled
from tests.etl.vector_logs import (
    EVENTS,
    SPEC,
    VERSIONS,
    Item,
    Row,
    find_item,
    load_vector_spec,
    make_items,
    make_rows,
    write_days,
    write_items,
)
from tests.inference.bundles import make_origin
from tests.inference.reference import to_serve
from tests.training.runs import with_tables
from tests.training.shapes import dlrm

HOUR = 3600
#: Another one than any item has.
TEXT = [0.5, -2.0, 3.25]


@dataclasses.dataclass(frozen=True)
class VectorShop:
    """The log, what the ETL made of it, and a model."""

    output: Path
    rows: list[Row]
    items: list[Item]
    model: ModelWithTables
    predictor: Predictor

    @property
    def requests(self) -> list[dict[str, Any]]:
        """The rows as a request has them: without what their items have."""
        return [request_row(row) for row in self.rows]

    def complete(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """Return rows with what their items had at the time."""
        found = []
        for row in rows:
            item = find_item(self.items, row, delay=HOUR)
            fields = {
                "price": item.price if item else None,
                "text": list(item.embedding) if item and item.embedding else None,
                "image": list(item.image) if item and item.image else None,
            }
            found.append(request_row(row) | fields)
        return found

    def save_bundle(self, path: Path, tables: str = "float32") -> Path:
        """Write a bundle."""
        model = self.predictor.model.convert(tables)
        save_bundle(path, self.output / "workflow", model, make_origin(0, (0,)))
        return path


def request_row(row: Row) -> dict[str, Any]:
    """Return what a request has of a row."""
    item = None if row.item == -1 else row.item
    return {"row": float(row.row), "user": row.user, "item": item, "time": row.time}


def load_daily_spec(directory: Path) -> FeatureSpec:
    """Return the spec of a log of days, whose rows see what was known when their day began."""
    begin = SPEC.index("[split]\n") + len("[split]\n")
    by_time = SPEC[begin : SPEC.index("[[table]]")]
    by_day = SPEC.replace(by_time, 'by = "days"\n')
    events = EVENTS.replace('time = "time"', 'time = "time"\ncut = "day"')
    file = directory / "spec.toml"
    file.write_text(by_day.format(label="", versions=VERSIONS, more=events))
    return load_spec(file)


def make_model(workflow: Path, *, vectors: bool = True) -> tuple[ModelWithTables, Predictor]:
    """Return a model of random weights, to train and to serve."""
    loaded = compiled.load(workflow)
    schema = loaded.schema
    config = dlrm(schema.dense, schema.categorical, schema.table_sizes, 4, (8, 4), (8, 1), 0.7)
    config = dataclasses.replace(config, labels=schema.labels)
    if vectors:
        config = dataclasses.replace(config, dense_vectors=schema.vectors)
    model = with_tables(config, 3)
    bags = model.sparse_arch.embedding_bag_collection.embedding_bags
    for name, size in config.tables.items():
        fill_table(bags[name].weight.detach(), name, size, 4, 3, (0, 0))
    if vectors:
        _fill_layers(model, config)
    return model, Predictor(loaded, to_serve(model, config))


def _fill_layers(model: ModelWithTables, config: ModelConfig) -> None:
    """Draw the weights of the layers of vectors, and what they standardize by."""
    layers = model.head.dense_vectors
    generator = torch.Generator().manual_seed(3)
    for parameter in layers.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    layers.center.copy_(torch.randn(layers.center.shape, generator=generator))
    for _, end in config.vector_bounds.values():
        layers.center[end - 1] = 0  # of the indicator
    layers.scale.copy_(torch.tensor([0.5, 2.0]))


def make_vector_shop(root: Path) -> VectorShop:
    """Run the ETL over three days, with versions of items."""
    rows, items = make_rows(400, 3), make_items(versions=6)
    write_days(root / "raw", rows)
    write_items(root / "raw/items.parquet", items)
    spec = load_vector_spec(root, versions=VERSIONS)
    run(EtlSettings(str(root / "raw"), root / "out", spec, engine="cpu"))
    model, predictor = make_model(root / "out/workflow")
    return VectorShop(root / "out", rows, items, model, predictor)
