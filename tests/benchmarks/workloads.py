"""Four closed-loop workloads against a running gateway, as the figures of `docs/performance.md` are made.

    .venv/bin/trivet serve --port 8000 &
    .venv/bin/python -m tests.benchmarks.workloads --url http://127.0.0.1:8000 --runs 2

W1  1 stream,   128 tokens in,             128 out     one person talks
W2  16 streams, 256 in,                     64 out     a small crowd
W3  8 streams,  1024 shared + 32 of own,    32 out     one system prompt for all
W4  2 streams,  3000 in,                    32 out     long documents

Prompts are random token ids, new ones for every run, so that no prefix cache answers but where W3 shares. Requests are greedy and ignore
the end token. TTFT, ITL and TPOT are taken on the client's clock; run nothing else meanwhile.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from dataclasses import dataclass, field

import httpx

COMMON_IDS = range(3000, 12000)


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    concurrency: int
    requests: int
    shared_tokens: int
    own_tokens: int
    output_tokens: int


WORKLOADS = (
    Workload("W1", 1, 4, 0, 128, 128),
    Workload("W2", 16, 48, 0, 256, 64),
    Workload("W3", 8, 32, 1024, 32, 32),
    Workload("W4", 2, 4, 0, 3000, 32),
)


@dataclass(slots=True)
class Exchange:
    """Seconds of one request."""

    ttft: float = 0.0
    gaps: list[float] = field(default_factory=list)
    end_to_end: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0

    @property
    def tpot(self) -> float:
        return (self.end_to_end - self.ttft) / max(1, self.output_tokens - 1)


async def exchange(client: httpx.AsyncClient, body: dict[str, object]) -> Exchange:
    """One streamed completion."""
    result, started, last = Exchange(), time.perf_counter(), 0.0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise SystemExit(f"HTTP {response.status_code}: {(await response.aread()).decode()[:300]}")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            now, event = time.perf_counter(), json.loads(line.removeprefix("data: "))
            if event.get("usage"):
                usage = event["usage"]
                result.prompt_tokens, result.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
                result.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            if any(choice.get("text") for choice in event["choices"]):
                if last:
                    result.gaps.append(now - last)
                else:
                    result.ttft = now - started
                last = now
    result.end_to_end = time.perf_counter() - started
    return result


async def run(url: str, workload: Workload, seed: int) -> tuple[float, list[Exchange]]:
    """Keep `concurrency` requests in flight until all were sent; returns wall seconds and the exchanges."""
    rng = random.Random(f"{workload.name} {seed}")
    shared = rng.choices(COMMON_IDS, k=workload.shared_tokens)
    bodies = iter(
        [
            {
                "prompt": shared + rng.choices(COMMON_IDS, k=workload.own_tokens),
                "max_tokens": workload.output_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            for _ in range(workload.requests)
        ]
    )
    done: list[Exchange] = []
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:

        async def one_after_the_other() -> None:
            for body in bodies:
                done.append(await exchange(client, body))

        started = time.perf_counter()
        await asyncio.gather(*(one_after_the_other() for _ in range(workload.concurrency)))
        return time.perf_counter() - started, done


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def describe(workload: Workload, wall: float, done: list[Exchange]) -> str:
    out, prompt = sum(e.output_tokens for e in done), sum(e.prompt_tokens for e in done)
    gaps, first = [gap for e in done for gap in e.gaps], [e.ttft for e in done]
    rates = f"{out / wall:7.1f} | {(out + prompt) / wall:7.0f}"
    ttft = f"{1e3 * statistics.median(first):7.0f} | {1e3 * percentile(first, 0.99):7.0f}"
    itl = f"{1e3 * statistics.median(gaps):6.1f} | {1e3 * percentile(gaps, 0.99):7.1f}"
    tpot = f"{1e3 * statistics.median(e.tpot for e in done):6.1f}"
    return f"{workload.name} | {rates} | {ttft} | {itl} | {tpot} | {sum(e.cached_tokens for e in done):6d}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--only", default="W1,W2,W3,W4", help="workloads, separated by commas")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    warm_up = Workload("warm-up", 2, 4, 0, 64, 8)
    asyncio.run(run(arguments.url, warm_up, arguments.seed))
    print("   |   out/s | total/s | TTFT 50 | TTFT 99 | ITL 50 |  ITL 99 |  TPOT  | cached")
    for workload in WORKLOADS:
        for index in range(arguments.runs if workload.name in arguments.only.split(",") else 0):
            wall, done = asyncio.run(run(arguments.url, workload, arguments.seed + index))
            print(describe(workload, wall, done), flush=True)


if __name__ == "__main__":
    main()
