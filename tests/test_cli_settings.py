"""Settings from options, variables, files and defaults."""

import dataclasses
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import typer
from typer.testing import CliRunner

from quire.cli import make_app
from quire.cli.sampling import SamplingOptions
from quire.cli.settings import forget_service_links, read_settings, refuse_misspelt, variables_of, with_settings
from quire.errors import InvalidSetting
from quire.request import SamplingParams
from quire.server.settings import ServerSettings
from quire.settings.config import Config, setting
from quire.settings.group import GroupSettings
from quire.settings.peers import PeerSettings


@dataclass(frozen=True)
class Lists:
    names: tuple[str, ...] = setting((), "Lists", "Names.")


def parsed(arguments: list[str], env: dict[str, str] | None = None) -> tuple[Config, Lists]:
    """What a command is called with."""
    seen: list[tuple[Config, Lists]] = []
    probe = typer.Typer()

    @probe.command()
    @with_settings
    def look(config: Config, lists: Lists) -> None:
        """Look at the settings."""
        seen.append((config, lists))

    empty = dict.fromkeys(name for field in dataclasses.fields(Config) for name in variables_of(field))
    result = CliRunner().invoke(probe, arguments, env=empty | (env or {}))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return seen[0]


def test_nothing_given_is_the_default_config() -> None:
    assert parsed([]) == (Config(), Lists())


@pytest.mark.parametrize("field", dataclasses.fields(Config), ids=lambda field: field.name)
def test_every_field_is_an_option_a_variable_and_a_key(field: Any, tmp_path: Path) -> None:
    kinds = {"bool": not field.default, "int": 3, "float": 0.25, "Path": Path("/somewhere"), "str": "text"}
    hint = get_type_hints(Config)[field.name]
    (kind,) = [name for name in kinds if name in str(hint).replace("pathlib.", "")]
    value = kinds[kind]
    option = "--" + field.name.replace("_", "-")
    if kind == "bool":
        given = [option if value else f"--no-{option[2:]}"]
        written = str(value).lower()
    else:
        given = [option, str(value)]
        written = str(value) if kind in ("int", "float") else f'"{value}"'
    if "tuple" in str(hint):  # given once; a file has a list
        value, written = (value,), f"[{written}]"
    file = tmp_path / "quire.toml"
    file.write_text(f"{field.name} = {written}\n")
    wanted = dataclasses.replace(Config(), **{field.name: value})
    assert parsed(given)[0] == wanted
    assert variables_of(field)[0] == f"QUIRE_{field.name.upper()}"
    for variable in variables_of(field):
        assert parsed([], {variable: given[-1] if kind != "bool" else str(value)})[0] == wanted
    assert parsed(["--config", str(file)])[0] == wanted


def test_a_home_is_found_however_a_path_is_given(tmp_path: Path) -> None:
    file = tmp_path / "quire.toml"
    file.write_text('cache_dir = "~/cache"\n')
    home, wanted = {"HOME": "/homes/one"}, Config(cache_dir=Path("/homes/one/cache"))
    assert parsed(["--cache-dir=~/cache"], home)[0] == wanted  # of this a shell leaves the ~
    assert parsed([], home | {"QUIRE_CACHE_DIR": "~/cache"})[0] == wanted
    assert parsed(["--config", str(file)], home)[0] == wanted
    assert parsed(["--cache-dir", "~no-such-user/cache"])[0] == Config(cache_dir=Path("~no-such-user/cache"))


def test_options_beat_variables_which_beat_the_file(tmp_path: Path) -> None:
    file = tmp_path / "quire.toml"
    file.write_text("max_batch_size = 2\npage_size = 4\nprefix_caching = false\n")
    from_file = ["--config", str(file)]
    env = {"QUIRE_MAX_BATCH_SIZE": "3", "QUIRE_PREFIX_CACHING": "true"}
    assert parsed(from_file)[0].max_batch_size == 2
    assert parsed(from_file, env)[0] == Config(max_batch_size=3, page_size=4, prefix_caching=True)
    options = ["--max-batch-size", "5", "--no-prefix-caching"]
    for order in (options + from_file, from_file + options):
        assert parsed(order, env)[0] == Config(max_batch_size=5, page_size=4, prefix_caching=False)


def test_variables_of_other_programs_work_and_quires_own_beat_them() -> None:
    assert parsed([], {"MAX_BATCH_SIZE": "3", "MODEL_ID": "a", "HF_HUB_OFFLINE": "1"})[0] == Config(
        max_batch_size=3, model="a", offline=True
    )
    both = {"MAX_BATCH_SIZE": "3", "QUIRE_MAX_BATCH_SIZE": "4", "MODEL_ID": "a", "QUIRE_MODEL": "b"}
    assert parsed([], both)[0] == Config(max_batch_size=4, model="b")


def test_a_name_that_no_other_program_has_is_read_with_its_prefix_only() -> None:
    assert parsed([], {"PAGE_SIZE": "4", "TOKEN": "x", "OFFLINE": "1"})[0] == Config()


def test_lists_are_given_by_repeating_the_option_or_as_a_list_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "quire.toml"
    file.write_text('names = ["a", "b"]\n')
    assert parsed(["--names", "x", "--names", "y"])[1] == Lists(("x", "y"))
    assert parsed(["--config", str(file)])[1] == Lists(("a", "b"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_batch_sise = 2", r"there is no setting 'max_batch_sise'; did you mean max_batch_size\?"),
        ("zzz = 2", "there is no setting 'zzz'; there are model, revision"),
        ('max_batch_size = "2"', "max_batch_size is '2'; it must be of type int"),
        ("max_batch_size = true", "max_batch_size is True; it must be of type int"),
        ("model = 3", "model is 3; it must be of type str"),
        ("[table]\nx = 1", "there is no setting 'table'"),
        ("= 3", "cannot be read as TOML"),
    ],
)
def test_a_file_with_anything_else_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "quire.toml"
    file.write_text(text)
    with pytest.raises(InvalidSetting, match=message):
        read_settings(file, get_type_hints(Config))


@pytest.mark.parametrize("command", [["generate"], ["chat"], ["doctor"], ["bench", "offline"]], ids=" ".join)
def test_help_shows_every_setting_in_its_group(command: list[str]) -> None:
    result = CliRunner().invoke(make_app(), [*command, "--help"], env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"})
    assert result.exit_code == 0
    for field in dataclasses.fields(Config):
        assert f"--{field.name.replace('_', '-')}" in result.output
        assert f" {field.metadata['group']} " in result.output


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("QUIRE_API_KEYS", "QUIRE_API_KEY"),
        ("QUIRE_MAX_BATCHSIZE", "QUIRE_MAX_BATCH_SIZE"),
        ("QUIRE_TENSOR_PARALLEL_SIZE", "QUIRE_TENSOR_PARALLEL"),
    ],
)
def test_a_misspelt_variable_is_refused_with_the_one_that_is_meant(given: str, meant: str) -> None:
    command = [sys.executable, "-m", "quire", "serve", "random:tiny", "--port", "0"]
    ended = subprocess.run(command, env=os.environ | {given: "2"}, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (2, f"quire: there is no variable {given}; did you mean {meant}?\n")


SERVICE_LINKS = {
    "QUIRE_SERVICE_HOST": "10.0.0.1",
    "QUIRE_SERVICE_PORT": "8000",
    "QUIRE_SERVICE_PORT_HTTP": "8000",
    "QUIRE_PORT": "tcp://10.0.0.1:8000",
    "QUIRE_PORT_8000_TCP": "tcp://10.0.0.1:8000",
    "QUIRE_PORT_8000_TCP_PROTO": "tcp",
    "QUIRE_PORT_8000_TCP_PORT": "8000",
    "QUIRE_PORT_8000_TCP_ADDR": "10.0.0.1",
    "QUIRE_PROMETHEUS_SERVICE_PORT": "9000",  # close to QUIRE_PROMETHEUS_PORT
    "QUIRE_PROMETHEUS_PORT": "tcp://10.0.0.2:9000",
    "PROMETHEUS_PORT": "tcp://10.0.0.3:9090",
    "MASTER_PORT": "udp://10.0.0.4:53",
}


def test_variables_that_kubernetes_sets_for_services_are_no_settings() -> None:
    environment = {**SERVICE_LINKS, "QUIRE_GROUP_SECRET": "x", "QUIRE_PEER_SECRET": "x", "QUIRE_HTTP_WORKERS": "2"}
    forget_service_links(environment)
    read = {name for field in dataclasses.fields(ServerSettings) for name in variables_of(field)} & environment.keys()
    assert read == {"QUIRE_HTTP_WORKERS"}
    assert refuse_misspelt((Config, ServerSettings, GroupSettings, PeerSettings), environment) == []


def test_a_server_starts_beside_services_of_its_name() -> None:
    command = [sys.executable, "-m", "quire", "serve", "no/such/model/here"]
    environment = os.environ | SERVICE_LINKS | {"QUIRE_COLOUR_OF_TEAM": "red"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 1  # the model is looked for, so all settings were read
    assert ended.stderr.count("does nothing: no setting is read from it") == 1
    assert "QUIRE_COLOUR_OF_TEAM does nothing" in ended.stderr


@pytest.mark.parametrize("command", [["doctor"], ["bench", "serving"], ["tokenizer", "export"]], ids=" ".join)
def test_help_of_other_commands_is_whole_as_well(command: list[str]) -> None:
    environment = os.environ | {"COLUMNS": "80"}
    shown = subprocess.check_output([sys.executable, "-m", "quire", *command, "--help"], env=environment, text=True)
    assert "--help" in shown
    assert "…" not in shown


@pytest.mark.parametrize("columns", [80, 110, 200])
def test_help_shows_whole_names_however_narrow_the_terminal_is(columns: int) -> None:
    environment = os.environ | {"COLUMNS": str(columns)}  # read once in a process
    shown = subprocess.check_output([sys.executable, "-m", "quire", "serve", "--help"], env=environment, text=True)
    assert max(map(len, shown.splitlines())) <= columns
    words = set(re.findall(r"--[a-z-]+", shown))
    for kind in (Config, ServerSettings):
        for field in dataclasses.fields(kind):
            assert f"--{field.name.replace('_', '-')}" in words
            assert re.search(rf"\b{field.metadata['group']}\b", shown)


def test_a_filter_draws_even_where_the_model_is_greedy_by_default() -> None:
    greedy = SamplingParams(temperature=0.0, repetition_penalty=1.1)
    assert SamplingOptions().over(greedy) == greedy
    assert SamplingOptions(top_p=0.5).over(greedy) == SamplingParams(1.0, top_p=0.5, repetition_penalty=1.1)
    assert SamplingOptions(top_p=0.5, temperature=0.0).over(greedy).temperature == 0
