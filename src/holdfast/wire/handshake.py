"""Both ends prove that they know the job's secret, without sending it, before the first message is read.

Each sends 32 random bytes, then the HMAC of its own role and both challenges. A peer that answers wrongly, slowly or
not at all is refused. The secret reaches an agent over its standard input, never by command line or environment.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from hashlib import sha256

from holdfast.errors import WireError

CHALLENGE = 32
TIMEOUT_S = 10.0


def new_secret() -> bytes:
    return secrets.token_bytes(32)


def proof(secret: bytes, role: bytes, mine: bytes, theirs: bytes) -> bytes:
    return hmac.new(secret, role + mine + theirs, sha256).digest()


async def greet(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, *, role: bytes, peer: bytes
) -> None:
    """Prove ourselves as ``role`` to a ``peer`` that must do the same. WireError when it cannot."""
    mine = secrets.token_bytes(CHALLENGE)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            writer.write(mine)
            theirs = await reader.readexactly(CHALLENGE)
            writer.write(proof(secret, role, mine, theirs))
            answer = await reader.readexactly(sha256().digest_size)
    except (TimeoutError, asyncio.IncompleteReadError, OSError) as error:
        raise WireError(f"the {peer.decode()} did not finish the handshake: {error!r}") from None
    if not hmac.compare_digest(answer, proof(secret, peer, theirs, mine)):
        raise WireError(f"the {peer.decode()} does not know this job's secret")
