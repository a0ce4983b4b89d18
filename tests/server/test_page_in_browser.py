"""The page as a reader uses it, in a browser. Without one these tests are skipped."""

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from quire.server.settings import ServerSettings
from tests import web
from tests.server.browser import OTHER_HOST, Browser, wait_until, why_missing
from tests.server.processes import Served, free_port
from tests.server.running import RunningServer
from tests.server.vocabulary import PIECES, TEMPLATE, served_model

pytestmark = pytest.mark.skipif(why_missing is not None, reason=why_missing or "")

ENTER, CONTROL, RELEASE = "\ue007", "\ue009", "\ue000"
IDLE = "return !document.body.classList.contains('busy')"


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    one = Browser(tmp_path_factory.mktemp("profile"))
    yield one
    one.close()


@pytest.fixture
def browser(window: Browser) -> Iterator[Browser]:
    """The one window, with nothing kept from the test before."""
    yield window
    window.run("sessionStorage.clear(); localStorage.clear()")
    window.open("about:blank")


class Gate:
    """Lets the engine's results through, or keeps them back."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self.close, self.open = self._open.clear, self._open.set

    def __call__(self, *_: object) -> None:
        self._open.wait()


def say(browser: Browser, text: str) -> None:
    """Send a message and wait until it is answered."""
    browser.type("#input", text + ENTER)
    wait_until(lambda: browser.run(IDLE))


def fill_the_page(browser: Browser) -> None:
    """More than there is to see at a time, and far fewer tokens than a conversation may have."""
    browser.run("values.max_tokens = '5'")
    browser.resize(800, 500)
    for _ in range(4):
        say(browser, "tell me\nmore\nof\nit")
    assert browser.run("const box = document.getElementById('scroll'); return box.scrollHeight - box.clientHeight") > 80


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_page_that_is_opened_while_the_server_starts_goes_on_by_itself(browser, model_folder):
    port = free_port()
    served = Served(model_folder, "build_s=3600", f"port={port}")  # it is never ready
    try:
        wait_until(lambda: is_open(port))
        browser.open(f"http://127.0.0.1:{port}/")
        browser.wait_for(".hello", "The server is starting…")
        assert "starting" in browser.text("#model")
        browser.type("#input", "hello")
        assert browser.run("return document.getElementById('go').disabled")
    finally:
        served.stop()
    browser.wait_for("#model", "cannot be reached")
    served = Served(model_folder, f"port={port}").wait()  # and now it is
    try:
        browser.wait_for("#model", "fake")
        browser.wait_for(".hello", "What would you like to know?")
        wait_until(lambda: browser.run("return document.getElementById('dot').className") == "dot up")
        browser.type("#input", ENTER)
        browser.wait_for(".foot", "tokens/s")
    finally:
        served.stop()


def test_the_dot_turns_red_when_the_server_is_gone_and_green_when_it_is_back(browser, model_folder):
    port = free_port()
    served = Served(model_folder, f"port={port}").wait()
    browser.open(served.url)
    browser.wait_for("#model", "fake")
    served.stop()
    browser.run("document.dispatchEvent(new Event('visibilitychange'))")  # the reader comes back to the tab
    browser.wait_for("#model", "cannot be reached")
    assert browser.run("return document.getElementById('dot').className") == "dot down"
    served = Served(model_folder, f"port={port}").wait()
    browser.run("document.dispatchEvent(new Event('visibilitychange'))")
    try:
        browser.wait_for("#model", "fake")
    finally:
        served.stop()


def test_the_dot_is_red_while_the_engine_is_gone(browser, model_folder):
    served = Served(model_folder, "max_engine_restarts=0").wait()
    try:
        browser.open(served.url)
        browser.wait_for("#model", "fake")
        os.kill(served.engine_pid(), signal.SIGKILL)
        wait_until(lambda: web.get(f"{served.url}/health").status_code == 503)
        browser.run("document.dispatchEvent(new Event('visibilitychange'))")
        browser.wait_for("#model", "the engine process ended")
        assert browser.run("return document.getElementById('dot').className") == "dot down"
    finally:
        served.stop()


def test_the_dot_is_red_while_the_key_is_wrong(browser, make_server):
    server = make_server(settings=ServerSettings(api_key="secret"))
    browser.open(server.url)
    browser.wait_for("#model", "API key")
    assert browser.run("return document.getElementById('dot').className") == "dot down"
    browser.click("#open")
    browser.type("#set-key", "wrong" + ENTER)
    browser.wait_for("#model", "wrong API key")
    browser.click("#open")
    browser.run("document.getElementById('set-key').value = ''")
    browser.type("#set-key", "secret" + ENTER)
    browser.wait_for("#model", server.model.name)
    say(browser, "hi")
    assert not browser.text(".fault")


def test_a_conversation_that_is_too_long_goes_on_without_its_oldest_turns(browser, server):
    browser.open(server.url)
    browser.wait_for("#model", server.model.name)
    browser.run("values.max_tokens = '60'; values.temperature = '0'")
    limit = server.model.max_total_tokens
    while not browser.text(".fault"):
        say(browser, "once more, with feeling")
        assert browser.run("return messages.length") < 200
    asked = browser.run("return messages.map(({ role, content }) => ({ role, content }))")
    count = web.post(f"{server.url}/tokenize", json={"messages": asked}).json()["count"]
    fault = f"This conversation is too long: {count} tokens plus 60 for the answer; the limit is {limit}."
    assert fault in browser.text(".fault")
    browser.click(".fault button")
    wait_until(lambda: browser.run(IDLE) and not browser.text(".fault"))
    assert browser.text(".cut") == "The model no longer sees what is above this line."
    sent = browser.run("return messages.map(({ role }) => role)")
    assert 1 < len(sent) < len(asked) + 1
    assert (sent[0], sent[-1]) == ("user", "assistant")
    say(browser, "and again")
    assert browser.run("return messages.at(-1).role") == "assistant"


def test_a_message_that_is_too_long_by_itself_says_so(browser, server):
    browser.open(server.url)
    browser.wait_for("#model", server.model.name)
    browser.run("document.getElementById('input').value = 'once more '.repeat(400)")
    say(browser, "!")
    assert browser.text(".fault").startswith("This message is too long: ")
    assert "; the limit is 512." in browser.text(".fault")
    assert browser.run("return document.getElementById('input').value").startswith("once more ")  # to be made shorter
    browser.run("document.getElementById('input').value = ''")
    say(browser, "hi")
    assert browser.run("return messages.map(({ role }) => role)") == ["user", "assistant"]


@pytest.fixture
def gated(make_server: Callable[..., RunningServer]) -> Iterator[tuple[RunningServer, Gate]]:
    gate = Gate()
    yield make_server(before_result=gate), gate
    gate.open()


def test_the_end_of_an_answer_leaves_the_readers_place_and_focus(browser, gated):
    server, gate = gated
    browser.open(server.url)
    browser.wait_for("#model", server.model.name)
    fill_the_page(browser)
    gate.close()
    browser.type("#input", "and this?" + ENTER)
    wait_until(lambda: not browser.run(IDLE))
    browser.run("document.getElementById('scroll').scrollTop = 40; document.getElementById('theme').focus()")
    gate.open()
    wait_until(lambda: browser.run(IDLE))
    assert browser.run("return document.getElementById('scroll').scrollTop") == 40
    assert browser.run("return document.activeElement.id") == "theme"


def test_a_reader_at_the_end_follows_the_answer(browser, server):
    browser.open(server.url)
    browser.wait_for("#model", server.model.name)
    fill_the_page(browser)
    assert browser.run("return near()")
    assert browser.run("return document.activeElement.id") == "input"


@pytest.mark.parametrize("host", ["127.0.0.1", OTHER_HOST])
def test_an_answer_is_copied_also_where_the_browser_does_not_trust_the_address(browser, make_server, host):
    server = make_server(settings=ServerSettings(host="0.0.0.0"))  # on loopback no name leads to it
    browser.open(server.url.replace("127.0.0.1", host))
    browser.wait_for("#model", server.model.name)
    assert browser.run("return isSecureContext") == (host != OTHER_HOST)
    say(browser, "hi")
    said = browser.run("return messages.at(-1).content")
    browser.click(".foot button")
    browser.wait_for(".foot button", "Copied")
    browser.type("#input", CONTROL + "v" + RELEASE)
    assert browser.run("return document.getElementById('input').value").split() == said.split()


def test_a_name_that_was_made_to_lead_to_loopback_gets_no_answers(browser, server):
    """DNS rebinding: to the browser the page is of the name's own origin."""
    browser.open(server.url.replace("127.0.0.1", OTHER_HOST))
    browser.wait_for("#model", server.model.name)
    say(browser, "hi")
    assert "--cors-allow-origin" in browser.text("#talk")


def test_thinking_is_folded_above_the_answer(browser, make_server):
    pieces = [*PIECES[:40], "</think>"]
    server = make_server(
        model=served_model(pieces=pieces, template=TEMPLATE + "<think>\n{% if false %}</think>{% endif %}")
    )
    browser.open(server.url)
    browser.wait_for("#model", "fake")
    browser.run("values.seed = '7'")  # some seeds begin with the end of the thinking
    say(browser, "hi")
    assert browser.text(".thought summary").startswith("Thought for ")
    assert browser.run("return document.querySelector('.thought').open") is False
    thinking = browser.run("return messages[1].thinking")
    assert thinking
    assert browser.run("return document.querySelector('.thought div').textContent") == thinking
    assert "</think>" not in thinking
    assert browser.text(".theirs .text")
    browser.click(".thought summary")
    assert browser.run("return document.querySelector('.thought').open") is True
    assert browser.run("return conversation()[1].reasoning_content") == thinking


RENDER = "const node = document.createElement('div'); render(node, arguments[0]); return node.innerHTML"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\n```py\nx = 1\n\n  y\n```\nb", "<p>a</p><pre><code>x = 1\n\n  y</code></pre><p>b</p>"),
        ("```\nx", "<pre><code>x</code></pre>"),  # while it is written
        ("a\n```py", "<p>a</p><pre><code></code></pre>"),
        (
            "1. one:\n   ```py\n   if x:\n       y\n   ```\n2. two",
            '<ol start="1"><li>one:</li></ol><pre><code>if x:\n    y</code></pre><ol start="2"><li>two</li></ol>',
        ),
        ("```x``` is short\nb", "<p><code>x</code> is short\nb</p>"),
        ("`open, and\n**open", "<p>`open, and\n**open</p>"),
        ("**open", "<p>**open</p>"),
        ("<b>x</b> `<i>`", "<p>&lt;b&gt;x&lt;/b&gt; <code>&lt;i&gt;</code></p>"),
    ],
)
def test_code_is_set_apart_also_in_lists(browser, server, text, shown):
    browser.open(server.url)
    assert browser.run(RENDER, text).replace("<p></p>", "") == shown


def answer_with(browser: Browser, *events: str) -> None:
    """What the next requests for an answer are told."""
    lines = "".join(f"data: {event}\n\n" for event in events)
    browser.run(
        """const real = window.fetch, lines = arguments[0];
        window.fetch = async (path, ...rest) =>
            path === "v1/chat/completions" ? new Response(lines) : real(path, ...rest);""",
        lines,
    )


def test_an_answer_that_broke_off_is_asked_for_again(browser, server):
    browser.open(server.url)
    browser.wait_for("#model", server.model.name)
    answer_with(browser, '{"choices": [{"delta": {"content": "Half an"}}]}', '{"error": {"message": "it failed"}}')
    say(browser, "hi")
    assert browser.text(".fault") == "It failed"
    answer_with(browser, '{"choices": [{"delta": {"content": "Whole"}, "finish_reason": "stop"}]}')
    browser.click(".again")
    wait_until(lambda: browser.text(".theirs .text") == "Whole")
    assert browser.run("return messages.map(({ role }) => role)") == ["user", "assistant"]
    assert browser.text(".fault") == ""


def test_an_empty_answer_is_told_and_can_be_asked_for_again(browser, server):
    browser.open(server.url)
    browser.wait_for("#model", server.model.name)
    answer_with(browser, '{"choices": [{"delta": {}, "finish_reason": "stop"}]}')
    say(browser, "hi")
    assert browser.text(".fault span") == "The model has answered with nothing."
    answer_with(browser, '{"choices": [{"delta": {"content": "Hello"}, "finish_reason": "stop"}]}')
    browser.click(".fault button")
    wait_until(lambda: browser.text(".theirs .text") == "Hello")
