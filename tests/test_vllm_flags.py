"""A start script of vLLM is told which of its flags has which name here."""

import re
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from quire.cli import main, make_app
from quire.cli.vllm_flags import INSTEAD, OTHERS

PAGE = (Path(__file__).parents[1] / "docs" / "start" / "from-vllm.md").read_text(encoding="utf-8")
TABLE = PAGE[PAGE.index("## Flags") : PAGE.index("## Requests")]


@pytest.fixture(scope="module")
def own_options() -> set[str]:
    app: Any = get_command(make_app(["serve"]))
    command = app.commands["serve"] if hasattr(app, "commands") else app
    return {option for one in command.params for option in (*one.opts, *one.secondary_opts)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-model-len", "4096"], "--max-model-len is vLLM's; here it is --max-total-tokens"),
        (["org/model", "--max_model_len=4096"], "--max_model_len is vLLM's; here it is --max-total-tokens"),
        (["-tp", "2"], "-tp is vLLM's; here it is --tensor-parallel"),
        (["-O3"], "-O3 is not there: steps are always compiled"),
        (["--port", "80", "--enforce-eager"], "--enforce-eager is not there: steps are always compiled"),
        (["--prefill-lengths", "512,1024"], "--prefill-lengths is not there: a step holds parts of several prompts"),
        (["--reasoning-parser", "qwen3"], "--reasoning-parser is not needed: the format follows"),
    ],
)
def test_a_flag_of_vllm_is_refused_with_the_one_that_is_here(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["serve", *arguments])
    told = capsys.readouterr().err
    assert ended.value.code == 2
    assert told.startswith(f"quire: {message}")
    assert told.count("\n") == 1


def test_other_unknown_options_and_wrong_values_are_told_as_ever(capsys):
    for arguments, message in ((["--no-such-thing"], "No such option"), (["--port", "-tp"], "not a valid int")):
        with pytest.raises(SystemExit) as ended:
            main(["serve", *arguments])
        assert ended.value.code == 2
        assert message in capsys.readouterr().err


def test_the_options_that_are_named_are_there_and_the_others_are_not(own_options):
    named = {option for text in (*INSTEAD.values(), *OTHERS.values()) for option in re.findall(r"--[a-z-]+", text)}
    assert named
    assert named <= own_options
    assert not (INSTEAD | OTHERS).keys() & own_options


def test_the_page_has_the_same_flags(own_options):
    rows = [line.split("|")[1:4] for line in TABLE.splitlines() if line.startswith("| `-")]
    theirs = {flag for row in rows for flag in re.findall(r"(?<![\w-])--?[A-Za-z-]+", row[0])}
    assert theirs - own_options == INSTEAD.keys()
    for first, second, third in rows:
        for flag in re.findall(r"(?<![\w-])--?[A-Za-z-]+", first):
            if flag in own_options:
                assert "the same" in second
            elif flag in INSTEAD and INSTEAD[flag].startswith("-"):
                assert set(re.findall(r"--[a-z-]+", INSTEAD[flag])) <= set(re.findall(r"--[a-z-]+", second + third))
