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
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol

from prometheus_client import Counter, Gauge

from nvt_torchrec.base.errors import ClickLogError
from nvt_torchrec.inference.inputs.successors import check_same_columns
from nvt_torchrec.inference.server.logs import ALWAYS
from nvt_torchrec.inference.server.metrics import ServerMetrics
from nvt_torchrec.inference.server.served import Served, Source, Stamp

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

    def serve(self, served: Served) -> None:
        """Serve a model from the next request on."""


class BundleMetrics:
    """Which bundle is served, and how often another one was put in place or could not be."""

    def __init__(self, metrics: ServerMetrics) -> None:
        registry = {"registry": metrics.registry}
        self._info = Gauge(
            "inference_bundle_info",
            "Processes that serve a bundle, by the beginning of its digest and by its generation",
            ["bundle", "generation"],
            multiprocess_mode="livesum",
            **registry,
        )
        self.reloads = Counter(
            "inference_bundle_reloads", "How often another bundle was put in place", **registry
        )
        self.failures = Counter(
            "inference_bundle_reload_failures",
            "How often a bundle could not be put in place, and the one before was served on",
            **registry,
        )
        self._shared = metrics.shared

    def serves(self, now: Served, before: Served | None = None) -> None:
        """Record what is served from now on, and that the one before is not."""
        if before is not None:
            if self._shared:  # prometheus_client cannot remove a value that processes share
                self._info.labels(*_labels(before)).set(0)
            else:
                self._info.remove(*_labels(before))
        self._info.labels(*_labels(now)).set(1)


def _labels(served: Served) -> tuple[str, str]:
    return served.name, "" if served.generation is None else str(served.generation)


class Reloader:
    """The thread that follows a bundle.

    Args:
        source: Where the bundle is.
        service: What serves it.
        metrics: Counts the switches.
    """

    def __init__(self, source: Source, service: Service, metrics: BundleMetrics) -> None:
        self._source, self._service, self._metrics = source, service, metrics
        self._seen = service.served.stamp  # of the last bundle that was tried; None: there was none
        self._retry_at = math.inf
        # unlike an Event, a SimpleQueue may be used by a signal handler that interrupts itself
        self._wake: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="reloader", daemon=True)

    def start(self) -> None:
        """Start to look."""
        self._thread.start()

    def wake(self) -> None:
        """Look now, and try a bundle again that could not be opened. For signal handlers, too."""
        self._wake.put(True)

    def close(self) -> None:
        """Put no other bundle in place from now on."""
        self._closed = True
        self._wake.put(False)

    def _run(self) -> None:
        while not self._closed:
            asked = False
            try:
                asked = self._wake.get(timeout=_INTERVAL_S)
                while True:  # several signals are one
                    asked |= self._wake.get_nowait()
            except queue.Empty:
                pass
            if self._closed:
                return
            try:
                self._look(asked)
            except Exception as error:  # for example no memory for a thread
                self._failed(f"{self._source.bundle}: {error!r:.300}")

    def _look(self, asked: bool) -> None:
        stamp: Stamp | None = None
        problem = ""
        try:
            stamp = self._source.stamp()
        except OSError as error:
            problem = f"{self._source.bundle}: no bundle: {error.strerror or error}"
        changed, self._seen = stamp != self._seen, stamp
        if stamp is not None and stamp == self._service.served.stamp:
            self._retry_at = math.inf
        elif changed or asked or time.monotonic() >= self._retry_at:
            self._retry_at = math.inf
            if problem:
                self._failed(problem)
                return
            old = weakref.ref(self._service.served.predictor)
            if self._switch_in_thread():
                self._wait_for_release(old)

    def _switch_in_thread(self) -> bool:
        """Switch in a thread that ends: PyTorch's threads for parallel loops end with it."""
        done: list[bool] = []
        thread = threading.Thread(target=lambda: done.append(self._switch()), name="bundle")
        thread.daemon = True
        thread.start()
        thread.join()
        return bool(done and done[0])

    def _switch(self) -> bool:
        """Open what is at the path, and serve it. Return whether it is served."""
        begin, before = time.monotonic(), self._service.served
        try:
            new = self._source.open()
            check_same_columns(before.predictor.spec, new.predictor.spec, str(self._source.bundle))
        except ClickLogError as error:
            self._failed(str(error))
            return False
        except Exception as error:
            self._failed(f"{self._source.bundle}: cannot be opened: {error!r:.300}")
            return False
        if self._closed:
            return False
        self._seen = new.stamp
        self._service.serve(new)
        self._metrics.serves(new, before)
        self._metrics.reloads.inc()
        log.info(
            "serving bundle %s, generation %s, after %.1f s; before: %s, generation %s",
            new.name, new.generation, time.monotonic() - begin, before.name, before.generation,
            extra=ALWAYS,
        )  # fmt: skip
        return True

    def _failed(self, why: str) -> None:
        self._retry_at = time.monotonic() + _RETRY_S
        self._metrics.failures.inc()
        log.error("still serving bundle %s: %s", self._service.served.name, why, extra=ALWAYS)

    def _wait_for_release(self, old: Callable[[], object]) -> None:
        """Wait until no request uses the old bundle any more; each has a time limit."""
        looks = 0
        while old() is not None and not self._closed:
            looks += 1
            if looks % _COLLECT_AFTER == 0:
                gc.collect()
            time.sleep(_RELEASE_S)
