"""Build sdist and wheel of the last commit, check them, and try them where nothing else is.

    python -m tests.release build/release

``make release`` calls it. The wheel is built from the sdist, so that a file that the sdist lacks is
missing in both. With ``--all`` an environment also gets the extra ``[cpu]`` and what README adds to
it, gigabytes, and runs the training and the scoring of README's first commands, too.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import yaml
from packaging.metadata import Metadata
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11", "3.12")
_BUILD = "import sys, setuptools.build_meta as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"
#: Of README's first commands: those that the wheel without extras has.
_BASE_COMMANDS = ("nvt-etl",)


class ReleaseError(Exception):
    """The release cannot be made: the message says why, and what to do."""


def main(arguments: list[str]) -> None:
    """Build, check and try a release.

    Raises:
        ReleaseError: A check failed.
        subprocess.CalledProcessError: A command failed.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.release", description=__doc__)
    parser.add_argument("folder", type=Path, help="emptied first; gets sdist and wheel")
    parser.add_argument("--all", action="store_true", help="also install [cpu], train and score")
    settings = parser.parse_args(arguments)
    folder = settings.folder.absolute()
    wheel = build(folder)
    check_wheel(wheel)
    print(f"release: {wheel.name}: metadata, files and versions agree")
    tried = 0
    for version in PYTHONS:
        python = find_python(version)
        if python is None:
            print(f"release: NOT TRIED under Python {version}: there is none here")
            continue
        try_wheel(wheel, python, folder / f"try-{version}", everything=settings.all)
        print(f"release: README's commands work under Python {version}")
        tried += 1
    if not tried:
        raise ReleaseError(f"none of Python {', '.join(PYTHONS)} is here: install one")


def build(folder: Path) -> Path:
    """Build the sdist of the last commit, and the wheel of the sdist; return the wheel."""
    shutil.rmtree(folder, ignore_errors=True)
    source = folder / "source"
    source.mkdir(parents=True)
    changes = ["git", "status", "--porcelain", "--untracked-files=no"]
    if subprocess.run(changes, cwd=ROOT, check=True, capture_output=True).stdout:
        print("release: of the last commit; what is not committed is not in it")
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True)
    subprocess.run(["tar", "-x", "-C", source], input=archive.stdout, check=True)
    sdist = folder / _call_backend("build_sdist", source, folder)
    with tarfile.open(sdist) as packed:
        # a filter is an argument from Python 3.11.4 on
        packed.extraction_filter = getattr(tarfile, "data_filter", None)
        packed.extractall(folder / "unpacked")
    [unpacked] = (folder / "unpacked").iterdir()
    return folder / _call_backend("build_wheel", unpacked, folder)


def _call_backend(hook: str, source: Path, folder: Path) -> str:
    """Call a hook of the build backend, whose version is locked; return the file's name."""
    command = [sys.executable, "-W", "ignore", "-c", _BUILD, hook, str(folder)]
    done = subprocess.run(command, cwd=source, check=False, capture_output=True, text=True)
    if done.returncode:
        raise ReleaseError(f"{hook} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout.splitlines()[-1]


def check_wheel(wheel: Path) -> None:
    """Check what an index and its readers see.

    Raises:
        ReleaseError: A file is missing, or the metadata is wrong.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        [path] = (name for name in names if name.endswith(".dist-info/METADATA"))
        text = archive.read(path)
    check_metadata(text)
    committed = subprocess.run(
        ["git", "ls-files", "nvt_torchrec"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()
    missing = sorted(set(committed) - names)
    if missing:
        raise ReleaseError(f"not in the wheel: {missing}; see package-data in pyproject.toml")


def check_metadata(text: bytes) -> None:
    """Check the fields of METADATA, and that other files name the same version.

    Raises:
        ReleaseError: A field is missing or wrong, or a file names another version.
    """
    metadata = Metadata.from_email(text, validate=True)
    for link in re.findall(r"\]\(([^)]*)\)", metadata.description or ""):
        if not link.startswith("https://"):
            raise ReleaseError(f"the description has the link {link}, which leads nowhere there")
    for name, url in (metadata.project_urls or {}).items():
        if not url.startswith("https://"):
            raise ReleaseError(f"the URL {name} is {url}: write an absolute one with https://")
    named = {
        line.rpartition(" ")[2]
        for line in message_from_bytes(text).get_all("Classifier") or ()
        if re.search(r":: Python :: 3\.\d+$", line)
    }
    allowed = set((metadata.requires_python or SpecifierSet()).filter(f"3.{n}" for n in range(30)))
    if named != allowed or named != set(PYTHONS):
        raise ReleaseError(
            f"classifiers name Python {sorted(named)}, requires-python allows {sorted(allowed)}, "
            f"a release is tried under {sorted(PYTHONS)}: let the three agree"
        )
    if "Typing :: Typed" not in (metadata.classifiers or ()):
        raise ReleaseError("the classifier `Typing :: Typed` is missing")
    versions = {
        "the wheel": str(metadata.version),
        "CHANGELOG.md, its first section": changelog_version(),
        "CITATION.cff": str(yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"]),
    }
    if len(set(versions.values())) > 1:
        raise ReleaseError(f"versions differ: {versions}")


def changelog_version() -> str:
    """Return the version of the newest section; "Unreleased" if it is that one."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    return re.findall(r"^## \[([^\]]+)\]", text, re.MULTILINE)[0]


def find_python(version: str) -> str | None:
    """Return an interpreter of a version that can make environments; None if there is none."""
    # pyenv has a program of each name, also of versions that are not selected.
    pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for program in (shutil.which(f"python{version}"), *map(str, pyenv)):
        code = f"import sys, venv, ensurepip; assert '%d.%d' % sys.version_info[:2] == '{version}'"
        if (
            program
            and not subprocess.run(
                [program, "-c", code], check=False, capture_output=True
            ).returncode
        ):
            return program
    return None


def readme_commands() -> list[str]:
    """Return the commands that README begins with, for clicks.csv."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.partition("## Your own log")[2].partition("\n## ")[0]
    return [
        line.partition("  #")[0].strip()
        for line in section.splitlines()
        if line.startswith("    nvt-")
    ]


def try_wheel(wheel: Path, python: str, folder: Path, *, everything: bool) -> None:
    """Install a wheel where nothing else is, and run README's first commands there.

    Args:
        wheel: The wheel.
        python: The interpreter of the new environment.
        folder: Where the environment and the commands' files go.
        everything: Install ``[cpu]`` and the packages that README adds; run all the commands.

    Raises:
        ReleaseError: A command failed.
    """
    bin_ = folder / "environment" / "bin"
    _run([python, "-m", "venv", str(bin_.parent)], ROOT)
    pip = [str(bin_ / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    pip += [f"--find-links={path}" for path in ("/opt/wheels",) if Path(path).is_dir()]
    _run([*pip, f"{wheel}[cpu]" if everything else str(wheel)], folder)
    if everything:
        readme = (ROOT / "README.md").read_text(encoding="utf-8")
        [apart] = re.findall(r"^    pip install --no-deps (torchrec==.*)$", readme, re.MULTILINE)
        _run([*pip, "--no-deps", *apart.split()], folder)
    shutil.copy(ROOT / "examples" / "clicks.csv", folder)
    commands = readme_commands()
    if not everything:
        commands = [line for line in commands if line.startswith(_BASE_COMMANDS)]
    # A stranger has no checkout on the path, and no GPU that these tests would take.
    _run(["env", "-u", "PYTHONPATH", "CUDA_VISIBLE_DEVICES=", f"PATH={bin_}:/usr/bin:/bin",
          "bash", "-ec", "\n".join(commands)], folder)  # fmt: skip
    if not (folder / "OUT" / "report.html").is_file():
        raise ReleaseError(f"README's commands wrote no report: {folder}/OUT")


def _run(command: list[str], directory: Path) -> None:
    done = subprocess.run(
        command,
        cwd=directory,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        tail = (done.stdout + done.stderr)[-3000:]
        raise ReleaseError(f"in {directory}, status {done.returncode}: {command}\n{tail}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ReleaseError as error:
        sys.exit(f"release: {error}")
