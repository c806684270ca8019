"""What a server is told on its command line."""

from __future__ import annotations

import dataclasses
import ipaddress
from pathlib import Path

from clicklog.errors import SettingsError


@dataclasses.dataclass(frozen=True)
class ServerSettings:
    """Where to listen, and the limits. With several workers each limit is a worker's own.

    Attributes:
        host: address to listen on; loopback by default.
        port: 0 for any free one.
        workers: processes that answer requests. They share the listening socket, and the memory
            that a bundle is mapped to.
        batch_rows: what goes through the model at once; a request with more rows goes in parts.
        batch_delay_ms: how long a request may wait for others to share its batch while the model
            is idle. While it is busy they gather by themselves.
        max_rows: of a request.
        max_body_mb: of a request's body, in MiB.
        max_requests: requests that have arrived as a whole and are not answered yet. Beyond it the
            last one of the client that has most of them gets 503.
        max_wait_ms: how long a new request may have to wait for those before it, by the pace at
            which requests have been answered lately and with clients served in turn; beyond it,
            503.
        max_connections: open at once; fewer where the limit of open files is too low for it.
            Beyond it idle connections are closed, of the client that has most.
        max_client_connections: likewise of one client; half of all at most.
        timeout_s: from the first byte of a request to the last of its answer.
        idle_s: how long a connection may stay open without a request.
        drain_s: after SIGTERM, how long to go on as before, but for /ready, which says no, so that
            load balancers send nothing more, and answers that say ``Connection: close``.
        api_key_file: file with an API key on each line; None: no key is asked for.
        tls_cert: PEM file with the certificate, followed by those that lead to a root.
        tls_key: PEM file with its private key; None: it is in ``tls_cert``.
        trusted_proxies: addresses and networks, with commas between them, whose X-Forwarded-For
            is believed.
        access_log: write a line of JSON to stdout for every request.
        otel: trace requests with OpenTelemetry.

    Raises:
        SettingsError: a number is out of range, or settings contradict each other.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    workers: int = 1
    batch_rows: int = 1024
    batch_delay_ms: float = 0.0
    max_rows: int = 4096
    max_body_mb: float = 8.0
    max_requests: int = 256
    max_wait_ms: float = 500.0
    max_connections: int = 2048
    max_client_connections: int = 512
    timeout_s: float = 5.0
    # longer than proxies keep idle connections (60 s usually), so that it is they who close them
    idle_s: float = 75.0
    drain_s: float = 0.0
    api_key_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    trusted_proxies: str = ""
    access_log: bool = False
    otel: bool = False

    def __post_init__(self) -> None:
        for name in (
            *("workers", "batch_rows", "max_rows", "max_body_mb", "max_requests", "max_wait_ms"),
            *("max_connections", "max_client_connections", "idle_s"),
        ):
            if not getattr(self, name) > 0:
                raise SettingsError(f"--{name} {getattr(self, name)}", "more than 0 is needed")
        for name in ("batch_delay_ms", "timeout_s", "idle_s", "drain_s"):
            if not 0 <= getattr(self, name) < 1e6:
                raise SettingsError(f"--{name} {getattr(self, name)}", "0 or more is needed")
        if not 0 <= self.port < 65536:
            raise SettingsError(f"--port {self.port}", "0 to 65535; 0 is any free one")
        if self.batch_delay_ms / 1e3 >= self.timeout_s:
            raise SettingsError(
                f"--batch_delay_ms {self.batch_delay_ms} with --timeout_s {self.timeout_s}",
                "every request would be late; make the delay shorter",
            )
        if self.tls_key is not None and self.tls_cert is None:
            raise SettingsError(f"--tls_key {self.tls_key} without --tls_cert", "pass both")
        try:
            _ = self.proxies
        except ValueError as error:
            raise SettingsError(
                f"--trusted_proxies {self.trusted_proxies}: {error}",
                "addresses or networks, as 10.0.0.7,10.1.0.0/16",
            ) from error

    @property
    def max_body_bytes(self) -> int:
        """Of a request's body."""
        return int(self.max_body_mb * 2**20)

    @property
    def reloads(self) -> bool:
        """Whether there are files to be read again on SIGHUP."""
        return self.api_key_file is not None or self.tls_cert is not None

    @property
    def proxies(self) -> tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]:
        """The networks of ``trusted_proxies``."""
        names = filter(None, self.trusted_proxies.split(","))
        return tuple(ipaddress.ip_network(name.strip()) for name in names)
