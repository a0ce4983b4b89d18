"""Options of `quire bench serving`."""

import dataclasses
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any


def _option(group: str, default: Any, help: str, min: float | None = None, variable: str | None = None) -> Any:
    return dataclasses.field(default=default, metadata={"group": group, "help": help, "min": min, "variable": variable})


_load, _request, _out = (partial(_option, group) for group in ("Load", "Requests", "Output"))


@dataclass(frozen=True)
class LoadOptions:
    concurrency: str | None = _load(
        None, "Requests at once, each stream sending one after the other; by default 1,8,32."
    )
    request_rate: str | None = _load(None, "Requests per second, at random times (Poisson), as in 2,4.")
    requests: int | None = _load(
        None, "Requests in each run; by default 3 for each stream, at least 8, and 64 with --request-rate.", 1
    )
    max_seconds: float = _load(300.0, "Cut a run off after this time.", 0.1)
    warm_up: int = _load(2, "Requests before the runs, which are not measured.", 0)
    prompt_tokens: int = _request(128, "Length of prompts.", 1)
    output_tokens: int = _request(64, "Length of answers.", 1)
    shared_prefix: int = _request(0, "Words that all prompts begin with.", 0)
    temperature: float = _request(0.0, "0 takes the most likely token.", 0)
    chat: bool = _request(False, "Send to /v1/chat/completions instead of /v1/completions.")
    ignore_eos: bool = _request(True, "Send ignore_eos, for answers of full length; some servers refuse it.")
    extra: str = _request("{}", "Fields added to every body, as a JSON object.")
    model: str = _request("", "Name of the model; by default the first of /v1/models.")
    api_key: str = _request("", "API key of the server, also in OPENAI_API_KEY.", variable="OPENAI_API_KEY")
    timeout: float = _request(120.0, "Seconds without a byte after which a request fails.", 0.1)
    seed: int = _request(0, "Seed of arrivals, and of prompts with --reuse-prompts.")
    reuse_prompts: bool = _request(
        False, "Send the same prompts in every run of a seed, which the server may have cached. New ones by default."
    )
    good_first_token_ms: float = _out(500.0, "A good answer's first token comes sooner.", 0)
    good_per_token_ms: float = _out(25.0, "A good answer takes less for each further token.", 0)
    json: Path | None = _out(None, "Write the results to this file too.")
    plot: Path | None = _out(None, "Draw them into this SVG file.")
