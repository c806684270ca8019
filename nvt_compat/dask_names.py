"""Names removed from ``dask.dataframe`` when expressions replaced legacy collections (2025.1)."""

from __future__ import annotations

import sys
import types

from nvt_torchrec.nvt_compat.frozen import new_dd_object
from nvt_torchrec.nvt_compat.patching import supply

import dask.dataframe as dd
from dask.dataframe import core, dispatch, multi, shuffle
from dask.dataframe.dask_expr import _shuffle


def _calculate_divisions(df, by, repartition, npartitions, ascending=True, **kwargs):
    by = getattr(by, "expr", by)
    return _shuffle._calculate_divisions(df.expr, by, npartitions, ascending)


def apply() -> None:
    """Supply the names that merlin-core and nvtabular import."""
    supply(
        core,
        new_dd_object=new_dd_object,
        hash_object_dispatch=dispatch.hash_object_dispatch,
        DataFrame=dd.DataFrame,
        Series=dd.Series,
        Index=dd.Index,
    )
    supply(dd, core=core, multi=multi, shuffle=shuffle)
    supply(multi, concat=dd.concat)
    supply(shuffle, _calculate_divisions=_calculate_divisions)
    # merlin.core.utils imports `optimize` of a removed module; merlin_io replaces its only user.
    if "dask.dataframe.optimize" not in sys.modules:
        module = types.ModuleType("dask.dataframe.optimize")
        module.optimize = lambda dsk, keys, **kwargs: dsk
        sys.modules[module.__name__] = module
