"""Kinds of layers: flags of what their state can, by which settings are accepted or refused."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerKind:
    """A kind of layer, with what the state of its layers allows. No other code asks which kind a layer is of.

    A kind that lacks something is refused with the settings that need it.
    """

    name: str
    in_pages: bool = True  # it keeps something of each position, in pages; else a state of one size in the slot
    rolls_back: bool = True  # a sequence can go back some tokens, as it does where a guess was wrong
    continues_from_pages: bool = True  # from pages alone: those of host memory, of a folder, of another engine
    has_coded_pages: bool = True  # pages of eight bits
    has_fixed_order: bool = True  # its kernels for GPUs can add the numbers of a row in one order

    @property
    def layers(self) -> str:
        return f"{self.name} layers"


ATTENTION = LayerKind("attention")
LATENT_ATTENTION = LayerKind("latent attention", has_coded_pages=False, has_fixed_order=False)
RECURRENT = LayerKind(
    "recurrent", in_pages=False, rolls_back=False, continues_from_pages=False, has_fixed_order=False
)  # fmt: skip
EXPERTS = LayerKind("expert", has_fixed_order=False)  # in place of a feed-forward block; they keep nothing
