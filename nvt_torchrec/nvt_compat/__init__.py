"""NVTabular, merlin-core and merlin-dataloader 23.8 on today's Dask, pandas and RAPIDS.

Import ``nvt_compat`` before ``nvtabular`` or ``merlin``; it adds itself to the preloads of Dask's
worker processes. No file of those packages is changed: this package supplies names that were
removed, and patches functions in memory. Each module says which names were removed, or which values
were wrong, and can be deleted alone once upstream does not need it:

=================  =======================================================================
this one           configuration of Dask and pandas that the old code needs
``dask_names``     names that were removed from ``dask.dataframe``, and collections with fixed keys
``merlin_io``      merlin-core's reader and writer of datasets, and NVTabular's graphs
``cudf_names``     where cuDF is installed: names that were removed, and strings
``dispatch``       list columns of pandas frames, the same hash on the CPU and on the GPU
``operators``      operators that return wrong values silently, Categorify above all
=================  =======================================================================

Raises:
    UnsupportedStackError: At import, for a combination of versions outside the supported table.
    PatchError: A function to be patched is not as expected.
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
        # Dask would turn object columns into pyarrow strings, unknown to Merlin's schemas.
        "dataframe.convert-string": False,
        # It would fuse small partitions of a parquet file; Merlin relies on their number.
        "optimization.tune.active": False,
    }
)
# pandas 3 reads strings as dtype `str`; Merlin maps `object` to its string type.
pd.set_option("future.infer_string", False)
# Merlin warns that unused frameworks or a GPU are missing, pyarrow of deprecated calls.
for _message in (
    "Tensorflow dtype mappings did not load",
    "Triton dtype mappings did not load",
    "Initializing an NVTabular Dataset in CPU mode",
    "promote has been superseded",
):
    warnings.filterwarnings("ignore", message=_message)
# Without grpc, tritonclient's module raises a RuntimeError, and Merlin expects an ImportError.
if not importlib.util.find_spec("grpc"):
    sys.modules["tritonclient.grpc"] = None  # type: ignore[assignment]
# The Dask workers that this process will start import this package first.
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
