"""Rows for which no token is left: the request's fault, or the server's."""

from typing import Any

import pytest

from quire.core.plan import NO_TOKEN_LEFT, StepResult
from quire.errors import InvalidRequest, QuireError, RequestFailed
from quire.request import json_schema, token_rules
from tests.core.harness import Harness, limits, request

NOT_NUMBERS = "the model's logits are not finite"


@pytest.mark.parametrize(
    ("asked", "reason", "kind"),
    [
        ({"grammar": token_rules([5], [[5, 5]])}, NO_TOKEN_LEFT, InvalidRequest),
        ({"min_tokens": 2, "stop_ids": (5, 6)}, NO_TOKEN_LEFT, InvalidRequest),
        ({"grammar": json_schema({}), "end_ids": (1,)}, NO_TOKEN_LEFT, RequestFailed),
        ({}, NO_TOKEN_LEFT, RequestFailed),
        ({"grammar": token_rules([5])}, NOT_NUMBERS, RequestFailed),
        ({"min_tokens": 2}, NOT_NUMBERS, RequestFailed),
    ],
    ids=["rules", "ends that must wait", "grammar", "nothing asked", "rules, no numbers", "ends, no numbers"],
)
def test_only_what_the_request_forbids_is_its_fault(asked: dict[str, Any], reason: str, kind: type[QuireError]) -> None:
    harness = Harness(limits())
    harness.add(request(1, **asked))
    plan = harness.scheduler.plan()
    assert plan is not None
    updates, failures = harness.scheduler.complete(StepResult(plan.step, [[]], failed={0: reason}))
    assert not updates
    assert [(type(failure.error), failure.error.message) for failure in failures] == [(kind, reason)]


def test_after_min_tokens_no_end_is_to_blame() -> None:
    harness = Harness(limits())
    harness.add(request(1, min_tokens=1))
    harness.step()
    plan = harness.scheduler.plan()
    assert plan is not None
    _, failures = harness.scheduler.complete(StepResult(plan.step, [[]], failed={0: NO_TOKEN_LEFT}))
    assert [type(failure.error) for failure in failures] == [RequestFailed]
