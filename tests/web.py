"""Requests of tests, which wait for their answers as long as a busy machine may take; httpx waits for 5 s."""

from functools import partial

import httpx

from tests.patience import WAIT_S

get = partial(httpx.get, timeout=WAIT_S)
head = partial(httpx.head, timeout=WAIT_S)
options = partial(httpx.options, timeout=WAIT_S)
post = partial(httpx.post, timeout=WAIT_S)
put = partial(httpx.put, timeout=WAIT_S)
request = partial(httpx.request, timeout=WAIT_S)
stream = partial(httpx.stream, timeout=WAIT_S)
Client = partial(httpx.Client, timeout=WAIT_S)
AsyncClient = partial(httpx.AsyncClient, timeout=WAIT_S)
