"""Costs of steps with guesses, compared with others."""

from collections.abc import Callable

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

Size = tuple[bool, int]  # whether a step has guesses, and the tokens that it is padded to


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


class GuessCosts:
    """Costs by which `Speculation` chooses guesses. Part of `StepTimes`, which measures steps by it.

    First, the tokens that take as long as a step takes whatever it holds: the time of steps without prompts is fitted
    by a line over the tokens they are padded to, by least squares with weights that fade. Steps of one size alone say
    nothing, and change nothing. Second, how many times as long as that line says a step with guesses takes, compared
    with one without, which may give several tokens. Third, the same for steps of each size: kernels compute some
    numbers of tokens as fast as fewer.
    """

    def __init__(self, padded: Callable[[int], int], fixed_tokens: float) -> None:
        """`padded`: the tokens that a step of so many computes. `fixed_tokens`: expected, within `MAX_CORRECTION`."""
        self.fixed_tokens = self._expected = fixed_tokens
        self.guessing_cost = 1.0
        self.size_costs: dict[Size, float] = {}
        self._padded = padded
        # Sums over steps: weights, tokens, seconds, tokens squared, tokens times seconds.
        self._sums = [0.0] * 5
        self._plain, self._guessing = MeanTime(), MeanTime()
        self._by_size: dict[Size, tuple[float, float]] = {}  # weights of steps, and how many times as long they took
        self._num_compared = 0

    def measure(self, num_tokens: int, token_s: float, *, has_guesses: bool, is_burst: bool) -> None:
        """A step of `num_tokens` took `token_s`. Of a burst both are of one token of each row."""
        tokens = self._padded(num_tokens)
        if not is_burst:
            self._fit(tokens, token_s)
        mean = self._guessing if has_guesses else self._plain
        relative_s = token_s / (self.fixed_tokens + tokens)
        mean.add(relative_s)
        if min(self._plain.count, self._guessing.count) >= MIN_STEPS and self._plain.seconds > 0:
            cost = self._guessing.seconds / self._plain.seconds
            self.guessing_cost = min(cost, MAX_COST) if cost > NOISE else 1.0
            self._compare((has_guesses, tokens), relative_s / self._plain.seconds)

    def _compare(self, size: Size, ratio: float) -> None:
        """A step of this size took so many times as long as the line says. Sizes that come no more are forgotten."""
        self._num_compared += 1
        if self._num_compared % HALVED_STEPS == 0:
            self._by_size = {known: (weight / 2, total / 2) for known, (weight, total) in self._by_size.items()}
            self.size_costs = {known: self._size_cost(known) for known in self._by_size}
        expected = self.guessing_cost if size[0] else 1.0
        ratio = min(max(ratio, expected / MAX_DEVIATION), expected * MAX_DEVIATION)
        weight, total = self._by_size.get(size, (0.0, 0.0))
        self._by_size[size] = FADING_OF_SIZE * weight + 1, FADING_OF_SIZE * total + ratio
        self.size_costs[size] = self._size_cost(size)

    def _size_cost(self, size: Size) -> float:
        """The mean of what was measured, and of steps that took as long as others of their kind."""
        (weight, total), expected = self._by_size[size], self.guessing_cost if size[0] else 1.0
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
            self.fixed_tokens = min(max(fixed_s / token_s, least), most)
