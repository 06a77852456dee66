"""Fixtures of the store's suites."""

import pytest

from headrace.kvstore.names import chain, namespace
from headrace.kvstore.testing import FINGERPRINT, DaemonFixture, FakeFixture


@pytest.fixture
def daemon(tmp_path):
    made = DaemonFixture(tmp_path)
    yield made
    made.close()


@pytest.fixture(params=["fake", "daemon"])
def node(request, tmp_path):
    made = FakeFixture() if request.param == "fake" else DaemonFixture(tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="session")
def names():
    """Enough names of one chain for any test."""
    return chain(namespace(FINGERPRINT, "tenant"), range(64 * 400))
