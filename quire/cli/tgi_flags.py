"""The flags and variables of text-generation-inference's launcher.

Those that Quire has by the same name and with the same meaning are in SAME; the others are fields of TgiFlags. The page
docs/operations/from-tgi.md shows all of them, and a test holds it to this file.
"""

import dataclasses
import ipaddress
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quire.cli.precedence import Precedence, Source
from quire.errors import InvalidSetting
from quire.files.regular_file import read_regular_text
from quire.server.settings import ServerSettings
from quire.settings.config import Config

GROUP = "As text-generation-inference has it"

ATTENTION = ("paged", "flashdecoding", "flashdecoding-ipex", "flashinfer")

# By name: the default there, where there is one.
SAME = {
    "revision": "", "dtype": "", "max_concurrent_requests": "128", "max_best_of": "2", "max_stop_sequences": "4",
    "max_top_n_tokens": "5", "max_input_tokens": "", "max_total_tokens": "", "waiting_served_ratio": "",
    "max_batch_prefill_tokens": "", "max_batch_total_tokens": "", "max_waiting_tokens": "", "max_batch_size": "",
    "port": "3000", "prometheus_port": "9000", "cors_allow_origin": "", "api_key": "", "max_client_batch_size": "4",
    "payload_limit": "2000000", "enable_prefill_logprobs": "", "disable_grammar_support": "", "prefix_caching": "1",
    "log_level": "info", "compute_type": "", "quantize": "", "aip_predict_route": "", "aip_health_route": "",
    "speculate": "", "otlp_endpoint": "", "otlp_service_name": "text-generation-inference.router",
    "lora_adapters": "", "kv_cache_dtype": "",
}  # fmt: skip

# By name: where the same flag takes other values, or means something else by default.
VALUES = {
    "enable_prefill_logprobs": "counts with `--tgi-strict` only; without that, `decoder_input_details` always has the "
    "log-probabilities of the prompt",
    "quantize": "takes `none`, `fp8`, `int8` and `auto`, the default (int8 on a CPU, and none for a quantised "
    "checkpoint); `gptq`, `awq`, `fp8`, `mxfp4`, `compressed-tensors`, `modelopt`, `fbgemm_fp8` and `auto-round` for a "
    "checkpoint that is so; the other methods there are refused",
    "kv_cache_dtype": "takes `fp8_e4m3fn`, also as `fp8_e4m3` and `fp8`, `int8`, that of `--dtype` and `auto`, the "
    "default (that of the checkpoint's `kv_cache_scheme`, or of `--dtype`); `fp8_e5m2` is refused",
}


def _means(other: str, help: str, default: Any = None, variable: bool = True) -> Any:
    """A flag that is another name of a setting."""
    return _flag(default, f"{help} The same as --{other.replace('_', '-')}.", variable, means=other)


def _inert(why: str, default: Any = None, values: tuple[str, ...] = ()) -> Any:
    """A flag that is accepted with a warning: it changes no result. `values`: all it may have, if only these are valid
    there."""
    return _flag(default, why, hidden=True, inert=why, values=values)


def _refused(why: str, default: Any = None, variable: bool = True) -> Any:
    """A flag that would change results, or access to them, and is refused."""
    return _flag(default, why, variable, hidden=True, refused=why)


def _flag(default: Any, help: str, variable: bool = True, **more: Any) -> Any:
    unread = {} if variable else {"variable": None}
    return dataclasses.field(default=default, metadata={"group": GROUP, "help": help} | unread | more)


@dataclass(frozen=True)
class TgiFlags:
    """Flags of the launcher, given to `quire serve`."""

    # MODEL_ID is read by --model.
    model_id: str | None = _means("model", "What to serve.", variable=False)
    # HOSTNAME is read by `applied`, since most shells and all containers put the machine's name there.
    hostname: str | None = _means("host", "Address to listen on.", variable=False)
    max_input_length: int | None = _means("max_input_tokens", "Longest prompt.")
    aip_http_port: int | None = _means("port", "Port to listen on, as Vertex AI chooses it.")
    num_shard: int | None = _means("tensor_parallel", "Devices to split the model across.")
    sharded: str | None = _flag(None, "Needs --num-shard when true; with false --num-shard must be 1.", special=True)
    cuda_memory_fraction: float | None = _means("memory_fraction", "Share of a GPU's memory that the engine takes.")
    graceful_termination_timeout: float | None = _means("drain_s", "Seconds for open requests to finish after SIGTERM.")
    huggingface_hub_cache: Path | None = _means("hub_cache", "Where fetched models are kept.")
    use_prefix_caching: bool | None = _flag(None, "The same as --prefix-caching.", special=True)
    json_output: bool = _flag(False, "The same as --log-format json.", special=True)
    tokenizer_config_path: Path | None = _flag(
        None, "A tokenizer_config.json with a chat template that replaces the model's.", special=True
    )
    validation_workers: int | None = _inert("HTTP workers tokenise; their number is --http-workers")
    trust_remote_code: bool = _inert("no code out of a model's repository is ever run", False)
    cuda_graphs: str | None = _inert("every step runs in a compiled program")
    shard_uds_path: str | None = _inert("one process drives all devices")
    master_addr: str | None = _inert("one process drives all devices")
    master_port: str | None = _inert("one process drives all devices")
    weights_cache_override: str | None = _inert("fetched models are kept in --hub-cache")
    disable_custom_kernels: bool = _inert("the kernels give what plain ones give, and are tested for it", False)
    watermark_gamma: float | None = _inert("requests that ask for a watermark are refused")
    watermark_delta: float | None = _inert("requests that ask for a watermark are refused")
    ngrok_authtoken: str | None = _inert("there are no tunnels")
    ngrok_edge: str | None = _inert("there are no tunnels")
    usage_stats: str | None = _inert("no usage statistics are collected", values=("on", "off", "no-stack"))
    max_image_fetch_size: int | None = _inert("requests with images are refused")
    attention: str | None = _inert("the implementation is chosen by platform", values=ATTENTION)
    prefill_chunking: str | None = _inert("prompts are always cut where a step is full; the tokens are the same")
    tgi_wiggle_room: float | None = _inert("memory is accounted for; see --memory-fraction")
    rope_scaling: str | None = _refused("positions are as the model's config.json has them; change rope_scaling there")
    rope_factor: float | None = _refused("positions are as the model's config.json has them; change rope_scaling there")
    ngrok: bool = _refused("there are no tunnels; put a proxy in front", False)
    env: bool = _refused("see `quire doctor`", False, variable=False)

    def given(self, kind: str) -> dict[str, Any]:
        """The flags of this kind (`means`, `inert`, `refused`) that were given, each with its target or reason."""
        return {
            field.name: field.metadata[kind]
            for field in dataclasses.fields(self)
            if kind in field.metadata and getattr(self, field.name) != field.default
        }

    def warnings(self) -> list[str]:
        """A warning for each given flag that has no effect."""
        return [f"--{name.replace('_', '-')} does nothing: {why}" for name, why in self.given("inert").items()]

    def applied(
        self, config: Config, settings: ServerSettings, precedence: Precedence, environment: Mapping[str, str]
    ) -> tuple[Config, ServerSettings]:
        """The settings with these flags applied. Raises on flags that would change results."""
        for name, why in self.given("refused").items():
            raise InvalidSetting(f"{name} is {getattr(self, name)}: {why}")
        self._check_values()
        self._check_sharded()
        wanted = {other: (name, getattr(self, name)) for name, other in self.given("means").items()}
        if self.use_prefix_caching is not None:
            wanted["prefix_caching"] = ("use_prefix_caching", self.use_prefix_caching)
        if self.json_output:
            wanted["log_format"] = ("json_output", "json")
        if self.tokenizer_config_path is not None:
            wanted["chat_template"] = ("tokenizer_config_path", _template_in(self.tokenizer_config_path))
        address = environment.get("HOSTNAME", "")
        if "host" not in wanted and precedence["host"] is Source.DEFAULT and _is_address(address):
            wanted["host"] = ("HOSTNAME", address)
        return _changed(config, wanted, precedence), _changed(settings, wanted, precedence)

    def _check_values(self) -> None:
        for field in dataclasses.fields(self):
            value, values = getattr(self, field.name), field.metadata.get("values")
            if values and value is not None and value not in values:
                raise InvalidSetting(f"{field.name} is {value!r}; it can be {', '.join(values)}")

    def _check_sharded(self) -> None:
        if self.sharded is None:
            return
        if self.sharded.lower() not in ("true", "false"):
            raise InvalidSetting(f"sharded is {self.sharded!r}; it can be true or false")
        if self.sharded.lower() == "true" and self.num_shard is None:
            raise InvalidSetting("sharded is true; say across how many devices with --num-shard")
        if self.sharded.lower() == "false" and (self.num_shard or 1) > 1:
            raise InvalidSetting(f"sharded is false and num_shard is {self.num_shard}; they contradict each other")


def _changed(settings: Any, wanted: dict[str, tuple[str, Any]], precedence: Precedence) -> Any:
    """`settings`, a dataclass, with those of the wanted values that it has fields for. Where a setting was given under
    its own name too, the one that overrides the other counts; two that override neither must agree."""
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(settings):
        if field.name not in wanted:
            continue
        flag, value = wanted[field.name]
        own = getattr(settings, field.name)
        if own != value and precedence[field.name] > precedence[flag]:
            continue
        if own != value and precedence[field.name] == precedence[flag] != Source.DEFAULT:
            raise InvalidSetting(f"{flag} is {value} and {field.name} is {own}; they mean the same")
        changes[field.name] = value
    return replace(settings, **changes)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _template_in(file: Path) -> str:
    try:
        found = json.loads(read_regular_text(file))
    except (OSError, ValueError) as error:
        raise InvalidSetting(f"tokenizer_config_path is {file}, which cannot be read as JSON: {error}") from error
    template = found.get("chat_template") if isinstance(found, dict) else None
    if isinstance(template, list):  # by name; there the default is used
        named = [one for one in template if isinstance(one, dict) and one.get("name") == "default"]
        template = named[0].get("template") if named else None
    if not isinstance(template, str):
        raise InvalidSetting(f"tokenizer_config_path is {file}, which has no chat_template")
    return template
