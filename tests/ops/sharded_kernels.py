"""Run by test_sharded_kernels.py in a process with 8 devices: kernels of each device's heads, against plain."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from quire.ops.attention.heads import HeadNorm, Heads, Rotation
from quire.ops.attention.sharded import sharded
from quire.ops.attention.spec import AttentionSpec
from quire.ops.attention.step_attention import PLAIN, Kernels, step_attention
from quire.ops.gpu.kernels import latent_by
from quire.ops.gpu.latent_attention import latent_attention
from quire.ops.gpu.latent_parts import SplitPolicy
from quire.ops.gpu.place_heads import place_heads
from quire.ops.gpu.recurrence import recur_single
from quire.ops.gpu.token_draws import draw_tokens
from quire.ops.kernels import NATIVE
from quire.ops.norms import Norms
from quire.ops.pages import CodedPages, PageAccess, PagedContext, Pages, Tiles, coded, write_targets
from quire.ops.recurrence import recur_in_tiles
from quire.ops.sharding import PAGE_AXES, PAGE_SCALE_AXES, sharding, tensor_mesh
from tests.ops.test_gpu_recurrence import access_of, check_state, drawn, kept
from tests.ops.test_tiled_attention import interpreted

PAGE_SIZE, HEAD_DIM, NUM_PAGES = 4, 8, 13
TABLE = jnp.asarray([[3, 5, 7, 9], [2, 4, 6, 8], [0, 0, 0, 0]], jnp.int32)


def interpreted_place(heads: Heads, pages: Pages, targets: Any) -> tuple[jax.Array, Pages]:
    return place_heads(heads, pages, targets, interpret=True)


AXES_BY_RANK = {4: PAGE_AXES, 3: PAGE_SCALE_AXES}
KERNELS = {"native": NATIVE, "pallas": Kernels(interpreted_place, interpreted)}


def in_codes(pages: Any) -> CodedPages:
    (k, k_scales), (v, v_scales) = (coded(array, jnp.dtype("int8")) for array in pages)
    return CodedPages(k, v, *(jnp.swapaxes(scales, 1, 2) for scales in (k_scales, v_scales)))


def cases() -> Iterator[tuple[str, AttentionSpec, Heads, Tiles, jax.Array]]:
    """A prefill beside a decode with every option of heads, and decodes without; positions of the tokens come last."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    positions = jnp.asarray([13, 4, 5, 6, 7, 8, -1])
    mixed = Tiles(*(jnp.asarray(values, jnp.int32) for values in ([1, 0], [13, 4], [1, 5], [0, 1])), num_single=1)
    angles = normal(len(positions), HEAD_DIM // 2)
    rotation = Rotation(jnp.cos(angles), jnp.sin(angles))
    for kv_heads in (8, 16, 3):  # three heads stay whole
        spec = AttentionSpec(kv_heads, group=2, head_dim=HEAD_DIM, scale=0.4, window=6, softcap=3.0)
        qkv = normal(len(positions), kv_heads, 4, HEAD_DIM)
        norms = HeadNorm(normal(HEAD_DIM), 1e-6), HeadNorm(normal(HEAD_DIM), 1e-6, offset=1.0)
        over_all = HeadNorm(normal(kv_heads, 2, HEAD_DIM), 1e-6), HeadNorm(normal(kv_heads, HEAD_DIM), 1e-6)
        sinks = replace(spec, has_sinks=True), Heads(qkv, rotation, *norms, sinks=normal(kv_heads, 2))
        yield f"mixed, {kv_heads} heads, rope, norms, sinks", *sinks, mixed, positions
        yield f"mixed, {kv_heads} heads, norm of all", spec, Heads(qkv, None, *over_all), mixed, positions
    spec, positions = replace(spec, kv_heads=8), jnp.asarray([9, 13, -1])
    decodes = Tiles.single(jnp.asarray([0, 1, 2]), positions)
    yield "decodes", spec, Heads(normal(len(positions), 8, 4, HEAD_DIM)), decodes, positions


def main() -> None:
    mesh = tensor_mesh(jax.devices())
    for name, spec, heads, tiles, positions in cases():
        slots = jnp.repeat(tiles.slots, tiles.lengths, total_repeat_length=len(positions))
        access = PageAccess(write_targets(TABLE, slots, positions, PAGE_SIZE), TABLE, tiles)
        shape = (NUM_PAGES, PAGE_SIZE, spec.kv_heads, HEAD_DIM)
        rng = np.random.default_rng(1)
        pages = tuple(jnp.asarray(rng.standard_normal(shape), jnp.float32) for _ in "kv")
        placed = jax.device_put(pages, sharding(shape, PAGE_AXES, mesh))

        def run(kernels: Kernels, pages: Any, spec=spec, heads=heads, access=access) -> Any:  # type: ignore[no-untyped-def]
            return jax.jit(lambda heads, pages: step_attention(kernels, spec, heads, pages, access))(heads, pages)

        out, expected_pages = run(PLAIN, pages)
        real = np.asarray(positions) >= 0
        codes = in_codes(pages)
        rounded, _ = run(PLAIN, codes)
        placed_codes = jax.tree.map(
            lambda array: jax.device_put(array, sharding(array.shape, AXES_BY_RANK[array.ndim], mesh)), codes
        )
        for kind, kernels in KERNELS.items():
            found, found_pages = run(sharded(kernels, mesh), placed)
            assert found.sharding.shard_shape(found.shape)[1] * (8 if spec.kv_heads % 8 == 0 else 1) == spec.kv_heads
            np.testing.assert_allclose(np.asarray(found)[real], np.asarray(out)[real], atol=2e-5, err_msg=name)
            for array, expected in zip(found_pages, expected_pages, strict=True):
                np.testing.assert_allclose(array[1:], expected[1:], atol=1e-5, err_msg=name)
            found, _ = run(sharded(kernels, mesh), placed_codes)
            difference = np.linalg.norm(np.asarray(found)[real] - np.asarray(rounded)[real])
            assert difference < 0.005 * np.linalg.norm(np.asarray(rounded)[real]), name
            print(f"{kind}: {name}: as plain")
    x, weight = jnp.ones((3, 16)), jnp.arange(16.0)
    norms: Norms = sharded(NATIVE, mesh).norms
    np.testing.assert_allclose(norms.rms(x, weight, 1e-6, 1.0), PLAIN.norms.rms(x, weight, 1e-6, 1.0), rtol=1e-6)
    check_sampling(mesh)
    check_latents(mesh)
    check_recurrence(mesh)


def check_recurrence(mesh: Mesh) -> None:
    """Of decodes and padding; each device has the matrices of one key head."""
    shape, rows = (8, 2, 4, 6), ([3, 9, 1], [5, -1, 0])
    tokens, access, before = drawn(3, *shape), access_of(*rows), kept(*rows, *shape)
    recur = partial(recur_in_tiles, recur_single=partial(recur_single, interpret=True))
    kernels = sharded(PLAIN._replace(recurrent=PLAIN.recurrent._replace(recur=recur)), mesh)
    out, matrices = jax.jit(partial(kernels.recurrent.recur, True))(tokens, jnp.asarray(before), access)
    assert matrices.sharding.shard_shape(matrices.shape) == (10, 1, 2, 4, 6)
    expected, right = PLAIN.recurrent.recur(True, tokens, jnp.asarray(before), access)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    check_state(matrices, right, before, *rows)


def check_latents(mesh: Mesh) -> None:
    """Of a prefill beside a decode, with a copy of the latents for each device and two heads that read it."""
    chance, spec = np.random.default_rng(3), AttentionSpec(8, group=2, head_dim=12, scale=0.4, value_dim=8)
    q, keys = (jnp.asarray(chance.standard_normal(shape), jnp.float32) for shape in ((6, 8, 2, 12), (13, 4, 8, 12)))
    tiles = Tiles(*(jnp.asarray(values, jnp.int32) for values in ([1, 0], [13, 4], [1, 5], [0, 1])), num_single=1)
    attend = partial(latent_by, partial(latent_attention, interpret=True, split=SplitPolicy(4, 8)))
    kernels = sharded(PLAIN._replace(attend_latent=attend), mesh)
    context = PagedContext(spec, (keys, keys), TABLE, tiles)
    found = jax.jit(kernels.attend_latent)(q, context)
    assert found.sharding.shard_shape(found.shape) == (6, 1, 2, 8)
    expected = PLAIN.attend_latent(q, context)[..., :8]
    np.testing.assert_allclose(found, expected, atol=2e-5)


def check_sampling(mesh: Mesh) -> None:
    """Of logits that are divided among the devices, as a head that is divided makes them."""
    logits = -jnp.abs(jnp.asarray(np.random.default_rng(2).standard_normal((3, 64)), jnp.float32)).at[:, 5].set(0.0)
    by_token = NamedSharding(mesh, PartitionSpec(None, mesh.axis_names[0]))  # type: ignore[no-untyped-call]
    divided = jax.device_put(logits, by_token)
    asked = jnp.full(3, 9, jnp.int32), *(jnp.full(3, share, jnp.float32) for share in (0.9, 0.0, 0.8))
    kernels = sharded(NATIVE, mesh)
    assert NATIVE.skips_padding
    assert not kernels.skips_padding  # products are XLA's
    drawing = NATIVE._replace(sampling=NATIVE.sampling._replace(draw_tokens=draw_tokens))
    assert sharded(drawing, mesh).sampling.draw_tokens is None  # nor are logits put together for draws
    for name in ("highest", "filter_cuts"):
        others = asked if name == "filter_cuts" else ()
        found, expected = (
            jax.jit(getattr(kernels.sampling, name))(divided, *others),
            getattr(NATIVE.sampling, name)(logits, *others),
        )
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, other)


if __name__ == "__main__":
    main()
