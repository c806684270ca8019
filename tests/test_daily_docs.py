"""The commands of docs/daily.md, executed as they are written there."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "daily.md"
#: Seconds; it takes two minutes on two idle cores.
_TIMEOUT = 1800
pytestmark = pytest.mark.timeout(_TIMEOUT)

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


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """Run the page from top to bottom; return what each block printed."""
    directory = tmp_path_factory.mktemp("week")
    (directory / "train_torchrec.py").symlink_to(ROOT / "train_torchrec.py")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {
        **os.environ,
        **{"PATH": path, "PYTHONPATH": str(ROOT), "PORT": str(port), "CUDA_VISIBLE_DEVICES": ""},
    }
    log = directory / "printed.log"
    with (
        open(log, "w") as file,
        subprocess.Popen(
            ["bash", "-c", script()],
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # the server of the page is one of its processes
        ) as shell,
    ):
        try:
            status = shell.wait(timeout=_TIMEOUT - 60)
        finally:
            end_session(shell.pid)
    output = log.read_text(encoding="utf-8")
    assert status == 0, output[-5000:]
    pieces = re.split(r"^== block (\d+)\n", output, flags=re.MULTILINE)[1:]
    return {int(i): text for i, text in zip(pieces[::2], pieces[1::2], strict=True)}


def end_session(session: int) -> None:
    """Kill the processes of a session that are left."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                os.kill(int(name), 9)
        except (OSError, ValueError, IndexError):
            continue


def test_the_page_has_commands_and_output() -> None:
    kinds = [kind for kind, _ in blocks()]
    assert kinds.count("bash") > 8
    assert kinds.count("text") > 2
    assert kinds[0] == "bash"
    for command in ("etl drift", "etl extend", "publish", "--rollback", "lineage"):
        assert any(command in text for kind, text in blocks() if kind == "bash"), command


def test_every_command_of_the_page_works(printed: dict[int, str]) -> None:
    assert list(printed) == [i for i, (kind, _) in enumerate(blocks()) if kind == "bash"]


def test_the_output_on_the_page_is_what_is_printed(printed: dict[int, str]) -> None:
    executed = 0
    for i, (kind, text) in enumerate(blocks()):
        if kind == "bash":
            executed = i
            continue
        there = {shape(line) for line in printed[executed].splitlines()}
        for line in text.splitlines():
            if line.strip() not in ("", "…"):
                assert shape(line) in there, f"{line!r}\nis not in\n{printed[executed]}"
