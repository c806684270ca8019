"""Convert the MIND data set to a log of impressions, a table of news with vectors, and a spec.

    python examples/news.py MIND RAW

The directory MIND holds behaviors.tsv and news.tsv as published. `encode` needs no model: each word
has a random vector, and a title the mean of its words. Replace it with a language model's encoder.
"""

import sys
import zlib
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

WIDTH = 64
SPEC = f"""
input = {{format = "csv"}}
label = {{name = "clicked"}}
split = {{by = "time", column = "time", valid = 0.1, test = 0.1}}
table = [{{name = "news", path = "news.parquet", key = "news"}}]
vector = [{{name = "title", table = "news", width = {WIDTH}}}]
[[categorical]]
names = ["user", "news"]
raw = "string"
[[categorical]]
names = ["category", "subcategory"]
raw = "string"
table = "news"
"""


def encode(titles: pd.Series) -> np.ndarray:
    """Return the vector of each title, float32 [n, WIDTH]."""
    vectors = np.zeros((len(titles), WIDTH), np.float32)
    for vector, title in zip(vectors, titles, strict=True):
        for word in title.lower().split():
            vector += np.random.default_rng(zlib.crc32(word.encode())).normal(size=WIDTH)
        vector /= max(len(title.split()), 1)
    return vectors


mind, raw = map(Path, sys.argv[1:])
raw.mkdir(parents=True, exist_ok=True)
(raw / "spec.toml").write_text(SPEC)
read = {"sep": "\t", "header": None, "quoting": 3, "keep_default_na": False}  # 3: no quotes

names = ["news", "category", "subcategory", "title"]
news = pd.read_csv(mind / "news.tsv", names=names, usecols=range(4), **read)
columns = {name: pa.array(news[name]) for name in names[:3]}
values = pa.array(encode(news["title"]).ravel())
columns["title"] = pa.FixedSizeListArray.from_arrays(values, WIDTH)
pq.write_table(pa.table(columns), raw / "news.parquet")

# An impression shows several news, for example "N1-1 N2-0". Each becomes a row; 1 means clicked.
log = pd.read_csv(mind / "behaviors.tsv", names=["id", "user", "time", "history", "shown"], **read)
log["time"] = pd.to_datetime(log["time"], format="%m/%d/%Y %I:%M:%S %p")
log = log.assign(shown=log["shown"].str.split()).sort_values("time").explode("shown")
log[["news", "clicked"]] = log["shown"].str.split("-", expand=True)
log[["time", "user", "news", "clicked"]].to_csv(raw / "behaviors.csv", index=False)
