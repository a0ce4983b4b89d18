"""Pairs that are refused, in the words of the table, before anything is served; and all others are not."""

import json
import re
from collections.abc import Callable
from dataclasses import fields
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

import pytest

from quire.engine.building.plan import layout_of, plan_deployment, refusal_case, traits_of
from quire.errors import InvalidRequest, InvalidSetting
from quire.models.registry import build_model
from quire.server.processes.serve import serve
from quire.server.settings import ServerSettings
from quire.settings.config import Config
from quire.settings.group import GroupSettings
from quire.settings.host_cache import with_host_cache
from quire.settings.page_folder import FolderSettings
from quire.settings.peers import PeerSettings
from quire.settings.refusals import CONFLICTS, Case, refuse, settings_of
from quire.settings.resolve import Facts, resolve
from tests.crossings.capability import Capability, EngineSetting, Layout
from tests.crossings.covering import PLAIN
from tests.crossings.engine_setup import EngineSetup
from tests.crossings.layouts import WINDOWS_ALONE
from tests.crossings.refusals import REFUSALS, Moment, Refusal, refusal
from tests.crossings.request_draft import RequestDraft
from tests.crossings.table import ENTRIES, TABLE
from tests.models.adapter_files import write_adapter

GPU = Facts(platform="gpu", num_devices=1, memory_bytes=2**37, max_positions=256, weight_bytes=2**20)
SIZES = {"dtype": "float32", "max_batch_size": 4, "max_batch_prefill_tokens": 32, "page_size": 8}
LAYOUTS = [one for one in ENTRIES if isinstance(one, Layout) and one.model]


class Settings:
    """The settings that a user has for a pair of capabilities, with files for a model and its adapters."""

    def __init__(self, folder: Path, *pair: Capability) -> None:
        layout = next((one for one in pair if isinstance(one, Layout)), TABLE[PLAIN])
        assert isinstance(layout, Layout)
        self._folder = folder / layout.name.replace(" ", "-")
        self.model = layout.model or WINDOWS_ALONE
        given: dict[str, Any] = {}
        for one in pair:
            given |= one.config
        given["model"] = self._written()
        if "draft_model" in given:
            given["draft_model"] = given["model"]
        if "lora_adapters" in given:
            given["lora_adapters"] = tuple(f"{name}={self._adapter()}" for name in given["lora_adapters"])
        if "cache_folder" in given:
            given["cache_folder"] = folder / given["cache_folder"]
        self._given = given
        self.config = self._of(Config, **SIZES)

    def _written(self) -> str:
        path = self._folder / "config.json"
        if not path.exists():
            path.parent.mkdir(parents=True)
            path.write_text(json.dumps(self.model))
        return f"random:{path}"

    def _adapter(self) -> Path:
        path = self._folder / "adapter"
        return path if path.exists() else write_adapter(path, build_model(self.model))

    def _of(self, kind: Any, **defaults: Any) -> Any:
        names = {field.name for field in fields(kind)}
        return kind(**{name: value for name, value in (defaults | self._given).items() if name in names})

    def plan(self) -> None:
        """As `quire.server.processes.model_engine` does."""
        plan_deployment(with_host_cache(self.config, PeerSettings(), self._of(FolderSettings)))

    def plan_for_gpu(self) -> None:
        """As `plan_deployment` does, on a machine that has one."""
        settings = Config(**{**vars(self.config), "page_size": 32, "dtype": "bfloat16"})
        resolved, model = resolve(settings, GPU), build_model(self.model)
        traits = traits_of("the model", model, layout_of(model, resolved, None))
        refuse(refusal_case(settings, GPU, resolved, traits))

    @property
    def of_server(self) -> list[Any]:
        return [self._of(kind) for kind in (ServerSettings, GroupSettings, PeerSettings, FolderSettings)]

    def serve(self) -> None:
        serve(self.config, *self.of_server, show_progress=False)


MOMENTS: dict[Moment, Callable[[Settings], None]] = {
    Moment.PLAN: Settings.plan,
    Moment.GPU: Settings.plan_for_gpu,
    Moment.SERVE: Settings.serve,
}


def _pair(one: Refusal) -> tuple[Capability, Capability]:
    return TABLE[one.one], TABLE[one.other]


@pytest.mark.parametrize(
    "one", [one for one in REFUSALS if one.moment in MOMENTS], ids=lambda one: f"{one.one} x {one.other}"
)
def test_settings_that_do_not_go_together_are_refused_before_anything_is_served(one: Refusal, tmp_path: Path) -> None:
    settings = Settings(tmp_path, *_pair(one))
    with pytest.raises(InvalidSetting, match=one.words):
        MOMENTS[one.moment](settings)


@pytest.mark.parametrize(
    "one", [one for one in REFUSALS if one.moment is Moment.REQUEST], ids=lambda one: f"{one.one} x {one.other}"
)
def test_fields_that_do_not_go_together_are_refused_when_the_request_is_made(one: Refusal) -> None:
    draft = RequestDraft(Random(1), EngineSetup(Random(1)), 0, (1, 2))
    for each in reversed(_pair(one)):
        each.switch_on(draft)
    with pytest.raises(InvalidRequest, match=one.words):
        draft.as_request(1)


PLANNED = [*LAYOUTS, *(one for one in ENTRIES if isinstance(one, EngineSetting) and one.config and one.in_models)]


def test_all_other_pairs_of_settings_can_be_planned(tmp_path: Path) -> None:
    wrong = []
    for pair in combinations(PLANNED, 2):
        found = refusal(*pair)
        if (pair[0].fills and pair[0].fills == pair[1].fills) or (
            found is not None and found.moment is not Moment.PLAN
        ):
            continue
        try:
            Settings(tmp_path, *pair).plan()
            said = None
        except InvalidSetting as error:
            said = error.message
        if (found is None) != (said is None) or (found is not None and not re.search(found.words, str(said))):
            wrong.append(f"{pair[0].name} x {pair[1].name}: {said}")
    assert not wrong


def test_settings_that_servers_refuse_together_are_the_pairs_listed_here(tmp_path: Path) -> None:
    """Settings alone: refusals that depend on a model or a device come when an engine is planned."""
    asked = [one for one in ENTRIES if one.config and not isinstance(one, Layout)]
    wrong = []
    for pair in combinations(asked, 2):
        if pair[0].fills and pair[0].fills == pair[1].fills:
            continue
        listed, settings = refusal(*pair), Settings(tmp_path, *pair)
        case = Case(settings_of(settings.config, *settings.of_server))
        refused = any(conflict.message(case) is not None for conflict in CONFLICTS)
        if refused != (listed is not None and listed.moment in (Moment.PLAN, Moment.SERVE)):
            wrong.append(f"{pair[0].name} x {pair[1].name}: {listed}")
    assert not wrong


@pytest.mark.parametrize("other", PLANNED, ids=lambda one: one.name)
def test_reproducible_engines_on_a_gpu_go_with_all_others(other: Capability, tmp_path: Path) -> None:
    settings = Settings(tmp_path, TABLE["reproducible on a GPU"], other)
    if refusal(TABLE["reproducible on a GPU"], other) is None:
        settings.plan_for_gpu()
    else:
        with pytest.raises(InvalidSetting):
            settings.plan_for_gpu()
