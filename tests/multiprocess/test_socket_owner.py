"""Who attaches and who listens are the same user, or root: real files and sockets."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtft.checkpoint.managers.agent_link import (
    AgentLink,
    ForeignSocket,
    LinkClosed,
    NoAgent,
    ask,
    attach,
    check_path,
    foreign_peer,
    listen_for_links,
    own_link,
    serve_links,
)

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """A socket where an agent would listen; who connects is told who that is."""
    directory = tmp_path / "dtft-agent"
    directory.mkdir(0o700)
    listener = listen_for_links(directory / "agent.sock")

    def hear(link: AgentLink) -> None:
        with contextlib.suppress(LinkClosed, TimeoutError):
            foreign = foreign_peer(link.peer[1])
            if foreign is None:
                link.send("agent", job="j", host="h", taken_by=link.peer[0])
            else:
                link.send("refused", error=foreign, taken=False)
            while link.receive(10):
                pass
        link.close()

    serve_links(listener, hear)
    yield directory / "agent.sock"
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def test_an_own_agent_is_talked_to(path: Path) -> None:
    with_peer = own_link(path)
    assert with_peer.peer == (os.getpid(), os.geteuid())
    with_peer.close()
    seen = ask(path)
    assert seen is not None and seen.taken_by == os.getpid()


def refused(path: Path) -> str:
    """What is said to who wants to attach; nothing reached the agent."""
    assert ask(path) is None
    with pytest.raises(ForeignSocket):
        own_link(path)
    with pytest.raises(NoAgent) as caught:
        attach(str(path), {})
    return str(caught.value)


@as_root
@pytest.mark.parametrize("of", ["socket", "directory"])
def test_an_agent_of_another_user_is_not(path: Path, of: str) -> None:
    what = path if of == "socket" else path.parent
    os.chown(what, NOBODY, NOBODY)
    text = refused(path)
    assert text.startswith(f"{what} belongs to user nobody ({NOBODY})")
    assert "runs as user root (0)" in text and "as the same user" in text


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777])
def test_a_directory_that_others_write_to_is_refused(path: Path, mode: int) -> None:
    path.parent.chmod(mode)
    assert f"has mode {mode:04o}" in refused(path)
    assert f"chmod go-w {path.parent}" in refused(path)
    path.parent.chmod(0o755)  # others may look
    assert ask(path) is not None


def test_what_is_no_socket_is_named(tmp_path: Path) -> None:
    file = tmp_path / "agent.sock"
    with pytest.raises(FileNotFoundError):
        check_path(file)
    with pytest.raises(NoAgent, match="no agent listens at .*No such file"):
        attach(str(file), {})
    file.write_text("")
    tmp_path.chmod(0o700)
    assert "is not a socket" in refused(file)


LISTENER = """
import os, socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
os.setuid(65534)
listener.listen()
print("listening", flush=True)
connection, _ = listener.accept()
connection.settimeout(10)
print(len(connection.recv(100)), flush=True)
"""


@as_root
def test_an_impostor_behind_an_own_socket_hears_nothing(tmp_path: Path) -> None:
    """The file is right, the process is not: the kernel's word counts."""
    tmp_path.chmod(0o700)
    path = tmp_path / "agent.sock"
    other = subprocess.Popen(
        [sys.executable, "-c", LISTENER, str(path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "listening\n"
        with pytest.raises(ForeignSocket, match="belongs to user nobody"):
            own_link(path)
        assert other.stdout.readline() == "0\n"  # closed, and nothing was sent
    finally:
        other.kill()
        other.wait(10)
        if other.stdout is not None:
            other.stdout.close()


ATTACHER = """
import socket, sys
connection = socket.socket(socket.AF_UNIX, fileno=int(sys.argv[1]))
import os
os.setuid(65534)
connection.connect(sys.argv[2])
connection.settimeout(10)
sys.stdout.buffer.write(connection.recv(10000))
"""


@as_root
def test_a_process_of_another_user_is_refused(path: Path) -> None:
    """Even where the directory would let it in."""
    path.parent.chmod(0o711)
    path.chmod(0o666)
    with socket.socket(socket.AF_UNIX) as connection:
        script = [sys.executable, "-c", ATTACHER]
        script += [str(connection.fileno()), path.name]
        told = subprocess.run(
            script,
            pass_fds=[connection.fileno()],
            cwd=path.parent,
            capture_output=True,
            timeout=30,
        ).stdout
    assert b"refused" in told and b"belongs to user nobody (65534)" in told
