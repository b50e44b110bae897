"""Compares Python clients of etcd at what an agent does with the store.

    python benchmarks/etcd_clients.py --txns 2000

Each client runs in a process of its own against one private etcd, in turns, so that a
busy machine slows all of them alike. Measured: a fenced transaction of 1 KiB (a
commit), the time from a put to the watch's event, processor time, import time, memory,
a call to a stopped server (SIGSTOP), and children started with `preexec_fn` while calls
go on.
`json` is `EtcdStore`; `aetcd` and `etcd-client-py` are measured if they are installed
(`pip install aetcd etcd-client-py`), inside their own event loop, which an agent would
have to reach from its threads at an extra cost.
"""

import argparse
import asyncio
import contextlib
import importlib
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

VALUE = b"x" * 1024
TIMEOUT_S = 2.0
CHILDREN = 30
MODULES = {
    "json": "dtft.elastic.store.etcd",
    "aetcd": "aetcd",
    "etcd-client-py": "etcd_client",
}


class Client(Protocol):
    """One client, inside an event loop."""

    async def put(self, key: bytes, value: bytes) -> None:
        """Writes one key."""
        ...

    async def get(self, key: bytes) -> None:
        """Reads one key."""
        ...

    async def fenced(self, fence: bytes, revision: int, key: bytes) -> bool:
        """Writes `VALUE` if the fence has this create revision."""
        ...

    async def watch(self, prefix: bytes, heard: Callable[[], None]) -> None:
        """Calls `heard` for every event under the prefix, until it is cancelled."""
        ...


class Json:
    """`EtcdStore`, called directly: it waits in the loop's thread."""

    def __init__(self, store: Any) -> None:
        """Takes the store."""
        from dtft.elastic.store import Compare, Put

        self._store, self._compare, self._put = store, Compare, Put

    async def put(self, key: bytes, value: bytes) -> None:
        """See `Client.put`."""
        self._store.put(key.decode(), value)

    async def get(self, key: bytes) -> None:
        """See `Client.get`."""
        self._store.get(key.decode())

    async def fenced(self, fence: bytes, revision: int, key: bytes) -> bool:
        """See `Client.fenced`."""
        fence_holds = self._compare(key=fence.decode(), target="create", value=revision)
        return self._store.txn(
            [fence_holds], [self._put(key=key.decode(), value=VALUE)]
        )

    async def watch(self, prefix: bytes, heard: Callable[[], None]) -> None:
        """See `Client.watch`."""
        stop, loop = threading.Event(), asyncio.get_running_loop()
        start = self._store.list(prefix.decode())[1] + 1

        def follow() -> None:
            for batch in self._store.watch(prefix.decode(), start, stop):
                for _ in batch:
                    heard()

        try:
            await loop.run_in_executor(None, follow)
        finally:
            stop.set()


class Aetcd:
    """`aetcd`: grpc.aio."""

    def __init__(self, client: Any) -> None:
        """Takes the client."""
        self._client = client

    async def put(self, key: bytes, value: bytes) -> None:
        """See `Client.put`."""
        await self._client.put(key, value)

    async def get(self, key: bytes) -> None:
        """See `Client.get`."""
        await self._client.get(key)

    async def fenced(self, fence: bytes, revision: int, key: bytes) -> bool:
        """See `Client.fenced`."""
        made = self._client.transactions
        done, _ = await self._client.transaction(
            [made.create(fence) == revision], [made.put(key, VALUE)], []
        )
        return done

    async def watch(self, prefix: bytes, heard: Callable[[], None]) -> None:
        """See `Client.watch`."""
        async for _ in await self._client.watch_prefix(prefix):
            heard()


class Rust:
    """`etcd-client-py`: the Rust client with a runtime of its own."""

    def __init__(self, communicator: Any) -> None:
        """Takes a connected communicator."""
        self._etcd, self._module = communicator, importlib.import_module("etcd_client")

    async def put(self, key: bytes, value: bytes) -> None:
        """See `Client.put`."""
        await self._etcd.put(key, value)

    async def get(self, key: bytes) -> None:
        """See `Client.get`."""
        await self._etcd.get(key)

    async def fenced(self, fence: bytes, revision: int, key: bytes) -> bool:
        """See `Client.fenced`."""
        m = self._module
        condition = m.Compare.create_revision(fence, m.CompareOp.EQUAL, revision)
        txn = m.Txn().when([condition]).and_then([m.TxnOp.put(key, VALUE)])
        return (await self._etcd.txn(txn)).succeeded()

    async def watch(self, prefix: bytes, heard: Callable[[], None]) -> None:
        """See `Client.watch`."""
        async for _ in self._etcd.watch_prefix(prefix):
            heard()


@contextlib.asynccontextmanager
async def connected(name: str, address: str) -> AsyncIterator[Client]:
    """The client of this name."""
    module = importlib.import_module(MODULES[name])
    if name == "json":
        store = module.EtcdStore(address, timeout_s=TIMEOUT_S)
        yield Json(store)
        store.close()
    elif name == "aetcd":
        host, _, port = address.rpartition(":")
        async with module.Client(host, int(port), timeout=TIMEOUT_S) as client:
            yield Aetcd(client)
    else:
        options = module.ConnectOptions().with_timeout(TIMEOUT_S)
        options = options.with_connect_timeout(TIMEOUT_S)
        async with module.Client([f"http://{address}"], options).connect() as found:
            yield Rust(found)


def resident_kib() -> int:
    """Memory of this process."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition("VmRSS:")[2].split()[0])


def summary(prefix: str, times_s: list[float]) -> dict[str, float]:
    """Median and 99th percentile in milliseconds."""
    ranked = sorted(times_s)
    return {
        f"{prefix}_median_ms": round(1e3 * statistics.median(ranked), 3),
        f"{prefix}_p99_ms": round(1e3 * ranked[int(0.99 * (len(ranked) - 1))], 3),
    }


async def timed(call: Awaitable[object]) -> float:
    """Seconds that a call takes."""
    begun = time.perf_counter()
    await call
    return time.perf_counter() - begun


async def outcome(call: Awaitable[object], limit_s: float) -> str:
    """How a call ends: the name of its error, "" for none."""
    try:
        await asyncio.wait_for(call, limit_s)
    except TimeoutError:
        return "no end within the limit"
    except Exception as error:
        return type(error).__name__
    return ""


async def watches(client: Client, count: int) -> dict[str, float]:
    """From the call of put to the watch's event."""
    prefix, heard_at, news = b"w-%d/" % os.getpid(), [0.0], threading.Event()

    def heard() -> None:
        heard_at[0] = time.perf_counter()
        news.set()

    watching = asyncio.create_task(client.watch(prefix, heard))
    while not news.is_set():
        await client.put(prefix + b"a", VALUE)
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.5)
    times: list[float] = []
    for _ in range(count):
        news.clear()
        begun = time.perf_counter()
        await client.put(prefix + b"a", VALUE)
        while not news.is_set():
            await asyncio.sleep(0)
        times.append(heard_at[0] - begun)
    watching.cancel()
    await asyncio.sleep(0)
    return summary("watch", times)


async def children(client: Client, fence: bytes, revision: int) -> dict[str, Any]:
    """Starts children as agents do, from another thread, while transactions go on."""
    from dtft.elastic.processes import die_with_parent

    found = {"children_ok": 0}

    def start() -> None:
        for _ in range(CHILDREN):
            child = subprocess.Popen(
                [sys.executable, "-c", ""], preexec_fn=die_with_parent
            )
            try:
                code = child.wait(20)
                found["children_ok"] += int(code == 0)
                if code:
                    found["child_exit_code"] = code
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()

    starting = asyncio.get_running_loop().run_in_executor(None, start)
    times = []
    while not starting.done():
        times.append(await timed(client.fenced(fence, revision, b"c")))
        await asyncio.sleep(0)
    await starting
    return {**found, "children": CHILDREN, **summary("txn_beside_children", times)}


async def stopped(client: Client, pid: int) -> dict[str, Any]:
    """One read while the server is stopped, and the first one after it goes on."""
    os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(0.2)  # until each of its threads has stopped
    begun = time.perf_counter()
    try:
        ended = await outcome(client.get(b"s"), 5 * TIMEOUT_S)
        seconds = time.perf_counter() - begun
    finally:
        os.kill(pid, signal.SIGCONT)
    await asyncio.sleep(1.0)
    return {
        "stopped_call_s": round(seconds, 2),
        "stopped_call": ended,
        "call_afterwards": await outcome(client.get(b"s"), 5 * TIMEOUT_S),
    }


async def measure(name: str, address: str, server: int, txns: int) -> dict[str, Any]:
    """All figures of one client, but for those of its import."""
    async with connected(name, address) as client:
        fence = b"f-%d" % os.getpid()
        await client.put(fence, b"leader")
        revision = _create_revision(address, fence)
        for _ in range(50):
            assert await client.fenced(fence, revision, b"c")
        cpu = time.process_time()
        times = [await timed(client.fenced(fence, revision, b"c")) for _ in range(txns)]
        cpu = time.process_time() - cpu
        found = {
            **summary("txn", times),
            "cpu_ms_per_txn": round(1e3 * cpu / txns, 3),
            **await watches(client, max(txns // 5, 50)),
            **await children(client, fence, revision),
            **await stopped(client, server),
            "threads": len(os.listdir("/proc/self/task")),
            "memory_mib": round(resident_kib() / 1024, 1),
        }
    await asyncio.sleep(0.5)
    return {**found, "threads_after_close": len(os.listdir("/proc/self/task"))}


def _create_revision(address: str, key: bytes) -> int:
    from dtft.elastic.store import EtcdStore

    store = EtcdStore(address)
    with contextlib.closing(store):
        found = store.get(key.decode())
    # The other clients write the key as it is, EtcdStore below its prefix.
    if found is None:
        raise LookupError(key)
    return found.create_revision


def run_child(name: str, address: str, server: int, txns: int) -> None:
    """Measures one client in this process and prints its figures."""
    importlib.import_module("dtft.elastic.store.api")
    before, begun = resident_kib(), time.perf_counter()
    importlib.import_module(MODULES[name])
    import_s = time.perf_counter() - begun
    imported = {
        "import_ms": round(1e3 * import_s, 1),
        "import_mib": round((resident_kib() - before) / 1024, 1),
    }
    found = asyncio.run(measure(name, address, server, txns))
    print(json.dumps({**imported, **found}), flush=True)
    os._exit(0)  # a thread that hangs is no reason to lose the figures


def run(txns: int, rounds: int, directory: Path) -> dict[str, Any]:
    """Measures every client that is installed; the best of `rounds` for each figure."""
    from dtft.elastic.store import EmbeddedEtcd

    found: dict[str, Any] = {}
    for number in range(rounds):
        for name, module in MODULES.items():
            if importlib.util.find_spec(module) is None:
                print(f"{name}: not installed, skipped", flush=True)
                continue
            etcd = EmbeddedEtcd(directory)
            etcd.start()
            try:
                etcd.wait_ready()
                child = subprocess.run(
                    [sys.executable, __file__, "--child", name]
                    + ["--address", etcd.address, "--server", str(_pid_of(etcd))]
                    + ["--txns", str(txns)],
                    capture_output=True,
                    text=True,
                    timeout=300,
                )
            finally:
                etcd.stop()
            if child.returncode != 0:
                print(f"{name}: {child.stderr[-2000:]}", flush=True)
                continue
            figures = json.loads(child.stdout.splitlines()[-1])
            said = child.stderr.splitlines()
            figures |= {"stderr_lines": len(said), "stderr": said[-1] if said else ""}
            print(f"round {number}: {name}: {json.dumps(figures)}", flush=True)
            best = found.setdefault(name, figures)
            for key, value in figures.items():
                if key.endswith("_ms") and value < best[key]:
                    best[key] = value
    return found


def _pid_of(etcd: Any) -> int:
    """The process that listens at the private etcd's client port."""
    port = f":{int(etcd.address.rpartition(':')[2]):04X}"
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    inode = next(
        line.split()[9]
        for line in lines
        if line.split()[1].endswith(port) and line.split()[3] == "0A"
    )
    for entry in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(entry) == f"socket:[{inode}]":
                return int(entry.parts[2])
    raise LookupError(f"no process listens at {etcd.address}")


def main() -> int:
    """Reads the arguments and prints the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--txns", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures here")
    for hidden in ("--child", "--address", "--server"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        run_child(options.child, options.address, int(options.server), options.txns)
    with tempfile.TemporaryDirectory(prefix="dtft-clients-") as directory:
        found = run(options.txns, options.rounds, Path(directory))
    print(json.dumps(found, indent=1))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
