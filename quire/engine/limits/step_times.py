"""Compute times of steps, corrected by every step that runs."""

from enum import Enum, auto
from typing import NamedTuple

from quire.core.plan import StepPlan, Tier
from quire.engine.limits.guess_costs import GuessCosts
from quire.engine.observer import Step

NOISE = 0.1  # of a measurement, relative to the time of the step
DRIFT = 0.1  # of a coefficient between two measurements, relative to itself
UNKNOWN_S2 = 1.0  # variance of a coefficient before the first measurement
LAST_SHARE = 0.25  # of the newest step in the mean of its kind
MAX_RATIO = 2.0  # to that mean, at which a slower step counts: it was disturbed
# A step that copies pages from the host is held to be slowed by them if it takes longer than others by so much.
SLOWED = 0.05
DECODES_INTERVAL_S = 0.05  # steps of decodes alone hardly differ, so few of them correct the line


class StepKind(Enum):
    """The contents of a step, by the programs that it runs."""

    SINGLE = auto()  # decodes of one token
    BURST = auto()  # decodes of several tokens, one after the other
    GUESSES = auto()  # decodes, some with guesses
    FORCED = auto()  # decodes, some with forced tokens and none with guesses
    PROMPTS = auto()  # any part of a prompt

    @classmethod
    def of(cls, plan: StepPlan) -> "StepKind":
        if plan.num_prefills:
            return cls.PROMPTS
        if plan.num_verified:
            return cls.GUESSES
        if plan.num_forced:
            return cls.FORCED
        return cls.BURST if plan.burst > 1 else cls.SINGLE


class StepLoad(NamedTuple):
    """The work in a step, for one token of each row."""

    num_decodes: int = 0  # guesses included, which are computed like decodes
    decode_context: int = 0  # positions that the rows of decodes read
    num_prefill_tokens: int = 0  # forced tokens included
    prefill_pairs: int = 0  # of a prompt token and a position that it reads

    @classmethod
    def of(cls, plan: StepPlan) -> "StepLoad":
        chunks, num_plain = plan.chunks, plan.num_decodes
        num_rows = num_plain + plan.num_verified
        return cls(
            num_plain + sum([chunk.length for chunk in chunks[num_plain:num_rows]]),
            sum([chunk.start + 1 for chunk in chunks[:num_rows]]),
            sum([chunk.length for chunk in chunks[num_rows:]]),
            sum([chunk.length * (chunk.start + chunk.length // 2) for chunk in chunks[num_rows:]]),
        )

    def features(self) -> list[float]:
        """In units in which a step has about 1 of each."""
        return [
            1.0,
            self.num_decodes / 100,
            self.decode_context / 100_000,
            self.num_prefill_tokens / 1000,
            self.prefill_pairs / 1_000_000,
        ]


class LinearTime:
    """Seconds of a step as a sum over its load, with coefficients that are corrected by every measurement.

    A Kalman filter. Errors are relative to the larger of the predicted and the measured time, so a single slow step
    changes little, and milliseconds and seconds are treated alike. No coefficient is negative.
    """

    def __init__(self) -> None:
        size = len(StepLoad().features())
        self._seconds = [0.0] * size  # by feature
        self._variance = [[UNKNOWN_S2 * (i == j) for j in range(size)] for i in range(size)]

    def predict(self, load: StepLoad) -> float:
        return sum(seconds * feature for seconds, feature in zip(self._seconds, load.features(), strict=True))

    def measure(self, load: StepLoad, took_s: float) -> None:
        """A step with this load took so long."""
        predicted_s = self.predict(load)
        scale_s = max(predicted_s, took_s, 1e-6)
        features = [feature / scale_s for feature in load.features()]
        indices = range(len(features))
        for i in indices:
            drift_s = DRIFT * max(self._seconds[i], 0.05 * (predicted_s or took_s))
            self._variance[i][i] = min(self._variance[i][i] + drift_s**2, UNKNOWN_S2)
        spread = [sum(self._variance[i][j] * features[j] for j in indices) for i in indices]
        total = sum(spread[i] * features[i] for i in indices) + NOISE**2
        error = (took_s - predicted_s) / scale_s
        for i in indices:
            self._seconds[i] = max(0.0, self._seconds[i] + spread[i] / total * error)
            for j in indices:
                self._variance[i][j] -= spread[i] * spread[j] / total

    def prefill_tokens_within(self, limit_s: float, load: StepLoad) -> float:
        """Number of prompt tokens beside the decodes of `load`, at its mean context, that take `limit_s` together."""
        pairs = load.prefill_pairs / max(1, load.num_prefill_tokens)  # by token
        token_s = self._seconds[3] / 1000 + self._seconds[4] * pairs / 1_000_000
        left_s = limit_s - self.predict(load._replace(num_prefill_tokens=0, prefill_pairs=0))
        return max(0.0, left_s) / token_s if token_s > 0 else float("inf")


class Measured(NamedTuple):
    """A measured step."""

    kind: StepKind
    token_s: float  # its compute time, for one token of each row
    num_restored: int = 0  # pages that came from the host in it
    is_slowed: bool = False  # it took longer than others of its kind
    load: StepLoad | None = None  # by which it has corrected the line; None if it has not


class StepTimes:
    """The time that steps take to compute: neither a wait for a compiler nor one for copies of pages is a part of it.

    Two views of the same measurements: a line over what a step holds, for steps that have not run yet, and the mean of
    the last steps of each kind. What guesses cost is compared with the latter. Owned by the engine thread.
    """

    def __init__(self, restores_ahead: bool = False, guess_costs: GuessCosts | None = None) -> None:
        """`restores_ahead`: pages come from the host while the device computes. Elsewhere the copies are a part of the
        step, which then tells nothing of the time to compute. `guess_costs`: where steps may have guesses."""
        self.line = LinearTime()
        self.guess_costs = guess_costs
        self.most_prompt_tokens = 0  # of a measured step
        self._restores_ahead = restores_ahead
        self._recent: dict[StepKind, float] = {}
        self._prompt_context = 0  # positions that a token of the last prompts read
        self._next_decodes_s = 0.0

    def recent_s(self, kind: StepKind) -> float | None:
        """The mean time of the last steps of this kind, which are no prompts, for one token of each row."""
        return self._recent.get(kind)

    def forget(self, kind: StepKind) -> None:
        """The next step of this kind is judged by itself."""
        self._recent.pop(kind, None)

    def prompt_s(self, num_tokens: int, num_cached: int, step_tokens: int) -> float | None:
        """Time to compute tokens of a prompt after `num_cached` others, in steps of `step_tokens` at most. None before
        any were computed."""
        if not self.most_prompt_tokens:
            return None
        pairs = num_tokens * (num_cached + num_tokens // 2)
        num_steps = -(-num_tokens // step_tokens)
        return self._added_s(num_tokens, pairs) + num_steps * self.line.predict(StepLoad())

    def prompt_beside_s(self, num_tokens: int) -> float | None:
        """Time that tokens of a prompt add to a step, at the place that the last ones had in theirs. None before any
        were computed."""
        return self._added_s(num_tokens, num_tokens * self._prompt_context) if self.most_prompt_tokens else None

    def _added_s(self, num_tokens: int, pairs: int) -> float:
        load = StepLoad(num_prefill_tokens=num_tokens, prefill_pairs=pairs)
        return self.line.predict(load) - self.line.predict(StepLoad())

    def measure(self, step: Step) -> Measured | None:
        """Correct the estimates by a step. None if it says nothing."""
        plan = step.plan
        if step.error is not None or step.waited_for_compiler or not plan.chunks:
            return None
        kind = StepKind.of(plan)
        token_s = max(0.0, step.took_s - step.copies_waited_s) / plan.burst
        before = self._recent.get(kind)
        is_slowed = before is not None and token_s > (1 + SLOWED) * before
        num_restored = _num_restored(plan) if plan.copies else 0
        measured = Measured(kind, token_s, num_restored, is_slowed)
        if num_restored and (is_slowed or not self._restores_ahead):
            return measured
        if kind is not StepKind.PROMPTS:
            self._recent[kind] = token_s if before is None else _mean(before, token_s)
            if self.guess_costs is not None:
                num_tokens = len(plan.chunks) if plan.burst > 1 else step.num_tokens
                self.guess_costs.measure(
                    num_tokens, token_s, has_guesses=kind is StepKind.GUESSES, is_burst=kind is StepKind.BURST
                )
            if step.ended_s < self._next_decodes_s:
                return measured
            self._next_decodes_s = step.ended_s + DECODES_INTERVAL_S
        load = StepLoad.of(plan)
        self.line.measure(load, token_s)
        if load.num_prefill_tokens:
            self.most_prompt_tokens = max(self.most_prompt_tokens, load.num_prefill_tokens)
            self._prompt_context = load.prefill_pairs // load.num_prefill_tokens
        return measured._replace(load=load)


def _num_restored(plan: StepPlan) -> int:
    return sum(copy.source.tier is Tier.HOST for copy in plan.copies)


def _mean(before: float, newest: float) -> float:
    return before + LAST_SHARE * (min(newest, MAX_RATIO * before) - before)
