"""First tokens of prompts that an earlier engine computed: read from the files of a cache folder, or computed again.

    python bench/cache_folder.py [--model default] [--prompts 6] [--tokens 1000] [--folder DIR]

One engine computes the prompts and ends when their pages are in files. A second one, as after a restart, gets them
again: every other one under another salt, so that it is computed. Both engines are in one process and have the same
programs. Ratios are of medians. The files were just written, so that the system may have them in memory: the figures
are of reading, checking and copying, more than of the disk.
"""

import argparse
import statistics
import tempfile
import threading
import time
from pathlib import Path

from engines import GREEDY, random_prompts

from quire.engine.building.build import Built, build_engine
from quire.engine.building.folder import keep_pages
from quire.engine.building.plan import plan_deployment
from quire.engine.driver import Driver
from quire.ipc.messages import Event, Failed, Progress, Submit
from quire.request import Request
from quire.settings.config import Config
from quire.settings.page_folder import FolderSettings

WAIT_S = 600.0


class Served:
    """An engine on its thread, with a cache folder. One request at a time."""

    def __init__(self, config: Config, folder: FolderSettings) -> None:
        self.built: Built = build_engine(plan_deployment(config))
        for _ in self.built.warm_up():
            pass
        keep_pages(self.built, folder)
        self.driver = Driver(self.built.engine)
        self._first, self._ended = threading.Event(), threading.Event()
        self.driver.start()
        self.built.engine.page_sources.start(self.driver)
        self._port = self.driver.open(self._deliver)
        self._count = 0

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Failed):
                raise SystemExit(event.message)
            if isinstance(event, Progress):
                self._first.set()
                if any(update.finish is not None for update in event.updates):
                    self._ended.set()

    def first_token_s(self, prompt: tuple[int, ...], salt: str = "") -> float:
        self._count += 1
        self._first.clear()
        self._ended.clear()
        begun_s = time.monotonic()
        self._port.send(Submit(Request(self._port.request_id(self._count), prompt, 2, GREEDY, salt=salt)))
        assert self._first.wait(WAIT_S)
        took_s = time.monotonic() - begun_s
        assert self._ended.wait(WAIT_S)
        return took_s

    def count(self, name: str) -> int:
        return self.built.engine.page_sources.counters()[f"folder_{name}"]

    def stop(self) -> None:
        self.driver.stop()
        self.built.executor.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--host-cache-gib", type=float, default=2.0)
    parser.add_argument("--max-batch-prefill-tokens", type=int, help="fewer make fewer programs to compile")
    parser.add_argument("--folder", type=Path, help="on the disk to be measured; a temporary one if not given")
    asked = parser.parse_args()
    config = Config(
        asked.model, host_cache_gib=asked.host_cache_gib, max_total_tokens=asked.tokens + 64, max_batch_size=4,
        max_batch_prefill_tokens=asked.max_batch_prefill_tokens,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        settings = FolderSettings(Path(folder), cache_folder_write_mib_s=1e6)
        first = Served(config, settings)
        size = first.built.deployment.model.vocab_size
        *prompts, another = random_prompts(asked.prompts + 1, asked.tokens, size)
        begun_s = time.monotonic()
        for prompt in prompts:
            first.first_token_s(prompt)
        while first.count("saves_written") < len(prompts):
            assert time.monotonic() - begun_s < WAIT_S, "the pages were not written"
            time.sleep(0.05)
        written = first.count("written_bytes")
        print(f"{len(prompts)} prompts of {asked.tokens} tokens: {written / 2**20:.0f} MiB in files", flush=True)
        first.stop()
        second = Served(config, settings)
        second.first_token_s(another)  # whatever is done for the first time
        read, computed = [], []
        for number, prompt in enumerate(prompts):
            (computed if number % 2 else read).append(second.first_token_s(prompt, "hidden" if number % 2 else ""))
        found = second.count("reads_found")
        ratio = statistics.median(computed) / statistics.median(read)
        print(f"first token after {1000 * statistics.median(read):.0f} ms read ({found} of {len(read)}), "
              f"{1000 * statistics.median(computed):.0f} ms computed ({len(computed)}): {ratio:.1f}x")  # fmt: skip
        second.stop()


if __name__ == "__main__":
    main()
