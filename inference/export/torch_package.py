"""``model.pt2``: raw values to the probability, for programs that have only PyTorch."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.base.files.atomic import new_directory, write_json
from nvt_torchrec.formats.spec.feature_spec import FeatureSpec
from nvt_torchrec.inference.export.network import RawModel
from nvt_torchrec.inference.export.probe import probe_rows
from nvt_torchrec.inference.export.sources import MISSING, Sources, to_inputs
from nvt_torchrec.inference.model.bundle import WORKFLOW
from nvt_torchrec.inference.predictor import Predictor
from nvt_torchrec.workflows.description import inspect

PACKAGE, COMPILED, COLUMNS = "model.pt2", "compiled.pt2", "columns.json"
#: Largest size in bytes of tables and vocabularies. Packing takes several times that in memory.
LIMIT = 2 << 30
_PROBES = 500
_TOLERANCE = 1e-5


def export_torch(bundle: Path, output: Path, *, compiled: bool = False) -> None:
    """Write ``model.pt2`` and ``columns.json`` into a new directory, and check the scores.

    ``torch.export.load("model.pt2").module()(dense, categorical, lists)`` gives float32 [n]; see
    :meth:`RawModel.forward` for the arguments, ``columns.json`` for the order of the columns.
    Arguments are contiguous tensors.

    Args:
        bundle: Directory of a bundle.
        output: Directory to make.
        compiled: Also write ``compiled.pt2`` with AOTInductor, for processors like this one:
            ``torch._inductor.aoti_load_package("compiled.pt2")`` takes the same arguments.

    Raises:
        SettingsError: There are columns of strings or crosses of them, more than :data:`LIMIT`
            bytes of tables and vocabularies, or no C++ compiler.
        OutputError: ``output`` exists or cannot be written.
    """
    predictor = Predictor.load(bundle, check=True)
    workflow = bundle / WORKFLOW
    network = RawModel(inspect(workflow), workflow, predictor.model).eval()
    size = sum(buffer.nbytes for buffer in network.buffers())
    if size > LIMIT:
        raise SettingsError(
            f"{size / 2**30:.1f} GiB of tables and vocabularies; a package holds up to "
            f"{LIMIT / 2**30:.0f} GiB",
            "make the bundle with --tables int8, or serve the bundle itself",
        )
    if compiled and not any(map(shutil.which, ("g++", "clang++", "c++"))):
        raise SettingsError("no C++ compiler was found", "install g++, or leave out --compile")
    spec = predictor.spec
    rows = probe_rows(workflow, _PROBES)
    inputs = to_inputs(rows, spec)
    with torch.no_grad():
        program = torch.export.export(network, inputs, dynamic_shapes=_shapes(inputs))
    expected = predictor.predict(rows)
    with new_directory(output) as temporary:
        torch.export.save(program, temporary / PACKAGE)
        runs = {PACKAGE: torch.export.load(temporary / PACKAGE).module()}
        if compiled:
            path = str(temporary / COMPILED)
            torch._inductor.aoti_compile_and_package(program, package_path=path)
            runs[COMPILED] = torch._inductor.aoti_load_package(path)
        write_json(temporary / COLUMNS, describe(spec, predictor.workflow.digest))
        for name, run in runs.items():
            for count in (1, len(rows)):
                some = to_inputs(rows[:count], spec)
                with torch.no_grad():
                    difference = np.abs(run(*some).numpy() - expected[:count]).max()
                if not difference <= _TOLERANCE:
                    raise AssertionError(f"{name}: scores differ from the bundle's by {difference}")


def _shapes(inputs: tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]) -> tuple:
    rows = torch.export.Dim("rows", min=1)
    lists = [{0: rows, 1: torch.export.Dim(f"length_{k}", min=1)} for k in range(len(inputs[2]))]
    return {0: rows}, {0: rows}, lists


def describe(spec: FeatureSpec, digest: str) -> dict[str, Any]:
    """Return the content of ``columns.json``, which describes the arguments."""
    columns = (*spec.dense, *spec.categorical)
    nulls = {c.name: list(c.reading.nulls) for c in columns if c.reading.nulls}
    passed = {"nulls": nulls, "nulls_are": "passed as missing values"} if nulls else {}
    sources = Sources.of(spec)
    groups = {"dense": sources.dense, "categorical": sources.categorical, "lists": sources.lists}
    names = {group: [read.source for read in reads] for group, reads in groups.items()}
    if names["dense"] != spec.dense_names or any(column.derive for column in columns):
        passed["features"] = _features(spec, sources)
    times = [read.source for read in sources.categorical if read.raw == "time"]
    if times:
        passed["times"] = {"columns": times, "unit": "microseconds since 1970-01-01 00:00 UTC"}
    return passed | {
        "workflow_digest": digest,
        "dense": {
            "dtype": "float64",
            "missing": "NaN",
            "columns": names["dense"],
        },
        "categorical": {
            "dtype": "int64",
            "missing": MISSING,
            "columns": names["categorical"],
        },
        "lists": {
            "dtype": "int64",
            "filled_with": MISSING,
            "columns": names["lists"],
        },
        "hex32": "pass the number that the hexadecimal digits represent",
    }


def _features(spec: FeatureSpec, sources: Sources) -> dict[str, list[list[str]]]:
    """Return, for each column of an argument, the features that are computed from it."""
    found: dict[str, list[list[str]]] = {
        "dense": [[] for _ in sources.dense],
        "categorical": [[] for _ in sources.categorical],
        "lists": [[] for _ in sources.lists],
    }
    places = (*sources.of_dense, *sources.of_categorical)
    for column, own in zip((*spec.dense, *spec.categorical), places, strict=True):
        for is_number, index in own:
            group = "lists" if getattr(column, "multi_hot", False) else "categorical"
            found["dense" if is_number else group][index].append(column.name)
    return found
