"""Ctrl-C, too little memory and closed pipes, in real processes: one message or none."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nvt_torchrec.base.errors import BadInputError, run_main
from nvt_torchrec.base.interrupts import classify_end

ROOT = Path(__file__).parents[2]
COMMANDS = {
    "etl": "etl run --engine cpu --input_path none --output_path none",
    "workflows": "workflows compile none",
    "inference": "inference predict --bundle none --input none --output none",
    "train": "train_torchrec.py --binary_path none",
    "demo": "demo --ranks 1 --output /dev/null/none",
}


MAIN = """import nvt_torchrec.base.interrupts, sys
from nvt_torchrec.base.errors import run_command
def main():
    {}
sys.exit(run_command(main))"""


def _python(*arguments: str, shell: str = "", **options) -> subprocess.CompletedProcess:
    command = [sys.executable, *arguments]
    if shell:
        command = ["bash", "-c", shell.replace("PYTHON", sys.executable)]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600,
        preexec_fn=_take_interrupts, **options
    )  # fmt: skip


def _take_interrupts() -> None:
    """A shell's background job, and what it starts, ignores SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize(
    ("command", "number"), [("etl", 1), *((command, 12) for command in COMMANDS)]
)
def test_control_c_while_importing(command: str, number: int) -> None:
    script = Path(__file__).with_name("interrupted.py")
    done = _python(str(script), str(number), *COMMANDS[command].split())
    assert done.stderr == "interrupted\n"
    assert done.returncode in (130, -2)  # both are 130 in a shell
    assert done.stdout == ""


def test_control_c_while_numpy_is_loaded() -> None:
    """Its C code makes an ImportError of it, and prints what it was."""
    code = MAIN.format(
        "sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)\n"  # as PyErr_Print does
        "    raise ImportError('numpy._core.multiarray failed to import')"
    )
    done = _python("-c", code)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


@pytest.mark.parametrize("early", [False, True])
def test_too_little_memory(early: bool) -> None:
    """Under ``ulimit -v``: a message that names the limit and a remedy, and status 2."""
    body = "x = bytearray(1 << 40)"
    code = f"import nvt_torchrec.base.interrupts\n{body}"
    if not early:
        code = MAIN.format(body)
    done = _python(shell=f'ulimit -v 1000000; PYTHON -c "{code}"')
    assert "error: out of memory (`ulimit -v` allows 976 MiB)\n  -> free some" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == (1 if early else 2)


def test_nobody_reads_the_output() -> None:
    code = MAIN.format("for i in range(100000): print(i)")
    shell = f"set -o pipefail; PYTHON -c '{code}' | head -1"
    done = _python(shell=shell)
    assert (done.stdout, done.stderr, done.returncode) == ("0\n", "", 141)


@pytest.mark.parametrize("command", ["etl run --help", "inference serve --help"])
def test_nobody_reads_the_help(command: str) -> None:
    """It is kept until the end, when the pipe is closed already."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", *command.split()],
        cwd=ROOT,
        stdout=write,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(write)
    assert done.stderr == b""
    assert done.returncode in (0, 141)  # of a long help, argparse itself drops what is not read


@pytest.mark.parametrize("lines", [1, 100000])
def test_a_full_disk_below_the_output(lines: int) -> None:
    code = (
        "import nvt_torchrec.base.interrupts\n"
        "from nvt_torchrec.base.errors import end_process, run_command\n"
        f"end_process(run_command(lambda: print(*range({lines}))))"
    )
    done = _python(shell=f"PYTHON -c '{code}' > /dev/full")
    assert done.stderr.startswith("error: the output: No space left on device\n  -> ")
    assert done.stderr.count("\n") == 2
    assert done.returncode == 2


def test_what_is_a_defect_stays_one() -> None:
    assert classify_end(ValueError("x")) is None
    assert classify_end(BrokenPipeError()) is None  # of another pipe: stdout is read
    assert classify_end(ImportError("no module")) is None
    assert classify_end(OSError(errno.ENOMEM, "x"))[0] == 2
    long = classify_end(OSError(errno.ENAMETOOLONG, "File name too long", "xxx"))
    assert long == (2, "error: xxx: File name too long\n  -> give a shorter path")
    wrapped = RuntimeError("while loading")
    wrapped.__cause__ = MemoryError()
    assert classify_end(wrapped)[0] == 2
    meanwhile = KeyError("a defect")
    meanwhile.__context__ = MemoryError()
    assert classify_end(meanwhile) is None
    circle = ValueError("from itself")
    circle.__cause__ = circle
    assert classify_end(circle) is None
    told: list[str] = []
    assert run_main(lambda: 3, told.append) == 3
    assert told == []

    def bad() -> None:
        raise BadInputError("what", "remedy")

    assert run_main(bad, told.append) == 2
    assert told == ["error: what\n  -> remedy"]
    with pytest.raises(ZeroDivisionError):
        run_main(lambda: 1 // 0, told.append)
