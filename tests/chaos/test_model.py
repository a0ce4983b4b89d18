"""The same on JAX: a small model, whose answers must be those that it gave when nothing went wrong."""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.chaos.asking import Asking
from tests.chaos.clients import Heard, stream_all
from tests.chaos.conftest import LONG
from tests.chaos.faulty import Mark
from tests.chaos.server import Server
from tests.tiny_chat_model import CONFIG, SIZES, byte_tokenizer, program_folder, write_tiny_chat_model

CULPRIT = 9
POISON = "~"  # the model's numbers for this token are none


def body(number: int) -> dict[str, Any]:
    never = {"logit_bias": {str(poison_id()): -100}}
    return {"prompt": f"number {number}", "max_tokens": 48, "temperature": number % 2, "seed": number} | never


def poison_id() -> int:
    return int(byte_tokenizer().encode(POISON).ids[0])


BODIES = [body(number) for number in range(16)]


def write_poisoned_model(folder: Path) -> str:
    """Weights as drawn for other small models, but for one token's embedding."""
    write_tiny_chat_model(folder, tie_word_embeddings=False)
    draw = np.random.default_rng(1).standard_normal
    embed, mlp, vocabulary = (CONFIG[name] for name in ("hidden_size", "intermediate_size", "vocab_size"))
    head = embed // CONFIG["num_attention_heads"]
    shapes = {
        "model.embed_tokens": (vocabulary, embed),
        "model.layers.0.self_attn.q_proj": (embed, embed),
        "model.layers.0.self_attn.k_proj": (head, embed),
        "model.layers.0.self_attn.v_proj": (head, embed),
        "model.layers.0.self_attn.o_proj": (embed, embed),
        "model.layers.0.mlp.gate_proj": (mlp, embed),
        "model.layers.0.mlp.up_proj": (mlp, embed),
        "model.layers.0.mlp.down_proj": (embed, mlp),
        "lm_head": (vocabulary, embed),
    }
    tensors = {f"{name}.weight": draw(shape, np.float32) * 0.2 for name, shape in shapes.items()}
    norms = ("model.norm", "model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm")
    tensors |= {f"{name}.weight": np.ones(embed, np.float32) for name in norms}
    tensors["model.embed_tokens.weight"][poison_id()] = np.nan
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_poisoned_model(tmp_path_factory.mktemp("tiny"))


def start(model: str, programs: Path, **settings: object) -> Server:
    config = SIZES | {"max_batch_size": 16, "dtype": "float32", "cache_dir": str(programs)}
    return Server("model", model, config=config, settings={"restart_after_s": 10.0} | settings).wait()


@pytest.fixture(scope="module")
def server(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    one = start(model, program_folder(tmp_path_factory))
    yield one
    one.stop()


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> list[list[str]]:
    heard = asyncio.run(stream_all(server.url, BODIES))
    assert all(one.is_complete for one in heard)
    return [one.texts for one in heard]


def check(heard: list[Heard], undisturbed: list[list[str]], culprit: int | None = None) -> None:
    for number, one in enumerate(heard):
        if number != culprit:
            assert one.error is None, one.error
            assert one.texts == undisturbed[number], f"request {number}"
            assert one.is_complete


def test_thirty_two_streams_go_on_when_the_engine_is_killed(server, undisturbed):
    """Half of them wait for a slot."""
    asking = Asking(server, BODIES + BODIES)
    asking.wait_for_text()
    server.kill("quire-engine", number=signal.SIGKILL)
    check(asking.wait().heard, undisturbed + undisturbed)
    assert server.wait_until_idle()["quire_engine_restarts"] >= 1


def test_streams_go_on_with_the_other_of_two_engines(model, undisturbed, tmp_path_factory):
    """With the tokens that one engine gives."""
    server = start(model, program_folder(tmp_path_factory), data_parallel=2)
    try:
        server.wait_until_healthy()
        asking = Asking(server, BODIES + BODIES)
        asking.wait_for_text()
        server.kill("quire-engine", which=0, number=signal.SIGKILL)
        check(asking.wait().heard, undisturbed + undisturbed)
        assert server.wait_until_idle()["quire_engine_restarts"] == 1
    finally:
        server.stop()


def test_a_row_whose_logits_are_no_numbers_fails_alone(server, undisturbed):
    bodies = list(BODIES)
    bodies[CULPRIT] = bodies[CULPRIT] | {"prompt": f"number {POISON}"}
    heard = asyncio.run(stream_all(server.url, bodies))
    check(heard, undisturbed, CULPRIT)
    assert heard[CULPRIT].error is not None
    assert "logits are not finite" in heard[CULPRIT].error["error"]["message"]
    server.wait_for_log("logits are not finite")


def test_steps_shrink_when_the_device_has_no_memory_for_them_and_no_request_is_blamed(server, undisturbed):
    before = server.wait_until_idle()
    bodies = [one | {"seed": int(Mark.NO_MEMORY)} if number == CULPRIT else one for number, one in enumerate(BODIES)]
    heard = Asking.at_once(server, bodies).wait().heard
    check(heard, undisturbed, CULPRIT)
    assert heard[CULPRIT].is_complete
    after = server.wait_until_idle()
    # From 16 rows to 4, and less of prompts, where steps had some; fewer times where some of the 16 came later.
    assert after["quire_step_shrinks"] - before["quire_step_shrinks"] >= 1
    assert after["quire_faults_isolated"] == before["quire_faults_isolated"]
    assert after["quire_engine_restarts"] == before["quire_engine_restarts"]


@pytest.mark.parametrize(
    "mark",
    [Mark.AT_SUBMIT, Mark.AT_RESULT, pytest.param(Mark.KILLS, marks=LONG), pytest.param(Mark.HANGS, marks=LONG)],
    ids=lambda mark: mark.name,
)
def test_one_of_sixteen_fails_alone(server, undisturbed, mark):
    bodies = [one | {"seed": int(mark)} if number == CULPRIT else one for number, one in enumerate(BODIES)]
    heard = asyncio.run(stream_all(server.url, bodies))
    check(heard, undisturbed, CULPRIT)
    assert heard[CULPRIT].error is not None
    assert "the steps of this request fail" in heard[CULPRIT].error["error"]["message"]
    metrics = server.wait_until_idle()
    assert metrics["quire_late_compilations"] == 0
