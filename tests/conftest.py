"""One Dask cluster for all tests that need one: starting it takes seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def dask_client(tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    """A client of two worker processes; not Dask's default client unless a test makes it so."""
    from etl.cluster import local_cluster

    with local_cluster(2, tmp_path_factory.mktemp("dask")) as client:
        yield client
