"""Options of `quire serve` in place of vLLM's flags, for start scripts that were made for it.

They are refused, since most take other values, and the error names ours. The page docs/start/from-vllm.md has them too,
and a test holds it to this file.
"""

from collections.abc import Sequence

PARSER = "not needed: the format follows from the model's chat template"
COMPILED = "not there: steps are always compiled; --no-compile-ahead compiles when needed"

INSTEAD = {
    "--max-model-len": "--max-total-tokens",
    "--max-num-seqs": "--max-batch-size",
    "--max-num-batched-tokens": "--max-batch-prefill-tokens",
    "--gpu-memory-utilization": "--memory-fraction",
    "--tensor-parallel-size": "--tensor-parallel",
    "-tp": "--tensor-parallel",
    "--data-parallel-size": "--data-parallel",
    "-dp": "--data-parallel",
    "--pipeline-parallel-size": "not there: --tensor-parallel splits a model, also across hosts with --group-size",
    "-pp": "not there: --tensor-parallel splits a model, also across hosts with --group-size",
    "--quantization": "--quantize",
    "-q": "--quantize",
    "--block-size": "--page-size",
    "--enable-prefix-caching": "always on; --no-prefix-caching turns it off",
    "--no-enable-prefix-caching": "--no-prefix-caching",
    "--enable-chunked-prefill": "always on; --max-step-ms bounds steps",
    "--no-enable-chunked-prefill": "always on; --max-step-ms bounds steps",
    "--enable-lora": "not needed: --lora-adapters is enough",
    "--lora-modules": "--lora-adapters",
    "--max-cpu-loras": "not needed: adapters that are not on the device stay in host memory",
    "--speculative-config": "--speculate, and --draft-model",
    "--tool-call-parser": PARSER,
    "--enable-auto-tool-choice": PARSER,
    "--reasoning-parser": PARSER,
    "--enforce-eager": COMPILED,
    "--compilation-config": COMPILED,
    "-O": COMPILED,
    "--load-format": "not needed: the form of the weights is recognised",
    "--download-dir": "--cache-dir",
    "--hf-token": "--token",
    "--generation-config": "not there: the model's generation_config.json holds where a request says nothing",
    "--override-generation-config": "not there: the model's generation_config.json holds where a request says nothing",
    "--swap-space": "--host-cache-gib",
    "--allowed-origins": "--cors-allow-origin",
    "--uvicorn-log-level": "--log-level",
    "--disable-log-requests": "--log-level warning",
    "--enable-log-requests": "not needed: each request has a line in the log, without its text",
    "--limit-mm-per-prompt": "not there: requests with images are refused",
}

# Of engines that pad each prompt to one of these lengths.
OTHERS = {
    "--prefill-lengths": "not there: a step holds parts of several prompts beside decodes, and is padded to sizes that "
    "follow from --max-batch-prefill-tokens and --max-batch-size"
}


def advice(arguments: Sequence[str]) -> str | None:
    """The advice for the first flag of another server; None where there is none of them."""
    for argument in arguments:
        given = argument.partition("=")[0]
        name = given.replace("_", "-") if given.startswith("--") else "-O" if given[:2] == "-O" else given
        if name in OTHERS:
            return f"{given} is {OTHERS[name]}"
        if name in INSTEAD:
            found = INSTEAD[name]
            return f"{given} is vLLM's; here it is {found}" if found.startswith("-") else f"{given} is {found}"
    return None
