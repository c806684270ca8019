"""Make NVTabular, merlin-core and merlin-dataloader 23.8 work on today's Dask, pandas and RAPIDS.

Import ``nvt_compat`` before ``nvtabular`` or ``merlin``. It adds itself to the preloads of Dask's
worker processes. The files of those packages are not changed: this package supplies names that were
removed, and patches functions in memory. The docstring of each module says which names were removed
or which values were wrong. Each module can be deleted separately once upstream does not need it:

=================  =======================================================================
this module        configuration of Dask and pandas that the old code needs
``dask_names``     names that were removed from ``dask.dataframe``, and collections with fixed keys
``merlin_io``      merlin-core's reader and writer of datasets, and NVTabular's graphs
``cudf_names``     with cuDF only: names that were removed, and columns of strings
``dispatch``       list columns of pandas frames, and the same hash on the CPU and the GPU
``operators``      operators that silently return wrong values, above all Categorify
=================  =======================================================================

Raises:
    UnsupportedStackError: At import, if the installed versions are not a supported combination.
    PatchError: At import, if the source of a function to patch is not as expected.
"""

from nvt_torchrec.base.versions import check_etl_stack

check_etl_stack()

import importlib.util  # noqa: E402
import sys  # noqa: E402
import warnings  # noqa: E402

import dask  # noqa: E402
import pandas as pd  # noqa: E402

dask.config.set(
    {
        # Dask would convert object columns to pyarrow strings, which Merlin's schemas do not know.
        "dataframe.convert-string": False,
        # Dask would fuse small partitions of a parquet file, but Merlin relies on their number.
        "optimization.tune.active": False,
    }
)
# pandas 3 reads strings as dtype `str`, but only `object` maps to Merlin's string type.
pd.set_option("future.infer_string", False)
# Merlin warns about missing frameworks and GPUs, and pyarrow about deprecated calls.
for _message in (
    "Tensorflow dtype mappings did not load",
    "Triton dtype mappings did not load",
    "Initializing an NVTabular Dataset in CPU mode",
    "promote has been superseded",
):
    warnings.filterwarnings("ignore", message=_message)
# Without grpc, tritonclient's module raises a RuntimeError, but Merlin expects an ImportError.
if not importlib.util.find_spec("grpc"):
    sys.modules["tritonclient.grpc"] = None  # type: ignore[assignment]
# Let the Dask workers that this process starts import this package first.
_preload = list(dask.config.get("distributed.worker.preload", None) or [])
if __name__ not in _preload:
    dask.config.set({"distributed.worker.preload": [*_preload, __name__]})

from nvt_torchrec.nvt_compat import cudf_names, dask_names, dispatch  # noqa: E402

dask_names.apply()
cudf_names.apply()
dispatch.apply()

from nvt_torchrec.nvt_compat import merlin_io, operators  # noqa: E402

merlin_io.apply()
operators.apply()
