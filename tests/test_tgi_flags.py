"""The flags of text-generation-inference: every one is taken, explained or refused, and the page says which."""

import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from quire.cli.precedence import Precedence
from quire.cli.settings import variables_of, with_settings
from quire.cli.tgi_flags import SAME, VALUES, TgiFlags
from quire.errors import InvalidSetting
from quire.server.settings import ServerSettings
from quire.settings.config import Config

PAGE = (Path(__file__).parents[1] / "docs" / "operations" / "from-tgi.md").read_text(encoding="utf-8")

# The launcher's own list, and the variables that it reads besides.
FLAGS = re.findall(
    r"\S+",
    """
model-id revision validation-workers sharded num-shard quantize speculate dtype kv-cache-dtype trust-remote-code
max-concurrent-requests max-best-of max-stop-sequences max-top-n-tokens max-input-tokens max-input-length
max-total-tokens waiting-served-ratio max-batch-prefill-tokens max-batch-total-tokens max-waiting-tokens max-batch-size
cuda-graphs hostname port shard-uds-path master-addr master-port huggingface-hub-cache weights-cache-override
disable-custom-kernels cuda-memory-fraction rope-scaling rope-factor json-output otlp-endpoint otlp-service-name
cors-allow-origin api-key watermark-gamma watermark-delta ngrok ngrok-authtoken ngrok-edge tokenizer-config-path
disable-grammar-support env max-client-batch-size lora-adapters usage-stats payload-limit enable-prefill-logprobs
graceful-termination-timeout prometheus-port max-image-fetch-size
""",
)
VARIABLES = ["PREFIX_CACHING", "USE_PREFIX_CACHING", "ATTENTION", "PREFILL_CHUNKING", "TGI_WIGGLE_ROOM", "LOG_LEVEL",
             "COMPUTE_TYPE", "AIP_HTTP_PORT", "AIP_PREDICT_ROUTE", "AIP_HEALTH_ROUTE"]  # fmt: skip

Field = dataclasses.Field
OWN: dict[str, Field[Any]] = {field.name: field for field in dataclasses.fields(TgiFlags)}
SETTINGS = {field.name: field for kind in (Config, ServerSettings) for field in dataclasses.fields(kind)}


def asked(*arguments: str, env: dict[str, str] | None = None) -> tuple[Config, ServerSettings, list[str]]:
    """What a server would be started with, and warned of."""
    seen: list[tuple[Config, ServerSettings, list[str]]] = []
    probe = typer.Typer()

    @probe.command()
    @with_settings
    def look(config: Config, settings: ServerSettings, flags: TgiFlags, precedence: Precedence) -> None:
        """Look at the settings."""
        seen.append((*flags.applied(config, settings, precedence, os.environ), flags.warnings()))

    fields = [*OWN.values(), *SETTINGS.values()]
    empty = dict.fromkeys(["HOSTNAME", *(name for field in fields for name in variables_of(field))])
    result = CliRunner().invoke(probe, arguments, env=empty | (env or {}))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return seen[0]


def example(field: Field[Any]) -> str:
    hint, values = str(field.type), field.metadata.get("values")
    return values[-1] if values else "2" if "int" in hint else "0.5" if "float" in hint else "text"


def test_every_flag_and_variable_of_the_launcher_is_accounted_for():
    names = {flag.replace("-", "_") for flag in FLAGS} | {name.lower() for name in VARIABLES}
    assert names == OWN.keys() | SAME.keys()
    assert not OWN.keys() & SAME.keys()
    assert SAME.keys() <= SETTINGS.keys()
    for name in SAME:
        assert variables_of(SETTINGS[name]) == (f"QUIRE_{name.upper()}", name.upper())
    unread = {name for name, field in OWN.items() if not variables_of(field)}
    assert unread == {"model_id", "hostname", "env"}  # the first two are read otherwise, see below


@pytest.mark.parametrize("name", [name for name in OWN if "means" in OWN[name].metadata])
def test_a_flag_with_another_name_sets_what_it_means(name):
    field = OWN[name]
    other = SETTINGS[field.metadata["means"]]
    for arguments, env in (([f"--{name.replace('_', '-')}", example(field)], None), ([], {name.upper(): "2"})):
        if env and not variables_of(field):
            continue
        config, settings, warnings = asked(*arguments, env=env)
        value = getattr(config if hasattr(config, other.name) else settings, other.name)
        assert str(value) in (example(field), "2", "2.0")
        assert warnings == []


@pytest.mark.parametrize("name", [name for name in OWN if "inert" in OWN[name].metadata])
def test_a_flag_that_does_nothing_says_why(name):
    field = OWN[name]
    flag = f"--{name.replace('_', '-')}"
    ways = [([flag], None)] if field.default is False else [([flag, example(field)], None)]
    ways.append(([], {name.upper(): "true" if field.default is False else example(field)}))
    for arguments, env in ways:
        config, settings, warnings = asked(*arguments, env=env)
        assert (config, settings) == (Config(), ServerSettings())
        assert warnings == [f"{flag} does nothing: {field.metadata['inert']}"]


@pytest.mark.parametrize("name", [name for name in OWN if "refused" in OWN[name].metadata])
def test_a_flag_that_would_change_results_is_refused_with_the_reason(name):
    field = OWN[name]
    flag = f"--{name.replace('_', '-')}"
    with pytest.raises(InvalidSetting, match=re.escape(field.metadata["refused"])):
        asked(*([flag] if field.default is False else [flag, example(field)]))
    if variables_of(field):
        with pytest.raises(InvalidSetting, match=f"^{name} is "):
            asked(env={name.upper(): "true" if field.default is False else example(field)})


@pytest.mark.parametrize("name", [name for name in OWN if OWN[name].metadata.get("values")])
def test_a_value_that_a_flag_cannot_have_is_refused_although_the_flag_does_nothing(name):
    values = OWN[name].metadata["values"]
    for value in values:
        assert len(asked(env={name.upper(): value})[2]) == 1
    with pytest.raises(InvalidSetting, match=f"{name} is 'flash'; it can be {', '.join(values)}"):
        asked(env={name.upper(): "flash"})


def test_hostname_is_an_address_or_the_name_of_the_machine():
    assert asked(env={"HOSTNAME": "3f9c2a7e1b"})[1].host == "127.0.0.1"
    assert asked(env={"HOSTNAME": "0.0.0.0"})[1].host == "0.0.0.0"
    assert asked(env={"HOSTNAME": "::"})[1].host == "::"
    assert asked("--host", "10.0.0.1", env={"HOSTNAME": "0.0.0.0"})[1].host == "10.0.0.1"
    assert asked("--hostname", "10.0.0.1", env={"HOSTNAME": "0.0.0.0"})[1].host == "10.0.0.1"
    assert asked("--hostname", "localhost")[1].host == "localhost"


def test_two_names_of_one_setting_must_agree():
    assert asked("--num-shard", "4", "--tensor-parallel", "4")[0].tensor_parallel == 4
    for own in ("2", "1"):  # 1 is the default
        with pytest.raises(InvalidSetting, match=f"num_shard is 4 and tensor_parallel is {own}; they mean the same"):
            asked("--num-shard", "4", "--tensor-parallel", own)
    with pytest.raises(InvalidSetting, match="json_output is json and log_format is text"):
        asked("--json-output", "--log-format", "text")
    with pytest.raises(InvalidSetting, match="aip_http_port is 8080 and port is 80"):
        asked(env={"AIP_HTTP_PORT": "8080", "PORT": "80"})


def test_options_override_variables_under_either_name():
    assert asked("--model-id", "a", env={"MODEL_ID": "b"})[0].model == "a"
    assert asked("--model-id", "a", env={"QUIRE_MODEL": "b"})[0].model == "a"
    assert asked("--hub-cache", "/own", env={"HUGGINGFACE_HUB_CACHE": "/theirs"})[0].hub_cache == Path("/own")
    assert asked("--port", "8000", env={"AIP_HTTP_PORT": "8080"})[1].port == 8000  # also where it is the default
    assert asked("--host", "127.0.0.1", env={"HOSTNAME": "0.0.0.0"})[1].host == "127.0.0.1"
    assert asked("--json-output", env={"QUIRE_LOG_FORMAT": "text"})[1].log_format == "json"


def test_quires_own_variables_override_the_others():
    both = {"QUIRE_TENSOR_PARALLEL": "2", "NUM_SHARD": "4"}
    assert asked(env=both)[0].tensor_parallel == 2
    assert asked(env={"QUIRE_HOST": "127.0.0.1", "HOSTNAME": "0.0.0.0"})[1].host == "127.0.0.1"
    assert asked(env={"QUIRE_LOG_FORMAT": "text", "JSON_OUTPUT": "true"})[1].log_format == "text"
    assert asked(env={"QUIRE_PREFIX_CACHING": "1", "USE_PREFIX_CACHING": "0"})[0].prefix_caching is True


def test_variables_override_the_file_under_either_name(tmp_path):
    file = tmp_path / "quire.toml"
    file.write_text('port = 80\ntensor_parallel = 2\nhost = "127.0.0.1"\n')
    env = {"AIP_HTTP_PORT": "8080", "NUM_SHARD": "4", "HOSTNAME": "0.0.0.0"}
    config, settings, _ = asked("--config", str(file), env=env)
    assert (settings.port, config.tensor_parallel) == (8080, 4)
    assert settings.host == "127.0.0.1"  # HOSTNAME is there in any case, and asks for nothing


@pytest.mark.parametrize(("said", "meant"), [("0", False), ("false", False), ("1", True), ("true", True)])
def test_prefix_caching_is_found_under_its_old_name(said, meant):
    assert asked(env={"USE_PREFIX_CACHING": said})[0].prefix_caching is meant
    assert asked(env={"PREFIX_CACHING": said})[0].prefix_caching is meant


def test_the_names_of_prefix_caching_must_agree():
    assert asked(env={"USE_PREFIX_CACHING": "0", "PREFIX_CACHING": "0"})[0].prefix_caching is False
    with pytest.raises(InvalidSetting, match="use_prefix_caching is True and prefix_caching is False"):
        asked(env={"USE_PREFIX_CACHING": "1", "PREFIX_CACHING": "0"})
    with pytest.raises(AssertionError, match="use-prefix-caching"):
        asked(env={"USE_PREFIX_CACHING": "maybe"})


def test_shards_are_counted():
    assert asked("--sharded", "true", "--num-shard", "2")[0].tensor_parallel == 2
    assert asked("--sharded", "false")[0].tensor_parallel == 1
    for arguments in (["--sharded", "true"], ["--sharded", "false", "--num-shard", "2"], ["--sharded", "maybe"]):
        with pytest.raises(InvalidSetting, match=r"^sharded is "):
            asked(*arguments)


def test_logs_and_templates_are_found_under_their_old_names(tmp_path):
    assert asked("--json-output")[1].log_format == "json"
    file = tmp_path / "tokenizer_config.json"
    file.write_text('{"chat_template": "{{ messages }}"}')
    assert asked(env={"TOKENIZER_CONFIG_PATH": str(file)})[0].chat_template == "{{ messages }}"
    several = [{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]
    file.write_text(json.dumps({"chat_template": several}))
    assert asked("--tokenizer-config-path", str(file))[0].chat_template == "b"
    for text in ("{}", "[", '{"chat_template": 3}', '{"chat_template": [{"name": "other", "template": "a"}]}'):
        file.write_text(text)
        with pytest.raises(InvalidSetting, match=r"^tokenizer_config_path is "):
            asked("--tokenizer-config-path", str(file))


def test_origins_can_be_repeated_and_levels_are_words():
    both = asked("--cors-allow-origin", "https://a", "--cors-allow-origin", "https://b,https://c")[1]
    assert both.allowed_origins == ("https://a", "https://b", "https://c")
    assert asked(env={"LOG_LEVEL": "WARN,text_generation_router=debug"})[1].logging_level == 30
    with pytest.raises(InvalidSetting, match="log_level is 'loud'"):
        asked("--log-level", "loud")


def row(name: str) -> str:
    """What the page says of a flag."""
    flag = f"`--{name.replace('_', '-')}`" if name.upper() not in VARIABLES or name in SETTINGS else ""
    if name in SAME:
        if name in VALUES:
            return f"| {flag} | `{name.upper()}` | {VALUES[name]} |"
        own = SETTINGS[name].default
        default = f"; default {SAME[name]} there, {own} here" if SAME[name] and str(own) != SAME[name] else ""
        return f"| {flag} | `{name.upper()}` | the same{default} |"
    field = OWN[name]
    data = field.metadata
    variable = f"`{name.upper()}`" if name != "env" else ""
    if "means" in data:
        return f"| {flag} | {variable} | `--{data['means'].replace('_', '-')}` |"
    for kind, says in (("inert", "nothing, with a warning"), ("refused", "refused")):
        if kind in data:
            values = f"; it can be {', '.join(data['values'])}" if data.get("values") else ""
            return f"| {flag} | {variable} | {says}: {data[kind]}{values} |"
    return f"| {flag} | {variable} | {data['help'].rstrip('.')} |"


def test_the_page_has_a_row_for_each_and_no_other():
    rows = [line for line in PAGE.splitlines() if line.startswith("| `--") or line.startswith("|  |")]
    assert sorted(rows) == sorted(row(name) for name in OWN.keys() | SAME.keys())
