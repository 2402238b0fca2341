"""Deployments for the whole run, since a start takes seconds: one with the default settings in float32, and a caller of it for each test;
and one that computes no more than two tokens a step."""

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


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def in_twos() -> AsyncIterator[str]:
    """Where a prompt comes in chunks of two tokens."""
    async with deployed("--max-num-batched-tokens", "2", "--num-kv-blocks", "400") as deployment:
        yield deployment.base_url
