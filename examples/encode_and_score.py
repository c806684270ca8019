"""Rows of the log as tensors, and scores of tensors: the two halves of a Predictor.

    python encode_and_score.py BUNDLE clicks.csv

For a model of your own take the Encoder alone; where rows are encoded already, as in a feature
store, take the Scorer alone.
"""

import sys

import pandas as pd

from nvt_torchrec import Encoder, Predictor, Scorer

bundle, log = sys.argv[1:]
frame = pd.read_csv(log, dtype=str)  # as in the file: the spec says what texts mean

encoder = Encoder.load(f"{bundle}/workflow")
dense, ids = encoder.encode(frame)  # float32 [rows, columns], KeyedJaggedTensor
print(f"{len(dense)} rows, dense columns {', '.join(encoder.spec.dense_names)}")
for name, column in ids.to_dict().items():
    print(f"{name}: ids {column.values()[:5].tolist()} …")

probabilities = Scorer.load(bundle).predict(dense, ids)  # float32 [rows]
assert (probabilities == Predictor.load(bundle).predict(frame)).all()
print(f"mean probability {probabilities.mean():.4f}")
