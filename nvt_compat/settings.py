"""Configure Dask and pandas so that the code of 2023 returns correct results."""

from __future__ import annotations

import warnings

import dask
import pandas as pd

_PACKAGE = __name__.rpartition(".")[0]


def apply() -> None:
    """Configure this process and the Dask workers that it will start."""
    dask.config.set(
        {
            # Dask would turn object columns into pyarrow strings, unknown to Merlin's schemas.
            "dataframe.convert-string": False,
            # It would fuse small partitions of a parquet file; Merlin relies on their number.
            "optimization.tune.active": False,
        }
    )
    # Merlin warns that unused frameworks or a GPU are missing, pyarrow of deprecated calls.
    for message in (
        "Tensorflow dtype mappings did not load",
        "Triton dtype mappings did not load",
        "Initializing an NVTabular Dataset in CPU mode",
        "promote has been superseded",
    ):
        warnings.filterwarnings("ignore", message=message)
    # pandas 3 reads strings as dtype `str`; Merlin maps `object` to its string type.
    pd.set_option("future.infer_string", False)

    preload = list(dask.config.get("distributed.worker.preload", None) or [])
    if _PACKAGE not in preload:
        dask.config.set({"distributed.worker.preload": [*preload, _PACKAGE]})
