"""The locks, the environment that runs this test, environment.yml, the Makefile and .ci/run."""

import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.warm import warm_python

ROOT = Path(__file__).parents[1]
REQUIREMENTS = ROOT / "requirements"
PACKAGE = ROOT / "nvt_torchrec"
CPU_LOCK = "requirements/cpu.txt"
PIN = re.compile(r"([a-z0-9]+(?:-[a-z0-9]+)*)==([0-9][0-9a-z.]*)((?: --hash=sha256:[0-9a-f]{64})+)")
BEFORE = ("build.txt", "torch.txt", "cuda.txt")  # what is installed before a lock
GPU_ONLY_MODULES = {"cudf-cu13", "dask-cudf-cu13", "dask-cuda", "cupy-cuda13x", "rmm-cu13"}

#: Published requirements that the locks break on purpose: (whose, of what).
BROKEN_ON_PURPOSE = {
    ("merlin-core", "pandas"),  # pins <1.6; nvt_compat makes it run on 3.0
    ("merlin-core", "pynvml"),  # nvidia-ml-py gives the module of that name
    ("merlin-core", "dask-cuda"),  # on GPU machines only
    ("torchrec", "fbgemm-gpu"),  # fbgemm-gpu-cpu gives the same modules
    ("torchx", "urllib3"),  # pins <1.27, which gets no more fixes
}


def pins(name):
    """Return {package: version} of a requirements file; fail on what is no pin with digests."""
    found = {}
    text = re.sub(r" \\\n *", " ", (REQUIREMENTS / name).read_text())
    for line in text.splitlines():
        if line and not line.startswith("#"):
            match = PIN.fullmatch(line)
            assert match, f"{name}: {line!r} is no exact pin with digests: make lock"
            assert match[1] not in found, f"{name}: {match[1]} twice"
            found[match[1]] = match[2]
    return found


def installed():
    """The distributions of the environment; setuptools, once imported, adds copies of its own."""
    path = [folder for folder in sys.path if not folder.endswith("setuptools/_vendor")]
    found = {canonicalize_name(d.metadata["Name"]): d for d in metadata.distributions(path=path)}
    return {name: found[name] for name in sorted(found)}


def needs(distribution, extras=()):
    for line in distribution.requires or ():
        requirement = Requirement(line)
        environments = [{"extra": extra} for extra in ("", *extras)]
        if not requirement.marker or any(map(requirement.marker.evaluate, environments)):
            yield requirement


def brought_by_torch(packages):
    """Names of torch and of all that its metadata asks for, CUDA libraries included."""
    found, todo = {"torch"}, list(needs(packages["torch"]))
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        if name in packages and (name not in found or requirement.extras):
            found.add(name)
            todo += needs(packages[name], requirement.extras)
    return found


def has_gpu():
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return False
    return re.search(r"^GPU \d", listing.stdout, re.MULTILINE) is not None


def test_the_locks_agree_and_differ_only_by_rapids_and_fbgemm():
    cpu, gpu = pins("cpu.txt"), pins("gpu.txt")
    assert set(cpu) - set(gpu) == {"fbgemm-gpu-cpu"}
    assert set(gpu) - set(cpu) >= GPU_ONLY_MODULES | {"fbgemm-gpu"}
    assert gpu["fbgemm-gpu"] == cpu["fbgemm-gpu-cpu"]
    assert {k: v for k, v in cpu.items() if k in gpu} == {k: v for k, v in gpu.items() if k in cpu}


@pytest.mark.parametrize("lock", ["cpu.txt", "gpu.txt"])
def test_a_lock_leaves_out_what_is_installed_before_it(lock):
    before = {package for name in BEFORE for package in pins(name)}
    assert {"torch", "triton", "nvidia-cudnn-cu13"} < before
    assert not set(pins(lock)) & (before | {"pynvml"})


@pytest.mark.skipif(has_gpu(), reason="GPU machines have environments of their own")
def test_this_environment_is_the_cpu_lock():
    packages = installed()
    locked = pins("build.txt") | pins("torch.txt") | pins("cpu.txt")
    here = {name: d.version.partition("+")[0] for name, d in packages.items()}
    known = {*locked, *brought_by_torch(packages), "nvt-torchrec"}
    assert {name: here.get(name) for name in locked} == locked
    assert not set(here) - known, "installed, but in no lock: build the environment by `make env`"


@pytest.mark.skipif(has_gpu(), reason="GPU machines have environments of their own")
def test_nothing_is_missing_but_what_is_broken_on_purpose():
    packages = installed()
    broken = {
        (name, canonicalize_name(need.name))
        for name, distribution in packages.items()
        for need in needs(distribution)
        if (there := packages.get(canonicalize_name(need.name))) is None
        or not need.specifier.contains(there.version, prereleases=True)
    }
    assert broken == BROKEN_ON_PURPOSE


def test_environment_yml_installs_the_same_files():
    text = (ROOT / "environment.yml").read_text()
    conda = yaml.safe_load(text)["dependencies"]
    assert f"pip={pins('build.txt')['pip']}" in conda
    assert "python=3.11" in conda
    commands = re.findall(r"^#   pip install --no-deps (.*)$", text, re.MULTILINE)
    assert commands == [
        "--require-hashes -r requirements/build.txt",
        "--require-hashes -r requirements/torch.txt -r requirements/cuda.txt",
        "--require-hashes --no-build-isolation -r requirements/gpu.txt",
        "--no-build-isolation -e .",
    ]


def lines(name):
    """Requirements in a file that is written by hand, and in those that it includes."""
    for line in (REQUIREMENTS / name).read_text().splitlines():
        text = line.partition("#")[0].strip()
        if text.startswith("-r "):
            yield from lines(text.removeprefix("-r "))
        elif text:
            yield Requirement(text)


@pytest.mark.parametrize(
    "kind", ["build", "torch", "cuda", "cpu", "gpu", "tools", "docs", "coverage"]
)
def test_locks_are_resolved_from_what_is_written_by_hand(kind):
    locked = pins(f"{kind}.txt")
    before = {} if kind in ("build", "torch", "cuda") else pins("torch.txt")
    for need in lines(f"{kind}.in"):
        version = (before | locked).get(canonicalize_name(need.name), "none")
        assert version in [*need.specifier.filter([version])], f"{need}: run `make lock`"


def test_overrides_and_exclusions_are_what_is_broken_on_purpose():
    """uv resolves the locks: it keeps every other published requirement."""
    changed = {need.name for need in lines("overrides.in")}
    excluded = {need.name for need in lines("cpu-excludes.txt")}
    assert changed | excluded == {name for _, name in BROKEN_ON_PURPOSE}
    assert {need.name for need in lines("gpu-excludes.txt")} < excluded


def test_pip_refuses_another_file(tmp_path):
    """Where its digest is not the locked one; nothing is asked of the network."""
    (tmp_path / "torch-2.13.0-py3-none-any.whl").write_bytes(b"another")
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "--no-deps"]
    command += ["--ignore-installed"]
    command += [f"--find-links={tmp_path}", f"-r{REQUIREMENTS / 'torch.txt'}"]
    environment = {**os.environ, "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "DO NOT MATCH THE HASHES" in done.stderr


@pytest.mark.parametrize("document", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_files_and_names_in_documents_exist(document):
    text = (ROOT / document).read_text().partition("## Style")[0]
    paths = re.findall(r"`([a-z][\w/-]*/[\w./-]+\.(?:py|toml|txt|md))`", text)
    assert paths
    places = (ROOT, PACKAGE)
    gone = [p for p in paths if not any((x / p).exists() for x in places) and "NAME" not in p]
    assert not gone
    code = "".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    names = re.findall(r"`((?:[A-Z][a-z]+){2,}|[A-Z_]{6,})`", text)
    assert [name for name in names if not re.search(rf"\b{name}\b", code)] == []


# ------------------------------------------------------------------------------ Makefile, .ci/run


@pytest.fixture
def bin_dir(tmp_path):
    folder = tmp_path / "bin"
    folder.mkdir()
    return folder


@pytest.fixture
def run(tmp_path, bin_dir):
    """Run a command in the repository's root, with the programs of bin_dir first on the path."""

    def run(*command):
        path = f"{bin_dir}:{os.environ['PATH']}"
        environment = {"PATH": path, "HOME": str(tmp_path)}
        return subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )

    return run


def program(path, script):
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_the_lock_follows_the_gpu(run, bin_dir, tmp_path):
    program(bin_dir / "nvidia-smi", 'echo "Failed to initialize NVML: GPU access blocked"; exit 6')
    assert "-r requirements/cpu.txt" in run("make", "-n", "env", f"VENV={tmp_path}/v").stdout
    program(bin_dir / "nvidia-smi", 'echo "GPU 0: NVIDIA H200 (UUID: GPU-0)"')
    assert "-r requirements/gpu.txt" in run("make", "-n", "env", f"VENV={tmp_path}/v").stdout
    chosen = run("make", "-n", "env", f"VENV={tmp_path}/v", "LOCK=requirements/cpu.txt").stdout
    assert "-r requirements/cpu.txt" in chosen
    assert "gpu.txt" not in chosen


def test_each_file_of_the_gpu_tests_has_one(run):
    """pytest ends with status 5 where `-m gpu` selects nothing, so that test-gpu always failed."""
    recipe = run("make", "-n", "test-gpu").stdout
    patterns = re.search(r"for file in (.+?); do", recipe)[1].split()
    files = [str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern)]
    done = run(warm_python(), "-m", "pytest", "-m", "gpu", "--collect-only", *files)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {line.partition("::")[0] for line in done.stdout.split("\n") if "::" in line} == {*files}


def test_an_environment_is_built_again_when_it_must_be(run, tmp_path):
    venv, lock = tmp_path / "venv", tmp_path / "cpu.txt"
    shutil.copy(REQUIREMENTS / "cpu.txt", lock)

    def builds():
        done = run("make", "-n", "env", f"VENV={venv}", f"LOCK={lock}")
        assert done.returncode == 0, done.stderr
        return f"rm -rf {venv}" in done.stdout

    assert builds()
    venv.mkdir()
    (venv / "pyvenv.cfg").touch()
    assert builds()  # half built: not stamped
    (venv / "built-from-gpu.txt").touch()
    assert builds()  # from another lock
    (venv / "built-from-cpu.txt").touch()
    (venv / "linked").touch()
    assert not builds()
    after = (venv / "built-from-cpu.txt").stat().st_mtime + 10
    os.utime(lock, (after, after))
    assert builds()  # the lock is newer


def test_without_a_fitting_python_make_says_so_and_removes_nothing(run, bin_dir, tmp_path):
    venv = tmp_path / "venv"
    venv.mkdir()
    (venv / "mine").touch()
    program(bin_dir / "oldpython", "exit 1")
    done = run("make", "env", f"VENV={venv}", "PYTHON=oldpython no-such-python")
    assert done.returncode == 2
    assert "none of these is a Python 3.11 or 3.12 with venv: oldpython no-such" in done.stderr
    assert "PYTHON=/path/to/python3.11" in done.stderr
    assert (venv / "mine").exists()


@pytest.mark.parametrize(
    ("wheel", "refused", "installs"),
    [
        ("torch-2.13.0+cpu-cp311-cp311-linux.whl", True, ["--no-index"]),
        ("torch-2.13.0+cpu-cp311-cp311-linux.whl", False, ["--no-index"]),
        ("torch-2.13.0+cpu-cp312-cp312-linux.whl", False, [""]),
    ],
)
def test_a_wheel_of_pytorch_that_pip_refuses_ends_make(
    run, bin_dir, tmp_path, wheel, refused, installs
):
    """It does not install the CUDA build from the index instead."""
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / wheel).touch()
    fake = f"""
        case "$*" in
        "-m venv "*) mkdir -p $3/bin; cp $0 $3/bin/python ;;
        -c*) echo cp311 ;;
        *torch.txt*) case "$*" in *--no-index*) echo --no-index;; *) echo;; esac >> {tmp_path}/torch
            exit {int(refused)} ;;
        *-r*) echo other >> {tmp_path}/others ;;
        esac
    """
    program(bin_dir / "fakepython", fake)
    make = ("make", f"{tmp_path}/v/built-from-cpu.txt", "PYTHON=fakepython")
    done = run(*make, f"VENV={tmp_path}/v", f"WHEELS={tmp_path}/wheels", f"LOCK={CPU_LOCK}")
    assert (tmp_path / "torch").read_text().splitlines() == installs
    assert (done.returncode == 0) == (not refused)
    others = (tmp_path / "others").read_text().splitlines()
    assert len(others) == (1 if refused else 2)  # build.txt alone, or the lock too
    assert (tmp_path / "v" / "built-from-cpu.txt").exists() == (not refused)


@pytest.mark.parametrize(
    ("audit", "status", "said"),
    [
        ("echo 'a 1 could not be audited' > $7", 0, "1 could not be looked up"),
        ("sed 's/$/ could not be audited/' $2 > $7", 2, "NOTHING WAS CHECKED: the index has"),
        ("echo 'a 1 CVE-1' > $7; exit 1", 2, "a 1 CVE-1"),
        ("echo 'requests.exceptions.ConnectionError: no' >&2; exit 1", 2, "NOTHING WAS CHECKED"),
        ("echo 'no such option' >&2; exit 2", 2, "no such option"),
    ],
)
def test_an_audit_says_what_it_could_not_check(run, bin_dir, tmp_path, audit, status, said):
    program(bin_dir / "pip-audit", audit)
    (tmp_path / "built").touch()
    done = run("make", "audit", f"TOOLS={tmp_path / 'built'}", "AUDIT=pip-audit")
    assert done.returncode == status
    assert said in done.stdout
    if "NOTHING" in said:
        allowed = ("TOOLS=" + str(tmp_path / "built"), "AUDIT=pip-audit", "MAY_CHECK_NOTHING=1")
        assert run("make", "audit", *allowed).returncode == 0


def test_make_alone_lists_every_target(run):
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    listed = re.findall(r"^make ([a-z-]+) ", run("make").stdout, re.MULTILINE)
    assert listed == phony.split()


@pytest.mark.parametrize("fails", ["env", "lint", "test", "demo", "audit", "nothing"])
@pytest.mark.parametrize("newer", [True, False])
def test_ci_runs_every_step_and_stops_at_the_first_failure(run, bin_dir, tmp_path, fails, newer):
    program(bin_dir / "make", f'echo "$1 $2" >> {tmp_path}/called; test "$1" != {fails}')
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / f"torch-2.13.0-cp31{1 + newer}-linux.whl").touch()
    done = run("env", f"WHEELS={tmp_path}/wheels", str(ROOT / ".ci" / "run"))
    steps = ["env", "lint", "test", "demo", "audit"]
    called = [line.split()[0] for line in (tmp_path / "called").read_text().splitlines()]
    expected = steps[: steps.index(fails) + 1] if fails in steps else steps + ["test"] * newer
    assert called == expected
    assert (done.returncode == 0) == (fails == "nothing")
    if fails == "nothing":
        last = (tmp_path / "called").read_text().splitlines()[-1]
        assert last.strip() == ("test PYTHON=python3.12" if newer else "audit MAY_CHECK_NOTHING=1")
