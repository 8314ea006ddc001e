"""The report of a run stands alone, says first what came of it, and shows what the record holds."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from sparkdl.documents.typed import encode
from sparkdl.errors import DataError
from sparkdl.pipeline.judging.drift import Drift, FeatureDrift, Measure
from sparkdl.pipeline.judging.gate import Gate
from sparkdl.pipeline.report import report_html, write_report
from sparkdl.pipeline.state.record import RunRecord
from sparkdl.pipeline.state.results import Drifted, Live, LiveError, Trial
from sparkdl.pipeline.summary import summary_lines
from sparkdl.storage import Storage

HOSTILE = "</td></table><script>alert(1)</script><img src=x onerror=alert(2)>\" ' & \u202e"


class Page(HTMLParser):
    """What a browser sees of a page."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.texts, self.unclosed = [], set(), [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.texts.append(data)

    @property
    def text(self):
        return " ".join(self.texts)


@pytest.mark.parametrize("task", ["regression", "binary", "multiclass"])
@pytest.mark.parametrize("theirs", [None, 0.3])
def test_a_report_is_one_whole_page_that_loads_nothing(record_of_task, task, theirs):
    page = Page(report_html(record_of_task(task, theirs=theirs)))
    assert not page.open
    assert not page.tags & {"script", "img", "link", "iframe", "object", "embed", "form", "base", "a"}
    names = {name for name, _ in page.attributes}
    assert not names & {"src", "href", "style", "action", "srcdoc"}
    assert not [name for name in names if name.startswith("on")]


def test_the_policy_lets_the_pages_own_style_in_and_nothing_else(record_of_task):
    text = report_html(record_of_task())
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)[1].replace("&#39;", "'")
    style = re.search(r"<style>(.*)</style>", text, re.DOTALL)[1]
    wanted = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'sha256-{wanted}'; base-uri 'none'; form-action 'none'"
    assert "url(" not in style
    assert "@import" not in style


def poisoned(value):
    """The same JSON value with the hostile text in every text and every free key."""
    if isinstance(value, dict):
        return {key: poisoned(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [poisoned(inner) for inner in value]
    return f"{value}{HOSTILE}" if isinstance(value, str) else value


def test_no_text_of_a_record_becomes_markup(record_of_task):
    record = record_of_task("binary", theirs=0.3)
    plain = Page(report_html(record))
    kept = {"outcome": record.outcome}
    fields = {name: poisoned(value) for name, value in vars(record).items() if isinstance(value, str | dict | list)}
    for name, value in {**fields, **kept}.items():
        setattr(record, name, value)
    slices = record.evaluated.slices["shop"]
    record.evaluated = replace(
        record.evaluated,
        label=HOSTILE,
        decision=replace(record.evaluated.decision, reason=HOSTILE),
        slices={HOSTILE: {f"{name}{HOSTILE}": one for name, one in slices.items()}},
    )
    record.trained = replace(record.trained, backend=HOSTILE, history=({HOSTILE: 1.0, f"val_{HOSTILE}": 2.0},))
    record.books = [replace(each, window=HOSTILE, outcomes={HOSTILE: 3}) for each in record.books]
    record.predictions, record.places = {HOSTILE: 3}, {HOSTILE: HOSTILE}
    page = Page(report_html(record))
    assert page.tags <= plain.tags
    assert {name for name, _ in page.attributes} <= {name for name, _ in plain.attributes}
    assert page.text.count("<script>alert(1)</script>") > 10
    assert "\u202e" not in page.text


def test_the_verdict_comes_first(record_of_task):
    record = record_of_task(theirs=0.3)
    page = Page(report_html(record))
    said = page.text
    assert said.index("Version 2 is the champion now") < said.index("Challenger and champion") < said.index("Steps")
    metric = record.evaluated.decision.challenger.values["rmse"]
    assert f"{metric:,.4g}" in said
    assert "95 % confidence" in said


def test_a_model_that_was_not_promoted_says_who_stays(record_of_task):
    said = Page(report_html(record_of_task(mine=0.3, theirs=0.8))).text
    assert "Version 2 was not promoted" in said
    assert "The champion is version 1, as before." in said


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"champion": 1}, "The champion is version 1, as before."),
        ({"before": 2, "champion": 2, "version": 3}, "The champion is version 2, as before."),
        ({"before": 1, "champion": 2, "version": 2}, "The champion is version 2, which this run promoted."),
        ({"before": 1, "champion": 2}, "The champion is version 2."),  # or somebody else did meanwhile
        ({"before": 1, "champion": None}, "There is no champion."),
    ],
)
def test_who_is_the_champion_after_a_run_that_failed_is_told_as_it_is(record_of_task, model, said):
    record = record_of_task()
    record.model = model
    record.fail(DataError("the disk is full"))
    assert said in Page(report_html(record)).text


def test_a_run_that_failed_tells_the_error_and_how_far_it_came(record_of_task):
    record = record_of_task()
    record.trained = record.evaluated = None
    record.predictions, record.model = {}, {"champion": 1}
    record.fail(DataError("no row is left"))
    said = Page(report_html(record)).text
    for text in (
        "The run was refused",
        "DataError: no row is left.",
        "It came as far as ingest, features, train",
        "version 1",
    ):
        assert text in said


def test_a_run_that_ended_at_once_has_a_report(record_of_task):
    record = RunRecord(pipeline="shop", run_id="r", started="2026-03-20T12:00:00+00:00")
    record.fail(KeyboardInterrupt())
    said = Page(report_html(record)).text
    assert "The run was interrupted" in said
    assert "It ended before any step was done" in said


def test_rows_are_shown_by_window_and_reasons_largest_first(record_of_task):
    said = Page(report_html(record_of_task())).text
    assert "770 rows read = 700 kept + 49 quarantined + 21 duplicates, in 7 windows." in said
    assert said.index("positive") < said.index("known")
    assert "2026-03-05" in said
    assert "late" in said


def test_the_parts_are_shown_also_where_no_window_was_ingested(record_of_task):
    record = record_of_task()
    record.books, record.windows["ingested"] = [], []
    said = Page(report_html(record)).text
    assert "No window was new or changed, so none was read." in said
    assert re.search(r"train\s+2\s+2026-03-01 to 2026-03-02\s+600", said)


def test_rows_that_the_transform_left_out_are_shown_and_nothing_is_where_it_left_none(record_of_task):
    record = record_of_task()
    assert "in the source" not in Page(report_html(record)).text
    record.books = [replace(each, source_rows=110) for each in record.books]
    assert "in the source" not in Page(report_html(record)).text
    assert "in the source" not in dict(summary_lines(record))["rows"]
    record.books[0] = replace(record.books[0], source_rows=1000)
    said = Page(report_html(record)).text
    assert "1,660 rows in the source, 770 after the transform. 770 rows read = " in said
    assert re.search(r"window\s+in the source\s+read", said)
    assert re.search(r"2026-03-01\s+1,000\s+110\s+100", said)
    assert dict(summary_lines(record))["rows"].startswith("1,660 in the source, 770 after the transform; 770 read = ")


def test_of_many_windows_the_newest_are_shown_and_the_others_counted(record_of_task):
    record = record_of_task()
    record.books = [replace(record.books[0], window=f"2026-03-01T{n:04d}") for n in range(1000)]
    record.windows["ingested"] = [each.window for each in record.books]
    text = report_html(record)
    assert "960 earlier windows are not shown." in text
    assert "T0999" in text
    assert len(text) < 100_000


def test_steps_that_were_kept_are_shown_as_kept(record_of_task):
    said = Page(report_html(record_of_task())).text
    assert re.search(r"features\s+kept from an earlier run", said)
    assert re.search(r"train\s+done\s+4.0 s", said)


def test_a_record_that_an_older_version_wrote_is_shown(record_of_task, tmp_path):
    record = record_of_task("binary")
    old = json.loads(encode(record))
    for name in ("books", "versions", "drift", "live"):
        del old[name]
    later = ("part", "windows", "of_rows", "baseline_slices")
    for name in ("champion_slices", "values", "challenger", "champion", *later):
        del old["evaluated"][name]
    for name in ("baseline", "beats_baseline"):
        del old["evaluated"]["decision"][name]
        old["evaluated"]["decision"]["gate"].pop(name, None)
    del old["evaluated"]["decision"]["gate"]["unit"], old["trained"]["warnings"], old["trained"]["labels"]
    file = Storage.of(tmp_path).child("record.json")
    file.write_atomic(json.dumps(old).encode())
    write_report(RunRecord.load(file), Storage.of(tmp_path).child("report.html"))
    said = Page((tmp_path / "report.html").read_text()).text
    assert "770 rows read" in said
    assert "Version 2 is the champion now, the first one" in said


@pytest.mark.parametrize(
    ("task", "shown"),
    [
        ("regression", ["Predicted against true", "Residuals", "median"]),
        ("binary", ["Calibration", "ROC", "By threshold", "recall", "Confusion, challenger", "Confusion, champion"]),
        ("multiclass", ["Confusion, challenger", "Confusion, champion before", "recognised"]),
    ],
)
def test_what_the_predictions_look_like_is_shown_by_task(record_of_task, task, shown):
    said = Page(report_html(record_of_task(task, theirs=0.3))).text
    assert not [text for text in shown if text not in said]


@pytest.mark.parametrize("task", ["regression", "binary", "multiclass"])
def test_every_figure_stands_beside_a_guess_without_a_model_and_says_its_rows(record_of_task, task):
    record = record_of_task(task, theirs=0.3)
    decision = record.evaluated.decision
    metric, baseline = decision.gate.metric, decision.baseline
    text = report_html(record)
    said = Page(text).text
    rows = "400 held-out rows of the part test, 2026-03-05 to 2026-03-06"
    assert said.count(rows) == 4  # the card, the metrics, the figures, the slices
    for name, value in baseline.values.items():
        assert f'<td class="n">{value:,.4g}</td><td>{baseline.guesses[name]}'.replace("'", "&#39;") in text
    assert f"{metric} without a model: {baseline.guesses[metric]}, on the same rows" in said
    assert '<td class="n">7.25</td>' in text
    lines = dict(summary_lines(record))
    assert lines["baseline"] == f"beats the baseline: yes, {baseline.said(metric)}"
    assert lines["quality"].endswith(f"on {rows}")
    assert "choose the epoch" not in said
    record.evaluated = replace(record.evaluated, part="validate")
    assert "the same rows choose the epoch, so figures are a little too good" in Page(report_html(record)).text


def test_a_model_that_does_not_beat_the_baseline_is_told_of_at_the_head(record_of_task):
    record = record_of_task("binary", mine=-1.0)
    assert (record.outcome, record.evaluated.decision.outcome) == ("not promoted", "below_baseline")
    text = report_html(record)
    assert '<header class="bad">' in text
    assert '<p class="alarm"><b>Beats the baseline: no.</b></p>' in text
    assert dict(summary_lines(record))["baseline"].startswith("beats the baseline: no, always the share of training")
    assert "Beats the baseline" not in report_html(record_of_task("binary"))


def test_losses_that_look_wrong_are_told_of_at_the_head_and_beside_the_curves(record_of_task):
    record = record_of_task()
    record.trained = replace(record.trained, warnings=("the training loss lies far below <it>",))
    text = report_html(record)
    assert text.count("The training loss lies far below &lt;it&gt;.") == 2
    assert '<header class="bad">' in text
    assert dict(summary_lines(record))["losses"] == "the training loss lies far below <it>"


def test_groups_of_rows_say_what_they_are(record_of_task):
    record = record_of_task()
    decision = replace(record.evaluated.decision, groups=37, gate=replace(Gate(metric="rmse"), unit="values of shop"))
    record.evaluated = replace(record.evaluated, decision=decision)
    said = Page(report_html(record)).text
    assert "They are of 37 values of shop: what belongs together errs together" in said


def test_a_lone_chart_takes_the_width_of_the_page(record_of_task):
    text = report_html(record_of_task())
    assert text.count('<figure class="wide">') == 1  # the loss; the others stand beside each other


def test_the_confusion_table_counts_the_rows(record_of_task):
    record = record_of_task("multiclass")
    table = record.evaluated.challenger.confusion.weights
    text = report_html(record)
    first = re.search(r'<tr><th scope="row">a</th>(.*?)</tr>', text)[1]
    assert re.findall(r">(\d+)</td>", first) == [str(round(weight)) for weight in table[0]]


def test_by_threshold_tells_precision_and_recall_of_all_rows_from_there_on(record_of_task):
    record = record_of_task("binary")
    bins = record.evaluated.challenger.calibration
    taken = [one for one in bins if one.low >= 0.5]
    hits = sum(one.weight * one.observed for one in taken)
    expected = record.evaluated.decision.challenger.values
    assert hits / sum(one.weight for one in taken) == pytest.approx(expected["precision"])
    row = re.search(r"<tr><td class=\"n\">0.5</td>(.*?)</tr>", report_html(record))[1]
    assert re.findall(r">([\d.]+)</td>", row)[-2:] == [f"{expected['precision']:.3f}", f"{expected['recall']:.3f}"]


def test_slices_that_are_not_shown_are_counted(record_of_task):
    record = record_of_task()
    record.evaluated = replace(record.evaluated, values={"shop": 1234})
    said = Page(report_html(record)).text
    assert "1,234 different values" in said
    assert "the other 1,231 stand together as (others)" in said


def test_slices_that_are_numbers_stand_in_their_order(record_of_task):
    record = record_of_task()
    [one, *_] = record.evaluated.slices["shop"].values()
    hours = dict.fromkeys(["17", "8", "(missing)", "10", "(others)"], one)
    record.evaluated = replace(record.evaluated, slices={"hour": hours}, champion_slices={})
    assert re.search(r">8<.*>10<.*>17<.*>\(missing\)<.*>\(others\)<", report_html(record), re.DOTALL)


def measure(value, threshold=0.2, chance=0.01):
    return Measure(value=value, chance=chance, threshold=threshold)


def window(price, colour=None):
    features = {"price": FeatureDrift(alarm=price > 0.2, reason=f"psi of {price}", measures={"psi": measure(price)})}
    if colour is not None:
        features["colour"] = FeatureDrift(alarm=False, reason="no drift", measures={"psi": measure(colour)})
    alarm = price > 0.2
    return Drift(reason="1 of 2 drifts", alarm=alarm, judged=True, rows=100, features=features)


def test_drift_is_shown_by_window_and_feature_the_strongest_first(record_of_task):
    record = record_of_task()
    windows = {"2026-03-01": window(0.1, 0.15), "2026-03-02": window(0.5, 0.02)}
    record.drift = Drifted(against=3, action="warn", reason="price drifts", windows=windows)
    said = Page(report_html(record)).text
    assert "Price drifts. Compared with what version 3 was trained on." in said
    assert re.search(r"feature\s+2026-03-01\s+2026-03-02\s+price\s+0.50\s+2.50\s+colour\s+0.75\s+0.10", said)
    assert "2026-03-02, price: psi of 0.5" in said


def test_features_without_limits_and_windows_without_rows_are_shown(record_of_task):
    record = record_of_task()
    empty = Drift(reason="the window has no rows", alarm=False, judged=False, rows=0, features={})
    free = FeatureDrift(alarm=False, reason="no drift", measures={"ks": measure(0.5, threshold=None)})
    sound = Drift(reason="none drifts", alarm=False, judged=True, rows=9, features={"price": free})
    record.drift = Drifted(against=1, action="none", reason="none drifts", windows={"a": sound, "b": empty})
    said = Page(report_html(record)).text
    assert "b: the window has no rows" in said
    assert re.search(r"price\s+0.00\s+-", said)


def test_errors_of_predictions_that_came_true_are_shown_over_time(record_of_task):
    record = record_of_task()
    measured = record.evaluated.decision.challenger
    windows = [
        LiveError(window=f"2026-03-0{day}", version=version, key="k", waiting=day, measured=measured, baseline=6.5)
        for day in (1, 2, 3)
        for version in (1, 2)
    ]
    windows.append(LiveError(window="2026-03-04", version=2, key="k", waiting=100, trained_on=True))
    record.live = Live(label="target", metric="rmse", windows=tuple(windows), reason="one window waits")
    text = report_html(record)
    page = Page(text)
    assert "rmse of target as it came true" in page.text
    assert "version 1" in page.text
    assert "One window waits." in page.text
    assert "trained on it, too low" in page.text
    assert text.count('<td class="n">6.5</td>') == 6  # beside each error, and a line in the chart
    assert "without a model" in page.text
    record.live = Live(label="target", metric="rmse", reason="nothing was predicted yet")
    assert "Nothing was predicted yet." in Page(report_html(record)).text


def test_every_trial_of_a_search_is_told_with_its_settings_and_what_it_came_to(record_of_task):
    record = record_of_task()
    assert "Search" not in Page(report_html(record)).text
    trials = (
        Trial(settings={"train.learning_rate": 0.25}, value=0.125, epochs=3, seconds=2.0),
        Trial(settings={"train.learning_rate": 1e30}, value=None, failed="the loss is <b>nan</b>"),
    )
    record.trained = replace(record.trained, trials=trials, chosen=0, chosen_by="val_rmse")
    text = report_html(record)
    said = Page(text).text
    for one in ("2 trials", "compared by val_rmse", "1 failed", "train.learning_rate", "0.125", "1e+30", "chosen"):
        assert one in said
    assert "the loss is <b>nan</b>" in said
    assert "<b>nan" not in text
