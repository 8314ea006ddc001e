"""The HTML report of a run: ``report.html.j2`` is the page, and this file the numbers and sentences that it shows.

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import TYPE_CHECKING, Any

from sparkdl.errors import ConfigError
from sparkdl.metrics.measure import CalibrationBin, Measured
from sparkdl.metrics.names import HIGHER_IS_BETTER
from sparkdl.pipeline.judging.diagnostics import Confusion
from sparkdl.pipeline.judging.drift import FeatureDrift, Measure
from sparkdl.pipeline.judging.gate import Decision
from sparkdl.pipeline.judging.slices import LEAST_ROWS, MISSING, OTHERS
from sparkdl.pipeline.report.figures import (
    MODELS,
    Drawing,
    bar,
    diagnostic_figures,
    interval,
    learning_curves,
    live_error,
)
from sparkdl.pipeline.rows.window_receipt import transformed
from sparkdl.pipeline.state.project import Project
from sparkdl.pipeline.state.record import RunRecord
from sparkdl.pipeline.state.results import Boosted, Drifted, Evaluated, Intervals, Live, Trained
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
_WINDOWS = 40
"""Windows that a table shows, the newest; whoever has years of hours does not scroll through them."""
_DRIFT_WINDOWS, _DRIFT_FEATURES, _DRIFT_REASONS = 14, 30, 20
_NUMBER = re.compile(r"-|[-+]?[\d,.]+(e[-+]?\d+)?( %| s)?")
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff\ufffe\uffff\ud800-\udfff]"
)
"""Characters that no page may hold, or that turn around what is read: they are shown by their codes."""
_BESIDE = ("mae", "log_loss")
"""Metrics that a slice shows beside the one that is judged by."""
_MOODS = {"promoted": "good", "scored": "good"} | dict.fromkeys(
    ("stopped", "nothing new", "not promoted", "lost"), "calm"
)


def report_html(record: RunRecord) -> str:
    """Return the report as one HTML document; what the record does not hold is left out.

    A browser runs no script of it, loads nothing, sends no form, and takes no style but the page's own.
    """
    style = _resource("style.css")
    return _template().render(
        record=record,
        generator=GENERATOR,
        style=style,
        style_hash=base64.b64encode(hashlib.sha256(style.encode()).digest()).decode(),
        **_verdict(record),
        comparison=_comparison(record),
        diagnostics=_diagnostics(record.evaluated),
        slices=_slices(record.evaluated),
        live=_live(record.live),
        drift=_drift(record.drift),
        training=_training(record.trained),
        search=_search(record.trained),
        rows=_rows(record),
        quarantine=_quarantine(record),
        predictions=_predictions(record),
        steps=_steps(record),
        code={
            name: json.dumps(content, indent=1, default=str, ensure_ascii=False)
            for name, content in (("Settings", record.settings), ("Versions", record.versions))
            if content
        },
    )


@functools.cache
def _template() -> jinja2.Template:
    import jinja2  # not before a report is written

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_visible
    )
    environment.filters |= {"number": number, "sentence": sentence, "shown": shown}
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


# Texts, and cells of tables


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


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A cell of a table that is more than a text.

    Attributes:
        text: that it shows.
        bold: whether it stands out.
        style: its class.
        drawing: that it shows in place of a text.
    """

    text: str = ""
    bold: bool = False
    style: str = ""
    drawing: Drawing | None = None


Content = Cell | Drawing | str | None
"""What a cell of a table is made of."""


@dataclass(frozen=True)
class Table:
    """A table; columns of numbers stand to the right, and so do their headings.

    Attributes:
        header: of the columns.
        rows: as many cells each; texts are cut where they are long.
        note: said below it.
        style: its class.
        headed: whether the first cell of a row is its heading.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[Content]]
    note: str = ""
    style: str | None = None
    headed: bool = False
    lines: list[list[Cell]] = field(init=False, default_factory=list)
    heads: list[Cell] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        for row in self.rows:
            self.lines.append([
                cell if isinstance(cell, Cell)
                else Cell(drawing=cell) if isinstance(cell, Drawing)
                else Cell(text=shown("" if cell is None else cell))
                for cell in row
            ])  # fmt: skip
        for column, name in enumerate(self.header):
            texts = [line[column].text for line in self.lines]
            numeric = bool(texts) and all(map(_NUMBER.fullmatch, texts))
            self.heads.append(Cell(text=name, style="n" if numeric else ""))

    def style_of(self, column: int, cell: Cell) -> str | None:
        """The classes of a cell in a column."""
        return f"{self.heads[column].style} {cell.style}".strip() or None


def _newest(windows: Sequence[str], most: int = _WINDOWS) -> tuple[Sequence[str], str]:
    """The newest windows, and a note on how many are not among them."""
    surplus = len(windows) - most
    return (windows, "") if surplus <= 0 else (windows[surplus:], f"{surplus:,} earlier windows are not shown.")


# The head


def _verdict(record: RunRecord) -> dict[str, Any]:
    """What came of the run, and the few numbers that say it."""
    alarms = list(_alarms(record))
    message = shown(record.message, 2000)
    why = f"{record.error}: {message}" if record.error else f"{message[:1].upper()}{message[1:]}"
    return {
        "headline": headline(record),
        "mood": "bad" if alarms else _MOODS.get(record.outcome, "bad"),
        "why": why if why.endswith((".", "!", "?")) or not why else f"{why}.",
        "remarks": list(_remarks(record)),
        "alarms": alarms,
        "cards": list(_cards(record)),
    }


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


def _remarks(record: RunRecord) -> Iterator[str]:
    if record.outcome in ("refused", "failed"):
        steps = list(dict.fromkeys(note.name for note in record.steps))
        if steps:
            yield f"It came as far as {', '.join(steps)}; what they left is kept, and the next run goes on from there."
        else:
            yield "It ended before any step was done."
    if "champion" in record.model and record.outcome != "promoted":
        champion = record.model["champion"]
        is_unchanged = record.model.get("before", champion) == champion
        since = ", which this run promoted" if record.promoted else ", as before" if is_unchanged else ""
        yield "There is no champion." if champion is None else f"The champion is version {champion}{since}."


def _alarms(record: RunRecord) -> Iterator[str]:
    """What speaks against the model, whatever became of it."""
    if record.evaluated is not None and record.evaluated.decision.beats_baseline is False:
        baseline = record.evaluated.decision.baseline_text()
        yield "Beats the baseline: no." if baseline in record.message else sentence(f"{baseline} on the same rows")
    for warning in record.trained.warnings if record.trained is not None else ():
        yield sentence(warning)


def _cards(record: RunRecord) -> Iterator[tuple[str, str]]:
    """The few numbers of a run, each with a word below it."""
    evaluated = record.evaluated
    if evaluated is not None:
        decision = evaluated.decision
        metric, baseline = decision.gate.metric, decision.baseline
        challenger_value = number(decision.challenger.values.get(metric))
        yield challenger_value, f"{metric} of {evaluated.label}, on {evaluated.rows_text()}"
        if baseline is not None and metric in baseline.values:
            guess = baseline.guesses[metric]
            yield number(baseline.values[metric]), f"{metric} without a model: {guess}, on the same rows"
        if evaluated.boosted is not None and evaluated.boosted.trees is not None and metric != "pinball":
            yield number(evaluated.boosted.trees.values.get(metric)), f"{metric} of LightGBM on the same columns"
        if decision.champion is not None:
            yield number(decision.champion.values.get(metric)), f"{metric} of the champion before, on the same rows"
        if decision.gain is not None:
            sure = f"{100 * decision.gate.confidence:.4g} % confidence"
            bound = f"no bound at {sure}" if decision.lower is None else f"with {sure} above {decision.lower:+.3g}"
            yield f"{decision.gain:+.3g}", f"gain in {metric} over the champion; {bound}"
    if record.rows.get("read"):
        yield number(record.rows["read"]), "rows read"
    if record.predictions:
        yield number(sum(record.predictions.values())), "rows predicted"
    yield f"{record.seconds:.1f} s", "from start to end"


# The model


def _comparison(record: RunRecord) -> dict[str, Any] | None:
    """Metrics of challenger and champion on the same rows, and what the gate said."""
    evaluated = record.evaluated
    if evaluated is None:
        return None
    decision = evaluated.decision
    is_kept = any(note.name == "evaluate" and note.kept for note in record.steps)
    reason = ""
    if is_kept or decision.reason not in record.message:  # else it stands at the head of the page
        earlier = "An earlier run judged this; nothing that decides it has changed since. " if is_kept else ""
        reason = f"{earlier}{'Promoted' if decision.promote else 'Not promoted'}: {decision.reason}."
    models = (("challenger", decision.challenger), ("champion", decision.champion))
    return {
        "reason": reason,
        "decision": decision,
        "rows": evaluated.rows_text(),
        "part": evaluated.part,
        "table": _metrics(decision, evaluated.boosted),
        "boosted": evaluated.boosted,
        "calibrated": evaluated.calibrated,
        "undefined": [
            f"Of the {name}: {text}."
            for name, measured in models
            if measured is not None
            for text in measured.undefined.values()
        ],
    }


def _metrics(decision: Decision, boosted: Boosted | None) -> Table:
    values, gate, baseline = decision.challenger.values, decision.gate, decision.baseline
    champion_values = decision.champion.values if decision.champion is not None else None
    names = sorted(dict.fromkeys([*values, *(champion_values or {})]), key=lambda name: name != gate.metric)
    trees = None if boosted is None or boosted.trees is None else boosted.trees.values
    floors = {floor.split()[0]: floor for floor in gate.floors}
    lines: list[list[Content]] = []
    for name in names:
        value, champion_value = values.get(name), None if champion_values is None else champion_values.get(name)
        marks = [mark for mark in ("judged by" if name == gate.metric else "", floors.get(name, "")) if mark]
        line: list[Content] = [f"{name} ({', '.join(marks)})" if marks else name]
        line.append(_against(name, value, champion_value))
        if champion_values is not None:
            line.append(_against(name, champion_value, value))
        if trees is not None:
            line.append(number(trees.get(name)))
        if baseline is not None:
            line += [number(baseline.values.get(name)), baseline.guesses.get(name, "")]
        lines.append(line)
    header = ["metric", "challenger", *([] if champion_values is None else ["champion before"])]
    header += [] if trees is None else ["LightGBM"]
    header += [] if baseline is None else ["without a model", "by predicting"]
    return Table(header, lines)


def _against(metric: str, value: float | None, other: float | None) -> Cell:
    """A metric's value, bold where it is better than the other's."""
    comparable = value is not None and other is not None and value != other and metric in HIGHER_IS_BETTER
    better = comparable and ((value or 0.0) > (other or 0.0)) == HIGHER_IS_BETTER[metric]
    return Cell(text=number(value), bold=better)


def _diagnostics(evaluated: Evaluated | None) -> dict[str, Any] | None:
    """What there is to see of the predictions of both models; evaluations of older versions kept nothing of it."""
    if evaluated is None or evaluated.challenger is None:
        return None
    figures, challenger = diagnostic_figures(evaluated), evaluated.challenger
    models = list(zip(MODELS, filter(None, (evaluated.challenger, evaluated.champion)), strict=False))
    tables = [("By threshold", _thresholds(challenger.calibration))] if challenger.calibration else []
    tables += [(f"Confusion, {name}", _confusion(model.confusion)) for name, model in models if model.confusion]
    if evaluated.intervals is not None:
        tables.append(("Quantiles", _quantiles(evaluated.intervals)))
    if challenger.quantiles:
        header = ("residuals of", "5 %", "25 %", "median", "75 %", "95 %")
        lines = [(name, *map(number, model.quantiles)) for name, model in models if model.quantiles]
        note = "In the figures the outermost bars and fields hold what lies beyond them, too."
        tables.append(("", Table(header, lines, note)))
    return {"figures": figures, "tables": tables, "rows": evaluated.rows_text()} if figures or tables else None


def _quantiles(intervals: Intervals) -> Table:
    """How often labels lie below each quantile."""
    lines = [(f"{level:g}", f"{below:.3f}") for level, below in zip(intervals.levels, intervals.below, strict=True)]
    note = f"{sentence(intervals.text())} Between them lie {intervals.width:.4g} on average; pinball loss "
    return Table(("level", "share of labels below"), lines, f"{note}{intervals.pinball:.4g}.")


def _thresholds(bins: Sequence[CalibrationBin]) -> Table:
    """What taking all rows from a probability on would give; from the bins, so at their edges."""
    total = sum(part.weight for part in bins)
    positives = sum(part.weight * part.observed for part in bins)
    lines = []
    for low in sorted({part.low for part in bins}):
        bins_above = [part for part in bins if part.low >= low]
        weight, hits = sum(part.weight for part in bins_above), sum(part.weight * part.observed for part in bins_above)
        threshold_bin = next(part for part in bins if part.low == low)
        lines.append((
            f"{low:.2g}",
            number(threshold_bin.rows),
            f"{threshold_bin.predicted:.3f}",
            f"{threshold_bin.observed:.3f}",
            share(weight, total),
            f"{hits / weight:.3f}" if weight else NONE,
            f"{hits / positives:.3f}" if positives else NONE,
        ))  # fmt: skip
    header = ("probability from", "rows in the bin", "predicted", "came true", "taken from here on", "precision",
              "recall")  # fmt: skip
    return Table(header, lines, "Precision and recall of taking every row with this probability or a higher one.")


def _confusion(confusion: Confusion) -> Table:
    names = [shown(name, 40) for name in confusion.classes]
    lines = []
    for at, (name, weights) in enumerate(zip(names, confusion.weights, strict=True)):
        total = sum(weights)
        cells = [
            # the darker the more, from 0 for none to 5
            Cell(
                text=number(round(weight)),
                style=f"{'right' if at == to else 'wrong'}{min(5, 1 + int(5 * weight / total)) if weight else 0}",
            )
            for to, weight in enumerate(weights)
        ]
        together = at == len(names) - 1 and confusion.others
        recognised = NONE if together else share(weights[at], total)
        lines.append((Cell(text=name), *cells, Cell(text=recognised)))
    note = "A row a true class, a column a predicted one."
    if confusion.others:
        note += f" The {len(confusion.classes) - 1} most frequent; {confusion.others:,} others stand together."
    return Table(("true \\ predicted", *names, "recognised"), lines, note, "matrix", headed=True)


def _slices(evaluated: Evaluated | None) -> dict[str, Any] | None:
    """The error by the values of the columns that the file names, of the challenger and of the champion before."""
    if evaluated is None or not evaluated.slices:
        return None
    return {
        "title": f"{evaluated.decision.gate.metric} of {evaluated.label} on {evaluated.rows_text()}.",
        "tables": {column: _slice_table(evaluated, column) for column in evaluated.slices},
    }


def _slice_table(evaluated: Evaluated, column: str) -> Table:
    slices, champion = _in_order(evaluated.slices[column]), evaluated.champion_slices.get(column, {})
    metric, baseline = evaluated.decision.gate.metric, evaluated.baseline_slices.get(column, {})
    extras = [name for name in _BESIDE if name != metric and any(name in slice_.values for slice_ in slices.values())]
    most = max((abs(slice_.values.get(metric, 0.0)) for slice_ in slices.values()), default=0.0) or 1.0
    margins = {name: _margin(slice_) for name, slice_ in slices.items() if "bias" in slice_.values}
    reach = max((abs(slices[name].values["bias"]) + margin for name, margin in margins.items()), default=0.0)
    header = [column, "rows", metric, ""]
    header += [*(["champion before"] if champion else []), *(["without a model"] if baseline else []), *extras]
    header += ["bias", "with 95 % interval"] if reach > 0 else []
    lines = []
    for name, slice_ in slices.items():
        value, other = slice_.values.get(metric), champion[name].values.get(metric) if name in champion else None
        line: list[Content] = [name, number(slice_.rows), _against(metric, value, other)]
        line.append(bar(abs(value or 0.0) / most))
        if champion:
            line.append(_against(metric, other, value))
        if baseline:
            line.append(number(baseline.get(name)))
        line += [number(slice_.values.get(extra)) for extra in extras]
        if reach > 0 and name in margins:
            bias, margin = slice_.values["bias"], margins[name]
            line += [f"{bias:+.3g}", interval(bias - margin, bias, bias + margin, reach)]
        elif reach > 0:
            line += [NONE, None]
        lines.append(line)
    values, names = evaluated.values.get(column, 0), [name for name in slices if name != OTHERS]
    note = (
        f"{values:,} different values: the largest, and the worst of those with {LEAST_ROWS} rows or more; the other "
        f"{values - len(names):,} stand together as {OTHERS}."
    )
    return Table(header, lines, note if values > len(names) else "")


def _in_order(slices: Mapping[str, Measured]) -> Mapping[str, Measured]:
    """Numbers, such as the hours of a day, in their order; whatever else the largest first, as it is."""
    places: dict[str, float] = {}
    for name in slices:
        try:
            places[name] = math.inf if name in (MISSING, OTHERS) else float(name)
        except ValueError:
            return slices
    return {name: slices[name] for name in sorted(slices, key=lambda name: (places[name], name == OTHERS))}


def _margin(measured: Measured) -> float:
    """Half the width of the 95 % interval of the mean residual."""
    rmse, bias = measured.values.get("rmse", 0.0), measured.values.get("bias", 0.0)
    return 1.96 * math.sqrt(max(rmse**2 - bias**2, 0.0) / measured.rows) if measured.rows else 0.0


# The time since the training


def _live(live: Live | None) -> dict[str, Any] | None:
    """The error of predictions whose labels have arrived, over time."""
    if live is None:
        return None
    lines = [
        (
            error.window,
            number(error.version),
            number(error.measured.rows if error.measured else 0),
            number(error.waiting),
            number(error.unknown),
            number(None if error.measured is None else error.measured.values.get(live.metric)),
            number(error.baseline),
            "trained on it, too low" if error.trained_on else "",
        )
        for error in live.windows
    ]
    surplus = len(lines) - _WINDOWS
    header = ("window", "version", "rows with a label", "waiting for one", "unknown label", live.metric,
              "without a model", "")  # fmt: skip
    return {
        "reason": live.reason,
        "figures": [live_error(live)] if len({error.window for error in live.windows}) > 1 else [],
        "table": Table(header, lines[-_WINDOWS:], f"{surplus:,} earlier ones are not shown." if surplus > 0 else "")
        if lines
        else None,
    }


def _drift(drifted: Drifted | None) -> dict[str, Any] | None:
    """Features by window: how far each is from the champion's training rows, and why some alarmed."""
    if drifted is None:
        return None
    windows, note = _newest(list(drifted.windows), _DRIFT_WINDOWS)
    reasons = []
    for window in reversed(windows):
        drift = drifted.windows[window]
        reasons += [] if drift.judged else [f"{window}: {drift.reason}"]
        reasons += [f"{window}, {name}: {feature.reason}" for name, feature in drift.features.items() if feature.alarm]
    return {
        "reason": drifted.reason,
        "against": drifted.against,
        "table": _drift_table(drifted, windows, note),
        "reasons": reasons[:_DRIFT_REASONS],
        "more": len(reasons) - _DRIFT_REASONS,
    }


def _drift_table(drifted: Drifted, windows: Sequence[str], note: str) -> Table | None:
    features = {window: drifted.windows[window].features for window in windows}
    names = dict.fromkeys(name for window in windows for name in features[window])
    if not names:
        return None
    strengths = {name: max(_strength(features[window].get(name)) for window in windows) for name in names}
    ordered = sorted(names, key=lambda name: -strengths[name])
    lines: list[list[Content]] = []
    for name in ordered[:_DRIFT_FEATURES]:
        lines.append([name])
        for window in windows:
            feature = features[window].get(name)
            if feature is None or not feature.measures:
                lines[-1].append(NONE)
            else:
                style = "alarm" if feature.alarm else ""
                lines[-1].append(Cell(text=f"{_strength(feature):.2f}", bold=feature.alarm, style=style))
    notes = ["How far each feature is, as a share of what would alarm: 1 and above does.", *filter(None, [note])]
    if len(ordered) > _DRIFT_FEATURES:
        notes.append(f"{len(ordered) - _DRIFT_FEATURES:,} features that are nearer are not shown.")
    return Table(("feature", *windows), lines, " ".join(notes))


def _strength(feature: FeatureDrift | None) -> float:
    """The measure that is nearest to an alarm, or the furthest beyond, as a share of what alarms."""

    def share_of_alarm(measure: Measure) -> float:
        if measure.threshold is None:
            return 0.0
        limit = max(measure.threshold, measure.chance)
        return measure.value / limit if limit > 0 else float(measure.value > 0)

    return max(map(share_of_alarm, feature.measures.values()), default=0.0) if feature is not None else 0.0


# The training


def _training(trained: Trained | None) -> dict[str, Any] | None:
    """The curves and the epochs of the training."""
    if trained is None:
        return None
    names = list(dict.fromkeys(name for row in trained.history for name in row if name != "epoch"))
    lines = [(number(at + 1), *(number(row.get(name)) for name in names)) for at, row in enumerate(trained.history)]
    spent = trained.seconds.get("fit", 0.0)
    return {
        "pace": trained.rows / spent if spent > 0 else None,
        "figures": learning_curves(trained),
        "epochs": Table(("epoch", *names), lines) if lines else None,
    }


def _search(trained: Trained | None) -> dict[str, Any] | None:
    """The trials of a search: every setting, what it came to, and which was chosen."""
    if trained is None or not trained.trials:
        return None
    names = list(dict.fromkeys(name for trial in trained.trials for name in trial.settings))
    lines = [
        (
            number(at + 1),
            *(str(trial.settings.get(name, "")) for name in names),
            trial.failed or number(trial.value),
            number(trial.epochs),
            number(trial.seconds),
            "chosen" if at == trained.chosen else "stopped early" if trial.stopped else "",
        )
        for at, trial in enumerate(trained.trials)
    ]
    return {
        "failed": sum(bool(trial.failed) for trial in trained.trials),
        "table": Table(("trial", *names, trained.chosen_by, "epochs", "seconds", ""), lines),
    }


# The rows


def _rows(record: RunRecord) -> dict[str, Any] | None:
    """Rows read = kept + quarantined + duplicates, by window."""
    if "read" not in record.rows:
        return None
    windows, note = _newest([receipt.window for receipt in record.books])
    by_window = {receipt.window: receipt for receipt in record.books}
    transforms = any(receipt.source_rows not in (None, receipt.read) for receipt in record.books)
    lines = []
    for window in windows:
        receipt = by_window[window]
        counts = [receipt.source_rows] if transforms else []
        counts += [receipt.read, receipt.kept, receipt.quarantined, receipt.duplicates]
        lines.append((window, *map(number, counts), share(receipt.quarantined, receipt.read)))
    header = ("window", *(["in the source"] if transforms else []), "read", "kept", "quarantined", "duplicates",
              "share quarantined")  # fmt: skip
    parts = []
    for part in PARTS:
        names = record.windows.get(part)
        if names:
            parts.append((part, number(len(names)), span(names), number(record.rows.get(part))))
    return {
        "ingested": len(record.windows.get("ingested") or ()),
        "transformed": transformed(record.books),
        "deleted": deleted_text(record.windows.get("deleted", ()), record.windows.get("removed", ())),
        "table": Table(header, lines, note) if lines else None,
        "parts": Table(("part", "windows", "from and to", "rows"), parts) if parts else None,
    }


def _quarantine(record: RunRecord) -> list[Table]:
    """Quarantined rows by reason, the largest first, and warnings."""

    def largest_first(counts: Mapping[str, int]) -> Iterable[tuple[str, int]]:
        return sorted(counts.items(), key=lambda item: (-item[1], item[0]))

    outcomes: Counter[str] = Counter()
    for receipt in record.books:
        outcomes.update(receipt.outcomes)
    read, most = record.rows.get("read", 0), max(outcomes.values(), default=1)
    tables = []
    if outcomes:
        lines = [
            (name, number(rows), share(rows, read), bar(rows / most, "s2")) for name, rows in largest_first(outcomes)
        ]
        tables.append(Table(("reason", "rows", "of rows read", ""), lines))
    if record.warned:
        warning_lines = [(name, number(rows), share(rows, read)) for name, rows in largest_first(record.warned)]
        tables.append(Table(("warning", "rows, kept all the same", "of rows read"), warning_lines))
    return tables


def _predictions(record: RunRecord) -> Table | None:
    """Predictions that this run wrote, by window."""
    windows, note = _newest(sorted(record.predictions))
    return Table(("window", "rows"), [(name, number(record.predictions[name])) for name in windows], note)


# The run


def _steps(record: RunRecord) -> Table | None:
    """Each step with its time; what was kept of earlier runs is said to be."""
    names = list(dict.fromkeys(note.name for note in record.steps))
    # windows go together: each notes the time of all
    spent = {name: max(note.seconds for note in record.steps if note.name == name) for name in names}
    if not spent:
        return None
    most = max(spent.values()) or 1.0
    lines = []
    for name, seconds in spent.items():
        kept_flags = [note.kept for note in record.steps if note.name == name]
        state = "kept from an earlier run" if all(kept_flags) else "done"
        if any(kept_flags) and not all(kept_flags):
            state = f"{kept_flags.count(False):,} of {len(kept_flags):,} done, the others kept"
        lines.append((name, state, f"{seconds:.1f} s", bar(seconds / most)))
    other = record.seconds - sum(spent.values())
    if other >= 0.05:
        lines.append(("everything else", "Spark's start, looking around, records", f"{other:.1f} s", bar(other / most)))
    return Table(("step", "", "time", ""), lines)
