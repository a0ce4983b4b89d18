"""Quality of eight bits and four: 2,048 positions of an English text in float32, and with fewer bits.

    python bench/quality.py                                   # the default model, and two small random families
    python bench/quality.py --only default                    # the default model alone
    python bench/quality.py --only "random qwen3_moe"         # a small random family with experts alone
    python bench/quality.py --torch                           # its schemes beside the same ones in torch
    python bench/quality.py --tokens t.npy                    # also write the token ids, [windows, 512]
    python bench/quality.py --logits NAME=l.npy               # also compare another program's logits on those tokens

The text is what the standard library carries of the Python documentation, in windows that each begin anew. Perplexity
means something for trained weights only; random ones show whether a family loses more than another.
"""

import argparse
import pydoc_data.topics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from quire.files.model_files import ModelFiles, locate
from quire.models.checkpoint import Quantize, for_kernels, leaves, load_weights
from quire.models.context import NoStates, PlatformOps, TokenContext
from quire.models.formats.channel_weights import Kind, channel_weight, is_quantized
from quire.models.formats.quantized_source import open_checkpoint
from quire.models.params import Param, ParamTree
from quire.models.parts.decoder import Decoder
from quire.models.random_weights import random_weights
from quire.models.registry import build_model
from quire.ops.attention.heads import Heads, joined
from quire.ops.attention.reference import Attend, whole_sequence
from quire.ops.attention.spec import AttentionSpec
from quire.ops.gpu.hopper.coded_prompts import CODE, EVERY, LARGEST_WEIGHT, ROOM
from quire.ops.pages import coded, spread_for_cache, widened
from quire.ops.weights.rounded_rows import LARGEST_FLOAT8, LEAST_SCALE, RoundedRows, nearest_codes
from quire.text.tokenizer import load_tokenizer

Array = np.ndarray[Any, Any]
Weights = Callable[[Quantize], ParamTree]
WINDOW, WINDOWS = 512, 4
CACHES = ("float8_e4m3fn", "int8")

SMALL = {"vocab_size": 32768, "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "head_dim": 64}
RANDOM_FAMILIES = {
    "random qwen3": {"model_type": "qwen3", "num_key_value_heads": 4, "intermediate_size": 1536, **SMALL},
    "random gemma2": {"model_type": "gemma2", "num_key_value_heads": 4, "intermediate_size": 2048, **SMALL},
    "random qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_key_value_heads": 4,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 384,
        "norm_topk_prob": True,
        **SMALL,
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=["default", *RANDOM_FAMILIES], help="which model")
    parser.add_argument("--windows", type=int, default=WINDOWS, help=f"of {WINDOW} positions")
    parser.add_argument("--torch", action="store_true", help="beside torch; needs what `make test-parity` installs")
    parser.add_argument("--tokens", help="a file to write the token ids to")
    parser.add_argument("--logits", action="append", default=[], metavar="NAME=FILE")
    options = parser.parse_args()

    files = locate("default")
    windows = text_windows(files)[: options.windows]
    if options.tokens:
        np.save(options.tokens, windows)
    others = dict(given.split("=", 1) for given in options.logits)
    print(f"{'':<24} {'perplexity':>10} {'same top':>9} {'KL':>8}")
    model = build_model(files.config)

    def trained(quantize: Quantize) -> ParamTree:
        source = files.open_weights()
        assert source is not None
        return load_weights(model, source, dtype="float32", quantize=quantize)

    if options.torch:
        compare_with_torch(files, model, trained, windows)
        return
    if options.only in (None, "default"):
        compare("default model", model, trained, windows, others)
    for name, config in RANDOM_FAMILIES.items():
        if options.only in (None, name):
            compare(name, *random_family(config), windows % SMALL["vocab_size"], {})


def random_family(config: dict[str, Any]) -> tuple[Decoder, Weights]:
    model = build_model({**config, "max_position_embeddings": 4096, "query_pre_attn_scalar": 64})
    return model, lambda quantize: random_weights(model, seed=0, dtype="float32", quantize=quantize)


def text_windows(files: ModelFiles) -> Array:
    assert files.path is not None
    text = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    ids = load_tokenizer(files.path).encode(text)
    start = len(ids) // 3  # amid the prose
    return np.asarray(ids[start : start + WINDOW * WINDOWS], np.int32).reshape(WINDOWS, WINDOW)


def compare(name: str, model: Decoder, weights: Weights, windows: Array, others: dict[str, str]) -> None:
    reference = logprobs(model, weights("none"), windows)
    report(f"{name}, float32", reference, reference, windows)
    for kind in ("int8", "fp8"):
        report(f"{name}, {kind}", reference, logprobs(model, weights(kind), windows), windows)
    if any(param.is_of_experts for param in leaves(model.params())):
        mixed = with_float_experts(model, weights("int8"), weights("none"))
        report(f"{name}, int8, float32 experts", reference, logprobs(model, mixed, windows), windows)
    for cache in CACHES:
        report(f"{name}, cache {cache}", reference, logprobs(model, weights("none"), windows, cache), windows)
    report(f"{name}, fp8, cache fp8", reference, logprobs(model, weights("fp8"), windows, CACHES[0]), windows)
    in_codes = logprobs(model, weights("fp8"), windows, attend=prompt_in_codes)
    report(f"{name}, fp8, cache fp8, prompts in codes", reference, in_codes, windows)
    for other, file in others.items():
        logits = np.load(file, mmap_mode="r").reshape(len(windows), WINDOW, -1)
        given = [np.asarray(jax.nn.log_softmax(jnp.asarray(window), axis=-1)) for window in logits]
        report(f"{name}, {other}", reference, given, windows)


def compare_with_torch(files: ModelFiles, model: Decoder, weights: Weights, windows: Array) -> None:
    """Each scheme here, and in `quality_torch`, both against float32 here."""
    import quality_torch as theirs

    assert files.path is not None
    plain, loaded = weights("none"), theirs.load(files.path)
    reference = logprobs(model, plain, windows)
    show = partial(report, reference=reference, windows=windows)
    show("float32", given=reference)
    show("float32, torch", given=theirs.logprobs(loaded, windows))
    for cache in CACHES:
        show(f"cache {cache}", given=logprobs(model, plain, windows, cache))
        show(f"cache {cache}, torch", given=theirs.logprobs(loaded, windows, cache))
    kinds: tuple[Kind, ...] = ("fp8", "int8")
    for kind, dtype in zip(kinds, CACHES, strict=True):
        show(f"{kind} by output", given=logprobs(model, by_output(model, plain, kind), windows))
        show(f"{kind} by output, torch", given=theirs.logprobs(theirs.with_weights(loaded, dtype), windows))
    four = theirs.with_four_bits(loaded)
    show("w4a16, torch", given=theirs.logprobs(four, windows))
    with tempfile.TemporaryDirectory() as folder:
        theirs.save(four, Path(folder))
        source = open_checkpoint(locate(folder))
        assert source is not None
        show("w4a16", given=logprobs(model, load_weights(model, source, dtype="float32"), windows))


def with_float_experts(model: Decoder, weights: ParamTree, floats: ParamTree) -> ParamTree:
    """The weights with the float experts of others."""
    made: ParamTree = jax.tree.map(
        lambda param, weight, float_weight: float_weight if param.is_of_experts else weight,
        model.params(),
        weights,
        floats,
        is_leaf=lambda node: isinstance(node, Param),
    )
    return made


def by_output(model: Decoder, weights: ParamTree, kind: Kind) -> ParamTree:
    """With a scale for each output, as `--quantize` makes them on GPUs."""

    def make(param: Param, weight: Any) -> Any:
        if not is_quantized(param):
            return weight
        return for_kernels(channel_weight(weight.values, param, kind), None)

    made: ParamTree = jax.tree.map(make, model.params(), weights, is_leaf=lambda node: isinstance(node, Param))
    return made


def with_cache(dtype: str, spec: AttentionSpec, heads: Heads, state: None) -> tuple[jax.Array, None]:
    """Attention within a sequence whose keys and values are rounded as a cache of this type rounds them."""
    q, k, v = heads.finished()
    q, k = spread_for_cache(q, k, jnp.dtype(dtype))
    k, v = (widened(*coded(part, jnp.dtype(dtype)), part.dtype) for part in (k, v))
    return whole_sequence(spec, joined(q, k, v)._replace(sinks=heads.sinks), state)


def prompt_in_codes(spec: AttentionSpec, heads: Heads, state: None) -> tuple[RoundedRows, None]:
    """Attention of a prompt in e4m3, as `quire.ops.gpu.hopper.coded_prompts` has it for long ones, here for any."""
    q, k, v = heads.finished()
    some_keys = k[::EVERY]
    scales = [jnp.maximum(jnp.abs(part[::EVERY]).max() * (ROOM / LARGEST_FLOAT8), LEAST_SCALE) for part in (q, k, v)]
    held = q, k - some_keys.mean(axis=0), v
    q, k, v = (nearest_codes(x / scale, CODE).astype(jnp.float32) for x, scale in zip(held, scales, strict=True))
    scores = jnp.einsum("tkgh,skh->kgts", q, k) * (scales[0] * scales[1] * spec.scale)
    scores = jnp.where(jnp.tri(len(q), dtype=bool), scores, -jnp.inf)
    weights = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    coded_weights = nearest_codes(weights * LARGEST_WEIGHT, CODE).astype(jnp.float32) / LARGEST_WEIGHT
    # Of values in their codes: a mean is no larger than they are, so that it needs no other scale.
    means = jnp.einsum("kgts,skh->kgth", coded_weights, v) / weights.sum(axis=-1, keepdims=True)
    codes = nearest_codes(means.transpose(2, 0, 1, 3).reshape(len(q), -1), CODE)
    of_rows = jnp.broadcast_to(scales[2], (len(q), 1))
    return RoundedRows(codes.astype(jnp.float32) * of_rows, codes, of_rows), state


def logprobs(
    model: Decoder, weights: ParamTree, windows: Array, cache: str | None = None, attend: Attend | None = None
) -> list[Array]:
    """float32 [WINDOW, vocabulary] of each window, with a cache of this type, or with this attention."""
    if attend is None:
        attend = whole_sequence if cache is None else partial(with_cache, cache)

    @jax.jit
    def run(weights: ParamTree, tokens: jax.Array) -> jax.Array:
        positions = jnp.arange(WINDOW)
        context = TokenContext(tokens, positions, lengths=positions + 1)
        hidden, _ = model.forward(weights, context, NoStates(), PlatformOps(attend))
        return jax.nn.log_softmax(model.logits(weights, hidden), axis=-1)

    return [np.asarray(run(weights, jnp.asarray(window))) for window in windows]


def report(name: str, reference: list[Array], given: list[Array], windows: Array) -> None:
    surprise, same, distance = [], [], []
    for base, new, tokens in zip(reference, given, windows, strict=True):
        surprise.append(-np.take_along_axis(new[:-1], tokens[1:, None], axis=1)[:, 0])
        same.append(base.argmax(axis=-1) == new.argmax(axis=-1))
        distance.append((np.exp(base) * (base - new)).sum(axis=-1))
    perplexity = np.exp(np.concatenate(surprise).mean())
    print(
        f"{name:<24} {perplexity:>10.3f} {np.concatenate(same).mean():>9.2%} {np.concatenate(distance).mean():>8.5f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
