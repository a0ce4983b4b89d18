"""The outcome of a step, for the requests in it and for the ports that hear of it."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

from quire.core.plan import Failure, Update
from quire.ipc.messages import PORT_SHIFT, Account, Event, Failed, Progress, Queued, Started, StepTrace


class Outcome(NamedTuple):
    """Changes of requests."""

    updates: list[Update] = []  # noqa: RUF012
    failures: list[Failure] = []  # noqa: RUF012
    finished: list[int] = []  # noqa: RUF012  # requests of which every sample has its last update


def batches_of(
    outcome: Outcome, times: Iterable[Queued | Started | Account], trace: StepTrace | None
) -> dict[int, list[Event]]:
    """One batch for each port, by its number: its trace, times, tokens and failures, in this order."""
    updates: dict[int, list[Update]] = {}
    for update in outcome.updates:
        number = update.request_id >> PORT_SHIFT
        if number in updates:
            updates[number].append(update)
        else:
            updates[number] = [update]
    batches: dict[int, list[Event]] = {number: [Progress(those)] for number, those in updates.items()}
    for event in times:
        batches.setdefault(event.request_id >> PORT_SHIFT, []).insert(0, event)
    for number, part in _by_port(trace):
        batches.setdefault(number, []).insert(0, part)
    for failure in outcome.failures:
        failed = Failed.from_error(failure.request_id, failure.error)
        batches.setdefault(failure.request_id >> PORT_SHIFT, []).append(failed)
    return batches


def _by_port(trace: StepTrace | None) -> Iterator[tuple[int, StepTrace]]:
    """`trace` cut by port: the number of each port in it, and the part with its requests."""
    if trace is None:
        return
    for number in dict.fromkeys(request_id >> PORT_SHIFT for request_id in trace.request_ids):
        request_ids = [request_id for request_id in trace.request_ids if request_id >> PORT_SHIFT == number]
        failed_ids = [request_id for request_id in trace.failed_ids if request_id >> PORT_SHIFT == number]
        yield number, msgspec.structs.replace(trace, request_ids=request_ids, failed_ids=failed_ids)
