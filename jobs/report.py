"""The HTML report of a run: one file that needs nothing beside it.

Enters: the run's record. Leaves: ``report.html`` with the figures in it.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jobs.plots import Group, draw_curves, draw_groups, draw_sample, draw_stages
from jobs.record import RunRecord, summary_lines
from sparkdl.storage import Storage

__all__ = ["report_html", "write_report"]

CSS = """
:root { color-scheme: light; }
body { font: 15px/1.5 "Helvetica Neue", Arial, "Liberation Sans", sans-serif; color: #1f2937; background: #f8fafc;
  margin: 0 auto; max-width: 1120px; padding: 28px 24px 60px; }
h1 { font-size: 24px; margin: 0 0 2px; } h2 { font-size: 17px; margin: 34px 0 10px; }
.sub { color: #6b7280; margin: 0 0 20px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(162px, 1fr)); gap: 12px; }
.card, figure, .panel { background: #fff; border: 1px solid #e5e7eb; border-radius: 8px; }
.card { padding: 12px 16px; } .card b { display: block; font-size: 22px; line-height: 1.25; }
.card span { color: #6b7280; font-size: 13px; }
table:has(td.number) { width: auto; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(480px, 1fr)); gap: 16px; }
figure { margin: 0; padding: 12px; } figure svg { width: 100%; height: auto; display: block; }
.panel { padding: 4px 16px; overflow-x: auto; }
table { border-collapse: collapse; width: 100%; } td { padding: 5px 14px 5px 0; vertical-align: top; }
tr + tr td { border-top: 1px solid #f1f5f9; } td:first-child { white-space: nowrap; font-weight: 600; }
td.number { text-align: right; padding-left: 40px; font-variant-numeric: tabular-nums; }
details { margin-top: 14px; } pre { font-size: 12px; overflow-x: auto; }
"""


def write_report(record: RunRecord, place: str) -> str:
    """Write the report to ``place`` (a path or URI), atomically; return the place.

    Raises:
        StorageError: it cannot be written there.
    """
    Storage.of(place).write_atomic(report_html(record).encode())
    return place


def report_html(record: RunRecord) -> str:
    """Return the report as one HTML document without links to anything; what the record lacks is left out.

    Besides the sections of the record, its ``results`` are drawn:
        ``history``: rows of epochs with ``loss`` and ``val_loss``, square minutes.
        ``evaluation``: ``sample``, pairs of true and predicted minutes; ``by_hour`` and ``by_zone``, rows with ``key``
            (an id), ``rows``, ``bias`` and ``rmse``.
        ``etl``: ``zones``, names by id.
    """
    title = f"{record.settings.get('name', record.job)}: {record.status}"
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        f'<p class="sub">{html.escape(_origin(record))}</p>',
        f'<div class="cards">{"".join(_cards(record))}</div>',
        f'<h2>Figures</h2><div class="figures">{"".join(_figures(record))}</div>',
        f"<h2>Summary</h2>{_table(summary_lines(record))}",
    ]
    if record.rows and record.rows.reasons:
        reasons = sorted(record.rows.reasons.items(), key=lambda item: -item[1])
        parts.append(f"<h2>Quarantined rows by reason</h2>{_table((k, f'{v:,}') for k, v in reasons)}")
    for name, content in (("Settings", record.settings), ("Versions", record.versions), ("Results", record.results)):
        text = html.escape(json.dumps(content, indent=1, default=str, ensure_ascii=False))
        parts.append(f"<details><summary>{name}</summary><pre>{text}</pre></details>")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{CSS}</style></head>'
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _origin(record: RunRecord) -> str:
    code = record.versions.get("code", "unknown")
    return f"{record.job} {record.run_id}, started {record.started_at}, {record.seconds:.1f} s, code {code}"


def _cards(record: RunRecord) -> Iterable[str]:
    if record.quality:
        quality = record.quality
        yield _card(f"{quality.rmse:.3f} min", "RMSE on held-out days")
        if quality.above_floor is not None:
            yield _card(f"{100 * quality.above_floor:+.1f} %", f"against the noise floor {quality.floor_rmse:.3f} min")
        if quality.mean_rmse is not None:
            yield _card(
                f"{quality.mean_rmse / quality.rmse:.1f} x", f"better than the mean ({quality.mean_rmse:.1f} min)"
            )
    if record.training:
        yield _card(f"{record.training.rows_per_second:,.0f}", "rows/s in training")
    if record.publication:
        moved = "is the champion" if record.publication.alias_moved else f"champion stays {record.publication.champion}"
        yield _card(f"version {record.publication.version}", moved)
    if record.rows:
        yield _card(f"{record.rows.written:,}", f"feature rows of {record.rows.read:,} read")


def _card(value: str, caption: str) -> str:
    return f'<div class="card"><b>{html.escape(value)}</b><span>{html.escape(caption)}</span></div>'


def _figures(record: RunRecord) -> Iterable[str]:
    history, found = record.results.get("history"), record.results.get("evaluation", {})
    drawn = []
    if history:
        drawn.append(draw_curves(history, record.quality, record.training.best_epoch if record.training else None))
    if found.get("sample"):
        days = record.quality.days if record.quality else []
        drawn.append(draw_sample(found["sample"], " and ".join(days[:: max(1, len(days) - 1)]) or "held-out days"))
    if found.get("by_hour"):
        hours = [_group(row, str(int(row["key"]) - 1)) for row in sorted(found["by_hour"], key=lambda row: row["key"])]
        drawn.append(draw_groups("Residuals by hour", "hour of the pick-up (UTC)", hours))
    if found.get("by_zone"):
        drawn.append(_zones(found["by_zone"], record.results.get("etl", {}).get("zones", {})))
    if record.stages:
        drawn.append(draw_stages(record.stages))
    for number, svg in enumerate(drawn):
        # ids inside an SVG are global to the page: two figures with one clip path id would cut each other
        yield f"<figure>{_own_ids(svg, number)}</figure>"


def _zones(rows: Sequence[Mapping[str, float]], names: Mapping[Any, str], most: int = 14) -> str:
    """Draw the zones with the most rides; the others stand together as one."""
    ordered = sorted(rows, key=lambda row: -row["rows"])
    known = {int(key): name for key, name in names.items()} | {0: "unknown"}
    groups = [_group(row, known.get(int(row["key"]), f"zone {row['key']}")) for row in ordered[:most]]
    rest = ordered[most:]
    if rest:
        count = sum(row["rows"] for row in rest)
        bias = sum(row["bias"] * row["rows"] for row in rest) / count
        square = sum(row["rmse"] ** 2 * row["rows"] for row in rest) / count
        groups.append(Group(name=f"{len(rest)} others", rows=int(count), bias=bias, rmse=math.sqrt(square)))
    labelled = [replace(group, name=f"{group.name} ({group.rows:,})") for group in groups]
    return draw_groups("Residuals by pick-up zone", "pick-up zone (rides)", labelled, slanted=True)


def _group(row: Mapping[str, float], name: str) -> Group:
    return Group(name=name, rows=int(row["rows"]), bias=row["bias"], rmse=row["rmse"])


def _own_ids(svg: str, number: int) -> str:
    for mark in ('id="', "url(#", 'href="#'):
        svg = svg.replace(mark, f"{mark}f{number}-")
    return svg


def _table(rows: Iterable[tuple[str, str]]) -> str:
    def cell(value: str) -> str:
        kind = ' class="number"' if value.replace(",", "").isdigit() else ""
        return f"<td{kind}>{html.escape(value)}</td>"

    body = "".join(f"<tr><td>{html.escape(name)}</td>{cell(value)}</tr>" for name, value in rows)
    return f'<div class="panel"><table>{body}</table></div>'
