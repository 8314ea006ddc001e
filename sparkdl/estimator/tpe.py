"""Settings that are drawn by what earlier trials came to: Optuna's sampler (Bergstra et al., NeurIPS 2011)."""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from sparkdl.errors import ConfigError


class TpeSampler:
    """Draws the settings of one trial after the other; safe to ask from several threads.

    Trials that run side by side are drawn without knowing of each other's values, which spreads them: Optuna takes
    those of a trial under way for bad ones.

    Args:
        space: as of ``tune``: by name of a setting its values, or a ``Range``.
        maximise: whether more is better.
        seed: of what is drawn.

    Raises:
        ConfigError: Optuna is not installed.
    """

    def __init__(self, space: Mapping[str, Any], *, maximise: bool, seed: int) -> None:
        try:
            import optuna
        except ImportError as cause:
            raise ConfigError(
                "method='tpe' draws by Optuna, which is not installed: pip install optuna, or choose method='random'"
            ) from cause
        self._optuna = optuna
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._study = optuna.create_study(direction="maximize" if maximise else "minimize")
        self._seed = seed
        self._choices = {name: list(values) for name, values in space.items() if isinstance(values, Sequence)}
        self._space = {name: self._distribution(values) for name, values in space.items()}
        self._asked: dict[int, Any] = {}
        self._lock = threading.Lock()

    def _distribution(self, values: Any) -> Any:
        kinds = self._optuna.distributions
        if isinstance(values, Sequence):
            return kinds.CategoricalDistribution(tuple(range(len(values))))  # by place: a value may be a list
        if values.whole:
            return kinds.IntDistribution(math.ceil(values.low), math.floor(values.high), log=values.log)
        return kinds.FloatDistribution(float(values.low), float(values.high), log=values.log)

    def ask(self, number: int) -> dict[str, Any]:
        """The settings of the trial of that number."""
        with self._lock:
            if number not in self._asked:
                self._study.sampler = self._sampler(number)
                self._asked[number] = self._study.ask(self._space)
            drawn = self._asked[number].params
        return {name: self._choices[name][value] if name in self._choices else value for name, value in drawn.items()}

    def _sampler(self, number: int) -> Any:
        """One for each trial: what it draws hangs on the trial's number and on what was told, not on who asked before.

        A search that goes on draws what it would have drawn.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", self._optuna.exceptions.ExperimentalWarning)
            return self._optuna.samplers.TPESampler(seed=self._seed * 1_000_003 + number, constant_liar=True)

    def tell(self, number: int, value: float | None) -> None:
        """What a trial that was asked for came to; None where it failed."""
        failed = self._optuna.trial.TrialState.FAIL
        with self._lock:
            trial = self._asked[number]
            self._study.tell(trial, **({"state": failed} if value is None else {"values": value}))

    def remember(self, number: int, settings: Mapping[str, Any], value: float | None, failed: str) -> None:
        """Take in a trial that an earlier call has drawn; with neither a value nor a reason, it goes on now.

        Raises:
            ConfigError: its settings are none of this space.
        """
        choices = {name: self._choices[name] for name in self._choices}
        try:
            if settings.keys() != self._space.keys():
                raise ValueError("it has other names")
            drawn = {
                name: choices[name].index(value_of) if name in choices else value_of
                for name, value_of in settings.items()
            }
            states = self._optuna.trial.TrialState
            trial = self._optuna.trial.create_trial(
                params=drawn,
                distributions=self._space,
                value=value,
                state=states.COMPLETE if value is not None else states.FAIL if failed else states.RUNNING,
            )
        except ValueError as cause:
            raise ConfigError(
                f"trial {number} of an earlier call was {dict(settings)}, which lies outside of space: give the space "
                "that it had, or another run_id"
            ) from cause
        with self._lock:
            self._study.add_trial(trial)
            self._asked[number] = self._study.trials[-1].number
