"""Names removed from ``dask.dataframe`` when expressions replaced legacy collections (2025.1).

Before that, a Dask DataFrame was a graph with the keys ``(ddf._name, i)``, and Merlin and NVTabular
write graphs that use those keys. Now a Dask DataFrame is an expression, whose graph is made when it
is computed and has other keys.

:func:`freeze` optimizes an expression once and adds the old keys to its graph as aliases.
:func:`new_dd_object` does the reverse: it makes a DataFrame from a graph with such keys.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

from nvt_torchrec.nvt_compat.patching import supply

import dask.dataframe as dd
from dask._task_spec import Alias
from dask.dataframe import core, dispatch, multi, shuffle
from dask.dataframe.dask_expr import FrameBase, _expr, _shuffle
from dask.dataframe.dask_expr._collection import new_collection
from dask.dataframe.dask_expr.io.io import FromGraph
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer
from dask.tokenize import tokenize


class BlockwiseLayer(MaterializedLayer):
    """A layer in which each output partition depends on at most one input partition."""


class Frozen:
    """A graph with the keys ``(_name, i)`` and the methods that ``HighLevelGraph`` needs."""

    def __init__(self, frame: FrameBase) -> None:
        self._name = frame._name
        self._meta = frame._meta
        self.npartitions = frame.npartitions
        self.divisions = frame.divisions
        expression = frame.expr.simplify().lower_completely().fuse()
        if expression.npartitions != frame.npartitions:
            raise RuntimeError(
                f"Dask's optimizer changed {frame.npartitions} partitions into "
                f"{expression.npartitions}; graphs that use their keys would be wrong"
            )
        tasks = dict(expression.__dask_graph__())
        for i, (lowered, key) in enumerate(
            zip(frame.__dask_keys__(), expression.__dask_keys__(), strict=True)
        ):
            for old in {(self._name, i), lowered} - {key}:
                tasks[old] = Alias(old, key)
        blockwise = all(isinstance(part, _expr.Blockwise) for part in expression.walk())
        layer = (BlockwiseLayer if blockwise else MaterializedLayer)(tasks)
        self.dask = HighLevelGraph({self._name: layer}, {self._name: set()})

    def __dask_graph__(self) -> HighLevelGraph:
        return self.dask

    def __dask_layers__(self) -> tuple[str, ...]:
        return (self._name,)

    def __dask_keys__(self) -> list[tuple[str, int]]:
        return [(self._name, i) for i in range(self.npartitions)]

    def __dask_tokenize__(self) -> tuple[str, str]:
        return ("frozen", self._name)


def freeze(collection: Any) -> Any:
    """Return a DataFrame as a :class:`Frozen`; return anything else unchanged."""
    return Frozen(collection) if isinstance(collection, FrameBase) else collection


class FreezingHighLevelGraph(HighLevelGraph):
    """A ``HighLevelGraph`` that freezes the DataFrames on which a layer depends."""

    @classmethod
    def from_collections(
        cls, name: str, layer: Any, dependencies: Sequence[Any] = ()
    ) -> HighLevelGraph:
        """See ``HighLevelGraph.from_collections``."""
        return HighLevelGraph.from_collections(name, layer, [freeze(d) for d in dependencies])


def new_dd_object(
    dsk: Mapping, name: str, meta: Any, divisions: Sequence, parent_meta: Any = None
) -> FrameBase:
    """Make a DataFrame from a graph with the keys ``(name, i)``, like Dask's removed function."""
    divisions = tuple(divisions)
    keys = [(name, i) for i in range(len(divisions) - 1)]
    graph = FromGraph(dict(dsk), meta, divisions, keys, name, _determ_token=tokenize(name))
    return new_collection(graph)


def _calculate_divisions(
    df: Any, by: Any, repartition: Any, npartitions: int, ascending: bool = True, **kwargs: Any
) -> Any:
    """Call the new function with the arguments of the old one."""
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
    # merlin.core.utils imports `optimize` from a removed module; merlin_io replaces its caller.
    if "dask.dataframe.optimize" not in sys.modules:
        module = types.ModuleType("dask.dataframe.optimize")
        vars(module)["optimize"] = lambda dsk, keys, **kwargs: dsk
        sys.modules[module.__name__] = module
