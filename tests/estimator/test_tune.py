"""Which trial a search trains next, which settings it draws, what it refuses; no Spark."""

from __future__ import annotations

import sys
import tempfile
import threading
from types import SimpleNamespace

import pytest

from sparkdl.errors import ConfigError
from sparkdl.estimator import TorchEstimator
from sparkdl.estimator.space import drawn_settings
from sparkdl.estimator.tpe import TpeSampler
from sparkdl.estimator.tune import Range, Schedule, Trial, _Search, _settings_of, looks, tune


def schedule(count, ladder=(1, 3, 9), maximise=False, seen=(), failed=()):
    trials = [Trial(number=number, settings={}) for number in range(count)]
    for number, values in dict(seen).items():
        trials[number] = Trial(number=number, settings={}, values=values, failed="ended" if number in failed else "")
    return Schedule(ladder, 3, maximise=maximise, trials=trials)


def walked(plan, value_of):
    """The jobs of one worker, in order."""
    jobs = []
    while (job := plan.next()) is not None:
        jobs.append(job)
        plan.done(*job, value_of(*job))
    return jobs


def test_the_best_third_of_those_that_were_looked_at_goes_on():
    jobs = walked(schedule(9), lambda number, epochs: float(number))
    assert jobs == [
        (0, 1),
        (1, 1),
        (2, 1),
        (0, 3),
        (3, 1),
        (4, 1),
        (5, 1),
        (1, 3),
        (6, 1),
        (7, 1),
        (8, 1),
        (2, 3),
        (0, 9),
    ]


def test_of_a_metric_that_should_be_great_the_greatest_go_on():
    jobs = walked(schedule(9, maximise=True), lambda number, epochs: float(number))
    assert (8, 3) in jobs
    assert jobs[-1] == (8, 9)


def test_a_trial_that_failed_never_goes_on_and_counts_for_nobody():
    jobs = walked(schedule(9), lambda number, epochs: None if number < 6 else float(number))
    assert [job for job in jobs if job[1] > 1] == [(6, 3)]


def test_a_search_goes_on_with_what_it_has_seen():
    seen = {0: {1: 0.0, 3: 0.0}, 1: {1: 1.0}, 2: {1: 2.0}}
    jobs = walked(schedule(6, seen=seen), lambda number, epochs: float(number))
    assert jobs == [(3, 1), (4, 1), (5, 1), (1, 3)]


def test_a_trial_that_failed_behind_a_look_stays_out_when_the_search_goes_on():
    seen = {0: {1: 0.0}, 1: {1: 1.0}, 2: {1: 2.0}}
    jobs = walked(schedule(6, seen=seen, failed=[0]), lambda number, epochs: float(number))
    assert jobs == [(3, 1), (4, 1), (5, 1), (1, 3)]


def test_a_worker_waits_for_what_others_may_send_on_and_all_end():
    plan, jobs, lock = schedule(27), [], threading.Lock()

    def work():
        while (job := plan.next()) is not None:
            with lock:
                jobs.append(job)
            plan.done(*job, float(job[0]))

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(10)
        assert not worker.is_alive()
    assert sorted(number for number, epochs in jobs if epochs == 1) == list(range(27))
    assert len(set(jobs)) == len(jobs)
    assert (0, 9) in jobs


def test_a_search_that_was_stopped_gives_no_trial():
    plan = schedule(9)
    plan.next()
    plan.stop()
    assert plan.next() is None


def test_drawn_settings_are_the_same_each_time_and_begin_alike_where_more_are_asked_for():
    space = {"lr": Range(1e-4, 1e-1, log=True), "width": Range(8, 64, whole=True), "act": ["relu", "tanh"]}
    drawn = _settings_of(space, "random", 12, 5)
    assert drawn == _settings_of(space, "random", 12, 5)
    assert drawn == _settings_of(space, "halving", 20, 5)[:12]
    assert drawn != _settings_of(space, "random", 12, 6)
    assert all(1e-4 <= one["lr"] <= 1e-1 and one["width"] in range(8, 65) for one in drawn)
    assert sum(one["lr"] < 10**-2.5 for one in _settings_of(space, "random", 400, 0)) == pytest.approx(200, abs=40)


def test_whole_numbers_lie_within_ends_that_are_none():
    space = {"width": Range(-2.6, 2.6, whole=True)}
    assert {trial["width"] for trial in drawn_settings(space, 5, seed=0)} == {-2, -1, 0, 1, 2}
    sampler = TpeSampler(space, maximise=False, seed=0)
    assert {sampler.ask(number)["width"] for number in range(40)} == {-2, -1, 0, 1, 2}


def test_a_grid_is_all_there_is():
    assert _settings_of({"a": [1, 2], "b": (3,)}, "grid", None, 0) == [{"a": 1, "b": 3}, {"a": 2, "b": 3}]


def test_trials_are_looked_at_at_rising_numbers_of_epochs():
    assert looks(20, 1, 3) == (1, 3, 9, 20)
    assert looks(9, 1, 3) == (1, 3, 9)
    with pytest.raises(ConfigError, match="min_epochs=4, and a training's epochs=4: there is nothing to stop early"):
        looks(4, 4, 2)


def test_settings_follow_what_earlier_trials_came_to_and_are_drawn_again_the_same():
    space = {"lr": Range(1e-4, 1e-1, log=True), "width": Range(1, 64, whole=True), "act": [["relu"], "tanh"]}

    def drawn(count, maximise=False):
        sampler, settings = TpeSampler(space, maximise=maximise, seed=3), []
        for number in range(count):
            settings.append(sampler.ask(number))
            sampler.tell(number, None if number == 4 else settings[-1]["width"])
        return settings

    settings = drawn(40)
    assert settings == drawn(40)
    assert all(1e-4 <= one["lr"] <= 1e-1 and one["act"] in space["act"] for one in settings)
    assert all(isinstance(one["width"], int) for one in settings)
    late, wide = ([one["width"] for one in drawn(40, maximise)[20:]] for maximise in (False, True))
    assert sum(late) < sum(wide) / 2


@pytest.mark.parametrize(
    ("metric", "mode", "maximise"),
    [
        ("val_z_r2", None, True),
        ("val_y_rmse", None, False),
        ("val_loss", None, False),
        ("val_z_r2", "min", False),
        ("val_own", "max", True),
    ],
)
def test_of_a_metric_of_one_of_several_labels_more_is_better_as_of_the_metric(tmp_path, metric, mode, maximise):
    def make(lr):
        return TorchEstimator(label_cols=["y", "z"], store=str(tmp_path))

    trial = {"lr": 0.1}
    search = _Search(make, None, [trial], metric, mode=mode, seed=0, name="s", keeps=False, tpe_space={"lr": [0.1]})
    assert search.maximise == maximise
    assert search._sampler._study.direction.name == ("MAXIMIZE" if maximise else "MINIMIZE")


def test_a_trial_with_another_transformation_is_refused_for_it_would_train_on_the_first_ones_shards(tmp_path):
    def make(lr, factor):
        return TorchEstimator(transformation_fn=lambda rows: rows * factor, store=str(tmp_path))

    settings = [{"lr": 0.1, "factor": 1}, {"lr": 0.2, "factor": 1}, {"lr": 0.1, "factor": 100}]
    search = _Search(make, None, settings, "val_loss", mode=None, seed=0, name="s", keeps=False)
    with pytest.raises(AttributeError, match="sparkSession"):  # it goes on to Spark
        search._fitted(search.trials[1], 1)
    with pytest.raises(ConfigError, match=r"^trial 2 \(lr=0.1, factor=100\) asks for other rows, columns or store"):
        search._fitted(search.trials[2], 1)


def test_a_search_that_is_to_be_kept_and_has_no_store_leaves_no_folder_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    frame = SimpleNamespace(sparkSession=SimpleNamespace(conf={"spark.master": "local[2]"}))
    with pytest.raises(ConfigError, match=r"^run_id='s' keeps a search in the estimators' store, and none is set"):
        _Search(lambda lr: TorchEstimator(), frame, [{"lr": 1}], "val_loss", mode=None, seed=0, name="s", keeps=True)
    assert not list(tmp_path.iterdir())


def test_a_search_does_not_go_on_with_other_epochs(tmp_path):
    def searched(epochs):
        def make(lr):
            return TorchEstimator(store=str(tmp_path), epochs=epochs)

        return _Search(make, None, [{"lr": 1}, {"lr": 2}], "val_loss", mode=None, seed=0, name="s", keeps=True)

    search = searched(3)
    search._keep(Trial(number=1, settings={"lr": 2}, values={1: 0.5, 3: 0.25}))
    searched(9).check_looks((1, 3, 9))
    for ladder in ((3,), (1, 4), (9,)):
        with pytest.raises(ConfigError, match=r"^trial 1 is looked at after .* looked after \[.*another run_id$"):
            searched(ladder[-1]).check_looks(ladder)


def test_a_sampler_takes_in_what_an_earlier_call_has_seen():
    space = {"x": Range(0.0, 1.0), "kind": ["a", "b"]}
    sampler = TpeSampler(space, maximise=False, seed=0)
    for number in range(20):
        sampler.remember(number, {"x": number / 20, "kind": "b"}, number / 20, "")
    sampler.remember(20, {"x": 0.5, "kind": "a"}, None, "failed")
    sampler.remember(21, {"x": 0.01, "kind": "b"}, None, "")  # interrupted
    sampler.tell(21, 0.01)
    near = [sampler.ask(number)["x"] for number in range(22, 30)]
    assert sum(near) / len(near) < 0.3
    with pytest.raises(ConfigError, match="which lies outside of space: give the space that it had"):
        sampler.remember(30, {"x": 2.0, "kind": "a"}, 1.0, "")
    with pytest.raises(ConfigError, match="which lies outside of space"):
        sampler.remember(31, {"x": 0.5}, 1.0, "")


def test_without_optuna_it_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match="method='tpe' draws by Optuna, which is not installed: pip install optuna"):
        TpeSampler({"x": [1]}, maximise=False, seed=0)


@pytest.mark.parametrize(
    ("space", "options", "sentence"),
    [
        ({}, {}, "space={} names nothing to search: give a Range or values by name"),
        ({"lr": []}, {}, "space['lr']=[] holds no values: give a list of them, or a Range"),
        ({"lr": "abc"}, {}, "space['lr']='abc' holds no values"),
        ({"lr": [object()]}, {}, "are not JSON values"),
        (
            {"lr": [1, 2]},
            {"trials": 3},
            "trials=3, and space has no more than 2 settings: ask for fewer",
        ),
        ({"lr": Range(0, 1)}, {"method": "grid"}, "space['lr'] is a Range, which a grid cannot go through"),
        ({"lr": [1]}, {"method": "grid", "trials": 2}, "trials=2 and method='grid', which tries all there are"),
        ({"lr": [1]}, {"method": "bayes"}, "method='bayes' is not one of 'random', 'grid', 'halving', 'tpe'"),
        ({"lr": [1]}, {"reduction": 2}, "reduction=2 are of method='halving', and method='random': drop them"),
        ({"lr": [1]}, {"method": "halving", "reduction": 1}, "reduction=1 is below 2"),
        ({"lr": [1]}, {"trials": 0}, "trials=0 is below 1"),
    ],
)
def test_what_cannot_be_searched_is_one_sentence(monkeypatch, space, options, sentence):
    monkeypatch.setattr("sparkdl.estimator.tune.check_frame", lambda *_: None)
    with pytest.raises(ConfigError) as refused:
        tune(None, None, space, **options)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ((2, 1), "Range(2, 1) is empty"),
        ((1, float("inf")), "is empty"),
        ((0, 1, True), "has no logarithm"),
        (("1", "2"), "Range('1', '2') has an end that is no number"),
        ((1.2, 1.8, False, True), "Range(1.2, 1.8, whole=True) holds no whole number"),
    ],
)
def test_a_range_that_holds_nothing_is_one_sentence(given, sentence):
    with pytest.raises(ConfigError) as refused:
        Range(*given)
    assert sentence in str(refused.value)
