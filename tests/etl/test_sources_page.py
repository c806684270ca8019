"""docs/sources.md: its commands, one after the other, on what its example writes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pandas as pd

from nvt_torchrec.formats.feature_spec.toml_file import load_spec
from nvt_torchrec.inference.predictor import Predictor
from tests.shell import ROOT, run

TEXT = (ROOT / "docs/sources.md").read_text(encoding="utf-8")
#: The lines of code blocks, but for the server, which the request below is not sent to.
COMMANDS = re.findall(r"^    ((?:python|nvt-)(?:.*))$", TEXT, re.MULTILINE)
REQUEST = re.search(r"-d '(.*?)'$", TEXT, re.MULTILINE | re.DOTALL)


def test_the_example_runs_to_a_score(tmp_path: Path) -> None:
    lines = [line for line in COMMANDS if not line.startswith("nvt-infer serve")]
    assert len(lines) == 5
    lines[0] = lines[0].replace("examples/", f"{ROOT}/examples/")
    status, printed = run(tmp_path, "\n".join(["set -e", *lines]))
    assert status == 0, printed[-3000:]
    (spec,) = re.findall(r"^```toml\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    (tmp_path / "page.toml").write_text(spec)
    assert load_spec(tmp_path / "page.toml") == load_spec(tmp_path / "RAW/spec.toml")
    shown = re.search(r"test: AUROC (\d\.\d+)", printed)
    assert shown is not None
    assert float(shown[1]) > 0.6  # of purchases; users and items alone say next to nothing
    predictor = Predictor.load(tmp_path / "BUNDLE")
    assert REQUEST is not None
    request = json.loads(REQUEST[1])
    rows = [{**request["shared"], **row} for row in request["rows"]]
    assert predictor.predict(rows).shape == (2,)
    bought = pd.read_csv(tmp_path / "RAW/purchases.csv")
    never = set(range(1000)) - {*bought["user_id"]}
    users = [int(bought["user_id"].iloc[-1]), min(never)]
    scores = predictor.predict([{**rows[0], "user": user} for user in users])
    assert scores[0] > scores[1] + 0.1
