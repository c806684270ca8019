"""The listening socket, and the limit of open files."""

from __future__ import annotations

import ctypes
import ipaddress
import logging
import resource
import socket
import ssl
import struct
from pathlib import Path

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.inference.server.settings import ServerSettings

log = logging.getLogger(__name__)

BACKLOG = 2048
#: Connections accepted in one go, by which open files may exceed their limit for a moment.
ACCEPT_AT_ONCE = 32
#: Open files that are not counted connections: listeners, the event loop, two bundles while one
#: takes the place of the other, and connections just accepted.
_OTHER_FILES = 48 + ACCEPT_AT_ONCE
_SO_ATTACH_FILTER = 26
#: Classic BPF over a TCP header: drop the packet if SYN is set and ACK is not.
_NO_NEW_CONNECTIONS = (
    (0x30, 0, 0, 13),  # load the flags
    (0x54, 0, 0, 0x12),  # keep SYN and ACK
    (0x15, 0, 1, 0x02),  # if it is SYN alone:
    (0x06, 0, 0, 0),  # drop the packet
    (0x06, 0, 0, 0xFFFFFFFF),  # else keep all of it
)


def listen(settings: ServerSettings) -> socket.socket:
    """Return a listening socket. Raises SettingsError if the address cannot be listened on."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        listener = socket.create_server(
            (settings.host, settings.port), family=family, backlog=BACKLOG
        )
    except OSError as error:
        raise SettingsError(
            f"{settings.host} port {settings.port} cannot be listened on: {error.strerror}",
            "choose another --port or --host",
        ) from error
    # Connections inherit it; asyncio sets it only if the protocol is given explicitly. Without it
    # an answer may wait 40 ms for an acknowledgement.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if not ipaddress.ip_address(listener.getsockname()[0]).is_loopback:
        missing = [
            text
            for text, there in (
                ("no API key is needed (--api_key_file)", settings.api_key_file),
                ("connections are not encrypted (--tls_cert)", settings.tls_cert),
            )
            if not there
        ]
        if missing:
            log.warning(
                "%s can be reached from other machines: %s; or put a proxy in front",
                settings.host,
                ", ".join(missing),
            )
    return listener


def url(listener: socket.socket, *, tls: bool) -> str:
    """Return the URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http{'s' * tls}://{f'[{host}]' if ':' in host else host}:{port}"


def refuse_new(listener: socket.socket) -> None:
    """Refuse new connections; those that have begun can still be accepted.

    Closing a listening socket resets the connections that wait to be accepted, even if their
    request has arrived. So the kernel is told first to drop attempts to connect, as a firewall
    would. Where it cannot be told to, connections that come at the last moment are reset.
    """
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in _NO_NEW_CONNECTIONS)
    held = ctypes.create_string_buffer(code)
    program = struct.pack("HL", len(_NO_NEW_CONNECTIONS), ctypes.addressof(held))
    try:
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
    except OSError as error:
        log.info("new connections cannot be refused before the end: %s", error.strerror)


def connection_limit(settings: ServerSettings) -> int:
    """Return the limit of connections: the settings', or less if fewer files may be open."""
    wanted = settings.max_connections + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        new = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if new > soft:
            resource.setrlimit(resource.RLIMIT_NOFILE, (new, hard))
            soft = new
    limit = settings.max_connections
    if soft != resource.RLIM_INFINITY and soft < wanted:
        limit = max(1, soft - _OTHER_FILES)
        log.warning(
            "at most %d connections instead of --max_connections %d: only %d files may be open "
            "(ulimit -n)",
            limit,
            settings.max_connections,
            soft,
        )
    return limit


def tls_context(cert: Path, key: Path | None) -> ssl.SSLContext:
    """Return a context for TLS 1.2 and 1.3. Raises SettingsError if the files cannot be used."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    load_certificate(context, cert, key)
    return context


def load_certificate(context: ssl.SSLContext, cert: Path, key: Path | None) -> None:
    """Use a certificate for new connections. Raises SettingsError if the files cannot be used."""
    flags = f"--tls_cert {cert}" + (f" --tls_key {key}" if key else "")

    def password() -> str:  # otherwise OpenSSL asks the terminal
        raise SettingsError(f"{flags}: the key is encrypted", "openssl pkey -in KEY -out PLAIN")

    try:
        context.load_cert_chain(cert, key, password)
    except OSError as error:  # also ssl.SSLError
        raise SettingsError(
            f"{flags}: {error.strerror or error}", "pass PEM files of a certificate and its key"
        ) from error
