"""``model.pt2``: values of features to the probability, for programs that have only PyTorch."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.base.files.atomic import new_directory, write_json
from nvt_torchrec.formats.rows import Jagged, RawRows, add_missing, dense_dtype, empty_mask
from nvt_torchrec.formats.spec.feature_spec import FeatureSpec
from nvt_torchrec.formats.spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.spec.reading import Derivation
from nvt_torchrec.inference.export.network import MISSING, RawModel
from nvt_torchrec.inference.model.bundle import WORKFLOW
from nvt_torchrec.inference.predictor import Predictor
from nvt_torchrec.workflows.description import inspect

PACKAGE, COMPILED, COLUMNS = "model.pt2", "compiled.pt2", "columns.json"
#: Largest size in bytes of tables and vocabularies. Packing takes several times that in memory.
LIMIT = 2 << 30
_PROBES, _LONGEST_LIST = 500, 4
#: Values of dense columns with which the package is tried.
_NUMBERS = (-5, -1, 0, 1, 2, 3, 7, 50, 99, 2_000_000_000, float("nan"))
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
        SettingsError: There are columns of strings, more than :data:`LIMIT` bytes of tables and
            vocabularies, or no C++ compiler.
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
    inputs = _probes(network, spec)
    with torch.no_grad():
        program = torch.export.export(network, inputs, dynamic_shapes=_shapes(inputs))
    expected = predictor.predict_rows(rows_of(*inputs, spec))
    with new_directory(output) as temporary:
        torch.export.save(program, temporary / PACKAGE)
        runs = {PACKAGE: torch.export.load(temporary / PACKAGE).module()}
        if compiled:
            path = str(temporary / COMPILED)
            torch._inductor.aoti_compile_and_package(program, package_path=path)
            runs[COMPILED] = torch._inductor.aoti_load_package(path)
        write_json(temporary / COLUMNS, describe(spec, predictor.workflow.digest))
        for name, run in runs.items():
            for count in (1, _PROBES):
                dense, categorical, lists = inputs
                some = dense[:count], categorical[:count], [values[:count] for values in lists]
                with torch.no_grad():
                    difference = np.abs(run(*some).numpy() - expected[:count]).max()
                if not difference <= _TOLERANCE:
                    raise AssertionError(f"{name}: scores differ from the bundle's by {difference}")


def _probes(
    network: RawModel, spec: FeatureSpec
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Return arguments with known, unseen and missing values of every column."""
    generator = torch.Generator().manual_seed(0)

    def draw(values: torch.Tensor, *shape: int) -> torch.Tensor:
        return values[torch.randint(len(values), shape, generator=generator)]

    numbers = torch.tensor(_NUMBERS, dtype=torch.float64)
    single, lists = [], []
    for column in spec.categorical:
        known = network.vocabulary(column)
        seen = torch.empty(0, dtype=torch.int64) if known is None else draw(known[0], 20)
        values = torch.cat([seen, torch.tensor([*RAW_TYPES[column.raw].probes, MISSING])])
        if column.multi_hot:
            lists.append(draw(values, _PROBES, _LONGEST_LIST))
        else:
            single.append(draw(values, _PROBES))
    none = torch.empty(_PROBES, 0, dtype=torch.int64)
    dense = draw(numbers, _PROBES, len(spec.dense))
    return dense, torch.stack(single, 1) if single else none, lists


def rows_of(
    dense: torch.Tensor, categorical: torch.Tensor, lists: list[torch.Tensor], spec: FeatureSpec
) -> RawRows:
    """Return the rows that arguments of an exported model stand for."""
    count = len(dense)
    no_dense, no_value = (
        empty_mask(len(spec.dense), count),
        empty_mask(len(spec.categorical), count),
    )
    for j, absent in enumerate(dense.isnan().numpy().T):
        add_missing(no_dense, j, absent)
    columns = []
    singles, left = iter(categorical.numpy().T), iter(lists)
    for j, column in enumerate(spec.categorical):
        values = next(left).numpy() if column.multi_hot else next(singles)
        there, dtype = values != MISSING, RAW_TYPES[column.raw].dtype
        if column.multi_hot:
            lengths = there.sum(1)
            offsets = np.concatenate([[0], np.cumsum(lengths)])
            columns.append(Jagged(offsets, values[there].astype(dtype)))
            there = lengths > 0
        else:
            columns.append(np.where(there, values, 0).astype(dtype))
        add_missing(no_value, j, ~there)
    return RawRows(
        label=None,
        dense=np.nan_to_num(dense.numpy()).T.astype(dense_dtype(spec)),
        dense_missing=no_dense,
        categorical=np.stack(columns) if spec.is_criteo_format else columns,
        categorical_missing=no_value,
        line=np.arange(count),
        bad=[],
        bad_count=0,
        lines=count,
    )


def _shapes(inputs: tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]) -> tuple:
    rows = torch.export.Dim("rows", min=1)
    lists = [{0: rows, 1: torch.export.Dim(f"length_{k}", min=1)} for k in range(len(inputs[2]))]
    return {0: rows}, {0: rows}, lists


def describe(spec: FeatureSpec, digest: str) -> dict[str, Any]:
    """Return the content of ``columns.json``, which describes the arguments."""
    columns = (*spec.dense, *spec.categorical)
    nulls = {c.name: list(c.reading.nulls) for c in columns if c.reading.nulls}
    derived = {
        c.name: {"from": list(c.reading.sources), **_set_fields(c.derive)}
        for c in columns
        if c.derive
    }
    single, lists = (
        [column.name for column in spec.categorical if column.multi_hot == multi_hot]
        for multi_hot in (False, True)
    )
    return {
        "workflow_digest": digest,
        "dense": {"dtype": "float64", "missing": "NaN", "columns": list(spec.dense_names)},
        "categorical": {"dtype": "int64", "missing": MISSING, "columns": single},
        "lists": {"dtype": "int64", "filled_with": MISSING, "columns": lists},
        "hex32": "pass the number that the hexadecimal digits represent",
        **({"nulls": nulls, "nulls_are": "passed as missing values"} if nulls else {}),
        **({"derived": derived, "derived_are": "computed by the caller"} if derived else {}),
    }


def _set_fields(derive: Derivation) -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(derive).items() if value}
