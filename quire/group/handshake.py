"""Both ends of a new connection show that they know the same secret, which is never sent.

The leader sends a number that is used once, the member answers with one of its own and a proof over both, and the
leader sends its proof. Then each direction has a key of its own, so that no frame can be altered, repeated, left out or
sent back. The frames themselves are not secret. Connections for another purpose than a group have other proofs, so that
none can be taken for the other even where the secret is the same.
"""

import hmac
import secrets
import socket
import time
from typing import NamedTuple

DEADLINE_S = 5.0  # for the whole handshake
GROUP = b"group"  # the purpose of a connection
NONCE_BYTES = PROOF_BYTES = 32


class HandshakeFailed(Exception):
    """The other end does not know the secret, connects for another purpose, or is too slow."""


class Keys(NamedTuple):
    ours: bytes  # of the frames that this end sends
    theirs: bytes


def magic(purpose: bytes) -> bytes:
    """The first bytes that the leader sends."""
    return b"quire-" + purpose + b"-1\n"


def _proof(secret: bytes, purpose: bytes, role: bytes, leader_nonce: bytes, member_nonce: bytes) -> bytes:
    return hmac.digest(secret, b"\0".join((b"quire " + purpose, role, leader_nonce, member_nonce)), "sha256")


def admit(connection: socket.socket, secret: bytes, within_s: float = DEADLINE_S, purpose: bytes = GROUP) -> Keys:
    """The leader's end. Reads a fixed number of bytes of a stranger."""
    until_s = time.monotonic() + within_s
    nonce = secrets.token_bytes(NONCE_BYTES)
    _send(connection, magic(purpose) + nonce, until_s)
    answer = _receive(connection, NONCE_BYTES + PROOF_BYTES, until_s)
    other, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(secret, purpose, b"member", nonce, other)):
        raise HandshakeFailed("it does not know the secret")
    _send(connection, _proof(secret, purpose, b"leader", nonce, other), until_s)
    return Keys(
        _proof(secret, purpose, b"to member", nonce, other), _proof(secret, purpose, b"to leader", nonce, other)
    )


def enter(connection: socket.socket, secret: bytes, within_s: float = DEADLINE_S, purpose: bytes = GROUP) -> Keys:
    """The member's end."""
    until_s, begin = time.monotonic() + within_s, magic(purpose)
    greeting = _receive(connection, len(begin) + NONCE_BYTES, until_s)
    if not greeting.startswith(begin):
        raise HandshakeFailed(f"it does not listen for a {purpose.decode()} of this version")
    nonce, own = greeting[len(begin) :], secrets.token_bytes(NONCE_BYTES)
    _send(connection, own + _proof(secret, purpose, b"member", nonce, own), until_s)
    try:
        proof = _receive(connection, PROOF_BYTES, until_s)
    except HandshakeFailed as error:
        raise HandshakeFailed(f"{error}; does it have the same secret?") from error
    if not hmac.compare_digest(proof, _proof(secret, purpose, b"leader", nonce, own)):
        raise HandshakeFailed("it does not know the secret")
    return Keys(_proof(secret, purpose, b"to leader", nonce, own), _proof(secret, purpose, b"to member", nonce, own))


def _send(connection: socket.socket, data: bytes, until_s: float) -> None:
    try:
        connection.settimeout(_left_s(until_s))
        connection.sendall(data)
    except OSError as error:
        raise HandshakeFailed(f"the connection ended: {error}") from error


def _receive(connection: socket.socket, count: int, until_s: float) -> bytes:
    """Receive exactly `count` bytes before the deadline."""
    data = b""
    while len(data) < count:
        try:
            connection.settimeout(_left_s(until_s))
            piece = connection.recv(count - len(data))
        except OSError as error:
            raise HandshakeFailed(f"the connection ended: {error}") from error
        if not piece:
            raise HandshakeFailed("the connection was closed")
        data += piece
    return data


def _left_s(until_s: float) -> float:
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise HandshakeFailed("it did not answer in time")
    return left_s
