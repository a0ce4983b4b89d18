"""HTTPS, with certificates that are made here."""

import contextlib
import json
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
import uvloop

from quire.errors import InvalidSetting
from quire.server.http.connection import MAX_HEAD_BYTES
from quire.server.http.tls import check_certificate
from quire.server.settings import ServerSettings
from tests import web
from tests.patience import WAIT_S
from tests.server.processes import Served, wait_until

TEXT = {"prompt": "abc", "max_tokens": 30, "temperature": 0}


class Certificate(NamedTuple):
    certfile: Path
    keyfile: Path
    context: ssl.SSLContext  # of clients that trust it


def made(folder: Path, name: str, *protection: str) -> Certificate:
    certfile, keyfile = folder / f"{name}.pem", folder / f"{name}.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost", "-out", certfile, "-keyout", keyfile,
         *(protection or ["-nodes"])],
        check=True, capture_output=True,
    )  # fmt: skip
    return Certificate(certfile, keyfile, ssl.create_default_context(cafile=certfile))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture(scope="module")
def certificate(folder) -> Certificate:
    return made(folder, "server")


@pytest.fixture(params=["asyncio", "uvloop"])
def server(make_server, certificate, request):
    loops = {"loop_factory": uvloop.new_event_loop} if request.param == "uvloop" else {}
    return make_server(
        settings=ServerSettings(ssl_certfile=certificate.certfile, ssl_keyfile=certificate.keyfile), **loops
    )


@contextmanager
def connected(server, certificate) -> Iterator[ssl.SSLSocket]:
    port = int(server.url.rpartition(":")[2])
    plain = socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
    with certificate.context.wrap_socket(plain, server_hostname="localhost") as one:
        yield one


def streamed_text(body: str) -> str:
    events = [json.loads(event.removeprefix("data: ")) for event in body.split("\n\n")[:-2]]
    return "".join(event["choices"][0]["text"] for event in events)


def test_answers_and_streams_come_by_https_and_by_nothing_else(server, certificate):
    expected = server.expected_text(server.model.tokenizer.encode("abc"), 30)
    with web.Client(base_url=server.url, verify=certificate.context) as client:
        whole = client.post("/v1/completions", json=TEXT)
        assert whole.json()["choices"][0]["text"] == expected
        for _ in range(2):
            stream = client.post("/v1/completions", json=TEXT | {"stream": True})
            assert streamed_text(stream.text) == expected
    with pytest.raises(httpx.ConnectError):
        web.get(f"{server.url}/health")  # of a client that does not trust the certificate
    with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
        web.get(f"{server.url.replace('https', 'http')}/health")


def test_a_head_that_is_too_long_is_refused_by_https(server, certificate):
    with connected(server, certificate) as one:
        one.sendall(b"GET / HTTP/1.1\r\nhost: x\r\na: " + b"b" * MAX_HEAD_BYTES)
        assert one.recv(65536).startswith(b"HTTP/1.1 431 ")


def test_a_client_of_https_that_goes_away_is_noticed(make_server, certificate):
    steps = threading.Semaphore(2)
    server = make_server(
        settings=ServerSettings(ssl_certfile=certificate.certfile, ssl_keyfile=certificate.keyfile),
        before_result=lambda *_: steps.acquire(timeout=WAIT_S),
    )
    content = json.dumps(TEXT | {"stream": True, "max_tokens": 400}).encode()
    with connected(server, certificate) as one:
        one.sendall(f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n".encode())
        one.sendall(content)
        assert one.recv(65536).startswith(b"HTTP/1.1 200 ")
    server.wait_until(lambda: server.service.metrics.failures["dropped"] == 1)
    assert server.service.num_streams == 0
    steps.release(1000)


def test_several_workers_serve_https_and_finish_what_runs_when_they_are_stopped(model_folder, certificate):
    certified = [f"ssl_certfile={certificate.certfile}", f"ssl_keyfile={certificate.keyfile}"]
    served = Served(model_folder, "http_workers=2", "step_s=0.02", *certified).wait()
    try:
        assert served.url.startswith("https://")
        body = TEXT | {"stream": True, "max_tokens": 100}
        with web.stream("POST", f"{served.url}/v1/completions", json=body, verify=certificate.context) as answer:
            lines = answer.iter_lines()
            next(lines)
            served.process.terminate()
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert served.process.wait(WAIT_S) == 0
    finally:
        served.stop()


def hello(certificate: Certificate) -> bytes:
    """The first message of a handshake."""
    sent = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        certificate.context.wrap_bio(ssl.MemoryBIO(), sent, server_hostname="localhost").do_handshake()
    return sent.read()


def test_handshakes_that_never_end_are_cut_off_and_hold_up_no_other_client(model_folder, certificate):
    certified = [f"ssl_certfile={certificate.certfile}", f"ssl_keyfile={certificate.keyfile}"]
    served = Served(model_folder, "ssl_handshake_s=5", *certified).wait()
    try:
        port, first = int(served.url.rpartition(":")[2]), hello(certificate)
        open_files = Path(f"/proc/{served.named('quire-http')[0]}/fd")
        before = len(list(open_files.iterdir()))
        slow = [socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) for _ in range(60)]
        for one, count in zip(slow, (0, 50, len(first)) * 20, strict=True):
            one.sendall(first[:count])
        answer = web.post(f"{served.url}/v1/completions", json=TEXT, verify=certificate.context)
        assert answer.status_code == 200
        for one in slow:
            with one, contextlib.suppress(ConnectionError):
                while one.recv(65536):
                    pass  # until the server has closed it
        wait_until(lambda: len(list(open_files.iterdir())) <= before)
    finally:
        served.stop()


# Files that do not serve


def refusal(**settings: object) -> str:
    with pytest.raises(InvalidSetting) as refused:
        check_certificate(ServerSettings(**settings))
    return refused.value.message


def test_files_that_cannot_be_served_with_are_refused_by_name(folder, certificate):
    other = made(folder, "other")
    certfile, keyfile, _ = certificate
    nothing, rubbish = folder / "nothing.pem", folder / "rubbish.pem"
    rubbish.write_text("not a certificate")
    assert refusal(ssl_certfile=nothing) == f"ssl_certfile is {nothing}: it cannot be read: No such file or directory"
    assert "ssl_keyfile is" in refusal(ssl_certfile=certfile, ssl_keyfile=nothing)
    assert "not a certificate and its key" in refusal(ssl_certfile=rubbish, ssl_keyfile=keyfile)
    assert "which must hold the key as well" in refusal(ssl_certfile=certfile)
    assert "its key is not that of the certificate" in refusal(ssl_certfile=certfile, ssl_keyfile=other.keyfile)
    with pytest.raises(InvalidSetting, match="need ssl_certfile"):
        ServerSettings(ssl_keyfile=keyfile)
    with pytest.raises(InvalidSetting, match="ssl_handshake_s is 0; it must be above 0"):
        ServerSettings(ssl_handshake_s=0)
    both = folder / "both.pem"
    both.write_bytes(keyfile.read_bytes() + certfile.read_bytes())
    check_certificate(ServerSettings(ssl_certfile=both))


def test_an_encrypted_key_needs_its_password(folder):
    locked = made(folder, "locked", "-passout", "pass:opensesame")
    files = {"ssl_certfile": locked.certfile, "ssl_keyfile": locked.keyfile}
    assert "is encrypted; give --ssl-keyfile-password" in refusal(**files)
    assert "does not open the key" in refusal(**files, ssl_keyfile_password="wrong")
    check_certificate(ServerSettings(**files, ssl_keyfile_password="opensesame"))


def test_a_server_with_a_bad_certificate_does_not_start(model_folder, folder):
    served = Served(model_folder, f"ssl_certfile={folder / 'none.pem'}")
    status, _, errors = served.ended()
    assert status == 1
    assert "ssl_certfile is" in errors
