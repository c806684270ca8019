"""Attacks on `python -m inference serve`, over loopback, each bounded in number and time.

Attackers use 127.0.0.2, other clients 127.0.0.1. With --repositories each attack is made on the
server of every checkout in turn, and the table has a column for each.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.harness import ROOT, describe_machine, machine, run_benchmark
from benchmarks.serve.bodies import bodies
from benchmarks.serve.clients import Clients, serving
from benchmarks.venvs import BUILD
from nvt_torchrec.base.command_line import Settings, flag
from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.base.files.atomic import write_json

ATTACKER, OTHER = "127.0.0.2", "127.0.0.1"
HEADER_BYTES, HALF_SENT, IDLE_SOCKETS, FILE_LIMIT, LARGE_ROWS = 60 << 20, 300, 400, 256, 4096
_HEAD = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
#: Results of an attack by name; None if there was nothing to measure.
Figures = dict[str, float | None]


@dataclasses.dataclass(frozen=True)
class AttackSettings(Settings):
    """The settings of the attacks."""

    bundle: Path = flag("the bundle to serve", parse=lambda text: Path(text).resolve())
    input: str = flag("raw rows to send, in the training log's format", metavar="FILE")
    attacks: tuple[str, ...] = flag("the attacks to make (default: all)", ())
    repositories: tuple[str, ...] = flag("checkouts (default: this one)", (str(ROOT),))
    seconds: float = flag("seconds of each attack", 8.0, above=0)
    stops: int = flag("number of runs that SIGTERM ends", 20, least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if unknown := set(self.attacks) - set(ATTACKS):
            raise SettingsError(
                f"--attacks {','.join(sorted(unknown))}", f"some of {', '.join(ATTACKS)}"
            )

    @functools.cached_property
    def bodies(self) -> dict[int, bytes]:
        """Number of rows → body of a request with so many rows."""
        return bodies(self.bundle, self.input, (1, LARGE_ROWS))


def main(argv: list[str] | None = None) -> int:
    """Make the attacks and print their effects."""
    return run_benchmark("serve.attacks", __doc__, AttackSettings, _run, argv)


def _run(settings: AttackSettings) -> None:
    repositories = [Path(path).resolve() for path in settings.repositories]
    results: dict[str, dict[str, Figures]] = {}
    print(f"attacks over loopback; {describe_machine()}\n")
    print(f"{'':52}" + "".join(f"{path.name[-12:]:>14}" for path in repositories))
    for name in settings.attacks or ATTACKS:
        results[name] = {str(path): ATTACKS[name](path, settings) for path in repositories}
        columns = list(results[name].values())
        for figure in columns[0]:
            found = [column[figure] for column in columns]
            values = "".join(f"{'-':>14}" if x is None else f"{x:>14,.4g}" for x in found)
            print(f"{name + ': ' + figure:52}{values}", flush=True)
    write_json(BUILD / "attacks.json", {"machine": machine(), "results": results})


def header_flood(repository: Path, settings: AttackSettings) -> Figures:
    """One connection sends 60 MiB of short headers while another client asks for scores."""
    with serving(repository, settings.bundle) as target:
        before, sent = target.peak_mib, 0
        with Clients(target, settings.bodies[1], 1, OTHER) as others:
            piece = b"a: b\r\n" * 10_000
            with target.connect(ATTACKER) as connection, contextlib.suppress(OSError):
                connection.sendall(_HEAD)
                while sent < HEADER_BYTES:
                    connection.sendall(piece)
                    sent += len(piece)
                connection.sendall(b"\r\n")
            time.sleep(1)
        return {
            "headers sent, MiB": sent / 2**20,
            "growth of the server's memory, MiB": target.peak_mib - before,
            "longest wait of others, s": max(others.seconds, default=None),
        }


def slow_bodies(repository: Path, settings: AttackSettings) -> Figures:
    """300 connections send half a body each, again and again, and wait."""
    body = settings.bodies[1]
    half = _HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body[: len(body) // 2]
    with serving(repository, settings.bundle) as target, contextlib.ExitStack() as stack:

        def attack() -> None:
            for _ in range(HALF_SENT):
                connection = stack.enter_context(target.connect(ATTACKER))
                connection.sendall(half)

        attack()
        with Clients(target, body, 4, OTHER) as others:
            end = time.monotonic() + settings.seconds
            while time.monotonic() < end:
                time.sleep(2)
                with contextlib.suppress(OSError):
                    attack()
        return _of_others(others)


def idle_sockets(repository: Path, settings: AttackSettings) -> Figures:
    """400 connections that send nothing, at a limit of 256 open files."""
    with (
        serving(repository, settings.bundle, files=FILE_LIMIT) as target,
        contextlib.ExitStack() as stack,
    ):
        for _ in range(IDLE_SOCKETS):
            stack.enter_context(target.connect(ATTACKER))
        waits = []
        end = time.monotonic() + settings.seconds
        while time.monotonic() < end:
            waits.append(target.health(2.0))
            time.sleep(0.2)
        answered = [wait for wait in waits if wait is not None]
        return {
            "/health answered, share": len(answered) / len(waits),
            "log, MB": target.log_bytes / 1e6,
        }


def slow_heads(repository: Path, settings: AttackSettings) -> Figures:
    """100 connections that send a byte of a header every half second."""
    with serving(repository, settings.bundle) as target:
        before = target.open_files
        connections = [target.connect(ATTACKER) for _ in range(100)]
        for connection in connections:
            connection.sendall(_HEAD)
        end = time.monotonic() + max(settings.seconds, 8)
        while time.monotonic() < end:
            for connection in connections:
                with contextlib.suppress(OSError):
                    connection.sendall(b"a")
            time.sleep(0.5)
        left = target.open_files - before
        for connection in connections:
            connection.close()
        return {"connections still open, of 100": left}


def large_requests(repository: Path, settings: AttackSettings) -> Figures:
    """One client sends 4,096 rows a request over 4 connections, another one row over 8."""
    with serving(repository, settings.bundle) as target:
        with (
            Clients(target, settings.bodies[LARGE_ROWS], 4, ATTACKER) as large,
            Clients(target, settings.bodies[1], 8, OTHER, pause_s=0.01) as others,
        ):
            time.sleep(settings.seconds)
        rows = large.answers[200] * LARGE_ROWS / settings.seconds
        return _of_others(others) | {"rows/s of the large client": rows}


def stop(repository: Path, settings: AttackSettings) -> Figures:
    """SIGTERM while 16 keep-alive connections send requests."""
    lost, answered, seconds = [], 0, []
    for _ in range(settings.stops):
        with serving(repository, settings.bundle) as target:
            with Clients(target, settings.bodies[1], 16, OTHER) as clients:
                time.sleep(0.7)
                begin = time.monotonic()
                target.process.terminate()
                target.process.wait(60)
                seconds.append(time.monotonic() - begin)
            lost.append(len(clients.lost))
            answered += clients.answers.total()
    return {
        "runs with lost requests": sum(count > 0 for count in lost),
        "lost requests": sum(lost),
        "answered requests": answered,
        "from SIGTERM to the end, s, median": float(np.median(seconds)),
    }


def _of_others(others: Clients) -> Figures:
    return {
        "requests of others": others.answers.total() + len(others.lost),
        "answered 200, share": others.share(200),
        "answered 503, share": others.share(503),
        "p99 of others, ms": (
            1e3 * float(np.quantile(others.seconds, 0.99)) if others.seconds else None
        ),
    }


ATTACKS: dict[str, Callable[[Path, AttackSettings], Figures]] = {
    "header_flood": header_flood,
    "slow_bodies": slow_bodies,
    "slow_heads": slow_heads,
    "idle_sockets": idle_sockets,
    "large_requests": large_requests,
    "stop": stop,
}


if __name__ == "__main__":
    sys.exit(main())
