"""`quire bench serving` against a server with the fake executor."""

import asyncio
import itertools
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from quire.cli import make_app
from quire.cli.bench.serving_client import RequestResult, Sampling, Server
from quire.cli.bench.serving_load import LoadRequest, LoadRun, Prompts, Shape, run_load
from quire.cli.bench.serving_plot import nice_ticks, plot
from quire.cli.bench.serving_report import Goal, errors, numbers, percentile
from quire.errors import InvalidRequest, InvalidSetting, QuireError
from quire.server.settings import ServerSettings
from tests.patience import WAIT_S
from tests.server.processes import free_port
from tests.server.running import RunningServer

STEP_S = 0.003
PROMPTS = Prompts(5, 0, "x")


class Steps:
    """Takes a while over each step, and knows how many sequences the largest had."""

    def __init__(self) -> None:
        self.most = 0

    def __call__(self, plan: object, prompts: list[tuple[int, ...]]) -> None:
        self.most = max(self.most, len(prompts))
        time.sleep(STEP_S)


STEPS = Steps()


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    running = RunningServer(before_result=STEPS).start()
    yield running
    running.stop()


@pytest.fixture
def silent_server() -> Iterator[str]:
    """It accepts and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def bench(*arguments: str) -> str:
    result = CliRunner().invoke(make_app(), ["bench", "serving", *arguments], catch_exceptions=True)
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_loads_are_measured_written_and_drawn(server, tmp_path):
    file, picture = tmp_path / "out.json", tmp_path / "out.svg"
    shown = bench(
        server.url, "--concurrency", "1,4", "--request-rate", "100", "--requests", "6", "--prompt-tokens", "20",
        "--output-tokens", "8", "--json", str(file), "--plot", str(picture), "--good-first-token-ms", "60000",
        "--good-per-token-ms", "60000", "--reuse-prompts",
    )  # fmt: skip
    document = json.loads(file.read_text())
    assert list(document["results"]) == ["1 stream", "4 streams", "100 requests/s"]
    assert document["errors"] == {}
    for name, found in document["results"].items():
        assert name in shown
        assert found["requests"] == 6
        assert found["errors"] == found["short_answers"] == 0
        assert found["output_tokens_per_s"] == pytest.approx(6 * 8 / found["seconds"])
        assert found["prompt_tokens"] == pytest.approx(20, abs=6)  # words of several lengths, a token for each letter
        # Of every request, since one of six is beyond each percentile. Several tokens may be read at once.
        assert found["first_token_ms_p99"] + 7 * found["per_token_ms_p99"] >= 8 * STEP_S * 1000
        assert found["inter_token_ms_max"] >= found["inter_token_ms_p99"] >= found["inter_token_ms_p50"]
        assert found["good_share"] == 1
        assert found["end_to_end_ms_p99"] >= found["end_to_end_ms_p50"] >= 8 * STEP_S * 1000
    assert STEPS.most > 1, "streams are not asked for at the same time"
    texts = [node.text for node in ElementTree.parse(picture).iter() if node.text]
    assert {"1 stream", "4 streams", "100 requests/s", "Output, tokens/s"} <= set(texts)


def test_the_chat_route_is_measured_too(server):
    shown = bench(server.url + "/v1", "--chat", "--concurrency", "2", "--requests", "4", "--output-tokens", "4")
    assert "2 streams" in shown


def test_a_file_of_it_can_be_compared(server, tmp_path):
    file = tmp_path / "out.json"
    bench(server.url, "--concurrency", "1", "--requests", "2", "--output-tokens", "2", "--json", str(file))
    result = CliRunner().invoke(make_app(), ["bench", "compare", str(file), str(file)])
    assert result.exit_code == 0
    assert "first_token_ms_p50" in result.stdout


def test_refused_requests_are_counted_by_kind(make_server):
    """One is answered, and only when all of the others have been refused."""
    num_refused = 8

    def until_all_are_refused(*_: object) -> None:
        (stream,) = busy.service._streams
        if stream.prompts[0].request.max_tokens == 4:  # else it is one by which the bench learns how long words are
            busy.wait_until(lambda: busy.service.metrics.failures["overloaded"] == num_refused)

    busy = make_server(settings=ServerSettings(max_concurrent_requests=1), before_result=until_all_are_refused)
    with pytest.raises(QuireError, match="8 of 9 requests failed"):
        bench(busy.url, "--concurrency", "3", "--requests", "9", "--output-tokens", "4", "--warm-up", "0")
    num_refused = 16

    async def run() -> LoadRun:
        target = Server(busy.url)
        await target.find_model()
        return await run_load(target, Shape(concurrency=3), PROMPTS.conversations(9, Sampling(4)), within_s=WAIT_S)

    found = asyncio.run(run())
    (kind,) = errors(found)
    assert kind == "HTTP 429"
    assert errors(found)[kind]["count"] == numbers(found, Goal())["errors"] == 8


def test_a_run_ends_in_time_and_says_what_it_cut_off(silent_server):
    run = asyncio.run(
        run_load(Server(silent_server), Shape(concurrency=3), PROMPTS.conversations(9, Sampling(4)), within_s=0.2)
    )
    assert [result.error for result in run.results] == ["cut off"] * 3


def test_a_server_that_says_nothing_is_a_timeout(silent_server):
    result = asyncio.run(Server(silent_server, timeout_s=0.2).send("x", Sampling(1)))
    assert result.error == "timeout"


def test_a_stream_that_breaks_off_is_an_error():
    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        asked = b""
        while not asked.endswith(b"}"):  # a connection that is closed with something unread is reset
            asked += connection.recv(1 << 16)
        connection.sendall(b'HTTP/1.1 200 OK\r\n\r\ndata: {"choices":[{"text":"a"}]}\n\n')
        connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        result = asyncio.run(Server(f"127.0.0.1:{listener.getsockname()[1]}").send("x", Sampling(1)))
        thread.join()
    assert result.error == "disconnected"
    assert len(result.arrivals_s) == result.output_tokens == 1


def test_a_server_that_is_not_there_is_reported_in_a_line():
    with pytest.raises(QuireError, match="cannot be reached"):
        bench(f"http://127.0.0.1:{free_port()}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--concurrency", "0"), "above 0"),
        (("--concurrency", "1.5"), "above 0"),
        (("--request-rate", "fast"), "above 0"),
        (("--extra", "[]"), "JSON object"),
    ],
)
def test_settings_that_make_no_sense_are_refused(arguments, message):
    with pytest.raises((InvalidSetting, InvalidRequest), match=message):
        bench("http://127.0.0.1:1", *arguments)
    with pytest.raises(InvalidSetting, match="not the address"):
        Server("ftp://x")


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path):
    with pytest.raises(InvalidSetting, match=r"out\.json cannot be written: there is no folder"):
        bench("http://127.0.0.1:1", "--json", str(tmp_path / "missing" / "out.json"))


def test_prompts_differ_but_for_what_they_share():
    prompts = [text.split() for text in Prompts(10, 4, "seed").texts(50)]
    assert {len(words) for words in prompts} == {10}
    assert len({tuple(words[:4]) for words in prompts}) == 1
    assert len({tuple(words) for words in prompts}) == 50


class Prompted:
    """A server that notes the prompts it is asked, and answers each with one token."""

    def __init__(self) -> None:
        self.prompts: list[str] = []
        prompts = self.prompts

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                prompts.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"])
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b'data: {"choices":[{"text":"a"}]}\n\ndata: [DONE]\n\n')

            def log_message(self, *args: object) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def run(self, *arguments: str) -> tuple[list[str], str]:
        """The prompts of one bench, without the first, by which it learns how long words are."""
        self.prompts.clear()
        url = f"http://127.0.0.1:{self.http.server_port}"
        shown = bench(url, "--model", "x", "--concurrency", "1", "--requests", "3", "--output-tokens", "1", *arguments)
        return self.prompts[1:], shown


@pytest.fixture
def prompted() -> Iterator[Prompted]:
    prompted = Prompted()
    yield prompted
    prompted.http.shutdown()
    prompted.http.server_close()


def test_each_run_has_prompts_of_its_own_unless_asked_otherwise(prompted: Prompted) -> None:
    (first, shown), (second, _) = (prompted.run("--seed", "3", "--shared-prefix", "40") for _ in range(2))
    assert len(first) == len(second) == 5
    assert {len(text.split()) for text in first} == {len(text.split()) for text in second}
    assert not {text[:100] for text in first} & {text[:100] for text in second}, "not even what they share"
    assert "Prompts are new in this run." in shown

    (first, shown), (second, _) = (prompted.run("--seed", "3", "--reuse-prompts") for _ in range(2))
    assert first == second
    assert "Prompts are those of seed 3: an earlier run may have left them cached." in shown
    assert prompted.run("--seed", "4", "--reuse-prompts")[0] != first


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 100))
def test_percentiles_lie_between_the_extremes_and_are_exact_at_them(values, percent):
    assert min(values) <= percentile(values, percent) <= max(values)
    assert percentile(values, 0) == min(values)
    assert percentile(values, 100) == max(values)


@given(st.floats(1e-6, 1e9))
def test_ticks_cover_the_values_and_are_few(highest):
    ticks = nice_ticks(highest)
    assert ticks[0] == 0
    assert ticks[-1] >= highest
    assert 3 <= len(ticks) <= 7


def test_the_good_share_counts_requests_that_meet_both_goals_and_no_errors():
    def answered(first_s: float, per_token_s: float, tokens: int = 3) -> RequestResult:
        arrivals_s = [1 + first_s + number * per_token_s for number in range(tokens)]
        return RequestResult(sent_s=1.0, arrivals_s=arrivals_s, ended_s=9.0, wanted_tokens=3, output_tokens=tokens)

    result = [
        answered(0.4, 0.02),
        answered(0.6, 0.02),
        answered(0.4, 0.03),
        answered(0.4, 9.0, 1),
        RequestResult(error="x"),
    ]
    found = numbers(LoadRun(Shape(rate=1.0), result, 10.0, 0.1), Goal(500, 25))
    assert found["per_token_ms_p50"] == pytest.approx(20)
    assert (found["good_share"], found["errors"], found["short_answers"]) == (2 / 5, 1, 1)
    assert found["inter_token_ms_max"] == pytest.approx(30)
    assert numbers(LoadRun(Shape(rate=1.0), result, 10.0, 0.1), Goal(1000, 100))["good_share"] == 4 / 5


def test_turns_of_a_conversation_follow_each_other_and_arrivals_end_in_time(prompted: Prompted):
    def conversations() -> Iterator[tuple[LoadRequest, ...]]:
        for number in itertools.count():
            yield tuple(LoadRequest([number, turn], Sampling(1)) for turn in range(3))

    server = Server(f"http://127.0.0.1:{prompted.http.server_port}")
    run = asyncio.run(run_load(server, Shape(rate=200.0), conversations(), within_s=WAIT_S, seed="s", arrivals_s=0.1))
    assert len(run.results) % 3 == 0
    assert 0 < len(run.results) < 300
    for number in range(len(run.results) // 3):
        turns = [turn for conversation, turn in prompted.prompts if conversation == number]
        assert turns == [0, 1, 2]


def test_open_loop_sends_growing_conversations_and_prints_a_row_for_each_rate(server, tmp_path):
    file = tmp_path / "out.json"
    options = (
        "--rates 20,40 --seconds 0.3 --warm-up-seconds 0.1 --prompt-median 20 --prompt-max 30 --answer-median 8 "
        f"--answer-max 10 --shared-prefix 5 --turns 2 --vocab 40 --good-first-token-ms 60000 --json {file}"
    )
    script = Path(__file__).parents[2] / "bench" / "open_loop.py"
    command = [sys.executable, script, server.url, *options.split()]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=WAIT_S)
    assert [line.split(" |")[0] for line in done.stdout.splitlines()[2:]] == ["| 20 requests/s", "| 40 requests/s"]
    for found in json.loads(file.read_text())["results"].values():
        assert found["errors"] == found["short_answers"] == 0
        assert found["requests"] % 2 == 0
        assert 21 <= found["prompt_tokens"] <= 5 + 30 + 10 + 30


def test_a_plot_of_nothing_but_errors_is_still_a_plot():
    run = LoadRun(Shape(concurrency=1), [RequestResult(error="refused")], 1.0, 0.1)
    assert ElementTree.fromstring(plot("<title>", "&", {"1 stream": numbers(run, Goal())})) is not None
