"""The default model through the whole engine, scheduled in every way: always the tokens that transformers gives.

No stored token is a matter of rounding (the two best logits lie far apart at each), so none may differ in float32; in
int8 some do, but not from one schedule to another.
"""

import dataclasses
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

from quire import LLM, Config, json_schema
from quire.core.plan import StepPlan
from quire.core.scheduler import Scheduler
from quire.engine.building.build import Built, build_engine
from quire.engine.building.plan import plan_deployment
from quire.engine.engine import Engine
from quire.engine.executor import Executor, Pending
from quire.grammar.matcher import Grammars
from quire.request import Request, SamplingParams
from quire.text.tokenizer import load_tokenizer

STORED = Path(__file__).parents[1] / "default_model" / "expected.json"
COMMANDS = Path(__file__).parents[2] / "docs" / "guides" / "command-line.md"
README = Path(__file__).parents[2] / "README.md"
pytestmark = pytest.mark.usefixtures("patient_masks")
TOKENS = 8
GREEDY = SamplingParams(temperature=0.0)
EXPECTED = json.loads(STORED.read_text())[5:9]  # chats that begin alike, and texts that do not
REQUESTS = [
    Request(index, tuple(entry["prompt"]), TOKENS, GREEDY, ignore_end=True)
    for index, entry in enumerate(EXPECTED, start=1)
]
LONGEST = max(len(request.prompt) for request in REQUESTS) + TOKENS

# Few slots and small steps, so that few programs have to be compiled; they are kept for the next run.
CONFIG = Config(
    quantize="none",
    max_batch_size=2,
    max_batch_prefill_tokens=32,
    max_total_tokens=128,
    page_size=8,
    num_pages=128,
    compile_ahead=False,
)


@pytest.fixture(scope="module")
def built() -> Iterator[Built]:
    built = build_engine(plan_deployment(CONFIG))
    yield built
    built.executor.close()


@pytest.fixture(scope="module")
def built_int8() -> Iterator[Built]:
    built = build_engine(plan_deployment(dataclasses.replace(CONFIG, quantize="int8")))
    yield built
    built.executor.close()


class CountingExecutor:
    """Counts the slots that begin: one for each sequence, and one more whenever a preempted one begins again."""

    platform, num_late, num_padding_tokens, num_unfinished = "cpu", 0, 0, 0

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self.num_starts = 0

    def submit(self, plan: StepPlan) -> Pending:
        self.num_starts += len(plan.started)
        return self._inner.submit(plan)

    def reset(self) -> None:
        self._inner.reset()

    def check_device(self) -> None:
        self._inner.check_device()


def answers(
    built: Built, lookahead: int = 1, abort: dict[int, int] | None = None, preempts: bool = False, **limits: Any
) -> dict[int, list[int]]:
    """The tokens of each request, from an engine with these limits; `abort` says after which step to give one up."""
    executor = CountingExecutor(built.executor)
    executor.reset()
    scheduler = Scheduler(dataclasses.replace(built.deployment.limits, **limits), time.monotonic)
    engine = Engine(scheduler, executor, lookahead)
    for request in REQUESTS:
        engine.add(request)
    found: dict[int, list[int]] = {request.request_id: [] for request in REQUESTS}
    steps = 0
    while not engine.is_idle:
        steps += 1
        for request_id, step in (abort or {}).items():
            if step == steps:
                engine.abort(request_id)
        outcome = engine.step()
        assert not outcome.failures
        for update in outcome.updates:
            found[update.request_id] += update.tokens
    scheduler.check()
    assert scheduler.stats().free_pages + scheduler.stats().cached_pages == scheduler.limits.num_pages - 1
    assert (executor.num_starts > len(REQUESTS)) == preempts
    return found


def expected() -> dict[int, list[int]]:
    return {request.request_id: entry["generated"][:TOKENS] for request, entry in zip(REQUESTS, EXPECTED, strict=True)}


SCHEDULES: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (1, {}),
    "small chunks and no look-ahead": (0, {"max_batch_prefill_tokens": 7}),
    # One sequence fits for certain; another is preempted and begins again.
    "few pages": (1, {"num_pages": LONGEST // 8 + 3, "max_batch_prefill_tokens": 19, "preempts": True}),
    "no prefix cache and one at a time": (1, {"prefix_caching": False, "max_batch_size": 1, "max_step_tokens": 33}),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_greedy_answers_do_not_depend_on_scheduling(built: Built, name: str) -> None:
    lookahead, limits = SCHEDULES[name]
    assert answers(built, lookahead, **limits) == expected()


def test_greedy_answers_in_int8_do_not_depend_on_scheduling(built_int8: Built) -> None:
    found = [answers(built_int8, lookahead, **limits) for lookahead, limits in SCHEDULES.values()]
    assert all(other == found[0] for other in found[1:])
    first = [tokens[0] == expected()[request_id][0] for request_id, tokens in found[0].items()]
    assert sum(first) >= len(first) / 2


def test_aborting_some_leaves_the_others_as_they_are(built: Built) -> None:
    found = answers(built, abort={1: 4, 3: 9})
    for request_id, tokens in expected().items():
        if request_id in (1, 3):
            assert found[request_id] == tokens[: len(found[request_id])]
            assert len(found[request_id]) < TOKENS
        else:
            assert found[request_id] == tokens


@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_the_readme_s_question_is_answered_as_it_says_by_a_wide_margin(quantize: str) -> None:
    """Through the Python API. So wide that rounding, of whatever kind, does not matter."""
    readme = README.read_text(encoding="utf-8")
    question, answer = re.findall(r'"content": ?"(.*?)"', readme)[:2]  # of the command, and of what it prints
    assert readme.count(question) == 3  # of the command, and of the other ways to ask
    assert f'$ quire generate "{question}"\n{answer}\n' in COMMANDS.read_text(encoding="utf-8")
    llm = LLM(dataclasses.replace(CONFIG, quantize=quantize), progress=False)
    asked = [{"role": "user", "content": question}]
    (completion,) = llm.generate([asked], SamplingParams(temperature=0.0, logprobs=2), max_tokens=20)
    assert (completion.text, completion.finish_reason) == (answer, "end")
    best = [each.top_logprobs for each in completion.logprobs or []]
    assert min(first - second for first, second in best) > 1.0
    assert "".join(delta.text for delta in llm.stream([asked], GREEDY, max_tokens=20)) == completion.text
    llm.close()


LONG_KEYS = {
    "type": "object",
    "properties": {"favourite_colour": {"enum": ["dark green", "dark blue"]}, "is_active": {"type": "boolean"}},
    "required": ["favourite_colour", "is_active"],
}


def guided_answers(built: Built, forces_tokens: bool) -> tuple[list[list[int]], int]:
    """Answers to a schema, greedy and sampled, and the number of steps that they took."""
    deployment = built.deployment
    path, ends = deployment.files.tokenizer, deployment.files.eos_token_ids
    assert path is not None
    built.executor.reset()
    scheduler = Scheduler(dataclasses.replace(deployment.limits, forces_tokens=forces_tokens), time.monotonic)
    grammars = Grammars(lambda: load_tokenizer(path), ends, deployment.model.vocab_size)
    engine = Engine(scheduler, built.executor, 1, grammars=grammars)
    found: list[list[int]] = []
    for number, sampling in enumerate(
        (GREEDY, SamplingParams(), SamplingParams(temperature=0.7, repetition_penalty=1.2))
    ):
        prompt = tuple(EXPECTED[number]["prompt"])
        engine.add(Request(number, prompt, 40, sampling, seed=5, end_ids=tuple(ends), grammar=json_schema(LONG_KEYS)))
        found.append([])
    while not engine.is_idle:
        outcome = engine.step()
        assert not outcome.failures
        for update in outcome.updates:
            found[update.request_id] += update.tokens
    scheduler.check()
    return found, scheduler.counters.steps


def test_forced_tokens_are_those_that_would_be_sampled_and_take_fewer_steps(built_int8: Built) -> None:
    plain, num_plain_steps = guided_answers(built_int8, forces_tokens=False)
    forced, num_steps = guided_answers(built_int8, forces_tokens=True)
    assert forced == plain
    assert num_steps < num_plain_steps
    tokenizer = load_tokenizer(built_int8.deployment.files.tokenizer)
    for tokens in forced:
        assert list(json.loads(tokenizer.decode(tokens))) == ["favourite_colour", "is_active"]


class Person(BaseModel):
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=150)


class Answer(BaseModel):
    """As Pydantic writes it: no word about other keys."""

    mood: Literal["good", "bad"]
    person: Person | None
    tags: set[Literal["a", "b"]] = Field(max_length=2)


def test_schemas_of_pydantic_give_answers_that_validate_and_have_no_other_keys() -> None:
    llm = LLM(dataclasses.replace(CONFIG, quantize="int8"), progress=False)
    asked = [[{"role": "user", "content": f"Describe {name} as JSON."}] for name in ("Ann", "Bob")]
    grammar = json_schema(Answer.model_json_schema())
    for sampling in (GREEDY, SamplingParams(temperature=1.0)):
        for completion in llm.generate(asked, sampling, seed=1, max_tokens=80, grammar=grammar):
            assert completion.finish_reason == "end", completion.text
            Answer.model_validate_json(completion.text, extra="forbid")
            assert list(json.loads(completion.text))[:2] == ["mood", "person"]
    llm.close()
