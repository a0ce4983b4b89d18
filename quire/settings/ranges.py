"""The ranges of settings, of which none depends on the machine or the model."""

from quire.errors import InvalidSetting
from quire.settings.config import Config

LOWEST = {
    "page_size": 1,
    "num_pages": 2,  # page 0 is not handed out
    "max_batch_size": 1,
    "max_batch_prefill_tokens": 1,
    "max_batch_total_tokens": 2,  # a prompt and an answer
    "max_total_tokens": 2,
    "max_waiting_tokens": 0,
    "waiting_served_ratio": 0,
    "max_queued": 1,
    "lookahead": 0,
    "max_burst": 1,
    "speculate": 0,
    "max_burst_ms": 0,
    "max_step_ms": 0,
    "tensor_parallel": 1,
    "compile_threads": 1,
    "compile_processes": 0,
    "random_seed": -(2**63),
}
HIGHEST = {
    # A slot takes memory whether it is used or not: 12 KiB, and 4 bytes for each token of max_total_tokens. Programs
    # for so many rows take as long to compile as those for a quarter of them; those for a million take many minutes.
    "max_batch_size": 16_384,
    "random_seed": 2**63 - 1,
}


def refuse_out_of_range(config: Config) -> None:
    for name, lowest in LOWEST.items():
        value = getattr(config, name)
        if value is not None and not value >= lowest:  # NaN is neither above nor below
            raise InvalidSetting(f"{name} is {value}; it must be at least {lowest}")
        if value is not None and value > HIGHEST.get(name, value):
            raise InvalidSetting(f"{name} is {value}; it must be at most {HIGHEST[name]}")
