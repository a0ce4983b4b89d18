"""Every code block of the README and of docs/ runs, is parsed, or says in a comment why neither is done.

Python runs against a server with the fake engine, and a model that is made here stands for the default one. Commands of
curl are sent to the same server. Of `quire` the arguments are parsed, of `make` the target is looked up, and programs
of bench/ must have the options that are shown. Other commands need a comment above the block:
`<!-- not run: reason -->`.
"""

import contextlib
import io
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from quire import Config
from quire.cli import make_app
from quire.files.packaged_model import DEFAULT_MODEL
from quire.models.registry import build_model
from quire.server.settings import ServerSettings
from tests.docs.blocks import DATA, PAGES, ROOT, Block, blocks
from tests.docs.curl import SERVER, read_curl
from tests.models.adapter_files import write_adapter
from tests.server.running import RunningServer
from tests.server.vocabulary import JSON_PIECES, TOOL_TEMPLATE, served_model
from tests.tiny_chat_model import CONFIG, SIZES, program_folder, write_tiny_chat_model

BLOCKS = list(blocks())
EXAMPLES_OF = "docs/api.md"  # tests/server/test_examples.py runs these, and compares their answers
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
SHELLS = ("sh", "console")


def of(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages and not block.reason]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("adapters")
    (folder / "style").mkdir()
    (folder / "style" / "adapter_config.json").write_text("{}")
    model = replace(
        served_model(max_total_tokens=4096, pieces=JSON_PIECES, template=TOOL_TEMPLATE, end_ids=(0,)),
        name=DEFAULT_MODEL.name,
        adapters={},
    )
    running = RunningServer(
        settings=ServerSettings(), model=model, adapter_folder=folder, max_loras=2, max_sequence_tokens=4096
    ).start()
    yield running
    running.stop()


@pytest.fixture(scope="module")
def namespace(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What stands for the default model and for files."""
    model = write_tiny_chat_model(tmp_path_factory.mktemp("tiny"))
    adapter = tmp_path_factory.mktemp("style")
    write_adapter(adapter, build_model(CONFIG), alpha=16, rank=2)
    config = Config(model=model, cache_dir=program_folder(tmp_path_factory), compile_ahead=False, **SIZES)
    return {"default_model": config, "style_folder": str(adapter)}


def executable(code: str, url: str) -> str:
    return (
        code.replace(SERVER, url)
        .replace('LLM("default"', "LLM(default_model")
        .replace("LLM()", "LLM(default_model)")
        .replace('"/models/style"', "style_folder")
    )


@pytest.mark.parametrize("page", sorted({block.page for block in of("python")}))
def test_python_runs(page: str, server: RunningServer, namespace: dict[str, Any]) -> None:
    """Blocks of a page share their names, as a reader who types them one after another has them."""
    names: dict[str, Any] = dict(namespace)
    for block in of("python"):
        if block.page == page:
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(executable(block.code, server.url), block.place, "exec"), names)


def commands() -> Iterator[Any]:
    for block in of(*SHELLS):
        for number, command in enumerate(block.commands):
            if block.page != EXAMPLES_OF:
                yield pytest.param(command, id=f"{block.place}:{number}")


def test_there_are_commands_of_every_kind() -> None:
    shown = [command.values[0] for command in commands()]
    assert all(any(one.startswith(word) for one in shown) for word in ("curl ", "quire ", "make ", "python bench/"))


@pytest.mark.parametrize("command", list(commands()))
def test_a_command_works(command: str, server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if command.startswith("curl "):
        answer = read_curl(re.sub(r" \| .*$", "", command)).to(server.url)
        assert answer.status_code == 200, answer.text
        return
    words = shlex.split(command, comments=True)
    while "=" in words[0]:  # variables
        words.pop(0)
    program, *arguments = words
    if program == "quire":
        monkeypatch.chdir(tmp_path)
        (tmp_path / "quire.toml").touch()
        parse(arguments)
    elif program == "make":
        assert {word for word in arguments if "=" not in word} <= TARGETS
    elif program == "python" and arguments[0].startswith(("bench/", "examples/")):
        source = (ROOT / arguments[0]).read_text(encoding="utf-8")
        missing = [word for word in arguments[1:] if word.startswith("--") and f'"{word}"' not in source]
        assert not missing
    else:
        pytest.fail(f"nothing is known of {program}: say above the block why it is not run")


def parse(arguments: list[str]) -> None:
    """As `quire` does; raises where an option or an argument is not known."""
    command: Any = get_command(make_app())
    context = command.make_context("quire", list(arguments))
    rest = [*context._protected_args, *context.args]
    while hasattr(command, "commands"):
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)
        rest = [*getattr(context, "_protected_args", ()), *context.args]


@pytest.mark.parametrize("block", of("json", "toml", "yaml"), ids=lambda block: block.place)
def test_data_can_be_read(block: Block) -> None:
    if "…" in block.code:
        return  # an answer that is cut
    {"json": json.loads, "toml": tomllib.loads, "yaml": lambda text: list(yaml.safe_load_all(text))}[block.language](
        block.code
    )


def test_every_block_is_of_a_kind_that_is_run_or_is_data() -> None:
    unknown = [block.place for block in BLOCKS if block.language not in {"python", *SHELLS, *DATA} and not block.reason]
    assert not unknown


def test_no_code_is_indented_instead_of_fenced() -> None:
    """Such blocks have no language, so nothing could run them."""
    indented = re.compile(r"(?:^|\n)\n {4}\S")
    found = [path.name for path in PAGES if indented.search(re.sub(r"```.*?```", "", without_lists(path), flags=re.S))]
    assert not found


def without_lists(path: Path) -> str:
    """The text of a page without items of lists, whose further paragraphs are indented too."""
    return re.sub(r"^(?:[-*]|\d+\.) .*(?:\n(?: +\S.*)?)*", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)


def test_a_wrong_command_is_found_out() -> None:
    parse(["serve", "--max-batch-size", "8", "org/name"])
    for wrong in (["serve", "--max-batch-sise", "8"], ["surf"], ["bench", "nothing"]):
        with pytest.raises(Exception, match=r"No such|Got unexpected"):
            parse(wrong)
