"""Whether the two ends of a Unix socket belong to the same user.

A process tells its agent where its state is, and does what the agent says; an agent
hands its memory to who attaches. So each side checks the other's user before it says
anything: by the owner of the socket's file and directory, and by what the kernel knows
of the process at the other end. root counts as everybody.
"""

import os
import pwd
import socket
import stat
import struct
from pathlib import Path

_CREDENTIALS = struct.Struct("3i")
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class ForeignSocket(PermissionError):
    """A socket, or the process behind it, is not this user's; says what to do."""


def check_path(path: Path) -> None:
    """Checks who made a socket, before it is connected to.

    Raises:
        FileNotFoundError: there is none.
        ForeignSocket: another user owns it or its directory, or could exchange it.
    """
    directory = path.parent.stat()
    found = path.stat()  # after its directory: who exchanged that is noticed
    if not stat.S_ISSOCK(found.st_mode):
        raise ForeignSocket(
            f"{path} is not a socket. Allowed: the socket that an agent names in its "
            "first line. Change DTFT_AGENT_SOCKET or ReplicatedOptions(agent=...)."
        )
    for what, owner in ((path, found.st_uid), (path.parent, directory.st_uid)):
        if owner not in _trusted():
            raise ForeignSocket(
                f"{what} belongs to {user(owner)}, but this process runs as "
                f"{user(os.geteuid())}. Allowed: an agent of this user or of root. "
                f"Start the agent and its processes as the same user, or name another "
                "agent's socket in DTFT_AGENT_SOCKET."
            )
    if directory.st_mode & _OTHERS_WRITE:
        raise ForeignSocket(
            f"{path.parent} has mode {stat.S_IMODE(directory.st_mode):04o}: other "
            "users could put a socket of theirs in the agent's place. Allowed: a "
            f"directory that only its owner writes to. Run `chmod go-w {path.parent}`."
        )


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Process id and user id at the other end of a connected Unix socket.

    At the end that connected they are those of who listens.
    """
    size = _CREDENTIALS.size
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return pid, uid


def foreign_peer(uid: int) -> str | None:
    """Why the process of a user is not talked to; None for this user's and root's.

    >>> foreign_peer(os.geteuid())
    """
    if uid in _trusted():
        return None
    return (
        f"the process at the other end belongs to {user(uid)}, this one to "
        f"{user(os.geteuid())}. Allowed: the same user on both ends, or root. Start "
        "the agent and its processes as the same user."
    )


def user(uid: int) -> str:
    """A user, for people.

    >>> user(0)
    'user root (0)'
    """
    try:
        return f"user {pwd.getpwuid(uid).pw_name} ({uid})"
    except KeyError:
        return f"user {uid}"


def _trusted() -> tuple[int, int]:
    return os.geteuid(), 0
