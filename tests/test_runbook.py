"""docs/runbook.md: each failure is made, and the commands of the page are executed literally."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.etl.extended import differences
from tests.etl.runs import tree
from tests.shell import ROOT, free_port, run, started
from tests.test_daily_docs import PAGE, shape

pytestmark = pytest.mark.timeout(3600)

#: A small model of the days up to day 9, served; the scripts are those of docs/daily.md.
BEGIN = """
set -e
export MODEL="--binary_path OUT/criteo_binary/split/ --batch_size 256 --adagrad --embedding_dim 8 \
    --epochs 1 --dense_arch_layer_sizes 8 --over_arch_layer_sizes 8,1 --no-boosted_trees"
export CONTINUE="$MODEL --days new --learning_rate 0.01 --dense_learning_rate 0.001"
if [ ! -e RAW ]; then
    nvt-etl synthesize --output_path RAW --days 15 --rows_per_day 4000
    nvt-etl run --input_path RAW --output_path OUT --days 0-9
    nvt-train $MODEL --save_checkpoint_path checkpoints/day_9
    nvt-infer bundle --workflow OUT/workflow --checkpoint checkpoints/day_9 \
        --output bundles/day_9
    nvt-infer publish bundles/day_9 --to SERVED
fi
"""
#: By section: what makes the failure, and what happens outside before the commands of the page.
_FAILURES = {
    "The day is refused by extend": (
        "cp RAW/day_10 good; head -n 100 good > RAW/day_10; bash morning.sh 9 10",
        "mv good RAW/day_10",
    ),
    "extend was ended": (
        "timeout --signal=KILL 1 nvt-etl extend --output_path OUT --input_path RAW/day_11",
        "",
    ),
    "The checkpoint is of an earlier generation": (
        "nvt-etl extend --output_path OUT --input_path RAW/day_12; nvt-infer "
        "bundle --workflow OUT/workflow --checkpoint checkpoints/day_11 --output bundles/early",
        "",
    ),
    "publish refuses a bundle that is worse": (
        'export CONTINUE="$MODEL --days new --learning_rate 3"; bash morning.sh 12 13',
        "",
    ),
    "publish refuses an earlier generation": (
        "nvt-infer publish bundles/day_9 --to SERVED",
        "",
    ),
    "A served model turns out to be bad": ("", ""),
    "The served bundle is damaged": (
        "cd SERVED/current/weights; cp module.top.0.bias.npy x; printf x >> x; "
        "tail --bytes=+2 x > y; rm x; mv --force y module.top.0.bias.npy; cd ../../..; "
        "nvt-infer publish bundles/day_12 --to SERVED --sample RAW/day_14 --allow_older",
        "",
    ),
    "The server does not take the new bundle": (
        "ln --symbolic --force --no-dereference bundles/000000000000 SERVED/current; "
        "for second in $(seq 100); do "
        "grep 'still serving.*no bundle' serve.log && break || sleep 1; done",
        "",
    ),
    "Another command is at work": (
        "flock SERVED/.lock nvt-infer publish bundles/day_12 --to SERVED",
        "",
    ),
    "The disk is full": (
        "nvt-etl extend --output_path OUT --input_path RAW/day_14; nvt-train "
        "$CONTINUE --continue_from checkpoints/day_13 --save_checkpoint_path checkpoints/day_14; "
        "ulimit -f 4; nvt-infer bundle --workflow OUT/workflow --checkpoint "
        "checkpoints/day_14 --output bundles/day_14",
        "rm -r checkpoints/day_14",
    ),
    "A bad day was added": ("", ""),
}


def sections() -> dict[str, list[tuple[str, str]]]:
    """The blocks of each section of the page, by its title."""
    text = (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8")
    block = re.compile(r"^```(bash|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    titled = (part.partition("\n") for part in text.split("\n## ")[1:])
    return {title: block.findall(body) for title, _, body in titled if block.search(body)}


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of the first days, and the scripts of docs/daily.md."""
    directory = tmp_path_factory.mktemp("begun")
    scripts = re.findall(
        r"^cat > \w+\.sh <<'END'\n.*?^END$", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    status, output = run(directory, BEGIN + "\n".join(scripts))
    assert status == 0, output[-3000:]
    return directory


@pytest.fixture(scope="module")
def job(begun: Path, tmp_path_factory: pytest.TempPathFactory):
    """The directory of the daily job, with a server."""
    directory = shutil.copytree(begun, tmp_path_factory.mktemp("job") / "job", symlinks=True)
    command = [sys.executable, "-m", "inference", "serve", "--bundle", "SERVED/current"]
    command += ["--port", free_port()]
    with started(directory, command, directory / "serve.log") as server:
        yield directory
        server.send_signal(signal.SIGTERM)


def test_each_section_has_a_failure() -> None:
    assert list(sections()) == list(_FAILURES)


@pytest.mark.parametrize("title", _FAILURES)
def test_what_the_page_says(job: Path, title: str) -> None:
    failure, outside = _FAILURES[title]
    blocks = sections()[title]
    status, printed = run(job, BEGIN.replace("set -e", "") + failure)
    there = [shape(line) for line in printed.splitlines()]
    for kind, text in blocks:
        for line in text.splitlines() if kind == "text" else ():
            said = shape(line).replace("No space left on device", "File too large")
            assert any(said in found for found in there), f"{line!r}\nis not in\n{printed}"
    script = "\n".join(text for kind, text in blocks if kind == "bash")
    status, printed = run(job, f"{BEGIN}\n{outside}\n{script}")
    assert status == 0, printed[-3000:]


#: How many mornings, of at most five; more take minutes.
_MORNINGS = int(os.environ.get("MORNINGS", "1"))
_KILLS = 3  # of a morning; after them it is left alone


def _killed(directory: Path, script: str, seconds: float) -> bool:
    """Run a script; kill all its processes after some seconds. Return whether that was needed."""
    try:
        with started(directory, ["bash", "-c", script], directory / "printed.log") as process:
            status = process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return True
    assert status == 0, (directory / "printed.log").read_text()[-3000:]
    return False


def _results(job: Path, day: int) -> dict[str, bytes]:
    """Return the output of the ETL, and what is served but for the times in its record."""
    served = job / "SERVED" / "current"
    assert (served / "bundle.json").samefile(job / "bundles" / f"day_{day}" / "bundle.json")
    files = tree(job / "OUT")
    for directory in ("weights", "workflow"):
        files |= {f"{directory}/{name}": data for name, data in tree(served / directory).items()}
    files = {name: data.replace(b"/killed/", b"/job/") for name, data in files.items()}
    manifest = json.loads(files["manifest.json"])
    assert manifest.pop("blake2b")  # it covers the inputs' paths
    return files | {"manifest.json": json.dumps(manifest).encode()}


def test_killed_mornings_end_as_undisturbed_ones(begun: Path, tmp_path: Path) -> None:
    """Mornings of docs/daily.md, killed at random moments and repeated until they succeed."""
    job, killed = (
        shutil.copytree(begun, tmp_path / name, symlinks=True) for name in ("job", "killed")
    )
    chance = random.Random(2026)
    kills = 0
    for day in range(10, 10 + _MORNINGS):
        morning = f"{BEGIN}bash morning.sh {day - 1} {day}"
        begun_at = time.monotonic()
        status, printed = run(job, morning)
        duration = time.monotonic() - begun_at
        assert status == 0, printed[-3000:]
        for turn in range(_KILLS + 1):
            seconds = chance.uniform(0.1, 0.8) * duration if turn < _KILLS else 3000
            if not _killed(killed, morning, seconds):
                break
            kills += 1
        assert differences(_results(job, day), _results(killed, day)) == []
        status, printed = run(killed, morning)  # once more, although all is done
        assert status == 0, printed[-3000:]
        assert differences(_results(job, day), _results(killed, day)) == []
    assert kills
