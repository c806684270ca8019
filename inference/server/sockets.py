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

from clicklog.errors import SettingsError
from inference.server.settings import ServerSettings

log = logging.getLogger(__name__)

BACKLOG = 2048
#: Connections that are accepted before anything else is done: bounds how far there may be more
#: open files than are wanted.
ACCEPT_AT_ONCE = 32
#: Files that are no connections: listeners, the event loop, the bundle, those just accepted.
_OTHER_FILES = 32 + ACCEPT_AT_ONCE
_SO_ATTACH_FILTER = 26
#: In classic BPF, over a TCP header: drop it if SYN is set and ACK is not.
_NO_NEW_CONNECTIONS = (
    (0x30, 0, 0, 13),  # load the flags
    (0x54, 0, 0, 0x12),  # keep SYN and ACK
    (0x15, 0, 1, 0x02),  # if it is SYN alone:
    (0x06, 0, 0, 0),  # take nothing
    (0x06, 0, 0, 0xFFFFFFFF),  # else all
)


def listen(settings: ServerSettings) -> socket.socket:
    """A listening socket. Raises SettingsError if the address cannot be listened on."""
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
    # connections inherit it; asyncio sets it only where the protocol is given explicitly, and
    # without it an answer waits 40 ms for an acknowledgement
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if not ipaddress.ip_address(listener.getsockname()[0]).is_loopback:
        missing = [
            text
            for text, there in (
                ("everybody may ask (--api_key_file)", settings.api_key_file),
                ("nothing is encrypted (--tls_cert)", settings.tls_cert),
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
    """Of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http{'s' * tls}://{f'[{host}]' if ':' in host else host}:{port}"


def refuse_new(listener: socket.socket) -> None:
    """Let no new connection begin; those that have begun can still be accepted.

    When a listening socket is closed, what waits to be accepted is reset, requests and all. So
    first the kernel has to drop the attempts to connect, as a firewall would. Where it can't be
    told to, connections that come in the last moment are reset.
    """
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in _NO_NEW_CONNECTIONS)
    held = ctypes.create_string_buffer(code)
    program = struct.pack("HL", len(_NO_NEW_CONNECTIONS), ctypes.addressof(held))
    try:
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
    except OSError as error:
        log.info("new connections cannot be kept off: %s", error.strerror)


def connection_limit(settings: ServerSettings) -> int:
    """How many connections there may be: as many as are wanted, or as there may be open files."""
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
            "%d connections at most instead of --max_connections %d: there may be only %d open "
            "files (ulimit -n)",
            limit,
            settings.max_connections,
            soft,
        )
    return limit


def tls_context(cert: Path, key: Path | None) -> ssl.SSLContext:
    """A server's side of TLS 1.2 and 1.3. Raises SettingsError if there is no such pair."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    load_certificate(context, cert, key)
    return context


def load_certificate(context: ssl.SSLContext, cert: Path, key: Path | None) -> None:
    """Use a certificate for new connections. Raises SettingsError."""
    flags = f"--tls_cert {cert}" + (f" --tls_key {key}" if key else "")

    def password() -> str:  # otherwise OpenSSL asks the terminal
        raise SettingsError(f"{flags}: the key is encrypted", "openssl pkey -in KEY -out PLAIN")

    try:
        context.load_cert_chain(cert, key, password)
    except OSError as error:  # also ssl.SSLError
        raise SettingsError(
            f"{flags}: {error.strerror or error}", "PEM files, of a certificate and its own key"
        ) from error
