"""The tables and pictures of docs/distribute.md, made of the results in docs/distribute.json.

``python tests/bench/pages.py LOG...`` takes over the JSON lines that benches printed into logs, in the place of those
that there are of the same workloads, and writes tables and pictures anew; without logs it only does the latter. What
stands on the page between two marks is written here, the rest by hand.
"""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
PAGE, RESULTS = DOCS / "distribute.md", DOCS / "distribute.json"
WORKLOADS = ("distribute", "slow_link", "compile", "baselines")
SPEEDS = {"100mbit": "0.1", "1gbit": "1"}  # Gbit/s
MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def lines_of(text):
    """The JSON lines of a log that the page is about."""
    # pytest's dot may stand before one
    lines = [json.loads(line.lstrip(".")) for line in text.splitlines() if line.lstrip(".").startswith('{"workload"')]
    return [line for line in lines if line["workload"] in WORKLOADS]


def taken_over(lines, new):
    """Results with those of a workload replaced; of the slow link, those of a rate."""

    def group(line):
        return line["workload"], line.get("rate")

    renewed = {group(line) for line in new}
    kept = [line for line in lines if group(line) not in renewed]
    return sorted([*kept, *new], key=lambda line: WORKLOADS.index(line["workload"]))


def table(header, rows):
    """Markdown; of None nothing is said."""
    cells = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join('' if cell is None else str(cell) for cell in row)} |\n" for row in cells)


def megabytes(count):
    """Bytes as MB, two digits of small ones."""
    return f"{count / 1e6:.2f}" if count < 1e7 else f"{count / 1e6:.1f}"


def way_of(line):
    """What a line of the benchmark of models is called."""
    return f"`{line['compression'] or line['strategy']}`"


# --- tables -------------------------------------------------------------------------------------------------------


def models_table(lines):
    """One table a model, with columns for 2 and 4 ranks."""
    text = ""
    for model in dict.fromkeys(line["model"] for line in lines):
        by_size = {
            size: {way_of(line): line for line in lines if line["model"] == model and line["ranks"] == size}
            for size in (1, 2, 4)
        }
        alone = by_size[1]["`all_reduce`"]
        text += f"\n**{model}**, {alone['parameters']:,} parameters. One rank: {alone['rows_per_second']:,} rows/s, "
        text += f"{megabytes(alone['state_bytes'])} MB, {alone['steps_to_target']} steps "
        text += f"to a loss of {alone['target']}.\n\n"
        rows = []
        for way in dict.fromkeys((*by_size[2], *by_size[4])):
            of_way = [by_size[size].get(way, {}) for size in (2, 4)]
            columns = [
                [f"{line['rows_per_second']:,}", f"{line['processor_milliseconds_per_step']:.0f}",
                 megabytes(line["sent_bytes_per_step"]), megabytes(line["state_bytes"]),
                 line["steps_to_target"] or "not reached"] if "rows_per_second" in line
                else ["refused" if line else "no"] * 5
                for line in of_way
            ]  # fmt: skip
            rows.append([way, *(f"{two} / {four}" for two, four in zip(*columns, strict=True))])
        names = ("rows/s", "processor ms a step", "MB sent a step", "MB held", "steps")
        text += table(["", *(f"{name}, 2 / 4 ranks" for name in names)], rows)
    return text


def slow_link_table(lines):
    """One table a rate."""
    text = ""
    for rate in dict.fromkeys(line["rate"] for line in lines):
        of_rate = {line["way"]: line for line in lines if line["rate"] == rate}
        steps = of_rate["all_reduce"]["steps"]
        rows = []
        for way, line in of_rate.items():
            # Ranks that step by themselves may meet a little later.
            step, _, loss = next((look for look in line["curve"] if look[0] >= steps), (steps, None, None))
            since = line["beats_all_reduce_from_second"]
            beside = "stays above" if since is None else f"below from {since:.1f} s on" if since else "below throughout"
            row = [f"`{way}`", megabytes(line["sent_bytes_per_step"]), f"{line['milliseconds_per_step']:.0f}"]
            row += [line["steps"], line["last_loss"], loss if step == steps else f"{loss} (step {step})"]
            rows.append([*row, line["seconds_to_loss_of_all_reduce"], "" if way == "all_reduce" else beside])
        text += f"\n**{SPEEDS[rate]} Gbit/s**\n\n"
        header = ["", "MB sent a step", "ms a step", "steps", "last loss", f"loss at step {steps}"]
        text += table([*header, "s to all-reduce's last loss", "its least loss so far, beside all-reduce's"], rows)
    return text


def compile_table(lines):
    """One row a network, task and kind of shapes."""
    rows = [
        [line["network"], f"{line['task']}, {line['rows']} rows", line["shapes"], line["compilation_seconds"],
         line["eager_milliseconds"], line["compiled_milliseconds"],
         f"{line['break_even_steps']:,}" if line["break_even_steps"] is not None else "never",
         line["other_rows_seconds"]]
        for line in lines
    ]  # fmt: skip
    header = ["network", "step of one thread", "shapes", "s to compile", "ms eager", "ms compiled", "pays after steps"]
    return "\n" + table([*header, "s of a batch of another size"], rows)


def baselines_table(lines):
    """One row a way, the line first."""
    rows = [
        [line["model"], line["way"], line["seconds"], "0" if not (d := line["largest_difference"]) else f"{d:.0e}"]
        for line in lines
    ]
    return "\n" + table(["", "way", "seconds", "largest difference"], rows)


TABLES = {
    "models": ("distribute", models_table),
    "slow_link": ("slow_link", slow_link_table),
    "compile": ("compile", compile_table),
    "baselines": ("baselines", baselines_table),
}


def filled(page, lines):
    """The text of the page with its tables made of ``lines``."""

    def written(match):
        workload, make = TABLES[match[2]]
        of_table = [line for line in lines if line["workload"] == workload]
        loads = [line["load"] for line in of_table]
        others = (
            f"\nMeasured at load averages of {min(loads):.0f} to {max(loads):.0f} on {of_table[0]['cores']} cores.\n\n"
        )
        return match[1] + make(of_table) + others + match[3]

    return MARKED.sub(written, page)


# --- pictures -----------------------------------------------------------------------------------------------------


def save(figure, file):
    """Write a picture of few colours, which is small."""
    from matplotlib import pyplot
    from PIL import Image

    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=80)
    pyplot.close(figure)
    Image.open(buffer).convert("RGB").quantize(128).save(file, optimize=True)


def draw_what_ranks_hold(file):
    """Which parts of the states of a model of four layers lie on each of four ranks, by strategy."""
    from matplotlib import patches, pyplot

    colours = {"parameters": "#4c72b0", "gradients": "#dd8452", "optimizer state": "#55a868"}
    heights = {"parameters": 1.0, "gradients": 1.0, "optimizer state": 2.0}
    whole, rows, columns = "whole", "rows", "columns"
    ways = {
        "all_reduce, local_sgd": ((whole, whole, whole), "own rows; all hold all"),
        "zero1": ((whole, whole, rows), "own rows; optimizer state is cut"),
        "zero2": ((whole, columns, columns), "own rows; gradients are cut, too"),
        "fsdp": ((columns, columns, columns), "own rows; a layer is gathered when its turn comes"),
        "tensor": ((columns, columns, columns), "the same rows; a layer is computed in parts"),
        "pipeline": ((rows, rows, rows), "the same rows, a few at a time; a layer each"),
    }
    figure, panels = pyplot.subplots(2, 3, figsize=(11, 6.2), constrained_layout=True)
    for panel, (way, (cuts, reads)) in zip(panels.flat, ways.items(), strict=True):
        for rank in range(4):
            bottom = 0.0
            for (state, height), cut in zip(list(heights.items())[::-1], cuts[::-1], strict=True):
                panel.add_patch(patches.Rectangle((rank * 1.25, bottom), 1, height, fill=False, edgecolor="0.8"))
                part = {
                    whole: (rank * 1.25, bottom, 1, height),
                    rows: (rank * 1.25, bottom + height * (3 - rank) / 4, 1, height / 4),
                    columns: (rank * 1.25 + rank / 4, bottom, 0.25, height),
                }[cut]
                label = state if rank == 0 else None
                panel.add_patch(patches.Rectangle(part[:2], *part[2:], color=colours[state], label=label, linewidth=0))
                for layer in (1, 2, 3):
                    edge = bottom + height * layer / 4
                    panel.plot([rank * 1.25, rank * 1.25 + 1], [edge, edge], color="white" if cut == whole else "0.85")
                bottom += height + 0.15
            panel.text(rank * 1.25 + 0.5, -0.35, f"rank {rank}", ha="center", fontsize=8)
        panel.set(xlim=(-0.1, 4.85), ylim=(-0.5, 4.4), xticks=[], yticks=[])
        panel.set_title(f"{way}\n", fontsize=11, fontweight="bold")
        panel.text(0.5, 1.02, reads, transform=panel.transAxes, ha="center", fontsize=8.5)
        panel.set_frame_on(False)
    handles, labels = panels.flat[0].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside lower center", ncols=3, frameon=False)
    save(figure, file)


def draw_models(lines, file):
    """Bytes held by a rank and sent in a step, of four ranks, by model and strategy."""
    from matplotlib import pyplot

    lines = [
        line for line in lines if line["workload"] == "distribute" and line["ranks"] == 4 and "refused" not in line
    ]
    models = list(dict.fromkeys(line["model"] for line in lines))
    ways = list(dict.fromkeys(map(way_of, lines)))[::-1]
    figure, panels = pyplot.subplots(2, len(models), figsize=(11, 6.6), constrained_layout=True, sharey=True)
    for column, model in enumerate(models):
        of_model = {way_of(line): line for line in lines if line["model"] == model}
        for row, (name, title) in enumerate(
            [("state_bytes", "MB that a rank holds"), ("sent_bytes_per_step", "MB that a rank sends in a step")]
        ):
            panel = panels[row][column]
            values = [of_model[way][name] / 1e6 if way in of_model else 0 for way in ways]
            panel.barh([way.strip("`") for way in ways], values, color=("#4c72b0", "#dd8452")[row])
            panel.set_title(f"{model}: {title}", fontsize=9)
            panel.tick_params(labelsize=8)
            panel.grid(axis="x", alpha=0.3)
    save(figure, file)


def draw_slow_link(lines, file):
    """Loss on rows held out, by steps and by seconds, a row of panels for each rate."""
    from matplotlib import pyplot

    lines = [line for line in lines if line["workload"] == "slow_link"]
    rates = list(dict.fromkeys(line["rate"] for line in lines))
    figure, panels = pyplot.subplots(
        len(rates), 2, figsize=(11, 4 * len(rates)), constrained_layout=True, squeeze=False
    )
    for row, rate in enumerate(rates):
        of_rate = [line for line in lines if line["rate"] == rate]
        for number, line in enumerate(of_rate):
            steps, seconds, losses = zip(*line["curve"], strict=True)
            style = (
                {"color": "black", "linewidth": 2.5} if line["way"] == "all_reduce" else {"color": f"C{number % 10}"}
            )
            style["linestyle"] = "--" if "(every" in line["way"] or line["way"] == "diloco" else "-"
            panels[row][0].plot(steps, losses, label=line["way"], **style)
            panels[row][1].plot(seconds, losses, label=line["way"], **style)
        for panel, by in zip(panels[row], ("steps", "seconds"), strict=True):
            panel.set(xlabel=by, ylabel="loss on rows held out", title=f"{SPEEDS[rate]} Gbit/s, by {by}")
            panel.grid(alpha=0.3)
        panels[row][0].set_xlim(0, 2 * next(line["steps"] for line in of_rate if line["way"] == "all_reduce"))
    panels[0][1].legend(fontsize=8)
    save(figure, file)


def main(logs):
    import matplotlib

    matplotlib.use("Agg")
    lines = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    lines = taken_over(lines, [line for log in logs for line in lines_of(Path(log).read_text())])
    RESULTS.write_text("[\n" + ",\n".join(map(json.dumps, lines)) + "\n]\n")
    PAGE.write_text(filled(PAGE.read_text(), lines))
    draw_what_ranks_hold(DOCS / "what_ranks_hold.png")
    draw_models(lines, DOCS / "distribute.png")
    draw_slow_link(lines, DOCS / "slow_link.png")


if __name__ == "__main__":
    main(sys.argv[1:])
