"""What a server is told on its command line."""

from __future__ import annotations

import dataclasses

from clicklog.errors import SettingsError


@dataclasses.dataclass(frozen=True)
class ServerSettings:
    """Where to listen, and the limits.

    Attributes:
        host: address to listen on; loopback by default, as there are no passwords and no TLS.
        port: 0 for any free one.
        batch_rows: a batch for the model is full with so many rows.
        batch_delay_ms: how long a request may wait for others to share its batch while the model
            is idle. While it is busy they gather by themselves.
        max_rows: of a request.
        max_body_mb: of a request's body, in MiB.
        max_requests: requests that are accepted and not answered yet; beyond it, 503.
        max_wait_ms: how long a new request may have to wait for those before it, by the pace at
            which requests have been answered lately; beyond it, 503.
        timeout_s: from the first byte of a request to the last of its answer.
        drain_s: after SIGTERM, how long to go on as before, but for /ready, which says no, so that
            load balancers send nothing more.

    Raises:
        SettingsError: a number is out of range.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    batch_rows: int = 1024
    batch_delay_ms: float = 0.0
    max_rows: int = 4096
    max_body_mb: float = 8.0
    max_requests: int = 256
    max_wait_ms: float = 500.0
    timeout_s: float = 5.0
    drain_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("batch_rows", "max_rows", "max_body_mb", "max_requests", "max_wait_ms"):
            if not getattr(self, name) > 0:
                raise SettingsError(f"--{name} {getattr(self, name)}", "more than 0 is needed")
        for name in ("batch_delay_ms", "timeout_s", "drain_s"):
            if not 0 <= getattr(self, name) < 1e6:
                raise SettingsError(f"--{name} {getattr(self, name)}", "0 or more is needed")
        if not 0 <= self.port < 65536:
            raise SettingsError(f"--port {self.port}", "0 to 65535; 0 is any free one")
        if self.batch_delay_ms / 1e3 >= self.timeout_s:
            raise SettingsError(
                f"--batch_delay_ms {self.batch_delay_ms} with --timeout_s {self.timeout_s}",
                "every request would be late; make the delay shorter",
            )

    @property
    def max_body_bytes(self) -> int:
        """Of a request's body."""
        return int(self.max_body_mb * 2**20)
