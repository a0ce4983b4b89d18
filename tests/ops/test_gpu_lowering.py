"""The GPU's kernels for attention, for recurrent layers and for moves of pages can be translated for a GPU, also where
there is none: interpreting them shows less."""

import subprocess
import sys
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from quire.ops.attention.heads import Heads
from quire.ops.attention.spec import AttentionSpec
from quire.ops.attention.step_attention import step_attention
from quire.ops.gpu import fixed_order
from quire.ops.gpu import kernels as gpu_kernels
from quire.ops.gpu.kernels import GPU, attend
from quire.ops.gpu.move_pages import MOST_ARRAYS
from quire.ops.kernels import kernels_for
from quire.ops.pages import TILE, CodedPages, KVWriteTargets, PageAccess, PagedContext, SharedPrefixes, Tiles
from quire.ops.recurrence import Recurrence, RecurrentSpec
from quire.ops.slot_access import SlotAccess
from quire.ops.weights.rounded_rows import ScaledSums
from tests.gpu.hopper import ON_HOPPER

SPECS = {
    "groups of 4": AttentionSpec(2, 4, 128, 0.088),
    "groups of 3, odd heads": AttentionSpec(1, 3, 80, 0.125),
    "window, cap": AttentionSpec(1, 8, 64, 0.125, window=33, softcap=20.0),
    "chunks": AttentionSpec(8, 5, 128, 0.088, chunk=8192),
    "window, sinks": AttentionSpec(8, 8, 64, 0.125, window=128, has_sinks=True),
}


def on_an_h200() -> AbstractContextManager[Any]:
    """Kernels are translated for this device, though there is none."""
    device = jax.sharding.AbstractDevice("NVIDIA H200", num_cores=132, platform="gpu")
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(
    ("num_single", "num_tiles", "num_kernels"),
    [(8, 8, 2), (8, 16, 4), (0, 160, 1)],  # of short steps parts of contexts are put together
    ids=["decodes", "mixed", "long"],
)
def test_attention_is_translated(name: str, dtype: str, num_single: int, num_tiles: int, num_kernels: int) -> None:
    spec = SPECS[name]
    tokens = num_single + (num_tiles - num_single) * TILE
    q = jnp.zeros((tokens, spec.kv_heads, spec.group, spec.head_dim), dtype)
    pages = jnp.zeros((4, 32, spec.kv_heads, spec.head_dim), dtype)
    each = jnp.zeros(num_tiles, jnp.int32)
    tiles = Tiles(each, each, each, each, num_single)
    with on_an_h200():
        sinks = jnp.zeros((spec.kv_heads, spec.group), dtype) if spec.has_sinks else None
        context = PagedContext(spec, (pages, pages), jnp.zeros((9, 40), jnp.int32), tiles, sinks)
        traced = jax.jit(attend).trace(q, context)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call") == num_kernels


@pytest.mark.skipif(not ON_HOPPER.mosaic, reason="this JAX has other kernels for it")
@pytest.mark.parametrize("code_dtype", ["float8_e4m3fn", "int8"])
@pytest.mark.parametrize("page_size", [16, 64])
def test_decodes_over_codes_are_translated_for_hopper(code_dtype: str, page_size: int) -> None:
    spec, rows = SPECS["groups of 4"], 256
    codes = jnp.zeros((4, page_size, spec.kv_heads, spec.head_dim), code_dtype)
    scales = jnp.zeros((4, spec.kv_heads, page_size), jnp.bfloat16)
    q = jnp.zeros((rows, spec.kv_heads, spec.group, spec.head_dim), jnp.bfloat16)
    pages, table = CodedPages(codes, codes, scales, scales), jnp.zeros((rows, 40), jnp.int32)
    tiles = Tiles.single(jnp.arange(rows), jnp.zeros(rows, jnp.int32))
    with on_an_h200():
        traced = jax.jit(gpu_kernels.attend_on_hopper).trace(q, PagedContext(spec, pages, table, tiles))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu") == 1
    assert 'name = "decode_attention"' not in text


@pytest.mark.skipif(not ON_HOPPER.mosaic, reason="this JAX has other kernels for it")
@pytest.mark.parametrize("code_dtype", ["float8_e4m3fn", "int8"])
@pytest.mark.parametrize("num_single", [0, 256])
def test_prefills_over_codes_are_translated_for_hopper(code_dtype: str, num_single: int) -> None:
    """With decodes, whose results are put beside theirs."""
    spec, num_tiles = SPECS["groups of 4"], num_single + 32
    tokens = num_single + 32 * TILE
    codes = jnp.zeros((4, 16, spec.kv_heads, spec.head_dim), code_dtype)
    scales = jnp.zeros((4, spec.kv_heads, 16), jnp.bfloat16)
    q = jnp.zeros((tokens, spec.kv_heads, spec.group, spec.head_dim), jnp.bfloat16)
    each = jnp.zeros(num_tiles, jnp.int32)
    pages, table = CodedPages(codes, codes, scales, scales), jnp.zeros((9, 40), jnp.int32)
    context = PagedContext(spec, pages, table, Tiles(each, each, each, each, num_single))
    with on_an_h200():
        traced = jax.jit(gpu_kernels.attend_on_hopper).trace(q, context)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu") == (2 if num_single else 1)
    assert "prefill_attention" not in text


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["groups of 4", "window, sinks"])
def test_kernels_with_one_order_are_translated(name: str, dtype: str) -> None:
    """Decodes and what puts their parts together; prompts, whose contexts have no parts; heads, and a norm."""
    spec, tokens = SPECS[name], 8 + 2 * TILE
    kernels = kernels_for("gpu", dtype, fixed_order=True)
    heads = Heads(jnp.zeros((tokens, spec.kv_heads, spec.group + 2, spec.head_dim), dtype), None, None, None)
    pages = (jnp.zeros((4, 32, spec.kv_heads, spec.head_dim), dtype),) * 2
    each, places = jnp.zeros(10, jnp.int32), jnp.zeros(tokens, jnp.int32)
    tiles = Tiles(each, each, each, each, 8)
    sinks = jnp.zeros((spec.kv_heads, spec.group), dtype) if spec.has_sinks else None

    def run(heads: Heads, pages: Any, x: jax.Array, weight: jax.Array) -> Any:
        q, pages = kernels.place(heads, pages, KVWriteTargets(places, places))
        out = kernels.attend(q, PagedContext(spec, pages, jnp.zeros((9, 40), jnp.int32), tiles, sinks))
        return out, kernels.norms.rms(x, weight, 1e-5, 0.0)

    with on_an_h200():
        traced = jax.jit(run).trace(heads, pages, jnp.zeros((tokens, 576), dtype), jnp.zeros(576, dtype))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call") == 5
    assert kernels.max_fresh_sequences == 0
    assert kernels.norms is kernels.decode_norms


# Few rows have other tilings than many; not those of float32, and not in one order.
@pytest.mark.parametrize(
    ("dtype", "num_single"),
    [(dtype, rows) for dtype in ("bfloat16", "float8_e4m3fn", "int8") for rows in (64, 256)] + [("float32", 64)],
)
@pytest.mark.parametrize("name", SPECS)
def test_attention_to_shared_prefixes_is_translated(name: str, dtype: str, num_single: int) -> None:
    """Beside prefills, which need two kernels more. Layers that do not see all positions have no use for it."""
    spec, is_coded = SPECS[name], dtype in ("float8_e4m3fn", "int8")
    q = jnp.zeros((num_single + TILE, spec.kv_heads, spec.group, spec.head_dim), "bfloat16" if is_coded else dtype)
    keys = jnp.zeros((4, 32, spec.kv_heads, spec.head_dim), dtype)
    scales = jnp.zeros((4, spec.kv_heads, 32), jnp.bfloat16)
    pages = CodedPages(keys, keys, scales, scales) if is_coded else (keys, keys)
    each, of_tiles = jnp.zeros(num_single + 1, jnp.int32), jnp.zeros(12, jnp.int32)
    shared = SharedPrefixes(each[:-1], jnp.zeros((12, TILE), jnp.int32), of_tiles, of_tiles)
    tiles = Tiles(each, each, each, each, num_single, shared)
    with on_an_h200():
        sinks = jnp.zeros((spec.kv_heads, spec.group), q.dtype) if spec.has_sinks else None
        context = PagedContext(spec, pages, jnp.zeros((9, 40), jnp.int32), tiles, sinks)
        text, *in_order = (
            jax.jit(how).trace(q, context).lower(lowering_platforms=("cuda",)).as_text()
            for how in (attend, fixed_order.attend)[: 2 if num_single == 64 else 1]
        )
    assert text.count("stablehlo.custom_call") == (5 if spec.sees_all else 4)
    # Packs are read by the kernel of decodes, and prompts are not cut into parts.
    assert all(one.count("stablehlo.custom_call") == 3 for one in in_order)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize(("num_single", "num_tiles"), [(8, 8), (8, 10), (0, 160)], ids=["decodes", "mixed", "long"])
def test_latent_attention_is_translated(heads: int, dtype: str, num_single: int, num_tiles: int) -> None:
    """Kernels alone: decodes are put together of parts, and so are prompts of short steps."""
    spec = AttentionSpec(1, heads, 576, 0.07, value_dim=512)
    tokens = num_single + (num_tiles - num_single) * TILE
    q, keys = jnp.zeros((tokens, 1, heads, 576), dtype), jnp.zeros((4, 32, 1, 576), dtype)
    each = jnp.zeros(num_tiles, jnp.int32)
    tiles = Tiles(each, each, each, each, num_single)
    context = PagedContext(spec, (keys, keys), jnp.zeros((9, 40), jnp.int32), tiles)
    with on_an_h200():
        text = jax.jit(GPU.attend_latent).trace(q, context).lower(lowering_platforms=("cuda",)).as_text()
    of_prompts = num_tiles > num_single
    assert text.count('name = "latent_attention"') == (num_single > 0) + of_prompts
    has_few_programs = num_tiles == 10 and (heads, dtype) != (128, "float32")
    assert text.count('name = "combine_latent_parts"') == (num_single > 0) + (of_prompts and has_few_programs)
    assert "stablehlo.while" not in text


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_latents_of_any_size_are_translated(dtype: str) -> None:
    spec = AttentionSpec(1, 5, 28, 0.2, value_dim=20)
    q, keys = jnp.zeros((8 + TILE, 1, 5, 28), dtype), jnp.zeros((4, 24, 1, 28), dtype)
    each = jnp.zeros(9, jnp.int32)
    context = PagedContext(spec, (keys, keys), jnp.zeros((9, 40), jnp.int32), Tiles(each, each, each, each, 8))
    with on_an_h200():
        text = jax.jit(GPU.attend_latent).trace(q, context).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count('name = "latent_attention"') == text.count('name = "combine_latent_parts"') == 2


def test_latent_attention_without_a_kernel_is_said_to_have_none(caplog: pytest.LogCaptureFixture) -> None:
    spec = AttentionSpec(1, 16, 576, 0.07, value_dim=512, window=100)
    gpu_kernels.warn_of_plain_latent_attention.cache_clear()
    q, keys = jnp.zeros((8, 1, 16, 576), jnp.bfloat16), jnp.zeros((4, 32, 1, 576), jnp.bfloat16)
    each = jnp.zeros(8, jnp.int32)
    run = jax.jit(gpu_kernels.GPU.attend_latent)
    context = PagedContext(spec, (keys, keys), jnp.zeros((9, 40), jnp.int32), Tiles(each, each, each, each, 8))
    assert "stablehlo.while" in run.trace(q, context).lower(lowering_platforms=("cuda",)).as_text()
    assert "this latent attention has no kernel for this GPU" in caplog.text


@pytest.mark.parametrize("cache_dtype", ["float8_e4m3fn", "int8"])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("groups of 4", "bfloat16"), ("groups of 4", "float16"), ("groups of 3, odd heads", "bfloat16")],
)
def test_a_cache_of_eight_bits_is_translated(name: str, dtype: str, cache_dtype: str) -> None:
    spec, tokens = SPECS[name], 8 + 8 * TILE
    heads = jnp.zeros((tokens, spec.kv_heads, spec.group + 2, spec.head_dim), dtype)
    codes = jnp.zeros((4, 32, spec.kv_heads, spec.head_dim), cache_dtype)
    scales = jnp.zeros((4, spec.kv_heads, 32), jnp.bfloat16)
    each, places = jnp.zeros(16, jnp.int32), jnp.zeros(tokens, jnp.int32)
    access = PageAccess(KVWriteTargets(places, places), jnp.zeros((9, 40), jnp.int32), Tiles(each, each, each, each, 8))
    with on_an_h200():
        run = jax.jit(lambda *given: step_attention(GPU, spec, *given))
        traced = run.trace(Heads(heads), CodedPages(codes, codes, scales, scales), access)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call") == 5


def test_sums_of_heads_are_translated() -> None:
    spec, tokens = SPECS["groups of 4"], 8
    shape = (tokens, spec.kv_heads, spec.group + 2, spec.head_dim)
    pages = jnp.zeros((4, 32, spec.kv_heads, spec.head_dim), jnp.bfloat16)
    places = jnp.zeros(tokens, jnp.int32)
    for sums in ("bfloat16", "int32"):
        columns = jnp.ones(spec.kv_heads * (spec.group + 2) * spec.head_dim)
        heads = Heads(ScaledSums(jnp.zeros(shape, sums), jnp.ones((tokens, 1)), columns, jnp.dtype("bfloat16")))
        with on_an_h200():
            traced = jax.jit(GPU.place).trace(heads, (pages, pages), KVWriteTargets(places, places))
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("stablehlo.custom_call") == 1
        assert "stablehlo.multiply" not in text


def test_a_jax_without_the_backend_is_refused_with_the_remedy() -> None:
    """Plain kernels would run instead, several times slower."""
    code = """
import sys
sys.modules["jax.experimental.pallas.triton"] = None
from quire.errors import InvalidSetting
from quire.ops.kernels import kernels_for
try:
    kernels_for("gpu", "bfloat16")
except InvalidSetting as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'quire[cuda]'" in run.stdout


RECURRENT = {
    "qwen3-next": RecurrentSpec(16, 2, 128, 128, 512, 4, corrects=True),
    "granite-4.0": RecurrentSpec(1, 128, 128, 64, 8448, 4, corrects=False),
    "odd sizes": RecurrentSpec(3, 5, 80, 72, 520, 2, corrects=True),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize(("num_single", "num_tiles"), [(8, 8), (8, 10), (0, 4)], ids=["decodes", "mixed", "prompt"])
def test_recurrent_layers_are_translated(name: str, dtype: str, num_single: int, num_tiles: int) -> None:
    """Of steps with decodes alone nothing else moves states. XLA has the tokens of prompts, beside decodes too."""
    spec, tokens = RECURRENT[name], num_single + (num_tiles - num_single) * TILE
    heads = tokens, spec.key_heads
    shapes = [(*heads, spec.key_dim)] * 2 + [(*heads, spec.group, spec.value_dim)] + [(*heads, spec.group)] * 2
    matrices = jnp.zeros((9, spec.key_heads, spec.group, spec.key_dim, spec.value_dim))
    inputs = jnp.zeros((9, spec.taps - 1, spec.key_heads, spec.channels), dtype)
    x, weight = jnp.zeros((*heads, spec.channels), dtype), jnp.zeros((spec.key_heads, spec.channels, spec.taps), dtype)
    each, of_tokens = jnp.zeros(num_tiles, jnp.int32), jnp.zeros(tokens, jnp.int32)
    access = SlotAccess(of_tokens, of_tokens, of_tokens, each, Tiles(each, each, each, each, num_single))

    def run(tokens: Recurrence, matrices: jax.Array, x: jax.Array, inputs: jax.Array, access: SlotAccess) -> Any:
        convolved = GPU.recurrent.convolve(x, weight, weight[:, :, 0], inputs, access)
        return convolved, GPU.recurrent.recur(spec.corrects, tokens, matrices, access)

    with on_an_h200():
        traced = jax.jit(run).trace(Recurrence(*map(jnp.zeros, shapes)), matrices, x, inputs, access)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    decodes_only = num_single == num_tiles
    assert text.count('name = "recur_single"') == (num_single > 0)
    assert text.count('name = "convolve_single"') == decodes_only
    for work in ("gather", "scatter", "while"):
        assert (f"stablehlo.{work}" in text) == (not decodes_only)


def translated(function: Any, *given: Any) -> str:
    with on_an_h200():
        return jax.jit(function).trace(*given).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize(("count", "page"), [(64, (32, 8, 128)), (9, (7, 3, 50))], ids=str)
def test_moves_are_translated(count: int, page: tuple[int, ...], dtype: str) -> None:
    """Of four blocks, which have one kernel. Nothing else is launched."""
    arrays = [jax.ShapeDtypeStruct((2048, *page), dtype)] * count
    numbers, blocks = jax.ShapeDtypeStruct((64,), "int32"), [jax.ShapeDtypeStruct((16, count, *page), dtype)] * 4
    texts = {
        "gather": translated(partial(GPU.moves.gather, rows=16), arrays, numbers),
        "scatter": translated(GPU.moves.scatter, arrays, numbers, blocks),
    }
    assert texts["scatter"].count("output_operand_alias<") == count, "arrays are written in place"
    for name, text in texts.items():
        assert text.count("stablehlo.custom_call") == text.count(f'name = "{name}_pages"') == 1
        assert text.count(f" call @_{name}_block") == 4
        for work in ("gather", "scatter", "slice", "concatenate"):
            assert f"stablehlo.{work}" not in text


def test_as_many_arrays_as_a_launch_takes_are_translated() -> None:
    arrays = [jax.ShapeDtypeStruct((64, 1024), "bfloat16")] * (MOST_ARRAYS + 1)
    numbers, blocks = jax.ShapeDtypeStruct((2,), "int32"), [jax.ShapeDtypeStruct((2, len(arrays), 1024), "bfloat16")]
    text = translated(GPU.moves.scatter, arrays, numbers, blocks)
    assert text.count("stablehlo.custom_call") == text.count('name = "scatter_pages"') == 2
