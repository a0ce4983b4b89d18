"""The features of each family of models, read from the models that the tests build."""

from collections.abc import Callable
from pathlib import Path

from quire.engine.building.plan import layer_kinds
from quire.models.adapters import adapted_layers
from quire.models.checkpoint import leaves
from quire.models.params import Param
from quire.models.parts.decoder import Decoder
from quire.models.registry import FAMILIES, build_model
from quire.ops.attention.spec import AttentionSpec
from quire.settings.refusals import ModelTraits, refused_for
from tests.models.cases import CASES

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN = "<!-- This table is written by `make docs-reference`. -->\n"
END = "<!-- The end of the table. -->\n"
SOME = {"kv_cache_dtype": " of 8 bits", "reproducible": " on a GPU"}  # values that are refused
# A family that is another one with more beside its text.
SAME_TEXT = {"gemma3": "gemma3_text", "llama4": "llama4_text"}


def models_of(family: str) -> list[Decoder]:
    """The tiny models of a family, one for each of its options."""
    name = SAME_TEXT.get(family, family)
    return [build_model(config) for config in CASES.values() if config["model_type"] == name]


def _layers(models: list[Decoder]) -> str:
    specs = [spec for model in models for spec in model.layers]
    attention = [spec for spec in specs if isinstance(spec, AttentionSpec)]
    kinds = {
        "full": any(spec.sees_all and spec.value_dim is None for spec in attention),
        "window": any(spec.window is not None for spec in attention),
        "chunks": any(spec.chunk is not None for spec in attention),
        "sinks": any(spec.has_sinks for spec in attention),
        "latent": any(spec.value_dim is not None for spec in attention),
        "recurrent": not all(spec.kind.in_pages for spec in specs),
    }
    return ", ".join(kind for kind, has in kinds.items() if has)


def _experts(models: list[Decoder]) -> str:
    return "yes" if any(param.is_of_experts for model in models for param in _params(model)) else ""


def _quantised(models: list[Decoder]) -> str:
    """The matrices of quantised checkpoints that are read: those that are stored by output."""
    turned = [param for model in models for param in _params(model) if param.transposes and not param.is_widened]
    if not turned:
        return "all but mxfp4"
    sources = [tensor for model in models for param in _params(model) for tensor in param.sources]
    if any(tensor.name.endswith("_proj_bias") for tensor in sources):  # as experts of four bits are
        return "mxfp4; others apart from experts"
    if all(param.apart is not None for param in turned):
        return "all but mxfp4; experts that are stored one by one"
    return "all but mxfp4, apart from experts" if all(param.is_of_experts for param in turned) else ""


def _adapters(models: list[Decoder]) -> str:
    adapted = [param for model in models for layer in adapted_layers(model) for param in leaves(layer)]
    names = {tensor.name.removesuffix(".weight").rpartition(".")[2] for param in adapted for tensor in param.sources}
    return ", ".join(f"`{name}`" for name in sorted(names))


def _prefix_cache(models: list[Decoder]) -> str:
    is_paged = all(spec.kind.in_pages for model in models for spec in model.layers)
    return "yes" if is_paged else "with snapshots"


def _refused(models: list[Decoder]) -> str:
    kinds = tuple(dict.fromkeys(kind for model in models for kind in layer_kinds(model)))
    refused = refused_for(ModelTraits("a model", kinds), "gpu")
    return ", ".join(f"`--{name.replace('_', '-')}`{SOME.get(name, '')}" for name in refused if name != "snapshots")


def _tensor_parallelism(models: list[Decoder]) -> str:
    """The heads and features of two devices."""
    cut = {axis for model in models for param in _params(model.for_devices(2)) for axis in param.axes}
    return "yes" if {"kv_heads", "mlp"} <= cut else ""


COLUMNS: dict[str, Callable[[list[Decoder]], str]] = {
    "layers": _layers,
    "experts": _experts,
    "quantised checkpoints": _quantised,
    "prefix cache": _prefix_cache,
    "refused": _refused,
    "tensor parallelism": _tensor_parallelism,
    "adapters of": _adapters,
}


def table() -> str:
    lines = [f"| `model_type` | {' | '.join(COLUMNS)} |", f"|---|{'---|' * len(COLUMNS)}"]
    for family in FAMILIES:
        models = models_of(family)
        lines.append(f"| `{family}` | {' | '.join(column(models) for column in COLUMNS.values())} |")
    return "\n".join(lines) + "\n"


def models_page() -> str:
    """The page of models with the table as it is now."""
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    return before + BEGIN + "\n" + table() + "\n" + END + rest.split(END)[1]


def _params(model: Decoder) -> list[Param]:
    return leaves(model.params()["layers"])
