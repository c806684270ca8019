"""MMoE (Ma et al. 2018, KDD, doi:10.1145/3219819.3220007): several labels share experts.

    nvt-train --binary_path OUT/criteo_binary/split --label clicked,bought \\
        --model examples.mmoe:build --model_settings experts=4

Each label has a gate, which weighs the experts for each row, and layers of its own above them.
"""

import torch
from torch import nn


class MMoE(nn.Module):
    def __init__(self, columns, experts, width):
        super().__init__()
        inputs = len(columns.dense) + len(columns.vectors) * columns.embedding_dim
        self.norm = nn.LayerNorm(inputs)  # vectors begin small, and so would all gradients
        self.experts = nn.ModuleList(nn.Linear(inputs, width) for _ in range(experts))
        self.gates = nn.ModuleList(nn.Linear(inputs, experts) for _ in columns.labels)
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
            for _ in columns.labels
        )

    def forward(self, dense, vectors):
        x = self.norm(torch.cat([dense, vectors.flatten(1)], 1))
        experts = torch.stack([expert(x).relu() for expert in self.experts], 1)
        logits = []
        for gate, tower in zip(self.gates, self.towers, strict=True):
            shares = gate(x).softmax(1).unsqueeze(2)
            logits.append(tower((shares * experts).sum(1)))
        return torch.cat(logits, 1)


def build(columns, experts=4, width=64):
    return MMoE(columns, experts, width)
