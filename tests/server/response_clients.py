"""Clients of /v1/responses."""

import openai

from tests import web
from tests.server.running import RunningServer


def client_of(server: RunningServer, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def raw(server: RunningServer, **fields):
    return web.post(f"{server.url}/v1/responses", json={"input": "hi", "max_output_tokens": 4} | fields)


def wait_for(client: openai.OpenAI, server: RunningServer, response_id: str):
    server.wait_until(lambda: client.responses.retrieve(response_id).status not in ("queued", "in_progress"))
    return client.responses.retrieve(response_id)
