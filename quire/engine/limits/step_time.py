"""Predicts the time of steps, and limits what they hold by it."""

from typing import NamedTuple

from quire.core.plan import Kind, StepPlan
from quire.core.scheduler import Scheduler
from quire.engine.observer import DECODE, Observer, Step

NOISE = 0.1  # of a measurement, relative to the time of the step
DRIFT = 0.1  # of a coefficient between two measurements, relative to itself
UNKNOWN_S2 = 1.0  # variance of a coefficient before the first measurement
MIN_PREFILL_SHARE = 32  # steps have at least this part of `max_batch_prefill_tokens` for prompts
MIN_PREFILL_TOKENS = 16
LAST_SHARE = 0.25  # of the newest decodes in the mean that bounds bursts
MAX_TIMES = 2.0  # the mean that one of them counts as
MIN_PAUSE, MAX_PAUSE = 64, 4096  # single steps before a burst is tried
DECODES_INTERVAL_S = 0.05  # steps of decodes alone hardly differ, so few of them are measured


class StepLoad(NamedTuple):
    """The work in a step."""

    num_decodes: int = 0
    decode_context: int = 0  # positions that they read
    num_prefill_tokens: int = 0
    prefill_pairs: int = 0  # of a prompt token and a position that it reads

    @classmethod
    def of(cls, plan: StepPlan) -> "StepLoad":
        num_decodes = decode_context = num_prefill_tokens = prefill_pairs = 0
        for chunk in plan.chunks:
            if chunk.kind is Kind.DECODE:
                num_decodes += 1
                decode_context += chunk.start + 1
            elif chunk.kind is Kind.VERIFY:  # its positions read the same context, and are computed like decodes
                num_decodes += chunk.length
                decode_context += chunk.start + 1
            else:
                num_prefill_tokens += chunk.length
                prefill_pairs += chunk.length * (chunk.start + chunk.length // 2)
        return cls(num_decodes, decode_context, num_prefill_tokens, prefill_pairs)

    def features(self) -> list[float]:
        """In units in which a step has about 1 of each."""
        return [
            1.0,
            self.num_decodes / 100,
            self.decode_context / 100_000,
            self.num_prefill_tokens / 1000,
            self.prefill_pairs / 1_000_000,
        ]


class StepTimeModel:
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


class StepTimeLimit(Observer):
    """While sequences decode, bounds the prompt tokens of a step so that it is predicted to take `max_step_s`.

    Prompts get a minimum share of each step, however long the decodes take. Owned by the engine thread.
    """

    def __init__(self, scheduler: Scheduler, max_step_s: float) -> None:
        self._budget = scheduler.budget
        self._max_step_s = max_step_s
        self._most = scheduler.limits.max_batch_prefill_tokens
        self._least = min(self._most, max(MIN_PREFILL_TOKENS, self._most // MIN_PREFILL_SHARE))
        self._model = StepTimeModel()
        self._largest = 0  # prompt tokens in a measured step
        self._next_decodes_s = 0.0

    def step_ended(self, step: Step) -> None:
        if step.error is not None or step.waited_for_compiler or not step.plan.chunks:
            return
        if step.kind is DECODE:
            if step.ended_s < self._next_decodes_s:
                return
            self._next_decodes_s = step.ended_s + DECODES_INTERVAL_S
        load = StepLoad.of(step.plan)
        self._model.measure(load, step.took_s / step.plan.burst)
        self._largest = max(self._largest, load.num_prefill_tokens)
        # Steps far larger than any so far are approached by doubling.
        tokens = min(self._model.prefill_tokens_within(self._max_step_s, load), 2 * self._largest, self._most)
        self._budget.max_prefill_beside_decodes = max(self._least, int(tokens))


class BurstLimit(Observer):
    """Lets the scheduler plan bursts while they end within `max_burst_s`, by the time of recent decode steps.

    A new request waits for the bursts under way, and readers of a stream get the tokens of a burst together. Bursts are
    judged by bursts: a step of one token may take the host longer than the device. Once they take too long, they begin
    again when as many single steps would be short enough, and one is tried after a pause, which is twice as long after
    each that took too long again. Owned by the engine thread.
    """

    def __init__(self, scheduler: Scheduler, max_burst_s: float) -> None:
        self._scheduler = scheduler
        self._max_burst_s = max_burst_s
        self._in_burst_s: float | None = None  # for one token of every row, in bursts; None: judged by single steps
        self._alone_s: float | None = None  # and in single steps
        self._num_alone = 0  # steps since the last burst
        self._pause = MIN_PAUSE

    def step_ended(self, step: Step) -> None:
        if step.error is not None or step.waited_for_compiler or step.kind is not DECODE:
            return
        if step.plan.num_decodes < len(step.plan.chunks):  # others have guesses, or tokens that are forced
            return
        if step.plan.burst > 1:
            self._in_burst_s = _mean(self._in_burst_s, step.took_s / step.plan.burst)
            self._alone_s, self._num_alone = None, 0
            if self._is_short(self._in_burst_s):
                self._pause = MIN_PAUSE
            else:
                self._in_burst_s, self._pause = None, min(2 * self._pause, MAX_PAUSE)
                self._allow(False)
            return
        self._alone_s = _mean(self._alone_s, step.took_s)
        self._num_alone += 1
        if self._in_burst_s is None:
            self._allow(self._is_short(self._alone_s) or self._num_alone >= self._pause)

    def _is_short(self, token_s: float) -> bool:
        return self._scheduler.limits.max_burst * token_s <= self._max_burst_s

    def _allow(self, bursts: bool) -> None:
        self._scheduler.budget.burst = self._scheduler.limits.max_burst if bursts else 1


def _mean(before: float | None, newest: float) -> float:
    """The mean of a time, of which the last weigh most. One that was disturbed counts as twice the mean."""
    return newest if before is None else before + LAST_SHARE * (min(newest, MAX_TIMES * before) - before)
