"""A server whose engine guesses tokens: the same answers, and the numbers of guesses."""

from dataclasses import replace
from itertools import pairwise

import pytest

from tests import web
from tests.server.vocabulary import served_model

ASKED = {"prompt": "abcab", "max_tokens": 40, "temperature": 0.8, "seed": 3, "timings": True}


def metrics(server) -> dict[str, float]:
    lines = web.get(f"{server.url}/metrics").text.splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


def texts(answer) -> list[str]:
    return [choice["text"] for choice in answer.json()["choices"]]


@pytest.mark.parametrize("changes", [{}, {"n": 3}, {"temperature": 0}, {"logprobs": 1}, {"min_tokens": 30}], ids=str)
def test_answers_are_those_without_guesses(make_server, changes):
    plain = web.post(f"{make_server().url}/v1/completions", json=ASKED | changes)
    guessed = web.post(f"{make_server(max_guesses=3).url}/v1/completions", json=ASKED | changes)
    assert texts(guessed) == texts(plain)
    assert [choice["logprobs"] for choice in guessed.json()["choices"]] == [
        choice["logprobs"] for choice in plain.json()["choices"]
    ]
    assert plain.json()["timings"]["guessed_tokens"] == 0
    assert guessed.json()["timings"]["right_guesses"] > 5


def test_a_stop_string_in_the_middle_of_right_guesses_ends_the_answer_there(make_server):
    server = make_server(max_guesses=3)
    (whole,) = texts(web.post(f"{server.url}/v1/completions", json=ASKED))
    for at in range(4, 16):
        stop = whole[at : at + 2]
        (cut,) = texts(web.post(f"{server.url}/v1/completions", json=ASKED | {"stop": [stop]}))
        assert cut == whole[: whole.index(stop)]


def test_the_buckets_of_skipped_tokens_are_numbers_of_guesses(make_server):
    server = make_server(model=replace(served_model(), max_guesses=3), max_guesses=3)
    timings = web.post(f"{server.url}/v1/completions", json=ASKED).json()["timings"]
    found = metrics(server)
    bounds = ("0", "1", "2", "3", "+Inf")
    counts = [found[f'tgi_request_skipped_tokens_bucket{{le="{bound}"}}'] for bound in bounds]
    assert sum("skipped_tokens_bucket" in name for name in found) == len(bounds)
    per_step = [after - before for before, after in pairwise([0.0, *counts])]
    assert sum(number * steps for number, steps in enumerate(per_step)) == timings["right_guesses"]
    assert sum(steps > 0 for steps in per_step) > 2
    assert per_step[-1] == 0


def test_guesses_are_counted(make_server):
    server = make_server(max_guesses=3)
    timings = web.post(f"{server.url}/v1/completions", json=ASKED).json()["timings"]
    found = metrics(server)
    assert timings["guessed_tokens"] > timings["right_guesses"] == found["tgi_request_skipped_tokens_sum"] > 0
    assert timings["decode_steps"] == 39 - timings["right_guesses"]
    assert found["tgi_request_skipped_tokens_count"] == 40 - timings["right_guesses"]
