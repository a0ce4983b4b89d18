"""The engine's gauges under vLLM's names, which endpoint pickers read: that of Kubernetes' Gateway API, and llm-d's."""

import time

from quire.ipc.messages import Stats
from quire.server.observe.exposition import Exposition


def write_endpoint(out: Exposition, stats: Stats, model: str) -> None:
    """Gauges with the name of the served model as a label."""
    labels = {"model_name": model}
    usage = stats.active_pages / stats.num_pages
    for name, help, value in (
        ("vllm:num_requests_running", "Sequences that run.", stats.num_running),
        ("vllm:num_requests_waiting", "Sequences that wait.", stats.num_waiting),
        ("vllm:kv_cache_usage_perc", "Share of the pages that sequences use, 0 to 1.", usage),
        ("vllm:gpu_cache_usage_perc", "The same, under its older name.", usage),
    ):
        out.gauge(name, help, value, labels)
    layout = {"block_size": str(stats.page_size), "num_gpu_blocks": str(stats.num_pages)}
    out.gauge("vllm:cache_config_info", "Size of a page in tokens, and number of pages.", 1, labels | layout)
    if stats.max_adapters:
        adapters = {
            "max_lora": str(stats.max_adapters),
            "running_lora_adapters": ",".join(stats.running_adapters),
            "waiting_lora_adapters": ",".join(stats.waiting_adapters),
        }
        help = "Adapters that can run together, and names of those that sequences run and wait with; the value is now."
        out.gauge("vllm:lora_requests_info", help, time.time(), adapters)  # a picker takes the labels of the last
