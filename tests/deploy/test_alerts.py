"""``deploy/alerts.yml``: rules that Prometheus takes, about metrics that there are."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.inference.bundles import ROWS, make_bundle, publish
from tests.inference.serving import serving

RULES = Path(__file__).parents[2] / "deploy" / "alerts.yml"


@pytest.mark.usefixtures("warm_trials")
def test_rules_name_metrics_of_the_server(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "bundle")
    publish(bundle, tmp_path / "served")
    with serving(tmp_path, "--bundle", str(tmp_path / "served" / "current")) as server:
        server.predict(rows=ROWS)
        page = server.ask("/metrics")[1].decode()
        times = {
            name: server.metric(f"inference_bundle_{name}_timestamp_seconds")
            for name in ("trained", "published")
        }
    assert times["trained"] == pytest.approx((bundle / "bundle.json").stat().st_mtime, abs=1e-3)
    link = (tmp_path / "served" / "current").lstat()
    assert times["published"] == pytest.approx(link.st_mtime, abs=1e-3)
    there = set(re.findall(r"^(inference_\w+)", page, re.MULTILINE))
    groups = yaml.safe_load(RULES.read_text())["groups"]
    expressions = [rule["expr"] for group in groups for rule in group["rules"]]
    assert len(expressions) == 6
    assert set(re.findall(r"inference_\w+", " ".join(expressions))) <= there


@pytest.mark.skipif(not shutil.which("promtool"), reason="needs Prometheus' promtool")
def test_promtool_accepts_them() -> None:
    done = subprocess.run(
        ["promtool", "check", "rules", str(RULES)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(not shutil.which("promtool"), reason="needs Prometheus' promtool")
@pytest.mark.parametrize(
    ("series", "fires"),
    [
        ({"a": "1 1 1 1 1", "b": "1 0 0 0 0"}, [{"job": "inference", "instance": "b"}]),
        ({"a": "1 1 1 1 1", "b": "0 1 0 1 0"}, []),
        ({}, [{"job": "inference"}]),
    ],
)
def test_a_server_that_is_down_is_an_alert(
    tmp_path: Path, series: dict[str, str], fires: list[dict[str, str]]
) -> None:
    given = [
        {"series": f'up{{job="inference",instance="{name}"}}', "values": values}
        for name, values in series.items()
    ]
    labels = [{"exp_labels": labels, "exp_annotations": _summary(labels)} for labels in fires]
    alert = {"eval_time": "4m", "alertname": "ServerDown", "exp_alerts": labels}
    test = {"interval": "1m", "input_series": given, "alert_rule_test": [alert]}
    file = tmp_path / "tests.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "tests": [test]}))
    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def _summary(labels: dict[str, str]) -> dict[str, str]:
    rules = yaml.safe_load(RULES.read_text())["groups"][0]["rules"]
    (text,) = (rule["annotations"]["summary"] for rule in rules if rule["alert"] == "ServerDown")
    return {"summary": text.replace("{{ $labels.instance }}", labels.get("instance", ""))}
