"""The numbers of one attention layer."""

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionSpec:
    """The constants of an attention layer.

    Its state is `kv_heads` keys and as many values of size `head_dim` for each position; each key serves `group` query
    heads. A token sees itself and what came before it; in a layer with a `window`, only the last `window` positions,
    itself among them. A score is `scale * q.k`, and with a `softcap` c it becomes `c * tanh(score / c)`.

    Where it `has_sinks`, each query head has one more score, the same at every position, that takes its part of the
    softmax and has no value.

    With a `value_dim`, values are the first so many features of keys, and the state has keys alone: latent attention.
    """

    kv_heads: int
    group: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    value_dim: int | None = None
