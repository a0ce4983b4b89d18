"""Cost of adapters: tokens/s of 32 sequences over 8 adapters of rank 16, beside the same sequences without any.

    python bench/adapters.py                            # the default model in int8, as a CPU serves it
    python bench/adapters.py --quantize none            # in float32
    python bench/adapters.py --model random:llama-3.1-8b --num-pages 2048   # on a GPU

Three ways in turn, round by round, in one process: an engine without room for adapters, one with room whose requests
name none, and the same with an adapter for each request. The adapters are random, of every matrix in every layer.
"""

import argparse
import json
import math
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from quire import LLM, SamplingParams
from quire.files.model_files import locate
from quire.models.adapters import adapted_layers
from quire.models.checkpoint import leaves
from quire.models.parts.decoder import Decoder
from quire.models.registry import build_model


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="default")
    parser.add_argument("--quantize", default=None)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=12, help="of each answer")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--num-pages", type=int, default=None, help="of each engine, where they share a device")
    options = parser.parse_args()

    model = build_model(locate(options.model).config)
    settings = {"quantize": options.quantize, "max_batch_size": options.rows, "max_total_tokens": 256}
    settings |= {"compile_ahead": False, "max_batch_prefill_tokens": 128, "num_pages": options.num_pages}
    with tempfile.TemporaryDirectory() as folder:
        adapters = {
            f"adapter-{seed}": write_adapter(Path(folder, str(seed)), model, options.rank, seed)
            for seed in range(options.adapters)
        }
        plain = LLM(options.model, progress=False, **settings)
        adapted = LLM(options.model, progress=False, adapters=adapters, **settings)
        names = [f"adapter-{row % options.adapters}" for row in range(options.rows)]
        ways = {
            "without room for adapters": (plain, [None] * options.rows),
            "with room, none asked for": (adapted, [None] * options.rows),
            f"over {options.adapters} adapters": (adapted, names),
        }
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(options.rounds + 1):
            for name, (llm, asked) in ways.items():
                rate = tokens_per_s(llm, asked, options.tokens, turn)
                if turn:  # the first round warms up
                    rates[name].append(rate)
    base = rates["without room for adapters"]
    for name, measured in rates.items():
        share = statistics.median(one / other for one, other in zip(measured, base, strict=True))
        median = statistics.median(measured)
        print(f"{name:<28} {median:8.1f} tokens/s {share:6.3f} of it in the median round {[*map(round, measured)]}")


def tokens_per_s(llm: LLM, adapters: list[str | None], tokens: int, turn: int) -> float:
    prompts = [[100 + turn, 200 + row, 300, 400] for row in range(len(adapters))]
    begun_s = time.monotonic()
    greedy = SamplingParams(temperature=0.0)
    done = llm.generate(prompts, greedy, max_tokens=tokens, ignore_end=True, adapter=adapters, progress=False)
    taken_s = time.monotonic() - begun_s
    assert all(one.error is None for one in done), done[0].error
    return len(adapters) * tokens / taken_s


def write_adapter(folder: Path, model: Decoder, rank: int, seed: int) -> Path:
    """An adapter of every matrix in the layers, as PEFT writes it."""
    rng = np.random.default_rng(seed)
    tensors, names = {}, set()
    for param in (param for layer in adapted_layers(model) for param in leaves(layer)):
        for tensor in param.sources:
            outputs, inputs = reversed(tensor.shape) if param.transposes else tensor.shape
            module = tensor.name.removesuffix(".weight")
            names.add(module.rpartition(".")[2])
            a = rng.standard_normal((rank, inputs), np.float32) / np.float32(math.sqrt(inputs))
            b = rng.standard_normal((outputs, rank), np.float32) * np.float32(0.05 / math.sqrt(rank))
            tensors |= {f"base_model.model.{module}.lora_A.weight": a, f"base_model.model.{module}.lora_B.weight": b}
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": sorted(names), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


if __name__ == "__main__":
    main()
