"""docs/runbook.md: each failure is made, and the commands of the page are executed literally."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest

from tests.shell import ROOT, free_port, run, started
from tests.test_daily_docs import PAGE, shape

pytestmark = pytest.mark.timeout(1800)

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


def begin(directory: Path) -> Path:
    """Make the model of the first days, and the scripts of docs/daily.md."""
    scripts = re.findall(
        r"^cat > \w+\.sh <<'END'\n.*?^END$", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    status, output = run(directory, BEGIN + "\n".join(scripts))
    assert status == 0, output[-3000:]
    return directory


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory):
    """The directory of the daily job, with a server."""
    directory = begin(tmp_path_factory.mktemp("job"))
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
