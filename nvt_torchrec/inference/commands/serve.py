"""``python -m inference serve``: answer requests over HTTP, JSON in, JSON out."""

from __future__ import annotations

import os
import signal

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.inference.commands.model import ModelSettings, prepare
from nvt_torchrec.inference.server.serve_settings import ServerSettings

SETTINGS = (ModelSettings, ServerSettings)


def run(model: ModelSettings, settings: ServerSettings) -> int:
    """Serve until SIGTERM or SIGINT; return the exit status."""
    if settings.workers > 1:
        for name in ("workflow", "checkpoint", "tables"):
            if getattr(model, name) is not None:
                raise SettingsError(
                    f"--{name} with --workers {settings.workers}: each worker would need a copy",
                    "make a bundle, which the workers share: python -m inference bundle",
                )
    # Until requests are served, SIGTERM ends the process with os._exit: some imported modules catch
    # SystemExit.
    before = signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    try:
        prepare()
        from nvt_torchrec.inference.server.processes import serve

        return serve(model, settings)
    finally:
        signal.signal(signal.SIGTERM, before)
