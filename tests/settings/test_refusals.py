"""The table of refusals: each line refuses what it is for, in one wording, and nothing else."""

from typing import Any, NamedTuple

import pytest

from quire.errors import InvalidSetting
from quire.layer_kind import ATTENTION, EXPERTS, LATENT_ATTENTION, RECURRENT, LayerKind
from quire.settings.config import Config
from quire.settings.refusals import CONFLICTS, Case, Conflict, ModelTraits, refuse, refused_for, settings_of


class Example(NamedTuple):
    settings: dict[str, Any]
    words: str  # that the refusal begins with
    platform: str | None = None
    kinds: tuple[LayerKind, ...] | None = None
    draft: tuple[LayerKind, ...] | None = None
    windows: str | None = None
    is_native: bool = True

    def case(self, **changes: Any) -> Case:
        model = None if self.kinds is None else ModelTraits("m", self.kinds, self.windows)
        draft = None if self.draft is None else ModelTraits("d", self.draft)
        return Case({"dtype": "float32"} | self.settings | changes, {}, self.platform, self.is_native, model, draft)


GPU: dict[str, Any] = {"reproducible": True}
EXAMPLES = [
    Example({"speculate": 3}, "speculate is 3; it does not go with the recurrent layers of m: ", kinds=(RECURRENT,)),
    Example(
        {"speculate": 3},
        "speculate is 3; it does not go with the recurrent layers of d, the draft_model: ",
        kinds=(ATTENTION,),
        draft=(RECURRENT, ATTENTION),
    ),
    Example(
        {"host_cache_gib": 0.5, "prefix_caching": True},
        "host_cache_gib is 0.5; it does not go with the recurrent layers of m: ",
        kinds=(ATTENTION, RECURRENT),
    ),
    Example(
        {"kv_cache_dtype": "int8"},
        "kv_cache_dtype is int8; it does not go with the latent attention layers of m: these are cached in dtype, "
        "which is more exact. Remedy: --kv-cache-dtype float32",
        kinds=(LATENT_ATTENTION,),
    ),
    *(
        Example(
            GPU,
            f"reproducible is True; it does not go with the {kind.layers} of m on a GPU: ",
            platform="gpu",
            kinds=(ATTENTION, kind),
        )
        for kind in (LATENT_ATTENTION, RECURRENT, EXPERTS)
    ),
    Example(
        {"snapshots": 0}, "snapshots is 0; it does not go with m, whose layers keep everything in pages: ", kinds=()
    ),
    Example(
        {"draft_model": "d", "speculate": 2},
        "draft_model is d; it does not go with the windows of all layers of m (window 7: 2 layers): ",
        kinds=(ATTENTION,),
        windows="window 7: 2 layers",
    ),
    Example({"draft_model": "d", "speculate": 0}, "draft_model is d; it needs speculate: "),
    Example(
        {"draft_model": "d", "speculate": 2, "tensor_parallel": 2},
        "draft_model is d; it does not go with tensor_parallel = 2: ",
    ),
    Example(GPU, "reproducible is True; it does not go with a tpu: ", platform="tpu"),
    Example(
        GPU | {"dtype": "bfloat16"},
        "reproducible is True; it does not go with dtype = bfloat16 on a CPU: ",
        platform="cpu",
    ),
    Example(
        GPU | {"tensor_parallel": 2},
        "reproducible is True; it does not go with tensor_parallel = 2 on a CPU: ",
        platform="cpu",
    ),
    Example(GPU, "reproducible is True; it needs the native library with all its parts: ", "cpu", is_native=False),
    *(
        Example(GPU | {name: value}, f"{name} is {shown}; it does not go with reproducible on a GPU: ", platform="gpu")
        for name, value, shown in (
            ("speculate", 4, "4"),
            ("tensor_parallel", 2, "2"),
            ("lora_adapters", ("a=b",), "('a=b',)"),
            ("adapter_folder", "/a", "/a"),
            ("max_loras", 2, "2"),
            ("max_burst", 2, "2"),
            ("page_size", 16, "16"),
        )
    ),
    *(
        Example({name: value, "prefix_caching": False}, f"{name} is {value}; it needs prefix_caching: ")
        for name, value in (("host_cache_gib", 1.0), ("cache_folder", "/p"), ("role", "decode"), ("snapshots", 2))
    ),
    *(
        Example({name: 4} | dict.fromkeys(("lora_adapters", "adapter_folder")), f"{name} is 4; it needs lora_adapters")
        for name in ("max_loras", "max_lora_rank")
    ),
    Example({"compile_processes": 1, "tensor_parallel": 2}, "compile_processes is 1; it does not go with tensor_"),
    Example({"data_parallel": 2, "group_size": 3}, "data_parallel is 2; it does not go with group_size = 3: "),
    Example({"data_parallel": 2, "role": "prefill"}, "data_parallel is 2; it does not go with role = prefill: "),
    *(
        Example({name: "it", "group_size": 2}, f"{name} is it; it does not go with group_size = 2: ")
        for name in (
            "lora_adapters", "adapter_folder", "max_loras", "draft_model", "host_cache_gib", "cache_folder", "role",
        )
    ),
]  # fmt: skip


def lines(case: Case) -> list[Conflict]:
    return [line for line in CONFLICTS if line.message(case) is not None]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.words[:60])
def test_what_does_not_go_together_is_refused_by_name_and_with_the_reason(example: Example) -> None:
    with pytest.raises(InvalidSetting) as refused:
        refuse(example.case())
    assert refused.value.message.startswith(example.words)
    (line,) = lines(example.case())
    off = {"snapshots": None, "max_loras": None, "max_lora_rank": None, "page_size": 32}.get(line.setting, 0)
    refuse(example.case(**{line.setting: off}))


def test_every_line_has_an_example() -> None:
    used = [line for example in EXAMPLES for line in lines(example.case())]
    assert not [line.setting for line in CONFLICTS if line not in used]


def test_nothing_is_refused_for_what_is_not_known_yet() -> None:
    refuse(Case({"speculate": 3, "reproducible": True, "host_cache_gib": 1.0, "snapshots": 2}))
    refuse(Case(settings_of(Config(speculate=3, reproducible=True, snapshots=2))))


def test_a_value_that_was_not_asked_for_is_told_with_its_origin() -> None:
    settings = {"kv_cache_dtype": "fp8_e4m3", "dtype": "bfloat16"}
    model = ModelTraits("m", (LATENT_ATTENTION,))
    case = Case(settings, {"kv_cache_dtype": "the checkpoint's kv_cache_scheme"}, model=model)
    with pytest.raises(InvalidSetting, match=r"^kv_cache_dtype is fp8_e4m3 \(the checkpoint's kv_cache_scheme\); it "):
        refuse(case)


def test_values_of_a_user_are_cut_in_a_message() -> None:
    with pytest.raises(InvalidSetting) as refused:
        refuse(Case({"cache_folder": "a\nb" * 10_000, "prefix_caching": False}))
    assert len(refused.value.message) < 300
    assert "\n" not in refused.value.message


def test_a_model_says_which_settings_it_does_not_have() -> None:
    assert set(refused_for(ModelTraits("m", (ATTENTION,)), "gpu")) == {"snapshots"}
    assert set(refused_for(ModelTraits("m", (ATTENTION, RECURRENT)), "cpu")) == {"speculate", "host_cache_gib"}
    assert set(refused_for(ModelTraits("m", (LATENT_ATTENTION,)), "gpu")) == {
        "kv_cache_dtype",
        "reproducible",
        "snapshots",
    }
