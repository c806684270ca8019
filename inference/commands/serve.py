"""``python -m inference serve``: answer requests over HTTP, JSON in, JSON out."""

from __future__ import annotations

import os
import signal

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.inference.commands.model import ModelSettings, prepare
from nvt_torchrec.inference.server.settings import ServerSettings

SETTINGS = (ModelSettings, ServerSettings)


def run(model: ModelSettings, settings: ServerSettings) -> int | None:
    """Serve until SIGTERM or SIGINT; the exit status."""
    from nvt_torchrec.inference.server.access import ApiKeys
    from nvt_torchrec.inference.server.sockets import tls_context, url

    if settings.api_key_file is not None:  # errors of these files come before the model is loaded
        ApiKeys(settings.api_key_file)
    if settings.tls_cert is not None:
        tls_context(settings.tls_cert, settings.tls_key)

    def started(listener) -> None:
        print(f"serving on {url(listener, tls=settings.tls_cert is not None)}", flush=True)

    if settings.workers > 1:
        for name in ("workflow", "checkpoint", "tables"):
            if getattr(model, name) is not None:
                raise SettingsError(
                    f"--{name} with --workers {settings.workers}: each worker would need a copy",
                    "make a bundle, which the workers share: python -m inference bundle",
                )
        from nvt_torchrec.inference.server.workers import serve_in_workers

        return serve_in_workers(model.load, model.bundle, settings, started)
    # until requests are served, SIGTERM ends the process at once: imports may swallow SystemExit
    before = signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    if settings.reloads or model.bundle is not None:  # nothing has been read yet
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        prepare()
        from nvt_torchrec.inference.server.run import serve
        from nvt_torchrec.inference.server.served import Source

        source = Source(model.load, model.bundle, model.workflow)
        serve(source, settings, started=started)
    finally:
        signal.signal(signal.SIGTERM, before)
    return None
