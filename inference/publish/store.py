"""A directory of published bundles: what is in it, and the steps that change it."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from nvt_torchrec.base.errors import BadInputError, ClickLogError, OutputError
from nvt_torchrec.base.files.artifact import check_digests
from nvt_torchrec.base.files.atomic import (
    TEMPORARY,
    fsync_directory,
    locked,
    new_directory,
    output_errors,
)
from nvt_torchrec.inference.model.bundle import (
    BUNDLE_FILE,
    bundle_digest,
    bundle_name,
    describe,
    is_bundle_name,
    remove_bundle,
)
from nvt_torchrec.inference.publish.history import (
    HISTORY_FILE,
    Entry,
    read_history,
    reconcile,
    served_in_turn,
    write_history,
)

CURRENT, BUNDLES, _LOCK = "current", "bundles", ".lock"
_ELSEWHERE = "choose a directory that only `python -m inference publish` writes to"


@contextlib.contextmanager
def open_store(root: Path, *, create: bool) -> Iterator[Store]:
    """Open a directory of published bundles; meanwhile no other command can.

    Args:
        root: The directory.
        create: Make it if it does not exist.

    Raises:
        OutputError: It is something else, cannot be written, or another command works on it.
        BadInputError: It does not exist, or its history is missing or damaged.
    """
    if not create and not root.is_dir():
        raise BadInputError(
            f"{root}: no such directory", "give the directory that `publish` wrote to"
        )
    _check_kind(root)
    with contextlib.ExitStack() as stack:
        with output_errors(root):
            root.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(root / _LOCK, root))
        if not (root / HISTORY_FILE).exists():
            write_history(root, [])
        yield Store(root)


def _check_kind(root: Path) -> None:
    if root.exists() and not root.is_dir():
        raise OutputError(f"{root}: not a directory", _ELSEWHERE)
    if not root.exists() or (root / HISTORY_FILE).exists():
        return
    others = (name for name in os.listdir(root) if name != _LOCK and not name.endswith(TEMPORARY))
    other = min(others, default=None)
    if other is not None:
        raise OutputError(
            f"{root}: not a directory of published bundles: it has {other}, and no {HISTORY_FILE}",
            _ELSEWHERE,
        )


class Store:
    """See :func:`open_store`.

    Attributes:
        root: The directory.
        current: The link to the bundle that is served.
        entries: The history, as far as it happened.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.current = root, root / CURRENT
        self._bundles = root / BUNDLES
        self.entries = reconcile(read_history(root), self.served_name())
        with output_errors(root):
            self._bundles.mkdir(exist_ok=True)
            for left in self._bundles.glob(f".*{TEMPORARY}"):  # by a command that was killed
                shutil.rmtree(left)

    def served_name(self) -> str | None:
        """Return the name of the bundle that is served; None if none is.

        Raises:
            OutputError: ``current`` is something else than a link to a bundle of this directory.
        """
        try:
            target = Path(os.readlink(self.current))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise OutputError(
                f"{self.current}: not a symbolic link", "move it away, or " + _ELSEWHERE
            ) from error
        if target.parent != Path(BUNDLES) or not is_bundle_name(target.name):
            raise OutputError(
                f"{self.current}: leads to {target}, which is not a bundle in {self._bundles}",
                "remove the link, or " + _ELSEWHERE,
            )
        return target.name

    def path(self, name: str) -> Path:
        """Return the directory of a bundle."""
        return self._bundles / name

    def before(self) -> Entry:
        """Return the entry of the bundle to roll back to.

        Raises:
            OutputError: There is none.
        """
        turn = served_in_turn(self.entries)
        if self.served_name() is None or len(turn) < 2:
            what = "no bundle is served" if self.served_name() is None else "no earlier bundle"
            raise OutputError(f"{self.root}: nothing to roll back to: {what}", "publish a bundle")
        if not self.path(turn[-2].name).exists():
            raise OutputError(
                f"{self.root}: the bundle served before, {turn[-2].name}, is not there any more",
                "publish a bundle",
            )
        return turn[-2]

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
            except ClickLogError:  # a copy that was damaged, and is not served
                remove_bundle(path)
        description = describe(bundle)
        with new_directory(path) as temporary:
            copied = {}
            for name in (*description.files, BUNDLE_FILE):
                target = temporary / name
                target.parent.mkdir(parents=True, exist_ok=True)
                if not _link(bundle / name, target) and name in description.files:
                    copied[name] = description.files[name]
            check_digests(temporary, copied, f"{bundle} has changed meanwhile: publish it again")
        return path

    def switch(self, entry: Entry) -> None:
        """Serve the bundle of an entry from now on. Raises OutputError."""
        self.entries.append(entry)
        write_history(self.root, self.entries)
        link = self.root / f".{CURRENT}{TEMPORARY}"
        with output_errors(self.current):
            link.unlink(missing_ok=True)
            link.symlink_to(Path(BUNDLES) / entry.name)
            os.replace(link, self.current)
            fsync_directory(self.root)

    def prune(self, keep: int) -> list[str]:
        """Remove all bundles but the last ``keep`` that were served in turn; return their names.

        The one that is served and the one to roll back to are never removed.
        """
        needed: list[str] = []
        for entry in reversed(served_in_turn(self.entries)):
            if entry.name not in needed and len(needed) < max(keep, 2):
                needed.append(entry.name)
        removed = sorted(set(os.listdir(self._bundles)) - set(needed))
        for name in removed:
            remove_bundle(self.path(name))
        return removed


def _link(source: Path, target: Path) -> bool:
    """Make a hard link, or a copy where that is not possible. Return whether it is a link."""
    try:
        os.link(source.resolve(), target)
        return True
    except OSError:  # another file system, or one without hard links
        pass
    shutil.copy2(source, target)  # with its time, which is that of the training
    return False
