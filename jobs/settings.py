"""The configuration of every job: one YAML file, each value of which the command line can override.

Enters: ``--config FILE`` and ``--set.SECTION.KEY=VALUE`` options. Leaves: one frozen ``Settings``, checked. An unknown
key or a value of the wrong type is a ``ConfigError`` of one sentence.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import date
from pathlib import Path
from typing import Any, get_type_hints

import jsonargparse
import yaml

from sparkdl.config import BACKENDS, require
from sparkdl.errors import ConfigError
from sparkdl.storage import Storage

__all__ = [
    "DEFAULT_CONFIG",
    "EtlSettings",
    "EventSettings",
    "ModelSettings",
    "PathSettings",
    "Settings",
    "SparkSettings",
    "TrainSettings",
    "load_settings",
]

DEFAULT_CONFIG = Path(__file__).resolve().parent / "retrain.yaml"


def _day(text: str, name: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r} is not a day: write it as 2026-03-01") from None


@dataclass(frozen=True, kw_only=True)
class PathSettings:
    """Where everything lies.

    Attributes:
        root: folder (or URI) of everything below that is not set on its own.
        raw: raw events, zones, weather.
        lake: the Delta tables.
        shards: training shards.
        registry: published models.
        runs: one folder a run: result record, report, checkpoints.
    """

    root: str = "sparkdl-data"
    raw: str | None = None
    lake: str | None = None
    shards: str | None = None
    registry: str | None = None
    runs: str | None = None

    def __post_init__(self) -> None:
        require(bool(self.root.strip()), f"paths.root={self.root!r} is empty: name a folder or a URI")

    def of(self, name: str) -> str:
        """Return the place called ``name`` (raw, lake, shards, registry, runs), as a whole address."""
        place = getattr(self, name) or f"{self.root.rstrip('/')}/{name}"
        return Storage.of(place).uri

    def table(self, name: str) -> str:
        """Return the place of a Delta table of the lake, e.g. ``features`` or ``predictions``."""
        return f"{self.of('lake')}/{name}"


@dataclass(frozen=True, kw_only=True)
class EventSettings:
    """The raw events that ``make_events`` writes.

    Attributes:
        rows: rows of the first ``days`` days together, dirt and duplicates included.
        first_day: the first day.
        days: number of days at first.
        extra_days: days after these, each as large; raise it to let a new day arrive.
        late_day: the day, counted from 0, that arrives late and as CSV; -1 for none.
        seed: decides everything; the number of processes decides nothing.
        processes: processes that write days side by side; 0 uses the cores there are, at most one a day.
        overwrite: replace days that were written with another seed or number of rows.
        generate: whether ``retrain`` makes the days that are missing; switch it off for raw data of your own.
    """

    rows: int = 200_000
    first_day: str = "2026-03-02"
    days: int = 17
    extra_days: int = 0
    late_day: int = 5
    seed: int = 7
    processes: int = 1
    overwrite: bool = False
    generate: bool = True

    def __post_init__(self) -> None:
        _day(self.first_day, "events.first_day")
        require(self.days > 0, f"events.days={self.days} must be above 0: ask for at least one day")
        require(self.extra_days >= 0, f"events.extra_days={self.extra_days} must not be below 0: leave it at 0")
        require(
            self.rows >= 100 * self.days,
            f"events.rows={self.rows} is below 100 rows for each of events.days={self.days}: raise it",
        )
        require(
            -1 <= self.late_day < self.days,
            f"events.late_day={self.late_day} is not one of events.days={self.days}: choose a lower one or -1",
        )
        require(self.seed >= 0, f"events.seed={self.seed} must not be negative: choose 0 or more")
        require(self.processes >= 0, f"events.processes={self.processes} must not be negative: 0 uses every core")

    @property
    def rows_per_day(self) -> int:
        """Rows of one day."""
        return self.rows // self.days


@dataclass(frozen=True, kw_only=True)
class EtlSettings:
    """Cleaning, and which days serve what.

    Attributes:
        training_days: at most this many days train: the latest before the validation days.
        validation_days: days held out before the scoring day.
        scoring_days: the last days, unseen by training and validation, that the champion scores.
        days: days to process again although nothing of them changed, e.g. ``[2026-03-04]``.
        max_distance_km: longer rides are quarantined.
        max_duration_minutes: longer rides are quarantined.
        max_passengers: rides with more are quarantined.
    """

    training_days: int = 14
    validation_days: int = 2
    scoring_days: int = 1
    days: list[str] = field(default_factory=list)
    max_distance_km: float = 100.0
    max_duration_minutes: float = 300.0
    max_passengers: int = 8

    def __post_init__(self) -> None:
        for name in ("training_days", "validation_days", "scoring_days", "max_distance_km", "max_duration_minutes"):
            value = getattr(self, name)
            require(value > 0, f"etl.{name}={value} must be above 0: give a positive number")
        require(self.max_passengers > 0, f"etl.max_passengers={self.max_passengers} must be above 0: raise it")
        for day in self.days:
            _day(day, "etl.days")


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The network: an embedding table for each categorical, an MLP on top.

    Attributes:
        embedding_rows: rows of each categorical's table; ids run from 0 (unknown) to rows - 1.
        embedding_width: width of each categorical's vectors.
        hidden: widths of the MLP's hidden layers.
    """

    embedding_rows: dict[str, int] = field(
        default_factory=lambda: {
            "pickup_zone": 128,
            "dropoff_zone": 128,
            "pickup_borough": 16,
            "dropoff_borough": 16,
            "vehicle": 16,
            "hour": 25,
            "weekday": 8,
        }
    )
    embedding_width: dict[str, int] = field(default_factory=dict)
    hidden: list[int] = field(default_factory=lambda: [128, 64])

    def __post_init__(self) -> None:
        for section, sizes in (("embedding_rows", self.embedding_rows), ("embedding_width", self.embedding_width)):
            for name, size in sizes.items():
                require(size > 0, f"model.{section}.{name}={size} must be above 0: give a positive number")
        require(
            bool(self.hidden) and min(self.hidden) > 0,
            f"model.hidden={self.hidden} must hold positive widths: write e.g. [128, 64]",
        )


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Training of one model.

    Attributes:
        ranks: processes that train together; never more than the cluster has slots.
        backend: ``auto``, ``horovod`` or ``torch``.
        batch_rows: rows per rank and step.
        epochs: passes over the training days at most.
        learning_rate: of AdamW at its height.
        weight_decay: of AdamW.
        max_grad_norm: gradients of the global batch are clipped to this norm; 0 does not clip.
        warmup_steps: steps over which the learning rate rises to its height.
        patience_epochs: epochs without a better validation error after which training stops.
        seed: of the initial weights and of the order of rows.
    """

    ranks: int = 2
    backend: str = "auto"
    batch_rows: int = 512
    epochs: int = 6
    learning_rate: float = 0.01
    weight_decay: float = 1e-4
    max_grad_norm: float = 0.0
    warmup_steps: int = 50
    patience_epochs: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("ranks", "batch_rows", "epochs", "learning_rate", "patience_epochs"):
            value = getattr(self, name)
            require(value > 0, f"train.{name}={value} must be above 0: give a positive number")
        for name in ("weight_decay", "max_grad_norm", "warmup_steps", "seed"):
            value = getattr(self, name)
            require(value >= 0, f"train.{name}={value} must not be negative: give 0 or more")
        require(
            self.backend in BACKENDS,
            f"train.backend={self.backend!r} is not one of {BACKENDS}: choose one of these",
        )


@dataclass(frozen=True, kw_only=True)
class SparkSettings:
    """The Spark session that a job opens when it finds none.

    Attributes:
        master: of a session started here; ``spark-submit --master`` wins over it.
        driver_memory: heap of a JVM started here, e.g. ``2g``.
        shuffle_partitions: partitions of a shuffle; 0 leaves Spark's own setting.
        conf: further settings by name.
    """

    master: str = "local[2]"
    driver_memory: str = "2g"
    shuffle_partitions: int = 4
    conf: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(
            self.shuffle_partitions >= 0,
            f"spark.shuffle_partitions={self.shuffle_partitions} must not be negative: 0 leaves Spark's own setting",
        )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything a job can be told; one section a stage.

    Attributes:
        name: name of the model in the registry and of the application in Spark.
        paths: where everything lies.
        events: the raw events that are generated.
        etl: cleaning and the split by day.
        model: the network.
        train: training.
        spark: the session.
    """

    name: str = "ride-duration"
    paths: PathSettings = field(default_factory=PathSettings)
    events: EventSettings = field(default_factory=EventSettings)
    etl: EtlSettings = field(default_factory=EtlSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    spark: SparkSettings = field(default_factory=SparkSettings)


def load_settings(argv: Sequence[str] = (), job: str = "job") -> Settings:
    """Read the YAML file that ``--config`` names (default: ``jobs/retrain.yaml``) and apply ``--set.`` options.

    Args:
        argv: command line without the program's name.
        job: name of the job, for ``--help``.

    Raises:
        ConfigError: the file cannot be read, a key is unknown, or a value has the wrong type.
    """
    parser = jsonargparse.ArgumentParser(
        prog=job,
        exit_on_error=False,
        allow_abbrev=False,
        description="Exit codes: 0 done or nothing to do, 1 refused (configuration, data, storage, too few slots), "
        "2 the cluster failed, 3 training failed, 4 unexpected error, 130 interrupted.",
    )
    parser.add_argument("--config", default=str(DEFAULT_CONFIG), help="YAML file with the settings")
    parser.add_argument("--set", type=Settings)
    path = _config_path(argv)
    data = _read_yaml(path)
    _check_keys(data, Settings, path)
    try:
        base = parser.parse_object({"config": path, "set": data})
    except argparse.ArgumentError as error:
        raise ConfigError(_sentence(error, path)) from None
    try:
        chosen = parser.parse_args(list(argv), namespace=base)
    except argparse.ArgumentError as error:
        raise ConfigError(_sentence(error, "the command line")) from None
    settings = parser.instantiate(chosen).set
    if not isinstance(settings, Settings):
        raise ConfigError(f"--set={settings!r} is not a set of sections: write --set.SECTION.KEY=VALUE")
    return settings


def _config_path(argv: Sequence[str]) -> str:
    """Find --config before the full parse, because the file's values are the parse's defaults."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    finder.add_argument("--config", default=str(DEFAULT_CONFIG))
    try:
        return str(finder.parse_known_args(list(argv))[0].config)
    except argparse.ArgumentError:
        raise ConfigError("--config has no value: name a YAML file, e.g. --config jobs/retrain.yaml") from None


def _read_yaml(path: str) -> Mapping[str, Any]:
    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config={path} cannot be read ({error.strerror}): name a YAML file that exists") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        first = " ".join(str(error).split())
        raise ConfigError(f"{path} is not YAML ({first}): correct it") from None
    if data is None:
        return {}
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path} holds a {type(data).__name__}, not sections of settings: write SECTION: KEY: VALUE")
    return {key: _without_dates(value) for key, value in data.items()}


def _without_dates(value: Any) -> Any:
    """YAML reads an unquoted 2026-03-01 as a date; settings hold days as text."""
    if isinstance(value, Mapping):
        return {key: _without_dates(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_dates(each) for each in value]
    return value.isoformat() if isinstance(value, date) else value


def _check_keys(data: Mapping[str, Any], kind: type, path: str, prefix: str = "") -> None:
    """Refuse keys that ``kind`` does not have; name the nearest one that it has."""
    hints = get_type_hints(kind)
    names = [each.name for each in fields(kind)]
    for key, value in data.items():
        if key not in names:
            near = difflib.get_close_matches(str(key), names, n=1)
            remedy = f"write {prefix}{near[0]}" if near else f"choose one of {', '.join(names)}"
            raise ConfigError(f"{prefix}{key} in {path} is not a setting: {remedy}")
        inner = hints[key]
        if not is_dataclass(inner):
            continue
        if not isinstance(value, Mapping):
            raise ConfigError(f"{prefix}{key}={value!r} in {path} is not a section: write its keys below it")
        _check_keys(value, inner if isinstance(inner, type) else type(inner), path, f"{prefix}{key}.")


def _sentence(error: argparse.ArgumentError, where: str) -> str:
    """Turn the parser's words, which run over several lines, into one sentence with both values and a remedy."""
    text = str(error)
    wrong = re.search(r'key "set\.([\w.]+)":.*?Expected an? (.*?)\. Got value: (.*)', text, re.DOTALL)
    if wrong:
        key, kind, value = wrong.groups()
        kind = kind.removeprefix("<class '").removesuffix("'>")
        return f"{key}={value.strip()!r} in {where} is not of type {kind}: correct the value"
    key_only = re.search(r'key "set\.([\w.]+)"', text)
    if key_only:
        detail = " ".join(text.split("\n", 1)[-1].split())
        return f"{key_only.group(1)} in {where} has a value of the wrong type ({detail}): correct the value"
    unknown = re.search(r"unrecognized arguments: (.*)", text)
    if unknown:
        return f"{unknown.group(1)} on the command line is not a setting: --help lists all, as --set.SECTION.KEY=VALUE"
    return f"{' '.join(text.split())} in {where}: correct it, --help lists all settings"
