"""The scripts of examples/ and the lines of README's table, executed in other directories."""

from __future__ import annotations

import ast
import re
import runpy
import shutil
import sys
from pathlib import Path

import nvt_torchrec.nvt_compat  # noqa: F401

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from nvt_torchrec import EtlSettings, KJTLoader, run
from nvt_torchrec.formats.etl_output import EtlOutput
from nvt_torchrec.formats.feature_spec.toml_file import load_spec
from nvt_torchrec.training.baselines.baselines import REGRESSION
from nvt_torchrec.training.reporting.page import read_events
from tests.logs import write_log
from tests.shell import ROOT
from tests.shell import run as run_script
from tests.spec_logs import write_spec_log

EXAMPLES = ROOT / "examples"
_TABLE = re.compile(r"^## What you have.*?\n\n(.*?)\n\n", re.MULTILINE | re.DOTALL)
_TOML = re.compile("^```toml\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: What the lines of Python in README's table suppose, and what they must have made.
_BEFORE = (
    "from nvt_torchrec import *",
    "import pandas as pd, pyarrow.parquet as pq",
    "from nvt_torchrec.formats.schema import TableSchema",
    "table = pq.read_table('OUT/criteo_binary/split/train')",
    "schema = TableSchema.read('OUT/criteo_binary/split')",
    "frame = pd.read_csv('clicks.csv', dtype=str)",
    "to_merlin = lambda batch: ({}, batch.labels)",
)
_AFTER = (
    "assert manifest['rows']['in'] == len(dense) == len(scores) == len(frame)",
    "assert len(next(iter(loader))) == 2",
)
_BUNDLE = "nvt-infer bundle --workflow OUT/workflow --checkpoint CKPT"


def clicks(rows: int = 1000, users: int = 40, items: int = 20) -> pd.DataFrame:
    """A log like README's: users and items have effects, some values are missing."""
    rng = np.random.default_rng(0)
    user, item = rng.integers(0, users, rows), rng.integers(0, items, rows)
    logits = rng.normal(0, 1, users)[user] + rng.normal(0, 1, items)[item]
    frame = {
        "time": pd.Timestamp("2026-10-01") + pd.to_timedelta(np.arange(rows), unit="min"),
        "user": [f"u{number:05d}" for number in user],
        "item": [f"i{number:04d}" for number in item],
        "category": [f"c{number % 7}" for number in item],
        "price": np.where(rng.random(rows) < 0.1, np.nan, rng.lognormal(3, 1, rows).round(2)),
        "device": rng.choice(["phone", "tablet", None], rows),
        "clicked": (rng.random(rows) < 1 / (1 + np.exp(-logits))).astype(int),
    }
    of_pairs = np.where(user % 2 == item % 2, 2, -2)  # no regression learns these
    bought = frame["clicked"] * (rng.random(rows) < 1 / (1 + np.exp(-of_pairs)))
    return pd.DataFrame({**frame, "bought": bought})


def write_late_clicks(directory: Path, frame: pd.DataFrame) -> None:
    """Write the same log without its clicks, these in a file of their own, and a spec."""
    shown = frame.drop(columns=["clicked", "bought"])
    shown = shown.assign(id=np.arange(len(shown)), second=np.arange(len(shown)) * 60)
    shown.to_csv(directory / "shown.csv", index=False)
    clicks = shown.loc[frame["clicked"] == 1, ["id", "second"]]
    clicks.assign(second=clicks["second"] + 90).to_csv(directory / "clicks_later.csv", index=False)
    (directory / "shown.toml").write_text(_SHOWN)


_SHOWN = """
[input]
format = "csv"
[label]
name = "clicked"
from = "clicks_later.csv"
key = "id"
within = "1h"
log_time = "second"
log_time_format = "epoch_s"
[split]
by = "share"
valid = 0.1
test = 0.1
[[categorical]]
names = ["user", "item"]
raw = "string"
"""


def write_purchases(folder: Path, frame: pd.DataFrame) -> None:
    """Write purchases of the users of a log, and a spec that sums them up."""
    bought = pd.DataFrame({"at": frame["time"][::3], "user_id": frame["user"][::3], "amount": 2.5})
    bought.to_csv(folder / "purchases.csv", index=False)
    page = (ROOT / "docs/sources.md").read_text(encoding="utf-8")
    spec = re.search(r"^```toml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[1]
    (folder / "purchases.toml").write_text(spec.replace('raw = "int"', 'raw = "string"'))


def passed(directory: Path, script: str) -> str:
    """Run a script of bash; return what it printed."""
    status, printed = run_script(directory, f"set -e\n{script}")
    assert status == 0, printed[-5000:]
    return printed


def test_they_are_short_described_and_tested() -> None:
    tests = "".join(
        path.read_text(encoding="utf-8") for path in Path(__file__).parent.rglob("*.py")
    )
    for file in EXAMPLES.glob("*.py"):
        text = file.read_text(encoding="utf-8")
        assert text.count("\n") < 80, file
        assert ast.get_docstring(ast.parse(text)), file
        assert file.stem in tests, file


def test_every_line_of_the_table(tmp_path: Path) -> None:
    """Those of bash one after the other, and then those of Python in one process."""
    [table] = _TABLE.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    lines = re.findall(r"`([^`]+)`", "".join(row.split("|")[2] for row in table.splitlines()))
    commands = [line for line in lines if line.startswith("nvt-")]
    assert len(commands) > 7
    clean = {"nvt-etl guess": "rm -f spec.toml", "nvt-etl run": "rm -rf OUT"}
    script = [f"python {EXAMPLES / 'nvtabular_workflow.py'} clicks.csv DATA"]
    for command in commands:
        script += [remove for name, remove in clean.items() if name in command]
        script.append(command)
    write_log(tmp_path / "RAW", [120, 60, 60])
    frame = clicks()
    frame.to_csv(tmp_path / "clicks.csv", index=False)
    frame.to_parquet(tmp_path / "clicks.parquet")
    items = frame[["item"]].drop_duplicates()
    items.assign(shelf=np.arange(len(items)) % 7).to_csv(tmp_path / "items.csv", index=False)
    rng = np.random.default_rng(1)
    vectors = rng.normal(size=(len(items), 3)).tolist()
    items.assign(text=vectors).to_parquet(tmp_path / "items.parquet")
    likes = {"user": rng.integers(0, 40, 1000), "item": rng.integers(0, 50, 1000)}
    pd.DataFrame({**likes, "time": range(1000)}).to_csv(tmp_path / "likes.csv", index=False)
    [spec] = _TOML.findall((ROOT / "docs/negatives.md").read_text(encoding="utf-8"))
    (tmp_path / "likes.toml").write_text(spec)
    write_late_clicks(tmp_path, frame)
    write_purchases(tmp_path, frame)
    shutil.copy(EXAMPLES / "deepfm.py", tmp_path / "my_model.py")
    python = [*_BEFORE, *(line for line in lines if line not in commands), *_AFTER]
    (tmp_path / "lines.py").write_text("\n".join(python))
    script += ["python lines.py", f"{_BUNDLE} --output BUNDLE"]
    script.append(f"python {EXAMPLES / 'encode_and_score.py'} BUNDLE clicks.csv")
    printed = passed(tmp_path, "\n".join(script))
    assert printed.count("test: AUROC 0.") == 3  # of OUT, my_model and DATA, which NVTabular wrote
    assert re.search(r"test \(clicked\): AUROC 0\..*\n.*test \(bought\): AUROC 0\.", printed)
    # TorchRec itself may log a line between
    assert re.search(r"^1000 rows, dense columns .*\n(.*\n)?\w+: ids \[", printed, re.MULTILINE)


def write_mind(directory: Path) -> list[str]:
    """Write news and impressions in MIND's form; return the titles."""
    directory.mkdir()
    rng = np.random.default_rng(0)
    words = [f'"word{i}"' for i in range(30)]  # quotes of a title are no quotes of the file
    titles = [" ".join(rng.choice(words, 5)) for _ in range(40)]
    news = [f"N{i}\tc{i % 3}\ts{i % 7}\t{title}\t\t\t[]\t[]" for i, title in enumerate(titles)]
    (directory / "news.tsv").write_text("\n".join(news) + "\n")
    lines = []
    for i in range(200):
        time = pd.Timestamp("2019-11-11") + pd.Timedelta(minutes=int(rng.integers(0, 6000)))
        shown = " ".join(f"N{n}-{int(rng.random() < 0.3)}" for n in rng.integers(0, 40, 3))
        lines.append(f"{i}\tU{i % 20}\t{time:%m/%d/%Y %I:%M:%S %p}\tN1 N2\t{shown}")
    (directory / "behaviors.tsv").write_text("\n".join(lines) + "\n")
    return titles


def test_news(tmp_path: Path) -> None:
    """The commands of docs/vectors.md, on files in MIND's form; news of one title, one vector."""
    titles = write_mind(tmp_path / "MIND")
    passed(
        tmp_path,
        f"python {EXAMPLES / 'news.py'} MIND RAW\n"
        "nvt-etl run --spec RAW/spec.toml --input_path RAW/behaviors.csv --output_path OUT\n"
        "nvt-etl check OUT",
    )
    splits = tmp_path / "OUT/criteo_binary/split"
    assert sum(pq.read_metadata(f).num_rows for f in splits.glob("*/part.*.parquet")) == 600
    vectors = np.load(splits / "_vectors/title/0/values.npy")
    assert vectors.shape == (len(titles), 64)
    assert (pq.read_table(splits / "train/part.0.parquet")["title.vector"].to_numpy() >= 0).all()


def test_an_own_model_of_two_labels(tmp_path: Path) -> None:
    """About a regression on one; on that of pairs better. It is served without its file."""
    clicks(8000).to_parquet(tmp_path / "clicks.parquet")
    shutil.copy(EXAMPLES / "deepfm.py", tmp_path / "my_model.py")
    printed = passed(
        tmp_path,
        "nvt-etl guess clicks.parquet --output spec.toml\n"
        "nvt-etl run --spec spec.toml --input_path clicks.parquet --output_path OUT\n"
        "nvt-train --binary_path OUT/criteo_binary/split --label clicked,bought"
        " --model my_model:build --log_path LOG --no-boosted_trees"
        ' --save_checkpoint_path CKPT --model_settings \'crosses=[["user", "item"]]\'\n'
        f"{_BUNDLE} --model my_model:build --output BUNDLE\nrm my_model.py\n"
        "nvt-infer predict --bundle BUNDLE --input clicks.parquet --output scores.parquet",
    )
    assert "FutureWarning" not in printed  # of PyTorch's export, as is the next
    assert "is_fx_tracing" not in printed
    areas = {
        (event["label"], event.get("name")): event["auroc"]
        for event in read_events(tmp_path / "LOG" / "metrics.jsonl")
        if event.get("split") == "test"
    }
    assert areas["clicked", None] > areas["clicked", REGRESSION] - 0.02
    assert areas["bought", None] > areas["bought", REGRESSION] + 0.05
    assert {"probability_clicked", "probability_bought"} <= {
        *pq.read_schema(tmp_path / "scores.parquet").names
    }


def test_merlins_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """They are those of Merlin's own Loader, lists among them."""
    from merlin.dataloader.torch import Loader
    from merlin.io import Dataset

    write_spec_log(tmp_path / "raw", load_spec("retail"), rows=300)
    run(EtlSettings(tmp_path / "raw", tmp_path / "OUT", "retail"))
    train = EtlOutput(tmp_path / "OUT").splits / "train"
    monkeypatch.setattr(sys, "argv", ["merlin_batches.py", str(train)])
    example = runpy.run_path(str(EXAMPLES / "merlin_batches.py"))
    assert "last loss: 0." in capsys.readouterr().out
    ours = KJTLoader(train, 100, device="cpu", virtual_shards=1).map(example["to_merlin"])
    for (columns, labels), (expected, targets) in zip(
        ours, Loader(Dataset(str(train), engine="parquet"), 100, shuffle=False), strict=True
    ):
        assert torch.equal(labels, targets)
        assert columns.keys() == expected.keys()
        for name, values in columns.items():
            assert torch.equal(values, expected[name].to(values.dtype)), name


def test_own_format(tmp_path: Path) -> None:
    """Days guessed, cut at record batches, run in threads and Dask's processes: as parquet is."""
    (tmp_path / "arrow").mkdir()
    (tmp_path / "parquet").mkdir()
    for day in range(2):
        frame = clicks()[day::2]
        table = pa.Table.from_pandas(frame, preserve_index=False)
        with pa.ipc.new_file(tmp_path / f"arrow/clicks_{day}.arrow", table.schema) as file:
            file.write_table(table, max_chunksize=200)
        frame.to_parquet(tmp_path / f"parquet/clicks_{day}.parquet")
    printed = passed(
        tmp_path,
        f"""python {EXAMPLES / "own_format.py"} arrow OUT
        sed s/arrow/parquet/ OUT.toml > parquet.toml
        nvt-etl run --spec parquet.toml --input_path parquet --output_path SAME
        sed s/cpu/dask/ {EXAMPLES / "own_format.py"} > own_dask.py
        {sys.executable} own_dask.py arrow DASK""",
    )
    assert printed.count("{'in': 1000, 'out': 1000, 'rejected': 0}") == 2
    parts = [pd.read_parquet(EtlOutput(tmp_path / out).splits) for out in ("OUT", "SAME", "DASK")]
    assert parts[0].equals(parts[1])
    assert parts[0].equals(parts[2])


def test_own_derivation(tmp_path: Path) -> None:
    urls = ["https://www.example.org/a", "http://example.org:80", "sub.example.net?x=1", ""]
    rows = [f"{url},{i // 4 % 2}" for i, url in enumerate(urls * 10)]
    (tmp_path / "clicks.csv").write_text("\n".join(["url,clicked", *rows]))
    script = EXAMPLES / "own_derivation.py"
    assert passed(tmp_path, f"python {script} clicks.csv OUT").endswith("[3, 3, 1]\n")
    saved = "nvt-workflows inspect OUT/workflow"
    status, printed = run_script(tmp_path, f"export PYTHONPATH={ROOT}; {saved}")
    assert status != 0
    assert "derive = 'domain': nothing is registered under this name" in printed
    assert "damaged" not in printed
    command = re.search("python -c .* OUT/workflow", printed)[0].replace("MODULE", "own_derivation")
    shown = passed(tmp_path, f"export PYTHONPATH={ROOT}:{EXAMPLES}; {command}")
    assert "domain  string  domain" in shown
