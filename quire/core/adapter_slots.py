"""The adapters that sequences name, and the few of them that are on the device."""

from collections.abc import Iterable
from typing import NamedTuple

from quire.core.plan import AdapterLoad
from quire.core.sequence import Sequence
from quire.errors import EngineFailed, ModelNotFound, listed, shown


class Loaded(NamedTuple):
    """An adapter as it was loaded."""

    name: str
    digest: str  # of its weights; "" where no other engine asks for it


class AdapterSlots:
    """A name stands for the adapter that was loaded under it last. Every load has a number of its own. A digest names
    the weights of an adapter in all engines.

    An adapter that running sequences use has a slot, and keeps it. One without users may lose its slot to another, the
    least recently used first. When all slots are in use by others, the oldest sequence that waits reserves one: no
    younger sequence begins with the adapter in it, or with that slot, until its users have ended and the slot changes
    hands. So sequences may pass others that wait for a slot, and none waits for ever. Owned by the scheduler.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._names: dict[str, int] = {}
        self._loaded: dict[int, Loaded] = {}  # by number, those that are needed
        self._num_loaded = 0
        self._unneeded: list[int] = []  # numbers that were in `_loaded` before
        self._slots: dict[int, int] = {}  # by number of the adapter, the least recently used first
        self._users: dict[int, int] = {}  # running sequences by number of the adapter
        self._holders: dict[int, int] = {}  # sequences that have not ended
        self._reserved: tuple[Sequence, int] | None = None  # the one that waits, and the adapter that is to leave

    # Names

    @property
    def names(self) -> list[str]:
        return sorted(self._names)

    def new_number(self) -> int:
        """The number of the next load."""
        self._num_loaded += 1
        return self._num_loaded

    def load(self, name: str, digest: str = "", number: int = 0) -> int:
        """`name` stands for another adapter from now on. Returns its number."""
        before, number = self._names.get(name, 0), number or self.new_number()
        self._names[name] = number
        self._loaded[number] = Loaded(name, digest)
        self._forget_unneeded(before)
        return number

    def hold_former(self, name: str, digest: str, number: int = 0) -> int:
        """Load and hold an adapter that `name` stood for when another engine began a sequence. Returns its number."""
        number = number or self.new_number()
        self._loaded[number] = Loaded(name, digest)
        self.hold(number)
        return number

    def unload(self, name: str) -> None:
        """Forget `name`. Sequences that have the adapter keep it."""
        self._forget_unneeded(self._names.pop(name))

    def find(self, name: str | None, digest: str = "") -> int:
        """The number of the adapter; 0 for none. With a digest it is the adapter that has it, whatever its name."""
        if name is None:
            return 0
        if digest:
            number = self.with_digest(name, digest)
            if number is None:
                raise EngineFailed(f"adapter {shown(name)} has changed since the answer began; send the request again")
            return number
        if name not in self._names:
            known = listed(self.names) or "none"
            raise ModelNotFound(f"there is no adapter {shown(name)}; loaded are: {known}", param="model")
        return self._names[name]

    def with_digest(self, name: str, digest: str) -> int | None:
        """The number of an adapter with this digest, preferably one that is called `name`; None if there is none."""
        named = self._names.get(name)
        if named is not None and self._loaded[named].digest == digest:
            return named
        return next((number for number, loaded in self._loaded.items() if loaded.digest == digest), None)

    def digest_of(self, number: int) -> str:
        return self._loaded[number].digest

    def is_needed(self, number: int) -> bool:
        """True if it has a name, or a sequence that has not ended."""
        loaded = self._loaded.get(number)
        return loaded is not None and (number in self._holders or self._names.get(loaded.name) == number)

    def take_unneeded(self) -> list[int]:
        """The numbers of the adapters that are needed no more, each once."""
        taken, self._unneeded = self._unneeded, []
        return taken

    def hold(self, number: int) -> None:
        """A sequence has come that uses it."""
        if number:
            self._holders[number] = self._holders.get(number, 0) + 1

    def release(self, number: int) -> None:
        """A sequence that used it has ended."""
        if number:
            self._holders[number] -= 1
            if not self._holders[number]:
                del self._holders[number]
                self._forget_unneeded(number)

    def in_use(self) -> tuple[list[str], list[str]]:
        """The names of the adapters that sequences run with, and of those that sequences wait with, as they were
        loaded. Any thread may ask."""
        users, loaded = self._users.copy(), self._loaded.copy()
        waiting = [number for number, count in self._holders.copy().items() if count > users.get(number, 0)]

        def names_of(numbers: Iterable[int]) -> list[str]:
            return sorted({loaded[number].name for number in numbers if number in loaded})

        return names_of(users), names_of(waiting)

    def _forget_unneeded(self, number: int) -> None:
        if number in self._loaded and not self.is_needed(number):
            del self._loaded[number]
            self._unneeded.append(number)

    # Slots

    def has_room(self, sequence: Sequence) -> bool:
        """True if `sequence` could start now. Otherwise it has reserved a slot, unless an older one has."""
        number, waiting = sequence.adapter, self._reserved
        if not number:
            return True
        if waiting is not None and waiting[0].age > sequence.age:
            waiting = self._reserved = None
        if number in self._slots:
            return waiting is None or waiting[1] != number
        if self._free_slot() is not None or self._unused(sequence):
            return True
        if waiting is None:
            # The one with the fewest users is free first.
            self._reserved = sequence, min(self._slots, key=lambda adapter: self._users[adapter])
        return False

    def start(self, sequence: Sequence) -> AdapterLoad | None:
        """`sequence` runs from now on, with the adapter's slot. Returns the load that it needs, if any."""
        number = sequence.adapter
        if not number:
            return None
        load = None
        if number not in self._slots:
            slot = self._free_slot()
            if slot is None:
                slot = self._slots.pop(self._unused(sequence)[0])
            self._slots[number] = slot
            load = AdapterLoad(slot, number)
        self._slots[number] = sequence.adapter_slot = self._slots.pop(number)  # the most recently used
        self._users[number] = self._users.get(number, 0) + 1
        self.leave(sequence)
        return load

    def stop(self, sequence: Sequence) -> None:
        """`sequence` runs no more."""
        number = sequence.adapter
        if number:
            self._users[number] -= 1
            if not self._users[number]:
                del self._users[number]
            sequence.adapter_slot = 0

    def leave(self, sequence: Sequence) -> None:
        """`sequence` waits no more."""
        if self._reserved is not None and self._reserved[0] is sequence:
            self._reserved = None

    def forget_reservation(self) -> None:
        """The sequence that waits for a slot may not start now, although others may."""
        self._reserved = None

    def clear(self) -> None:
        """Nothing is on the device any more. No sequence runs."""
        self._slots.clear()
        self._users.clear()
        self._reserved = None

    def start_over(self) -> None:
        """There are no sequences any more."""
        self.clear()
        held = list(self._holders)
        self._holders.clear()
        for number in held:
            self._forget_unneeded(number)

    def _free_slot(self) -> int | None:
        taken = set(self._slots.values())
        return next((slot for slot in range(1, self._num_slots + 1) if slot not in taken), None)

    def _unused(self, sequence: Sequence) -> list[int]:
        """The adapters that may leave for that of `sequence`."""
        waiting = self._reserved
        kept = None if waiting is None or waiting[0] is sequence else waiting[1]
        return [number for number in self._slots if number not in self._users and number != kept]

    def check(self, running: Iterable[Sequence]) -> None:
        users: dict[int, int] = {}
        for sequence in running:
            if sequence.adapter:
                users[sequence.adapter] = users.get(sequence.adapter, 0) + 1
                assert self._slots[sequence.adapter] == sequence.adapter_slot, "a running sequence lost its adapter"
            else:
                assert not sequence.adapter_slot
        assert users == self._users, "the users of adapters are counted wrong"
        assert self._loaded.keys() == {*self._names.values(), *self._holders}, "names of adapters are lost or left"
        slots = list(self._slots.values())
        assert len(set(slots)) == len(slots), "two adapters have one slot"
        assert all(1 <= slot <= self._num_slots for slot in slots)
