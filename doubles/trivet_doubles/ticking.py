"""Tasks that live and end together."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any


async def until_first_ends(*works: Coroutine[Any, Any, None], names: Sequence[str]) -> None:
    """Run `works` side by side until one of them ends; the others are cancelled. Raises what that one raised."""
    tasks = [asyncio.create_task(work, name=name) for work, name in zip(works, names, strict=True)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if not task.cancelled():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
