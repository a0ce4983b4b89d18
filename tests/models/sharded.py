"""Run by test_sharded.py in a process with 8 devices: sharded models against the same on one device."""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from quire.executor.layer_state import PagedStates, page_layout
from quire.models.checkpoint import leaves, load_weights
from quire.models.context import PlatformOps, TokenContext
from quire.models.params import Param, ParamTree
from quire.models.parts.decoder import Decoder
from quire.models.registry import build_model
from quire.ops.sharding import key_copies, sharding, tensor_mesh
from tests.models.cases import CASES
from tests.models.tiny import NamedTensors, attend_pages, one_row, prompt, relative_error

TOKENS = 12
OF_TWO_KINDS = ("gpt_oss", "deepseek_v3", "llama4")  # of layers; of the others one layer is enough
WITH_FP8 = ("llama-biases", "mixtral", "deepseek_v3", "llama4")  # plain layers, experts, latent attention
QUERIES = ("qkv", "query", "key_up", "value_up")  # weights that are cut by their first axis


def logits(
    model: Decoder, weights: ParamTree, mesh: Mesh | None, page_dtype: str | None = None
) -> np.ndarray[Any, Any]:
    layout = page_layout(model.layers, 4, TOKENS, jnp.float32, mesh, max_groups=1, page_dtype=page_dtype)

    @jax.jit
    def run(weights: ParamTree, pages: list[Any]) -> jax.Array:
        context = TokenContext(jnp.asarray(prompt(TOKENS, model.vocab_size)), jnp.arange(TOKENS))
        states = PagedStates(layout, pages, [one_row(jnp.asarray([[2, 1, 3]]), context.positions)])
        hidden, _ = model.forward(weights, context, states, PlatformOps(attend_pages))
        return model.logits(weights, hidden)

    pages = layout.empty(num_pages=4)
    if mesh is not None:
        keys, *_ = pages[0]
        scales = pages[0][2:]
        for array, heads in ((keys, 2), *((scale, 1) for scale in scales)):
            assert array.addressable_shards[0].data.shape[heads] * mesh.size == model.layers[0].kv_heads
    return np.asarray(run(weights, pages))


def main(name: str) -> None:
    # Two keys for eight queries: beyond two devices, each key is on several.
    is_latent = "kv_lora_rank" in CASES[name]  # one key for all queries
    num_keys = 1 if is_latent else 2
    sizes: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 8 if is_latent else 2, "head_dim": 8}
    if name not in OF_TWO_KINDS:
        sizes["num_hidden_layers"] = 1
    model = build_model({**CASES[name], **sizes})
    expected = logits(model, load_weights(model, NamedTensors(model), dtype="float32"), None)
    for num_devices in (2, 4, 8) if name == "llama-biases" else (2, 8):
        mesh = tensor_mesh(jax.devices()[:num_devices])
        assert key_copies(num_keys, 8 // num_keys, num_devices) == num_devices // num_keys
        cut = model.for_devices(num_devices)

        def placement(param: Param, mesh: jax.sharding.Mesh = mesh) -> jax.sharding.Sharding:
            return sharding(param.shape, param.axes, mesh)

        weights = load_weights(cut, NamedTensors(model), dtype="float32", placement=placement)
        layer = weights["layers"][0]
        split = layer["feed_forward"].get("gate_up")
        split = [] if split is None else [(split, len(split.shape) - 4)]
        heads = [(layer["attention"][part], 0) for part in QUERIES if part in layer["attention"]]
        for whole, dimension in (*heads, (layer["attention"]["out"], 1), *split):
            local = whole.values.addressable_shards[0].data
            assert local.shape[dimension] * num_devices == whole.shape[dimension], (name, whole.shape, local.shape)
        error = relative_error(logits(cut, weights, mesh), expected)
        print(f"{name}: {num_devices} devices, error {error:.1e}")
        assert error < 2e-5, (name, num_devices, error)
        if num_devices == 2 and model.layers[0].value_dim is None:
            alone = load_weights(model, NamedTensors(model), dtype="float32")
            pair = logits(cut, weights, mesh, "int8"), logits(model, alone, None, "int8")
            # Sums in another order may round a key to the next code.
            assert difference(model, "int8", *pair) < 0.02, name
            assert relative_error(pair[0], expected) > 1e-4, name
    for kind in ("int8", "fp8") if name in WITH_FP8 else ("int8",):
        check_quantized(name, kind, model, expected)


def difference(model: Decoder, kind: str, got: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    """That of the worst token where all stay near; that of most tokens where one may visit other experts, or where the
    next code is far off, as in fp8."""
    if kind == "int8" and not any(param.axes[0] == "experts" for param in leaves(model.params())):
        return relative_error(got, expected)
    return float(np.median(np.abs(got - expected).max(-1) / np.abs(expected).max(-1)))


def check_quantized(name: str, kind: Any, model: Decoder, expected: np.ndarray[Any, Any]) -> None:
    """Weights of eight bits, cut across devices, against the same on one."""
    found = []
    for num_devices in (1, 2):
        mesh = tensor_mesh(jax.devices()[:num_devices])

        def placement(param: Param, mesh: jax.sharding.Mesh = mesh) -> jax.sharding.Sharding:
            return sharding(param.shape, param.axes, mesh)

        cut = model.for_devices(num_devices)
        weights = load_weights(cut, NamedTensors(model), dtype="float32", quantize=kind, placement=placement)
        attention = weights["layers"][0]["attention"]
        queries = attention["qkv"] if "qkv" in attention else attention["query"]
        for array in (queries.codes, queries.scales):
            assert array.addressable_shards[0].data.shape[0] * num_devices == array.shape[0]
        found.append(logits(cut, weights, mesh))
    # Sums in another order may round an activation to the next code.
    assert difference(model, kind, found[1], found[0]) < 0.02, name
    # A token that visits other experts has other logits altogether; most do not.
    errors = np.abs(found[0] - expected).max(-1) / np.abs(expected).max(-1)
    assert 0 < np.median(errors) < 0.7, (name, errors)
    print(f"{name}: {kind} on two devices as on one")


if __name__ == "__main__":
    for case in sys.argv[1:]:
        main(case)
