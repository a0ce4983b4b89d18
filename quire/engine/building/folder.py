"""Lets an engine keep pages in a folder."""

import hashlib
import json
import threading
from pathlib import Path

from quire.engine.building.build import Built
from quire.engine.building.deployment import Deployment
from quire.engine.building.fingerprint import weight_paths
from quire.engine.building.peers import page_form, peer_facts
from quire.engine.pages.folder_saves import FolderSaves
from quire.engine.pages.folder_source import FolderSource
from quire.engine.pages.store import PageStore
from quire.engine.pages.traffic import PageTraffic
from quire.errors import InvalidSetting
from quire.page_folder.page_file import ArrayForm, PageFiles
from quire.page_folder.page_folder import PageFolder
from quire.settings.memory import as_size
from quire.settings.page_folder import FolderSettings

SCAN_S = 5.0  # that a start waits for the files of earlier servers to be known


def keep_pages(built: Built, settings: FolderSettings) -> None:
    """Raises InvalidSetting where no page fits."""
    engine, host_pages, form = built.engine, built.executor.host_pages, page_form(built)
    assert settings.cache_folder is not None
    assert host_pages is not None
    if settings.max_bytes < 2 * form.page_bytes:
        raise InvalidSetting(
            f"cache_folder_gib is {settings.cache_folder_gib}; a page takes {as_size(form.page_bytes)}, and there must "
            "be room for two"
        )
    arrays = [ArrayForm(stack.names, str(stack.dtype), stack.shape) for stack in host_pages.stacks]
    files = PageFiles(folder_key(built.deployment), form.page_size, form.page_bytes, arrays)
    folder = PageFolder(settings.cache_folder, files, settings.max_bytes)
    scan = threading.Thread(target=folder.scan, name="quire-folder-scan", daemon=True)
    scan.start()
    scan.join(SCAN_S)  # a slow disk is not waited for: its pages are found later
    store = PageStore(engine.scheduler, lambda: engine.executor, form)
    digest_of, step_tokens = engine.adapters.digest_of, engine.scheduler.limits.max_batch_prefill_tokens
    source = FolderSource(
        folder, store, form, lambda tokens, cached: engine.step_limits.times.prompt_s(tokens, cached, step_tokens)
    )
    saves = FolderSaves(folder, store, form.page_bytes, digest_of, settings.cache_folder_write_mib_s * 2**20)
    engine.page_sources.keep(PageTraffic(source, store, form, digest_of), saves)


def folder_key(deployment: Deployment) -> str:
    """Names the weights, and all settings that the bytes of pages depend on."""
    models = [deployment.files, *([] if deployment.draft is None else [deployment.draft.files])]
    # Peers run now, files stay: of a weight file that is changed in place the samples may be the same.
    stats = [path.stat() for files in models for path in weight_paths(files)]
    facts = {**peer_facts(deployment), "weight files": str([(stat.st_size, stat.st_mtime_ns) for stat in stats])}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def folder_contents(deployment: Deployment, settings: FolderSettings) -> str:
    """A description of the folder's contents."""
    root = settings.cache_folder
    assert isinstance(root, Path)
    page_size, groups = deployment.limits.page_size, len(deployment.limits.page_groups)
    folder = PageFolder(root, PageFiles(folder_key(deployment), page_size, 0, ()), settings.max_bytes)
    folder.scan()
    tokens = folder.num_pages // groups * page_size
    return (
        f"{folder.num_pages:,} pages of this model and these settings (up to {tokens:,} tokens); "
        f"{as_size(folder.num_bytes)} of all in {root}, at most {as_size(settings.max_bytes)}"
    )
