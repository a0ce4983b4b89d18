"""The limits of API keys: requests and tokens per minute."""

import mmap
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from multiprocessing import reduction
from struct import Struct
from typing import Any, NamedTuple

from quire.errors import RateLimited
from quire.ipc.shared_memory import locked, new_memory
from quire.server.api_keys import ApiKey

MINUTE_S = 60.0
_FULL_S = Struct("<d")
_KEY_BYTES = 2 * _FULL_S.size


class Bucket(NamedTuple):
    """`limit` units that come back evenly within a minute. Its state is the moment at which it is full again."""

    limit: int
    what: str  # requests or tokens
    offset: int  # of its state in the memory

    def left(self, full_s: float, now: float) -> int:
        return max(0, int(self.limit - max(0.0, full_s - now) * self.limit / MINUTE_S))

    def wait_s(self, full_s: float, now: float, needed: int) -> float:
        """Time until `needed` units are there. More than fit are never there, so a full bucket is enough for those."""
        missing = self.limit - min(needed, self.limit)
        return max(0.0, full_s - now - missing * MINUTE_S / self.limit)

    def charged(self, full_s: float, now: float, count: int) -> float:
        """May leave the bucket in debt: answers are charged once they are there."""
        return max(full_s, now) + count * MINUTE_S / self.limit


class RateLimits:
    """Counts the requests and tokens of every key, for all HTTP workers of a server together.

    The state is in memory that the supervisor and all workers share; a pickle of it is the same memory in another
    process. Each change holds a lock of the system on that key's part, which ends with its process: no worker that dies
    leaves it behind. Clocks are monotonic and the same for all processes of a machine.
    """

    def __init__(
        self, keys: Sequence[ApiKey], file: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._keys = tuple(keys)
        self._clock = clock
        self._requests: dict[str, Bucket] = {}
        self._tokens: dict[str, Bucket] = {}
        for index, key in enumerate(keys):
            if key.requests_per_minute is not None:
                self._requests[key.name] = Bucket(key.requests_per_minute, "requests", index * _KEY_BYTES)
            if key.tokens_per_minute is not None:
                self._tokens[key.name] = Bucket(key.tokens_per_minute, "tokens", index * _KEY_BYTES + _FULL_S.size)
        self.metered = frozenset(self._tokens)  # the keys with a limit on tokens
        if self._requests or self._tokens:
            self._file = new_memory(len(keys) * _KEY_BYTES) if file is None else file
            self._memory = mmap.mmap(self._file, len(keys) * _KEY_BYTES)

    def __reduce__(self) -> tuple[Any, ...]:
        if not (self._requests or self._tokens):
            return RateLimits, (self._keys,)
        return _attach, (self._keys, reduction.DupFd(self._file))

    def admit_request(self, name: str) -> None:
        """Charge one request to a key, or refuse it."""
        self._admit(self._requests.get(name), name, 1)

    def admit_prompt(self, name: str, num_tokens: int) -> None:
        """Charge a prompt to a key, or refuse it."""
        self._admit(self._tokens.get(name), name, num_tokens)

    def refund_prompt(self, name: str, num_tokens: int) -> None:
        """Give a key back what a prompt was charged."""
        if name in self.metered:
            self.charge_tokens(name, -num_tokens)

    def charge_tokens(self, name: str, count: int) -> None:
        """Charge tokens that were generated."""
        bucket = self._tokens[name]
        with self._locked(bucket):
            self._write(bucket, bucket.charged(self._read(bucket), self._clock(), count))

    def headers(self, name: str) -> dict[str, str]:
        """The limits of a key, what is left of them, and the seconds until all of it is back; as OpenAI writes them."""
        headers: dict[str, str] = {}
        now = self._clock()
        for bucket in filter(None, (self._requests.get(name), self._tokens.get(name))):
            full_s = self._read(bucket)
            headers |= {
                f"x-ratelimit-limit-{bucket.what}": str(bucket.limit),
                f"x-ratelimit-remaining-{bucket.what}": str(bucket.left(full_s, now)),
                f"x-ratelimit-reset-{bucket.what}": f"{max(0.0, full_s - now):.3f}s",
            }
        return headers

    def _admit(self, bucket: Bucket | None, name: str, count: int) -> None:
        if bucket is None:
            return
        with self._locked(bucket):
            now, full_s = self._clock(), self._read(bucket)
            wait_s = bucket.wait_s(full_s, now, count)
            if wait_s <= 0:
                self._write(bucket, bucket.charged(full_s, now, count))
                return
        raise RateLimited(
            f"the limit of the API key {name!r} is {bucket.limit} {bucket.what} per minute, "
            f"{bucket.left(full_s, now)} are left, {count} needed; try again in {wait_s:.1f} s",
            wait_s,
        )

    def _read(self, bucket: Bucket) -> float:
        full_s: float = _FULL_S.unpack_from(self._memory, bucket.offset)[0]
        return full_s

    def _write(self, bucket: Bucket, full_s: float) -> None:
        _FULL_S.pack_into(self._memory, bucket.offset, full_s)

    def _locked(self, bucket: Bucket) -> AbstractContextManager[None]:
        return locked(self._file, bucket.offset, _FULL_S.size)


def _attach(keys: tuple[ApiKey, ...], duplicate: Any) -> RateLimits:
    return RateLimits(keys, duplicate.detach())
