"""A directory of published bundles: its content, its history, and the steps that change it.

An entry of the history is written before the link is switched. If the command ends between the two
steps, the last entry describes a switch that never happened. The link reveals this, and the entry
is ignored.
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
from nvt_torchrec.inference.model.bundle import (
    BUNDLE_FILE,
    compute_bundle_digest,
    make_bundle_name,
    read_description,
)

log = logging.getLogger(__name__)

CURRENT = "current"
BUNDLES = "bundles"
HISTORY_FILE = "history.json"
_LOCK = ".lock"
_ELSEWHERE = "choose a directory that only `python -m inference publish` writes to"
#: The form of a bundle's name (:func:`inference.model.bundle.make_bundle_name`).
_NAME = re.compile("[0-9a-f]{12}")
_FORMAT = Format(
    "nvt-torchrec published bundles", 1, "the history of `python -m inference publish`"
)
_REMEDY = "copy the file again from a backup, or publish to a new directory"
# The actions of entries.
PUBLISH = "publish"
ROLLBACK = "rollback"
#: The link had been switched by hand.
_FOUND = "found"


@dataclasses.dataclass(frozen=True)
class Entry:
    """An entry of the history: a switch from one bundle to another.

    Attributes:
        action: The cause of the switch: "publish", "rollback" or "found".
        bundle: The digest of the bundle that was served from then on.
        time: The time of the switch, in UTC.
        generation: The generation of the bundle's workflow, if it has one.
        metrics: The metrics of the bundle on the sample, if there was a sample.
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
    def make_now(cls, action: str, bundle: str, **details: Any) -> Entry:
        """Make an entry with the current time."""
        return cls(action, bundle, datetime.now(UTC).isoformat(timespec="seconds"), **details)

    @property
    def name(self) -> str:
        """The name of the bundle."""
        return make_bundle_name(self.bundle)


@dataclasses.dataclass(frozen=True)
class _History:
    entries: tuple[Entry, ...]


def stack_entries(entries: Sequence[Entry]) -> list[Entry]:
    """Replay the history as a stack, whose last entry is the served bundle.

    A publication pushes an entry, and a rollback pops one. So the entry below the last one is the
    bundle to roll back to.
    """
    stack: list[Entry] = []
    for entry in entries:
        if entry.action != ROLLBACK:
            stack.append(entry)
        elif stack:
            stack.pop()
    return stack


def reconcile(entries: Sequence[Entry], current: str | None) -> list[Entry]:
    """Return the history, corrected by the state of the link.

    The last entry is left out if its switch did not happen. If the link was switched by hand, an
    entry is added.

    Args:
        entries: The history.
        current: The name of the bundle that the link points to; None if there is no link.
    """
    for candidate in (entries, entries[:-1]):
        stack = stack_entries(candidate)
        served = stack[-1].name if stack else None
        if served == current:
            return list(candidate)
    if current is None:  # the link was removed by hand
        return list(entries)
    # A bundle that was never published is only known by its name, the first digits of its digest.
    bundle = current
    generation = None
    for entry in entries:
        if entry.name == current:
            bundle = entry.bundle
            generation = entry.generation
    return [*entries, Entry.make_now(_FOUND, bundle, generation=generation)]


@contextlib.contextmanager
def open_store(root: Path, *, create: bool) -> Iterator[Store]:
    """Open a directory of published bundles, locked against other commands.

    Args:
        root: The directory.
        create: Create the directory if it does not exist.

    Raises:
        OutputError: The directory contains something else, cannot be written, or another command
            is working on it.
        BadInputError: The directory does not exist or is a file, or its history is damaged.
    """
    remedy = "pass the directory that `publish` wrote to"
    if root.exists() and not root.is_dir():
        raise BadInputError(f"{root} is not a directory", remedy)
    if not root.exists() and not create:
        raise BadInputError(f"{root} does not exist", remedy)
    with contextlib.ExitStack() as stack:
        with output_errors(root):
            root.mkdir(parents=True, exist_ok=True)
            # After a first `publish` that was killed, there are only the lock and temporary files.
            names = [name for name in os.listdir(root) if not name.endswith(TEMPORARY)]
            if HISTORY_FILE not in names and set(names) - {_LOCK}:
                raise OutputError(
                    f"{root} contains {min(names)} but no {HISTORY_FILE}: it is not a directory of "
                    "published bundles",
                    _ELSEWHERE,
                )
            stack.enter_context(locked(root / _LOCK, root))
        yield Store(root)


class Store:
    """A directory of published bundles, locked by :func:`open_store`.

    Attributes:
        root: The directory.
        current: The link to the served bundle.
        entries: The history, without a switch that did not happen.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.current = root / CURRENT
        self._bundles = root / BUNDLES
        if not (root / HISTORY_FILE).exists():
            _FORMAT.write(root / HISTORY_FILE, {"entries": []})
        entries = _FORMAT.read(_History, root / HISTORY_FILE, _REMEDY).entries
        self.entries = reconcile(entries, self.read_served_name())
        with output_errors(root):
            self._bundles.mkdir(exist_ok=True)
            # Clean up after killed commands: bundles that were only partly copied or removed.
            for path in self._bundles.glob(f".*{TEMPORARY}"):
                if _NAME.match(path.name, 1) and _is_real_directory(path):
                    shutil.rmtree(path)

    def read_served_name(self) -> str | None:
        """Return the name of the served bundle; None if no bundle is served.

        Raises:
            OutputError: ``current`` is not a link to a bundle of this directory.
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
                f"{self.current} is not a link to a bundle in {self._bundles}",
                f"move it away, or {_ELSEWHERE}",
            )
        return name

    def get_path(self, name: str) -> Path:
        """Return the directory of a bundle."""
        return self._bundles / name

    def find_rollback_target(self) -> Entry:
        """Return the entry of the bundle to roll back to.

        Raises:
            OutputError: No earlier bundle exists.
        """
        newest = stack_entries(self.entries)[-2:]
        is_possible = self.read_served_name() is not None and len(newest) == 2
        if not is_possible or not self.get_path(newest[0].name).exists():
            raise OutputError(
                f"{self.root}: nothing to roll back to: no earlier bundle exists",
                "publish a bundle",
            )
        return newest[0]

    def add(self, bundle: Path) -> Path:
        """Put a bundle whose digests have been verified into the directory, durably.

        Files become hard links if the file system supports them; otherwise they are copied, and the
        copies are verified.

        Raises:
            OutputError: The directory cannot be written.
            BadInputError: A file has changed since it was verified.
        """
        path = self.get_path(make_bundle_name(compute_bundle_digest(bundle)))
        if path.exists():
            try:
                read_description(path, check=True)
                return path
            except ClickLogError:  # this copy is damaged, but not served: replace it
                remove_bundle(path)
        description = read_description(bundle)
        with new_directory(path) as temporary:
            copied = {}
            for name in (*description.files, BUNDLE_FILE):
                target = temporary / name
                target.parent.mkdir(parents=True, exist_ok=True)
                is_link = _link_or_copy(bundle / name, target)
                if not is_link and name in description.files:
                    copied[name] = description.files[name]
            check_digests(
                temporary, copied, f"{bundle} has changed while it was read: publish it again"
            )
        return path

    def switch(self, entry: Entry) -> None:
        """Serve the bundle of an entry from now on. Raises OutputError."""
        # The history is written first: the link reveals an entry whose switch did not happen, but
        # not a missing entry. The link is replaced by a rename, which is atomic, so that servers
        # always find a bundle.
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

        The served bundle and the one to roll back to are never removed, and neither is anything
        that is not in the history.

        Returns:
            The names of the bundles that were removed.
        """
        kept: list[str] = []
        for entry in reversed(stack_entries(self.entries)):
            if entry.name not in kept and len(kept) < max(keep, 2):
                kept.append(entry.name)
        published = {entry.name for entry in self.entries if _NAME.fullmatch(entry.name)}
        removed = []
        unknown = []
        for path in sorted(self._bundles.iterdir()):
            if path.name.startswith(".") or path.name in kept:
                continue
            if path.name in published and _is_real_directory(path):
                remove_bundle(path)
                removed.append(path.name)
            else:
                unknown.append(path.name)
        if unknown:
            log.warning(
                "%s: did not remove %s: not published here", self._bundles, ", ".join(unknown)
            )
        return removed


def _is_real_directory(path: Path) -> bool:
    """Return True for a directory, False for a link to one, which this program never makes here."""
    return path.is_dir() and not path.is_symlink()


def _link_or_copy(source: Path, target: Path) -> bool:
    """Make a hard link, or a copy if that is not possible. Return True for a link."""
    try:
        os.link(source.resolve(), target)
        return True
    except OSError:  # another file system, or one without hard links
        # copy2 keeps the modification time: that of bundle.json tells when the model was trained.
        shutil.copy2(source, target)
        return False


def remove_bundle(path: Path) -> None:
    """Remove a bundle. Raises OutputError.

    It is renamed first, so that the name of a bundle never leads to an incomplete one.
    """
    temporary = path.with_name(f".{path.name}.old{TEMPORARY}")
    with output_errors(path):
        os.rename(path, temporary)
        fsync_directory(path.parent)
        shutil.rmtree(temporary)
