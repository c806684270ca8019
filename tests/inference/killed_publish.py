"""Publications and rollbacks that are killed before each write, after which others succeed.

``python -m tests.inference.killed_publish OLD NEW DIRECTORY`` prints what it saw as JSON. For
writes see ``tests/forks.py``. Nothing of PyTorch may run in a fork, so digests alone are compared.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

from nvt_torchrec.inference.model.bundle import compute_bundle_digest, read_description
from nvt_torchrec.inference.publish import PublishSettings, steps
from tests.forks import kill_before, was_killed

steps.try_bundle = lambda bundle: None  # writes nothing, and starts a process
steps.Predictor.load = lambda path, check: read_description(path, check=check)
steps._check_successor = lambda *_: []


def current(served: Path) -> str:
    """The digest of the bundle that is served, which is whole."""
    read_description(served / "current", check=True)
    return compute_bundle_digest(served / "current")


def main(old: Path, new: Path, base: Path) -> None:
    def publish(served: Path, bundle: Path = new, keep: int | None = 1) -> None:
        steps.publish(PublishSettings(to=served, bundle=bundle, keep=keep))

    publish(base / "one", old)
    shutil.copytree(base / "one", base / "both", symlinks=True)
    publish(base / "both")
    seen = []
    for begin, work in (("one", publish), ("both", steps.rollback)):
        moments, killed, served_then = 0, True, set()
        while killed:
            moments += 1
            served = base / f"{begin}.{moments}"
            shutil.copytree(base / begin, served, symlinks=True, copy_function=os.link)

            def work_watched(watch, work=work, served=served) -> None:
                watch()
                work(served)

            killed = was_killed(work_watched, kill_before(moments), served)
            served_then.add(current(served))
            publish(served)
            assert current(served) == compute_bundle_digest(new), (begin, moments)
            steps.rollback(served)
            assert current(served) == compute_bundle_digest(old), (begin, moments)
            assert len(os.listdir(served / "bundles")) == 2, (begin, moments)
        seen.append(
            [moments, served_then == {compute_bundle_digest(old), compute_bundle_digest(new)}]
        )
    print(json.dumps(seen))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
