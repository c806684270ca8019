"""The supported combinations of packages, in one table, checked before they are imported.

The check reads the metadata of the installed packages without importing them, which takes
milliseconds. Without it, an unsupported combination fails inside a C++ extension, or later, with
wrong values. A version is supported if its first parts are those of the version in the table; a
local suffix (``2.13.0+cpu``, ``2.13.0+cu130``) is ignored.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from importlib import metadata
from typing import Any, TypeAlias

from nvt_torchrec.base.errors import IS_CHECKOUT, ClickLogError

#: Name of a package -> its version, or None if it is not installed.
VersionLookup: TypeAlias = Callable[[str], str | None]

#: PyTorch, FBGEMM and TorchRec are built for each other, so all three must be from one row.
TRAINING = (
    {"torch": "2.13", "fbgemm-gpu": "1.8", "torchrec": "1.8"},
    {"torch": "2.11", "fbgemm-gpu": "1.6", "torchrec": "1.6"},
)
#: The package of FBGEMM for machines without a GPU, which has the same modules.
FBGEMM_CPU = "fbgemm-gpu-cpu"

#: The versions that ``nvt_compat`` was written for.
ETL = {
    "nvtabular": "23.8",
    "merlin-core": "23.8",
    "merlin-dataloader": "23.8",
    "dask": "2026.7",
    "distributed": "2026.7",
    "pandas": "3.0",
    "numpy": "2",
}
#: Packages that pip cannot install together with the rest, because their pins contradict it.
_APART = "torchrec==1.8.0 nvtabular==23.8.0 merlin-core==23.8.0 merlin-dataloader==23.8.0"
#: The argument of pip for this project: a file, because anybody may register its name.
_PACKAGE = "/PATH/OF/nvt_torchrec-….whl"
#: Packages that only one feature needs, with the extra that installs them.
_EXTRAS = {
    **dict.fromkeys(("onnx_ir", "onnxscript"), "onnx"),
    **dict.fromkeys(("httptools", "onnx", "onnxruntime"), "serve"),
    **dict.fromkeys(("prometheus_client", "starlette", "uvicorn"), "serve"),
    "sklearn": "estimator",
    "optuna": "tune",
}  # fmt: skip
#: The extra that installs torch, by the room that needs it.
_TORCH_EXTRAS = {"inference": "serve"}
#: RAPIDS, checked only if it is installed.
RAPIDS = {"cudf-cu13": "26.10", "dask-cudf-cu13": "26.10", "dask-cuda": "26.10"}


class UnsupportedStackError(ClickLogError, ImportError):
    """Installed packages outside the supported table."""


@functools.cache  # to read and parse a package's metadata takes milliseconds
def find_installed_version(name: str) -> str | None:
    """Return the version of an installed package, or None, without importing it."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def import_name(module: str, name: str) -> Any:
    """Import a module of this project, and return one of its names.

    Raises:
        UnsupportedStackError: The module needs a package that is not installed.
    """
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        raise make_missing_error(error, module) from None


def make_missing_error(error: ModuleNotFoundError, module: str) -> ImportError:
    """Return the error for a package that is not installed.

    Args:
        error: The error that names the package. It is returned unchanged if it names a module of
            this project.
        module: The module of this project that was imported.
    """
    package = (error.name or "").partition(".")[0]
    if package in ("", "nvt_torchrec"):
        return error
    extras = _EXTRAS | {"torch": _TORCH_EXTRAS.get(module.split(".")[1], "")}
    extra = extras.get(package)
    remedy = f"run `{_find_install_command(find_installed_version)}`"
    if extra and not IS_CHECKOUT:  # the lock files of a checkout include all extras
        remedy = f"run `pip install '{_PACKAGE}[{extra}]'`"
    return UnsupportedStackError(f"the package {package} is not installed", remedy)


def check_training_stack(version: VersionLookup = find_installed_version) -> None:
    """Raise :class:`UnsupportedStackError` unless PyTorch, FBGEMM and TorchRec match each other."""
    fbgemm = FBGEMM_CPU if version(FBGEMM_CPU) else "fbgemm-gpu"
    names = ("torch", fbgemm, "torchrec")
    installed = {name: version(name) for name in names}
    rows = [dict(zip(names, row.values(), strict=True)) for row in TRAINING]
    supported = ", or ".join(_list_versions(row) for row in rows)
    install = _find_install_command(version)
    if fbgemm == FBGEMM_CPU and version("fbgemm-gpu"):  # each overwrites files of the other
        installed["fbgemm-gpu"] = version("fbgemm-gpu")
        remedy = f"pip uninstall --yes fbgemm-gpu {FBGEMM_CPU} && {install}"
        raise _make_error(installed, supported, remedy)
    for row in rows:
        if all(_fits(installed[name], wanted) for name, wanted in row.items()):
            return
    raise _make_error(installed, supported, install)


def check_etl_stack(version: VersionLookup = find_installed_version) -> None:
    """Raise :class:`UnsupportedStackError` unless ``nvt_compat`` supports the installed packages.

    The packages are NVTabular, Merlin, Dask, pandas and NumPy, and RAPIDS where it is installed.
    """
    wanted = ETL | {name: row for name, row in RAPIDS.items() if version(name)}
    wrong = {name: row for name, row in wanted.items() if not _fits(version(name), row)}
    if wrong:
        installed = {name: version(name) for name in wrong}
        raise _make_error(installed, _list_versions(wrong), _find_install_command(version))


def _fits(installed: str | None, wanted: str) -> bool:
    """Return whether a version begins with another: ``23.08.0+x`` with ``23.8``, not ``23.80``."""
    parts = (installed or "").split("+")[0].split(".")
    numbers = [part.lstrip("0") or "0" for part in parts]
    expected = wanted.split(".")
    return numbers[: len(expected)] == expected


def _list_versions(versions: dict[str, str]) -> str:
    """Format packages and their versions for an error."""
    return " + ".join(f"{name} {version}" for name, version in versions.items())


def _make_error(
    installed: dict[str, str | None], supported: str, command: str
) -> UnsupportedStackError:
    """Return the error for packages that are not supported.

    Args:
        installed: The installed versions of the packages; None for one that is not installed.
        supported: The supported versions.
        command: The command that installs them.
    """
    found = " + ".join(f"{name} {it}" if it else f"no {name}" for name, it in installed.items())
    remedy = f"run `{command}`"
    if IS_CHECKOUT:
        remedy += ", or `make env` for a new .venv"
    return UnsupportedStackError(
        f"unsupported packages: found {found}; supported: {supported}", remedy
    )


def _find_install_command(version: VersionLookup) -> str:
    """Return the command that installs supported packages, for a GPU if any installed one is."""
    kind = "gpu" if version("fbgemm-gpu") or version("cudf-cu13") else "cpu"
    return make_install_command(kind)


def make_install_command(kind: str) -> str:
    """Return the command that installs the packages of ``cpu`` or ``gpu``."""
    if not IS_CHECKOUT:
        return f"pip install '{_PACKAGE}[{kind}]' && pip install --no-deps {_APART}"
    first = "pip install --no-deps -r requirements/build.txt -r requirements/torch.txt"
    if kind == "gpu":
        first += " -r requirements/cuda.txt"
    return f"{first} && pip install --no-deps --no-build-isolation -r requirements/{kind}.txt"
