"""What `trivet bench serve` prints and writes: medians over runs, ratios of the first server to each other one, start-up and memory."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from trivet.bench.load.figures import SERIES, SHARES, Figures, medians
from trivet.bench.report import number, show_table
from trivet.bench.serve_run import Order, Run
from trivet.bench.server_under_test import Server

Medians = Mapping[tuple[str, str], Mapping[str, Any]]
"""By workload and server."""

RATES = ("output_tokens_per_s", "total_tokens_per_s")
TIMES = tuple((f"{series}_ms", share) for series in ("ttft", "itl", "tpot") for share in ("p50", "p99"))


def medians_of(order: Order, runs: Sequence[Run]) -> Medians:
    return {
        (workload.name, plan.name): medians(figures_of(runs, workload.name, plan.name))
        for workload in order.workloads
        for plan in order.servers
    }


def figures_of(runs: Sequence[Run], workload: str, server: str) -> list[Figures]:
    return [run.figures for run in runs if run.workload == workload and run.server == server]


def ratios(order: Order, middle: Medians) -> list[dict[str, Any]]:
    """The first server's median over another's, by workload: above 1 is good for rates, below 1 for times."""
    first, *others = order.servers
    rows = []
    for workload in order.workloads:
        ours = middle[workload.name, first.name]
        for other in others:
            theirs = middle[workload.name, other.name]
            row: dict[str, Any] = {"workload": workload.name, "server": first.name, "against": other.name}
            row |= {rate: _ratio(ours[rate], theirs[rate]) for rate in RATES}
            row |= {f"{series}_{share}": _ratio(ours[series][share], theirs[series][share]) for series, share in TIMES}
            rows.append(row)
    return rows


def _ratio(ours: float | None, theirs: float | None) -> float | None:
    return ours / theirs if ours is not None and theirs else None


def as_json(order: Order, servers: Sequence[Server], runs: Sequence[Run]) -> dict[str, Any]:
    middle = medians_of(order, runs)
    return {
        "seed": order.seed,
        "runs_each": order.runs,
        "loop": "closed" if order.arrivals is None else {"rate": order.arrivals.rate, "burst": order.arrivals.burst},
        "slo_ms": None if order.objective is None else dict(order.objective.limits_ms),
        "workloads": [asdict(workload) for workload in order.workloads],
        "servers": [
            {
                "name": server.name,
                "url": server.url,
                "model": server.model,
                "ready_s": server.ready_s,
                "processes": [asdict(each) for each in server.footprints.values()],
                "pss_mib": sum(each.pss_mib for each in server.footprints.values()) if server.footprints else None,
            }
            for server in servers
        ],
        "runs": [{"server": run.server, "workload": run.workload, "run": run.index, "figures": run.figures.as_json()} for run in runs],
        "medians": [{"workload": workload, "server": server, "figures": figures} for (workload, server), figures in middle.items()],
        "ratios": ratios(order, middle),
    }


def show(order: Order, servers: Sequence[Server], runs: Sequence[Run]) -> None:
    middle = medians_of(order, runs)
    columns = ["workload", "server", "out/s", "total/s", *(f"{series.upper()} {share}" for series in SERIES for share in SHARES)]
    columns += ["cached", "failed", "client"] + (["goodput", "good/s"] if order.objective is not None else [])
    show_table(
        f"medians of {order.runs} runs, times in ms; client: its share of a core; seed {order.seed}",
        columns,
        [_row(workload, server, figures, columns) for (workload, server), figures in middle.items()],
    )
    for reason in sorted({reason for run in runs for reason in run.figures.failures})[:5]:
        print(f"failed: {reason}")
    if len(order.servers) > 1:
        names = ["out/s", "total/s", *(f"{series.removesuffix('_ms').upper()} {share}" for series, share in TIMES)]
        show_table(
            "ratios of the medians",
            ["workload", "of", *names],
            [[row["workload"], f"{row['server']} ÷ {row['against']}", *_numbers(row)] for row in ratios(order, middle)],
        )
    for server in servers:
        if server.ready_s is not None:
            pss = sum(each.pss_mib for each in server.footprints.values())
            print(f"{server.name}: first answer {server.ready_s:.2f} s after its start; {pss:.0f} MiB in all (sum of the largest PSS seen)")
            for each in server.footprints.values():
                print(f"  {each.name}: PSS {each.pss_mib:.0f} MiB, peak resident (VmHWM) {each.peak_rss_mib:.0f} MiB")


def _row(workload: str, server: str, figures: Mapping[str, Any], columns: Sequence[str]) -> list[str]:
    row = [workload, server, number(figures["output_tokens_per_s"]), number(figures["total_tokens_per_s"], 0)]
    row += [number(figures[f"{series}_ms"][share]) for series in SERIES for share in SHARES]
    row += [number(figures["cached_tokens"], 0), str(figures["failed"]), f"{100 * figures['client_core_share']:.1f} %"]
    if "goodput" in columns:
        row += [f"{100 * figures['goodput_share']:.0f} %", number(figures["goodput_per_s"], 2)]
    return row


def _numbers(row: Mapping[str, Any]) -> list[str]:
    return [number(value, 3) for name, value in row.items() if name not in ("workload", "server", "against")]
