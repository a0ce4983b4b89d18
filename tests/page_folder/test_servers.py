"""A server with a cache folder, as processes: the engine that follows one that was killed continues from its files."""

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
