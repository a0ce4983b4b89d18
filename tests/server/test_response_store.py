"""The store of responses, as the event loop uses it."""

import asyncio
import contextlib
import json
import logging
import resource
from collections.abc import Callable
from dataclasses import replace

import pytest

from quire.errors import InvalidSetting, Overloaded, StoreFailed
from quire.server.offload import Offload
from quire.server.service.arrival import Arrival
from quire.server.service.open_prompt import OpenPrompt
from quire.server.service.response_database import KeptResponse
from quire.server.service.response_store import MAX_WAITING, WATCH_INTERVAL_S, ResponseStore
from quire.server.service.stream import Stream
from quire.server.settings import ServerSettings
from tests.patience import WAIT_S
from tests.server.vocabulary import served_model

SETTINGS = ServerSettings()
RUNNING = KeptResponse("a", None, b'{"status":"in_progress"}', is_running=True)


def response(number: int, size: int = 0) -> KeptResponse:
    return KeptResponse(f"resp_{number}", None, b'{"a":"%b"}' % (b"x" * size))


class Owner:
    """A service with one stream and no engine."""

    def __init__(self) -> None:
        self.model = served_model()
        self.settings = SETTINGS
        self.offload = Offload()
        self.platform = "none"
        self.closed: list[Stream] = []

    def ended(self, prompt: OpenPrompt) -> None:
        pass

    def forget(self, stream: Stream) -> None:
        self.closed.append(stream)


def stream_of(owner: Owner) -> Stream:
    return Stream(owner, Arrival({}), 10, is_counted=False)


@contextlib.contextmanager
def files_up_to(num_bytes: int):
    """As a file system without room, for files that would grow beyond."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not holds():
            await asyncio.sleep(0.01)


async def ended(store: ResponseStore, owner: str, response_id: str) -> dict:
    async with asyncio.timeout(WAIT_S):
        while (found := await store.get(owner, response_id)).is_running:
            await asyncio.sleep(0.01)
    return json.loads(found.body)


def test_all_answers_that_end_at_once_are_kept():
    async def keep() -> list[object]:
        store = ResponseStore(SETTINGS)
        refused = await asyncio.gather(*(store.add("", response(number)) for number in range(MAX_WAITING + 500)))
        assert await store.get("", f"resp_{MAX_WAITING + 499}") is not None
        await store.close(1)
        return refused

    assert set(asyncio.run(keep())) == {None}


def test_clients_do_not_see_where_the_file_of_responses_is(tmp_path, caplog):
    settings = replace(SETTINGS, response_store=str(tmp_path / "kept"))

    async def read() -> StoreFailed:
        first, second = ResponseStore(settings), ResponseStore(settings)
        await first.add("", RUNNING)
        await second.open()
        (lock,) = (file for file in tmp_path.glob("kept-process-*") if file.name.endswith(first._database.runner))
        lock.rename(tmp_path / "moved")
        lock.symlink_to(tmp_path / "moved")  # which is not followed
        with pytest.raises(StoreFailed) as failed:
            await second.get("", "a")
        lock.unlink()
        (tmp_path / "moved").rename(lock)
        await first.close(1)
        await second.close(1)
        return failed.value

    error = asyncio.run(read())
    assert str(tmp_path) not in error.message
    assert str(tmp_path) in caplog.text


def test_readers_beyond_the_limit_are_told_to_come_back():
    async def read() -> list[object]:
        store = ResponseStore(SETTINGS)
        reads = (store.get("", str(number)) for number in range(MAX_WAITING + 3))
        found = await asyncio.gather(*reads, return_exceptions=True)
        await store.close(1)
        return found

    refused = [one for one in asyncio.run(read()) if one is not None]
    assert len(refused) == 3
    assert all(isinstance(one, Overloaded) for one in refused)


def test_readers_with_another_key_have_places_of_their_own():
    async def read() -> object:
        store = ResponseStore(SETTINGS)
        await store.add("bob", response(1))
        reads = [asyncio.create_task(store.get("ada", str(number))) for number in range(MAX_WAITING + 3)]
        await asyncio.sleep(0)
        found = await store.get("bob", "resp_1")
        await asyncio.gather(*reads, return_exceptions=True)
        await store.close(1)
        return found

    assert asyncio.run(read()) is not None


def test_a_response_that_cannot_be_kept_leaves_a_line_in_the_log(caplog, tmp_path):
    async def keep(settings: ServerSettings) -> object:
        return await ResponseStore(settings).add("", response(1, 2000))

    with caplog.at_level(logging.WARNING, "quire"):
        assert asyncio.run(keep(replace(SETTINGS, max_stored_bytes=1000))) is not None
        assert asyncio.run(keep(replace(SETTINGS, response_store=str(tmp_path / "no" / "folder")))) is not None
    assert "the limit is 1000, --max-stored-bytes" in caplog.messages[0]
    assert "a response is not kept" in caplog.messages[1]


def test_a_file_system_without_room_is_logged_once_and_so_is_its_end(caplog, tmp_path):
    async def keep() -> None:
        store = ResponseStore(replace(SETTINGS, response_store=str(tmp_path / "responses")))
        assert await store.add("ada", response(1)) is None
        with files_up_to(200_000):
            for number in range(2, 6):
                assert isinstance(await store.add("ada", response(number, 300_000)), StoreFailed)
            assert await store.get("ada", "resp_1") is not None  # what there is can be read
            assert (await store.chain("ada", "resp_1")).missing is None
        for number in range(6, 9):
            assert await store.add("ada", response(number, 300_000)) is None
        await store.close(1)

    with caplog.at_level(logging.INFO, "quire"):
        asyncio.run(keep())
    begun, over = caplog.messages
    assert "responses cannot be kept: " in begun
    assert "responses can be kept again" in over


@pytest.mark.parametrize("file", [False, True])
@pytest.mark.parametrize("error", [ValueError("of a parser"), RecursionError(), StopAsyncIteration()])
def test_a_response_in_the_background_has_failed_as_soon_as_anything_is_raised(caplog, tmp_path, error, file):
    async def run() -> dict:
        settings = replace(SETTINGS, response_store=str(tmp_path / "responses") if file else None)
        store, owner = ResponseStore(settings), Owner()
        await store.add("ada", RUNNING)

        async def work() -> None:
            raise error

        stream = stream_of(owner)
        store.run_in_background("ada", "a", stream, work())
        found = await ended(store, "ada", "a")
        await until(lambda: owner.closed == [stream])
        await store.close(1)
        return found

    found = asyncio.run(run())
    assert found["status"] == "failed"
    assert found["error"] == {"code": "server_error", "message": "an internal error; see the log"}
    assert type(error).__name__ in caplog.text


def test_a_response_in_the_background_that_becomes_too_large_has_failed_with_the_limit():
    async def run() -> dict:
        store = ResponseStore(replace(SETTINGS, max_stored_bytes=1000))
        await store.add("ada", RUNNING)

        async def work() -> KeptResponse:
            return RUNNING._replace(head=b'{"a":"%b"}' % (b"x" * 2000), is_running=False)

        store.run_in_background("ada", "a", stream_of(Owner()), work())
        found = await ended(store, "ada", "a")
        await store.close(1)
        return found

    found = asyncio.run(run())
    assert found["status"] == "failed"
    assert "the limit is 1000, --max-stored-bytes" in found["error"]["message"]


def test_a_response_in_the_background_ends_as_soon_as_there_is_room_for_it(tmp_path):
    async def run() -> dict:
        store = ResponseStore(replace(SETTINGS, response_store=str(tmp_path / "responses")))
        await store.add("ada", RUNNING)
        has_tried = asyncio.Event()

        async def work() -> KeptResponse:
            has_tried.set()
            return RUNNING._replace(head=b'{"status":"completed","a":"%b"}' % (b"x" * 300_000), is_running=False)

        with files_up_to(200_000):
            store.run_in_background("ada", "a", stream_of(Owner()), work())
            await has_tried.wait()
            assert (await store.get("ada", "a")).is_running
            assert isinstance(await store.add("ada", response(1, 300_000)), StoreFailed)
        found = await ended(store, "ada", "a")
        await store.close(1)
        return found

    assert asyncio.run(run())["status"] == "completed"


def test_a_file_that_cannot_be_watched_is_logged_once_and_stops_nothing(caplog, tmp_path):
    async def run() -> dict:
        path = tmp_path / "responses"
        store = ResponseStore(replace(SETTINGS, response_store=str(path)))
        await store.add("ada", RUNNING)
        path.rename(tmp_path / "elsewhere")

        async def work() -> KeptResponse:
            await until(lambda: bool(caplog.messages))
            await asyncio.sleep(2 * WATCH_INTERVAL_S)
            return RUNNING._replace(head=b'{"status":"completed"}', is_running=False)

        store.run_in_background("ada", "a", stream_of(Owner()), work())
        found = await ended(store, "ada", "a")
        await store.close(1)
        return found

    with caplog.at_level(logging.INFO, "quire"):
        assert asyncio.run(run())["status"] == "completed"
    (line,) = caplog.messages
    assert "other processes cannot cancel responses of this one" in line


def test_settings_of_the_store_are_checked():
    with pytest.raises(InvalidSetting, match="max_stored_bytes is -1"):
        replace(SETTINGS, max_stored_bytes=-1)
    with pytest.raises(InvalidSetting, match="stored_response_ttl_s is -1"):
        replace(SETTINGS, stored_response_ttl_s=-1)
