"""docs/clients.md, which `make test-clients` writes: it knows every client and says what results say."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.clients.environments import CLIENTS, Client
from tests.clients.results import TITLE, read_results, write_page

PAGE = Path(__file__).parent.parent / "docs" / "clients.md"


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_every_client_has_tests_and_a_place_on_the_page(client):
    assert client.test_file.is_file()
    assert f"\n## {client.name}\n" in PAGE.read_text()


def test_the_page_begins_as_it_is_written():
    assert PAGE.read_text().startswith(TITLE)


class Recorded(Client):
    """A client with results of a test."""

    @property
    def record(self) -> Path:
        return Path(self.also[0])


@pytest.fixture
def make_client(tmp_path):
    """A client whose tests had these outcomes: name, tag, type, message."""

    def make(*outcomes: tuple[str, str, str, str]) -> Client:
        suite = ElementTree.Element("testsuite")
        for name, tag, kind, message in outcomes:
            case = ElementTree.SubElement(suite, "testcase", name=name)
            if tag:
                ElementTree.SubElement(case, tag, type=kind, message=message)
        ElementTree.ElementTree(suite).write(tmp_path / "results.xml")
        return Recorded("openai", ("openai",), (str(tmp_path / "results.xml"),))

    return make


CHATS = [(f"test_it_chats[{variant}]", "", "", "") for variant in "ab"]
SINGS = ("test_it_sings", "skipped", "pytest.xfail", "no voice\nat all")
FAILS = ("test_it_fails", "failure", "", "assert 1 == 2")


def test_results_say_what_works_and_why_the_rest_does_not(make_client):
    page = write_page([read_results(make_client(*CHATS, SINGS, FAILS), "openai 9")])
    assert "| [openai](#openai) | openai 9 | 1 | 2 |" in page
    assert "- it chats (a, b)\n" in page
    assert "- **does not work**: it sings: no voice\n" in page
    assert "- **does not work**: it fails: assert 1 == 2\n" in page


@pytest.mark.parametrize(("outcomes", "failed"), [((*CHATS, SINGS), False), ((*CHATS, FAILS), True), ((), True)])
def test_what_the_tests_expect_not_to_work_is_no_failure(make_client, outcomes, failed):
    assert read_results(make_client(*outcomes), "openai 9").failed == failed
