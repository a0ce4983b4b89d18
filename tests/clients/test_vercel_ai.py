"""The AI SDK for JavaScript (`ai`), with its providers for OpenAI-compatible servers, OpenAI and Anthropic."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent / "vercel_ai.mjs"
PACKAGES = Path(sys.prefix) / "node_modules"

if not PACKAGES.is_dir():
    pytest.skip("the npm packages are not installed", allow_module_level=True)


@pytest.fixture(params=["compatible", "chat", "responses", "anthropic"])
def call(request):
    # Node looks for packages beside the script.
    script = shutil.copy(SCRIPT, PACKAGES.parent)

    def run(name: str) -> Any:
        done = subprocess.run(["node", script, request.param, name], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout)

    return run


@pytest.mark.parametrize("form", ["text", "stream"])
def test_it_generates_text_with_usage(call, form):
    answer = call(form)
    assert answer["text"]
    assert answer["tokens"] > 0


@pytest.mark.parametrize("form", ["object", "streamedObject"])
def test_it_generates_objects_of_a_schema(call, form):
    person = call(form)
    assert list(person) == ["name", "age"]
    assert 0 <= person["age"] <= 150


def test_tool_calls_round_trip(call):
    first, second = call("tools")
    assert first["calls"][0]["toolName"] == "weather"
    assert isinstance(first["calls"][0]["input"]["city"], str)
    assert second["text"]
    assert not second["calls"]


def test_it_streams_tool_calls(call):
    assert all(isinstance(made["input"]["city"], str) for made in call("streamedTools"))


def test_a_prompt_that_is_too_long_is_told(call):
    error = call("tooLong")
    assert error["isCallError"]
    assert error["status"] == 400
    assert "prompt is too long" in error["message"]
