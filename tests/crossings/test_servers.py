"""All pairs of what stands in front of engines, in servers of a tiny model that many clients ask in every API.

Answers are those of a server without any of it. `QUIRE_HYPOTHESIS_PROFILE=long` crosses other sets, larger ones too.
"""

from random import Random

import pytest

from quire.ops.native import library
from tests.crossings.capability import Capability, Layout
from tests.crossings.client_requests import REQUESTS, Json
from tests.crossings.covering import covering_sets
from tests.crossings.served_crowd import ServedCrowd, ServedModel
from tests.crossings.table import ENTRIES
from tests.tiny_chat_model import program_folder

# On a CPU a row's bits do not depend on the rows beside it.
pytestmark = pytest.mark.skipif(not library.load(), reason="there is no C++ compiler")

SIZE = 9  # capabilities of a set
SETS = [
    [one for one in found if not isinstance(one, Layout)]
    for found in covering_sets([one for one in ENTRIES if one.in_servers], SIZE, Random(0))
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return ServedModel.written(tmp_path_factory.mktemp("tiny"), program_folder(tmp_path_factory))


@pytest.fixture(scope="module")
def plain(model: ServedModel) -> list[Json | None]:
    return ServedCrowd(model, []).run()


@pytest.mark.parametrize("capabilities", SETS, ids=lambda found: " x ".join(one.name for one in found))
def test_every_pair_goes_together(capabilities: list[Capability], model: ServedModel, plain: list[Json | None]) -> None:
    answers = ServedCrowd(model, capabilities).run()
    for request, answer, right in zip(REQUESTS, answers, plain, strict=True):
        assert answer is None or answer == right, request.name
