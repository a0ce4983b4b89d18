"""A server with a cache folder, as processes: the engine that follows one that was killed continues from its files."""

import threading
from pathlib import Path

import pytest

from tests.chaos.server import wait_until
from tests.peers.servers import PeerServer
from tests.tiny_chat_model import program_folder, write_tiny_chat_model

pytestmark = pytest.mark.xdist_group("peers")


def test_an_engine_that_restarts_finds_its_pages_and_gives_the_same_tokens(tmp_path_factory: pytest.TempPathFactory):
    model = write_tiny_chat_model(tmp_path_factory.mktemp("tiny"))
    folder = tmp_path_factory.mktemp("pages")
    server = PeerServer(model, program_folder(tmp_path_factory), None, cache_folder=folder)
    try:
        server.wait_until_healthy()
        expected = [server.answer(number) for number in range(3)]
        wait_until(lambda: server.count("quire_folder_saves", outcome="written") == 3)

        def counts() -> set[float]:
            written = server.count("quire_folder_copied_pages", direction="to_folder")
            return {written, server.metrics()["quire_pages_in_folder"], len(list(folder.rglob("*.page")))}

        wait_until(lambda: len(counts()) == 1)
        (written,) = counts()
        assert written > 30
        assert server.kill("quire-engine")
        assert [server.answer(number) for number in range(3)] == expected
        # The others too, unless that turns out to be slower than computing them.
        wait_until(lambda: server.count("quire_folder_reads", outcome="found") >= 1)
        assert 0 < server.count("quire_folder_copied_pages", direction="from_folder") <= written
    finally:
        server.stop()


def damage(folder: Path) -> int:
    """Change a byte in the middle of each page."""
    files = [path for path in folder.rglob("*.page") if path.is_file()]
    for path in files:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    return len(files)


def test_two_servers_on_one_folder_go_on_when_its_pages_are_damaged_under_load(
    tmp_path_factory: pytest.TempPathFactory,
):
    """While both answer, and one of their engines is killed."""
    model = write_tiny_chat_model(tmp_path_factory.mktemp("tiny"))
    folder, programs = tmp_path_factory.mktemp("pages"), program_folder(tmp_path_factory)
    servers = [PeerServer(model, programs, None, cache_folder=folder) for _ in range(2)]
    try:
        for server in servers:
            server.wait_until_healthy()
        expected = [servers[number % 2].answer(number) for number in range(4)]
        for server in servers:
            wait_until(lambda server=server: server.count("quire_folder_saves", outcome="written") == 2)
        answers: list[list[str]] = [[], []]
        asking = [
            threading.Thread(target=lambda place=place: answers[place].extend(map(servers[place].answer, range(4))))
            for place in range(2)
        ]
        for thread in asking:
            thread.start()
        assert damage(folder) > 0
        assert servers[1].kill("quire-engine")
        for thread in asking:
            thread.join()
        assert answers == [expected, expected]
        servers[1].wait_until_healthy()
        assert [server.answer(number) for server in servers for number in range(4)] == expected * 2
        assert not servers[0].logged("ERROR")
    finally:
        for server in servers:
            server.stop()
