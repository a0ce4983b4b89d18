"""dspy: predictions, reasoning before answers and typed fields.

dspy asks for a schema only of models that its catalogue lists, so these tests give the schema themselves.
"""

from typing import Literal

import pytest

dspy = pytest.importorskip("dspy")


MOOD = {"enum": ["happy", "sad"]}
AGE = {"type": "integer", "minimum": 0, "maximum": 150}
TEXT = {"type": "string", "maxLength": 100}
BOOLEAN = {"type": "boolean"}


def by_schema(**properties) -> dict:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}}


class Describe(dspy.Signature):
    """Describe a person."""

    hint: str = dspy.InputField()
    mood: Literal["happy", "sad"] = dspy.OutputField()
    age: int = dspy.OutputField()


@pytest.fixture
def lm(v1, key, model):
    return dspy.LM(
        f"openai/{model}", api_base=v1, api_key=key, max_tokens=300, temperature=0.0, cache=False, num_retries=0
    )


def test_it_answers(lm):
    (answer,) = lm("Say hello.", max_tokens=8)
    assert answer
    assert lm.history[-1]["usage"]["completion_tokens"] == 8


def test_typed_fields_follow_a_schema(lm):
    with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
        prediction = dspy.Predict(Describe, **by_schema(mood=MOOD, age=AGE))(hint="any")
    assert prediction.mood in ("happy", "sad")
    assert isinstance(prediction.age, int)


def test_reasoning_stands_before_the_typed_fields(lm):
    with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
        prediction = dspy.ChainOfThought("question -> done: bool", **by_schema(reasoning=TEXT, done=BOOLEAN))(
            question="Is water wet?"
        )
    assert isinstance(prediction.reasoning, str)
    assert isinstance(prediction.done, bool)


def test_it_streams(lm):
    with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
        program = dspy.streamify(
            dspy.Predict("question -> answer: bool", **by_schema(answer=BOOLEAN)), async_streaming=False
        )
        *_, last = program(question="Is water wet?")
    assert isinstance(last.answer, bool)


def test_a_prompt_that_is_too_long_has_its_own_error(lm, too_long):
    with pytest.raises(dspy.ContextWindowExceededError):
        lm(too_long)
