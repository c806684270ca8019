"""What all tests share: their order, one Dask cluster, and hypothesis' examples.

The examples are the same in every run, so that a change is not blamed for what it did not do;
``HYPOTHESIS_PROFILE=random`` looks for new ones. Two things of hypothesis would make them depend on
the machine and on the order of the tests: a check of the time that an example takes, and constants
that it takes from whichever modules of this repository have been imported so far.
"""

from __future__ import annotations

import os

# Before anything imports torch, which reads them once, and for all processes that tests start:
# threads that spin between operations take six times the CPU of those that sleep, and two that
# share small operations more than one.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OMP_NUM_THREADS", "1")

# isort: split
import gc
import logging
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from tests.warm import VARIABLE, start, warm_python

_PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "same")
_OF_TIME = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("same", derandomize=True, **_OF_TIME)
settings.register_profile("random", **_OF_TIME)
settings.load_profile(_PROFILE)
if _PROFILE == "same":
    assert hasattr(providers, "_get_local_constants")  # hypothesis has no setting for it
    providers._get_local_constants = lambda: providers._local_constants  # none are ever added

#: Files that take most CPU come first, the longest before the others: at the end, one process would
#: run them while the other has nothing to do.
_LONG = (
    "tests/test_examples.py",
    "tests/test_daily_docs.py",
    "tests/test_runbook.py",
    "tests/etl/test_resume.py",
    "tests/etl/test_extend_killed.py",
    "tests/etl/test_dask.py",
    "tests/training/test_resume.py",
    "tests/demo/test_demo.py",
    "tests/training/test_own_scale.py",
    "tests/test_notebook.py",
    "tests/estimator/test_conventions.py",
    "tests/training/test_histories.py",
    "tests/training/test_plans.py",
    "tests/training/test_own_model.py",
    "tests/inference/test_export.py",
    "tests/training/test_train.py",
    "tests/estimator/test_fit.py",
    "tests/test_simulator.py",
    "tests/training/test_continue.py",
    "tests/inference/test_histories.py",
    "tests/inference/test_workers.py",
    "tests/inference/test_follow.py",
    "tests/test_wheel.py",
)
#: The module that gives a rank its threads.
_RANKS = "nvt_torchrec.training.launch.distributed"
_TURNS = {name: turn for turn, name in enumerate(_LONG)}


def pytest_configure(config: pytest.Config) -> None:
    """Let the processes of ``-n`` share one server of warm programs; it imports while they do."""
    if config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput"):
        os.environ[VARIABLE] = start()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put long files first. The order of the others, and that within a file, stays."""
    items.sort(key=lambda item: _TURNS.get(item.nodeid.partition("::")[0], len(_TURNS)))


def pytest_collection_finish() -> None:
    """Prepare for many small things.

    Garbage is not looked for in what was imported: a million objects, which takes half a second. A
    model is trained by one thread, as by the programs of ``warm.py``.
    """
    gc.freeze()
    if _RANKS in sys.modules:  # of a test file; to import it takes seconds
        sys.modules[_RANKS].count_cores = lambda: 1


@pytest.fixture
def warm_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes in which publish tries bundles have imported; see ``warm.py``."""
    monkeypatch.setattr(sys, "executable", warm_python())


@pytest.fixture(autouse=True)
def unlimited_logs() -> Iterator[None]:
    """Undo what a server in this process does to pytest's handlers: it limits the rate of logs."""
    yield
    for handler in logging.getLogger().handlers:
        for limit in [found for found in handler.filters if type(found).__name__ == "RateLimit"]:
            handler.removeFilter(limit)


@pytest.fixture(scope="session")
def dask_client(tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    """A client of two worker processes; not Dask's default client unless a test makes it so."""
    from nvt_torchrec.etl.engines.cluster import local_cluster

    with local_cluster(2, tmp_path_factory.mktemp("dask"), frames=True) as client:
        yield client
