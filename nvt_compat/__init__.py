"""NVTabular, merlin-core and merlin-dataloader 23.8 on today's Dask, pandas and RAPIDS.

``import nvt_compat`` before ``nvtabular`` or ``merlin``; Dask's worker processes do so by
themselves (it enters itself as a preload). No file of those packages is touched: this package
supplies names that have gone, and mends functions in memory. Each module says what vanished, or
which value came out wrong, and can be deleted by itself once upstream does not need it:

=================  =======================================================================
``settings``       configuration of Dask and pandas under which the old code is right
``dask_names``     names that left ``dask.dataframe``
``frozen``         collections with fixed keys, for graphs written against key names
``merlin_io``      merlin-core's reader and writer of datasets
``cudf_names``     names that left cuDF and dask-cuDF (only where cuDF is installed)
``cudf_strings``   strings on cuDF, counted and sent between processes
``lists``          list columns of pandas frames
``hashes``         one hash on the CPU and on the GPU
``values``         wrong values that stock NVTabular gives silently
``moments``        variances that are rounding noise
``operators``      operators that fail, or make NaN and say nothing
``arrays``         operators on arrays, in place of a C++ extension for NumPy 1
``saved``          ``Workflow.load`` of what ``python -m etl run`` saved
=================  =======================================================================

Raises:
    UnsupportedStackError: at import, for a combination of versions outside the supported table.
    PatchError: a function to be mended is not as expected.
"""

from clicklog.versions import check_etl_stack

check_etl_stack()

from nvt_compat import settings  # noqa: E402

settings.apply()

from nvt_compat import cudf_names, cudf_strings, dask_names  # noqa: E402

dask_names.apply()
cudf_names.apply()
cudf_strings.apply()

from nvt_compat import hashes, lists  # noqa: E402

lists.apply()
hashes.apply()

from nvt_compat import arrays, merlin_io, moments, operators, saved, values  # noqa: E402

merlin_io.apply()
values.apply()
moments.apply()
operators.apply()
arrays.apply()
saved.apply()
