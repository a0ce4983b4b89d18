"""Which calls of the host wait while blocks of pages are copied between a GPU and pinned memory.

    python bench/calls_beside_copies.py          # on a GPU, 20 s
    python bench/calls_beside_copies.py --tiny   # on a CPU, to see that it runs

Blocks of 64 MiB begin to be copied, none or some, to the host or from it. Then the host makes calls one after the
other, as a step does: programs with arguments of the device alone, with numbers of the host, with as many page arrays
as a model of 8B has, with many kernels; and a copy of a few tokens to the host. For each, the milliseconds that it took
in the median; then those after which the copies were there. Environment variables of CUDA and XLA can make a
difference.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "16")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

WAYS = (  # blocks from the host, and to it
    ("no copies", 0, 0),
    ("8 from the host", 8, 0),
    ("2 to the host", 0, 2),
    ("8 to the host", 0, 8),
    ("8 both ways", 8, 8),
)
ROUNDS = 7


class Calls:
    """Programs and arrays, and the calls that are timed."""

    def __init__(self, tiny: bool) -> None:
        device = jax.local_devices()[0]
        self.pinned = SingleDeviceSharding(device, memory_kind="pinned_host")
        self.on_device = SingleDeviceSharding(device, memory_kind="device")
        self.block = (16, 64, 64) if tiny else (16, 64, 32 * 8 * 128)  # 64 MiB
        wide, deep = (64, 4) if tiny else (4096, 100)  # 3.4 GB are read
        self.weights = jax.jit(lambda: [jnp.full((wide, wide), 0.01, jnp.bfloat16) for _ in range(deep)])()
        self.vector = jnp.ones((8, wide), jnp.bfloat16)
        self.pages = jax.jit(lambda: [jnp.zeros((64, 1024), jnp.bfloat16) for _ in range(64)])()
        self.number = jnp.int32(1)
        self.make_blocks = jax.jit(lambda: [jnp.ones(self.block, jnp.bfloat16) for _ in range(8)])
        self.add = jax.jit(lambda x: x + 1)
        self.place = jax.jit(lambda pages, where: [one.at[where].add(1) for one in pages], donate_argnums=0)
        self.step = jax.jit(self._step)
        self.on_host = jax.block_until_ready(jax.device_put(self.make_blocks(), self.pinned))

    @staticmethod
    def _step(weights: list[Any], x: Any, number: Any) -> tuple[Any, Any]:
        for one in weights:
            x = jnp.tanh(x @ one) + number.astype(x.dtype)
        return x, jnp.argmax(x, axis=1)

    def round(self, num_from: int, num_to: int) -> dict[str, float]:
        blocks = jax.block_until_ready(self.make_blocks())
        jax.block_until_ready((self.pages, self.number))
        begun_s, took_s = time.perf_counter(), {}

        def timed(name: str, call: Callable[[], Any]) -> Any:
            call_s = time.perf_counter()
            result = call()
            took_s[name] = time.perf_counter() - call_s
            return result

        coming = timed("begin from", lambda: jax.device_put(self.on_host[:num_from], self.on_device))
        going = timed("begin to", lambda: jax.device_put(blocks[:num_to], self.pinned))
        blocks.clear()  # as those that are saved
        self.number = timed("number of the device", lambda: self.add(self.number))
        timed("number of the host", lambda: self.add(np.int32(3)))
        self.pages = timed("pages", lambda: self.place(self.pages, np.arange(4, dtype=np.int32)))
        self.pages = timed("pages again", lambda: self.place(self.pages, np.arange(4, dtype=np.int32)))
        _, tokens = timed("step", lambda: self.step(self.weights, self.vector, np.int32(0)))
        timed("begin tokens", tokens.copy_to_host_async)
        _, later = timed("next step", lambda: self.step(self.weights, self.vector, np.int32(0)))
        timed("wait for tokens", lambda: np.asarray(tokens))
        took_s["tokens there"] = time.perf_counter() - begun_s
        timed("wait for next tokens", lambda: np.asarray(later))
        took_s["next there"] = time.perf_counter() - begun_s
        jax.block_until_ready((coming, going))
        took_s["all there"] = time.perf_counter() - begun_s
        return took_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    calls = Calls(asked.tiny)
    for _, num_from, num_to in WAYS:
        calls.round(num_from, num_to)  # compiles, and pins memory
    for name, num_from, num_to in WAYS:
        rounds = [calls.round(num_from, num_to) for _ in range(ROUNDS)]
        medians = {what: 1000 * statistics.median(one[what] for one in rounds) for what in rounds[0]}
        print(f"{name}: " + ", ".join(f"{what} {ms:.2f}" for what, ms in medians.items()), flush=True)


if __name__ == "__main__":
    main()
