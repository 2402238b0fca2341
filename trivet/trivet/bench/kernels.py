"""Time the native products, attention and whole decoder steps at a model's shapes, beside what the machine can do at most.

  trivet bench kernels                                   the embedded default model, its products in every format
  trivet bench kernels --formats bfloat16,q4_1 --only products,attention
  trivet bench kernels --only steps --formats bfloat16   the table that shows whether a step's time grows linearly

Products: a model's layers one after the other, so that no cache holds them, for so many rows. Attention: 16 sequences of 4000 tokens that
decode, with keys and values beyond the last cache, as a share of the measured reads; a chunk of 512 tokens behind 2488, as a share of the
measured products. Steps: so many sequences that decode with so much context each, and prompts in one step. Times are the best of --rounds.
"""

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trivet_chassis.cores import check_threads, usable_cores
from trivet_chassis.settings import check_native_variables
from trivet_kernels.cpu.library import NotBuilt, instruction_set
from trivet_kernels.cpu.limits import MIB, Effort, LimitFormat, product_rate, read_rate
from trivet_kernels.cpu.timing import TIMED_FORMATS, StepPart, StepTimer, TimedShape, attention_shape, product_time
from trivet_proto.errors import ErrorKind, TrivetError, invalid

from trivet.bench.flags import numbers, words
from trivet.bench.machine.bounds import FORMATS, Limits
from trivet.bench.machine.caches import cache_bytes
from trivet.bench.machine.model_dimensions import ModelDimensions, read_dimensions
from trivet.bench.report import check_outputs, draw, number, progress_bar, show_table, write_json

PARTS = ("products", "attention", "steps")
KINDS = {"float32": LimitFormat.FLOAT32, "bfloat16": LimitFormat.BFLOAT16, "int8": LimitFormat.INT8}
BEYOND_CACHE = 2
"""Times the last cache: so much of keys and values is read that none of it is still there the next time."""


@dataclass(frozen=True, slots=True)
class Product:
    format: str
    name: str
    rows: int
    seconds: float  # of one weight
    gb_per_s: float
    read_share: float
    gops_per_s: float
    operations_share: float


@dataclass(frozen=True, slots=True)
class Attention:
    what: str
    layers: int
    seconds: float  # of one layer
    gb_per_s: float
    read_share: float
    gops_per_s: float
    operations_share: float


@dataclass(frozen=True, slots=True)
class Step:
    format: str
    sequences: int
    context: int
    new: int  # tokens of each sequence
    seconds: float | None  # None: keys and values would not fit into --memory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="", metavar="PATH", help="folder or GGUF file; the embedded default")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="as many as cores")
    parser.add_argument("--formats", type=words, default=list(TIMED_FORMATS), metavar="NAMES", help=", ".join(TIMED_FORMATS))
    parser.add_argument("--only", type=words, default=list(PARTS), metavar="NAMES", help=", ".join(PARTS))
    parser.add_argument("--rows", type=numbers, default=[1, 4, 16, 64, 256, 2048], help="of activations")
    parser.add_argument("--sequences", type=numbers, default=[1, 2, 4, 8, 16, 32, 64], help="of steps that decode")
    parser.add_argument("--contexts", type=numbers, default=[128, 512, 2000, 4000, 8000], help="tokens of each sequence")
    parser.add_argument("--prompts", type=numbers, default=[64, 128, 256, 512, 1024, 2048], help="tokens of a prompt in one step")
    parser.add_argument("--attention-sequences", type=int, default=16)
    parser.add_argument("--attention-context", type=int, default=4000)
    parser.add_argument("--memory", type=int, metavar="MIB", help="for keys and values of steps; half of what is free")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="needs matplotlib")


def run(arguments: argparse.Namespace) -> int:
    check_native_variables(os.environ)
    for flag, given, known in (("--formats", arguments.formats, TIMED_FORMATS), ("--only", arguments.only, PARTS)):
        for name in given:
            if name not in known:
                raise invalid(f"{flag} {name} is not known: there are {', '.join(known)}")
    for name in ("threads", "attention_sequences", "attention_context", "rounds", "memory"):
        if getattr(arguments, name) is not None and getattr(arguments, name) <= 0:
            raise invalid(f"--{name.replace('_', '-')} {getattr(arguments, name)}: more than 0 is wanted")
    check_threads(arguments.threads, "--threads")
    check_outputs(arguments.json, arguments.plot)
    model = read_dimensions(arguments.model)
    try:
        limits = measured_limits(arguments.threads, arguments.rounds)
        products = measure_products(model, limits, arguments) if "products" in arguments.only else []
        attention = measure_attention(model, limits, arguments) if "attention" in arguments.only else []
        steps = measure_steps(model, arguments) if "steps" in arguments.only else []
    except (NotBuilt, MemoryError, ValueError) as reason:  # all three say in words what this machine or model cannot have
        raise TrivetError(ErrorKind.FAILED_PRECONDITION, str(reason)) from reason
    show(products, attention, steps, limits)
    content: dict[str, Any] = {
        "instruction_set": instruction_set(),
        "threads": arguments.threads,
        "model": asdict(model),
        "limits": {"read": limits.read, "operations": dict(limits.operations)},
        "products": [asdict(each) for each in products],
        "attention": [asdict(each) for each in attention],
        "steps": [asdict(each) for each in steps],
    }
    write_json(arguments.json, "kernels", content)
    draw("kernels", content, arguments.plot)
    return 0


def measured_limits(threads: int, rounds: int) -> Limits:
    memory = min(1 << 30, max(256 * MIB, 2 * cache_bytes()[1]))
    return Limits(
        read=read_rate(threads, memory // threads, Effort(rounds)),
        operations={name: product_rate(threads, kind, Effort(5 * rounds)) for name, kind in KINDS.items()},
    )


def measure_products(model: ModelDimensions, limits: Limits, arguments: argparse.Namespace) -> list[Product]:
    forms = {form.name: form for form in FORMATS}
    found = []
    with progress_bar(len(arguments.formats) * len(model.products) * len(arguments.rows)) as bar:
        for form in arguments.formats:
            best = max(limits.operations[kind] for kind in forms[form].multiplied_as)
            for name, (out, into) in model.products.items():
                # As many as in the model, so that they come out of memory where the model's do; of the head there is one.
                copies = 1 if name == "head" else model.layers
                for rows in arguments.rows:
                    bar.describe(f"{form} {name} × {rows}")
                    timed = product_time(form, out, into, rows, copies=copies, threads=arguments.threads, rounds=arguments.rounds)
                    read, operations = timed.weight_bytes / timed.seconds, timed.operations / timed.seconds
                    found.append(
                        Product(
                            form, name, rows, timed.seconds / copies, read / 1e9, read / limits.read, operations / 1e9, operations / best
                        )
                    )
                    bar.advance()
    return found


def measure_attention(model: ModelDimensions, limits: Limits, arguments: argparse.Namespace) -> list[Attention]:
    decode = StepPart(arguments.attention_sequences, arguments.attention_context)
    prefill = StepPart(1, max(0, 3000 - 512), 512)
    layer_bytes = 4 * model.kv_heads * model.head_size * decode.sequences * decode.context  # bfloat16
    layers = min(model.layers, -(-BEYOND_CACHE * cache_bytes()[1] // layer_bytes))
    timer = StepTimer(attention_shape(_shape(model, "bfloat16"), layers), [decode, prefill], threads=arguments.threads)
    found = []
    for what, part in (("decode", decode), ("prefill", prefill)):
        seconds = timer.attention_seconds(part, arguments.rounds) / layers
        seen = sum(part.context + 1 + place for place in range(part.new))
        read = 4 * model.kv_heads * model.head_size * part.sequences * (part.context + part.new) / seconds
        operations = part.sequences * 4 * model.heads * model.head_size * seen / seconds
        name = f"{what}: {part.sequences} × {part.new} tokens behind {part.context}"
        shares = (read / limits.read, operations / max(limits.operations["bfloat16"], limits.operations["float32"]))
        found.append(Attention(name, layers, seconds, read / 1e9, shares[0], operations / 1e9, shares[1]))
    return found


def measure_steps(model: ModelDimensions, arguments: argparse.Namespace) -> list[Step]:
    most = arguments.memory * MIB if arguments.memory is not None else _free_memory() // 2
    decodes = [StepPart(sequences, context) for context in arguments.contexts for sequences in arguments.sequences]
    parts = [*decodes, *(StepPart(1, 0, tokens) for tokens in arguments.prompts)]
    fitting = [part for part in parts if 2 * model.kv_values() * part.sequences * (part.context + part.new + 16) <= most]
    if not fitting:
        raise invalid(f"--memory {most // MIB}: not even the smallest step fits into it")
    found = []
    with progress_bar(len(arguments.formats) * len(parts)) as bar:
        for form in arguments.formats:
            bar.describe(f"packing {form}")
            timer = StepTimer(_shape(model, form), fitting, threads=arguments.threads)
            for part in parts:
                bar.describe(f"{form} {part.sequences} × {part.new} behind {part.context}")
                seconds = timer.seconds(part, arguments.rounds) if part in fitting else None
                found.append(Step(form, part.sequences, part.context, part.new, seconds))
                bar.advance()
    return found


def _shape(model: ModelDimensions, form: str) -> TimedShape:
    return TimedShape(
        layers=model.layers,
        hidden=model.hidden,
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_size=model.head_size,
        inner=model.inner,
        vocab=model.vocab,
        format=form,
        cache="float32" if form == "float32" else "bfloat16",
    )


def show(products: Sequence[Product], attention: Sequence[Attention], steps: Sequence[Step], limits: Limits) -> None:
    rates = ", ".join(f"{name} {rate / 1e9:.0f}" for name, rate in limits.operations.items())
    print(f"the machine: reads {limits.read / 1e9:.1f} GB/s; products Gop/s: {rates}\n")
    columns = ["µs", "GB/s", "of reads", "Gop/s", "of products"]

    def shares(each: Product | Attention) -> list[str]:
        read, operations = f"{100 * each.read_share:.0f} %", f"{100 * each.operations_share:.0f} %"
        return [number(1e6 * each.seconds), number(each.gb_per_s), read, number(each.gops_per_s, 0), operations]

    if products:
        rows = [[each.format, each.name, str(each.rows), *shares(each)] for each in products]
        show_table("products, each weight", ["format", "weight", "rows", *columns], rows)
    if attention:
        show_table("attention, each layer, bfloat16", ["what", *columns], [[each.what, *shares(each)] for each in attention])
    decodes, prompts = [each for each in steps if each.new == 1], [each for each in steps if each.new > 1]
    for form in dict.fromkeys(each.format for each in steps):
        mine = [each for each in decodes if each.format == form]
        widths = list(dict.fromkeys(each.sequences for each in mine))
        rows = [
            [str(context), *(_milliseconds(each.seconds) for each in mine if each.context == context)]
            for context in dict.fromkeys(each.context for each in mine)
        ]
        show_table(f"decode steps, {form}, ms, by context and sequences", ["context", *map(str, widths)], rows)
        show_table(
            f"prompts in one step, {form}",
            ["tokens", "ms", "µs/token"],
            [
                [str(each.new), _milliseconds(each.seconds), number(None if each.seconds is None else 1e6 * each.seconds / each.new)]
                for each in prompts
                if each.format == form
            ],
        )
    if any(each.seconds is None for each in steps):
        print("–: keys and values of so many tokens would take more than --memory\n")


def _milliseconds(seconds: float | None) -> str:
    return number(None if seconds is None else 1e3 * seconds, 2)


def _free_memory() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
