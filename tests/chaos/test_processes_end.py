"""HTTP workers end, the supervisor ends, signals come: what is left goes on or is gone, as it should be."""

import http.client
import os
import signal
import socket
import time
from contextlib import closing
from pathlib import Path

import pytest

from quire.server.processes.child import KILLED
from tests import web
from tests.chaos.asking import Asking, body, expected
from tests.chaos.clients import address
from tests.chaos.server import WAIT_S, Server, is_there, wait_until


def abstract_sockets(pid: int) -> list[str]:
    """The local sockets without a file that a server of this process made."""
    return [
        line for line in Path("/proc/net/unix").read_text(encoding="utf-8").splitlines() if f"@quire-{pid}-" in line
    ]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_dies_or_stands_still_costs_its_own_clients_alone_and_is_replaced(serve, number):
    server = serve(engine={"step_s": 0.01}, settings={"http_workers": 2, "worker_restart_after_s": 3.0})
    asking = Asking(server, [body(n, max_tokens=250) for n in range(16)])
    asking.wait_for_text()
    struck = server.processes("quire-http")[0]
    os.kill(struck, number)
    asking.wait()
    wait_until(lambda: not is_there(struck))
    complete = [heard for heard in asking.heard if heard.is_complete]
    cut = [heard for heard in asking.heard if heard.was_cut]
    assert len(complete) + len(cut) == 16
    assert complete, "the connections of all clients went to one worker, try again"
    for asked, heard in zip(asking.bodies, asking.heard, strict=True):
        (text,) = expected(asked)
        assert heard.texts == [text] if heard.is_complete else text.startswith(heard.texts[0].rstrip("\ufffd"))
    metrics = server.wait_until_idle()
    assert metrics["quire_engine_restarts"] == 0
    wait_until(lambda: len(server.processes("quire-http")) == 2)
    Asking(server, [body(n) for n in range(12)]).wait().check_all()  # whichever worker they reach
    status = KILLED if number == signal.SIGKILL else "signal 9"  # by the supervisor
    server.wait_for_log(f"quire-http-1 ended ({status}); restarting it")


def ask_and_stop_in_time(client: http.client.HTTPConnection, worker: int, within_s: float) -> None:
    """Stop the worker after its answer and before it closes the connection. On a busy machine a try may be too slow."""
    while True:
        begun_s = time.monotonic()
        client.request("GET", "/health")
        client.getresponse().read()
        os.kill(worker, signal.SIGSTOP)
        if time.monotonic() - begun_s < within_s:
            return
        os.kill(worker, signal.SIGCONT)
        client.close()  # the next request opens another


def test_a_request_that_comes_while_its_worker_does_not_get_to_run_is_answered(serve):
    """Also when its connection has been idle for as long as that is kept by the time the worker looks."""
    server = serve(settings={"keep_alive_s": 1.0})
    worker = server.processes("quire-http")[0]
    with closing(http.client.HTTPConnection(*address(server.url), timeout=WAIT_S)) as client:
        ask_and_stop_in_time(client, worker, within_s=0.9)
        client.request("GET", "/health")
        time.sleep(1.3)
        os.kill(worker, signal.SIGCONT)
        answer = client.getresponse()
        assert answer.status == 200
        answer.read()
        assert client.sock.recv(1) == b"", "it is kept for ever"


def test_a_server_that_is_paused_and_goes_on_ends_no_process(serve):
    """As containers are. Every process finds out that time has passed, and not that another one is stuck."""
    server = serve(engine={"step_s": 0.01}, settings={"restart_after_s": 3.0, "worker_restart_after_s": 3.0})
    asking = Asking(server, [body(n, max_tokens=100) for n in range(8)])
    asking.wait_for_text()
    processes = [server.process.pid, *server.processes("quire-engine"), *server.processes("quire-http")]
    for pid in processes:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(4)
    for pid in processes:
        os.kill(pid, signal.SIGCONT)
    asking.wait().check_all()
    assert [server.process.pid, *server.processes("quire-engine"), *server.processes("quire-http")] == processes


def test_signals_to_every_process_drain_as_one_to_the_first_does(serve):
    """A service manager sends them to all."""
    server = serve(engine={"step_s": 0.01})
    asking = Asking(server, [body(n, max_tokens=200) for n in range(8)])
    asking.wait_for_text()
    for pid in (*server.processes("quire-engine"), *server.processes("quire-http"), server.process.pid):
        os.kill(pid, signal.SIGTERM)
    asking.wait().check_all()
    assert server.process.wait(WAIT_S) == 0


def test_the_engine_is_killed_while_the_server_drains(serve):
    server = serve(engine={"step_s": 0.01})
    asking = Asking(server, [body(n, max_tokens=200) for n in range(8)])
    asking.wait_for_text()
    server.process.terminate()
    time.sleep(0.1)
    server.kill("quire-engine")
    asking.wait().check_all()
    assert server.process.wait(WAIT_S) == 0


def is_open(url: str) -> bool:
    """Whether connections are accepted."""
    with socket.socket() as probe:
        return probe.connect_ex(address(url)) == 0


def test_a_second_signal_ends_at_once(serve):
    server = serve(engine={"step_s": 0.05})
    children = server.all_processes()
    asking = Asking(server, [body(1, max_tokens=400)])
    asking.wait_for_text()
    server.process.terminate()
    wait_until(lambda: not is_open(server.url))
    assert server.process.poll() is None
    server.process.terminate()
    assert server.process.wait(WAIT_S) == 1
    assert not asking.wait().heard[0].is_complete
    wait_until(lambda: not any(map(is_there, children)))


def test_nothing_is_left_of_a_server_whose_first_process_is_killed(serve):
    server = serve(settings={"http_workers": 2})
    pid = server.process.pid
    children = server.all_processes()
    assert abstract_sockets(pid)
    server.process.kill()
    wait_until(lambda: not any(map(is_there, children)) and not abstract_sockets(pid))


def test_nothing_is_left_of_a_server_of_which_every_process_is_killed_while_it_is_stuck(serve):
    server = serve()
    pid, children = server.process.pid, server.all_processes()
    os.kill(server.processes("quire-engine")[0], signal.SIGSTOP)  # which does not hear that its parent is gone
    for one in (pid, *server.processes("quire-http")):
        os.kill(one, signal.SIGKILL)
    wait_until(lambda: not any(map(is_there, children)) and not abstract_sockets(pid))


def test_a_second_server_on_the_port_says_so_and_the_first_goes_on(serve, fake_model):
    first = serve(settings={"http_workers": 2})  # which share their port with each other, and with nobody else
    port = int(first.url.rsplit(":", 1)[1])
    second = Server("fake", fake_model, settings={"port": port, "http_workers": 2})
    assert second.process.wait(WAIT_S) == 1
    wait_until(lambda: bool(second.logged(f"cannot listen on 127.0.0.1 port {port}: Address already in use")))
    assert web.post(f"{first.url}/v1/completions", json=body(1)).status_code == 200


def test_idle_processes_use_no_processor_time(serve):
    server = serve()
    Asking(server, [body(n) for n in range(4)]).wait().check_all()
    server.wait_until_idle()

    def is_quiet() -> bool:
        begun_s, before_s = time.monotonic(), server.cpu_s()
        time.sleep(2)
        # 5 % of a core, for four times a second saying that all is well.
        return server.cpu_s() - before_s < 0.05 * (time.monotonic() - begun_s)

    wait_until(is_quiet)  # what was asked before may still be put away
