"""Train plain PyTorch from a custom source: Arrow IPC files, each of which is a row group.

A source is any object with the members ``name``, ``row_counts``, ``fingerprint`` and ``read``.
"""

import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from torch import nn

from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.nvt_loader import KJTLoader

SIZES = {"user": 300, "item": 80}
SCHEMA = TableSchema(("clicked",), ("price",), tuple(SIZES), tuple(SIZES.values()))


class IpcFiles:
    """The IPC files of a directory.

    ``name`` is used in messages, ``row_counts`` are the numbers of rows of the row groups, and
    ``fingerprint`` lets the loader detect that the data have changed since its state was saved.
    """

    def __init__(self, directory):
        self.name = f"IPC files in {directory}"
        self.paths = sorted(Path(directory).glob("*.arrow"))
        self.row_counts = [self.table(path).num_rows for path in self.paths]
        self.fingerprint = [[path.name, path.stat().st_mtime_ns] for path in self.paths]

    def table(self, path):
        return pa.ipc.open_file(pa.memory_map(str(path))).read_all()

    def read(self, row_group, columns, rows):
        """Yield columns of a row group in batches of at most ``rows`` rows."""
        return self.table(self.paths[row_group]).select(columns).to_batches(max_chunksize=rows)


def write_log(directory):
    """Write rows whose clicks depend on the item and the price."""
    rng = np.random.default_rng(0)
    taste = np.random.default_rng(1).normal(size=SIZES["item"])
    for number in range(8):
        columns = {name: rng.integers(0, size, 4000) for name, size in SIZES.items()}
        columns["price"] = rng.normal(size=4000)
        score = 2 * taste[columns["item"]] - columns["price"]
        columns["clicked"] = rng.random(4000) < 1 / (1 + np.exp(-score))
        table = pa.table(columns)
        with pa.ipc.new_file(f"{directory}/{number}.arrow", table.schema) as file:
            file.write_table(table)


with tempfile.TemporaryDirectory() as directory:
    write_log(directory)
    torch.manual_seed(0)
    loader = KJTLoader(IpcFiles(directory), 256, schema=SCHEMA, shuffle=True, device="cpu")
    tables = nn.ModuleDict({name: nn.Embedding(size, 1) for name, size in SIZES.items()})
    dense = nn.Linear(1, 1)
    optimizer = torch.optim.Adam([*tables.parameters(), *dense.parameters()], 0.05)
    for epoch in range(2):
        for step, batch in enumerate(loader):
            ids = batch.sparse_features
            score = dense(batch.dense_features) + sum(tables[k](ids[k].values()) for k in SIZES)
            loss = nn.functional.binary_cross_entropy_with_logits(score[:, 0], batch.labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 62 == 0:
                print(f"epoch {epoch} step {step}: loss {loss:.3f}")
