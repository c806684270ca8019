"""Check rows on a device: infinity and NaN, ids outside their tables."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch

from nvt_torchrec.nvt_loader.cuda.device_rows import DeviceRows
from nvt_torchrec.nvt_loader.parquet.checks import Checker, refuse_non_finite
from nvt_torchrec.nvt_loader.parquet.dataset import Dataset


class DeviceChecker:
    """Checks rows on their device by reductions that the loader's thread reads back."""

    def __init__(self, dataset: Dataset, device: torch.device) -> None:
        self._dataset = dataset
        self._host = Checker(dataset)
        schema = dataset.schema
        self._single = [i for i, n in enumerate(schema.categorical) if n not in schema.multi_hot]
        self._lists = [schema.categorical.index(name) for name in schema.multi_hot]
        sizes = [schema.table_sizes[i] for i in self._single]
        self._sizes = torch.tensor(sizes, dtype=torch.int64, device=device)

    def checked(self, rows: DeviceRows, file: int, unsigned: Collection[str] = ()) -> DeviceRows:
        """Return the rows with their ids in the loader's dtype. Raises :class:`SchemaError`.

        Args:
            rows: rows with ids as int32 or int64.
            file: the number of the file that the rows are from.
            unsigned: the columns whose ids were uint64; those from 2⁶³ on are negative now.
        """
        schema, path = self._dataset.schema, self._dataset.files[file]
        broken = ~rows.floats.isfinite().all(dim=0)
        outside = ((rows.ids < 0) | (rows.ids >= self._sizes)).any(dim=0)
        in_lists = [
            ((values < 0) | (values >= schema.table_sizes[i])).any().view(1)
            for i, (_, values, _) in zip(self._lists, rows.lists, strict=True)
        ]
        weighted = {
            self._dataset.weights[schema.categorical[i]]: weights
            for i, (_, _, weights) in zip(self._lists, rows.lists, strict=True)
            if weights is not None
        }
        in_weights = [~weights.isfinite().all().view(1) for weights in weighted.values()]
        parts = [broken, outside, *in_lists, *in_weights]
        found = torch.cat(parts).cpu().numpy()  # waits, in the loader's thread
        ends = np.cumsum([len(broken), len(outside), len(in_lists)])
        broken, outside, in_lists, in_weights = np.split(found, ends)
        for i in np.flatnonzero(broken):
            refuse_non_finite(rows.floats[:, i].cpu().numpy(), schema.columns[i], path)
        for name, flag in zip(weighted, in_weights, strict=True):
            if flag:
                refuse_non_finite(weighted[name].cpu().numpy(), name, path)
        dtype = torch.int64 if self._dataset.id_dtype.itemsize == 8 else torch.int32
        ids, lists = rows.ids, list(rows.lists)
        for i in np.flatnonzero(outside):
            ids = ids.clone()
            ids[:, i] = self._into_table(ids[:, i], self._single[i], file, unsigned)
        for k in np.flatnonzero(in_lists):
            offsets, values, weights = lists[k]
            inside = self._into_table(values, self._lists[k], file, unsigned)
            lists[k] = offsets, inside, weights
        return DeviceRows(
            rows.rows,
            rows.floats,
            ids.to(dtype),
            tuple((offsets, values.to(dtype), weights) for offsets, values, weights in lists),
        )

    def _into_table(
        self, ids: torch.Tensor, column: int, file: int, unsigned: Collection[str]
    ) -> torch.Tensor:
        found = ids.cpu().numpy()
        if self._dataset.schema.categorical[column] in unsigned:
            found = found.view(np.uint64)
        found = self._host.into_table(found, column, file)
        return torch.from_numpy(found.astype(np.int64)).to(ids)
