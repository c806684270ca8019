"""The served model, and the thread that replaces it when the bundle changes.

The thread checks every second, and immediately after SIGHUP, whether another bundle is at the path.
It opens the new bundle while the old one is still serving, verifies its digests and scores rows
with it. Then it switches: the old model scores the requests that were parsed before, the new model
all others. The next switch begins only after the old bundle has been released, so that at most two
are in memory. If a bundle cannot be opened, the failure is logged and counted, the old one stays in
service, and the new one is tried again every minute.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from nvt_torchrec.base.errors import BadInputError, ClickLogError
from nvt_torchrec.inference.model.bundle import BUNDLE_FILE, compute_bundle_digest, make_bundle_name
from nvt_torchrec.inference.model.served_checkpoint import check_same_interface
from nvt_torchrec.inference.predictor import Predictor
from nvt_torchrec.inference.server.batching import SMALL_ROWS
from nvt_torchrec.inference.server.serve_settings import ModelSource
from nvt_torchrec.workflows.description import inspect

log = logging.getLogger(__name__)

#: The seconds between two checks of the path.
_INTERVAL_S = 1.0
#: The seconds after which a bundle that could not be opened is tried again: storage may have been
#: unavailable, or a damaged file may have been copied again, which does not change the stamp.
_RETRY_S = 60.0
#: The seconds between two checks whether the old bundle has been released.
_RELEASE_S = 0.05
#: A model is quick if it scores :data:`.batching.SMALL_ROWS` rows in this many seconds. For that
#: long it may block the event loop, and with it requests such as those for /health.
_QUICK_S = 0.005
#: The number of times that this is measured; the shortest time counts.
_NUM_TIMED = 5
#: The number of checks after which reference cycles, such as those of exceptions, are collected.
_COLLECT_AFTER = 20

#: Identifies the bundle at a path: real path, and device, inode, size and modification time of its
#: bundle.json.
Stamp: TypeAlias = tuple[str, int, int, int, int]


@dataclasses.dataclass(frozen=True)
class Served:
    """A model that is served. It is immutable, so that a request sees a single bundle.

    Attributes:
        predictor: The predictor that encodes and scores rows.
        bundle: The digest of the bundle; "" for a workflow and a checkpoint.
        generation: The generation of the workflow; None if it has none.
        stamp: The bundle's stamp when it was opened; None for a workflow and a checkpoint.
        published: The time at which the path was switched to the bundle, in seconds since 1970; 0
            if unknown.
        is_quick: True if the model scores a few rows so fast that the event loop can do it.
    """

    predictor: Predictor
    bundle: str = ""
    generation: int | None = None
    stamp: Stamp | None = None
    published: float = 0.0
    is_quick: bool = False

    @property
    def trained(self) -> float:
        """The time at which it was trained, in seconds since 1970: the mtime of bundle.json."""
        return 0.0 if self.stamp is None else self.stamp[-1] / 1e9

    @property
    def name(self) -> str:
        """The first digits of the bundle's digest."""
        return make_bundle_name(self.bundle)

    @property
    def metric_labels(self) -> tuple[str, str]:
        """The labels that identify the bundle in metrics: name and generation."""
        return self.name, "" if self.generation is None else str(self.generation)

    @functools.cached_property
    def raw_headers(self) -> list[tuple[bytes, bytes]]:
        """:attr:`headers` in ASGI's form."""
        return [(name.lower().encode(), value.encode()) for name, value in self.headers.items()]

    @property
    def headers(self) -> dict[str, str]:
        """The headers of an answer that identify the bundle."""
        headers = {"X-Bundle": self.name} if self.bundle else {}
        if self.generation is not None:
            headers["X-Workflow-Generation"] = str(self.generation)
        return headers

    def warm_up(self) -> Served:
        """Score rows, so that the first requests are not slower than later ones.

        Returns:
            The same model, with ``is_quick`` as measured.
        """
        row = dict.fromkeys(self.predictor.spec.sources(label=False))
        self.predictor.predict([row])
        encoded = self.predictor.encode([row] * SMALL_ROWS)
        times = []
        for _ in range(_NUM_TIMED):
            begin = time.perf_counter()
            self.predictor.predict_parts([encoded])
            times.append(time.perf_counter() - begin)
        on_cpu = self.predictor.model.device.type == "cpu"
        return dataclasses.replace(self, is_quick=on_cpu and min(times) <= _QUICK_S)


def read_stamp(bundle: Path) -> Stamp:
    """Return the stamp of the bundle that is at a path now.

    Raises:
        OSError: No bundle is at the path.
    """
    path = Path(os.path.realpath(bundle, strict=True))
    status = (path / BUNDLE_FILE).stat()
    return str(path), status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def open_served(source: ModelSource) -> Served:
    """Open a model, verify the digests of its files, and warm it up.

    A symbolic link is resolved only once, so that all files come from the same bundle even if the
    link is switched meanwhile.

    Raises:
        ClickLogError: Any error that :meth:`inference.predictor.Predictor.load` raises.
    """
    path = stamp = None
    published = 0.0
    if source.bundle is not None:
        path = Path(os.path.realpath(source.bundle))
        with contextlib.suppress(OSError):  # `load` raises an error that names the missing file
            published = os.lstat(source.bundle).st_mtime
            stamp = read_stamp(path)
    predictor = source.load(bundle=path)
    digest = "" if path is None else compute_bundle_digest(path)
    generation = inspect(predictor.workflow.path).generation
    return Served(predictor, digest, generation, stamp, published).warm_up()


class Reloader:
    """The thread that watches a bundle's path and replaces the served model.

    Args:
        source: The object that loads the bundle.
        served: The model that is served at first.
        serve: Called with each new model, which is served from then on.
        failed: Called when a bundle could not be opened.
    """

    def __init__(
        self,
        source: ModelSource,
        served: Served,
        serve: Callable[[Served], object],
        failed: Callable[[], object],
    ) -> None:
        self._source = source
        self._served = served
        self._serve = serve
        self._failed = failed
        #: The stamp of the last bundle that was tried; None if the path had no bundle.
        self._tried = served.stamp
        self._retry_at = math.inf
        self._wake = threading.Event()
        self._closed = False
        threading.Thread(target=self._run, name="reloader", daemon=True).start()

    def wake(self) -> None:
        """Check the path now, and retry a bundle that could not be opened."""
        self._wake.set()

    def close(self) -> None:
        """End the thread; the model is not replaced from now on."""
        self._closed = True
        self._wake.set()

    def _run(self) -> None:
        """Check the path until :meth:`close`."""
        while not self._closed:
            is_asked = self._wake.wait(_INTERVAL_S)
            self._wake.clear()
            stamp = None  # stays None if no bundle is at the path
            with contextlib.suppress(OSError):
                stamp = read_stamp(self._source.bundle)  # type: ignore[arg-type]
            was_tried = stamp == self._tried
            self._tried = stamp
            if stamp and stamp == self._served.stamp:
                continue
            if was_tried and not is_asked and time.monotonic() < self._retry_at:
                continue
            try:
                if stamp is None:
                    raise BadInputError(f"{self._source.bundle}: no bundle")
                self._switch()
            except Exception as error:  # such as MemoryError: keep the old bundle in service
                problem = str(error) if isinstance(error, ClickLogError) else f"{error!r:.300}"
                self._retry_at = time.monotonic() + _RETRY_S
                self._failed()
                log.error("still serving bundle %s: %s", self._served.name, problem)

    def _switch(self) -> None:
        """Open the bundle at the path, serve it, and wait until the old one has been released.

        Raises:
            ClickLogError: The bundle cannot be opened, or has other columns or labels.
        """
        begin = time.monotonic()
        before = self._served
        new = open_served(self._source)
        labels = before.predictor.labels, new.predictor.labels
        check_same_interface(
            before.predictor.spec, new.predictor.spec, labels, str(self._source.bundle)
        )
        if self._closed:
            return
        self._served = new
        self._tried = new.stamp
        self._serve(new)
        log.info(
            "serving bundle %s, generation %s, after %.1f s; before: %s, generation %s",
            new.name, new.generation, time.monotonic() - begin, before.name, before.generation,
        )  # fmt: skip
        # Requests that the old bundle has encoded refer to it until they are answered, at the
        # latest at their time limit. This frame must not keep it in memory any longer.
        old = weakref.ref(before.predictor)
        del before
        num_checks = 0
        while old() is not None and not self._closed:
            num_checks += 1
            if num_checks % _COLLECT_AFTER == 0:
                gc.collect()
            time.sleep(_RELEASE_S)
