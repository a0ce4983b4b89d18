"""Measures what guesses cost."""

from quire.core.plan import Kind
from quire.core.step_budget import StepBudget
from quire.engine.observer import DECODE, Observer, Step

FADING = 0.998  # of the weights of steps before, in the fit
MIN_SPREAD = 0.01  # of the sizes of steps, before the fit is used
MAX_CORRECTION = 2.5  # of the tokens that are expected to take as long: a busy machine disturbs the fit
LAST_SHARE = 0.1  # of the newest step in a mean of its kind
MAX_STEP = 4.0  # times the mean that a step counts as, at most: one may be disturbed
MIN_STEPS = 4  # of either kind, before they are compared
NOISE = 1.3  # up to which a ratio says nothing
MAX_COST = 16.0


class MeanTime:
    """The mean time of steps of a kind by the tokens that they should take as long as, of which the last weigh most."""

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        if self.count > MIN_STEPS:
            seconds = min(seconds, MAX_STEP * self.seconds)
        self.seconds += max(LAST_SHARE, 1 / self.count) * (seconds - self.seconds)


class GuessCost(Observer):
    """Measures what the choice of guesses goes by.

    First, the tokens that take as long as a step takes whatever it holds: the time of steps without prompts is fitted
    by a line over the tokens they are padded to, by least squares with weights that fade. Steps of one size alone say
    nothing, and change nothing. Second, how many times as long as that line says a step with guesses takes, compared
    with one without, which may give several tokens. Owned by the engine thread.
    """

    def __init__(self, budget: StepBudget) -> None:
        self._budget = budget
        self._expected = budget.fixed_tokens
        # Sums over steps: weights, tokens, seconds, tokens squared, tokens times seconds.
        self._sums = [0.0] * 5
        self._plain, self._guessing = MeanTime(), MeanTime()

    def step_ended(self, step: Step) -> None:
        plan = step.plan
        if step.error is not None or step.waited_for_compiler or step.kind is not DECODE:
            return
        is_guessing = plan.chunks[-1].kind is Kind.VERIFY  # they come last
        tokens = self._budget.padded(len(plan.chunks) if plan.burst > 1 else step.num_tokens)
        if plan.burst == 1:
            self._fit(tokens, step.took_s)
        mean = self._guessing if is_guessing else self._plain
        mean.add(step.took_s / plan.burst / (self._budget.fixed_tokens + tokens))
        if min(self._plain.count, self._guessing.count) >= MIN_STEPS and self._plain.seconds > 0:
            cost = self._guessing.seconds / self._plain.seconds
            self._budget.guessing_cost = min(cost, MAX_COST) if cost > NOISE else 1.0

    def _fit(self, tokens: int, took_s: float) -> None:
        # Relative errors count, so that a long step weighs no more than a short one.
        weight = 1 / max(took_s, 1e-6) ** 2
        newest = (1.0, float(tokens), took_s, tokens * tokens, tokens * took_s)
        self._sums = [FADING * old + weight * new for old, new in zip(self._sums, newest, strict=True)]
        total, x, y, xx, xy = self._sums
        spread = total * xx - x * x
        if spread < MIN_SPREAD * xx * total:
            return
        token_s = (total * xy - x * y) / spread
        fixed_s = (y - token_s * x) / total
        if token_s > 0:
            least, most = self._expected / MAX_CORRECTION, self._expected * MAX_CORRECTION
            self._budget.fixed_tokens = min(max(fixed_s / token_s, least), most)
