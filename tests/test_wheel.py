"""The wheel and the editable installation, used from a project with an `etl/` of its own."""

from __future__ import annotations

import email
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import numpy
import pytest
from packaging.requirements import Requirement

import nvt_torchrec

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGE = ROOT / "nvt_torchrec"
ROOMS = tuple(sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py")))
#: What pip cannot install together with the rest; README.md says how to add it.
APART = {"torchrec", "nvtabular", "merlin-core", "merlin-dataloader"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the files in this checkout, built without a network."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "train_torchrec.py"):
        shutil.copy(ROOT / name, source)
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("demo", "benchmarks", PACKAGE.name):
        shutil.copytree(ROOT / name, source / name, ignore=ignored, symlinks=True)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps"]
    command += ["--no-build-isolation", f"--wheel-dir={folder}", str(source)]
    subprocess.run(command, check=True)
    [built] = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path) -> Path:
    """Its programs: the locked packages, and this project from the wheel alone."""
    environment = wheel.parent / "environment"
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    command = [sys.executable, "-m", "pip", f"--python={python}", "install", "--quiet"]
    subprocess.run([*command, "--no-index", "--no-deps", str(wheel)], check=True)
    [packages] = environment.glob("lib/python3*/site-packages")
    # What this checkout has compiled, which takes half a minute.
    for file in PACKAGE.rglob("*.nb[ic]"):
        folder = packages / file.parent.relative_to(ROOT)
        folder.mkdir(exist_ok=True)
        shutil.copy(file, folder)
    # The .pth files in a folder that is named in a .pth file do not count: no editable install.
    (packages / "locked.pth").write_text(f"{Path(numpy.__file__).parents[1]}\n")
    return environment / "bin"


def run(*command: object, cwd: Path) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_is_in_the_wheel(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.split("/")[0] for name in names}
    assert tops == {PACKAGE.name, f"nvt_torchrec-{nvt_torchrec.__version__}.dist-info"}
    data = {".py", ".toml", ".css", ".html", ".json"}
    for path in PACKAGE.rglob("*"):
        if path.suffix in data:
            assert str(path.relative_to(ROOT)) in names
    assert {f"{PACKAGE.name}/train_torchrec.py", f"{PACKAGE.name}/py.typed"} <= names


def test_its_description_needs_no_checkout(wheel: Path) -> None:
    """It is README, whose files are named and not linked, as a page of the wheel has none."""
    with zipfile.ZipFile(wheel) as archive:
        [name] = (name for name in archive.namelist() if name.endswith("/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    assert metadata["Description-Content-Type"] == "text/markdown"
    text = metadata.get_payload(decode=True).decode()
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.split("\n", 1)[0] == readme.split("\n", 1)[0]
    assert len(text) > 0.9 * len(readme)
    assert not re.findall(r"\]\((?!https?://)", text)
    assert "](docs/" in readme
    for file in re.findall(r"\]\((docs/\w+\.md)", readme):
        assert file in text


_USE = """
import sys
import nvt_torchrec
from nvt_torchrec import Encoder, KJTLoader, Predictor, Scorer, run
from nvt_torchrec.workflows import compiled
from nvt_torchrec.workflows.description import inspect

assert "nvt_torchrec.nvt_compat" not in sys.modules
for batch in KJTLoader("out/criteo_binary/split/train", 128, rank=0, world_size=1):
    assert batch.labels.shape == (128,), batch.labels.shape
    break
workflow = nvt_torchrec.load("out/workflow", label=False)
assert compiled.load("out/workflow", verify=True).digest == inspect("out/workflow").digest
print(nvt_torchrec.__version__, nvt_torchrec.__file__, type(workflow).__module__)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with packages of the names of ours, which must not be imported instead of ours."""
    for room in ROOMS:
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").write_text("raise ImportError('the wrong package')\n")
    return tmp_path


def test_another_project_uses_it(environment: Path, project: Path) -> None:
    """The commands, the loader and the saved workflow of the wheel; the checkout is found, too."""
    synthesize = ("synthesize", "--output_path", "raw", "--days", 2, "--rows_per_day", 500)
    run(environment / "nvt-etl", *synthesize, cwd=project)
    etl = ("run", "--input_path", "raw", "--output_path", "out", "--engine", "cpu")
    run(environment / "nvt-etl", *etl, cwd=project)
    assert "<style" in (project / "out" / "report.html").read_text()
    (project / "use.py").write_text(_USE)
    version, file, kind = run(environment / "python", "use.py", cwd=project).split()
    assert (version, kind) == (nvt_torchrec.__version__, "nvt_torchrec.workflows.store")
    assert Path(file).is_relative_to(environment.parent)
    (project / "use.py").write_text("import nvt_torchrec.etl.run as ours; print(ours.__file__)")
    assert run(sys.executable, "use.py", cwd=project).startswith(str(ROOT))  # --editable


_LOAD = "from nvt_torchrec.workflows import compiled; compiled.load('x')"


def test_commands_are_named_as_they_are_called(environment: Path, tmp_path: Path) -> None:
    """In help, errors, and the commands to run next."""
    rows = (f"{int(i % 7 == 0)},item{i % 11},shop{i % 5}\n" for i in range(300))
    (tmp_path / "log.csv").write_text("click,item,shop\n" + "".join(rows))
    spec = tmp_path / "spec.toml"
    for program, flags, expected in (
        ("nvt-etl", ["extend", "--help"], "the OUT of a finished `nvt-etl run`"),
        ("nvt-etl", ["guess", "log.csv", "--output", spec], f"nvt-etl run --spec {spec} --input_"),
        ("nvt-infer", ["publish", "--help"], "made by `nvt-infer bundle`"),
        ("nvt-train", ["--help"], "dist.ddp -j 1x8 -m nvt_torchrec.train_torchrec -- FLAGS"),
        ("python", ["-c", _LOAD], "`nvt-etl run`"),
    ):
        command = [str(environment / program), *map(str, flags)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        text = " ".join((done.stdout + done.stderr).split())
        assert expected in text
        assert "python -m etl" not in text
        assert "python -m inference" not in text


def requirements() -> dict[str, list[Requirement]]:
    """Requirements of the wheel, by extra; those of none under the empty string."""
    lines = {"": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}
    return {extra: [Requirement(line) for line in given] for extra, given in lines.items()}


def with_extras(extra: str) -> dict[str, Requirement]:
    found = {need.name: need for need in (*requirements()[""], *requirements()[extra])}
    for included in found.pop("nvt-torchrec", Requirement("x")).extras:
        found |= with_extras(included)
    return found


@pytest.mark.parametrize("lock", ["cpu", "gpu"])
def test_extras_ask_for_what_is_locked(lock: str) -> None:
    names = (f"{lock}.txt", "torch.txt")
    text = "".join((ROOT / "requirements" / name).read_text() for name in names)
    pins = dict(re.findall(r"^([a-z0-9-]+)==([^ \\\n]+)", text, re.MULTILINE))
    for name, need in with_extras(lock).items():
        assert need.specifier.contains(pins[name]), f"{need}, and {lock}.txt has {pins[name]}"


def test_no_extra_asks_for_packages_that_pip_cannot_combine() -> None:
    assert not APART & with_extras("cpu").keys()
    assert APART & with_extras("gpu").keys() == {"torchrec"}  # wants fbgemm-gpu, as a GPU does
    readme = (ROOT / "README.md").read_text()
    [command] = re.findall(r"^    pip install --no-deps (torchrec==.*)$", readme, re.MULTILINE)
    locked = (ROOT / "requirements" / "cpu.txt").read_text()
    assert {pin.split("==")[0] for pin in command.split()} == APART
    assert all(f"{pin} \\\n" in locked for pin in command.split())
