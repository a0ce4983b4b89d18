"""Requests that nobody would think of, out of the OpenAPI document."""

import copy

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from quire.server.openapi import document

# Not `positive_data_acceptance`: that a prompt is too long, or a token not in the vocabulary, no schema says.
CHECKS = (not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance)
NUM_EXAMPLES = 8  # of each operation: some 300 in all


def operations(described: dict) -> dict:
    found = (result.ok() for result in schemathesis.openapi.from_dict(described).get_all_operations())
    return {operation.label: operation for operation in found}


OPERATIONS = operations(document())


def try_out(server, operation, mode: GenerationMode, checks, max_examples: int) -> None:
    @settings(
        max_examples=max_examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def run(case) -> None:
        case.call_and_validate(base_url=server.url, checks=list(checks), timeout=20)

    run()


def test_a_document_that_is_wrong_is_found_out(server):
    wrong = copy.deepcopy(document())
    del wrong["paths"]["/generate"]["post"]["responses"]["422"]
    with pytest.raises(FailureGroup, match="Undocumented status code"):
        try_out(server, operations(wrong)["POST /generate"], GenerationMode.NEGATIVE, CHECKS, 30)


@pytest.mark.parametrize("label", sorted(OPERATIONS))
def test_every_answer_is_one_that_the_document_knows(server, label):
    try_out(server, OPERATIONS[label], GenerationMode.POSITIVE, CHECKS, NUM_EXAMPLES)


@pytest.mark.parametrize("label", sorted(label for label in OPERATIONS if label.startswith("POST")))
def test_what_the_document_does_not_allow_is_refused(server, label):
    try_out(server, OPERATIONS[label], GenerationMode.NEGATIVE, (*CHECKS, negative_data_rejection), NUM_EXAMPLES)
