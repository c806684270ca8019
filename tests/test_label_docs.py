"""docs/labels.md: its first commands are executed as they stand there, and print what it says."""

from __future__ import annotations

import re
from pathlib import Path

from tests.shell import ROOT, run_script

_TEXT = (ROOT / "docs" / "labels.md").read_text(encoding="utf-8")


def test_the_page_begins_with_commands_that_work(tmp_path: Path) -> None:
    """The spec that it shows is that of the log that they write."""
    commands = re.search(r"(?:^    nvt-.*\n)+", _TEXT, re.MULTILINE)
    assert commands
    status, printed = run_script(tmp_path, f"set -e\n{commands[0]}")
    assert status == 0, printed[-5000:]
    said = re.search(r"^    (\d+ rows in, .*)$", _TEXT, re.MULTILINE)
    assert said
    assert said[1] in printed
    label = re.search(r"```toml\n(.*?)```", _TEXT, re.DOTALL)
    assert label
    lines = [line.partition("#")[0].strip() for line in label[1].splitlines()]
    assert "\n".join(lines) in (tmp_path / "RAW/spec.toml").read_text(encoding="utf-8")
    assert re.search(r"test: AUROC 0\.\d+", printed)
