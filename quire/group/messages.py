"""Messages between the leader of a group and its other members: plain data, sent as msgpack."""

import msgspec

# A forward pass by the fields of its shape; any other program by its kind and size.
PlainKey = list[int | bool | str]


class Array(msgspec.Struct, frozen=True, array_like=True):
    """Numbers of the host that a program is called with."""

    dtype: str
    shape: list[int]
    data: bytes


# From a member to the leader


class Join(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The first message. `facts` by name must be those of the leader."""

    rank: int
    facts: dict[str, str]


class Devices(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The devices of a member, once JAX knows them. `facts` as above."""

    num_devices: int
    memory_bytes: int  # of one
    facts: dict[str, str]


class Made(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The member has this program; or it cannot make it, with the reason."""

    key: PlainKey
    reason: str | None = None


class MemberFailed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The member cannot continue. `is_permanent`: nor could it after a restart."""

    reason: str
    is_permanent: bool = False


class Pong(msgspec.Struct, frozen=True, tag=True, array_like=True):
    number: int


# From the leader to a member


class JoinRefused(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The member cannot join, and trying again cannot help."""

    reason: str


class NotNow(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The member cannot join now: the group is complete, say. It may ask again."""

    reason: str


class Begin(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """All members are there. They meet as processes of JAX at the address `coordinator`."""

    coordinator: str
    size: int


class Deploy(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Everything that the leader decided about running the model: settings by name, and the sizes that follow, in
    words, which must be the same for every member."""

    settings: dict[str, int | float | str | bool | None]
    sizes: str


class Prepare(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Make this program; answered by `Made`."""

    key: PlainKey


class RunProgram(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Run a program with these numbers of the host. Sent before the leader runs it.

    `hidden` counts back to the forward pass that is sampled from: 1 is the last. 0: none.
    """

    key: PlainKey
    arrays: list[Array | None]
    hidden: int = 0


class Reset(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Begin again with an empty state."""


class Ping(msgspec.Struct, frozen=True, tag=True, array_like=True):
    number: int


ToLeader = Join | Devices | Made | MemberFailed | Pong
ToMember = JoinRefused | NotNow | Begin | Deploy | Prepare | RunProgram | Reset | Ping
