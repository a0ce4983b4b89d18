"""Measures what guesses cost."""

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
MAX_DEVIATION = 2.0  # of a step from what its size should take, that counts
EXPECTED_STEPS = 4.0  # that took as long as they should, before any of a size has been measured
FADING_OF_SIZE = 0.97  # of the weights of steps before, in the mean of their size
HALVED_STEPS = 256  # after which what was measured of sizes weighs half as much


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
    with one without, which may give several tokens. Third, the same for steps of each size: kernels compute some
    numbers of tokens as fast as fewer. Owned by the engine thread.
    """

    def __init__(self, budget: StepBudget) -> None:
        self._budget = budget
        self._expected = budget.fixed_tokens
        # Sums over steps: weights, tokens, seconds, tokens squared, tokens times seconds.
        self._sums = [0.0] * 5
        self._plain, self._guessing = MeanTime(), MeanTime()
        # By whether they have guesses and their tokens: the weights of steps, and how many times as long they took.
        self._by_size: dict[tuple[bool, int], tuple[float, float]] = {}
        self._num_compared = 0

    def step_ended(self, step: Step) -> None:
        plan = step.plan
        if step.error is not None or step.waited_for_compiler or step.kind is not DECODE:
            return
        is_guessing = plan.num_verified > 0
        tokens = self._budget.padded(len(plan.chunks) if plan.burst > 1 else step.num_tokens)
        if plan.burst == 1:
            self._fit(tokens, step.took_s)
        mean = self._guessing if is_guessing else self._plain
        token_s = step.took_s / plan.burst / (self._budget.fixed_tokens + tokens)
        mean.add(token_s)
        if min(self._plain.count, self._guessing.count) >= MIN_STEPS and self._plain.seconds > 0:
            cost = self._guessing.seconds / self._plain.seconds
            self._budget.guessing_cost = min(cost, MAX_COST) if cost > NOISE else 1.0
            self._compare((is_guessing, tokens), token_s / self._plain.seconds)

    def _compare(self, kind: tuple[bool, int], ratio: float) -> None:
        """A step of this kind took so many times as long as the line says. Sizes that come no more are forgotten."""
        self._num_compared += 1
        if self._num_compared % HALVED_STEPS == 0:
            self._by_size = {one: (weight / 2, total / 2) for one, (weight, total) in self._by_size.items()}
            self._budget.size_costs = {one: self._size_cost(one) for one in self._by_size}
        expected = self._budget.guessing_cost if kind[0] else 1.0
        ratio = min(max(ratio, expected / MAX_DEVIATION), expected * MAX_DEVIATION)
        weight, total = self._by_size.get(kind, (0.0, 0.0))
        self._by_size[kind] = FADING_OF_SIZE * weight + 1, FADING_OF_SIZE * total + ratio
        self._budget.size_costs[kind] = self._size_cost(kind)

    def _size_cost(self, kind: tuple[bool, int]) -> float:
        """The mean of what was measured, and of steps that took as long as others of their kind."""
        (weight, total), expected = self._by_size[kind], self._budget.guessing_cost if kind[0] else 1.0
        return (EXPECTED_STEPS * expected + total) / (EXPECTED_STEPS + weight)

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
