"""Files that somebody tampered with, or that a defect wrote: JSON and text, changed at random."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nvt_torchrec.base.errors import ClickLogError

#: Nothing of this has to be an error, but no other than this project's own may come of it.
_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 3, 2**31, 2**32 + 1, 2**63, -(2**63), 10**30, 0.5, -0.0, 1e308,
    float("nan"), float("inf"), "", "x", "é", "\x00", "../../x", "/etc/passwd", "9" * 50, "cat_0",
    [], {}, [[]], [None], [0], {"x": 1}, ["x"] * 70,
)  # fmt: skip


def flip_bit(file: Path, at: int | None = None) -> None:
    """Change a bit of the byte at an offset, by default in the middle.

    The file is written anew: what has the old one by a hard link keeps it.
    """
    content = bytearray(file.read_bytes())
    content[len(content) // 2 if at is None else at] ^= 1
    file.unlink()
    file.write_bytes(content)


def edit_json(file: Path, change: Callable[[Any], object]) -> None:
    """Let ``change`` edit the value of a JSON file in place."""
    value = json.loads(file.read_text())
    change(value)
    file.write_text(json.dumps(value))


def mutated(value: Any, seed: int) -> Any:
    """A copy of a JSON value with one to three changes."""
    rng = random.Random(seed)
    value = copy.deepcopy(value)
    for _ in range(rng.randint(1, 3)):
        value = _change(value, rng)
    return value


def _change(value: Any, rng: random.Random) -> Any:
    at = value
    keys = _keys(at)
    if not keys:
        return copy.deepcopy(rng.choice(_VALUES))
    while True:
        key = rng.choice(keys)
        deeper = _keys(at[key])
        if not deeper or rng.random() < 0.2:
            break
        at, keys = at[key], deeper
    what = rng.random()
    if what < 0.15:
        del at[key]
    elif what < 0.25 and isinstance(at, dict):
        at[rng.choice(("x", "", "../x", "cat_0"))] = copy.deepcopy(at[key])
    elif what < 0.35 and isinstance(at, list):
        at.insert(rng.randint(0, len(at)), copy.deepcopy(at[key]))
    elif what < 0.5 and type(at[key]) is int:
        at[key] = rng.choice((-at[key] - 1, at[key] + 1, at[key] * 2**30, float(at[key])))
    elif what < 0.55:
        for _ in range(60):
            at[key] = [at[key]]  # deep, but not too deep for read_json
    else:
        at[key] = copy.deepcopy(rng.choice(_VALUES))
    return value


def _keys(value: Any) -> list:
    return list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(
        value, list
    ) else []  # fmt: skip


def broken_texts(text: str) -> dict[str, bytes]:
    """Files that are no JSON, or that parsers disagree on."""
    twice = json.loads(text)
    key = next(iter(twice))
    return {
        "empty": b"",
        "half": text[: len(text) // 2].encode(),
        "deep lists": b"[" * 100_000,
        "deep objects": b'{"x":' * 990 + b"1" + b"}" * 990,
        "a list": b"[1]",
        "a number": b"9" * 5000,
        "null": b"null",
        "no UTF-8": b"\xff" + text.encode(),
        "a key twice": text.replace("{", f'{{"{key}": 1, ', 1).encode(),
    }


def expect_own_errors(
    file: Path,
    use: Callable[[], object],
    *,
    rounds: int,
    after: Callable[[], object] = lambda: None,
) -> None:
    """Change a JSON file over and over; whatever comes of it is an error of this project or none.

    Args:
        file: the whole one; it is put back in the end.
        use: opens and uses what it belongs to.
        rounds: how many changes.
        after: called when the file was changed, to make sizes and digests fit.
    """
    whole = file.read_text()
    value = json.loads(whole)
    try:
        refused = 0
        for seed in range(rounds):
            file.write_text(json.dumps(mutated(value, seed)))
            refused += _used(f"{file.name}, seed {seed}", use, after)
        assert refused > rounds // 3  # or the changes are not where it is read
        for name, content in broken_texts(whole).items():
            file.write_bytes(content)
            assert _used(f"{file.name}, {name}", use, after), name
    finally:
        file.write_text(whole)


def _used(what: str, use: Callable[[], object], after: Callable[[], object]) -> bool:
    """Whether it was refused."""
    try:
        after()
        use()
    except ClickLogError:
        return True
    except Exception as error:
        pytest.fail(f"{what}: {type(error).__name__}: {error}")
    return False
