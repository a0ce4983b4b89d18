"""Messages between an engine and its front ends are the same after the way."""

import msgspec
import pytest

from quire.core.plan import TokenLogprobs, Update
from quire.errors import Overloaded
from quire.ipc.messages import Abort, Command, Event, Failed, Progress, Submit
from quire.request import FinishReason, Request, SamplingParams

REQUEST = Request(
    7, (1, 2, 3), 5, SamplingParams(temperature=0.5, logit_bias={3: 1.5}, logprobs=2), seed=2**63, samples=2,
    end_ids=(2,), stop_ids=(4,), priority=-1, salt="é", queue_timeout_s=1.5, timeout_s=9.0,
    prompt_logprobs=0,
)  # fmt: skip
LOGPROBS = [TokenLogprobs(-0.5, (1, 2), (-0.5, -1.5))]


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (Submit(REQUEST), Command),
        (Abort(7), Command),
        (Progress([Update(7, 1, [5, 6], FinishReason.END, 4, LOGPROBS, LOGPROBS)]), Event),
        (Progress([Update(7, 0, [], None, 0, None, None)]), Event),
        (Failed.from_error(7, Overloaded("too many", 2.5)), Event),
    ],
)
def test_messages_survive_msgpack(message, kind):
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=kind) == message
