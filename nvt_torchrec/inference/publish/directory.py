"""A directory of published bundles: what is in it, its history, and the steps that change it.

An entry of the history is written before the link is switched. If the command ends between the
two, the last entry tells of a switch that never happened. The link shows that, and the entry is
left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nvt_torchrec.base.errors import BadInputError, ClickLogError, OutputError
from nvt_torchrec.base.files.artifact import Format, check_digests
from nvt_torchrec.base.files.atomic import (
    TEMPORARY,
    fsync_directory,
    locked,
    new_directory,
    output_errors,
)
from nvt_torchrec.inference.model.bundle import BUNDLE_FILE, bundle_digest, bundle_name, describe

log = logging.getLogger(__name__)

CURRENT = "current"
BUNDLES = "bundles"
HISTORY_FILE = "history.json"
_LOCK = ".lock"
_ELSEWHERE = "choose a directory that only `python -m inference publish` writes to"
#: Names of bundles, as :func:`inference.model.bundle.bundle_name` returns them.
_NAME = re.compile("[0-9a-f]{12}")
_FORMAT = Format(
    "nvt-torchrec published bundles", 1, "the history of `python -m inference publish`"
)
_REMEDY = "copy the file again from a backup, or publish to a new directory"
#: The actions of entries.
PUBLISH = "publish"
ROLLBACK = "rollback"
#: Somebody switched the link by hand.
_FOUND = "found"


@dataclasses.dataclass(frozen=True)
class Entry:
    """A switch of the history.

    Attributes:
        action: What made it.
        bundle: The digest of the bundle that was served from then on.
        time: When, in UTC.
        generation: The generation of its workflow, if it has one.
        metrics: The metrics of the bundle on the sample, if there was one.
    """

    action: str
    bundle: str
    time: str
    generation: int | None = None
    metrics: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.action not in (PUBLISH, ROLLBACK, _FOUND):
            raise ValueError(f"action {self.action!r:.60}")
        if not (self.bundle.isalnum() and self.bundle.isascii()):  # it names a directory
            raise ValueError(f"bundle {self.bundle!r:.60}")

    @classmethod
    def now(cls, action: str, bundle: str, **details: Any) -> Entry:
        """Return an entry with the time of this call."""
        return cls(action, bundle, datetime.now(UTC).isoformat(timespec="seconds"), **details)

    @property
    def name(self) -> str:
        """The name of the bundle."""
        return bundle_name(self.bundle)


@dataclasses.dataclass(frozen=True)
class _History:
    entries: tuple[Entry, ...]


def served_in_turn(entries: Sequence[Entry]) -> list[Entry]:
    """Return the entries of the bundles that can be rolled back to; the last one is served."""
    turn: list[Entry] = []
    for entry in entries:
        if entry.action != ROLLBACK:
            turn.append(entry)
        elif turn:
            turn.pop()
    return turn


def reconcile(entries: Sequence[Entry], current: str | None) -> list[Entry]:
    """Return the history with what the link shows of it.

    The last entry is left out if its switch did not happen. A link that somebody switched by hand
    gets an entry.

    Args:
        entries: The history.
        current: The name of the bundle that the link leads to; None if there is no link.
    """
    for happened in (entries, entries[:-1]):
        turn = served_in_turn(happened)
        served = turn[-1].name if turn else None
        if served == current:
            return list(happened)
    if current is None:  # somebody removed the link
        return list(entries)
    bundle, generation = current, None
    for entry in entries:
        if entry.name == current:
            bundle, generation = entry.bundle, entry.generation
    return [*entries, Entry.now(_FOUND, bundle, generation=generation)]


@contextlib.contextmanager
def open_store(root: Path, *, create: bool) -> Iterator[Store]:
    """Open a directory of published bundles, and lock it against other commands meanwhile.

    Args:
        root: The directory.
        create: Make it if it does not exist.

    Raises:
        OutputError: It holds something else, cannot be written, or another command works on it.
        BadInputError: It does not exist or is a file, or its history is missing or damaged.
    """
    remedy = "give the directory that `publish` wrote to"
    if root.exists() and not root.is_dir():
        raise BadInputError(f"{root}: not a directory", remedy)
    if not root.exists() and not create:
        raise BadInputError(f"{root}: no such directory", remedy)
    with contextlib.ExitStack() as stack:
        with output_errors(root):
            root.mkdir(parents=True, exist_ok=True)
            # A first `publish` that was killed leaves the lock and temporary files alone.
            names = [name for name in os.listdir(root) if not name.endswith(TEMPORARY)]
            if HISTORY_FILE not in names and set(names) - {_LOCK}:
                raise OutputError(
                    f"{root}: it has {min(names)}, and no {HISTORY_FILE}: not a directory of "
                    "published bundles",
                    _ELSEWHERE,
                )
            stack.enter_context(locked(root / _LOCK, root))
        yield Store(root)


class Store:
    """A directory of published bundles, which :func:`open_store` has locked.

    Attributes:
        root: The directory.
        current: The link to the bundle that is served.
        entries: The history, as far as it happened.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.current = root, root / CURRENT
        self._bundles = root / BUNDLES
        if not (root / HISTORY_FILE).exists():
            _FORMAT.write(root / HISTORY_FILE, {"entries": []})
        entries = _FORMAT.read(_History, root / HISTORY_FILE, _REMEDY).entries
        self.entries = reconcile(entries, self.served_name())
        with output_errors(root):
            self._bundles.mkdir(exist_ok=True)
            # Commands that were killed left what they had made or removed in part.
            for path in self._bundles.glob(f".*{TEMPORARY}"):
                if _NAME.match(path.name, 1) and _is_own(path):
                    shutil.rmtree(path)

    def served_name(self) -> str | None:
        """Return the name of the bundle that is served; None if none is.

        Raises:
            OutputError: ``current`` is something else than a link to a bundle of this directory.
        """
        try:
            target = os.readlink(self.current)
        except FileNotFoundError:
            return None
        except OSError:  # it is a file or a directory
            target = ""
        bundles, _, name = target.partition("/")
        if bundles != BUNDLES or not _NAME.fullmatch(name):
            raise OutputError(
                f"{self.current}: not a link to a bundle in {self._bundles}",
                f"move it away, or {_ELSEWHERE}",
            )
        return name

    def path(self, name: str) -> Path:
        """Return the directory of a bundle."""
        return self._bundles / name

    def before(self) -> Entry:
        """Return the entry of the bundle to roll back to.

        Raises:
            OutputError: There is none.
        """
        turn = served_in_turn(self.entries)[-2:]
        if self.served_name() is None or len(turn) < 2 or not self.path(turn[0].name).exists():
            raise OutputError(
                f"{self.root}: nothing to roll back to: no earlier bundle is there",
                "publish a bundle",
            )
        return turn[0]

    def add(self, bundle: Path) -> Path:
        """Put a bundle whose digests were compared into the directory, durably.

        Files are hard links where the file system allows it; copies are compared with the digests.

        Raises:
            OutputError: It cannot be written.
            BadInputError: A file has changed meanwhile.
        """
        path = self.path(bundle_name(bundle_digest(bundle)))
        if path.exists():
            try:
                describe(path, check=True)
                return path
            except ClickLogError:  # this copy was damaged; it is not the one that is served
                remove_bundle(path)
        description = describe(bundle)
        with new_directory(path) as temporary:
            copied = {}
            for name in (*description.files, BUNDLE_FILE):
                target = temporary / name
                target.parent.mkdir(parents=True, exist_ok=True)
                is_link = _link(bundle / name, target)
                if not is_link and name in description.files:
                    copied[name] = description.files[name]
            check_digests(temporary, copied, f"{bundle} has changed meanwhile: publish it again")
        return path

    def switch(self, entry: Entry) -> None:
        """Serve the bundle of an entry from now on. Raises OutputError."""
        # The history first: an entry too many is recognized by the link, one that is missing would
        # be lost. A rename replaces the link at once, so that servers always find a bundle.
        self.entries.append(entry)
        content = {"entries": [dataclasses.asdict(entry) for entry in self.entries]}
        _FORMAT.write(self.root / HISTORY_FILE, content)
        link = self.root / f".{CURRENT}{TEMPORARY}"
        with output_errors(self.current):
            link.unlink(missing_ok=True)
            link.symlink_to(Path(BUNDLES) / entry.name)
            os.replace(link, self.current)
            fsync_directory(self.root)

    def prune(self, keep: int) -> list[str]:
        """Remove all published bundles except the last ``keep`` that were served.

        The bundle that is served and the one to roll back to are never removed, nor is anything
        that is not in the history.

        Returns:
            The names of the bundles that were removed.
        """
        needed: list[str] = []
        for entry in reversed(served_in_turn(self.entries)):
            if entry.name not in needed and len(needed) < max(keep, 2):
                needed.append(entry.name)
        published = {entry.name for entry in self.entries if _NAME.fullmatch(entry.name)}
        removed, unknown = [], []
        for path in sorted(self._bundles.iterdir()):
            if path.name.startswith(".") or path.name in needed:
                continue
            if path.name in published and _is_own(path):
                remove_bundle(path)
                removed.append(path.name)
            else:
                unknown.append(path.name)
        if unknown:
            log.warning("%s: left %s, which was not published", self._bundles, ", ".join(unknown))
        return removed


def _is_own(path: Path) -> bool:
    """Return whether a path is a directory; this program makes no links to directories here."""
    return path.is_dir() and not path.is_symlink()


def _link(source: Path, target: Path) -> bool:
    """Make a hard link, or a copy where that is not possible. Return whether it is a link."""
    try:
        os.link(source.resolve(), target)
        return True
    except OSError:  # another file system, or one without hard links
        # With the file's time: that of bundle.json says when the model was trained.
        shutil.copy2(source, target)
        return False


def remove_bundle(path: Path) -> None:
    """Remove a bundle. Raises OutputError.

    It is renamed first, so that no name of a bundle ever leads to a part of one.
    """
    temporary = path.with_name(f".{path.name}.old{TEMPORARY}")
    with output_errors(path):
        os.rename(path, temporary)
        fsync_directory(path.parent)
        shutil.rmtree(temporary)
