"""openapi-python-client, which writes a client out of the server's OpenAPI document."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

httpx = pytest.importorskip("httpx")
pytest.importorskip("openapi_python_client")


@pytest.fixture(scope="module")
def document(url):
    return httpx.get(f"{url}/api-doc/openapi.json").json()


@pytest.fixture(scope="module")
def package(document, tmp_path_factory):
    """The generated package, without a word about routes that were left out."""
    folder = tmp_path_factory.mktemp("generated")
    (folder / "openapi.json").write_text(json.dumps(document))
    programs = Path(sys.executable).parent  # it runs ruff
    asked = [sys.executable, "-m", "openapi_python_client", "generate", "--path", "openapi.json", "--fail-on-warning"]
    path = {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(asked, cwd=folder, env=os.environ | path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stdout + done.stderr
    sys.path.insert(0, str(folder / "quire-client"))
    yield "quire_client"
    sys.path.pop(0)


def module_of(package, operation):
    name = re.sub(r"\W", "_", operation["operationId"])
    return importlib.import_module(f"{package}.api.default.{name}")


def test_every_route_has_a_function(package, document):
    for methods in document["paths"].values():
        for operation in methods.values():
            assert callable(module_of(package, operation).sync_detailed)


def test_the_generated_client_chats(package, document, url, key, model):
    client = importlib.import_module(package).AuthenticatedClient(base_url=url, token=key, timeout=100)
    models = importlib.import_module(f"{package}.models")
    asked = {"model": model, "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8}
    body = models.ChatRequest.from_dict(asked)
    send = module_of(package, document["paths"]["/v1/chat/completions"]["post"]).sync
    answer = send(client=client, body=body)
    assert isinstance(answer, models.ChatCompletion), answer
    assert answer.choices[0].message.content
    refused = send(client=client, body=models.ChatRequest.from_dict(asked | {"max_tokens": 0}))
    assert isinstance(refused, models.OpenAIError)
    assert refused.error.param == "max_tokens"


def test_the_generated_client_lists_models(package, document, url, key, model):
    client = importlib.import_module(package).AuthenticatedClient(base_url=url, token=key, timeout=100)
    listed = module_of(package, document["paths"]["/v1/models"]["get"]).sync(client=client)
    assert [one.id for one in listed.data] == [model]
