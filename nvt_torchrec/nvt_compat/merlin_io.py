"""merlin-core's reader and writer of datasets, and NVTabular's graphs, on Dask expressions."""

from __future__ import annotations

from typing import Any

from nvt_torchrec.nvt_compat.dask_names import BlockwiseLayer, FreezingHighLevelGraph, freeze
from nvt_torchrec.nvt_compat.patching import PatchError, replace

import dask.dataframe as dd
from dask.blockwise import Blockwise


def _ensure_optimize_dataframe_graph(ddf: Any = None, dsk: Any = None, keys: Any = None) -> Any:
    """Return the graph unchanged: expressions are optimized when they are computed."""
    return dsk if ddf is None else ddf


def _parquet_to_ddf(self: Any, columns: Any = None, cpu: bool | None = None) -> Any:
    """Read parquet files; this replaces ``ParquetDatasetEngine.to_ddf``.

    Dask no longer reports the parts and statistics through ``metadata_collector``, but the plan of
    the read expression contains them.
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
    while not hasattr(expression, "_plan"):  # the read is below a projection of columns
        expression = expression.dependencies()[0]
    plan = expression._plan
    self._pp_metadata = {"parts": list(plan["parts"]), "stats": list(plan["statistics"])}
    return ddf


def apply() -> None:
    """Patch merlin-core first, because nvtabular imports it, and then nvtabular."""
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

    def ddf_to_dataset(ddf: Any, *args: Any, **kwargs: Any) -> Any:
        return write(freeze(ddf), *args, **kwargs)

    # The original writes one file per output partition, and looks up keys in the frame's graph.
    replace(merlin.io.dataset, "_ddf_to_dataset", ddf_to_dataset, expect="full_graph")
    merlin.io.dask.Blockwise = (Blockwise, BlockwiseLayer)  # for an isinstance check
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
