"""Routes, fields and gauges for the routers and endpoint pickers that stand before several servers."""

import re

import pytest

from quire.server.observe.exposition import Exposition
from quire.server.settings import ServerSettings
from tests import web
from tests.server.processes import Served, wait_until

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "temperature": 0}
TEXT = {"prompt": "hello", "max_tokens": 4, "temperature": 0}
ROUTES = [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)]
NO_EFFECT = {
    "no_stop_trim": False,
    "separate_reasoning": True,
    "stream_reasoning": True,
    "include_reasoning": True,
    "return_hidden_states": False,
}
# The body that sglang-router 0.3.2 makes of a plain chat, and vllm-router 0.1.16 of a prompt of token ids.
SGLANG_CHAT = {
    "messages": [{"role": "user", "content": "hello"}], "model": "fake", "logprobs": False, "max_completion_tokens": 4,
    "stream": False, "no_stop_trim": False, "ignore_eos": False, "continue_final_message": False,
    "skip_special_tokens": True, "separate_reasoning": True, "stream_reasoning": True, "return_hidden_states": False,
}  # fmt: skip
VLLM_TEXT = {
    "model": "fake", "prompt": [1, 2, 3], "max_tokens": 4, "stream": False, "echo": False, "no_stop_trim": False,
    "ignore_eos": False, "skip_special_tokens": True, "return_hidden_states": False,
}  # fmt: skip


@pytest.fixture
def reported(served) -> str:
    """The address of a server whose engine has reported its statistics."""
    wait_until(lambda: "vllm:" in web.get(f"{served.url}/metrics").text)
    return served.url


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", SGLANG_CHAT), ("/v1/completions", VLLM_TEXT)])
def test_what_routers_make_of_a_request_is_answered_without_a_word(server, path, body):
    answer = web.post(server.url + path, json=body | {"model": server.model.name})
    assert answer.status_code == 200, answer.text
    assert "x-quire-ignored-fields" not in answer.headers


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_fields_of_routers_pass_where_they_ask_for_nothing_also_with_strict(make_server, path, body):
    strict = make_server(settings=ServerSettings(strict=True))
    answer = web.post(strict.url + path, json=body | NO_EFFECT)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize("field", NO_EFFECT)
def test_fields_of_routers_are_refused_by_name_where_they_ask_for_something(server, path, body, field):
    refused = web.post(server.url + path, json=body | {field: not NO_EFFECT[field]})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == field


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
def test_a_router_learns_the_name_and_the_limits(reported, path):
    info = web.get(reported + path).json()
    assert info["served_model_name"] == info["model_id"] == "fake"
    assert info["context_length"] == info["max_req_input_len"] == 512
    assert info["max_total_num_tokens"] == 3999 * 4
    assert info["max_running_requests"] == 16
    assert info["dp_size"] == 1


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
def test_a_router_learns_what_kind_of_model_it_is(server, path):
    info = web.get(server.url + path).json()
    assert info["served_model_name"] == server.model.name
    assert info["is_generation"] is True
    assert info["has_image_understanding"] is False


def test_routers_learn_this_without_a_key(make_server):
    locked = make_server(settings=ServerSettings(api_key="secret"))
    paths = ("/server_info", "/model_info", "/get_load", "/health_generate")
    assert [web.get(locked.url + path).status_code for path in paths] == [200] * len(paths)
    assert web.post(f"{locked.url}/v1/completions", json=TEXT).status_code == 401


def labelled(text: str) -> dict[str, float]:
    return {name: float(value) for name, value in re.findall(r"^(vllm:\S+) (\S+)$", text, re.MULTILINE)}


def adapters_in_use(found: dict[str, float]) -> list[tuple[dict[str, str], float]]:
    """The labels of the gauges from which a picker learns the adapters of a server, and their values."""
    gauges = [(name, value) for name, value in found.items() if name.startswith("vllm:lora_requests_info")]
    return [(dict(re.findall(r'(\w+)="([^"]*)"', name)), value) for name, value in gauges]


def test_load_and_gauges_follow_what_runs(model_folder, tmp_path):
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "adapter_config.json").write_text("{}")
    served = Served(model_folder, "step_s=0.05", f"adapters={tmp_path}").wait()
    name = '{model_name="fake"}'

    def gauges() -> dict[str, float]:
        return labelled(web.get(f"{served.url}/metrics").text)

    def load() -> dict[str, int]:
        return next(iter(web.get(f"{served.url}/get_load").json()), {})

    try:
        wait_until(lambda: load().get("num_reqs") == 0)
        idle = gauges()
        assert idle[f"vllm:num_requests_running{name}"] == idle[f"vllm:kv_cache_usage_perc{name}"] == 0
        assert idle['vllm:cache_config_info{model_name="fake",block_size="4",num_gpu_blocks="3999"}'] == 1
        ((labels, then),) = adapters_in_use(idle)
        assert labels == {"max_lora": "2", "running_lora_adapters": "", "waiting_lora_adapters": ""}
        body = {"model": "first", "prompt": "hello", "max_tokens": 500, "ignore_eos": True, "stream": True}
        with web.Client(base_url=served.url) as client, client.stream("POST", "/v1/completions", json=body):
            wait_until(lambda: load()["num_reqs"] == 1 and load()["num_tokens"] > 0)
            wait_until(lambda: gauges()[f"vllm:num_requests_running{name}"] == 1)
            wait_until(lambda: gauges()[f"vllm:kv_cache_usage_perc{name}"] > 0)
            ((labels, now),) = adapters_in_use(gauges())
            assert labels == {"max_lora": "2", "running_lora_adapters": "first", "waiting_lora_adapters": ""}
            assert 1.5e9 < then <= now, "pickers believe the labels with the highest value"
    finally:
        served.stop()


def test_the_text_of_a_label_is_escaped():
    out = Exposition()
    out.gauge("a", "b", 1, {"model_name": 'C:\\m "x"\ny'})
    assert out.text().decode().splitlines()[-1] == r'a{model_name="C:\\m \"x\"\ny"} 1'
