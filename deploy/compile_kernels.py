"""Compile what Numba compiles at first use, for example while an image is built: less to wait for.

Two tiny logs, one in Criteo's format and one with columns of all raw types, are fitted, and rows of
them are read and encoded as the server does. The compiled code is cached beside the sources.
"""

from __future__ import annotations

import csv
import tempfile
from pathlib import Path

import nvt_torchrec.inference.server.app  # noqa: F401  # compiles loops when it is imported
from nvt_torchrec.etl.run import EtlSettings, run
from nvt_torchrec.formats.feature_spec.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.feature_spec.toml_file import load_spec
from nvt_torchrec.inference.predictor import Predictor
from nvt_torchrec.workflows import compiled


def main() -> None:
    """Compile."""
    for spec in (load_spec(), load_spec("retail")):
        with tempfile.TemporaryDirectory() as directory:
            _use(spec, Path(directory))


def _use(spec: FeatureSpec, directory: Path) -> None:
    row = {}
    for read in spec.read_plan(label=False).reads:
        example = RAW_TYPES[read.raw].example_of(read)
        row[read.source] = [example] if read.multi_hot else example
    names = spec.input.columns or spec.columns
    for day in range(3):
        with open(directory / f"day_{day}", "w", newline="") as file:
            writer = csv.writer(file, delimiter=spec.input.delimiter)
            if spec.input.header:
                writer.writerow(names)
            for label in (0, 1):
                fields = {**row, spec.label: label}
                writer.writerow(v[0] if isinstance(v, list) else v for v in map(fields.get, names))
    run(EtlSettings(str(directory), directory / "out", spec))
    workflow = compiled.load(directory / "out" / "workflow")
    predictor = Predictor(workflow, None)  # only its reading is used
    for count in (1, 64):
        workflow.transform(predictor.read([dict.fromkeys(row)] * count))
        workflow.transform(predictor.read([row] * count))


if __name__ == "__main__":
    main()
