"""The parts of uvicorn that the server uses and uvicorn does not document.

`Connection` and `HttpServer` build on them. A version of uvicorn that lacks one of them, or calls it another way, fails
here by name.
"""

import asyncio
import inspect
from collections.abc import Callable

import pytest
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

# Methods that are overridden or called, and their parameters.
PROTOCOL_METHODS = {
    "connection_made": ["self", "transport"],
    "connection_lost": ["self", "exc"],
    "data_received": ["self", "data"],
    "eof_received": ["self"],
    "on_url": ["self", "url"],
    "on_header": ["self", "name", "value"],
    "on_headers_complete": ["self"],
    "on_message_begin": ["self"],
    "on_message_complete": ["self"],
    "send_400_response": ["self", "msg"],
    "timeout_keep_alive_handler": ["self"],
    "shutdown": ["self"],
    "pause_writing": ["self"],
    "resume_writing": ["self"],
    "_start_asgi_task": ["self", "cycle", "app"],
}
PROTOCOL_ATTRIBUTES = (
    "app",
    "parser",
    "loop",
    "transport",
    "flow",
    "scope",
    "headers",
    "cycle",
    "pipeline",
    "timeout_keep_alive_task",
)
CYCLE_ATTRIBUTES = (
    "scope", "transport", "keep_alive", "more_body", "response_started", "response_complete", "chunked_encoding",
    "expected_content_length", "disconnected", "message_event",
)  # fmt: skip
FLOW_ATTRIBUTES = ("read_paused", "write_paused")
SERVER_ATTRIBUTES = ("config", "should_exit", "started", "server_state")
CONFIG_ATTRIBUTES = ("loaded", "loaded_app", "ssl", "backlog")


async def application(scope: object, receive: object, send: object) -> None: ...


def parameters(function: Callable[..., object]) -> list[str]:
    return list(inspect.signature(function).parameters)


@pytest.mark.parametrize("name", PROTOCOL_METHODS)
def test_a_connection_has_the_method(name):
    assert parameters(getattr(HttpToolsProtocol, name)) == PROTOCOL_METHODS[name]


def test_a_connection_and_its_parts_have_their_attributes():
    async def look() -> None:
        config = uvicorn.Config(application, lifespan="off", log_config=None)
        config.load()
        assert [name for name in CONFIG_ATTRIBUTES if not hasattr(config, name)] == []
        protocol = HttpToolsProtocol(config, ServerState(), {})
        assert [name for name in PROTOCOL_ATTRIBUTES if not hasattr(protocol, name)] == []
        flow = FlowControl(asyncio.Transport())
        assert [name for name in FLOW_ATTRIBUTES if not hasattr(flow, name)] == []
        server = uvicorn.Server(config)
        assert [name for name in SERVER_ATTRIBUTES if not hasattr(server, name)] == []
        assert hasattr(server, "capture_signals")
        assert parameters(server.startup) == ["sockets"]
        assert "self.servers" in inspect.getsource(server.shutdown)
        assert config.lifespan_class(config).state == {}

    asyncio.run(look())
    assert "self.url" in inspect.getsource(HttpToolsProtocol.on_message_begin)
    made = inspect.getsource(RequestResponseCycle.__init__)
    assert [name for name in CYCLE_ATTRIBUTES if f"self.{name}" not in made] == []
