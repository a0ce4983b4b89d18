"""The Python API, on a model that is made here."""

import json
import logging
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM, Grammar, SamplingParams, json_schema, regex
from quire.errors import InvalidRequest, InvalidSetting, PromptTooLong
from quire.request import ThinkingBudget
from tests.interrupts import interrupted
from tests.tiny_chat_model import CONFIG, SIZES, program_folder, write_tiny_chat_model

GREEDY = SamplingParams(temperature=0.0)
FREE = SamplingParams(temperature=1.0)

pytestmark = pytest.mark.usefixtures("patient_masks")


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    model = write_tiny_chat_model(tmp_path_factory.mktemp("tiny"))
    cache = program_folder(tmp_path_factory)
    llm = LLM(model, progress=False, cache_dir=cache, compile_ahead=False, **SIZES)
    yield llm
    llm.close()


def text_of(llm: LLM, token_ids: list[int]) -> str:
    assert llm.tokenizer is not None
    return llm.tokenizer.decode(token_ids)


def test_a_text_its_ids_and_a_chat_of_it_can_be_completed(llm: LLM) -> None:
    ids = list(b"hello")
    text, by_ids, chat = llm.generate(
        ["hello", llm.encode("hello"), [{"role": "user", "content": "hello"}]], GREEDY, max_tokens=6, ignore_end=True
    )
    assert text.token_ids == by_ids.token_ids
    assert len(text.token_ids) == 6
    assert len(text.prompt_ids) == len(ids)
    assert text_of(llm, list(chat.prompt_ids)) == "user: hello\nassistant: "
    assert text.finish_reason == "length"


@pytest.mark.parametrize("prompt", ["one", [5, 6, 7], [{"role": "user", "content": "one"}]])
def test_one_prompt_needs_no_list_around_it(llm: LLM, prompt: object) -> None:
    (completion,) = llm.generate(prompt, GREEDY, max_tokens=2)  # type: ignore[arg-type]
    assert completion.token_ids
    assert completion.prompt_ids == llm.encode(prompt)  # type: ignore[arg-type]


def test_answers_come_in_the_order_of_prompts_whatever_their_lengths(llm: LLM) -> None:
    prompts = ["a" * length for length in (90, 1, 40, 7, 3, 120)]
    lengths = [3, 9, 1, 12, 5, 2]
    together = llm.generate(prompts, GREEDY, max_tokens=lengths, ignore_end=True)
    assert [len(one.token_ids) for one in together] == lengths
    for prompt, length, one in zip(prompts, lengths, together, strict=True):
        (alone,) = llm.generate(prompt, GREEDY, max_tokens=length, ignore_end=True)
        assert alone.token_ids == one.token_ids


def test_samples_of_one_prompt_differ_and_a_seed_brings_them_back(llm: LLM) -> None:
    first = llm.generate(["x", "y"], FREE, n=3, seed=7, max_tokens=8, ignore_end=True)
    again = llm.generate(["x", "y"], FREE, n=3, seed=7, max_tokens=8, ignore_end=True)
    assert [one.token_ids for one in first] == [one.token_ids for one in again]
    assert len({tuple(one.token_ids) for one in first}) == 6
    assert [len(one.prompt_ids) for one in first] == [1] * 6


def test_without_a_seed_a_prompt_is_answered_anew(llm: LLM) -> None:
    answers = {tuple(llm.generate("x", FREE, max_tokens=8, ignore_end=True)[0].token_ids) for _ in range(4)}
    assert len(answers) > 1


def test_each_prompt_can_be_sampled_in_its_own_way(llm: LLM) -> None:
    biased = SamplingParams(temperature=0.0, logit_bias={65: 100.0})
    free, fixed = llm.generate(["p", "p"], [GREEDY, biased], max_tokens=3, ignore_end=True)
    assert fixed.token_ids == [65, 65, 65]
    assert free.token_ids != fixed.token_ids


def test_a_stop_string_ends_the_answer_before_it(llm: LLM) -> None:
    assert llm.tokenizer is not None
    a, b = llm.encode("a")[0], llm.encode("b")[0]
    biased = SamplingParams(temperature=1.0, logit_bias={a: 50.0, b: 50.0})
    (whole,) = llm.generate("p", biased, seed=3, max_tokens=40)
    cut = whole.text.index("ba", 4)
    (stopped,) = llm.generate("p", biased, seed=3, max_tokens=40, stop=[whole.text[4 : cut + 2]])
    assert stopped.finish_reason == "stop_string"
    assert stopped.text == whole.text[: whole.text.index(whole.text[4 : cut + 2])]
    assert whole.text.startswith(text_of(llm, stopped.token_ids))
    assert llm.engine.is_idle or llm.engine.scheduler.num_running == 0


def test_a_stop_string_ends_the_answer_after_min_tokens(llm: LLM) -> None:
    a, b = llm.encode("a")[0], llm.encode("b")[0]
    biased = SamplingParams(temperature=1.0, logit_bias={a: 50.0, b: 50.0})
    whole, stopped = (
        llm.generate("p", biased, seed=3, max_tokens=40, min_tokens=10, stop=stop)[0] for stop in ([], ["a"])
    )
    assert "a" in whole.text[:10]
    assert stopped.text == whole.text[: whole.text.index("a", 10)]
    assert stopped.finish_reason == "stop_string"


def test_stop_strings_have_the_limits_of_the_server(llm: LLM) -> None:
    for stop, why in ((["a"] * 17, "it must be at most 16"), (["a", "b" * 4097], r"stop\[1\] has 4097 characters")):
        with pytest.raises(InvalidRequest, match=why):
            llm.generate("p", max_tokens=1, stop=stop)


def test_one_sample_that_stops_leaves_the_others_running(llm: LLM) -> None:
    a, b = llm.encode("a")[0], llm.encode("b")[0]
    biased = SamplingParams(temperature=1.0, logit_bias={a: 50.0, b: 50.0})
    whole = llm.generate("p", biased, seed=5, n=4, max_tokens=16)
    stop = whole[0].text[2:10]
    stopped = llm.generate("p", biased, seed=5, n=4, max_tokens=16, stop=[stop])
    assert [one.text for one in stopped] == [one.text.split(stop)[0] for one in whole]
    assert [one.finish_reason for one in stopped] == ["stop_string", "length", "length", "length"]


def test_a_stop_token_ends_the_answer_and_is_not_in_its_text(llm: LLM) -> None:
    biased = SamplingParams(temperature=0.0, logit_bias={65: 100.0})
    (completion,) = llm.generate("p", biased, max_tokens=9, stop_ids=[65])
    assert (completion.token_ids, completion.text, completion.finish_reason) == ([65], "", "stop_token")


def test_log_probabilities_come_with_each_token_and_with_the_prompt(llm: LLM) -> None:
    sampling = SamplingParams(temperature=0.0, logprobs=2)
    (completion,) = llm.generate("abcdef", sampling, max_tokens=4, prompt_logprobs=1, ignore_end=True)
    assert completion.logprobs is not None
    assert completion.prompt_logprobs is not None
    assert len(completion.logprobs) == 4
    assert len(completion.prompt_logprobs) == 5
    for token, found in zip(completion.token_ids, completion.logprobs, strict=True):
        assert found.top_ids[0] == token
        assert found.logprob == found.top_logprobs[0] < 0


def test_a_prompt_seen_before_is_found_in_the_cache(llm: LLM) -> None:
    prompt = "a prompt that nobody else in this file has"
    (first,) = llm.generate(prompt, GREEDY, max_tokens=4, ignore_end=True)
    (second,) = llm.generate(prompt, GREEDY, max_tokens=4, ignore_end=True)
    assert first.cached_tokens == 0
    assert second.cached_tokens == (len(prompt) - 1) // 4 * 4
    assert first.token_ids == second.token_ids


def test_a_prompt_that_cannot_run_does_not_stop_the_others(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "quire.llm"):
        good, long, wrong, empty, also_good = llm.generate(
            ["good", "x" * 300, [99_999], "", "also good"], GREEDY, max_tokens=3, ignore_end=True
        )
    assert isinstance(long.error, PromptTooLong)
    assert "prompt of 300 tokens" in long.error.message
    assert isinstance(wrong.error, InvalidRequest)
    assert wrong.error.message == "token id 99999 is not between 0 and 263"
    assert isinstance(empty.error, InvalidRequest)
    assert {one.finish_reason for one in (long, wrong, empty)} == {"error"}
    assert [len(one.token_ids) for one in (good, also_good)] == [3, 3]
    assert good.error is also_good.error is None
    assert [record.getMessage().split(" has")[0] for record in caplog.records] == ["prompt 1", "prompt 2", "prompt 3"]


@pytest.mark.parametrize(
    ("prompt", "wrong"),
    [([1, -1], "-1"), ([1, 2**40, 3], "1099511627776"), ([1, 2.5], "2.5"), ([np.int64(3), 264], "264")],
)
def test_a_wrong_id_is_named(llm: LLM, prompt: list[Any], wrong: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^token id {wrong} is not between 0 and 263$"):
        llm.encode(prompt)


def test_ids_may_be_numpys(llm: LLM) -> None:
    ids = llm.encode(np.arange(5))  # type: ignore[arg-type]
    assert ids == (0, 1, 2, 3, 4)
    assert {type(one) for one in ids} == {int}
    for prompt in (np.arange(1, 4), list(np.arange(1, 4)), [np.arange(1, 4)]):
        (answer,) = llm.generate(prompt, GREEDY, max_tokens=2)  # type: ignore[arg-type]
        assert answer.prompt_ids == (1, 2, 3)


@pytest.mark.parametrize("prompt", [b"abc", b"abcd", bytearray(4)])
def test_bytes_are_no_prompt(llm: LLM, prompt: bytes) -> None:
    (answer,) = llm.generate(prompt, GREEDY, max_tokens=2)
    assert isinstance(answer.error, InvalidRequest)
    assert "must be a text, token ids or a chat" in answer.error.message


def test_arguments_that_are_wrong_for_all_are_refused_at_once(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="n is 0"):
        llm.generate("x", n=0)
    with pytest.raises(InvalidRequest, match="sampling has 2 entries; there are 1 prompts"):
        llm.generate("x", [GREEDY, GREEDY])
    with pytest.raises(InvalidSetting, match="page_size is 0; it must be at least 1"):
        LLM(llm.deployment.config, progress=False, page_size=0)


def test_no_limit_on_tokens_goes_to_the_end_of_the_longest_sequence(llm: LLM) -> None:
    (completion,) = llm.generate("x" * 200, GREEDY, max_tokens=None, ignore_end=True)
    assert len(completion.token_ids) == 56
    assert completion.finish_reason == "length"


def test_a_stream_brings_the_same_answer_in_pieces(llm: LLM) -> None:
    (whole,) = llm.generate("a stream", FREE, seed=1, max_tokens=20, ignore_end=True)
    deltas = list(llm.stream("a stream", FREE, seed=1, max_tokens=20, ignore_end=True))
    assert "".join(delta.text for delta in deltas) == whole.text
    assert [token for delta in deltas for token in delta.token_ids] == whole.token_ids
    assert [delta.finish_reason for delta in deltas] == [None] * 19 + ["length"]
    assert [delta.generated_tokens for delta in deltas] == list(range(1, 21))
    assert {(delta.prompt_tokens, delta.cached_tokens) for delta in deltas} == {(8, 7)}
    assert deltas[0].tokens_per_s is None
    assert deltas[-1].tokens_per_s is not None
    assert deltas[-1].tokens_per_s > 0
    assert (whole.prompt_tokens, whole.generated_tokens) == (8, 20)


def test_streams_that_are_open_together_miss_nothing(llm: LLM) -> None:
    prompts = ["first", "the second", "3"]
    wanted = [one.token_ids for one in llm.generate(prompts, GREEDY, max_tokens=10, ignore_end=True)]
    streams = [llm.stream(prompt, GREEDY, max_tokens=10, ignore_end=True) for prompt in prompts]
    found: list[list[int]] = [[], [], []]
    for pace in (0, 1, 0, 0, 2, 1) * 10:
        found[pace] += [token for delta in [next(streams[pace], None)] if delta for token in delta.token_ids]
    assert found == wanted


def test_a_stream_that_is_left_early_gives_its_pages_back(llm: LLM) -> None:
    scheduler = llm.engine.scheduler
    stream = llm.stream("leaving", GREEDY, max_tokens=100, ignore_end=True)
    next(stream)
    assert scheduler.num_running == 1
    stream.close()  # type: ignore[attr-defined]
    list(llm.stream("next", GREEDY, max_tokens=2))
    assert scheduler.num_running == 0
    assert scheduler.stats().free_pages + scheduler.stats().cached_pages == scheduler.limits.num_pages - 1


@pytest.mark.parametrize(
    "after_lines", [(60,), (400,), (700,), (1100,), (1500,), (2200,), (900, 5, 40), (1300, 300)], ids=str
)
def test_an_interrupt_at_any_line_leaves_the_model_usable(llm: LLM, after_lines: tuple[int, ...]) -> None:
    prompts = ["an interrupted prompt", "another", [{"role": "user", "content": "and a chat"}]]
    wanted = [one.token_ids for one in llm.generate(prompts, GREEDY, max_tokens=8, ignore_end=True)]
    with interrupted(*after_lines):
        for _ in after_lines:
            with suppress(KeyboardInterrupt):
                llm.generate(prompts, GREEDY, max_tokens=8, ignore_end=True)
    found = [one.token_ids for one in llm.generate(prompts, GREEDY, max_tokens=8, ignore_end=True)]
    assert found == wanted
    deltas = list(llm.stream(prompts[0], GREEDY, max_tokens=8, ignore_end=True))
    assert [token for delta in deltas for token in delta.token_ids] == wanted[0]
    scheduler = llm.engine.scheduler
    assert scheduler.stats().free_pages + scheduler.stats().cached_pages == scheduler.limits.num_pages - 1


def test_a_stream_raises_the_failure_when_the_others_are_done(llm: LLM) -> None:
    stream = llm.stream(["x" * 300, "fine"], GREEDY, max_tokens=4, ignore_end=True)
    seen = []
    with pytest.raises(PromptTooLong):
        seen.extend(stream)
    stream = llm.stream(["x" * 300, "fine"], GREEDY, max_tokens=4, ignore_end=True)
    assert [next(stream).index for _ in range(4)] == [1, 1, 1, 1]


def test_settings_can_be_given_as_a_config(llm: LLM) -> None:
    other = LLM(llm.deployment.config, progress=False, prefix_caching=False)
    (one,) = llm.generate("same weights", GREEDY, max_tokens=3)
    (two,) = other.generate("same weights", GREEDY, max_tokens=3)
    assert one.token_ids == two.token_ids
    assert other.deployment.limits.max_batch_size == llm.deployment.limits.max_batch_size
    assert other.generate("same weights", GREEDY, max_tokens=3)[0].cached_tokens == 0
    other.close()


def test_a_model_without_tokenizer_takes_token_ids_alone(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    name = f"random:{tmp_path}"
    bare = LLM(name, progress=False, cache_dir=program_folder(tmp_path_factory), **SIZES)
    (by_ids,) = bare.generate([1, 2, 3], GREEDY, max_tokens=2)
    assert bare._built.executor.programs.num_late == 0, "all there is to compile was compiled ahead"
    assert (len(by_ids.token_ids), by_ids.text) == (2, "")
    (refused,) = bare.generate("text", GREEDY)
    assert refused.error is not None
    assert refused.error.message == f"{name} has no tokenizer; give token ids"
    with pytest.raises(InvalidRequest, match="stop strings need a tokenizer"):
        bare.generate([1], stop=["x"])
    bare.close()


def test_answers_follow_a_grammar(llm: LLM) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"enum": ["ab", 7]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    for answer in llm.generate(["one", "two"], FREE, n=2, seed=3, max_tokens=80, grammar=json_schema(schema)):
        assert answer.finish_reason == "end"
        assert json.loads(answer.text) in ({"n": "ab"}, {"n": 7})
    scored = SamplingParams(logprobs=1)
    (answer,) = llm.generate("one", scored, seed=3, max_tokens=20, grammar=regex("[é-ü]{2}(x|yz)"))
    assert re.fullmatch("[é-ü]{2}(x|yz)", answer.text)
    assert answer.logprobs is not None
    # The model's own distribution: what it likes best is as good as never what the grammar allows.
    assert any(each.top_ids[0] != token for each, token in zip(answer.logprobs, answer.token_ids, strict=True))


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        (regex("((a{1000}){1000}){1000}"), "the limit is 10000"),
        (regex("\\"), "ends with a backslash"),
        (regex("(?=a)b"), "look-around"),
        (regex("(a"), "unclosed group"),
        (regex("\ud800"), "surrogate"),
        (json_schema({"type": "string", "allOf": [{"pattern": f".*a.{{{n}}}"} for n in range(20)]}), "too complex"),
    ],
)
def test_a_grammar_that_cannot_be_followed_is_refused(llm: LLM, grammar: Grammar, why: str) -> None:
    for ask in (llm.generate, llm.stream):
        with pytest.raises(InvalidRequest, match=f"^grammar .*{why}"):
            ask("hello", max_tokens=4, grammar=grammar)


def test_an_answer_beside_a_guided_one_is_the_same(llm: LLM) -> None:
    (alone,) = llm.generate("hello", GREEDY, max_tokens=30, ignore_end=True)
    guided = llm.stream("hello", GREEDY, max_tokens=40, grammar=regex("[a-f]{40,}"))
    plain = llm.stream("hello", GREEDY, max_tokens=30, ignore_end=True)
    texts, tokens = [], []
    for one, other in zip_longest(guided, plain):
        texts.append(one.text if one else "")
        tokens += other.token_ids if other else []
    assert re.fullmatch("[a-f]{40}", "".join(texts))
    assert tokens == alone.token_ids


def test_thinking_in_a_chat_is_told_from_its_answer(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    model = write_tiny_chat_model(tmp_path / "thinker")
    template = "{{ messages[0].content }}\n<think>{% if false %}</think>{% endif %}"
    described = {"eos_token": "<|end|>", "chat_template": template}
    (tmp_path / "thinker" / "tokenizer_config.json").write_text(json.dumps(described))
    chat = [{"role": "user", "content": "think"}]
    llm = LLM(model, progress=False, cache_dir=program_folder(tmp_path_factory), compile_ahead=False, **SIZES)
    try:
        (cut,) = llm.generate([chat], FREE, max_tokens=20, seed=1, ignore_end=True)
        assert cut.text == ""
        assert cut.reasoning
        budget = ThinkingBudget("<think>", "</think>", True, 6)
        grammar = replace(regex("[xyz]{3}"), thinking_budget=budget)
        (guided,) = llm.generate([chat], FREE, max_tokens=60, seed=1, grammar=grammar)
        assert guided.reasoning
        assert re.fullmatch("[xyz]{3}", guided.text)
        text = reasoning = ""
        for delta in llm.stream([chat], FREE, max_tokens=60, seed=1, grammar=grammar):
            text, reasoning = text + delta.text, reasoning + delta.reasoning
        assert (text, reasoning) == (guided.text, guided.reasoning)
    finally:
        llm.close()


def test_threads_share_a_model(llm: LLM) -> None:
    prompts = [[f"thread {thread} says {number}" for number in range(3)] for thread in range(3)]

    def ask(part: list[str]) -> list[list[int]]:
        found = llm.generate(part, FREE, max_tokens=12, seed=3, ignore_end=True)
        return [answer.token_ids for answer in found]

    alone = [ask(part) for part in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        assert list(pool.map(ask, prompts)) == alone
    assert len({tuple(tokens) for part in alone for tokens in part}) == 9
    assert llm.engine.is_idle


def test_a_model_that_is_closed_says_so(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    model = write_tiny_chat_model(tmp_path)
    llm = LLM(model, progress=False, cache_dir=program_folder(tmp_path_factory), compile_ahead=False, **SIZES)
    begun, not_begun = (llm.stream("abc", GREEDY, max_tokens=9) for _ in range(2))
    next(begun)
    in_use: list[BaseException] = []

    def close_elsewhere() -> None:
        try:
            llm.close()
        except RuntimeError as error:
            in_use.append(error)

    with llm._stepper.call():
        thread = threading.Thread(target=close_elsewhere)
        thread.start()
        thread.join()
    assert "another thread" in str(in_use[0])
    llm.close()
    llm.close()
    for use in (
        lambda: llm.generate("abc"),
        lambda: llm.generate("abc", grammar=regex("a")),  # this one waited for ever
        lambda: llm.stream("abc"),
        lambda: next(begun),
        lambda: next(not_begun),
    ):
        with pytest.raises(RuntimeError, match="this LLM is closed"):
            use()


def test_a_seed_of_the_object_gives_prompts_without_one_the_same_in_every_run(tmp_path_factory) -> None:
    model, cache = write_tiny_chat_model(tmp_path_factory.mktemp("tiny")), program_folder(tmp_path_factory)
    runs = []
    for seed in (894, 894, 895):
        llm = LLM(model, progress=False, cache_dir=cache, compile_ahead=False, seed=seed, **SIZES)
        try:
            first = [answer.token_ids for answer in llm.generate([[5, 6], [5, 6]], FREE, max_tokens=8)]
            later = [answer.token_ids for answer in llm.generate([5, 6], FREE, max_tokens=8)]
            own = [answer.token_ids for answer in llm.generate([5, 6], FREE, max_tokens=8, seed=3)]
            runs.append((first + later, own))
        finally:
            llm.close()
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[2][0]
    assert runs[0][1] == runs[2][1]
    assert len({str(tokens) for tokens in runs[0][0]}) == 3
