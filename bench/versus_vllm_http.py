"""Quire's server on this GPU beside what vLLM 0.26's did on one H200: SmolLM2-135M shapes, streamed over HTTP.

    python bench/versus_vllm_http.py [--streams 1,64,256] [--http-workers 6] [--output-tokens 128]

The server runs random weights of these shapes with the default model's tokenizer. Prompts of 128 tokens, answers of
128, temperature 1.0, `quire bench serving` in one process for few streams and in four for more: clients must keep up.
"""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from servers import QUIRE, ServerProcess

from quire.files.model_files import locate
from quire.files.shapes import SHAPES
from quire.text.tokenizer import load_tokenizer

FEW_STREAMS, CLIENTS, ANSWERS = 4, 4, 4  # answers of each stream
VLLM = {1: (493, 15.9), 64: (13_156, 154.0), 256: (13_489, 420.0)}  # tokens/s, median ms to the first token


class Load(NamedTuple):
    tokens_per_s: float
    first_token_ms: float  # median of one client
    errors: int


def write_model(folder: Path) -> None:
    tokenizer = locate("default").tokenizer
    assert tokenizer is not None
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPES["smollm2-135m"]))
    (folder / "tokenizer.json").write_text(load_tokenizer(tokenizer).to_json())


def run(url: str, streams: int, output_tokens: int, folder: Path) -> Load:
    clients = 1 if streams <= FEW_STREAMS else CLIENTS
    paths = [folder / f"{streams}-{number}.json" for number in range(clients)]
    each = str(streams // clients)
    running = []
    for number, path in enumerate(paths):
        command = ["bench", "serving", url, "--prompt-tokens", "128", "--output-tokens", str(output_tokens)]
        command += ["--temperature", "1", "--concurrency", each, "--requests", str(ANSWERS * streams // clients)]
        command += ["--seed", str(number), "--json", str(path)]
        running.append(subprocess.Popen([*QUIRE, *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
    if any(client.wait() for client in running):
        raise SystemExit(f"`quire bench serving` fails at {streams} streams")
    (first, *_) = found = [next(iter(json.loads(path.read_text())["results"].values())) for path in paths]
    tokens_per_s = sum(one["output_tokens_per_s"] for one in found)
    return Load(tokens_per_s, first["first_token_ms_p50"], int(sum(one["errors"] for one in found)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default=",".join(map(str, VLLM)))
    parser.add_argument("--http-workers", default="6")
    parser.add_argument("--output-tokens", type=int, default=128)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_model(folder / "model")
        command = [*QUIRE, "serve", "--model", f"random:{folder / 'model'}", "--http-workers", given.http_workers]
        with ServerProcess(command) as server:
            print(f"ready after {server.wait_until_ready():.1f} s (vLLM: 112.9)", flush=True)
            print("| streams | Quire, tokens/s | vLLM | first token, ms | vLLM | errors |", "|---:" * 6 + "|", sep="\n")
            for streams in map(int, given.streams.split(",")):
                load = run(server.url, streams, given.output_tokens, folder)
                tokens, first = VLLM.get(streams, ("", ""))
                shown = f"{load.tokens_per_s:,.0f} | {tokens} | {load.first_token_ms:.1f} | {first} | {load.errors}"
                print(f"| {streams} | {shown} |", flush=True)


if __name__ == "__main__":
    main()
