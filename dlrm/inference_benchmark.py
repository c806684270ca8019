"""``--mode inference_benchmark``: latency and throughput of scoring, in one process.

The model computes as in training's evaluation: TorchRec's modules, batch by batch, tables
unsharded. The serving path has a forward of its own (``python -m inference benchmark``).
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
from collections.abc import Iterator

import numpy as np
import torch
from torchrec.datasets.utils import Batch

from nvt_torchrec.base.errors import BadInputError, SchemaError, SettingsError
from nvt_torchrec.dlrm.build import set_up_dense
from nvt_torchrec.dlrm.checkpoint.store import load_model
from nvt_torchrec.dlrm.config import ModelConfig, model_config
from nvt_torchrec.dlrm.data import Loader, make_loader, read_schema
from nvt_torchrec.dlrm.labels import choose_label
from nvt_torchrec.dlrm.launch.distributed import Group
from nvt_torchrec.dlrm.metrics import auroc
from nvt_torchrec.dlrm.model import Scorer, build_dlrm, fill_table
from nvt_torchrec.dlrm.reporting.metrics_log import MetricsLog
from nvt_torchrec.dlrm.settings.train_settings import TrainSettings
from nvt_torchrec.formats.schema import TableSchema

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Latency:
    """The measurements of one batch size.

    Attributes:
        batch_size: The rows that are scored at once.
        batches: The number of measured batches.
        mean_ms: The mean time from a batch on the device to its logits.
        p50_ms: The median of these times.
        p95_ms: Their 95th percentile.
        p99_ms: Their 99th percentile.
        samples_per_s: The scored rows over the sum of these times.
        auroc: The AUROC of the scored rows; None if all labels are equal.
    """

    batch_size: int
    batches: int
    mean_ms: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    samples_per_s: float
    auroc: float | None


def benchmark_inference(settings: TrainSettings, group: Group) -> list[Latency]:
    """Score the test set at each of ``inference_benchmark_batch_sizes``; log a table and events.

    Without ``load_checkpoint_path`` the weights are the initial weights of training.

    Raises:
        SettingsError: There are several processes, or other model settings than the checkpoint's.
        BadInputError, SchemaError: The data or the checkpoint cannot be read, or do not match.
    """
    if group.world_size > 1:
        raise SettingsError(
            f"--mode inference_benchmark in {group.world_size} processes", "start it alone"
        )
    schema = read_schema(settings)
    settings = choose_label(settings, schema)
    scorer, config = _model(settings, schema, group.device)
    set_up_dense(scorer.dlrm, settings)
    events = MetricsLog(settings.log_directory())
    latencies = []
    for size in settings.inference_benchmark_batch_sizes:
        loader = make_loader(settings, config, "test", group, batch_size=size)
        if not len(loader):
            raise BadInputError(f"{settings.split_path('test')}: no rows to score")
        latency = _measure(scorer, loader, size, settings)
        events.write("inference", **dataclasses.asdict(latency))
        latencies.append(latency)
    log.info("%s", _table(latencies))
    return latencies


def _model(
    settings: TrainSettings, schema: TableSchema, device: torch.device
) -> tuple[Scorer, ModelConfig]:
    if settings.load_checkpoint_path:
        scorer, config = load_model(settings.load_checkpoint_path, device)
        if (config.dense, config.categorical) != (schema.dense, schema.categorical):
            raise SchemaError(
                f"{settings.load_checkpoint_path}: trained on other columns than those of the data",
                "give the data that the checkpoint was trained on",
            )
        return scorer, config
    config = model_config(settings, schema)
    scorer = Scorer(build_dlrm(config, seed=settings.seed, device=device), config, device)
    bags = scorer.dlrm.sparse_arch.embedding_bag_collection.embedding_bags
    for name, rows in zip(config.table_names, config.num_embeddings, strict=True):
        weight = bags[name].weight.detach()
        fill_table(weight, name, rows, config.embedding_dim, settings.seed, (0, 0))
    return scorer.eval().requires_grad_(False), config


@torch.inference_mode()
def _measure(scorer: Scorer, loader: Loader, size: int, settings: TrainSettings) -> Latency:
    seconds, logits, rows = [], [], []
    # each batch size is compiled for
    warm_up = max(settings.benchmark_warmup_steps, int(settings.compile_dense))
    steps = settings.inference_benchmark_steps
    device = next(scorer.parameters()).device
    for i, batch in enumerate(itertools.islice(_full_batches(loader, size), warm_up + steps)):
        begin = _now(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=settings.amp):
            output = scorer(batch.dense_features, batch.sparse_features)
        end = _now(device)
        if i >= warm_up:
            seconds.append(end - begin)
            logits.append(output.float().cpu().numpy())
            weights = getattr(batch, "weights", None)
            parts = [batch.labels] if weights is None else [batch.labels, weights]
            rows.append([part.cpu().numpy() for part in parts])
    p50, p95, p99 = 1e3 * np.percentile(seconds, [50, 95, 99])
    return Latency(
        batch_size=size,
        batches=len(seconds),
        mean_ms=1e3 * float(np.mean(seconds)),
        p50_ms=float(p50),
        p95_ms=float(p95),
        p99_ms=float(p99),
        samples_per_s=sum(map(len, logits)) / sum(seconds),
        auroc=auroc(np.concatenate(logits), *map(np.concatenate, zip(*rows, strict=True))),
    )


def _full_batches(loader: Loader, size: int) -> Iterator[Batch]:
    """Repeat the data without end, each time without a last batch that is not full.

    A first batch that is not full is the only one, and used.
    """
    while True:
        for i, batch in enumerate(loader):
            if len(batch.labels) == size or not i:
                yield batch


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _table(latencies: list[Latency]) -> str:
    lines = ["  batch    mean ms     p50 ms     p95 ms     p99 ms     samples/s    AUROC"]
    for row in latencies:
        area = "–" if row.auroc is None else f"{row.auroc:.5f}"
        lines.append(
            f"{row.batch_size:7,} {row.mean_ms:10.3f} {row.p50_ms:10.3f} {row.p95_ms:10.3f} "
            f"{row.p99_ms:10.3f} {row.samples_per_s:13,.0f} {area:>8}"
        )
    return "\n".join(lines)
