"""Convert KJTLoader's batches to Merlin's form, a dict of columns and the labels.

    python merlin_batches.py OUT/criteo_binary/split/train

trains a logistic regression in PyTorch on them. Lists become NAME__values and NAME__offsets.
"""

import sys

import torch
from torch import nn

from nvt_torchrec import KJTLoader

loader = KJTLoader(sys.argv[1], batch_size=256, shuffle=True)
schema = loader.schema


def to_merlin(batch):
    """Return a batch as a dict of columns, and its labels."""
    columns = dict(zip(schema.dense, batch.dense_features.unbind(1), strict=True))
    for name, ids in batch.sparse_features.to_dict().items():
        if name in schema.multi_hot:
            columns[f"{name}__values"] = ids.values()
            columns[f"{name}__offsets"] = ids.offsets()
        else:
            columns[name] = ids.values()
    return columns, batch.labels


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = zip(schema.categorical, schema.table_sizes, strict=True)
        self.weights = nn.ModuleDict({name: nn.EmbeddingBag(n, 1, mode="sum") for name, n in sizes})
        self.dense = nn.Linear(len(schema.dense), 1)
        for table in self.weights.values():
            nn.init.zeros_(table.weight)

    def forward(self, columns):
        logits = self.dense(torch.stack([columns[name] for name in schema.dense], 1))
        for name, table in self.weights.items():
            if name in schema.multi_hot:
                part = table(columns[f"{name}__values"], columns[f"{name}__offsets"][:-1])
            else:
                part = table(columns[name].unsqueeze(1))
            logits = logits + part
        return logits.squeeze(1)


model = Regression().to(loader.device)
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
for columns, labels in loader.map(to_merlin):
    loss = nn.functional.binary_cross_entropy_with_logits(model(columns), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"last loss: {loss.item():.4f}")
