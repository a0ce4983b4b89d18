"""API keys with names, and the requests and tokens that each may have in a minute."""

import hashlib
import multiprocessing
import time
from pathlib import Path

import anthropic
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import InvalidSetting, RateLimited
from quire.server.api_keys import ApiKey, digest_of
from quire.server.rate_limits import MINUTE_S, RateLimits
from quire.server.settings import ServerSettings
from tests import web
from tests.patience import WAIT_S
from tests.server.processes import Served

TEXT = {"prompt": "abc", "max_tokens": 5, "temperature": 0}


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def limited(clock: Clock, requests: int | None = None, tokens: int | None = None) -> RateLimits:
    return RateLimits([ApiKey("ann", b"", requests, tokens)], clock=clock)


def num_admitted(limits: RateLimits, tries: int) -> int:
    admitted = 0
    for _ in range(tries):
        try:
            limits.admit_request("ann")
        except RateLimited:
            continue
        admitted += 1
    return admitted


# The counts


def test_a_minutes_requests_are_admitted_at_once_and_come_back_evenly():
    clock = Clock()
    limits = limited(clock, requests=30)
    assert num_admitted(limits, 40) == 30
    clock.now += 4.0
    assert num_admitted(limits, 40) == 2
    clock.now += MINUTE_S
    assert num_admitted(limits, 40) == 30


def test_the_error_says_when_and_then_the_request_is_admitted():
    clock = Clock()
    limits = limited(clock, requests=6)
    num_admitted(limits, 6)
    clock.now += 3.0
    with pytest.raises(RateLimited, match=r"'ann' is 6 requests per minute, 0 are left.*again in 7\.0 s") as refused:
        limits.admit_request("ann")
    clock.now += refused.value.retry_after_s + 1e-6
    limits.admit_request("ann")


def test_answers_are_charged_when_they_are_there_and_may_leave_a_debt():
    clock = Clock()
    limits = limited(clock, tokens=600)
    limits.admit_prompt("ann", 500)
    limits.charge_tokens("ann", 300)  # 200 more than there were
    with pytest.raises(RateLimited, match="600 tokens per minute, 0 are left, 10 needed") as refused:
        limits.admit_prompt("ann", 10)
    assert refused.value.retry_after_s == pytest.approx(21.0)
    assert limits.headers("ann")["x-ratelimit-reset-tokens"] == "80.000s"
    clock.now += 21.001
    limits.admit_prompt("ann", 10)


def test_a_prompt_of_more_tokens_than_a_minute_has_waits_for_all_of_them_only():
    clock = Clock()
    limits = limited(clock, tokens=60)
    limits.admit_prompt("ann", 1)
    with pytest.raises(RateLimited) as refused:
        limits.admit_prompt("ann", 1000)
    assert refused.value.retry_after_s == pytest.approx(1.0)
    clock.now += 1.001
    limits.admit_prompt("ann", 1000)


def test_keys_without_limits_and_requests_without_keys_are_not_counted():
    limits = RateLimits([ApiKey("ann", b"a"), ApiKey("bob", b"b", tokens_per_minute=1)])
    for name in ("ann", ""):
        limits.admit_request(name)
        limits.admit_prompt(name, 10**9)
        assert limits.headers(name) == {}


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(1, 50)), max_size=60))
def test_no_minute_has_more_prompts_than_twice_the_limit_and_a_refused_one_is_admitted_in_time(steps):
    """A bucket that is full at first, and is refilled once within the minute."""
    clock, admitted = Clock(), []
    limits = limited(clock, tokens=100)
    for pause_s, count in steps:
        clock.now += pause_s
        try:
            limits.admit_prompt("ann", count)
        except RateLimited as refused:
            clock.now += refused.retry_after_s + 1e-6
            limits.admit_prompt("ann", count)
        admitted.append((clock.now, count))
        assert sum(each for at, each in admitted if at > clock.now - MINUTE_S) <= 200


def _admit_many(limits: RateLimits, tries: int, results) -> None:
    results.put(num_admitted(limits, tries))


def test_processes_share_one_count():
    spawn = multiprocessing.get_context("spawn")
    limits, results = RateLimits([ApiKey("ann", b"", 500)], clock=Clock()), spawn.Queue()
    processes = [spawn.Process(target=_admit_many, args=(limits, 2000, results)) for _ in range(3)]
    begun_s = time.monotonic()
    for process in processes:
        process.start()
    counts = [results.get(timeout=WAIT_S) for _ in processes]
    for process in processes:
        process.join(WAIT_S)
    refilled = 500 * (time.monotonic() - begun_s) / MINUTE_S
    assert 500 <= sum(counts) <= 500 + refilled + 1


# The server


@pytest.fixture
def keys_file(tmp_path) -> Path:
    digest = hashlib.sha256(b"bob-secret").hexdigest()
    file = tmp_path / "keys.toml"
    file.write_text(
        '[ann]\nkey = "ann-secret"\nrequests_per_minute = 2\n'
        f'[bob]\nsha256 = "{digest}"\ntokens_per_minute = 20\n[eve]\nkey = "eve-secret"\n'
    )
    return file


@pytest.fixture
def server_of(make_server):
    """Makes servers whose limits do not come back: their clock stands still."""

    def make(**settings):
        server = make_server(settings=ServerSettings(**settings))
        server.service.limits = RateLimits(server.service.settings.keys, clock=Clock())
        return server

    return make


def ask(server, secret: str, **fields):
    return web.post(f"{server.url}/v1/completions", json=TEXT | fields, headers={"authorization": f"Bearer {secret}"})


def metric(server, name: str) -> dict[str, int]:
    lines = web.get(f"{server.url}/metrics").text.splitlines()
    found = [line.split("}") for line in lines if line.startswith(f"{name}{{")]
    return {labels.split('"')[1]: int(value) for labels, value in found}


def test_each_key_has_its_own_limits_and_the_answer_says_what_is_left(server_of, keys_file):
    server = server_of(api_keys_file=keys_file, api_key="plain")
    first, second, third = (ask(server, "ann-secret") for _ in range(3))
    assert (first.status_code, second.status_code, third.status_code) == (200, 200, 429)
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in (first, second, third)] == ["1", "0", "0"]
    assert third.headers["x-ratelimit-reset-requests"] == "60.000s"
    assert third.headers["retry-after"] == "30"
    error = third.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert "2 requests per minute" in error["message"]
    for secret in ("eve-secret", "plain"):
        for _ in range(4):
            answer = ask(server, secret)
            assert answer.status_code == 200
            assert not any(name.startswith("x-ratelimit") for name in answer.headers)
    assert ask(server, "ann").status_code == 401


def test_tokens_of_prompts_and_answers_count(server_of, keys_file):
    server = server_of(api_keys_file=keys_file)
    first = ask(server, "bob-secret", max_tokens=16)  # 3 of the prompt
    assert first.status_code == 200
    server.wait_until(lambda: server.service.num_streams == 0)
    second = ask(server, "bob-secret")
    assert (second.status_code, second.headers["x-ratelimit-limit-tokens"]) == (429, "20")
    assert "20 tokens per minute" in second.json()["error"]["message"]


def test_every_api_refuses_in_its_own_form(server_of, keys_file):
    server = server_of(api_keys_file=keys_file)
    assert [ask(server, "ann-secret").status_code for _ in range(2)] == [200, 200]
    body = {"inputs": "a", "parameters": {"max_new_tokens": 1}}
    refused = web.post(f"{server.url}/generate", json=body, headers={"authorization": "Bearer ann-secret"})
    assert (refused.status_code, refused.json()["error_type"]) == (429, "overloaded")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="ann-secret", max_retries=0, timeout=WAIT_S)
    with pytest.raises(openai.RateLimitError):
        client.completions.create(model="fake", prompt="a")
    messages = anthropic.Anthropic(base_url=server.url, api_key="ann-secret", max_retries=0, timeout=WAIT_S).messages
    with pytest.raises(anthropic.RateLimitError) as told:
        messages.create(model="fake", max_tokens=1, messages=[{"role": "user", "content": "a"}])
    assert told.value.type == "rate_limit_error"
    assert int(told.value.response.headers["retry-after"]) > 0
    assert client.models.list().data  # of routes that generate nothing any number


def test_tokens_are_counted_by_the_names_of_keys_and_never_by_secrets(server_of, keys_file, caplog):
    caplog.set_level("INFO", logger="quire")
    server = server_of(api_keys_file=keys_file, api_key="plain")
    for secret in ("ann-secret", "ann-secret", "ann-secret", "plain"):
        ask(server, secret)
    server.wait_until(lambda: metric(server, "quire_key_requests")["key-1"] == 1)
    assert metric(server, "quire_key_requests") == {"key-1": 1, "ann": 2, "bob": 0, "eve": 0}
    assert metric(server, "quire_key_prompt_tokens")["ann"] == 6
    assert metric(server, "quire_key_generated_tokens")["ann"] == 10
    assert metric(server, "quire_key_rate_limited") == {"key-1": 0, "ann": 1, "bob": 0, "eve": 0}
    lines = [record for record in caplog.records if record.getMessage() in ("request", "request refused")]
    assert [record.key for record in lines] == ["ann", "ann", "ann", "key-1"]
    text = web.get(f"{server.url}/metrics").text + caplog.text
    assert not any(secret in text for secret in ("ann-secret", "plain", digest_of(b"ann-secret").hex()))


def test_two_workers_count_together(model_folder, keys_file):
    served = Served(model_folder, "http_workers=2", f"api_keys_file={keys_file}").wait()
    try:
        begun_s = time.monotonic()
        statuses = [ask(served, "ann-secret").status_code for _ in range(12)]  # each on a connection of its own
        refilled = 2 * (time.monotonic() - begun_s) / MINUTE_S
        assert set(statuses) == {200, 429}
        assert 2 <= statuses.count(200) <= 2 + refilled
    finally:
        served.stop()


# Settings


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "it has no keys"),
        ("ann", "not TOML"),
        ('["a b"]\nkey = "x"', "names have up to 64 letters"),
        ("[ann]\nrequests_per_minute = 2", "either key, the secret, or sha256"),
        (f'[ann]\nkey = "x"\nsha256 = "{"0" * 64}"', "either key, the secret, or sha256"),
        ('[ann]\nsha256 = "12"', "64 hexadecimal digits"),
        ('[ann]\nkey = "x y"', "a string without whitespace"),
        ('[ann]\nkey = "x"\nlimit = 2', "'limit' is not known"),
        ('[ann]\nkey = "x"\ntokens_per_minute = 0', "tokens_per_minute is 0; it must be"),
        ('[ann]\nkey = "x"\ntokens_per_minute = true', "tokens_per_minute is True; it must be"),
        ('[ann]\nkey = "x"\nmin_priority = "low"', "min_priority is 'low'; it must be a whole number between -2147"),
        ('[ann]\nkey = "x"\nmin_priority = -2147483648', "min_priority is -2147483648; it must be"),
        ('[ann]\nkey = "x"\n[bob]\nkey = "x"', "'bob' has the name or the secret of another"),
    ],
)
def test_a_file_of_keys_that_is_wrong_is_refused_by_name(tmp_path, text, problem):
    file = tmp_path / "keys.toml"
    file.write_text(text)
    with pytest.raises(InvalidSetting, match=problem) as refused:
        ServerSettings(api_keys_file=file)
    assert str(file) in refused.value.message or "another" in problem


def test_limits_for_all_keys_need_keys_and_a_file_that_is_there(tmp_path):
    with pytest.raises(InvalidSetting, match="key_tokens_per_minute is 5; it needs api_key or api_keys_file"):
        ServerSettings(key_tokens_per_minute=5)
    with pytest.raises(InvalidSetting, match="key_requests_per_minute is 0; it must be at least 1"):
        ServerSettings(api_key="a", key_requests_per_minute=0)
    with pytest.raises(InvalidSetting, match="cannot be read: No such file"):
        ServerSettings(api_keys_file=tmp_path / "nothing")


def test_limits_of_a_key_replace_those_of_all(keys_file):
    settings = ServerSettings(
        api_keys_file=keys_file, api_key="plain", key_requests_per_minute=7, key_tokens_per_minute=8
    )
    limits = {key.name: (key.requests_per_minute, key.tokens_per_minute) for key in settings.keys}
    assert limits == {"key-1": (7, 8), "ann": (2, 8), "bob": (7, 20), "eve": (7, 8)}
