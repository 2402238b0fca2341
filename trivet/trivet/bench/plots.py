"""The plots, one for each command, of what its JSON file holds. Only this module knows matplotlib; it is loaded when a plot is wanted."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

Draw = Callable[[dict[str, Any], Path], None]


def draw_serve(content: dict[str, Any], file: Path) -> None:
    """By workload and server: output tokens a second, time to the first token and between tokens; whiskers reach to the 99th percentile."""
    figure = Figure(figsize=(12, 4), layout="constrained")
    rate, first, between = figure.subplots(1, 3)
    workloads = [each["name"] for each in content["workloads"]]
    servers = [each["name"] for each in content["servers"]]
    found = {(each["workload"], each["server"]): each["figures"] for each in content["medians"]}
    width = 0.8 / len(servers)
    for place, server in enumerate(servers):
        at = [index + width * (place - (len(servers) - 1) / 2) for index in range(len(workloads))]
        figures = [found[workload, server] for workload in workloads]
        rate.bar(at, [each["output_tokens_per_s"] for each in figures], width, label=server)
        for axes, series in ((first, "ttft_ms"), (between, "itl_ms")):
            middle = [each[series]["p50"] or 0.0 for each in figures]
            above = [(each[series]["p99"] or 0.0) - low for each, low in zip(figures, middle, strict=True)]
            axes.bar(at, middle, width, yerr=[[0.0] * len(at), above], capsize=2, label=server)
    for axes, title in ((rate, "output tokens/s"), (first, "TTFT, ms (to p99)"), (between, "ITL, ms (to p99)")):
        _finish(axes, title)
        axes.set_xticks(range(len(workloads)), workloads)
    figure.savefig(file, format="png", dpi=120)


def draw_limits(content: dict[str, Any], file: Path) -> None:
    """Reads by where they come from, products by format, bounds by workload and format."""
    figure = Figure(figsize=(12, 4), layout="constrained")
    reads, products, bounds = figure.subplots(1, 3)
    _bars(reads, "reads, GB/s", [(each["level"], f"{each['threads']} threads", each["gb_per_s"]) for each in content["reads"]])
    _bars(products, "products, Gop/s", [(each["format"], f"{each['threads']} threads", each["gops_per_s"]) for each in content["products"]])
    _bars(bounds, "bounds, total tokens/s", [(each["workload"], each["format"], each["total_tokens_per_s"]) for each in content["bounds"]])
    figure.savefig(file, format="png", dpi=120)


def draw_kernels(content: dict[str, Any], file: Path) -> None:
    """Products by rows as a share of what the machine can do, and whole steps by sequences and context."""
    figure = Figure(figsize=(12, 4), layout="constrained")
    products, steps = figure.subplots(1, 2)
    kinds = dict.fromkeys((each["format"], each["name"]) for each in content["products"])
    for form, name in kinds:
        mine = [each for each in content["products"] if (each["format"], each["name"]) == (form, name)]
        shares = [100 * max(each["read_share"], each["operations_share"]) for each in mine]
        products.plot([each["rows"] for each in mine], shares, marker="o", label=f"{form} {name}")
    decodes = [each for each in content["steps"] if each["new"] == 1 and each["seconds"] is not None]
    for form, context in dict.fromkeys((each["format"], each["context"]) for each in decodes):
        mine = [each for each in decodes if (each["format"], each["context"]) == (form, context)]
        milliseconds = [1e3 * each["seconds"] for each in mine]
        steps.plot([each["sequences"] for each in mine], milliseconds, marker="o", label=f"{form}, context {context}")
    products.set_xscale("log", base=2)
    for axes, title in ((products, "products: % of reads or of operations, by rows"), (steps, "decode step, ms, by sequences")):
        _finish(axes, title)
    figure.savefig(file, format="png", dpi=120)


def draw_scheduler(content: dict[str, Any], file: Path) -> None:
    """Tokens a second and CPU by requests that decode, and the core's time for a step by requests that run."""
    figure = Figure(figsize=(12, 4), layout="constrained")
    rate, cpu, core = figure.subplots(1, 3)
    service = content["service"]
    requests = [str(each["requests"]) for each in service]
    rate.bar(requests, [each["tokens"] / each["seconds"] for each in service])
    cpu.bar(requests, [1e3 * each["scheduler_cpu"] / max(1, each["steps"]) for each in service])
    core.bar([f"{each['running']} + {each['waiting']}" for each in content["core"]], [each["both_p50_ms"] for each in content["core"]])
    for axes, title in ((rate, "tokens/s, by requests"), (cpu, "CPU ms a step, by requests"), (core, "core, ms a step, running + waiting")):
        _finish(axes, title)
    figure.savefig(file, format="png", dpi=120)


def draw_frontend(content: dict[str, Any], file: Path) -> None:
    """Tokens a second and CPU by clients, streamed and whole."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    rate, cpu = figure.subplots(1, 2)
    kinds = [(str(each["concurrency"]), "stream" if each["streams"] else "whole", each) for each in content["frontend"]]
    _bars(rate, "tokens/s, by clients", [(clients, kind, each["tokens"] / each["seconds"]) for clients, kind, each in kinds])
    _bars(cpu, "CPU µs a token", [(clients, kind, 1e6 * each["frontend_cpu"] / max(1, each["tokens"])) for clients, kind, each in kinds])
    figure.savefig(file, format="png", dpi=120)


def _bars(axes: Axes, title: str, values: Sequence[tuple[str, str, float]]) -> None:
    """(group, series, height)."""
    groups, series = list(dict.fromkeys(group for group, _, _ in values)), list(dict.fromkeys(name for _, name, _ in values))
    width = 0.8 / len(series)
    for place, name in enumerate(series):
        found = [(groups.index(group), height) for group, owner, height in values if owner == name]
        at = [index + width * (place - (len(series) - 1) / 2) for index, _ in found]
        axes.bar(at, [height for _, height in found], width, label=name)
    axes.set_xticks(range(len(groups)), groups)
    _finish(axes, title)


def _finish(axes: Axes, title: str) -> None:
    axes.set_title(title)
    axes.grid(axis="y", alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")


PLOTS: Mapping[str, Draw] = {
    "serve": draw_serve,
    "limits": draw_limits,
    "kernels": draw_kernels,
    "scheduler": draw_scheduler,
    "frontend": draw_frontend,
}
