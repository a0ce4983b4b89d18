"""Sampling options of a command."""

from dataclasses import dataclass, replace

from quire.request import SamplingParams
from quire.settings.config import setting

GROUP = "Sampling"


@dataclass(frozen=True)
class SamplingOptions:
    """Missing options come from the model's files; greedy where those have none."""

    temperature: float | None = setting(None, GROUP, "0 takes the most likely token; higher values are more random.")
    top_k: int | None = setting(None, GROUP, "Sample from this many of the most likely tokens.")
    top_p: float | None = setting(None, GROUP, "Sample from the most likely tokens that make up this probability.")
    min_p: float | None = setting(None, GROUP, "Drop tokens with less than this share of the highest probability.")
    repetition_penalty: float | None = setting(None, GROUP, "Above 1: tokens that occurred become less likely.")
    seed: int | None = setting(
        None,
        GROUP,
        "The same seed gives the same answer; on a GPU, or a CPU without the native library, only at the same load.",
    )

    def over(self, defaults: SamplingParams) -> SamplingParams:
        """`defaults` with these options. A filter implies sampling, even where the default is greedy."""
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        if given.keys() & {"top_k", "top_p", "min_p"} and defaults.temperature == 0:
            given.setdefault("temperature", 1.0)
        return replace(defaults, **given)
