"""The model that is served, and the thread that follows a bundle.

The thread looks every second whether another bundle is at the path, and at once after SIGHUP. It
opens the new bundle beside the one that is served, compares its digests and scores rows with it.
Then it puts the new one in place: the old one scores the requests that were parsed before, the new
one all others. The next switch begins when the old bundle has been let go, so that no more than two
are in memory. A bundle that cannot be opened is logged, counted and tried again every minute, and
the one before is served.
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
from nvt_torchrec.inference.model.bundle import BUNDLE_FILE, bundle_digest, bundle_name
from nvt_torchrec.inference.model.served_checkpoint import check_same_interface
from nvt_torchrec.inference.predictor import Predictor
from nvt_torchrec.inference.server.batching import SMALL_ROWS
from nvt_torchrec.inference.server.serve_settings import ModelSource
from nvt_torchrec.workflows.description import inspect

log = logging.getLogger(__name__)

#: Seconds between two looks at the path.
_INTERVAL_S = 1.0
#: Seconds after which a bundle that could not be opened is tried again: storage may have failed for
#: a while, or a file of the bundle was copied again, which the stamp does not show.
_RETRY_S = 60.0
#: Seconds between two looks at whether the old bundle has been let go.
_RELEASE_S = 0.05
#: A model is quick if :data:`.batching.SMALL_ROWS` rows take it no longer than this many seconds.
#: Other requests, such as those for /health, may wait for the event loop for as long.
_QUICK_S = 0.005
#: How often that is timed; the shortest time counts.
_NUM_TIMED = 5
#: Reference cycles, such as those of exceptions, are collected after this many looks.
_COLLECT_AFTER = 20

#: Where a bundle is, and which file describes it: path, device, inode, size and time of change.
Stamp: TypeAlias = tuple[str, int, int, int, int]


@dataclasses.dataclass(frozen=True)
class Served:
    """A model that is served. Nothing of it changes, so one request sees one bundle.

    Attributes:
        predictor: Encodes and scores the rows.
        bundle: The digest of the bundle; "" for a workflow and a checkpoint.
        generation: The generation of the workflow; None if it has none.
        stamp: The bundle's stamp when it was opened; None for a workflow and a checkpoint.
        published: When the path that is followed was changed, in seconds since 1970; 0 if unknown.
        is_quick: Whether a few rows are scored so fast that the event loop can do it.
    """

    predictor: Predictor
    bundle: str = ""
    generation: int | None = None
    stamp: Stamp | None = None
    published: float = 0.0
    is_quick: bool = False

    @property
    def trained(self) -> float:
        """When it was trained, in seconds since 1970: the time of its ``bundle.json``."""
        return 0.0 if self.stamp is None else self.stamp[-1] / 1e9

    @property
    def name(self) -> str:
        """The first digits of the bundle's digest."""
        return bundle_name(self.bundle)

    @property
    def metric_labels(self) -> tuple[str, str]:
        """The labels that tell bundles apart in metrics: name and generation."""
        return self.name, "" if self.generation is None else str(self.generation)

    @functools.cached_property
    def raw_headers(self) -> list[tuple[bytes, bytes]]:
        """:attr:`headers` as ASGI sends them."""
        return [(name.lower().encode(), value.encode()) for name, value in self.headers.items()]

    @property
    def headers(self) -> dict[str, str]:
        """The headers of an answer that say what has scored it."""
        headers = {"X-Bundle": self.name} if self.bundle else {}
        if self.generation is not None:
            headers["X-Workflow-Generation"] = str(self.generation)
        return headers

    def warm_up(self) -> Served:
        """Score some rows, so that the first requests are not slower than later ones.

        Returns:
            The same, which says whether it is quick.
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
        OSError: There is none.
    """
    path = Path(os.path.realpath(bundle, strict=True))
    status = (path / BUNDLE_FILE).stat()
    return str(path), status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def open_served(source: ModelSource) -> Served:
    """Open a model, compare its files with their digests, and warm it up.

    A symbolic link is followed once: all files are of the bundle to which it pointed then.

    Raises:
        ClickLogError: What :meth:`inference.predictor.Predictor.load` raises.
    """
    path = stamp = None
    published = 0.0
    if source.bundle is not None:
        path = Path(os.path.realpath(source.bundle))
        with contextlib.suppress(OSError):  # `load` says what is missing
            published = os.lstat(source.bundle).st_mtime
            stamp = read_stamp(path)
    predictor = source.load(bundle=path)
    digest = "" if path is None else bundle_digest(path)
    generation = inspect(predictor.workflow.path).generation
    return Served(predictor, digest, generation, stamp, published).warm_up()


class Reloader:
    """The thread that follows a bundle.

    Args:
        source: Where the bundle is.
        served: The bundle that is served.
        serve: Called with each further one, which is served from then on.
        failed: Called when one could not be opened.
    """

    def __init__(
        self,
        source: ModelSource,
        served: Served,
        serve: Callable[[Served], object],
        failed: Callable[[], object],
    ) -> None:
        self._source, self._served = source, served
        self._serve, self._failed = serve, failed
        #: The stamp of the last bundle that was tried; None if there was none.
        self._tried = served.stamp
        self._retry_at = math.inf
        self._wake = threading.Event()
        self._closed = False
        threading.Thread(target=self._run, name="reloader", daemon=True).start()

    def wake(self) -> None:
        """Look now, and try a bundle again that could not be opened."""
        self._wake.set()

    def close(self) -> None:
        """Put no other bundle in place from now on."""
        self._closed = True
        self._wake.set()

    def _run(self) -> None:
        while not self._closed:
            is_asked = self._wake.wait(_INTERVAL_S)
            self._wake.clear()
            stamp = None  # no bundle is there
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
            except Exception as error:  # for example too little memory
                problem = str(error) if isinstance(error, ClickLogError) else f"{error!r:.300}"
                self._retry_at = time.monotonic() + _RETRY_S
                self._failed()
                log.error("still serving bundle %s: %s", self._served.name, problem)

    def _switch(self) -> None:
        """Open the bundle that is at the path, serve it, and wait until the old one is let go.

        Raises:
            ClickLogError: It cannot be opened, or has other columns or labels.
        """
        begin, before = time.monotonic(), self._served
        new = open_served(self._source)
        labels = before.predictor.labels, new.predictor.labels
        check_same_interface(
            before.predictor.spec, new.predictor.spec, labels, str(self._source.bundle)
        )
        if self._closed:
            return
        self._served, self._tried = new, new.stamp
        self._serve(new)
        log.info(
            "serving bundle %s, generation %s, after %.1f s; before: %s, generation %s",
            new.name, new.generation, time.monotonic() - begin, before.name, before.generation,
        )  # fmt: skip
        # Requests that the old bundle has encoded keep it until they are answered, at the latest by
        # their time limit. This frame must not keep it as well.
        old = weakref.ref(before.predictor)
        del before
        num_looks = 0
        while old() is not None and not self._closed:
            num_looks += 1
            if num_looks % _COLLECT_AFTER == 0:
                gc.collect()
            time.sleep(_RELEASE_S)
