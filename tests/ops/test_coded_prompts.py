"""Heads of a prompt in codes of e4m3, and attention among them: near what the numbers give."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.ops.attention.heads import HeadNorm, Heads, Rotation
from quire.ops.attention.reference import causal_attention
from quire.ops.attention.spec import AttentionSpec
from quire.ops.attention.step_attention import place
from quire.ops.gpu.hopper.coded_prompts import EVERY, LEAST_TOKENS, PromptCodes, attend_to_prompt, fits, place_prompt
from quire.ops.pages import CodedPages, KVWriteTargets
from quire.ops.weights.rounded_rows import ScaledSums

CODE = jnp.float8_e4m3fn
TOKENS, REAL, KV_HEADS, GROUP, SIZE, PAGE_SIZE = 600, 570, 2, 3, 16, 16
SPEC = AttentionSpec(KV_HEADS, GROUP, SIZE, SIZE**-0.5, read_in=CODE)


def heads(kind: str) -> Heads:
    chance = np.random.default_rng(0)
    qkv = chance.normal(size=(TOKENS, KV_HEADS, GROUP + 2, SIZE))
    qkv[:, :, -2] += 6 * chance.normal(size=(KV_HEADS, SIZE))  # keys have much in common
    angles = chance.normal(size=(TOKENS, SIZE // 2)) * 0.1
    rotation = Rotation(jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32))
    norm = HeadNorm(jnp.asarray(1 + 0.1 * chance.normal(size=SIZE), jnp.float32), 1e-5)
    if kind != "sums":
        return Heads(jnp.asarray(qkv, jnp.float32), rotation, *([norm, norm] if kind == "norms" else []))
    rows, columns = np.exp(chance.normal(size=(TOKENS, 1))), np.exp(chance.normal(size=qkv.shape[1:]))
    sums = jnp.asarray(qkv / rows[:, :, None, None] / columns, jnp.float32)
    scales = jnp.asarray(rows, jnp.float32), jnp.asarray(columns.reshape(-1), jnp.float32)
    return Heads(ScaledSums(sums, *scales, jnp.dtype("float32")), rotation)


def targets() -> KVWriteTargets:
    at = np.arange(TOKENS)
    return KVWriteTargets(
        jnp.asarray(np.where(at < REAL, 1 + at // PAGE_SIZE, 0), jnp.int32), jnp.asarray(at % PAGE_SIZE, jnp.int32)
    )


def pages() -> CodedPages:
    codes = jnp.zeros((40, PAGE_SIZE, KV_HEADS, SIZE), CODE)
    scales = jnp.zeros((40, KV_HEADS, PAGE_SIZE), jnp.bfloat16)
    return CodedPages(codes, codes, scales, scales)


def numbers(codes: PromptCodes) -> list[jax.Array]:
    arrays = codes.q, codes.k, codes.v
    return [one.astype(jnp.float32) * codes.scales[index] for index, one in enumerate(arrays)]


def plain(spec: AttentionSpec, codes: PromptCodes) -> jax.Array:
    out = causal_attention(spec, *numbers(codes))
    return (out / codes.scales[2]).astype(CODE)


@pytest.mark.parametrize("kind", ["plain", "norms", "sums"])
def test_codes_are_near_the_numbers_and_pages_are_as_ever(kind: str) -> None:
    made = heads(kind)
    codes, written = jax.jit(lambda made, pages: place_prompt(made, pages, targets(), interpret=True))(made, pages())
    q, expected = jax.jit(lambda made, pages: place(made, pages, targets()))(made, pages())
    for got, right in zip(written, expected, strict=True):
        np.testing.assert_allclose(got[1:].astype(jnp.float32), right[1:].astype(jnp.float32), rtol=0.08, atol=1e-6)
    _, k, v = made.finished()
    k, v = (np.asarray(one).copy() for one in (k, v))
    k -= k[:REAL:EVERY].sum(axis=0) * EVERY / TOKENS
    k[REAL:] = v[REAL:] = 0
    for got, right in zip(numbers(codes), (np.asarray(q), k, v), strict=True):
        np.testing.assert_allclose(got, right, rtol=2.0**-4 + 1e-3, atol=np.abs(right).max() * 2e-4)


def test_attention_in_codes_is_near_that_of_the_numbers() -> None:
    made = heads("plain")
    rows, _ = jax.jit(lambda made: attend_to_prompt(SPEC, made, pages(), targets(), plain, interpret=True))(made)
    right = np.asarray(causal_attention(SPEC, *made.finished())).reshape(TOKENS, -1)[:REAL]
    got = np.asarray(rows.codes, np.float32) * np.asarray(rows.scales)
    np.testing.assert_array_equal(got, rows.values)
    off = np.linalg.norm(got[:REAL] - right, axis=1) / np.linalg.norm(right, axis=1)
    assert off.mean() < 0.08


def test_no_number_stays_none() -> None:
    made = heads("plain")
    made = made._replace(qkv=made.qkv.at[65, 1, :].set(jnp.nan))
    codes, written = jax.jit(lambda made: place_prompt(made, pages(), targets(), interpret=True))(made)
    for one in (codes.q, codes.k, codes.v):
        assert np.isnan(one[65, 1].astype(jnp.float32)).all()
        assert np.isfinite(np.delete(np.asarray(one.astype(jnp.float32)), 65, axis=0)).all()
    assert np.isnan(written.k_scales[1 + 65 // PAGE_SIZE, 1, 65 % PAGE_SIZE])


def test_it_is_for_long_prompts_whose_rows_and_pages_are_codes() -> None:
    spec = AttentionSpec(8, 4, 128, 1.0, read_in=CODE)
    assert fits(spec, pages(), LEAST_TOKENS)
    floats = jnp.zeros(1, jnp.bfloat16), jnp.zeros(1, jnp.bfloat16)
    for other, held, tokens in (
        (spec, pages(), LEAST_TOKENS - 1),
        (spec, floats, LEAST_TOKENS),
        (AttentionSpec(8, 4, 128, 1.0), pages(), LEAST_TOKENS),
        (AttentionSpec(8, 4, 128, 1.0, window=4096, read_in=CODE), pages(), LEAST_TOKENS),
        (AttentionSpec(8, 4, 128, 1.0, softcap=30.0, read_in=CODE), pages(), LEAST_TOKENS),
    ):
        assert not fits(other, held, tokens)
