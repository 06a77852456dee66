"""Fixtures of the store's suites."""

import asyncio
import inspect

import pytest

from headrace.kvstore.names import chain, namespace
from headrace.kvstore.testing import FINGERPRINT, DaemonFixture, FakeFixture


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Coroutine tests run on a fresh event loop each; no plugin needed."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**arguments), 60))
    return True


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
