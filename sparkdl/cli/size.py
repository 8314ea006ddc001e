"""``sparkdl size``: what a step of a model would take under each strategy, on ranks that need not be there."""

from __future__ import annotations

import argparse
import math
import re
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from sparkdl.cli.words import add_command, plain_text
from sparkdl.errors import ConfigError, SparkdlError
from sparkdl.storage import size_text

_SHOWN = 3
_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_PAYLOAD = 1448 / 1538
"""The share of payload on an Ethernet cable: a frame of 1,538 bytes, with preamble and gap, holds 1,448 of TCP's."""
_PUBLISHED: dict[str, tuple[dict[int, float], str]] = {
    "BERT-large": (
        {1: 1.0, 2: 0.93, 4: 0.85, 8: 0.82},
        "data-parallel, by machines; as it is quoted, no page of its authors is at hand",
    ),
    "BERT 4B": (
        {8: 1.0, 16: 0.95, 32: 0.94, 64: 0.86, 128: 0.79},
        "A100, eight a machine, to one machine; docs.nvidia.com/nemo-framework/user-guide/latest/llms/bert",
    ),
    "ResNet-50": (
        {8: 1.0, 64: 0.63, 512: 0.41, 3584: 0.16},
        "H100, minutes to its accuracy with ever larger batches, to eight of them; MLPerf Training 3.0, mlcommons.org",
    ),
}
"""Efficiencies that others have published, of GPUs and links that are not the ones asked about, and of what."""


def add_commands(commands: Any) -> None:
    """Add it to the parser of ``sparkdl``."""
    size = add_command(commands, "size", _size, "estimate a step of a model under each strategy, and rank them")
    size.add_argument("model", metavar="MODEL", help="package.module:function that makes the model")
    size.add_argument(
        "--input",
        action="append",
        required=True,
        metavar="NAME=SHAPE",
        help="one row of an input, in the order of the arguments: x=13, image=3x32x32, words=32<1000 (integers)",
    )
    size.add_argument("--rows", type=int, default=1024, help="rows of a global batch (1024)")
    size.add_argument("--ranks", default="1,2,4,8", help="numbers of ranks (1,2,4,8)")
    size.add_argument("--bandwidth", default="10Gbit", help="of the links between hosts (10Gbit)")
    size.add_argument("--latency", default="50us", help="of a message between hosts (50us)")
    size.add_argument("--local-ranks", type=int, default=1, help="ranks of a host (1)")
    size.add_argument("--local-bandwidth", help="between ranks of a host; as between hosts if it is left out")
    size.add_argument("--memory", help="that a rank has, as in 16GiB; unlimited if it is left out")
    size.add_argument("--optimizer", choices=("adamw", "adam", "sgd"), default="adamw", help="(adamw)")
    size.add_argument("--device", default="cpu", help="what the model is measured on (cpu)")
    size.add_argument("--straggler", type=float, default=1.0, help="how many times as long one rank computes (1)")
    size.add_argument("--top", type=int, default=6, help="strategies to show for each number of ranks (6)")


def _size(options: argparse.Namespace, console: Console) -> int:
    import torch

    from sparkdl.pipeline.code import importable, imported
    from sparkdl.strategies.mesh_strategy import check_layers
    from sparkdl.strategies.planner import NOT_RANKED, Link, measure_model, rank_strategies

    ranks = _ranks(options.ranks)
    link = Link(bandwidth=_bandwidth("bandwidth", options.bandwidth), latency=_latency(options.latency))
    within = None
    if options.local_bandwidth:
        within = Link(bandwidth=_bandwidth("local-bandwidth", options.local_bandwidth), latency=link.latency)
    memory = math.inf if options.memory is None else _bytes("memory", options.memory)
    if options.rows < 1:
        raise ConfigError(f"--rows {options.rows} is no batch: give 1 or more")
    if not 1 <= options.straggler < math.inf:
        raise ConfigError(f"--straggler {options.straggler:g} is no slow rank: give 1 or more")
    for name, count in (("local-ranks", options.local_ranks), ("top", options.top)):
        if count < 1:
            raise ConfigError(f"--{name} {count} is no number of them: give 1 or more")
    with importable("."):
        function = imported(options.model, "MODEL")
        with _user_errors(f"{options.model}()", "let it make a torch.nn.Module without being given anything"):
            model = function()
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(f"{options.model}() returned a {type(model).__name__}: let it make a torch.nn.Module")
        with _user_errors(
            f"--input {' '.join(options.input)} of {options.rows:,} rows", "give sizes that fit in memory"
        ):
            inputs = [_input(text, options.rows) for text in options.input]
        names = [name for name, _ in inputs]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(f"--input names {twice!r} {names.count(twice)} times: give each input a name of its own")
        with _user_errors(f"--device {options.device}", "name one that torch has here, such as cpu"):
            model = model.to(options.device)
            example = {name: tensor.to(options.device) for name, tensor in inputs}
        optimizers = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}
        step_text = f"a step of {options.model} with --input {' '.join(options.input)}"
        with console.status("measuring the model"), _user_errors(step_text, "correct --input, or the model"):
            costs = measure_model(
                model, lambda made: optimizers[options.optimizer](made.parameters(), lr=1e-6), example, ranks=ranks
            )
    forward, backward = costs.seconds(costs.rows)
    console.print(
        f"{size_text(costs.parameter_bytes)} of parameters; {costs.rows:,} rows: forward {forward:.3g} s, backward "
        f"{backward:.3g} s, optimizer {costs.optimizer_seconds:.3g} s, activations "
        f"{size_text(costs.activation_bytes * costs.rows)}, {costs.flops * costs.rows:.3g} FLOP",
        highlight=False,
        soft_wrap=True,
    )
    fits = True
    for count in ranks:
        plan = rank_strategies(
            costs,
            link,
            count,
            check=lambda mesh: check_layers(mesh, model),
            memory_bytes=memory,
            within_host=within,
            local_ranks=options.local_ranks,
        )
        console.print(_table(plan, options.top))
        fits = fits and bool(plan.fitting)
        console.print(plain_text(plan.reason), soft_wrap=True)
        for strategy, why in list(plan.impossible.items())[:_SHOWN]:
            console.print(plain_text(f"{strategy} does not go: {textwrap.shorten(why, 160)}"), soft_wrap=True)
        if len(plan.impossible) > _SHOWN:
            console.print(f"nor do {len(plan.impossible) - _SHOWN} other meshes", highlight=False)
        for estimate in plan.others:
            why = NOT_RANKED[estimate.strategy]
            unranked = f"not ranked: {estimate.strategy}, {estimate.seconds:.3g} s a step, {why}"
            console.print(unranked, highlight=False, soft_wrap=True)
    console.print(
        f"\nall_reduce by simulation, {costs.rows:,} rows a rank, jitter {costs.jitter:.1%}; what others published:",
        highlight=False,
    )
    console.print(_scaling(costs, link, ranks, options.straggler))
    for name, (_, source) in _PUBLISHED.items():
        console.print(f"{name}: {source}", highlight=False, soft_wrap=True)
    return 0 if fits else 1


@contextmanager
def _user_errors(what: str, remedy: str) -> Iterator[None]:
    """Turn what the user's code raises inside the block into one sentence."""
    try:
        yield
    except SparkdlError:
        raise
    except Exception as error:  # of any type: it is torch's, or the user's own
        text = " ".join(str(error).split())
        raise ConfigError(f"{what} raised {type(error).__name__}: {text:.300}: {remedy}") from error


def _scaling(costs: Any, link: Any, ranks: list[int], straggler: float) -> Table:
    """``all_reduce`` on ever more ranks with as many rows each, by simulation, beside what others published."""
    from sparkdl.strategies.planner import simulate_copies

    powers = {1 << power for power in range(max(ranks).bit_length())}
    published = {count for values, _ in _PUBLISHED.values() for count in values}
    counts = sorted({*ranks, *(count for count in powers | published if count <= max(ranks))})
    table = Table(Column("ranks", justify="right"))
    for column in ("s a step", "efficiency", *_PUBLISHED):
        table.add_column(column, justify="right")
    alone = sum(costs.seconds(costs.rows)) + costs.optimizer_seconds
    for count in counts:
        seconds = simulate_copies(costs, link, count, straggler=straggler)
        published_cells = [f"{values[count]:.2f}" if count in values else "" for values, _ in _PUBLISHED.values()]
        table.add_row(f"{count:,}", f"{seconds:.3g}", f"{alone / seconds:.2f}", *published_cells)
    return table


def _table(plan: Any, top: int) -> Table:
    title = f"{plan.ranks} rank{'s' if plan.ranks > 1 else ''}"
    table = Table(Column("strategy", no_wrap=True), title=title, title_justify="left")
    for column in ("s a step", "rows/s", "efficiency", "sent a rank", "memory a rank"):
        table.add_column(column, justify="right")
    for estimate in [*plan.fitting[:top], *plan.too_large[: max(top - len(plan.fitting), 0)]]:
        fits = estimate in plan.fitting
        table.add_row(
            estimate.strategy + ("" if fits else " (too large)"),
            f"{estimate.seconds:.3g}",
            f"{estimate.rows_per_second:,.0f}",
            f"{estimate.efficiency:.2f}",
            size_text(estimate.sent_bytes),
            size_text(estimate.memory_bytes),
            style="" if fits else "dim",
        )
    return table


def _ranks(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ConfigError(f"--ranks {text} is no list of numbers of ranks: write it as in 2,4,8")
    return sorted({int(word) for word in words})


def _input(text: str, rows: int) -> tuple[str, Any]:
    """The name of an input, and made-up rows of it."""
    import torch

    match = re.fullmatch(r"([A-Za-z_]\w*)=(\d+(?:x\d+)*)(?:<(\d+))?", text)
    if match is None or (match[3] and not int(match[3])):
        raise ConfigError(f"--input {text} is no input: write x=13, image=3x32x32, or words=32<1000 for integers")
    name, shape, bound = match.groups()
    sizes = [rows, *map(int, shape.split("x"))]
    generator = torch.Generator().manual_seed(0)
    if bound is None:
        return name, torch.randn(sizes, generator=generator)
    return name, torch.randint(int(bound), sizes, generator=generator)


def _bandwidth(option: str, text: str) -> float:
    """Bytes of payload a second."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)bit(?:/s)?", text.lower())
    if match is None or not float(match[1]):
        raise ConfigError(f"--{option} {text} is no bandwidth: write it as in 10Gbit")
    return float(match[1]) * 1000.0 ** _UNITS[match[2]] / 8 * _PAYLOAD


def _latency(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(us|ms|s)", text.lower())
    if match is None:
        raise ConfigError(f"--latency {text} is no time: write it as in 50us")
    return float(match[1]) * _SECONDS[match[2]]


def _bytes(option: str, text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b", text.lower())
    if match is None or not float(match[1]):
        raise ConfigError(f"--{option} {text} is no size: write it as in 16GiB")
    return float(match[1]) * (1024.0 if match[3] else 1000.0) ** _UNITS[match[2]]
