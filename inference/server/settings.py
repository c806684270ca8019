"""The settings of the server."""

from __future__ import annotations

import dataclasses
import ipaddress
import math
from pathlib import Path

from nvt_torchrec.base.command_line import Settings, flag
from nvt_torchrec.base.errors import SettingsError

#: Environment variable of prometheus_client: the directory of the values of several processes.
SHARED_VALUES = "PROMETHEUS_MULTIPROC_DIR"
#: Largest number of milliseconds or seconds that a setting may have.
_LONG = 1e6


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
    port: int = flag("port to listen on; 0: any free one", 8000, least=0, most=65535)
    workers: int = flag("number of server processes; they share a bundle's memory", 1, least=1)
    batch_rows: int = flag(
        "largest number of rows that go through the model at once; larger requests are split", 1024,
        least=1
    )
    batch_delay_ms: float = flag(
        "how long a request may wait for others to share its batch while the model is idle", 0.0,
        least=0, most=_LONG
    )
    max_rows: int = flag("largest number of rows of a request; 413 beyond it", 4096, least=1)
    max_body_mb: float = flag("largest size of a request in MiB; 413 beyond it", 8.0, above=0)
    max_requests: int = flag(
        "requests that have arrived and are not answered yet; beyond it, 503 to the last one of "
        "the client that has most of them", 256, least=1
    )
    max_wait_ms: float = flag(
        "how long a new request may have to wait for those before it, estimated from recent "
        "answers; 503 beyond it", 500.0, above=0, most=math.inf
    )
    max_connections: int = flag(
        "open connections, fewer if the limit of open files is too low; beyond it, idle ones of "
        "the client that has most are closed", 2048, least=1
    )
    max_client_connections: int = flag(
        "open connections of one client; never more than half of all", 512, least=1
    )
    timeout_s: float = flag(
        "time from the first byte of a request to the last of its answer; 408 or 503 beyond it",
        5.0, least=0, most=_LONG
    )
    # longer than proxies keep idle connections (60 s usually), so that the proxies close them
    idle_s: float = flag(
        "how long a connection may stay open without a request", 75.0, above=0, most=_LONG
    )
    drain_s: float = flag(
        "after SIGTERM, serve for this long while /ready returns 503, so that load balancers send "
        "nothing more", 0.0, least=0, most=_LONG
    )
    drift_window_s: float = flag(
        "time over which /metrics measures the drift of the categorical columns", 3600.0, above=0,
        most=_LONG
    )
    api_key_file: Path | None = flag(
        "file with an API key on each line; 401 without one", None, metavar="FILE"
    )
    tls_cert: Path | None = flag(
        "certificate and its chain; serves HTTPS", None, metavar="PEM"
    )
    tls_key: Path | None = flag(
        "private key of the certificate (default: in the file of --tls_cert)", None, metavar="PEM",
        needs="--tls_cert"
    )
    trusted_proxies: str = flag(
        "addresses or networks of proxies whose X-Forwarded-For names the client", "", metavar="A,B"
    )
    access_log: bool = flag("write a line of JSON to stdout for each request", False)
    otel: bool = flag("trace requests; needs OpenTelemetry's packages", False)
    # fmt: on

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_delay_ms / 1e3 >= self.timeout_s:
            raise SettingsError(
                f"--batch_delay_ms {self.batch_delay_ms} with --timeout_s {self.timeout_s}",
                "every request would be late; make the delay shorter",
            )
        try:
            _ = self.proxies
        except ValueError as error:
            raise SettingsError(
                f"--trusted_proxies {self.trusted_proxies}: {error}",
                "give addresses or networks, for example 10.0.0.7,10.1.0.0/16",
            ) from error

    @property
    def max_body_bytes(self) -> int:
        """The largest size of a request's body."""
        return int(self.max_body_mb * 2**20)

    @property
    def reloads(self) -> bool:
        """Whether SIGHUP reads files again."""
        return self.api_key_file is not None or self.tls_cert is not None

    @property
    def proxies(self) -> tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]:
        """The networks of ``trusted_proxies``."""
        names = filter(None, self.trusted_proxies.split(","))
        return tuple(ipaddress.ip_network(name.strip()) for name in names)
