"""Processes that need not import: forks of one that has imported the trainer, the ETL and serving.

A test that starts a command spends most of its CPU on imports: five seconds for ``nvt-train``. Here
programs of the same names stand first in a script's PATH. Each sends its arguments, directory,
environment, limits and standard files to a server, which forks; the fork runs the same module, in
a process group of its own. Signals are passed on, and the program ends as the fork does: with its
status or by its signal. The fork of a program that is killed is killed, too.

``python -m tests.warm DESCRIPTOR`` is the server, which listens on that socket and ends when its
standard input does. The processes of one pytest share it, see ``conftest.py``.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import logging
import os
import resource
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).parents[1]
#: Names the directory of the programs to processes of this one.
VARIABLE = "NVT_TESTS_WARM"
#: Program → what it runs.
PROGRAMS = {
    "nvt-etl": ["console", "nvt_torchrec.etl"],
    "nvt-infer": ["console", "nvt_torchrec.inference"],
    "nvt-train": ["console", "nvt_torchrec.train_torchrec"],
    "nvt-workflows": ["console", "nvt_torchrec.workflows"],
    "torchrun": ["console", "torch.distributed.run"],
    "torchx": ["console", "torchx.cli.main"],
    "python": [],  # of scripts; tests of the process itself name the interpreter by its path
    "warm-python": [],
}
_IMPORTED = (
    "nvt_torchrec.training.loop.train",
    "nvt_torchrec.etl.run",
    "nvt_torchrec.inference.publish.steps",
    # not inference.server.app: prometheus_client looks at its import whether processes share values
    "starlette.applications",
    "uvicorn",
    "torch.distributed.run",
    "multiprocessing.spawn",  # keeps the path of an interpreter that imports
)
_CLIENT = """#!{python} -IS
import json, os, resource, signal, socket, sys

server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
for number in signal.SIGHUP, signal.SIGINT, signal.SIGTERM:
    signal.signal(number, lambda number, frame: server.send(bytes([number])))
limits = [resource.getrlimit(kind) for kind in {limits}]
arguments = {program} + sys.argv[1:]
while arguments[0] in ("-B", "-u"):  # the server prints unbuffered, and has what it needs
    del arguments[0]
request = json.dumps([arguments, os.getcwd(), dict(os.environ), limits]).encode()
socket.send_fds(server, [len(request).to_bytes(4, "big")], [0, 1, 2])
server.sendall(request)
with open("/proc/self/comm", "w") as name:
    name.write(str(int.from_bytes(server.recv(4), "big")))
status = int.from_bytes(server.recv(4) or b"\\t", "big")
if os.WIFSIGNALED(status):
    for number in signal.SIGHUP, signal.SIGINT, signal.SIGTERM:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), os.WTERMSIG(status))
sys.exit(os.waitstatus_to_exitcode(status))
"""
_LIMITS = (resource.RLIMIT_FSIZE, resource.RLIMIT_AS)


@functools.cache
def programs() -> str:
    """Return the directory of the programs when their server has imported; start it if needed."""
    directory = os.environ.get(VARIABLE) or start()
    subprocess.run([Path(directory, "warm-python"), "-c", ""], check=True)
    return directory


def start() -> str:
    """Start the server; return the directory of the programs, which wait until it has imported."""
    directory = Path(tempfile.mkdtemp(prefix="warm-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    address = str(directory / "socket")
    for name, program in PROGRAMS.items():
        text = _CLIENT.format(
            python=sys.executable, address=address, limits=_LIMITS, program=program
        )
        (directory / name).write_text(text)
        (directory / name).chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.warm", str(listener.fileno())],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"},
            pass_fds=[listener.fileno()],
        )
    _servers.append(server)
    return str(directory)


def warm_python() -> str:
    """Return the program that takes the interpreter's arguments."""
    return str(Path(programs(), "warm-python"))


def process_of(program: int) -> int:
    """Return the process that works for a program, by the program's process."""
    return int(Path(f"/proc/{program}/comm").read_text(encoding="ascii"))


_servers: list[subprocess.Popen] = []  # their standard inputs stay open


def _serve(number: int) -> list[str]:
    """Fork for each request at a socket; return, in a fork, what it shall run."""
    with socket.socket(fileno=number) as listener:
        listener.set_inheritable(False)
        for module in _IMPORTED:
            importlib.import_module(module)
        logging.root.handlers.clear()  # of an import; commands set up their own
        # a rank would take all cores, which other tests want, for operations of microseconds
        sys.modules["nvt_torchrec.training.launch.distributed"].count_cores = lambda: 1
        # a command that starts the interpreter, as publish does, starts one that has imported, too
        sys.executable = str(Path(listener.getsockname()).with_name("warm-python"))
        gc.freeze()
        kept: dict[int, socket.socket] = {}  # connections by the processes that keep them
        while True:
            ready, _, _ = select.select([listener, 0], [], [])
            if 0 in ready:
                os._exit(0)
            connection, _ = listener.accept()
            for process, own in list(kept.items()):
                # of a program that was killed, nothing works on when the next one begins
                hangup = select.poll()
                hangup.register(own, select.POLLRDHUP)
                killed = bool(hangup.poll(0))
                if os.waitpid(process, 0 if killed else os.WNOHANG)[0]:
                    kept.pop(process).close()
            process = os.fork()
            if not process:
                break
            kept[process] = connection
    for own in kept.values():
        own.close()
    word, files, _, _ = socket.recv_fds(connection, 4, 3)
    request = connection.recv(int.from_bytes(word, "big"), socket.MSG_WAITALL)
    arguments, directory, environment, limits = json.loads(request)
    os.setpgid(0, 0)  # who kills the group of the tests leaves it to this one to end the child
    child = os.fork()
    if child:
        _keep(child, connection)
    os.setpgid(0, 0)
    connection.close()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    for kind, limit in zip(_LIMITS, limits, strict=True):
        resource.setrlimit(kind, limit)
    return arguments


def _keep(child: int, connection: socket.socket) -> None:
    """Pass signals on to a child, and its end to the program that it runs for."""
    ended = os.pidfd_open(child)
    with contextlib.suppress(OSError):
        connection.send(child.to_bytes(4, "big"))
    while True:
        ready, _, _ = select.select([connection, ended], [], [])
        if ended in ready:
            status = os.waitpid(child, 0)[1]
            with contextlib.suppress(OSError):  # the program was killed
                connection.send(status.to_bytes(4, "big"))
            os._exit(0)
        with contextlib.suppress(OSError):
            if data := connection.recv(1):
                os.kill(child, data[0])
            else:  # the program was killed
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                os._exit(0)


def _run(arguments: list[str]) -> None:
    """Run as the main one a module, by its console script or by ``-m``, code, or a script."""
    kind = arguments[0]
    first = {"console": [], "-m": [os.getcwd()], "-c": [""], "-": [""]}
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:1] = first.get(kind, [str(Path(kind).resolve().parent)]) + [*filter(None, named)]
    sys.argv = arguments[1:]
    if kind in ("console", "-m"):
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif kind in ("-c", "-"):
        code = arguments[1] if kind == "-c" else sys.stdin.read()
        sys.argv = [kind, *arguments[1 + (kind == "-c") :]]
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = arguments
        runpy.run_path(kind, run_name="__main__")


def _run_to_the_end(arguments: list[str]) -> NoReturn:
    """Run, and end as the interpreter does, but for freeing all objects that were imported.

    That takes a third of a second, as each page is copied at first.
    """
    status: object = 0
    try:
        _run(arguments)
    except SystemExit as error:
        status = error.code or 0
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    if not isinstance(status, int):
        print(status, file=sys.stderr)
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        status = 120
    if status < 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status & 255)


if __name__ == "__main__":
    _run_to_the_end(_serve(int(sys.argv[1])))
