"""Latency of scoring raw rows with a trained model on the device."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import torch

from benchmarks.gpu.data import ensure_log
from benchmarks.gpu.measure import Result
from benchmarks.gpu.worker import GpuSettings
from nvt_torchrec.clicklog.readers.stream import stream_unparsed
from nvt_torchrec.dlrm.launch.distributed import process_group
from nvt_torchrec.dlrm.settings.flags import parse_settings
from nvt_torchrec.dlrm.train import train
from nvt_torchrec.etl.run import run
from nvt_torchrec.etl.settings import EtlSettings
from nvt_torchrec.inference import Predictor
from nvt_torchrec.inference.benchmark import measure

SIZES = (1, 64, 4096)
_PIECE_BYTES = 16 << 20


def scoring(args: GpuSettings, device: torch.device) -> Iterator[Result]:
    """p50 of the stages from rows as dicts to probabilities, by batch size."""
    log = ensure_log(args.data, args.log_rows)
    base = args.data / "scoring"
    shutil.rmtree(base, ignore_errors=True)
    from nvt_torchrec.formats.spec.toml_file import load_spec

    run(EtlSettings(str(log), base / "out", load_spec(), engine="cpu"))
    settings = parse_settings(
        [
            *[f"--binary_path={base / 'out' / 'criteo_binary' / 'split'}", "--batch_size=2048"],
            *["--adagrad", "--learning_rate=0.02", "--max_steps=50", f"--log_path={base / 'log'}"],
            *[f"--save_checkpoint_path={base / 'checkpoint'}", *args.model],
        ]
    )
    with process_group() as group:
        train(settings, group)
    predictor = Predictor.load(base / "out" / "workflow", base / "checkpoint", device=device)
    path = str(log / "day_2")
    pieces = [next(iter(stream_unparsed(path, predictor.spec, block_bytes=_PIECE_BYTES)))]
    for size in SIZES:
        for timing in measure(predictor, None, pieces, size, args.seconds):
            yield {
                "system": timing.stage.strip(),
                "case": f"score B={size}",
                "rows_per_s": timing.rows_per_s,
                "ms": timing.p50,
            }
