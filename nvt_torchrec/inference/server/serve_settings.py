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

#: The environment variable that tells prometheus_client in which directory processes share values.
SHARED_VALUES = "PROMETHEUS_MULTIPROC_DIR"
#: The upper limit of settings in seconds.
_MAX_SECONDS = 1e6


class ModelSource(Protocol):
    """A picklable object that loads the model of a server."""

    @property
    def bundle(self) -> Path | None:
        """The directory of the bundle, or a symbolic link to it."""

    def load(self, *, bundle: Path | None = None) -> Predictor:
        """Load the model, from the directory ``bundle`` if it is given."""


@dataclasses.dataclass(frozen=True)
class ServerSettings(Settings):
    """The address to listen on, and limits. With several workers, limits apply to each worker.

    Each field is the flag of the same name of ``python -m inference serve``.

    Raises:
        SettingsError: A value is out of range, or settings contradict each other.
    """

    # fmt: off
    host: str = flag(
        "address to listen on; the default accepts only local connections (default: 127.0.0.1)",
        "127.0.0.1", metavar="HOST"
    )
    port: int = flag("port to listen on; 0 for any free port", 8000, minimum=0, maximum=65535)
    workers: int = flag(
        "number of server processes; they share the memory of a bundle", 1, minimum=1
    )
    max_rows: int = flag(
        "maximum number of rows in a request; larger requests get 413", 4096, minimum=1
    )
    max_body_mb: float = flag(
        "maximum size of a request in MiB; larger requests get 413", 8.0, above=0
    )
    max_waiting_rows: int = flag(
        "maximum number of rows that wait for the model; a request that would fill more than half "
        "of the remaining space gets 503", 32768, minimum=2
    )
    timeout_s: float = flag(
        "maximum time in seconds from a request's headers to its answer; then it gets 408 or 503",
        5.0, minimum=0, maximum=_MAX_SECONDS
    )
    drain_s: float = flag(
        "seconds to go on serving after SIGTERM, while /ready returns 503 and answers close their "
        "connections, so that load balancers and clients move to other servers", 1.0, minimum=0,
        maximum=_MAX_SECONDS
    )
    # fmt: on

    def __post_init__(self) -> None:
        super().__post_init__()
        if 2 * self.max_rows > self.max_waiting_rows:
            raise SettingsError(
                f"--max_rows {self.max_rows} with --max_waiting_rows {self.max_waiting_rows}: the "
                "largest request would always be refused",
                "make --max_waiting_rows at least twice --max_rows",
            )

    @functools.cached_property
    def max_body_bytes(self) -> int:
        """The largest size of a request in bytes."""
        return int(self.max_body_mb * 2**20)
