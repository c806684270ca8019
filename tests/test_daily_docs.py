"""The commands of docs/daily.md, executed as they are written there."""

from __future__ import annotations

import re
from collections import defaultdict

import pytest

from tests.shell import ROOT, free_port, started

PAGE = ROOT / "docs" / "daily.md"
#: Seconds; it takes two minutes on two idle cores.
_TIMEOUT = 1800
pytestmark = pytest.mark.timeout(_TIMEOUT)

#: How far a metric on the page may be from what is printed, on another processor.
_TOLERANCE = 0.02
_BLOCK = re.compile(r"^```(bash|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks() -> list[tuple[str, str]]:
    """Return the blocks of the page: "bash" is executed, "text" is what it printed."""
    return _BLOCK.findall(PAGE.read_text(encoding="utf-8"))


def script() -> str:
    """Return all commands as one script; a line before each block says which it is."""
    parts = ["set -e"]
    for i, (kind, text) in enumerate(blocks()):
        if kind == "bash":
            parts.append(f"echo '== block {i}'\n{text}")
    return "\n".join(parts)


def shape(line: str) -> str:
    """Return a line without digests and numbers, some of which differ between machines."""
    line = re.sub(r"\b[0-9a-f]{12}\b", "@", " ".join(line.split()))
    return re.sub(r"[-+]?\d[\d,.]*(e[-+]\d+)?", "#", line)


def fractions(line: str) -> list[float]:
    """Return the numbers of a line that have a decimal point: metrics, probabilities, rates."""
    return [float(text) for text in re.findall(r"[-+]?\d+\.\d+", line)]


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """Run the page from top to bottom; return what each block printed."""
    directory = tmp_path_factory.mktemp("week")
    log = directory / "printed.log"
    with started(directory, ["bash", "-c", script()], log, PORT=free_port()) as shell:
        status = shell.wait(timeout=_TIMEOUT - 60)
    output = log.read_text(encoding="utf-8")
    assert status == 0, output[-5000:]
    pieces = re.split(r"^== block (\d+)\n", output, flags=re.MULTILINE)[1:]
    return {int(i): text for i, text in zip(pieces[::2], pieces[1::2], strict=True)}


def test_the_page_has_commands_and_output() -> None:
    kinds = [kind for kind, _ in blocks()]
    assert kinds.count("bash") > 8
    assert kinds.count("text") > 2
    assert kinds[0] == "bash"
    for command in ("etl extend", "publish", "--rollback", "lineage"):
        assert any(command in text for kind, text in blocks() if kind == "bash"), command


def test_every_command_of_the_page_works(printed: dict[int, str]) -> None:
    assert list(printed) == [i for i, (kind, _) in enumerate(blocks()) if kind == "bash"]


def test_the_output_on_the_page_is_what_is_printed(printed: dict[int, str]) -> None:
    executed = 0
    for i, (kind, text) in enumerate(blocks()):
        if kind == "bash":
            executed = i
            continue
        there = defaultdict(list)
        for line in printed[executed].splitlines():
            there[shape(line)].append(fractions(line))
        for line in text.splitlines():
            if line.strip() not in ("", "…"):
                close = pytest.approx(fractions(line), abs=_TOLERANCE)
                assert close in there[shape(line)], f"{line!r}\nis not in\n{printed[executed]}"
