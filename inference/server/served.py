"""What a server serves: a model that is open, and the place from which it is opened again."""

from __future__ import annotations

import dataclasses
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from nvt_torchrec.inference.inputs import remedies
from nvt_torchrec.inference.model.bundle import BUNDLE_FILE, bundle_digest, bundle_name, describe
from nvt_torchrec.inference.predictor import Predictor

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
    """

    predictor: Predictor
    bundle: str = ""
    generation: int | None = None
    stamp: Stamp | None = None

    @property
    def name(self) -> str:
        """The first digits of the bundle's digest."""
        return bundle_name(self.bundle)

    @property
    def headers(self) -> dict[str, str]:
        """The headers of an answer that say what has scored it."""
        named = {"X-Bundle": self.name} if self.bundle else {}
        if self.generation is not None:
            named["X-Workflow-Generation"] = str(self.generation)
        return named

    def warm_up(self) -> None:
        """Score and refuse some rows, so that the first requests are not slower than later ones."""
        row = dict.fromkeys(self.predictor.spec.sources(label=False))
        for count in (1, 64):
            self.predictor.predict([row] * count)
        remedies.warm_up(self.predictor.spec)


@dataclasses.dataclass(frozen=True)
class Source:
    """Where the model of a server comes from. It can be pickled.

    Attributes:
        load: Returns the predictor. Takes ``check``, whether to compare files with their digests,
            and ``bundle``, the directory to open, or None for a workflow and a checkpoint.
        bundle: The directory of the bundle, or a symbolic link to it; None for a workflow and a
            checkpoint.
        workflow: The directory of the workflow; None for a bundle.
    """

    load: Callable[..., Predictor]
    bundle: Path | None = None
    workflow: Path | None = None

    def stamp(self) -> Stamp | None:
        """Return the stamp of the bundle that is there now.

        Raises:
            OSError: There is none.
        """
        if self.bundle is None:
            return None
        path = Path(os.path.realpath(self.bundle, strict=True))
        status = (path / BUNDLE_FILE).stat()
        return str(path), status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns

    def open(self, *, check: bool = True) -> Served:
        """Open the model and warm it up.

        A symbolic link is followed once: all files are of the bundle to which it pointed then.

        Raises:
            ClickLogError: What :meth:`inference.predictor.Predictor.load` raises.
        """
        if self.bundle is None:
            served = Served(self.load(check=check), generation=self._generation())
        else:
            path = Path(os.path.realpath(self.bundle))
            here = dataclasses.replace(self, bundle=path)
            try:
                stamp = here.stamp()
            except OSError:  # load says what is missing
                stamp = None
            predictor = self.load(check=check, bundle=path)
            generation = describe(path).generation
            served = Served(predictor, bundle_digest(path), generation, stamp)
        served.warm_up()
        return served

    def _generation(self) -> int | None:
        from nvt_torchrec.workflows.description import inspect

        return None if self.workflow is None else inspect(self.workflow).generation


def freeze_memory() -> None:
    """Exempt what exists now from garbage collection, which would visit it again and again."""
    gc.collect()
    gc.freeze()
