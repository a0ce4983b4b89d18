"""Run by test_quantized_checkpoints_sharded.py with 4 devices: checkpoints of each kind, cut across them."""

import sys
from pathlib import Path

import jax

from quire.files.model_files import locate
from quire.models.checkpoint import load_weights, weights_like
from quire.models.formats.quantized_source import QuantizedSource, open_checkpoint
from quire.models.params import Param
from quire.models.registry import build_model
from quire.ops.sharding import sharding, tensor_mesh
from quire.ops.weights.coded import Coded
from tests.models.sharded import logits
from tests.models.tiny import relative_error


def main(folder: Path) -> None:
    files = locate(str(folder))
    whole, source = build_model(files.config), open_checkpoint(files)
    assert isinstance(source, QuantizedSource)
    expected = logits(whole, load_weights(whole, source, dtype="float32"), None)
    for num_devices in (2, 4):
        mesh = tensor_mesh(jax.devices()[:num_devices])
        model = whole.for_devices(num_devices)

        def placement(param: Param, mesh: jax.sharding.Mesh = mesh) -> jax.sharding.Sharding:
            return sharding(param.shape, param.axes, mesh)

        weights = load_weights(model, source, dtype="float32", placement=placement)
        like = weights_like(model, source, dtype="float32", placement=placement)
        assert jax.tree.all(
            jax.tree.map(lambda one, array: one.sharding == array.sharding and one.shape == array.shape, like, weights)
        )
        layer = weights["layers"][0]
        qkv, out = layer["attention"]["qkv"], layer["attention"]["out"]
        cut = [] if not isinstance(qkv, Coded) else [(qkv.codes, 0), (qkv.scales, 0)]
        if not hasattr(out, "codes"):  # experts alone are quantised
            gate_up = layer["feed_forward"]["gate_up"]
            cut = [(qkv.values, 0), (gate_up.codes, 1), (gate_up.scales, 1)]
        for array, axis in (*cut, (out.codes if hasattr(out, "codes") else out.values, 1)):
            assert array.addressable_shards[0].data.shape[axis] * num_devices == array.shape[axis], folder.name
        found = logits(model, weights, mesh)
        error = relative_error(found, expected)
        # Sums in another order may round an activation to the next code.
        assert error < (1e-5 if getattr(out, "rounding", None) is None else 0.02), (folder.name, num_devices, error)
        print(f"{folder.name}: {num_devices} devices, error {error:.1e}")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        main(Path(name))
