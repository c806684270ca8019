"""Virtual environments for the systems we are compared with; nothing of theirs enters ours."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from nvt_torchrec.base.errors import ClickLogError

log = logging.getLogger("benchmarks")

#: Where results and peers go, below the repository's root.
BUILD = Path(__file__).parents[1] / "build" / "bench"
_MARKER = "requirements.sha256"


class PeerError(ClickLogError):
    """A peer's environment cannot be built here, for want of a package or of the network."""


@dataclasses.dataclass(frozen=True)
class Peer:
    """A virtual environment with pinned packages, in ``build/bench/venv-NAME``.

    Attributes:
        name: of the peer.
        requirements: what pip installs, each pinned (``polars==1.2.3``).
        tools: installed before, the version of pip for example.
        no_deps: install the requirements only, for peers whose published pins are broken.
    """

    name: str
    requirements: tuple[str, ...]
    tools: tuple[str, ...] = ()
    no_deps: bool = False

    @property
    def directory(self) -> Path:
        """Where it is, or will be."""
        return BUILD / f"venv-{self.name}"

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.directory / "bin" / "python"

    def ensure(self) -> None:
        """Build it, unless it is there and up to date. Raises :class:`PeerError`."""
        marker = self.directory / _MARKER
        if marker.is_file() and marker.read_text() == self._digest():
            return
        log.info("%s: installing %s", self.directory, " ".join(self.requirements))
        shutil.rmtree(self.directory, ignore_errors=True)
        venv.create(self.directory, with_pip=True)
        if self.tools:
            self._pip(*self.tools)
        self._pip(*(["--no-deps"] if self.no_deps else []), *self.requirements)
        marker.write_text(self._digest())

    def _pip(self, *arguments: str) -> None:
        command = [self.python, "-m", "pip", "install", "--quiet", *arguments]
        done = subprocess.run(
            [*command, "--disable-pip-version-check"], capture_output=True, text=True, check=False
        )
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["pip failed"]
            raise PeerError(
                f"{self.name}: cannot be installed: {lines[-1]}",
                f"see `{' '.join(map(str, command))}`",
            )

    def _digest(self) -> str:
        text = repr((self.requirements, self.tools, self.no_deps, sys.version))
        return hashlib.sha256(text.encode()).hexdigest()
