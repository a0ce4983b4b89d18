"""Facts that must be equal at both ends of a link. A difference is refused by name before anything runs."""

from collections.abc import Mapping

from quire.errors import shown


def difference(
    leaders: Mapping[str, str], members: Mapping[str, str], leader: str = "leader", member: str = "member"
) -> str | None:
    """The first facts that differ, in words; None where none does. `leader` and `member` are words for the two ends."""
    for name in [*leaders, *(name for name in members if name not in leaders)]:
        ours, theirs = leaders.get(name), members.get(name)
        if ours != theirs:
            return f"{name} of the {member}: {shown(theirs)}; of the {leader}: {shown(ours)}"
    return None
