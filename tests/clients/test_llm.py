"""llm, the command line, with a model of `extra-openai-models.yaml`."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("llm")

MODELS = """\
- model_id: quire
  model_name: {model}
  api_base: {v1}
  api_key_name: quire
  supports_schema: true
  supports_tools: true
- model_id: quire-text
  model_name: {model}
  api_base: {v1}
  api_key_name: quire
  completion: true
"""
TOOL = """
def get_weather(city: str) -> str:
    "The weather of a city."
    return "sunny in " + city
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory, v1, key, model):
    folder = tmp_path_factory.mktemp("llm")
    (folder / "extra-openai-models.yaml").write_text(MODELS.format(model=model, v1=v1))
    (folder / "keys.json").write_text(json.dumps({"quire": key}))
    return folder


@pytest.fixture
def llm(home):
    def run(*words: str) -> str:
        command = [sys.executable, "-m", "llm", *words]
        done = subprocess.run(
            command, env=os.environ | {"LLM_USER_PATH": str(home)}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_it_answers_and_streams(llm):
    assert llm("-m", "quire", "Say hello.", "-o", "max_tokens", "8").strip()
    assert llm("-m", "quire", "--no-stream", "-s", "Be brief.", "Say hello.", "-o", "max_tokens", "8").strip()


def test_it_counts_tokens(llm):
    llm("-m", "quire", "Say hello.", "-o", "max_tokens", "8")
    (entry,) = json.loads(llm("logs", "-n", "1", "--json"))
    assert entry["output_tokens"] == 8


def test_a_conversation_goes_on(llm):
    llm("-m", "quire", "Say hello.", "-o", "max_tokens", "8")
    assert llm("-c", "Again.", "-o", "max_tokens", "8").strip()


def test_it_completes_texts(llm):
    assert llm("-m", "quire-text", "One, two,", "-o", "max_tokens", "5").strip()


def test_answers_follow_a_schema(llm):
    text = llm("-m", "quire", "--schema", "mood: happy or sad, age int", "Describe a person.", "-o", "temperature", "0")
    assert list(json.loads(text)) == ["mood", "age"]


def test_tools_are_offered(llm):
    words = (
        "-m",
        "quire",
        "--functions",
        TOOL,
        "--chain-limit",
        "3",
        "-o",
        "temperature",
        "0",
        "-o",
        "max_tokens",
        "60",
    )
    assert llm(*words, "Say hello.").strip()
