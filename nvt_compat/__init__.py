"""NVTabular, merlin-core and merlin-dataloader 23.8 on today's Dask, pandas and RAPIDS.

Import ``nvt_compat`` before ``nvtabular`` or ``merlin``; it adds itself to the preloads of Dask's
worker processes. No file of those packages is changed: this package supplies names that were
removed, and patches functions in memory. Each module says which names were removed, or which values
were wrong, and can be deleted alone once upstream does not need it:

=================  =======================================================================
``settings``       configuration of Dask and pandas that the old code needs
``dask_names``     names that were removed from ``dask.dataframe``
``frozen``         collections with fixed keys, for graphs written against key names
``merlin_io``      merlin-core's reader and writer of datasets
``cudf_names``     names that were removed from cuDF and dask-cuDF (where cuDF is installed)
``cudf_strings``   strings on cuDF: counting, and transfer between processes
``lists``          list columns of pandas frames
``hashes``         the same hash on the CPU and on the GPU
``values``         wrong values that the released NVTabular returns silently
``moments``        variances that consist of rounding errors
``operators``      operators that fail, or return NaN silently
``arrays``         operators on arrays, in place of a C++ extension for NumPy 1
``saved``          ``Workflow.load`` of what ``python -m etl run`` saved
=================  =======================================================================

Raises:
    UnsupportedStackError: At import, for a combination of versions outside the supported table.
    PatchError: A function to be patched is not as expected.
"""

from nvt_torchrec.base.versions import check_etl_stack

check_etl_stack()

from nvt_torchrec.nvt_compat import settings  # noqa: E402

settings.apply()

from nvt_torchrec.nvt_compat import cudf_names, cudf_strings, dask_names  # noqa: E402

dask_names.apply()
cudf_names.apply()
cudf_strings.apply()

from nvt_torchrec.nvt_compat import hashes, lists  # noqa: E402

lists.apply()
hashes.apply()

from nvt_torchrec.nvt_compat import arrays, merlin_io, moments, operators, saved, values  # noqa: E402

merlin_io.apply()
values.apply()
moments.apply()
operators.apply()
arrays.apply()
saved.apply()
