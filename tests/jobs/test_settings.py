from __future__ import annotations

import pytest

from jobs.settings import DEFAULT_CONFIG, EtlSettings, EventSettings, Settings, load_settings
from sparkdl.errors import ConfigError


@pytest.fixture
def config(tmp_path):
    def write(text):
        path = tmp_path / "config.yaml"
        path.write_text(text)
        return f"--config={path}"

    return write


def test_the_shipped_file_holds_the_defaults_and_names_only_settings_that_exist():
    from dataclasses import replace

    shipped = load_settings([])
    assert replace(shipped, spark=Settings().spark) == Settings()
    assert shipped.spark.conf


def test_the_command_line_wins_over_the_file(config):
    argv = [config("events: {rows: 5000, days: 5, late_day: 1}\ntrain: {epochs: 3}"), "--set.events.rows=7000"]
    settings = load_settings([*argv, "--set.model.hidden=[8, 4]", "--set.etl.days=[2026-03-04]"])
    assert (settings.events.rows, settings.events.days, settings.train.epochs) == (7000, 5, 3)
    assert settings.model.hidden == [8, 4]
    assert settings.etl.days == ["2026-03-04"]


def test_days_need_no_quotes_in_yaml(config):
    settings = load_settings([config("events: {first_day: 2026-03-04}\netl: {days: [2026-03-05]}")])
    assert settings.events.first_day == "2026-03-04"
    assert settings.etl.days == ["2026-03-05"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("events: {rosw: 3}", ["events.rosw", "write events.rows"]),
        ("event: {rows: 3}", ["event in", "write events"]),
        ("trian: {epochs: 3}", ["trian", "train"]),
        ("events: 3", ["events=3", "not a section"]),
        ("events: {rows: many}", ["events.rows='many'", "int"]),
        ("events: {overwrite: 3}", ["events.overwrite='3'", "bool"]),
        ("train: {learning_rate: true}", ["train.learning_rate='True'", "float"]),
        ("model: {hidden: [a]}", ["model.hidden='a'", "int"]),
        ("model: {embedding_rows: {vehicle: x}}", ["model.embedding_rows='x'", "int"]),
        ("- 3", ["list", "sections"]),
        ("a: [", ["not YAML"]),
        ("events: {rows: 3}", ["events.rows=3", "events.days=17"]),
        ("train: {ranks: 0}", ["train.ranks=0", "above 0"]),
        ("train: {backend: mpi}", ["'mpi'", "'horovod'"]),
        ("events: {first_day: soon}", ["'soon'", "2026-03-01"]),
    ],
)
def test_a_wrong_file_is_refused_in_one_sentence_that_names_value_and_remedy(config, text, words):
    with pytest.raises(ConfigError) as refused:
        load_settings([config(text)])
    message = str(refused.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("option", "word"),
    [
        ("--set.events.rowz=3", "--set.events.rowz=3"),
        ("--set.events.ro=30000", "--set.events.ro=30000"),
        ("--set.events.rows=x", "events.rows='x'"),
        ("--rows=3", "--rows=3"),
        ("--config", "--config"),
        ("--config=/no/such/file.yaml", "/no/such/file.yaml"),
    ],
)
def test_a_wrong_option_is_refused_in_one_sentence(option, word):
    with pytest.raises(ConfigError) as refused:
        load_settings([option])
    assert word in str(refused.value)
    assert "\n" not in str(refused.value)


def test_places_follow_the_root_unless_they_are_set(config):
    settings = load_settings([config("paths: {root: /data, lake: 's3://bucket/lake'}")])
    assert settings.paths.of("raw") == "/data/raw"
    assert settings.paths.table("features") == "s3://bucket/lake/features"


def test_values_that_contradict_each_other_are_refused():
    with pytest.raises(ConfigError, match="late_day=17"):
        EventSettings(late_day=17)
    with pytest.raises(ConfigError, match="training_days=0"):
        EtlSettings(training_days=0)


def test_the_default_file_is_there():
    assert DEFAULT_CONFIG.name == "retrain.yaml"
    assert DEFAULT_CONFIG.exists()
