"""The HTML report of a run: ``report.html.j2`` is the page, which reads the record, and this file makes its tables.

No markup is made here: every text goes through the template, which escapes it.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING

from sparkdl.errors import ConfigError
from sparkdl.metrics.measure import CalibrationBin, Measured
from sparkdl.metrics.names import HIGHER_IS_BETTER
from sparkdl.pipeline.judging.diagnostics import Confusion
from sparkdl.pipeline.judging.drift import FeatureDrift, Measure
from sparkdl.pipeline.judging.slices import LEAST_ROWS, MISSING, OTHERS
from sparkdl.pipeline.report.figures import (
    MODELS,
    Mark,
    bar,
    diagnostic_figures,
    interval,
    learning_curves,
    live_error,
)
from sparkdl.pipeline.rows.window_receipt import transformed
from sparkdl.pipeline.spec.base import count_of
from sparkdl.pipeline.state.project import Project
from sparkdl.pipeline.state.record import RunRecord
from sparkdl.pipeline.state.results import Drifted, Evaluated, Intervals, Live, Trained
from sparkdl.pipeline.state.runs import records
from sparkdl.pipeline.windows import PARTS, deleted_text, span
from sparkdl.storage import Storage

if TYPE_CHECKING:
    import jinja2

GENERATOR = "sparkdl report 4"
"""What wrote the page; raise the number when the page changes, and ``sparkdl report`` writes it anew."""
_HEAD = 2000
"""Bytes of a page that say what wrote it."""
NONE = "-"
"""Where there is no number."""
_DRIFT_WINDOWS, _DRIFT_FEATURES = 14, 30
_NUMBER = re.compile(r"-|[-+]?[\d,.]+(e[-+]?\d+)?( %| s)?")
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff\ufffe\uffff\ud800-\udfff]"
)
"""Characters that no page may hold, or that turn around what is read: they are shown by their codes."""
_BESIDE = ("mae", "log_loss")
"""Metrics that a slice shows beside the one that is judged by."""


def report_html(record: RunRecord) -> str:
    """Return the report as one HTML document; what the record does not hold is left out.

    A browser runs no script of it, loads nothing, sends no form, and takes no style but the page's own.
    """
    style = _resource("style.css")
    style_hash = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return _template().render(record=record, generator=GENERATOR, style=style, style_hash=style_hash)


@functools.cache
def _template() -> jinja2.Template:
    import jinja2  # not before a report is written

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_visible
    )
    texts = (number, count_of, sentence, shown, headline, reason, alarms, transformed, deleted_text)
    figures = (diagnostic_figures, live_error, learning_curves)
    tables = (metrics, thresholds, confusion, levels, residuals, slices, live_errors, drift_table, drift_reasons,
              epochs, trials, windows, parts, outcomes, predictions, steps)  # fmt: skip
    functions = {function.__name__: function for function in (*texts, *figures, *tables, laid_out, as_json)}
    environment.globals |= functions | {"MODELS": MODELS, "LEAST_ROWS": LEAST_ROWS, "OTHERS": OTHERS}
    environment.filters |= functions
    return environment.from_string(_resource("report.html.j2"))


def _resource(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def has_report(record: RunRecord) -> bool:
    """Whether there is anything to tell of a run: it did something, or it was refused or failed."""
    return record.outcome in ("refused", "failed") or bool(record.steps and record.outcome != "nothing new")


def write_report(record: RunRecord, file: Storage) -> None:
    """Write the report, whole or not at all; the record then says where it lies.

    Raises:
        StorageError: it cannot be written there.
    """
    earlier_places = dict(record.places)
    record.places["report"] = file.uri
    try:
        file.write_atomic(report_html(record).encode())
    except BaseException:
        record.places = earlier_places
        raise


def report_of(project: Project, run_id: str | None = None) -> Storage:
    """The report of an earlier run, written anew where it is gone or of an older version.

    Args:
        project: the pipeline.
        run_id: of the run; None takes the last one that did something.

    Raises:
        ConfigError: there is no such run.
        IntegrityError: its record was altered.
        StorageError: the report is not there and cannot be written.
    """
    folder, name = project.runs, project.spec.name
    if run_id is None:
        record = next(filter(has_report, records(folder)), None)
        if record is None:
            raise ConfigError(f"no run of {name} has done anything yet in {folder.uri}: run it first")
    else:
        run_ids = {entry.name for entry in folder.list() if entry.is_dir} if folder.exists() else set()
        document = folder.child(run_id).child("record.json") if run_id in run_ids else None
        if document is None or not document.exists():
            newest = [record.run_id for record in itertools.islice(records(folder), 3)]
            remedy = f"the last ones are {', '.join(newest)}" if newest else "there are none yet"
            raise ConfigError(f"{name} has no run {run_id!r} in {folder.uri}: {remedy}")
        record = RunRecord.load(document)
    file = folder.child(record.run_id).child("report.html")
    if not (file.exists() and f'content="{GENERATOR}"'.encode() in file.read_bytes(0, _HEAD)):
        write_report(record, file)
    return file


# Texts


def _visible(value: object) -> object:
    """What stands on the page for a value: nothing for None, codes for characters that hide or turn around."""
    from markupsafe import Markup

    text = "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
    text = _UNSEEN.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
    return Markup(text) if isinstance(value, Markup) else text


def shown(text: object, most: int = 200) -> str:
    """A value as a text of at most ``most`` characters; what was cut is said."""
    full_text = str(text)
    return full_text if len(full_text) <= most else f"{full_text[:most]}… ({len(full_text):,} characters)"


def number(value: float | None) -> str:
    """A count with its thousands apart, any other number with four digits; a dash where there is none."""
    if value is None:
        return NONE
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}" if abs(value) < 1e6 else f"{value:.4g}"


def share(part: float, total: float) -> str:
    """A part of a whole in percent."""
    if not total:
        return NONE
    percent = 100 * part / total
    return f"{percent:.0f} %" if percent in (0, 100) else f"{percent:.2g} %" if percent < 10 else f"{percent:.1f} %"


def sentence(text: str) -> str:
    """A reason as a sentence of its own."""
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def as_json(content: object) -> str:
    """Settings as they are read."""
    return json.dumps(content, indent=1, default=str, ensure_ascii=False)


def headline(record: RunRecord) -> str:
    """The one line that a person reads."""
    version, rows = record.model.get("version"), sum(record.predictions.values())
    champion = record.model.get("champion")
    first = record.evaluated is not None and record.evaluated.decision.outcome == "first"
    return {
        "promoted": f"Version {version} is the champion now" + (", the first one" if first else ""),
        "not promoted": f"Version {version} was not promoted",
        "scored": f"Version {champion} predicted {rows:,} rows; nothing new was learned",
        "nothing new": "There was nothing new to do",
        "lost": "Another run was first",
        "refused": "The run was refused",
        "failed": "The run was interrupted" if record.exit_code == 130 else "The run failed",
        "stopped": "The run stopped where it was asked to" if record.until else "The run did what was due",
        "running": "The run has not ended",
    }[record.outcome]


def reason(record: RunRecord) -> str:
    """What the run says of its end, as a sentence."""
    message = shown(record.message, 2000)
    text = f"{record.error}: {message}" if record.error else f"{message[:1].upper()}{message[1:]}"
    return text if text.endswith((".", "!", "?")) or not text else f"{text}."


def alarms(record: RunRecord) -> list[str]:
    """What speaks against the model, whatever became of it."""
    texts = [] if record.trained is None else list(record.trained.warnings)
    if record.evaluated is not None and record.evaluated.decision.beats_baseline is False:
        baseline = record.evaluated.decision.baseline_text()
        texts.insert(0, "beats the baseline: no" if baseline in record.message else f"{baseline} on the same rows")
    return texts


# Tables: each row has the headings of its cells; a column without a cell in any row is left out


@dataclass(frozen=True)
class Cell:
    """A cell that is more than a text.

    Attributes:
        text: that it shows.
        style: its class.
        mark: that it shows in place of a text.
    """

    text: str = ""
    style: str = ""
    mark: Mark | None = None


Row = Sequence[tuple[str, Cell | Mark | str | None]]
"""The heading of each column, and its cell."""


def laid_out(rows: Sequence[Row]) -> tuple[list[Cell], list[tuple[Cell, ...]]]:
    """The headings and the lines of a table; columns of numbers stand to the right, and so do their headings."""
    heads, columns = [], []
    for column in zip(*rows, strict=True):
        contents = [content for _, content in column]
        if all(content is None for content in contents):
            continue
        cells = [
            content if isinstance(content, Cell)
            else Cell(mark=content) if isinstance(content, Mark)
            else Cell(shown("" if content is None else content))
            for content in contents
        ]  # fmt: skip
        side = "n" if all(_NUMBER.fullmatch(cell.text) for cell in cells) else ""
        heads.append(Cell(column[0][0], side))
        columns.append([Cell(cell.text, f"{side} {cell.style}".strip(), cell.mark) for cell in cells])
    return heads, list(zip(*columns, strict=True))


def metrics(evaluated: Evaluated) -> Iterator[Row]:
    """Metrics of challenger, champion, trees and the best guesses on the same rows; the one that judges first."""
    decision, trees = evaluated.decision, evaluated.boosted.trees if evaluated.boosted is not None else None
    gate, baseline, champion = decision.gate, decision.baseline, decision.champion
    values, champion_values = decision.challenger.values, champion.values if champion is not None else {}
    floors = {floor.split()[0]: floor for floor in gate.floors}
    for name in sorted(dict.fromkeys([*values, *champion_values]), key=lambda name: name != gate.metric):
        marks = ", ".join(filter(None, ["judged by" if name == gate.metric else "", floors.get(name, "")]))
        value, champion_value = values.get(name), champion_values.get(name)
        yield [
            ("metric", f"{name} ({marks})" if marks else name),
            ("challenger", _against(name, value, champion_value)),
            ("champion before", _against(name, champion_value, value) if champion is not None else None),
            ("LightGBM", number(trees.values.get(name)) if trees else None),
            ("without a model", number(baseline.values.get(name)) if baseline is not None else None),
            ("by predicting", baseline.guesses.get(name, "") if baseline is not None else None),
        ]


def _against(metric: str, value: float | None, other: float | None) -> Cell:
    """A metric's value, which stands out where it is better than the other's."""
    comparable = value is not None and other is not None and value != other and metric in HIGHER_IS_BETTER
    better = comparable and ((value or 0.0) > (other or 0.0)) == HIGHER_IS_BETTER[metric]
    return Cell(number(value), "better" if better else "")


def thresholds(bins: Sequence[CalibrationBin]) -> Iterator[Row]:
    """What taking all rows from a probability on would give; from the bins, so at their edges."""
    weights, hits = [part.weight for part in bins], [part.weight * part.observed for part in bins]
    for first, part in enumerate(bins):
        weight_above, hits_above = sum(weights[first:]), sum(hits[first:])
        yield [
            ("probability from", f"{part.low:.2g}"),
            ("rows in the bin", number(part.rows)),
            ("predicted", f"{part.predicted:.3f}"),
            ("came true", f"{part.observed:.3f}"),
            ("taken from here on", share(weight_above, sum(weights))),
            ("precision", f"{hits_above / weight_above:.3f}" if weight_above else NONE),
            ("recall", f"{hits_above / sum(hits):.3f}" if sum(hits) else NONE),
        ]


def confusion(table: Confusion) -> Iterator[Row]:
    """The weight by true class, a row each, and predicted one."""
    names = [shown(name, 40) for name in table.classes]
    for at, (name, weights) in enumerate(zip(names, table.weights, strict=True)):
        total = sum(weights)
        # the darker the more, from 0 for none to 5
        shades = [min(5, 1 + int(5 * weight / total)) if weight else 0 for weight in weights]
        cells = [
            Cell(number(round(weight)), f"{'right' if at == to else 'wrong'}{shade}")
            for to, (weight, shade) in enumerate(zip(weights, shades, strict=True))
        ]
        together = at == len(names) - 1 and table.others
        recognised = NONE if together else share(weights[at], total)
        yield [("true \\ predicted", Cell(name)), *zip(names, cells, strict=True), ("recognised", recognised)]


def levels(intervals: Intervals) -> Iterator[Row]:
    """How often labels lie below each quantile."""
    for level, below in zip(intervals.levels, intervals.below, strict=True):
        yield [("level", f"{level:g}"), ("share of labels below", f"{below:.3f}")]


def residuals(evaluated: Evaluated) -> Iterator[Row]:
    """Quantiles of the residuals of both models."""
    for name, model in zip(MODELS, (evaluated.challenger, evaluated.champion), strict=True):
        if model is not None and model.quantiles:
            quantiles = map(number, model.quantiles)
            yield [("residuals of", name), *zip(("5 %", "25 %", "median", "75 %", "95 %"), quantiles, strict=True)]


def slices(evaluated: Evaluated, column: str) -> Iterator[Row]:
    """The error by the values of a column that the file names, of the challenger and of the champion before."""
    by_value, champion = _in_order(evaluated.slices[column]), evaluated.champion_slices.get(column, {})
    metric, baseline = evaluated.decision.gate.metric, evaluated.baseline_slices.get(column, {})
    besides = [name for name in _BESIDE if name != metric and any(name in part.values for part in by_value.values())]
    most = max((abs(part.values.get(metric, 0.0)) for part in by_value.values()), default=0.0) or 1.0
    margins = {name: _margin(part) for name, part in by_value.items() if "bias" in part.values}
    reach = max((abs(by_value[name].values["bias"]) + margin for name, margin in margins.items()), default=0.0)
    for name, part in by_value.items():
        value, other = part.values.get(metric), champion[name].values.get(metric) if name in champion else None
        bias, margin = part.values.get("bias", 0.0), margins.get(name) if reach > 0 else None
        yield [
            (column, name),
            ("rows", number(part.rows)),
            (metric, _against(metric, value, other)),
            ("", bar(abs(value or 0.0) / most)),
            ("champion before", _against(metric, other, value) if champion else None),
            ("without a model", number(baseline.get(name)) if baseline else None),
            *((beside, number(part.values.get(beside))) for beside in besides),
            ("bias", f"{bias:+.3g}" if margin is not None else NONE if reach > 0 else None),
            ("with 95 % interval", interval(bias, margin, reach) if margin is not None else None),
        ]


def _in_order(by_value: Mapping[str, Measured]) -> Mapping[str, Measured]:
    """Numbers, such as the hours of a day, in their order; whatever else the largest first, as it is."""
    places: dict[str, float] = {}
    for name in by_value:
        try:
            places[name] = math.inf if name in (MISSING, OTHERS) else float(name)
        except ValueError:
            return by_value
    return {name: by_value[name] for name in sorted(by_value, key=lambda name: (places[name], name == OTHERS))}


def _margin(measured: Measured) -> float:
    """Half the width of the 95 % interval of the mean residual."""
    rmse, bias = measured.values.get("rmse", 0.0), measured.values.get("bias", 0.0)
    return 1.96 * math.sqrt(max(rmse**2 - bias**2, 0.0) / measured.rows) if measured.rows else 0.0


def live_errors(live: Live) -> Iterator[Row]:
    """The error of predictions whose labels have arrived, over time."""
    for error in live.windows:
        yield [
            ("window", error.window),
            ("version", number(error.version)),
            ("rows with a label", number(error.measured.rows if error.measured else 0)),
            ("waiting for one", number(error.waiting)),
            ("unknown label", number(error.unknown)),
            ("no such key", number(error.unmatched)),
            (live.metric, number(error.value(live.metric))),
            ("without a model", number(error.baseline)),
            ("", "trained on it, too low" if error.trained_on else ""),
        ]


def drift_table(drifted: Drifted) -> tuple[list[Row], str]:
    """How far each feature is in the newest windows, the furthest first, and a note on what is not shown."""
    newest = {window: drifted.windows[window].features for window in list(drifted.windows)[-_DRIFT_WINDOWS:]}
    names = dict.fromkeys(name for features in newest.values() for name in features)
    strengths = {name: max(_strength(features.get(name)) for features in newest.values()) for name in names}
    rows: list[Row] = []
    for name in sorted(names, key=lambda name: -strengths[name])[:_DRIFT_FEATURES]:
        cells = []
        for features in newest.values():
            feature = features.get(name)
            text = NONE if feature is None or not feature.measures else f"{_strength(feature):.2f}"
            cells.append(Cell(text, "alarm" if feature is not None and feature.alarm else ""))
        rows.append([("feature", name), *zip(newest, cells, strict=True)])
    notes = ["How far each feature is, as a share of what would alarm: 1 and above does."]
    if len(newest) < len(drifted.windows):
        notes.append(f"{len(drifted.windows) - len(newest):,} earlier windows are not shown.")
    if len(names) > _DRIFT_FEATURES:
        notes.append(f"{len(names) - _DRIFT_FEATURES:,} features that are nearer are not shown.")
    return rows, " ".join(notes)


def drift_reasons(drifted: Drifted) -> Iterator[str]:
    """Why windows could not be judged and features alarmed, the newest window first."""
    for window, drift in reversed(list(drifted.windows.items())[-_DRIFT_WINDOWS:]):
        if not drift.judged:
            yield f"{window}: {drift.reason}"
        yield from (f"{window}, {name}: {drift.features[name].reason}" for name in drift.alarmed)


def _strength(feature: FeatureDrift | None) -> float:
    """The measure that is nearest to an alarm, or the furthest beyond, as a share of what alarms."""

    def share_of_alarm(measure: Measure) -> float:
        if measure.threshold is None:
            return 0.0
        limit = max(measure.threshold, measure.chance)
        return measure.value / limit if limit > 0 else float(measure.value > 0)

    return max(map(share_of_alarm, feature.measures.values()), default=0.0) if feature is not None else 0.0


def epochs(trained: Trained) -> Iterator[Row]:
    """What was computed after each epoch."""
    names = list(dict.fromkeys(name for row in trained.history for name in row if name != "epoch"))
    for at, row in enumerate(trained.history):
        yield [("epoch", number(at + 1)), *((name, number(row.get(name))) for name in names)]


def trials(trained: Trained) -> Iterator[Row]:
    """The trials of a search: every setting, what it came to, and which was chosen."""
    names = list(dict.fromkeys(name for trial in trained.trials for name in trial.settings))
    for at, trial in enumerate(trained.trials):
        yield [
            ("trial", number(at + 1)),
            *((name, str(trial.settings.get(name, ""))) for name in names),
            (trained.chosen_by, trial.failed or number(trial.value)),
            ("epochs", number(trial.epochs)),
            ("seconds", number(trial.seconds)),
            ("", "chosen" if at == trained.chosen else "stopped early" if trial.stopped else ""),
        ]


def windows(record: RunRecord) -> Iterator[Row]:
    """Rows read = kept + quarantined + duplicates, by window."""
    transforms = any(receipt.source_rows not in (None, receipt.read) for receipt in record.books)
    for receipt in record.books:
        yield [
            ("window", receipt.window),
            ("in the source", number(receipt.source_rows) if transforms else None),
            ("read", number(receipt.read)),
            ("kept", number(receipt.kept)),
            ("quarantined", number(receipt.quarantined)),
            ("duplicates", number(receipt.duplicates)),
            ("share quarantined", share(receipt.quarantined, receipt.read)),
        ]


def parts(record: RunRecord) -> Iterator[Row]:
    """The windows and rows of each part of the split."""
    for part in PARTS:
        if names := record.windows.get(part):
            rows = number(record.rows.get(part))
            yield [("part", part), ("windows", number(len(names))), ("from and to", span(names)), ("rows", rows)]


def outcomes(record: RunRecord, *, warned: bool) -> Iterator[Row]:
    """Quarantined rows by reason, or those that broke an expectation that only warns, the largest first."""
    read, counts = record.rows.get("read", 0), Counter[str]()
    for receipt in record.books:
        counts.update(receipt.outcomes)
    if warned:
        counts = Counter(record.warned)
    for name, rows in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        heads = ("warning", "rows, kept all the same") if warned else ("reason", "rows")
        mark = None if warned else bar(rows / max(counts.values()), "s2")
        yield [*zip(heads, (name, number(rows)), strict=True), ("of rows read", share(rows, read)), ("", mark)]


def predictions(record: RunRecord) -> Iterator[Row]:
    """Predictions that this run wrote, by window."""
    for window, rows in sorted(record.predictions.items()):
        yield [("window", window), ("rows", number(rows))]


def steps(record: RunRecord) -> Iterator[Row]:
    """Each step with its time; what was kept of earlier runs is said to be."""
    spent = {note.name: 0.0 for note in record.steps}
    for note in record.steps:
        spent[note.name] += note.seconds
    most, other = max(spent.values(), default=0.0) or 1.0, record.seconds - sum(spent.values())
    for name, seconds in spent.items():
        kept_flags = [note.kept for note in record.steps if note.name == name]
        state = "kept from an earlier run" if all(kept_flags) else "done"
        if any(kept_flags) and not all(kept_flags):
            state = f"{kept_flags.count(False):,} of {len(kept_flags):,} done, the others kept"
        yield [("step", name), ("", state), ("time", f"{seconds:.1f} s"), ("", bar(seconds / most))]
    if spent and other >= 0.05:
        state = "Spark's start, looking around, records"
        yield [("step", "everything else"), ("", state), ("time", f"{other:.1f} s"), ("", bar(other / most))]
