"""merlin-core's reader and writer of datasets, and NVTabular's graphs, on Dask expressions.

``Workflow.load`` opens workflows that ``python -m etl run`` saved, too: the released function looks
for a pickle, which they do not contain, and raises FileNotFoundError.
"""

from __future__ import annotations

import functools
import json

from nvt_torchrec.nvt_compat.dask_names import BlockwiseLayer, FreezingHighLevelGraph, freeze
from nvt_torchrec.nvt_compat.patching import PatchError, replace

import dask.dataframe as dd
import fsspec
from dask.blockwise import Blockwise
from fsspec.implementations.local import LocalFileSystem

from nvt_torchrec.base.errors import BadInputError


def _ensure_optimize_dataframe_graph(ddf=None, dsk=None, keys=None):
    """Return the graph unchanged: expressions are optimized when they are computed."""
    return dsk if ddf is None else ddf


def _parquet_to_ddf(self, columns=None, cpu=None):
    """``ParquetDatasetEngine.to_ddf``.

    Dask no longer reports what it read through ``metadata_collector``. The plan of the read
    expression contains the same parts and statistics.
    """
    from merlin.io import parquet

    cpu = self.cpu if cpu is None else cpu
    ddf = dd.read_parquet(
        self.paths[0] if len(self.paths) == 1 else self.paths,
        columns=columns,
        engine=parquet.CPUParquetEngine if cpu else parquet.GPUParquetEngine,
        index=False,
        aggregate_files=self.aggregate_files,
        filters=self.filters,
        split_row_groups=self.row_groups_per_part,
        storage_options=self.storage_options,
        dataset=dict(self.dataset_kwargs),
        **self.read_parquet_kwargs,
    )
    expression = ddf.expr
    while not hasattr(expression, "_plan"):  # the read lies below a projection of columns
        expression = expression.dependencies()[0]
    plan = expression._plan
    self._pp_metadata = {"parts": list(plan["parts"]), "stats": list(plan["statistics"])}
    return ddf


def _format(fs, directory: str) -> str | None:
    """Return the format in metadata.json, which NVTabular's own workflows do not have."""
    try:
        with fs.open(f"{directory}/metadata.json") as file:
            return json.load(file).get("format")
    except (OSError, ValueError, AttributeError, RecursionError):
        return None  # the loader reports what is wrong


def _loading_ours(load):
    @functools.wraps(load)
    def load_workflow(cls, path, client=None):
        # Imported by the call, because `workflows` imports this package.
        from nvt_torchrec.formats.workflow_description import FORMAT
        from nvt_torchrec.workflows.store import load as load_ours

        fs, _, [directory] = fsspec.get_fs_token_paths(str(path))
        if _format(fs, directory) != FORMAT.name:
            return load(cls, path, client=client)
        if not isinstance(fs, LocalFileSystem):
            raise BadInputError(f"{path}: not a local directory", "copy the workflow here first")
        workflow = load_ours(directory)
        workflow.client = client
        return workflow

    return load_workflow


def apply() -> None:
    """Patch merlin-core first (nvtabular imports it), then nvtabular."""
    from merlin.core import utils

    replace(
        utils,
        "ensure_optimize_dataframe_graph",
        _ensure_optimize_dataframe_graph,
        expect="dd_optimize(dsk, keys",
    )

    import merlin.io.dask
    import merlin.io.dataset
    import merlin.io.parquet
    import nvtabular
    import nvtabular.ops.categorify
    import nvtabular.ops.moments

    write = merlin.io.dask._ddf_to_dataset

    def ddf_to_dataset(ddf, *args, **kwargs):
        return write(freeze(ddf), *args, **kwargs)

    # It writes one file per output partition, looking keys up in the collection's graph.
    replace(merlin.io.dataset, "_ddf_to_dataset", ddf_to_dataset, expect="full_graph")
    merlin.io.dask.Blockwise = (Blockwise, BlockwiseLayer)  # for its isinstance check
    replace(
        merlin.io.parquet.ParquetDatasetEngine,
        "to_ddf",
        _parquet_to_ddf,
        expect="metadata_collector",
    )
    for module in (
        merlin.io.dask,
        merlin.io.dataset,
        merlin.io.parquet,
        nvtabular.ops.categorify,
        nvtabular.ops.moments,
    ):
        if not hasattr(module, "HighLevelGraph"):
            raise PatchError(f"nvt_compat: {module.__name__} no longer uses HighLevelGraph")
        module.HighLevelGraph = FreezingHighLevelGraph
    load = classmethod(_loading_ours(nvtabular.Workflow.load.__func__))
    replace(nvtabular.Workflow, "load", load, expect='"workflow.pkl"')
