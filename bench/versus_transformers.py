"""Quire and transformers on the default model, in one run: float32, greedy, the same prompts and lengths.

`python bench/versus_transformers.py` (after `make test-parity` has installed torch and transformers). Both are measured
with the prompts included, each size once to warm up and then in turns, so that what else the machine does meets both.
"""

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from quire import LLM, SamplingParams

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], list[list[int]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 8, 32], help="prompts at once")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3, help="of which the median counts")
    options = parser.parse_args()

    llm = LLM("default", dtype="float32", max_batch_size=max(options.sizes), prefix_caching=False)
    ours = quire_generate(llm)
    assert llm.deployment.files.path is not None
    theirs = transformers_generate(llm.deployment.files.path)
    print(f"{'prompts':>8} {'Quire tok/s':>12} {'transformers':>13} {'ratio':>7}   same tokens")
    for size in options.sizes:
        prompts = random_prompts(size, options.prompt_tokens, llm.deployment.model.vocab_size)
        same = compare(ours(prompts, options.new_tokens), theirs(prompts, options.new_tokens))
        seconds: list[list[float]] = [[], []]
        for _ in range(options.runs):
            for times, generate in zip(seconds, (ours, theirs), strict=True):
                begun = time.perf_counter()
                generate(prompts, options.new_tokens)
                times.append(time.perf_counter() - begun)
        quire, transformers = (size * options.new_tokens / median(times) for times in seconds)
        print(f"{size:>8} {quire:>12.1f} {transformers:>13.1f} {quire / transformers:>6.2f}x   {same:.0%}", flush=True)
    llm.close()


def random_prompts(size: int, length: int, vocab_size: int) -> Prompts:
    random = Random(0)
    return [[random.randrange(10, vocab_size) for _ in range(length)] for _ in range(size)]


def quire_generate(llm: LLM) -> Generate:
    def generate(prompts: Prompts, new_tokens: int) -> list[list[int]]:
        greedy = SamplingParams(temperature=0.0)
        done = llm.generate(prompts, greedy, max_tokens=new_tokens, ignore_end=True, progress=False)
        return [completion.token_ids for completion in done]

    return generate


def transformers_generate(file: Path) -> Generate:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    torch.set_num_threads(os.cpu_count() or 1)
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(load_gguf_checkpoint(file, return_tensors=True, model_to_load=model)["tensors"], strict=False)
    model.tie_weights()
    model.eval()

    def generate(prompts: Prompts, new_tokens: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        exactly = {"min_new_tokens": new_tokens, "max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
        with torch.no_grad():
            done = model.generate(ids, attention_mask=torch.ones_like(ids), **exactly)
        return [row[len(prompt) :] for row, prompt in zip(done.tolist(), prompts, strict=True)]

    return generate


def compare(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """The share of tokens that are the same. transformers may not choose an end token, which Quire then may."""
    pairs = [pair for one, other in zip(ours, theirs, strict=True) for pair in zip(one, other, strict=True)]
    return sum(one == other for one, other in pairs) / len(pairs)


if __name__ == "__main__":
    main()
