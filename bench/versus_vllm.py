"""Quire on this GPU beside what vLLM 0.26 took on one H200, case by case.

    python bench/versus_vllm.py [--models llama-3.1-8b,qwen3-0.6b] [--cases start,decode_b8,nano256] [--json DIR]
    python bench/versus_vllm.py --models llama-3.1-8b --quantize fp8 --kv-cache-dtype fp8_e4m3

Random weights, in bf16 unless --quantize says otherwise, the whole engine, temperature 1.0. vLLM's figures: version
0.26.0 with FlashAttention 3, CUDA graphs and torch.compile, at most 256 sequences, the same shapes and lengths, prompts
of random ids; with --quantize fp8 those of its quantization="fp8" and kv_cache_dtype="fp8". `start` is a start with
what is compiled and one that compiles, if nothing is; vLLM's is one start, imports not counted. The server beside
vLLM's: bench/versus_vllm_http.py.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

DECODES = ("decode_b1", "decode_b8", "decode_b32", "decode_b64", "decode_b128", "decode_b256")
CASES = ("start", *DECODES, "prefill_64x2048", "ttft_8192", "ttft_512", "nano256")
METRICS = {
    "start": ("first_start_s", "second_start_s"),
    "decode": ("step_ms",),
    "prefill": ("prompt_tokens_per_s",),
    "ttft": ("first_token_ms",),
    "nano256": ("output_tokens_per_s",),
}
VLLM = {
    "llama-3.1-8b": (78.0, 5.03, 5.18, 5.63, 6.13, 7.50, 11.38, 42_212, 213, 17.8, 9_646),
    "qwen3-0.6b": (70.5, 1.64, 1.69, 2.09, 2.64, 3.66, 5.57, 355_797, 36.7, 11.2, 22_674),
}
# With fp8 weights and cache. Its start is one, as above.
VLLM_FP8 = {
    "llama-3.1-8b": (145.2, 3.57, 3.66, 4.60, 4.58, 5.94, 9.33, 65_856, 146, 15.1, 12_367),
}


def measured(model: str, cases: list[str], folder: Path, settings: list[str]) -> dict[str, dict[str, float]]:
    path = folder / f"{model}.json"
    command = ["bench", "offline", *cases, "--model", f"random:{model}", "--json", str(path), *settings]
    subprocess.run([sys.executable, "-m", "quire", *command], check=True)
    results: dict[str, dict[str, float]] = json.loads(path.read_text())["results"]
    return results


def rows(model: str, results: dict[str, dict[str, float]], peer: dict[str, tuple[float, ...]]) -> Iterator[str]:
    vllm = dict(zip(CASES, peer.get(model, ()), strict=False))
    for case, values in results.items():
        for metric in METRICS[case.split("_", maxsplit=1)[0]]:
            ours, theirs = values[metric], vllm.get(case)
            is_time = not metric.endswith("_per_s")
            ratio = None if theirs is None else theirs / ours if is_time else ours / theirs
            unit = "tokens/s" if not is_time else metric.rsplit("_", maxsplit=1)[1]
            shown = ["" if value is None else f"{value:,.{2 * is_time}f}" for value in (ours, theirs)]
            name = metric.removesuffix("_s") if case == "start" else case
            yield f"| {model} {name} | {shown[0]} {unit} | {shown[1]} | {'' if ratio is None else f'{ratio:.2f}'} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(VLLM))
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--json", type=Path, help="keep the results of each model in this folder")
    parser.add_argument("--quantize", help="as for quire serve")
    parser.add_argument("--kv-cache-dtype", help="as for quire serve")
    given = parser.parse_args()
    asked = {"--quantize": given.quantize, "--kv-cache-dtype": given.kv_cache_dtype}
    settings = [part for name, value in asked.items() if value for part in (name, value)]
    lines = ["| case | Quire | vLLM | times as fast |", "|---|---:|---:|---:|"]
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.json or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for model in given.models.split(","):
            results = measured(model, given.cases.split(","), folder, settings)
            lines += rows(model, results, VLLM_FP8 if given.quantize == "fp8" else VLLM)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
