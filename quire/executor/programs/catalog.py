"""The programs of a server, and what each is expected to save."""

from collections.abc import Sequence
from functools import cached_property
from math import log

from quire.executor.host.stacks import HOST_COPY_SIZES, SPLIT_SIZES, place_sizes
from quire.executor.programs.kinds import WAYS, Key, kind_of
from quire.executor.programs.ladder import TIMED_ROWS, StepShape
from quire.executor.shapes import Shapes
from quire.executor.slots import FORCE_SIZE, START_SIZES
from quire.executor.snapshot_arrays import LOAD, SAVE, STATE_SIZES
from quire.executor.step import COPY_SIZES, MAX_VERIFIED
from quire.ops.pages import TILE

GUESS_SIZES = (1, 8)  # slots that one call can guess for, if there are more
# Steps of a common load, by their tokens: those with prompts beside decodes, whose time is limited; prompts alone; and
# few others, as prompts are cut.
SHARES = ((1024, 1.0), (2048, 0.04), (float("inf"), 1e-4))
SPECIAL_DECODES = 1.0  # tokens that a forward pass of decodes alone saves: those that ask for more than tokens
FREE_TOKENS = 128  # of steps that take a GPU hardly longer than reading the weights


class Catalog:
    """A server begins with the `first`: they can run any plan, and are few, since everything waits for them.

    On a CPU short prompts are padded to many tokens until the `early` are there; all others follow, those for fewer
    tokens first. On a GPU those come first that are expected to save the most.
    """

    def __init__(
        self, shapes: Shapes, host_kinds: Sequence[str] = (), page_bytes: int = 0, looks_up: bool = True
    ) -> None:
        """`host_kinds`: the programs that copy pages to the host and from it, where that is done. `page_bytes`: of a
        page that they copy. `looks_up`: guesses are looked up, if there are any."""
        self.guess_kind = "guess" if looks_up else "draft"
        self._page_bytes = page_bytes
        self._shapes = shapes
        self._ladder = shapes.ladder
        self._host_kinds = host_kinds
        self._state_kinds = (SAVE, LOAD) if shapes.num_snapshots else ()
        # On a GPU the host waits for every branch that the device takes, and starting a program takes long: so the
        # common cases have programs of their own.
        self._ways = WAYS if shapes.specialised else WAYS[:1]
        # Each program compiles sums once more, so that fewer of them are fewer that could differ: decodes run as other
        # steps do, and those without filters are sampled as those with filters are.
        self._decodes: Sequence[StepShape] = () if shapes.fixed_order else self._ladder.decodes
        if shapes.fixed_order:
            self._ways = tuple(way for way in self._ways if way != "plain")
        fuses = shapes.specialised and shapes.guesses > 0 and looks_up and not shapes.fixed_order
        sizes = [size for size in self._ladder.padded_sizes if size <= MAX_VERIFIED]
        # A step samples after each of its tokens: none has more of them than samples.
        enough = next((index for index, size in enumerate(sizes, 1) if size >= shapes.num_samples), len(sizes))
        self._verified = sizes[:enough] if fuses else []

    @cached_property
    def first(self) -> list[Key]:
        """The programs that a server needs to begin. Those that take the longest to compile come first, so that no
        thread is left with one of them while the others have nothing to do."""
        keys: list[Key] = [("any", self._ladder.sample_sizes[-1]), *self._ladder.first()]
        if self._shapes.specialised:  # nothing runs before they are timed, so they can as well be there
            keys += [("decode", shape.tokens) for shape in self._decodes if shape.tokens <= TIMED_ROWS]
            # Prompts of a server are followed by samples of few rows, which this one takes a fraction of the time for.
            rows = next(
                (size for size in self._ladder.sample_sizes if size >= TIMED_ROWS), self._ladder.sample_sizes[-1]
            )
            keys += [("plain", rows)] * ("plain" in self._ways)
        keys += [("copy", COPY_SIZES[0]), ("start", START_SIZES[0]), ("force", FORCE_SIZE)]
        keys += [("adapter", 0)] * bool(self._shapes.adapters.slots)
        keys += self._moves
        keys += [(kind, STATE_SIZES[0]) for kind in self._state_kinds]
        return [*keys, *((self.guess_kind, size) for size in self.guess_sizes)]

    @property
    def _moves(self) -> list[Key]:
        sizes = {"split": SPLIT_SIZES, "place": place_sizes(self._page_bytes)}
        keys: list[Key] = [(kind, size) for kind in self._host_kinds for size in sizes.get(kind, HOST_COPY_SIZES)]
        # Pages that other engines read leave the device by these.
        return list(dict.fromkeys([*keys, *(("save", size) for size in COPY_SIZES if keys)]))

    @cached_property
    def early(self) -> list[Key]:
        """The programs with which short prompts and single decodes run at full speed, and many slots begin at once."""
        keys: list[Key] = [("any", self._ladder.sample_sizes[0]), *self._ladder.early()]
        keys += [*(("start", size) for size in START_SIZES), *(("copy", size) for size in COPY_SIZES)]
        keys += [(kind, size) for kind in self._state_kinds for size in STATE_SIZES]
        return [key for key in keys if key not in self.first]

    @cached_property
    def _needed(self) -> frozenset[Key]:
        return frozenset(self.first)

    @cached_property
    def keys(self) -> list[Key]:
        """All programs, in the order in which they are made as long as steps miss none."""
        rest: list[Key] = []
        for shape in self._decodes:
            rest += [("decode", shape.tokens), *[("burst", shape.tokens)] * (self._shapes.burst > 1)]
        rest += [("verify", size) for size in self._verified]
        rest += [("shared", shape.tokens) for shape in self._ladder.shared]
        rest += [(way, size) for size in self._ladder.sample_sizes for way in self._ways]
        rest = [key for key in dict.fromkeys([*self.early, *rest, *self._ladder.all()]) if key not in self._needed]
        return [*self.first, *sorted(rest, key=self.expected, reverse=True)]

    def expected(self, key: Key) -> float:
        """The tokens of padding that a program is expected to save, per second that it costs to make, in the time of a
        step of a common load; everything waits for the first. On a CPU that time counts for more than padding: there
        the order is that of sizes."""
        if not self._shapes.specialised:
            return 0.0
        if key in self._needed:
            return float("inf")
        kind = kind_of(key)
        return self._saved.get(key, kind.saves) / kind.seconds

    @cached_property
    def _saved(self) -> dict[Key, float]:
        """Of forward passes: the tokens that each size saves beside the first and those before it, the one that saves
        the most before others, if steps of any number of tokens come, as many in an octave as in another."""
        there = {shape.tokens for shape in self._ladder.first() if not shape.decodes_only and not shape.scores}
        left = set(self._ladder.padded_sizes) - there
        saved: dict[Key, float] = dict.fromkeys(self._ladder.decodes, SPECIAL_DECODES)

        def saving(size: int) -> float:
            above = min(one for one in there if one > size)
            below = max((one for one in there if one < size), default=1)
            share = next(share for most, share in SHARES if size <= most)
            return share * (above - size) * log(size / below) if size > FREE_TOKENS else 0.0

        while left:
            best = max(sorted(left), key=saving)
            saved[StepShape(best)] = saving(best)
            left.remove(best)
            there.add(best)
        return saved

    @property
    def for_processes(self) -> list[Key]:
        """The programs that other processes make, if there are any: all; on a CPU those behind the first, for which
        nothing else waits."""
        return self.keys if self._shapes.specialised else self.keys[len(self.first) :]

    def programs_for_prompt(self, num_tokens: int) -> list[Key]:
        """The programs of a single sequence, after a prompt of `num_tokens`."""
        ladder, most = self._ladder, self._shapes.max_prefill_tokens
        needed = [StepShape(min(num_tokens, most), fresh_sequences=1), StepShape(1, decodes_only=True)]
        if num_tokens > most:  # the chunks between, and the last
            needed += [StepShape(length) for length in (most, num_tokens % most or most)]
        tiles = [0 if shape.decodes_only else -(-shape.tokens // TILE) for shape in needed]
        chosen = [ladder.choose(shape, count, ladder.all()) for shape, count in zip(needed, tiles, strict=True)]
        keys: list[Key] = [("start", START_SIZES[0]), *(shape for shape in chosen if shape is not None)]
        return [*keys, *((way, ladder.sample_sizes[0]) for way in self._ways)]

    @property
    def guess_sizes(self) -> list[int]:
        """Slots that one call can guess for."""
        most = self._shapes.num_slots
        return [*(size for size in GUESS_SIZES if size < most), most] if self._shapes.guesses else []
