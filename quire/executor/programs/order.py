"""The programs of a server, in the order in which they are made."""

from collections.abc import Sequence
from functools import cached_property
from math import log
from typing import get_args

from quire.executor.fused_steps import MAX_VERIFIED, VERIFY
from quire.executor.programs.ladder import TIMED_ROWS, StepShape
from quire.executor.programs.table import COPY_SIZES, START_SIZES, STATE_SIZES, Key
from quire.executor.shapes import Shapes
from quire.executor.snapshot_arrays import LOAD, SAVE
from quire.executor.step import SamplingWay
from quire.ops.pages import TILE

HOST_COPY_SIZES = (1, 4, 16)  # pages that one call can copy between the device and the host
SPLIT_SIZES = (2, 12, 16, 64)  # where the host's memory is pinned: to it, and from it
PLACE_SIZES = (*SPLIT_SIZES, 192)
# On the device, of pages that came from the host and are not in their places, wanted or not. More than the pages that a
# step restores, which are in blocks with others.
MAX_UNPLACED_BYTES = 768 * 2**20
GUESS_SIZES = (1, 8)  # slots that one call can guess for, if there are more
FORCE_SIZE = 64  # forced tokens that one call can place
WAYS = get_args(SamplingWay)
OTHER_PRODUCTS = (*WAYS, VERIFY)  # programs with products that are not those of decodes
SOON_TOKENS = 1024  # of steps with prompts beside decodes, whose time is limited
LATER_TOKENS = 2048  # of prompts alone in a step; longer ones are cut
FREE_TOKENS = 128  # of steps that take a GPU hardly longer than reading the weights
BATCH = 8  # programs that a table gains at a time
# On a GPU: of programs by their kind; of all others, 3.
TURNS = {"decode": 0, "burst": 0, VERIFY: 0, "start": 1, "copy": 1, SAVE: 1, LOAD: 1, "plain": 2, "filtered": 2}


class ProgramOrder:
    """A server begins with the `first`. They can run any plan, and are few, since everything waits for them.

    On a CPU short prompts are padded to many tokens until the `early` are there; all others follow in batches, those
    for fewer tokens first. On a GPU those come next that save the most padding under a common load, unless steps miss
    others more (`program_demand.py`).
    """

    def __init__(
        self, shapes: Shapes, host_kinds: Sequence[str] = (), page_bytes: int = 0, looks_up: bool = True
    ) -> None:
        """`host_kinds`: the programs that copy pages to the host and from it, where that is done. `page_bytes`: of a
        page that they copy. `looks_up`: guesses are looked up, if there are any."""
        self._page_bytes = page_bytes
        self._shapes = shapes
        self._ladder = shapes.ladder
        # Pages for other engines are saved whether the host's are pinned or not.
        self._host_kinds = tuple(dict.fromkeys((*host_kinds, "save"))) if host_kinds else ()
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
        for kind in self._host_kinds:
            sizes = {"split": SPLIT_SIZES, "place": place_sizes(self._page_bytes)}.get(kind, HOST_COPY_SIZES)
            keys += [(kind, size) for size in sizes]
        keys += [(kind, STATE_SIZES[0]) for kind in self._state_kinds]
        return [*keys, *(("guess", size) for size in self.guess_sizes)]

    @cached_property
    def early(self) -> list[Key]:
        """The programs with which short prompts and single decodes run at full speed, and many slots begin at once."""
        keys: list[Key] = [("any", self._ladder.sample_sizes[0]), *self._ladder.early()]
        keys += [*(("start", size) for size in START_SIZES), *(("copy", size) for size in COPY_SIZES)]
        keys += [(kind, size) for kind in self._state_kinds for size in STATE_SIZES]
        return [key for key in keys if key not in self.first]

    @property
    def batches(self) -> list[list[Key]]:
        """All programs; a table gains those of a batch together."""
        rest: list[Key] = []
        for shape in self._decodes:
            rest += [("decode", shape.tokens), *[("burst", shape.tokens)] * (self._shapes.burst > 1)]
        rest += [(VERIFY, size) for size in self._verified]
        rest += [("shared", shape.tokens) for shape in self._ladder.shared]
        rest += [(way, size) for size in self._ladder.sample_sizes for way in self._ways]
        before = self.first if self._shapes.specialised else [*self.first, *self.early]
        rest = [key for key in dict.fromkeys([*self.early, *rest, *self._ladder.all()]) if key not in before]
        if self._shapes.specialised:
            rest.sort(key=self._turn)
        batches = [rest[begin : begin + BATCH] for begin in range(0, len(rest), BATCH)]
        return [self.first, *batches] if self._shapes.specialised else [self.first, self.early, *batches]

    def _turn(self, key: Key) -> tuple[int, int]:
        """On a GPU: programs for decodes; for prompts beside them, and to begin several slots at once; for longer
        prompts, and for decodes that ask for more than tokens; then the others, and last those for special cases."""
        if not isinstance(key, StepShape):
            return TURNS.get(key[0], 3), 0
        if key.fresh_sequences or key.scores:
            return 4, 0
        place = self._by_padding.get(key.tokens, 0)
        if key.decodes_only:
            return 2, len(self._by_padding)
        if FREE_TOKENS < key.tokens <= LATER_TOKENS:
            return (1 if key.tokens <= SOON_TOKENS else 2), place
        return 3, place

    @cached_property
    def _by_padding(self) -> dict[int, int]:
        """The places of sizes in the order in which each saves the most padding beside the first and those before it,
        if steps of any number of tokens come, as many in an octave as in another."""
        there = {shape.tokens for shape in self._ladder.first() if not shape.decodes_only and not shape.scores}
        left = set(self._ladder.padded_sizes) - there
        places: dict[int, int] = {}

        def saved(size: int) -> float:
            above = min(one for one in there if one > size)
            below = max((one for one in there if one < size), default=1)
            return (above - size) * log(size / below) if size > FREE_TOKENS else 0.0

        while left:
            best = max(sorted(left), key=saved)
            places[best] = len(places)
            left.remove(best)
            there.add(best)
        return places

    @property
    def for_processes(self) -> list[Key]:
        """The programs that other processes make, if there are any: all; on a CPU those behind the first, for which
        nothing else waits."""
        keys = [key for batch in self.batches for key in batch]
        return keys if self._shapes.specialised else [key for key in keys if key not in self.first]

    def for_one(self, num_tokens: int) -> list[Key]:
        """The programs of a single sequence, after a prompt of `num_tokens`."""
        ladder, most = self._ladder, self._shapes.max_prefill_tokens
        needed = [StepShape(min(num_tokens, most), fresh_sequences=1), StepShape(1, decodes_only=True)]
        if num_tokens > most:  # the chunks between, and the last
            needed += [StepShape(length) for length in (most, num_tokens % most or most)]
        tiles = [0 if shape.decodes_only else -(-shape.tokens // TILE) for shape in needed]
        found = [ladder.choose(shape, count, ladder.all()) for shape, count in zip(needed, tiles, strict=True)]
        keys: list[Key] = [("start", START_SIZES[0]), *(shape for shape in found if shape is not None)]
        return [*keys, *((way, ladder.sample_sizes[0]) for way in self._ways)]

    @property
    def guess_sizes(self) -> list[int]:
        """Slots that one call can guess for."""
        most = self._shapes.num_slots
        return [*(size for size in GUESS_SIZES if size < most), most] if self._shapes.guesses else []


def place_sizes(page_bytes: int) -> tuple[int, ...]:
    """The pages that one call can put into place: no more than there may be."""
    return tuple(size for size in PLACE_SIZES if size in SPLIT_SIZES or size * page_bytes <= MAX_UNPLACED_BYTES)
