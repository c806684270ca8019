"""Whether the GPU lock can be installed on Linux x86-64: a dry run of pip, on any machine.

    python requirements/resolve.py            # for Python 3.11 and 3.12

For each version: every pin has a wheel or is published as a source, and what the wheels ask of each
other the pins give, PyTorch's CUDA libraries included. Nothing is installed or imported; wheels are
looked up, their metadata is read. Not seen: whether the sources build (`make env` shows it), and
what they ask for.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

HERE = Path(__file__).parent
LOCKS = ("build.txt", "torch.txt", "cuda.txt", "gpu.txt")
#: Every tag that a wheel for glibc may have: pip is asked for another machine than this.
_PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in range(39, 4, -1)]
_PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]


def pins(name: str) -> list[str]:
    """The lines of a requirements file that pin a package."""
    return re.findall(r"^[a-z][^ \\\n]*", (HERE / name).read_text(), re.MULTILINE)


def dry_run(version: str, *arguments: str) -> tuple[list[dict], str]:
    """Metadata of what pip would install, and its last error; wheels only."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
        command += ["--quiet", f"--report={report}", f"--target={folder}/none", *arguments]
        command += [f"--python-version={version}", "--implementation=cp", "--only-binary=:all:"]
        command += [f"--platform={platform}" for platform in _PLATFORMS]
        # no folder of this machine's: it may hold builds for CPUs
        environment = {**os.environ, "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            return [], done.stderr.strip()
        return [one["metadata"] for one in json.loads(report.read_text())["install"]], ""


def with_wheels(version: str) -> tuple[list[dict], list[str]]:
    """Metadata of the pins that have a wheel, and the pins that are published as sources only."""
    locked, sources = [pin for name in LOCKS for pin in pins(name)], []
    while True:
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write("\n".join(locked))
            file.flush()
            found, error = dry_run(version, "--no-deps", "-r", file.name)
        missing = re.search(r"No matching distribution found for (\S+)", error)
        if not missing:
            if error:
                sys.exit(f"Python {version}: {error}")
            return found, sources
        locked.remove(missing[1])
        sources.append(missing[1])


def unmet(version: str, packages: dict[str, dict], versions: dict[str, str]) -> list[str]:
    """What packages ask for and the pins do not give."""
    environment = {
        "python_version": version, "python_full_version": f"{version}.0",
        "sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64",
        "os_name": "posix", "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }  # fmt: skip
    needs = {
        name: [Requirement(line) for line in metadata.get("requires_dist", [])]
        for name, metadata in packages.items()
    }
    extras = {name: {""} for name in needs}  # cuda-toolkit asks for libraries in extras alone
    for need in (need for own in needs.values() for need in own):
        extras.setdefault(canonicalize_name(need.name), set()).update(need.extras)
    found = []
    for name, own in needs.items():
        for need in own:
            environments = [environment | {"extra": extra} for extra in extras[name]]
            if need.marker and not any(map(need.marker.evaluate, environments)):
                continue
            of = canonicalize_name(need.name)
            if of not in versions or not need.specifier.contains(versions[of], prereleases=True):
                found.append(f"{name} asks for {need}, and the lock has {versions.get(of)}")
    return found


def main() -> int:
    """Check the versions of Python given, or all; exit status 1 if one cannot be installed."""
    wrong = 0
    for version in sys.argv[1:] or ("3.11", "3.12"):
        locked, sources = with_wheels(version)
        packages = {canonicalize_name(one["name"]): one for one in locked}
        versions = {name: one["version"].split("+")[0] for name, one in packages.items()}
        versions |= dict(pin.split("==") for pin in sources)
        problems = unmet(version, packages, versions)
        wrong += bool(problems)
        print(
            f"Python {version}: {len(versions)} packages, torch {versions['torch']}, "
            f"{len(sources)} as sources ({', '.join(sources)}), {len(problems)} unmet",
            flush=True,
        )
        for problem in problems:
            print(f"  {problem}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
