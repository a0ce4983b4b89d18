"""Tokens per second of streams through Ray's proxy, and of the same server without Ray: python bench/ray_proxy.py

The model is tiny, so that what is measured is the way of the tokens. Needs the extra `ray` and the tests' folder.
"""

import argparse
import asyncio
import os
import tempfile
import time
from pathlib import Path

import aiohttp
import ray
from ray import serve
from servers import free_port

from quire.ray import build_app
from tests.tiny_chat_model import write_tiny_chat_model


async def measure(url: str, streams: int, tokens: int) -> float:
    """Tokens per second of so many streams at once."""
    body = {"prompt": "abc", "max_tokens": tokens, "ignore_eos": True, "stream": True}

    async def one(session: aiohttp.ClientSession) -> int:
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            answer.raise_for_status()
            async for _ in answer.content:
                pass
        return tokens

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(300)) as session:
        await asyncio.gather(*(one(session) for _ in range(streams)))
        begun_s = time.monotonic()
        total = sum(await asyncio.gather(*(one(session) for _ in range(streams))))
        return total / (time.monotonic() - begun_s)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--url", help="a server to measure in place of Ray's")
    given = parser.parse_args()
    if given.url is not None:
        print(f"{asyncio.run(measure(given.url, given.streams, given.tokens)):,.0f} tokens/s")
        return
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray gives its processes 15
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False)
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_chat_model(Path(folder) / "model")
        settings = {"model": model, "max_batch_size": given.streams}
        serve.run(build_app(settings), route_prefix="/")
        mode = "HAProxy" if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1" else "Ray's proxy"
        rate = asyncio.run(measure(f"http://127.0.0.1:{port}", given.streams, given.tokens))
        print(f"{mode}: {rate:,.0f} tokens/s")
        serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
