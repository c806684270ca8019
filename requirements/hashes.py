"""Write into the lock files the digests of every file that pip may install for a pin.

    make lock                         # after a pin was changed by hand

For each pin: the wheels for Linux that fit Python 3.11 or 3.12, or the source where there is none,
as the package index lists them. pip then takes no other file. PyTorch's builds for CPUs are on no
package index: those in the folders given as arguments are added, and those that a lock has for the
same version stay, so that it can be written where there are no such folders.

Needs ``uv``, which says what fits; `make lock` installs it into an environment of its own.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
LOCKS = ("build.txt", "torch.txt", "cuda.txt", "cpu.txt", "gpu.txt", "tools.txt")
PYTHONS = ("3.11", "3.12")
#: RAPIDS is locked for x86-64 alone.
MACHINES = {"gpu.txt": ("x86_64",)}
#: Wheels for a newer glibc than this are left out: Debian 12 has 2.36.
_GLIBC = "manylinux_2_35"
_PIN = re.compile(r"^([a-z0-9-]+)==([^ \\\n]+)(?: *\\\n +--hash=[^ \\\n]+)*", re.MULTILINE)


def with_hashes(lock: str, digests: dict[str, set[str]]) -> str:
    """The text of a lock with these digests (hexadecimal SHA-256, by package), and no others."""

    def pin(match: re.Match) -> str:
        lines = [f"{match[1]}=={match[2]}"]
        lines += [f"    --hash=sha256:{digest}" for digest in sorted(digests[match[1]])]
        return " \\\n".join(lines)

    return _PIN.sub(pin, lock)


def published(pins: dict[str, str], python: str, machine: str) -> dict[str, set[str]]:
    """Digests of the files that fit a Python and a machine, by package."""
    lines = "".join(f"{name}=={version}\n" for name, version in pins.items())
    command = ["uv", "pip", "compile", "-", "--quiet", "--no-config", "--no-deps"]
    command += ["--format=pylock.toml", f"--python-version={python}"]
    command += [f"--python-platform={machine}-{_GLIBC}"]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"Python {python}, {machine}: {done.stderr}")
    return {
        package["name"]: {
            file["hashes"]["sha256"] for file in package.get("wheels") or [package["sdist"]]
        }
        for package in tomllib.loads(done.stdout)["packages"]
    }


def in_folders(pins: dict[str, str], folders: list[str]) -> dict[str, set[str]]:
    """Digests of the wheels there of these versions, local ones (2.13.0+cpu) too, by package."""
    found: dict[str, set[str]] = {}
    for wheel in (path for folder in folders for path in Path(folder).glob("*.whl")):
        name, version = wheel.name.split("-")[:2]
        name = re.sub(r"[._]+", "-", name).lower()
        if pins.get(name) == version.split("+")[0]:
            found.setdefault(name, set()).add(hashlib.sha256(wheel.read_bytes()).hexdigest())
    return found


def unlisted(lock: str, digests: dict[str, set[str]]) -> dict[str, set[str]]:
    """Digests in a lock beyond these, of the pins whose version is the one it was written for.

    They are if the lock has one of these digests too: no file belongs to two versions.
    """
    found: dict[str, set[str]] = {}
    for match in _PIN.finditer(lock):
        locked = set(re.findall(r"--hash=sha256:(\w+)", match[0]))
        if locked & digests[match[1]]:
            found[match[1]] = locked - digests[match[1]]
    return found


def main() -> None:
    """Rewrite the lock files."""
    for name in LOCKS:
        lock = HERE / name
        text = lock.read_text()
        pins = {match[1]: match[2] for match in _PIN.finditer(text)}
        known = [
            published(pins, python, machine)
            for python in PYTHONS
            for machine in MACHINES.get(name, ("x86_64", "aarch64"))
        ]
        known.append(in_folders(pins, sys.argv[1:]))
        digests = {pin: set().union(*(one.get(pin, ()) for one in known)) for pin in pins}
        for pin, kept in unlisted(text, digests).items():
            digests[pin] |= kept
            for digest in sorted(kept):
                print(f"{lock}: {pin}=={pins[pin]}: kept {digest}, which is not listed")
        lock.write_text(with_hashes(text, digests))
        print(f"{lock}: {len(pins)} pins, {sum(map(len, digests.values()))} files")


if __name__ == "__main__":
    main()
