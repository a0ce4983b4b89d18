from dataclasses import replace
from typing import Any

import pytest

from quire.errors import InvalidSetting
from quire.executor.host.block_saves import MAX_SAVING_BYTES
from quire.executor.host.stacks import MAX_UNPLACED_BYTES
from quire.settings.adapters import resolve_max_loras
from quire.settings.choice import Choice
from quire.settings.config import Config
from quire.settings.dtypes import resolve_dtype, resolve_kv_cache_dtype, resolve_quantize
from quire.settings.memory import MAX_HOST_CACHE_BYTES, MOVING_BYTES, PAGE_STEP, RESERVE_BYTES, resolve_pages
from quire.settings.resolve import MAX_RESERVED, Facts, resolve, resolve_max_queued, resolve_max_step_ms


@pytest.mark.parametrize(
    ("platform", "value"),
    [("cpu", "float32"), ("gpu", "bfloat16"), ("cuda", "bfloat16"), ("rocm", "bfloat16"), ("tpu", "bfloat16")],
)
@pytest.mark.parametrize("asked", [None, "auto"])
def test_the_dtype_suits_the_platform_and_says_why(platform: str, value: str, asked: str | None) -> None:
    choice = resolve_dtype(platform, asked)
    assert choice.value == value
    assert str(choice).startswith(f"dtype = {value} ({platform}: ")


@pytest.mark.parametrize("asked", ["float32", "bfloat16", "float16"])
def test_a_dtype_that_was_asked_for_is_taken(asked: str) -> None:
    assert str(resolve_dtype("cpu", asked)) == f"dtype = {asked} (asked for)"


def test_an_unknown_dtype_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidSetting, match="dtype is 'int4'; it can be float32, bfloat16, float16 or auto"):
        resolve_dtype("cpu", "int4")


def test_an_unknown_platform_must_be_told_the_dtype() -> None:
    with pytest.raises(InvalidSetting, match="platform 'abacus'"):
        resolve_dtype("abacus", None)
    assert resolve_dtype("abacus", "float32").value == "float32"


@pytest.mark.parametrize("asked", ["none", "int8"])
def test_quantising_that_was_asked_for_is_done(asked: str) -> None:
    assert str(resolve_quantize("cpu", Config(quantize=asked), fast_int8=False)) == f"quantize = {asked} (asked for)"
    assert str(resolve_quantize("gpu", Config(quantize=asked), fast_int8=False)) == f"quantize = {asked} (asked for)"


def test_fp8_is_made_of_plain_weights_and_left_where_a_checkpoint_has_it() -> None:
    asked = Config(quantize="fp8")
    assert str(resolve_quantize("gpu", asked, fast_int8=False)) == "quantize = fp8 (asked for)"
    on_cpu = resolve_quantize("cpu", asked, fast_int8=True)
    assert (on_cpu.value, on_cpu.is_automatic) == ("fp8", True)  # logged: int8 is faster there
    assert resolve_quantize("gpu", asked, False, "fp8, blocks of 128 x 128").value == "none"
    with pytest.raises(InvalidSetting, match="quantize is 'fp8'; the checkpoint is gptq, 4 bits"):
        resolve_quantize("gpu", asked, False, "gptq, 4 bits")


@pytest.mark.parametrize("asked", [None, "auto"])
def test_a_cpu_multiplies_in_eight_bits_where_it_has_a_fast_kernel_and_nothing_else_was_asked_for(
    asked: str | None,
) -> None:
    assert resolve_quantize("cpu", Config(quantize=asked), fast_int8=True).value == "int8"
    assert resolve_quantize("cpu", Config(quantize=asked), fast_int8=False).value == "none"
    assert resolve_quantize("gpu", Config(quantize=asked), fast_int8=False).value == "none"
    for other in (Config(quantize=asked, dtype="float32"), Config(quantize=asked, tensor_parallel=2)):
        choice = resolve_quantize("cpu", other, fast_int8=True)
        assert choice.value == "none"
        assert "; without it int8" in choice.reason


def test_quantising_that_is_unknown_or_not_for_the_platform_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="quantize is 'int4'; it can be none, int8, fp8 or auto"):
        resolve_quantize("cpu", Config(quantize="int4"), fast_int8=True)
    for asked in ("int8", "fp8"):
        with pytest.raises(InvalidSetting, match=f"quantize = {asked} is for CPUs and GPUs; on a tpu it can be none"):
            resolve_quantize("tpu", Config(quantize=asked), fast_int8=False)


@pytest.mark.parametrize(
    ("asked", "decided"),
    [("fp8_e4m3", "fp8_e4m3"), ("fp8_e4m3fn", "fp8_e4m3"), ("fp8", "fp8_e4m3"), ("int8", "int8"), ("auto", "auto")],
)
def test_a_cache_has_the_type_that_was_asked_for_by_any_of_its_names(asked: str, decided: str) -> None:
    for platform in ("cpu", "gpu", "cuda"):
        assert resolve_kv_cache_dtype(platform, asked, "bfloat16").value == decided


def test_types_of_a_cache_that_are_unknown_or_not_for_the_platform_are_refused() -> None:
    with pytest.raises(InvalidSetting, match="kv_cache_dtype is 'fp4'; it can be fp8_e4m3, int8, bfloat16 or auto"):
        resolve_kv_cache_dtype("gpu", "fp4", "bfloat16")
    with pytest.raises(InvalidSetting, match="kv_cache_dtype is 'fp8_e5m2': two bits of fraction are too few"):
        resolve_kv_cache_dtype("gpu", "fp8_e5m2", "bfloat16")
    with pytest.raises(InvalidSetting, match="kv_cache_dtype = int8 is for CPUs and GPUs; on a tpu it can be auto"):
        resolve_kv_cache_dtype("tpu", "int8", "bfloat16")


def test_a_cache_has_the_type_that_the_checkpoint_asks_for_unless_another_is() -> None:
    facts = replace(FACTS, platform="gpu", cache_dtype="fp8_e4m3")
    for asked, decided in ((None, "fp8_e4m3"), ("auto", "fp8_e4m3"), ("int8", "int8"), ("bfloat16", "bfloat16")):
        resolved = resolve(Config("m", kv_cache_dtype=asked), facts)
        assert resolved.kv_cache_dtype == decided
        assert resolved.page_dtype == {"fp8_e4m3": "float8_e4m3fn"}.get(decided, decided)
    older = replace(facts, fp8_refusal="needs compute capability 8.9; this GPU has 8.6")
    assert resolve(Config("m"), older).kv_cache_dtype == "bfloat16"
    assert resolve(Config("m"), replace(facts, platform="tpu")).kv_cache_dtype == "bfloat16"
    with pytest.raises(InvalidSetting, match="kv_cache_dtype is 'float16'; it can be fp8_e4m3, int8, bfloat16 or auto"):
        resolve(Config("m", kv_cache_dtype="float16"), facts)


def test_a_cache_in_fp8_is_refused_on_gpus_that_do_not_convert_it() -> None:
    facts = replace(FACTS, platform="gpu")
    assert resolve(Config("m", kv_cache_dtype="fp8"), facts).kv_cache_dtype == "fp8_e4m3"
    older = replace(facts, fp8_refusal="needs compute capability 8.9; this GPU has 8.6")
    with pytest.raises(InvalidSetting, match=r"kv_cache_dtype = fp8 needs .* 8\.9; .* 8\.6: it can be int8 or auto"):
        resolve(Config("m", kv_cache_dtype="fp8"), older)
    assert resolve(Config("m", kv_cache_dtype="int8"), older).kv_cache_dtype == "int8"


GIB = 2**30
FACTS = Facts(platform="cpu", num_devices=2, memory_bytes=16 * GIB, max_positions=8192, weight_bytes=GIB)
PAGE_BYTES = 16 * 2**15


def pages(
    config: Config, facts: Facts = FACTS, step_bytes: int = 0, longest: int | None = None, page_numbers: int = 0
) -> Choice[int]:
    """`longest`: pages of a sequence of max_total_tokens; of a model without windows if not given."""
    resolved = resolve(config, facts)
    longest = longest or -(-resolved.max_total_tokens // resolved.page_size)
    return resolve_pages(config, resolved, facts, step_bytes, PAGE_BYTES, longest, page_numbers=page_numbers)


def test_a_gpu_has_no_more_pages_than_its_kernels_can_number() -> None:
    facts = replace(FACTS, platform="gpu", memory_bytes=140 * GIB)
    many = pages(Config(), facts).value
    assert many > 2**16
    few = pages(Config(), facts, page_numbers=2**15)
    assert 2**15 * few.value < 2**31 <= 2**15 * (few.value + 2 * PAGE_STEP)
    assert "kernels" in few.reason
    with pytest.raises(InvalidSetting, match="num_pages is 65536; kernels reach 65535 pages"):
        pages(Config(num_pages=2**16), facts, page_numbers=2**15)
    assert pages(Config(), FACTS, page_numbers=2**30).value == pages(Config(), FACTS).value  # none are kernels of a GPU


def test_choices_that_were_asked_for_are_not_automatic() -> None:
    choices = {choice.name: choice for choice in resolve(Config(page_size=8), FACTS).choices}
    assert not choices["page_size"].is_automatic
    assert choices["max_batch_size"].is_automatic


@pytest.mark.parametrize(
    ("config", "facts", "line"),
    [
        (Config(), FACTS, "4096 (CPU default; the model allows 8192: --max-total-tokens 8192)"),
        (Config(), replace(FACTS, max_positions=2048), "2048 (all positions of the model)"),
        (Config(max_total_tokens=100), FACTS, "100 (asked for)"),
    ],
)
def test_the_longest_sequence_is_logged_with_the_way_to_a_longer_one(config: Config, facts: Facts, line: str) -> None:
    assert f"max_total_tokens = {line}" in [str(choice) for choice in resolve(config, facts).choices]


def test_a_single_sequence_gets_the_pages_it_can_use_and_no_more() -> None:
    choice = pages(Config(max_batch_size=1))
    assert 4096 // 16 + 1 <= choice.value <= 4096 // 16 + 1 + PAGE_STEP
    assert choice.reason == "room for 1 sequence of max_total_tokens"


def test_a_host_keeps_memory_for_itself() -> None:
    choice = pages(Config(max_batch_size=100))
    assert MAX_HOST_CACHE_BYTES - PAGE_STEP * PAGE_BYTES < choice.value * PAGE_BYTES <= MAX_HOST_CACHE_BYTES


def test_on_other_devices_weights_the_largest_step_and_a_reserve_come_first() -> None:
    facts = replace(FACTS, platform="gpu", memory_bytes=int(8 * GIB / 0.95) + 1)
    config = Config(max_total_tokens=8192, page_size=16)
    choice = pages(config, facts, step_bytes=GIB)
    left = 8 * GIB - GIB - GIB - RESERVE_BYTES
    assert left - PAGE_STEP * PAGE_BYTES < choice.value * PAGE_BYTES <= left
    assert choice.reason.startswith(
        "8.0 GiB allowed - 1.0 GiB weights - 1.0 GiB largest step - 256.0 MiB reserve = 5.8"
    )


@pytest.mark.parametrize("asked", [None, 0.2, 0.45, 0.94, 1.0])
def test_pages_fill_the_share_of_a_gpu_that_its_engine_has_taken(asked: float | None) -> None:
    taken = min(asked or 1.0, MAX_RESERVED)
    facts = replace(FACTS, platform="gpu", memory_bytes=int(80 * GIB * taken), reserved_fraction=taken)
    limit = resolve(Config(memory_fraction=asked), facts).memory_limit_bytes
    assert limit == pytest.approx(0.95 * taken * 80 * GIB, abs=2)
    of_variable = replace(facts, memory_bytes=int(80 * GIB * 0.94), reserved_fraction=0.94)  # which a user has set
    assert resolve(Config(memory_fraction=asked), of_variable).memory_limit_bytes == pytest.approx(limit, abs=2)


def test_a_gpu_keeps_memory_for_pages_on_their_way_to_the_host() -> None:
    gpu = replace(FACTS, platform="gpu")
    settings: dict[str, Any] = {"max_total_tokens": 8192, "page_size": 16, "max_batch_size": 100}
    without, beside = (pages(Config(host_cache_gib=gib, **settings), gpu) for gib in (0.0, 4.0))
    assert abs((without.value - beside.value) * PAGE_BYTES - MOVING_BYTES) < PAGE_STEP * PAGE_BYTES
    # Those that are put into place, their copy in the program that does it, those fetched meanwhile, and those that go
    # to the host.
    assert MOVING_BYTES == 3 * MAX_UNPLACED_BYTES + MAX_SAVING_BYTES


@pytest.mark.parametrize("spare", [0, 1, PAGE_STEP - 1])
def test_what_just_fits_is_not_refused_for_the_sake_of_a_round_number(spare: int) -> None:
    needed = 4096 // 16 + 1
    limit = FACTS.weight_bytes + RESERVE_BYTES + (needed + spare) * PAGE_BYTES
    facts = replace(FACTS, memory_bytes=limit)
    assert pages(Config(memory_fraction=1.0), facts).value >= needed
    with pytest.raises(InvalidSetting, match="256 pages of 16 tokens do not hold one sequence"):
        pages(Config(memory_fraction=1.0), replace(facts, memory_bytes=limit - (spare + 1) * PAGE_BYTES))


def test_a_sequence_that_fits_by_its_windows_is_not_refused() -> None:
    limit = FACTS.weight_bytes + RESERVE_BYTES + 100 * PAGE_BYTES
    facts = replace(FACTS, memory_bytes=limit)
    with pytest.raises(InvalidSetting, match=r"100 pages of 16 tokens do not hold one sequence .* which needs 257"):
        pages(Config(memory_fraction=1.0), facts)
    assert pages(Config(memory_fraction=1.0), facts, longest=99).value == 100


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            Config(num_pages=20),
            "20 pages of 16 tokens do not hold one sequence of max_total_tokens = 4096, .* needs 257",
        ),
        (Config(num_pages=10**6), r"num_pages = 1000000 needs 488\.3 GiB: 8\.0 GiB allowed - 1\.0 GiB weights"),
        (Config(memory_fraction=0.01), r"0 pages of 16 tokens .*163\.8 MiB allowed - 1\.0 GiB weights"),
        (Config(memory_fraction=1.5), "memory_fraction is 1.5; it must be above 0 and at most 1"),
        (Config(max_total_tokens=9000), "max_total_tokens is 9000; the model has 8192 positions"),
        (Config(tensor_parallel=3), "tensor_parallel is 3; there are 2 devices"),
        (Config(tensor_parallel=0), "tensor_parallel is 0; it must be at least 1"),
        (Config(lookahead=-1), "lookahead is -1; it must be at least 0"),
        (Config(num_pages=1), "num_pages is 1; it must be at least 2"),
        (Config(max_waiting_tokens=-1), "max_waiting_tokens is -1; it must be at least 0"),
        (Config(waiting_served_ratio=-0.5), "waiting_served_ratio is -0.5; it must be at least 0"),
        (Config(waiting_served_ratio=float("nan")), "waiting_served_ratio is nan; it must be at least 0"),
        (Config(max_total_tokens=1), "max_total_tokens is 1; it must be at least 2"),
        (Config(max_batch_total_tokens=1), "max_batch_total_tokens is 1; it must be at least 2"),
        (
            Config(max_total_tokens=2000, max_batch_total_tokens=1999),
            "max_total_tokens is 2000; it must be at most max_batch_total_tokens, 1999",
        ),
        (Config(max_batch_size=16_385), "max_batch_size is 16385; it must be at most 16384"),
        (Config(random_seed=2**63), "random_seed is 9223372036854775808; it must be at most 9223372036854775807"),
        (Config(random_seed=-(2**63) - 1), "random_seed is -9223372036854775809; it must be at least -92233720"),
    ],
)
def test_what_cannot_be_is_refused_with_the_arithmetic(config: Config, message: str) -> None:
    with pytest.raises(InvalidSetting, match=message):
        pages(config)


def test_one_sequence_has_no_more_tokens_than_all_may_have_together() -> None:
    """Else an answer as long as fits, which a chat is by default, would be refused as too long."""
    resolved = resolve(Config("m", max_batch_total_tokens=1000), FACTS)
    assert resolved.max_total_tokens == 1000
    choices = [str(choice) for choice in resolved.choices]
    assert "max_total_tokens = 1000 (max_batch_total_tokens: one sequence has no more)" in choices
    assert resolve(Config("m", max_batch_total_tokens=10**6), FACTS).max_total_tokens == 4096
    assert resolve(Config("m", max_batch_total_tokens=1000, max_total_tokens=900), FACTS).max_total_tokens == 900


def test_a_server_bounds_what_waits_and_says_why() -> None:
    few, many = (resolve_max_queued(Config(model="m"), size) for size in (32, 1024))
    assert str(few) == "max_queued = 4096 (twice what one HTTP worker lets in by default)"
    assert str(many).startswith("max_queued = 16384 (16 batches; ")
    assert resolve_max_queued(Config(model="m", max_queued=7), 32).value == 7


def test_a_server_bounds_the_time_of_a_step_by_platform_and_says_why() -> None:
    by_platform = {one: resolve_max_step_ms(Config(model="m"), one) for one in ("cpu", "cuda", "gpu", "elsewhere")}
    assert {name: choice.value for name, choice in by_platform.items()} == {
        "cpu": 500.0, "cuda": 24.0, "gpu": 24.0, "elsewhere": 500.0,
    }  # fmt: skip
    assert str(by_platform["gpu"]).startswith("max_step_ms = 24.0 (GPU default: prompts are cut")
    assert resolve_max_step_ms(Config(model="m", max_step_ms=0.0), "gpu").value == 0


@pytest.mark.parametrize(
    ("config", "ratio", "tokens"),
    [
        (Config(), 0, 0),
        (Config(waiting_served_ratio=0.5), 0.5, 20),
        (Config(waiting_served_ratio=0.5, max_waiting_tokens=5), 0.5, 5),
        (Config(waiting_served_ratio=0.5, max_waiting_tokens=0), 0.5, 0),
        (Config(max_waiting_tokens=7), 0.3, 7),
        (Config(max_waiting_tokens=7, waiting_served_ratio=0.0), 0, 7),
        (Config(waiting_served_ratio=0.0), 0, 0),
    ],
)
def test_half_a_rule_of_waiting_is_completed_as_in_text_generation_inference(
    config: Config, ratio: float, tokens: int
) -> None:
    resolved = resolve(config, FACTS)
    assert (resolved.waiting_served_ratio, resolved.max_waiting_tokens) == (ratio, tokens)


def test_what_completes_a_rule_of_waiting_is_told() -> None:
    def lines(**settings: Any) -> list[str]:
        return [line for line in map(str, resolve(Config(**settings), FACTS).choices) if "waiting" in line]

    reason = "as in text-generation-inference, where"
    told = f"max_waiting_tokens = 20 ({reason} only waiting_served_ratio is given)"
    assert told in lines(waiting_served_ratio=0.5)
    assert f"waiting_served_ratio = 0.3 ({reason} only max_waiting_tokens is given)" in lines(max_waiting_tokens=7)
    assert not lines()


def test_adapters_that_are_given_or_may_come_have_room() -> None:
    assert resolve_max_loras(Config(max_loras=4, adapter_folder="adapters"), 0).value == 4  # type: ignore[arg-type]
    assert resolve_max_loras(Config(max_loras=4), 2).value == 2


@pytest.mark.parametrize(
    ("gib", "served", "offline"),
    [(1, 4, 4), (9, 1, 2), (16, 1, 1)],
)
def test_a_burst_is_as_long_as_starting_steps_of_such_a_model_asks_for(gib: int, served: int, offline: int) -> None:
    facts = replace(FACTS, platform="gpu", memory_bytes=141 * 2**30, weight_bytes=gib * 2**30)
    found = [resolve(Config(), facts, is_served).max_burst for is_served in (True, False)]
    assert found == [served, offline]
    assert resolve(Config(max_burst=3), facts).max_burst == 3
    assert resolve(Config(page_size=1), facts).max_burst == 1
    on_cpu = replace(facts, platform="cpu")
    assert [resolve(Config(), on_cpu, is_served).max_burst for is_served in (True, False)] == [1, 1]
