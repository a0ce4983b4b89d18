"""The events of a step, by the port that gets them."""

from collections.abc import Iterable

from quire.core.plan import Update
from quire.engine.outcome import Outcome
from quire.engine.port import by_port
from quire.ipc.messages import PORT_SHIFT, Account, Event, Failed, Progress, Queued, Started, StepTrace


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
    for number, part in by_port(trace):
        batches.setdefault(number, []).insert(0, part)
    for failure in outcome.failures:
        failed = Failed.from_error(failure.request_id, failure.error)
        batches.setdefault(failure.request_id >> PORT_SHIFT, []).append(failed)
    return batches
