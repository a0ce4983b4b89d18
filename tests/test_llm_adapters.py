"""Adapters of a model in this process, from files to tokens."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from quire import LLM, SamplingParams, regex
from quire.errors import InvalidAdapter, InvalidSetting
from quire.models.registry import build_model
from tests.models.adapter_files import write_adapter
from tests.tiny_chat_model import CONFIG, SIZES, program_folder, write_tiny_chat_model

GREEDY = SamplingParams(temperature=0.0)
NAMES = [None, "a", "b", "a", None, "b"]

pytestmark = pytest.mark.usefixtures("patient_masks")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate("ab"):
        write_adapter(folder / name, build_model(CONFIG), seed=seed, alpha=16, rank=2 + seed)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> str:
    return write_tiny_chat_model(folder / "model")


@pytest.fixture(scope="module")
def llm(model: str, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """With one slot for two adapters."""
    adapters = {name: folder / name for name in "ab"}
    made = LLM(
        model,
        adapters=adapters,
        max_loras=1,
        progress=False,
        cache_dir=program_folder(tmp_path_factory),
        compile_ahead=False,
        **SIZES,
    )
    yield made
    made.close()


def test_each_prompt_has_its_own_adapter(llm: LLM) -> None:
    together = llm.generate(["hello"] * 6, GREEDY, max_tokens=6, ignore_end=True, adapter=NAMES)
    assert [one.error for one in together] == [None] * 6
    alone = {
        name: llm.generate("hello", GREEDY, max_tokens=6, ignore_end=True, adapter=name)[0].token_ids
        for name in (None, "a", "b")
    }
    assert [one.token_ids for one in together] == [alone[name] for name in NAMES]
    assert len({tuple(tokens) for tokens in alone.values()}) == 3, "the adapters change nothing"


def test_an_unknown_adapter_is_an_error_of_its_prompt(llm: LLM) -> None:
    good, bad = llm.generate(["hello"] * 2, GREEDY, max_tokens=2, adapter=["a", "c"])
    assert good.error is None
    assert "no adapter 'c'; loaded are: a, b" in str(bad.error)


def test_room_follows_from_the_adapters(llm: LLM) -> None:
    sizes = llm.deployment.adapters.sizes
    assert (sizes.slots, sizes.rank) == (1, 3)
    choices = {choice.name: choice.value for choice in llm.deployment.choices}
    assert (choices["max_loras"], choices["max_lora_rank"]) == (1, 3)


def test_a_broken_adapter_stops_the_start_with_its_name(model: str, tmp_path: Path) -> None:
    other = build_model({**CONFIG, "hidden_size": 64})
    broken = write_adapter(tmp_path / "broken", other)
    with pytest.raises(InvalidAdapter, match=r"broken: .*lora_A.weight is \[3, 64\]; the model has \[3, 32\]"):
        LLM(model, adapters={"x": broken}, progress=False)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"lora_adapters": ("a=x,a=y",)}, "lora_adapters has 'a' twice"),
        ({"lora_adapters": ("a=",)}, "must be name=FOLDER"),
        ({"lora_adapters": ("=x",)}, "a name has 1 to 256 characters"),
        ({"adapters": {"a": "x,y"}}, "a comma, or = in a name"),
        ({"adapters": {" a": "x"}}, "cannot begin or end with a space"),  # it would be known as another
    ],
)
def test_settings_that_make_no_sense_are_refused(model: str, settings: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidSetting, match=said):
        LLM(model, progress=False, **settings)  # type: ignore[arg-type]


def test_answers_that_follow_a_grammar_have_their_adapters(llm: LLM) -> None:
    """Most of their tokens are forced."""
    grammar = regex("the answer is [a-z]{2} and nothing else")
    asked = {"max_tokens": 60, "grammar": grammar}
    together = llm.generate(["hello"] * 6, GREEDY, adapter=NAMES, **asked)
    assert [one.error for one in together] == [None] * 6
    alone = {name: llm.generate("hello", GREEDY, adapter=name, **asked)[0].text for name in (None, "a", "b")}
    assert [one.text for one in together] == [alone[name] for name in NAMES]
    assert len(set(alone.values())) > 1, "the adapters change nothing"
