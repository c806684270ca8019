"""Following a bundle: when another one is at its path, it is served from the next batch on.

A thread looks every second, and at once after SIGHUP. It opens the new bundle beside the one that
is served, compares its digests and scores rows with it. Then it puts the new one in place: requests
that were parsed before are scored by the old one to their end, all others by the new one. The next
switch begins when the old bundle has been let go, so that no more than two are in memory. A bundle
that cannot be opened is logged, counted and tried again every minute, and the one before is served.
"""

from __future__ import annotations

import gc
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol

from nvt_torchrec.base.errors import ClickLogError
from nvt_torchrec.inference.inputs.successors import check_same_columns
from nvt_torchrec.inference.server.metrics import ServerMetrics
from nvt_torchrec.inference.server.served import Served, open_served, read_stamp
from nvt_torchrec.inference.server.settings import Source

log = logging.getLogger(__name__)

#: Seconds between two looks at the path.
_INTERVAL_S = 1.0
#: Seconds after which a bundle that could not be opened is tried again: storage may have failed for
#: a while, or a file of the bundle was copied again, which the stamp does not show.
_RETRY_S = 60.0
#: Seconds between two looks at whether the old bundle has been let go.
_RELEASE_S = 0.05
#: Looks after which reference cycles, such as those of exceptions, are collected.
_COLLECT_AFTER = 20


class Service(Protocol):
    """What serves a model."""

    served: Served
    metrics: ServerMetrics

    def serve(self, served: Served) -> None:
        """Serve a model from the next request on."""


class Reloader:
    """The thread that follows a bundle.

    Args:
        source: Where the bundle is.
        service: What serves it, and counts the switches.
    """

    def __init__(self, source: Source, service: Service) -> None:
        self._source, self._service = source, service
        self._seen = service.served.stamp  # of the last bundle that was tried; None: there was none
        self._retry_at = math.inf
        self._wake = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="reloader", daemon=True)

    def start(self) -> None:
        """Start to look."""
        self._thread.start()

    def wake(self) -> None:
        """Look now, and try a bundle again that could not be opened."""
        self._wake.set()

    def close(self) -> None:
        """Put no other bundle in place from now on."""
        self._closed = True
        self._wake.set()

    def _run(self) -> None:
        while not self._closed:
            asked = self._wake.wait(_INTERVAL_S)
            self._wake.clear()
            problem = ""
            try:
                self._look(asked)
            except ClickLogError as error:
                problem = str(error)
            except OSError as error:
                problem = f"{self._source.bundle}: no bundle: {error.strerror or error}"
            except Exception as error:  # for example too little memory
                problem = f"{self._source.bundle}: cannot be opened: {error!r:.300}"
            if problem:
                self._retry_at = time.monotonic() + _RETRY_S
                self._service.metrics.reload_failures.inc()
                log.error("still serving bundle %s: %s", self._service.served.name, problem)

    def _look(self, asked: bool) -> None:
        """Serve what is at the path, if it was not tried yet, or if it is time to try again."""
        try:
            stamp, missing = read_stamp(self._source.bundle), None
        except OSError as error:
            stamp, missing = None, error
        changed, self._seen = stamp != self._seen, stamp
        if stamp is not None and stamp == self._service.served.stamp:
            self._retry_at = math.inf
        elif changed or asked or time.monotonic() >= self._retry_at:
            self._retry_at = math.inf
            if missing is not None:
                raise missing
            self._switch()

    def _switch(self) -> None:
        begin, before = time.monotonic(), self._service.served
        new = open_served(self._source)
        check_same_columns(before.predictor.spec, new.predictor.spec, str(self._source.bundle))
        if self._closed:
            return
        self._seen = new.stamp
        self._service.serve(new)
        self._service.metrics.serves(new, before)
        self._service.metrics.reloads.inc()
        log.info(
            "serving bundle %s, generation %s, after %.1f s; before: %s, generation %s",
            new.name, new.generation, time.monotonic() - begin, before.name, before.generation,
        )  # fmt: skip
        old = weakref.ref(before.predictor)
        del before
        self._wait_for_release(old)

    def _wait_for_release(self, old: Callable[[], object]) -> None:
        """Wait until no request uses the old bundle any more; each has a time limit."""
        looks = 0
        while old() is not None and not self._closed:
            looks += 1
            if looks % _COLLECT_AFTER == 0:
                gc.collect()
            time.sleep(_RELEASE_S)
