"""Weights that are joined from several checkpoint tensors.

A fused weight keeps one axis per idea: kv head, query of the group, feature. Tensor parallelism is then a cut along the
`kv_heads` or the `mlp` axis, and one matmul gives every projection of the same input.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from quire.models.params import Array, Param, Tensor
from quire.ops.attention.spec import AttentionSpec


def separate_qkv(name: str, spec: AttentionSpec, embed: int, num_paired: int = 0) -> Param:
    """[k, g + 2, h, d] from the weights of `q_proj`, `k_proj` and `v_proj`.

    `num_paired`: the features of a head that the checkpoint rotates in pairs of neighbours; see `in_halves`.
    """
    rows = _qkv_rows(spec)
    return Param(
        (spec.kv_heads, spec.group + 2, spec.head_dim, embed),
        ("kv_heads", None, None, "embed"),
        tuple(Tensor(f"{name}.{part}_proj.weight", (rows[part], embed)) for part in "qkv"),
        lambda tensors: join_qkv(spec, in_halves(spec, tensors, num_paired)),
        num_contracted=1,
    )


def separate_qkv_bias(name: str, spec: AttentionSpec, num_paired: int = 0) -> Param:
    """[k, g + 2, h] from the biases of `q_proj`, `k_proj` and `v_proj`."""
    rows = _qkv_rows(spec)
    return Param(
        (spec.kv_heads, spec.group + 2, spec.head_dim),
        ("kv_heads", None, None),
        tuple(Tensor(f"{name}.{part}_proj.bias", (rows[part],)) for part in "qkv"),
        lambda tensors: join_qkv(spec, in_halves(spec, tensors, num_paired)),
    )


def join_qkv(spec: AttentionSpec, tensors: Sequence[Array]) -> Array:
    """The rows of q, k and v, ordered by kv head."""
    q, k, v = tensors
    rest = q.shape[1:]
    return np.concatenate(
        (
            q.reshape(spec.kv_heads, spec.group, spec.head_dim, *rest),
            k.reshape(spec.kv_heads, 1, spec.head_dim, *rest),
            v.reshape(spec.kv_heads, 1, spec.head_dim, *rest),
        ),
        axis=1,
    )


def in_halves(spec: AttentionSpec, tensors: Sequence[Array], num_paired: int) -> Sequence[Array]:
    """q, k and v with the first `num_paired` features of a head of q and k reordered: the first of each pair, then the
    second. Rope turns feature i with i + num_paired / 2 then, as everywhere, and scores stay what they are."""
    if not num_paired:
        return tensors
    order = np.r_[0:num_paired:2, 1:num_paired:2, num_paired : spec.head_dim]
    q, k, v = tensors
    return *(rows.reshape(-1, spec.head_dim, *rows.shape[1:])[:, order].reshape(rows.shape) for rows in (q, k)), v


def split_qkv(spec: AttentionSpec, fused: Array) -> Sequence[Array]:
    """The q, k and v that a checkpoint stores one after the other in a single tensor."""
    rows = _qkv_rows(spec)
    return np.split(fused, (rows["q"], rows["q"] + rows["k"]))


def _qkv_rows(spec: AttentionSpec) -> dict[str, int]:
    keys = spec.kv_heads * spec.head_dim
    return {"q": spec.group * keys, "k": keys, "v": keys}


def attention_out(name: str, spec: AttentionSpec, embed: int) -> Param:
    """[d, k, g, h] from the weight of `o_proj`."""
    width = spec.kv_heads * spec.group * spec.head_dim
    return Param(
        (embed, spec.kv_heads, spec.group, spec.head_dim),
        ("embed", "kv_heads", None, None),
        (Tensor(f"{name}.o_proj.weight", (embed, width)),),
        num_contracted=3,
    )


def gate_up(gate: str, up: str, shape: tuple[int, int]) -> Param:
    """[1, 2, m, d] from a gate and an up projection of the same shape [m, d]; the first axis is that of `split_mlp`."""
    axes = ("mlp", None, None, "embed")
    return Param((1, 2, *shape), axes, (Tensor(gate, shape), Tensor(up, shape)), np.stack, num_contracted=1)


def bias(name: str, size: int, axis: str) -> Param:
    return Param((size,), (axis,), (Tensor(name, (size,)),))


def router(name: str, num_experts: int, embed: int) -> Param:
    shape = (num_experts, embed)
    return Param(shape, ("experts", "embed"), (Tensor(name, shape),))


def experts_gate_up(names: Sequence[tuple[str, str]], shape: tuple[int, int]) -> Param:
    """[e, 1, 2, m, d] from the gate and up projections [m, d] of each expert."""
    return Param(
        (len(names), 1, 2, *shape),
        ("experts", "mlp", None, None, "embed"),
        tuple(Tensor(name, shape) for pair in names for name in pair),
        np.stack,
        of_expert=lambda index: experts_gate_up(names[index : index + 1], shape),
    )


def experts_down(names: Sequence[str], shape: tuple[int, int]) -> Param:
    """[e, d, m] from the down projections [d, m] of each expert."""
    return Param(
        (len(names), *shape),
        ("experts", "embed", "mlp"),
        tuple(Tensor(name, shape) for name in names),
        np.stack,
        of_expert=lambda index: experts_down(names[index : index + 1], shape),
    )


def split_mlp(param: Param, parts: int, axis: int = 0) -> Param:
    """A fused gate and up whose axes from `axis` on are [1, 2, m] as [parts, 2, m / parts], if that divides m.

    Sharded along `parts`, the gates and ups of a device are one run of rows. A cut along m itself would not survive the
    product's reshape to a matrix, and every step would gather the weight.
    """
    before, (_, _, mlp), after = param.shape[:axis], param.shape[axis : axis + 3], param.shape[axis + 3 :]
    if mlp % parts:
        return param

    def join(tensors: Sequence[Array]) -> Array:
        fused = param.assemble(tensors)
        split = fused.reshape(*before, 2, parts, mlp // parts, *fused.shape[axis + 3 :])
        return np.swapaxes(split, axis, axis + 1)

    one = param.of_expert
    return replace(
        param,
        shape=(*before, parts, 2, mlp // parts, *after),
        join=join,
        apart=None if param.apart is None else split_mlp(param.apart, parts, axis),
        of_expert=None if one is None else lambda index: split_mlp(one(index), parts, axis),
    )


def copy_keys(param: Param, copies: int) -> Param:
    """A fused qkv [k, g + 2, ...] with each key and value `copies` times, every copy for a part of the group."""
    kv_heads, parts = param.shape[:2]
    group = (parts - 2) // copies

    def join(tensors: Sequence[Array]) -> Array:
        fused = param.assemble(tensors)
        queries = fused[:, :-2].reshape(kv_heads * copies, group, *fused.shape[2:])
        return np.concatenate((queries, np.repeat(fused[:, -2:], copies, axis=0)), axis=1)

    return replace(param, shape=(kv_heads * copies, group + 2, *param.shape[2:]), join=join)
