"""Pages that are read from one engine and inserted into another are those that were computed."""

import numpy as np
import pytest

from quire.engine.pages.store import PageStore
from quire.peers.bundle import PageBundle, PageForm
from quire.request import Request
from tests.executor.conftest import HOST_PAGES
from tests.executor.rig import Rig
from tests.executor.test_schedules import check
from tests.executor.workload import GREEDY


def store_of(rig: Rig, **limits) -> tuple[PageStore, PageForm]:
    engine = rig.engine(host_pages=HOST_PAGES, **limits)
    chosen, host = engine.scheduler.limits, rig.executor.host_pages
    form = PageForm(chosen.page_size, host.page_bytes, chosen.page_groups)
    return PageStore(engine.scheduler, lambda: engine.executor, form), engine, form


@pytest.mark.parametrize("name", ["llama", "specialised_llama", "drafted_gemma"])
def test_an_engine_goes_on_from_the_pages_of_another(request: pytest.FixtureRequest, name: str) -> None:
    rig: Rig = request.getfixturevalue(name)
    rng = np.random.default_rng(5)
    prompt = tuple(rng.integers(0, rig.model.vocab_size, 90).tolist())
    salt = rig.salt(prompt)
    store, engine, form = store_of(rig)
    asked = Request(1, prompt, 0, GREEDY, salt=salt)
    rig.run([asked], engine=engine)
    pages = store.find(asked, 0)
    assert pages.end == len(prompt) // form.page_size
    data = store.read(asked, pages.rows(), pages.end)()
    assert len(data) == pages.num_pages * form.page_bytes

    store, engine, _ = store_of(rig)  # an executor that was reset has no pages but those of the host
    going_on = Request(2, prompt, 8, GREEDY, salt=salt)
    assert store.num_cached(going_on) == 0
    bundle = PageBundle(pages, memoryview(bytes(data)))
    for begin in range(0, pages.num_pages, 7):
        assert store.insert(going_on, bundle, begin, 7)
    engine.scheduler.check()
    assert store.num_cached(going_on) > 0 or len(form.groups) > 1  # a window's pages are those of the end alone
    run = rig.run([going_on], engine=engine)
    assert run.answers[2, 0].cached_tokens == (len(prompt) - 1) // form.page_size * form.page_size
    assert check(rig, [going_on], run) <= 1
    assert store.insert(going_on, bundle, 0, 7) == 0, "they are there"


def test_pages_that_were_evicted_are_not_read(llama: Rig) -> None:
    store, engine, _ = store_of(llama, num_pages=60)
    asked = Request(1, tuple(range(2, 90)), 0, GREEDY)
    llama.run([asked], engine=engine)
    pages = store.find(asked, 3)
    assert pages.firsts == (3,)
    others = [Request(n, tuple(range(n, n + 100)), 0, GREEDY) for n in range(100, 104)]
    llama.run(others, engine=engine)
    assert store.read(asked, pages.rows(), pages.end) is None
