"""Every setting of the engine, as asked for. None leaves the choice to `resolve`."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from quire.errors import InvalidSetting

# A slot takes memory whether it is used or not: 12 KiB, and 4 bytes for each token of max_total_tokens. Programs for so
# many rows take as long to compile as those for a quarter of them; those for a million take many minutes.
MAX_BATCH_SIZE = 16_384
MAX_LORA_RANK = 1024


def setting(
    default: Any,
    group: str,
    help: str,
    *,
    least: float | None = None,
    most: float | None = None,
    of_group: bool = False,
) -> Any:
    """A field that the command line shows, under `group`, with `help`. `least` and `most` are the limits of its value
    on any machine. The leader of a group decides those `of_group`, by which sizes and numbers follow, for all members.
    """
    limits = {"least": least, "most": most, "of_group": of_group}
    return field(default=default, metadata={"group": group, "help": help} | limits)


MODEL, ADAPTERS, MEMORY = "Model", "Adapters", "Memory"
BATCHING, SPECULATION, DEVICES = "Batching", "Speculation", "Devices"


@dataclass(frozen=True)
class Config:
    """Settings as the user gave them. The batching names are those of text-generation-inference."""

    model: str = setting("default", MODEL, "A folder, a .gguf file, org/name on the hub, random:SHAPE, or default.")
    revision: str | None = setting(None, MODEL, "Branch, tag or commit of a hub repository.")
    token: str | None = setting(None, MODEL, "Access token for the hub.")
    offline: bool = setting(False, MODEL, "Fetch nothing; use what is on this machine.")
    cache_dir: Path | None = setting(
        None, MODEL, "Where fetched models and compiled programs are kept (~/.cache/quire)."
    )
    hub_cache: Path | None = setting(
        None,
        MODEL,
        "Where files from the hub are kept, as HF_HUB_CACHE says elsewhere. Default: hub in --cache-dir if that is "
        "given, else what HF_HUB_CACHE or HF_HOME say.",
    )
    tokenizer: str | None = setting(
        None,
        MODEL,
        "Tokenizer and chat template to use instead of the model's: a folder, a tokenizer.json, a .gguf file, or "
        "org/name on the hub. It must not have more tokens than the model.",
    )
    chat_template: str | None = setting(
        None, MODEL, "A chat template to use instead of the model's: a file, or the text itself."
    )
    dtype: str | None = setting(None, MODEL, "float32, bfloat16 or float16. Default: by platform.", of_group=True)
    quantize: str | None = setting(
        None,
        MODEL,
        "none: as the checkpoint is; fp8 or int8: weights and activations of matmuls in 8 bits; auto, as if not "
        "given: none for a quantised checkpoint, else int8 on a CPU; gptq, awq, fp8, mxfp4, compressed-tensors, "
        "modelopt, fbgemm_fp8 or auto-round: none, for a checkpoint that is so.",
        of_group=True,
    )
    random_seed: int = setting(0, MODEL, "Seed of random: weights.", least=-(2**63), most=2**63 - 1, of_group=True)
    lora_adapters: tuple[str, ...] = setting(
        (),
        ADAPTERS,
        "LoRA adapters that requests may name: name=FOLDER, or org/name[@revision] on the hub; "
        "comma-separated, or repeat the option.",
    )
    max_loras: int | None = setting(
        None,
        ADAPTERS,
        "Adapters on the device at a time; others stay in host memory. Default: 8, or as many as there are.",
        least=1,
    )
    max_lora_rank: int | None = setting(
        None,
        ADAPTERS,
        "Highest rank of an adapter. Default: that of the adapters given, and at least 16 with --adapter-folder.",
        least=1,
        most=MAX_LORA_RANK,
    )
    adapter_folder: Path | None = setting(
        None, ADAPTERS, "Let clients load adapters from this folder, and unload any, while serving."
    )
    max_total_tokens: int | None = setting(
        None, MEMORY, "Longest sequence: tokens of prompt and answer together.", least=2, of_group=True
    )
    page_size: int | None = setting(None, MEMORY, "Tokens per page of the cache.", least=1, of_group=True)
    num_pages: int | None = setting(
        None,
        MEMORY,
        "Pages in the cache. Default: as many as fit; quire doctor shows how many sequences that is.",
        least=2,
        of_group=True,
    )
    kv_cache_dtype: str | None = setting(
        None,
        MEMORY,
        "Type of keys and values in the cache: fp8_e4m3 or int8, with a scale for each token and head, for about half "
        "the bytes; that of --dtype by its name; auto, as if not given: that of the checkpoint's kv_cache_scheme, or "
        "of --dtype.",
        of_group=True,
    )
    memory_fraction: float | None = setting(
        None,
        MEMORY,
        "Share of the device's memory that may be used. On a GPU the engine takes it, and at most 0.94; engines "
        "whose shares add up to that fit on one GPU. Default: 0.94 on a GPU, 0.5 on a CPU.",
        of_group=True,
    )
    prefix_caching: bool = setting(
        True, MEMORY, "Reuse the pages of finished requests for prompts with the same beginning.", of_group=True
    )
    snapshots: int | None = setting(
        None,
        MEMORY,
        "Snapshots of the state of recurrent layers, which prompts with the same beginning continue from; 0 computes "
        "every prompt from its first token on. Default: four for each sequence that runs, if they fit.",
        least=0,
        of_group=True,
    )
    host_cache_gib: float = setting(
        0.0,
        MEMORY,
        "Host memory of each engine, in GiB, for pages that the cache has no room for: evicted pages are copied there, "
        "and back when a prompt begins with them. 0: none.",
    )
    max_batch_size: int | None = setting(
        None,
        BATCHING,
        "Sequences that run at the same time; at most 16,384.",
        least=1,
        most=MAX_BATCH_SIZE,
        of_group=True,
    )
    max_batch_prefill_tokens: int | None = setting(None, BATCHING, "Prompt tokens in one step.", least=1, of_group=True)
    max_batch_total_tokens: int | None = setting(
        None, BATCHING, "Tokens of all running sequences at their longest, prompts and answers.", least=2
    )
    waiting_served_ratio: float | None = setting(
        None,
        BATCHING,
        "Admit once this many times as many wait as run; 0 admits at once, as if neither this nor the next is given. "
        "0.3 if only the next is.",
        least=0,
    )
    max_waiting_tokens: int | None = setting(
        None,
        BATCHING,
        "Or once running sequences have got this many tokens each; 0 admits at once. 20 if only the ratio is given.",
        least=0,
    )
    max_queued: int | None = setting(
        None,
        BATCHING,
        "Sequences that may wait; more are refused. Default: chosen for a server, no limit offline.",
        least=1,
    )
    lookahead: int = setting(1, BATCHING, "Steps launched before the last one's tokens are known.", least=0)
    max_burst: int | None = setting(
        None,
        BATCHING,
        "Tokens that each sequence may get in one step while no other could join. Default: by platform and model.",
        least=1,
        of_group=True,
    )
    max_burst_ms: float | None = setting(
        None,
        BATCHING,
        "Longest such step, in milliseconds; where it would take longer, a step gives one token each. Default: 10 for "
        "a server, 50 offline.",
        least=0,
    )
    max_step_ms: float | None = setting(
        None,
        BATCHING,
        "Longest step while sequences decode: prompts are cut so that steps are predicted to take no longer. Less "
        "makes tokens steadier and prompts slower; 0 sets no limit. Default: by platform for a server, "
        "0 offline.",
        least=0,
    )
    speculate: int = setting(
        0,
        SPECULATION,
        "Speculative decoding: the most tokens to guess for a sequence in one step, from its own earlier tokens; "
        "0 guesses none. "
        "Answers come sooner where they repeat their prompt. On a CPU with the native library no token changes; "
        "elsewhere one can where two nearly tie.",
        least=0,
        of_group=True,
    )
    draft_model: str | None = setting(
        None,
        SPECULATION,
        "A smaller model with the same vocabulary that makes the guesses instead, named like --model. It needs "
        "--speculate, and one device.",
    )
    tensor_parallel: int = setting(1, DEVICES, "Devices to split the model across.", least=1, of_group=True)
    reproducible: bool = setting(
        False,
        DEVICES,
        "Compute each answer in the same way whatever else runs, so that its tokens do not depend on it. On a CPU with "
        "the native library they do not in any case; on a GPU it takes other kernels, and some settings and models "
        "are refused.",
    )
    compile_ahead: bool = setting(
        True,
        DEVICES,
        "Compile programs before requests need them. Otherwise a server begins at once, and a request waits for each "
        "program that is used for the first time.",
    )
    compile_threads: int | None = setting(None, DEVICES, "Programs compiled at the same time.", least=1, of_group=True)
    compile_processes: int | None = setting(
        None,
        DEVICES,
        "Processes that compile programs for the engine, so that its steps go on; each takes half a GiB of memory "
        "until all programs are there. 0: threads of the engine do it. By default up to 4 on a GPU, 1 on a CPU.",
        least=0,
    )

    @property
    def hub_access(self) -> dict[str, Any]:
        """The arguments of `locate` that say how files are fetched from the hub, and where they are kept."""
        return {name: getattr(self, name) for name in ("token", "offline", "cache_dir", "hub_cache")}

    @property
    def place_of_model(self) -> dict[str, Any]:
        """The arguments of `quire.files.model_files.locate`."""
        return {"model": self.model, "revision": self.revision, "tokenizer": self.tokenizer, **self.hub_access}


def refuse_out_of_range(settings: Any) -> None:
    """Raise InvalidSetting for the first value of a dataclass of settings that is too small or too large."""
    for each in fields(settings):
        value, least, most = getattr(settings, each.name), each.metadata.get("least"), each.metadata.get("most")
        if value is None:
            continue
        if least is not None and not value >= least:  # NaN is neither above nor below
            raise InvalidSetting(f"{each.name} is {value}; it must be at least {least}")
        if most is not None and value > most:
            raise InvalidSetting(f"{each.name} is {value}; it must be at most {most}")
