"""Matrix multiplications, and weights that are joined from several checkpoint tensors.

A fused weight keeps one axis per idea: kv head, query of the group, feature. Tensor parallelism is then a cut along the
`kv_heads` or the `mlp` axis, and one matmul gives every projection of the same input.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from quire.models.params import Array, Param, Tensor
from quire.ops.attention.spec import AttentionSpec
from quire.ops.weights.adapters import AdaptedWeight, JoinedStack
from quire.ops.weights.coded import Coded, Parts
from quire.ops.weights.few_rows import FewRowsIn, NormalRows, PendingProduct
from quire.ops.weights.native_weight import NativeWeight
from quire.ops.weights.quantized import QuantizedWeight, product, rows_of, shape_of
from quire.ops.weights.rounded_rows import PLAIN as PLAIN_ROUNDING
from quire.ops.weights.rounded_rows import BlockOutput, BlockRows, RoundedRows, RoundingOps, Rows, Sums, values

BaseWeight = jax.Array | NativeWeight | QuantizedWeight | Parts
Weight = BaseWeight | AdaptedWeight


def project(equation: str, x: Rows, weight: Weight, bias: jax.Array | None = None) -> jax.Array:
    """An einsum that accumulates in float32 whatever it is fed, and gives back the type of x.

    The contracted axes come last in both operands.
    """
    num_output_axes = _num_output_axes(equation)
    if bias is None:  # rounded by the product itself; a separate cast is another kernel on a GPU
        return matmul(x, weight, num_output_axes, x.dtype).astype(x.dtype)
    return (matmul(x, weight, num_output_axes) + bias.astype(jnp.float32)).astype(x.dtype)


def project_sums(equation: str, x: Rows, weight: Weight, bias: jax.Array | None, rounding: RoundingOps) -> Sums:
    """Like `project`, for a reader that applies scales itself where there are any. `rounding` makes codes of x."""
    dtype = code_dtype(weight, len(x), rounding)
    if dtype is not None and not (isinstance(x, RoundedRows | BlockRows) and x.codes.dtype == dtype):
        x = rounding.rows(values(x).reshape(len(x), -1), dtype)
    if dtype is None or not isinstance(weight, Coded):
        few = _by_few_rows(equation, x, weight, bias, rounding)
        return project(equation, x, weight, bias) if few is None else few
    of_sums = x.dtype if bias is None else jnp.float32  # a bias is added before they are rounded
    sums = weight.sums(x, of_sums, rounding.product).reshape(*weight.shape[: _num_output_axes(equation)])
    return sums if bias is None else (sums.numbers() + bias.astype(jnp.float32)).astype(x.dtype)


def pending_product(
    equation: str, x: Rows, weight: Weight, bias: jax.Array | None, rounding: RoundingOps
) -> BlockOutput:
    """Like `project_sums` to the width of the model, for a reader that may compute the product itself."""
    few = rounding.few_rows
    if few is None or bias is not None or not few.fits(len(x), x.dtype, weight):
        return project_sums(equation, x, weight, bias, rounding)
    return PendingProduct(_flat(x), weight, few)


def _by_few_rows(
    equation: str, x: Rows, weight: Weight, bias: jax.Array | None, rounding: RoundingOps
) -> jax.Array | None:
    """Like `project`, by the kernel for few rows, where there is one for these."""
    base = weight.weight if isinstance(weight, AdaptedWeight) else weight
    few = rounding.few_rows
    if few is None or not few.fits(len(x), x.dtype, base):
        return None
    is_all = bias is None and base is weight
    rows = _flat(x)
    out = few.sums(rows, base, x.dtype if is_all else jnp.float32)
    if isinstance(weight, AdaptedWeight):
        out = weight.add_to(out, values(rows))
    out = out.reshape(len(x), *shape_of(base)[: _num_output_axes(equation)])
    return (out if bias is None else out + bias.astype(jnp.float32)).astype(x.dtype)


def _flat(x: Rows) -> FewRowsIn:
    return x if isinstance(x, NormalRows) else values(x).reshape(len(x), -1)


def _num_output_axes(equation: str) -> int:
    x_axes, weight_axes, out_axes = equation.replace("->", ",").split(",")
    num_output_axes = sum(axis in out_axes for axis in weight_axes)
    assert x_axes[1:] == weight_axes[num_output_axes:], equation
    assert out_axes == x_axes[0] + weight_axes[:num_output_axes], equation
    return num_output_axes


def code_dtype(weights: Any, num_rows: int, rounding: RoundingOps) -> Any | None:
    """The type of codes in which so many rows meet a weight, or those of a block, which are alike where a checkpoint
    does not leave some as they are; None where they are not rounded."""
    if isinstance(weights, AdaptedWeight):  # multiplied by XLA, as it is
        weights, rounding = (weights.weight, weights.stack), PLAIN_ROUNDING
    found = (_code_dtype(node, num_rows, rounding) for node in jax.tree.leaves(weights, is_leaf=_is_weight))
    return next((dtype for dtype in found if dtype is not None), None)


def _code_dtype(node: object, num_rows: int, rounding: RoundingOps) -> Any | None:
    if isinstance(node, AdaptedWeight):
        return code_dtype(node, num_rows, rounding)
    return node.row_code_dtype(num_rows, rounding.product) if isinstance(node, Coded) else None


def _is_weight(node: object) -> bool:
    return isinstance(node, Coded | AdaptedWeight)


def matmul(x: Rows, weight: Weight, num_output_axes: int, dtype: Any = jnp.float32) -> jax.Array:
    """x [t, *inputs] times a weight [*outputs, *inputs] with `num_output_axes` axes of outputs: [t, *outputs].

    Computed as a product of two matrices: XLA's CPU backend is ten times slower on the same numbers in more dimensions.
    """
    if isinstance(weight, AdaptedWeight) and isinstance(weight.stack, JoinedStack):
        shape, flat = weight.stack.shape, joined_product(x, weight, dtype)
    else:
        base = weight.weight if isinstance(weight, AdaptedWeight) else weight
        shape, flat = shape_of(base), _flat_product(x, base, num_output_axes, dtype)
    if isinstance(weight, AdaptedWeight):
        flat = weight.add_to(flat, values(x))
    return flat.reshape(len(x), *shape[:num_output_axes])


def joined_product(x: Rows, weight: AdaptedWeight, dtype: Any = None) -> jax.Array:
    """x times a weight and the `a` of its adapters, which are joined, in the type of x if no other is given."""
    assert isinstance(weight.stack, JoinedStack)
    return _flat_product(x, weight.stack.both, 1, x.dtype if dtype is None else dtype)


def _flat_product(x: Rows, weight: BaseWeight, num_output_axes: int, dtype: Any) -> jax.Array:
    if isinstance(weight, Parts):
        found = [_flat_product(x, part, 1, jnp.float32) for part in weight.weights]
        return jnp.concatenate(found, axis=1)[:, weight.order]
    shape = shape_of(weight)
    outer, inner = shape[:num_output_axes], prod(shape[num_output_axes:])
    if isinstance(weight, QuantizedWeight):
        return product(x, weight, num_output_axes, dtype)
    rows = values(x).reshape(len(x), inner)
    if isinstance(weight, NativeWeight):
        return weight.product(rows, num_output_axes)
    matrix = weight.reshape(prod(outer), inner)
    return jnp.einsum("ti,oi->to", rows, matrix, preferred_element_type=dtype)


def lookup(weight: BaseWeight, indices: jax.Array, dtype: Any) -> jax.Array:
    """[n, d]: some rows of a weight [v, d]."""
    assert not isinstance(weight, Parts), "an embedding is one tensor"
    if isinstance(weight, QuantizedWeight):
        return rows_of(weight, indices).astype(dtype)
    return weight.values[indices] if isinstance(weight, NativeWeight) else weight[indices]


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
