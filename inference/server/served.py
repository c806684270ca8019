"""What a server serves: a model that is open, and the place from which it is opened again."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from pathlib import Path
from typing import TypeAlias

from nvt_torchrec.inference.model.bundle import BUNDLE_FILE, bundle_digest, bundle_name, describe
from nvt_torchrec.inference.predictor import Predictor
from nvt_torchrec.inference.server.settings import Source
from nvt_torchrec.workflows.description import inspect

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
        published: When the path that is followed was changed, in seconds since 1970; 0 if
            unknown.
    """

    predictor: Predictor
    bundle: str = ""
    generation: int | None = None
    stamp: Stamp | None = None
    published: float = 0.0

    @property
    def trained(self) -> float:
        """When it was trained, in seconds since 1970: the time of its ``bundle.json``."""
        return 0.0 if self.stamp is None else self.stamp[-1] / 1e9

    @property
    def name(self) -> str:
        """The first digits of the bundle's digest."""
        return bundle_name(self.bundle)

    @property
    def labels(self) -> tuple[str, str]:
        """The labels that tell bundles apart in metrics: name and generation."""
        return self.name, "" if self.generation is None else str(self.generation)

    @property
    def headers(self) -> dict[str, str]:
        """The headers of an answer that say what has scored it."""
        headers = {"X-Bundle": self.name} if self.bundle else {}
        if self.generation is not None:
            headers["X-Workflow-Generation"] = str(self.generation)
        return headers

    def warm_up(self) -> None:
        """Score some rows, so that the first requests are not slower than later ones."""
        row = dict.fromkeys(self.predictor.spec.sources(label=False))
        for count in (1, 64):
            self.predictor.predict([row] * count)


def read_stamp(bundle: Path) -> Stamp:
    """Return the stamp of the bundle that is at a path now.

    Raises:
        OSError: There is none.
    """
    path = Path(os.path.realpath(bundle, strict=True))
    status = (path / BUNDLE_FILE).stat()
    return str(path), status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def open_served(source: Source) -> Served:
    """Open a model, compare its files with their digests, and warm it up.

    A symbolic link is followed once: all files are of the bundle to which it pointed then.

    Raises:
        ClickLogError: What :meth:`inference.predictor.Predictor.load` raises.
    """
    if source.bundle is None:
        served = Served(source.load(), generation=inspect(source.workflow).generation)
    else:
        path, stamp, published = Path(os.path.realpath(source.bundle)), None, 0.0
        with contextlib.suppress(OSError):  # load says what is missing
            published, stamp = os.lstat(source.bundle).st_mtime, read_stamp(path)
        predictor = source.load(bundle=path)
        generation = describe(path).generation
        served = Served(predictor, bundle_digest(path), generation, stamp, published)
    served.warm_up()
    return served
