"""What all tests share: one Dask cluster, and hypothesis' examples.

The examples are the same in every run, so that a change is not blamed for what it did not do;
``HYPOTHESIS_PROFILE=random`` looks for new ones.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("random", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


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
    from etl.engines.cluster import local_cluster

    with local_cluster(2, tmp_path_factory.mktemp("dask")) as client:
        yield client
