"""The settings of the server."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from nvt_torchrec.base.command_line import Settings, flag
from nvt_torchrec.base.errors import SettingsError

if TYPE_CHECKING:
    from nvt_torchrec.inference.predictor import Predictor

#: Environment variable of prometheus_client: the directory of the values of several processes.
SHARED_VALUES = "PROMETHEUS_MULTIPROC_DIR"
#: The largest number of seconds that a setting may have.
_MAX_SECONDS = 1e6


class ModelSource(Protocol):
    """Where the model of a server comes from. It can be pickled."""

    @property
    def bundle(self) -> Path | None:
        """The directory of the bundle, or a symbolic link to it."""

    def load(self, *, bundle: Path | None = None) -> Predictor:
        """Open the model; ``bundle`` is the directory to open, or None for the source's own."""


@dataclasses.dataclass(frozen=True)
class ServerSettings(Settings):
    """Where to listen, and the limits. With several workers each limit is a worker's own.

    Each field is the flag of the same name of ``python -m inference serve``.

    Raises:
        SettingsError: A value is out of range, or settings contradict each other.
    """

    # fmt: off
    host: str = flag(
        "address to listen on; the default accepts local connections only (default: 127.0.0.1)",
        "127.0.0.1", metavar="HOST"
    )
    port: int = flag("port to listen on; 0: any free one", 8000, minimum=0, maximum=65535)
    workers: int = flag("number of server processes; they share a bundle's memory", 1, minimum=1)
    max_rows: int = flag("largest number of rows of a request; 413 beyond it", 4096, minimum=1)
    max_body_mb: float = flag("largest size of a request in MiB; 413 beyond it", 8.0, above=0)
    max_waiting_rows: int = flag(
        "rows that may wait for the model; a request that needs more than half of the room left "
        "gets 503", 32768, minimum=2
    )
    timeout_s: float = flag(
        "time from a request's headers to its answer; 408 or 503 beyond it", 5.0, minimum=0,
        maximum=_MAX_SECONDS
    )
    drain_s: float = flag(
        "after SIGTERM, serve for this long while /ready returns 503 and answers close their "
        "connections, so that balancers and clients go elsewhere", 1.0, minimum=0,
        maximum=_MAX_SECONDS
    )
    # fmt: on

    def __post_init__(self) -> None:
        super().__post_init__()
        if 2 * self.max_rows > self.max_waiting_rows:
            raise SettingsError(
                f"--max_rows {self.max_rows} with --max_waiting_rows {self.max_waiting_rows}: the "
                "largest request would always be refused",
                "give --max_waiting_rows at least twice --max_rows",
            )

    @functools.cached_property
    def max_body_bytes(self) -> int:
        """The largest size of a request in bytes."""
        return int(self.max_body_mb * 2**20)
