"""The guesses that the tokens of a sequence would make by themselves, and whether they would have been right."""

from collections.abc import Sequence

MATCH = 3  # last tokens that an earlier place is searched for; the executor takes fewer where it finds none
# The chance of a guess after 0, 1, 2, … right ones, in a new sequence; longer runs are like the longest here.
CHANCES = (0.4, 0.6, 0.7, 0.85, 0.9, 0.9, 0.95, 0.95)
PART_SIZE = 8192  # places that are kept together, and those of one piece of a prompt more
LAST_SHARE = 0.1  # of the newest token in a chance


class PromptPlaces:
    """The latest places of a prompt's tokens, three by three, but for its last token. Shared by the samples of a
    request, whose lookups own it: whichever needs more of it reads on."""

    __slots__ = ("__weakref__", "num_read", "parts")

    def __init__(self) -> None:
        # By the hash of three tokens, the position of the last of them. In parts, the latest first: a large dictionary
        # takes long when it grows.
        self.parts: list[dict[int, int]] = [{}]
        self.num_read = 0

    def read(self, tokens: Sequence[int], end: int) -> None:
        """Read the tokens before `end`."""
        begin = max(self.num_read, MATCH - 1)
        if begin < end:
            threes = zip(tokens[begin - 2 : end - 2], tokens[begin - 1 : end - 1], tokens[begin:end], strict=True)
            open_part(self.parts).update(zip(map(hash, threes), range(begin, end), strict=True))
        self.num_read = end


class Lookup:
    """The latest places of a sequence's tokens, three by three, and the chances of what followed there.

    Where the last three tokens have an earlier place, the token after it is what the executor would guess next. The
    token that comes tells whether that would have been right, though nothing was guessed: so a copy is noticed after a
    few tokens, and text that repeats nothing costs no step. A guess is the likelier the more before it were right.

    `num_read` tokens are in it, and `place` is that of the guess for the next one; -1 where there is none. `run` is
    the number of right guesses before it, up to the longest that is told apart, and `again` the chance that a run
    begins with a token after none. Tokens are read a few at a time, and stay when the sequence is preempted. It takes
    about 120 bytes for each, those of a prompt once for all samples. Owned by the sequence.
    """

    __slots__ = ("_parts", "_prompt", "again", "chances", "num_read", "place", "run")

    def __init__(self, prompt: PromptPlaces | None = None) -> None:
        self._prompt = PromptPlaces() if prompt is None else prompt
        self._parts: list[dict[int, int]] = [{}]  # of the tokens after the prompt, as the prompt has them
        self.chances = list(CHANCES)
        self.num_read = 0
        self.place = -1
        self.run = 0
        self.again = 0.0

    def read(self, tokens: Sequence[int], num_prompt: int, most: int) -> None:
        """Read up to `most` more of the tokens; those after the prompt change the chances."""
        begin = self.num_read
        if begin < num_prompt - 1:
            # The last token of a prompt is read like those after it: a guess may follow it.
            begin = max(begin, self._prompt.num_read)  # by another sample
            end = min(begin + most, num_prompt - 1)
            self._prompt.read(tokens, end)
            begin, most = end, most - (end - begin)
        end = min(begin + most, len(tokens))
        begin = max(begin, MATCH - 1)
        chances, longest = self.chances, len(self.chances) - 1
        place, run, again = self.place, self.run, self.again
        parts = (*self._parts, *self._prompt.parts)
        for at in range(begin, end):
            token = tokens[at]
            is_right = place >= 0 and tokens[place] == token
            if not run:
                again += LAST_SHARE * (is_right - again)
            if place >= 0:
                chances[run] += LAST_SHARE * (is_right - chances[run])
            run = 0 if not is_right else run + 1 if run < longest else run
            key = hash((tokens[at - 2], tokens[at - 1], token))
            place = -1
            for part in parts:
                if key in part:
                    place = part[key] + 1
                    break
            if len(parts[0]) >= PART_SIZE:
                parts = (open_part(self._parts), *parts)
            parts[0][key] = at
        self.place, self.run, self.again, self.num_read = place, run, again, end

    def chances_of(self, num_unknown: int, most: int, least: float = -1.0) -> list[float]:
        """The chances of up to `most` guesses after each other, behind `num_unknown` tokens that are not read, as long
        as they are above `least`. Each is right if all before it are, and the unknown ones are as they would be
        guessed, or else begin a new run."""
        chances, longest = self.chances, len(self.chances) - 1
        run, copies = self.run, 1.0 if self.place >= 0 else 0.0
        for _ in range(num_unknown):
            copies *= chances[run]
            run = run + 1 if run < longest else run
        begins, likely = (1 - copies) * self.again, []
        for number in range(most):
            copies *= chances[run]
            run = run + 1 if run < longest else run
            if number:
                begins *= chances[number if number < longest else longest]
            chance = copies + begins
            if chance <= least:
                break
            likely.append(chance)
        return likely


def open_part(parts: list[dict[int, int]]) -> dict[int, int]:
    """The part that takes the next places."""
    if len(parts[0]) >= PART_SIZE:
        parts.insert(0, {})
    return parts[0]
