"""Encode rows of the log as tensors, and score tensors: the two halves of a Predictor.

    python encode_and_score.py BUNDLE clicks.csv

Use the Encoder alone for a custom model, and the Scorer alone for rows that are already encoded,
for example in a feature store.
"""

import sys

import pandas as pd

from nvt_torchrec import Encoder, Predictor, Scorer

bundle, log = sys.argv[1:]
frame = pd.read_csv(log, dtype=str)  # unparsed strings: the spec says how to read them

encoder = Encoder.load(f"{bundle}/workflow")
dense, ids = encoder.encode(frame)  # float32 [rows, columns], KeyedJaggedTensor
print(f"{len(dense)} rows, dense columns {', '.join(encoder.spec.dense_names)}")
for name, column in ids.to_dict().items():
    print(f"{name}: ids {column.values()[:5].tolist()} …")

probabilities = Scorer.load(bundle).predict(dense, ids)  # float32 [rows]
assert (probabilities == Predictor.load(bundle).predict(frame)).all()
print(f"mean probability {probabilities.mean():.4f}")
