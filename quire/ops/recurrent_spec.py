"""The numbers of one recurrent layer."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RecurrentSpec:
    """The constants of a layer whose state has one size, however long its sequence is.

    It has `key_heads` keys and queries, each with `group` heads of values. The state of a head is a matrix
    [key_dim, value_dim], in float32. Before that the `channels` of each key head go through a causal convolution over
    the last `taps` tokens, of which the layer keeps the inputs of all but the last. Where it `corrects` itself, what
    the matrix has for a key is taken from a value before it is added (the delta rule).
    """

    key_heads: int
    group: int
    key_dim: int
    value_dim: int
    channels: int
    taps: int
    corrects: bool
