"""How answers are drawn, as options of a command."""

from dataclasses import dataclass, replace

from quire.config import setting
from quire.request import SamplingParams

GROUP = "Sampling"


@dataclass(frozen=True)
class SamplingOptions:
    """What is not given is as the model's files say, or greedy where they say nothing."""

    temperature: float | None = setting(None, GROUP, "0 takes the most likely token; higher draws more freely.")
    top_k: int | None = setting(None, GROUP, "Draw from so many of the most likely tokens.")
    top_p: float | None = setting(None, GROUP, "Draw from the most likely tokens that make up this share.")
    min_p: float | None = setting(None, GROUP, "Drop tokens less likely than this share of the most likely one.")
    repetition_penalty: float | None = setting(
        None, GROUP, "Above 1: tokens that are there already become less likely."
    )
    seed: int | None = setting(None, GROUP, "The same seed gives the same answer; on a GPU only at the same load.")

    def over(self, defaults: SamplingParams) -> SamplingParams:
        """`defaults` with what was given. A filter means that tokens are drawn, even where the default is greedy."""
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        if given.keys() & {"top_k", "top_p", "min_p"} and defaults.temperature == 0:
            given.setdefault("temperature", 1.0)
        return replace(defaults, **given)
