"""Lets an engine exchange pages with others."""

import hashlib

import jax

from quire.engine.building.build import Built
from quire.engine.building.deployment import Deployment
from quire.engine.building.fingerprint import fingerprint, program_facts
from quire.engine.pages.peers import PeerSource
from quire.engine.pages.store import PageStore
from quire.engine.pages.traffic import PageTraffic
from quire.peers.bundle import PageForm
from quire.peers.page_client import PageClient
from quire.peers.prefill_server import PrefillServer
from quire.settings.peers import PeerSettings


def meet_peers(built: Built, settings: PeerSettings) -> None:
    """Raises InvalidSetting where it cannot listen for others."""
    engine, deployment, form = built.engine, built.deployment, page_form(built)
    facts, secret, digest_of = peer_facts(deployment), settings.secret(), engine.adapters.digest_of
    store = PageStore(engine.scheduler, lambda: engine.executor, form)
    if settings.asks:
        client = PageClient(settings.endpoints, secret, facts, form)
        source = PeerSource(client, store, form, settings.peer_min_tokens, settings.peer_timeout_s)
        engine.page_sources.ask(PageTraffic(source, store, form, digest_of))
    if settings.listens_at is not None:
        engine.page_sources.answer(PrefillServer(settings.listens_at, secret, facts, form), store, digest_of)


def page_form(built: Built) -> PageForm:
    host_pages, limits = built.executor.host_pages, built.deployment.limits
    assert host_pages is not None, "an engine that gets pages from elsewhere has pages in host memory"
    return PageForm(limits.page_size, host_pages.page_bytes, limits.page_groups)


def peer_facts(deployment: Deployment) -> dict[str, str]:
    """Everything that the bytes of a page depend on besides its tokens and its adapter."""
    resolved, config = deployment.resolved, deployment.config
    facts = program_facts(deployment.files)
    facts["platform"] = f"{jax.default_backend()} {jax.devices()[0].device_kind}"
    facts["dtype"], facts["quantize"] = resolved.dtype, resolved.quantize
    facts["fast int8"] = str(deployment.facts.fast_int8)
    facts["tensor_parallel"] = str(config.tensor_parallel)
    if resolved.fixed_order:  # only pages of prompts, by kernels of their own
        facts["reproducible"] = "yes"
    if deployment.source is None:
        facts["random_seed"] = str(config.random_seed)
    if deployment.draft is not None:
        facts["draft_model"] = fingerprint(deployment.draft.files)
    layout = deployment.layout
    shapes = [[(leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(arrays)] for arrays in layout.structure(1)]
    described = f"{shapes} {layout.groups} {layout.places}"
    facts["pages"] = f"{layout.page_size} tokens, {hashlib.sha256(described.encode()).hexdigest()[:16]}"
    return facts
