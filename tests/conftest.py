"""One deployment with the default settings in float32 for the whole run, since a start takes seconds; and a caller for each test."""

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.deployment import Deployment, deployed
from tests.gateway import Gateway, calling


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def server() -> AsyncIterator[Deployment]:
    async with deployed() as deployment:
        yield deployment


@pytest_asyncio.fixture
async def gateway(server: Deployment) -> AsyncIterator[Gateway]:
    async with calling(server.base_url) as caller:
        yield caller
