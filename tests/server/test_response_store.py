"""The store of responses, as the event loop uses it."""

import asyncio
import logging
from dataclasses import replace

import pytest

from quire.errors import InvalidSetting, Overloaded
from quire.server.service.response_database import KeptResponse
from quire.server.service.response_store import MAX_WAITING, ResponseStore
from quire.server.settings import ServerSettings

SETTINGS = ServerSettings()


def response(number: int, size: int = 0) -> KeptResponse:
    return KeptResponse(f"resp_{number}", None, b'{"a":"%b"}' % (b"x" * size))


def test_all_answers_that_end_at_once_are_kept():
    async def keep() -> list[bool]:
        store = ResponseStore(SETTINGS)
        kept = await asyncio.gather(*(store.add("", response(number)) for number in range(MAX_WAITING + 500)))
        assert await store.get("", f"resp_{MAX_WAITING + 499}") is not None
        await store.close(1)
        return kept

    assert all(asyncio.run(keep()))


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


def test_a_response_that_cannot_be_kept_leaves_a_line_in_the_log(caplog, tmp_path):
    async def keep(settings: ServerSettings) -> bool:
        return await ResponseStore(settings).add("", response(1, 2000))

    with caplog.at_level(logging.WARNING, "quire"):
        assert not asyncio.run(keep(replace(SETTINGS, max_stored_bytes=1000)))
        assert not asyncio.run(keep(replace(SETTINGS, response_store=str(tmp_path / "no" / "folder"))))
    assert "larger than max_stored_bytes" in caplog.messages[0]
    assert "a response is not kept" in caplog.messages[1]


def test_settings_of_the_store_are_checked():
    with pytest.raises(InvalidSetting, match="max_stored_bytes is -1"):
        replace(SETTINGS, max_stored_bytes=-1)
    with pytest.raises(InvalidSetting, match="stored_response_ttl_s is -1"):
        replace(SETTINGS, stored_response_ttl_s=-1)
