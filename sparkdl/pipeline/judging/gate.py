"""Whether a challenger takes the champion's place, decided on rows that neither was trained with.

The gain is bootstrapped over groups, days or keys, since the rows of a day err together; each draw takes both models'
predictions of the same groups, so what makes a day hard cancels (Efron and Tibshirani 1993, sections 8.3 and 13.3).
With few groups a percentile is too near the middle: it is taken further out, by Student's t (Hesterberg 2015, "What
teachers should know about the bootstrap", section 3.6), and a day that weighs much on the good side pulls it up: the
bound is no higher than Student's with the draws' standard error. Asked for 95 %, models that are equally good were
promoted in 4 to 5.5 % of trials with 5 to 40 days, and in 5 to 6.5 % where few days carry most of the error.

More groups than ``BLOCKS`` are joined at random first, the method of random groups (Wolter 2007, chapter 2): a draw
costs the same for a thousand keys and for a million.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from sparkdl.metrics.measure import Measured, check_metric_of, measure, metric_over
from sparkdl.metrics.names import HIGHER_IS_BETTER
from sparkdl.metrics.rows import Floats, Rows
from sparkdl.pipeline.judging.baseline import Baseline
from sparkdl.pipeline.spec.operation import MIN_GROUPS, RESAMPLES, Floor

Outcome = Literal[
    "first",  # there is no champion, or none before this one
    "champion_unusable",  # it cannot predict these rows
    "better",
    "not_worse",
    "not_proven",  # perhaps better, but not beyond what chance gives
    "equal",  # both predict the same, or as well in every draw
    "worse",
    "too_little",  # rows, groups or positives
    "undefined",  # the metric has no finite value for the challenger
    "below_floor",
    "below_baseline",  # no better than guessing without a model
]
_UNRIVALLED: tuple[Outcome, ...] = ("first", "champion_unusable")
_PROMOTED: tuple[Outcome, ...] = (*_UNRIVALLED, "better", "not_worse")
BLOCKS = 400
"""Most blocks that a draw chooses from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """What a promotion needs, as the file says it: its section refuses what makes no sense.

    Attributes:
        metric: what is compared; its direction is known.
        mode: ``better`` by more than ``effect``, or ``not_worse`` by more than ``margin``.
        effect: how much better, in the metric's unit.
        margin: how much worse still passes, in the metric's unit; above 0 for ``not_worse``.
        confidence: one-sided; a challenger that is not better passes with a probability of about 1 - ``confidence``.
        min_rows: fewer held-out rows promote nobody, but for a first champion without floors.
        min_groups: fewer days or keys compare nobody; a first champion needs none.
        min_positives: fewer rows of either class of two promote nobody.
        floors: ``"auc >= 0.7"`` and the like, each of which the challenger reaches.
        baseline: who must beat the best guess without a model: a ``first`` champion, which beats nobody else,
            ``always``, or ``never``; not asked of fewer than ``min_rows`` rows.
        unit: what the bootstrap draws, in the plural, for its sentences: days, or the values of some columns.
        resamples: bootstrap draws.
        seed: of the draws.
    """

    metric: str
    mode: Literal["better", "not_worse"] = "better"
    effect: float = 0.0
    margin: float = 0.0
    confidence: float = 0.95
    min_rows: int = 30
    min_groups: int = MIN_GROUPS
    min_positives: int = 10
    floors: tuple[str, ...] = ()
    baseline: Literal["first", "always", "never"] = "first"
    unit: str = "groups"
    resamples: int = RESAMPLES
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What the gate decided; a document as it is (``documents.typed``).

    Attributes:
        promote: whether the challenger becomes the champion.
        outcome: which case it was.
        reason: one sentence with the figures.
        gate: what was asked for.
        challenger: its metrics.
        champion: its metrics on the same rows; None where there is none, or it cannot predict them.
        gain: how much better the challenger is, negative where it is worse; None where nothing was compared.
        lower: the lower bound of the gain at the gate's confidence; None where nothing was compared, or it has none.
        rows: held-out rows.
        groups: days or keys among them.
        positives: rows of class 1; None where classes are not two.
        baseline: the best guesses without a model on the same rows; None where the training labels are not known.
        beats_baseline: whether the challenger's metric is better than theirs; None where there is nothing to compare.
        baseline_lower: the lower bound of how much better, at the gate's confidence; None where it was not asked for.
    """

    promote: bool
    outcome: Outcome
    reason: str
    gate: Gate
    challenger: Measured
    champion: Measured | None
    gain: float | None = None
    lower: float | None = None
    rows: int
    groups: int
    positives: int | None
    baseline: Baseline | None = None
    beats_baseline: bool | None = None
    baseline_lower: float | None = None

    @property
    def baseline_by_chance(self) -> bool:
        """Whether it is better than the baseline by no more than chance gives."""
        return bool(self.beats_baseline) and self.baseline_lower is not None and self.baseline_lower <= 0

    def baseline_text(self) -> str:
        """Whether the challenger beats the best guess without a model, and what that has; empty where nobody knows."""
        metric = self.gate.metric
        if self.baseline is None or metric not in self.baseline.values:
            return ""
        verdict = {True: "beats the baseline: yes, ", False: "beats the baseline: no, ", None: ""}[self.beats_baseline]
        if self.baseline_by_chance:
            verdict = "beats the baseline: no more than by chance, "
        return f"{verdict}{self.baseline.said(metric)}"


def decide(
    gate: Gate,
    challenger: Rows,
    champion: Rows | None = None,
    *,
    champion_error: str = "",
    seen: str = "",
    baseline: Baseline | None = None,
    guess: Rows | None = None,
) -> Decision:
    """Decide about a challenger.

    Args:
        gate: what is asked for.
        challenger: held-out rows with its predictions.
        champion: the same rows with the champion's; None if there is none yet, or it failed.
        champion_error: why the champion could not predict the rows, such as a schema that it does not know. It then
            serves nobody, and is replaced by any challenger that reaches the floors and beats the baseline.
        seen: why no row can judge the champion, such as that it was trained on all of them. It then stays.
        baseline: the best guesses without a model on the same rows.
        guess: the same rows with that for the gate's metric, to tell whether chance alone beats it.

    Raises:
        ConfigError: a metric is none of the task.
        DataError: the two were not scored on the same rows.
    """
    for name in (gate.metric, *(Floor.parse(floor).metric for floor in gate.floors)):
        check_metric_of(challenger, name)
    if champion is not None:
        challenger.check_same(champion)
    result, rival_result = measure(challenger), None if champion is None else measure(champion)
    beats = None if baseline is None else baseline.beaten_by(gate.metric, result.values.get(gate.metric))
    outcome, reason, gain, lower = _judge(gate, challenger, champion, result, rival_result, champion_error, seen)
    if baseline is not None and beats is False:
        reason += f"; beats the baseline: no, {baseline.said(gate.metric)}"
        vetoed_outcomes = _PROMOTED if gate.baseline == "always" else _UNRIVALLED if gate.baseline == "first" else ()
        useless = not baseline.constant_beaten_by(gate.metric, result.values[gate.metric])
        if outcome in vetoed_outcomes and useless and len(challenger) >= gate.min_rows:
            outcome = "below_baseline"
            reason += f", which publish.gate.baseline={gate.baseline} refuses (never lets it pass)"
    groups, baseline_lower = _groups(challenger), None
    if guess is not None and baseline is not None and beats and groups >= gate.min_groups:
        gained = abs(result.values[gate.metric] - baseline.values[gate.metric])
        baseline_lower = _lower(gains(gate, challenger, guess), gained, groups, gate.confidence)
    return Decision(
        promote=outcome in _PROMOTED,
        outcome=outcome,
        reason=reason,
        gate=gate,
        challenger=result,
        champion=rival_result,
        gain=gain,
        lower=lower,
        rows=len(challenger),
        groups=groups,
        positives=int(challenger.labels.sum()) if challenger.task == "binary" else None,
        baseline=baseline,
        beats_baseline=beats,
        baseline_lower=baseline_lower,
    )


_Judged = tuple[Outcome, str, float | None, float | None]


def _judge(
    gate: Gate,
    challenger: Rows,
    champion: Rows | None,
    result: Measured,
    rival_result: Measured | None,
    error: str,
    seen: str,
) -> _Judged:
    little = _too_little(gate, challenger, compared=champion is not None)
    if little:
        return "too_little", little, None, None
    for name in (gate.metric, *(Floor.parse(floor).metric for floor in gate.floors)):
        if name not in result.values:
            return "undefined", f"the challenger's {result.undefined[name]}", None, None
    for floor in map(Floor.parse, gate.floors):
        if not floor.holds(result.values[floor.metric]):
            reason = f"the challenger's {floor.metric} of {result.values[floor.metric]:.4g} misses the floor {floor}"
            return "below_floor", reason, None, None
    text = f"{gate.metric} {result.values[gate.metric]:.4g} over {result.rows:,} rows"
    reached = f" and reaches {', '.join(str(Floor.parse(floor)) for floor in gate.floors)}" if gate.floors else ""
    if champion is None or rival_result is None:
        if error:
            return "champion_unusable", f"the champion cannot predict these rows ({error}); {text}{reached}", None, None
        if seen:
            return "too_little", seen, None, None
        return "first", f"there is no earlier champion; the challenger has {text}{reached}", None, None
    if gate.metric not in rival_result.values:
        return "champion_unusable", f"the champion's {rival_result.undefined[gate.metric]}; {text}{reached}", None, None
    return _compare(gate, challenger, champion, result.values[gate.metric], rival_result.values[gate.metric])


def _too_little(gate: Gate, rows: Rows, *, compared: bool) -> str:
    """Why the rows can show nothing; the first of all models has nothing to show if there is no floor to reach."""
    if not compared and not gate.floors:
        return ""
    if len(rows) < gate.min_rows:
        return f"there are {len(rows):,} held-out rows, and the gate asks for {gate.min_rows:,}"
    if rows.task == "binary":
        positives = int(rows.labels.sum())
        for count, label in ((positives, 1), (len(rows) - positives, 0)):
            if count < gate.min_positives:
                share_text = f"{count:,} of {len(rows):,} held-out rows"
                return f"{share_text} have label {label}, and the gate asks for {gate.min_positives:,}"
    groups = _groups(rows)
    if compared and groups < gate.min_groups:
        belong = "all held-out rows belong to 1 group" if groups == 1 else f"held-out rows are of {groups} {gate.unit}"
        return f"{belong}, and the gate asks for {gate.min_groups} to tell a gain from chance"
    return ""


def _groups(rows: Rows) -> int:
    return len(np.unique(rows.groups[rows.weights > 0]))


def gains(gate: Gate, challenger: Rows, champion: Rows) -> Floats:
    """Return the gain in each bootstrap draw, ascending; -inf where a draw leaves the metric undefined."""
    present, codes = np.unique(challenger.groups, return_inverse=True)
    blocked_rows = [
        replace(rows, groups=codes, group_count=len(present)).in_blocks(BLOCKS, gate.seed)
        for rows in (challenger, champion)
    ]
    groups = blocked_rows[0].group_count
    random = np.random.default_rng(gate.seed)
    draws = random.multinomial(groups, np.full(groups, 1 / groups), size=gate.resamples).astype(np.float64)
    challenger_draws, champion_draws = (metric_over(rows, gate.metric, draws) for rows in blocked_rows)
    gain = challenger_draws - champion_draws if HIGHER_IS_BETTER[gate.metric] else champion_draws - challenger_draws
    return np.sort(np.where(np.isfinite(gain), gain, -np.inf))


def _lower(drawn: Floats, gain: float, groups: int, confidence: float) -> float | None:
    """The lower of two bounds: the percentile that Student's t moves outwards, and Student's own around the gain.

    It is None where too many draws leave the metric undefined.
    """
    from scipy.special import ndtr, stdtrit  # half a second to load, for those who compare

    blocks = min(groups, BLOCKS)
    reach = math.sqrt(blocks / (blocks - 1)) * float(stdtrit(blocks - 1, confidence))
    percentile = float(drawn[int(ndtr(-reach) * len(drawn))])
    bound = min(percentile, gain - reach * float(drawn[np.isfinite(drawn)].std()))
    return bound if math.isfinite(bound) else None


def _compare(gate: Gate, challenger: Rows, champion: Rows, new: float, old: float) -> _Judged:
    drawn, groups = gains(gate, challenger, champion), _groups(challenger)
    gain = new - old if HIGHER_IS_BETTER[gate.metric] else old - new
    lower = _lower(drawn, gain, groups, gate.confidence)
    bar = gate.effect if gate.mode == "better" else -gate.margin
    demand = f"the gate asks for {'more than' if gate.mode == 'better' else 'no less than'} {bar:.4g}"
    scores = f"{gate.metric} {new:.4g} against the champion's {old:.4g} on the same {len(challenger):,} rows"
    if lower is None:
        undefined = float(np.mean(np.isinf(drawn)))
        reason = f"{scores}; the gain has no lower bound, since {undefined:.1%} of draws leave {gate.metric} undefined"
        return "not_proven", reason, gain, None
    sure = f"with {100 * gate.confidence:.4g} % confidence over {groups:,} {gate.unit} the gain is above {lower:.4g}"
    if lower > bar:
        return gate.mode, f"{scores}; {sure}, and {demand}", gain, lower
    outcome: Outcome = "not_proven" if gain > min(bar, 0) else "worse"
    if drawn[0] == drawn[-1] == 0:
        outcome = "equal"
    words = {"equal": "both do equally well in every draw", "worse": "it is worse", "not_proven": "that is not enough"}
    return outcome, f"{scores}; {words[outcome]}: {sure}, and {demand}", gain, lower
