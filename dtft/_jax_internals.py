"""The only module of dtft that uses JAX's private API.

It uses the private API for:

* JAX's coordination service: running it in a process that is no trainer, connecting a
  trainer to it, publishing the devices of all processes, and telling XLA of processes
  that have died or were replaced.
* The key-value store of the coordination service, for text from one process to others.
* JAX's persistent compilation cache: which process writes it, and what the cache key of
  a CPU program depends on.
* Loading a compiled CPU program for other devices.
* The bytes of a CPU array's buffer, and the order of an array's dims in memory.
* Compilation of a module that another process lowered.
* The number of constant and carried arguments of a `scan`.
* Whether JAX traces cuDNN's attention on a machine without cuDNN.

Functions that import private modules check the version of JAX first. No other module of
dtft may import ``jax._src`` or private modules of ``jaxlib``.
"""

import contextlib
import ctypes
import functools
import io
import math
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

_TESTED = ((0, 10), (0, 13))
"""First tested version (major, minor), and the first untested version above."""


def check_version(version: str | None = None) -> None:
    """Checks that dtft was tested with a version of JAX; by default the installed one.

    Raises:
        RuntimeError: the version was not tested; the message names this version and
            the tested versions.
    """
    _check_version(version or jax.__version__)


@functools.cache
def _check_version(found: str) -> None:
    numbers = tuple(int(part) for part in found.split(".")[:2])
    if not _TESTED[0] <= numbers < _TESTED[1]:
        raise RuntimeError(
            f"jax {found} is installed, but dtft was tested with 0.10 to 0.12: "
            "install the versions of constraints.txt."
        )


def start_coordination_service(
    address: str,
    num_processes: int,
    heartbeat_s: float,
    cpu_devices: int = 0,
    *,
    is_open: bool = False,
) -> Any:
    """Starts JAX's coordination service in this process.

    The service runs as long as the returned object exists.

    If the service is not open, processes wait until all have connected, and process 0
    then publishes the devices of all. If it is open, a process can join at any time,
    also with the index of a process that has died. JAX's service allows this once every
    index has been connected, so this function itself connects with each index once
    before it returns. The processes of an open service have the indices 1 to
    num_processes - 1; none may have index 0.

    Args:
        address: host:port at which the service listens.
        num_processes: number of indices: 0 to num_processes - 1.
        heartbeat_s: heartbeat timeout of JAX in seconds, rounded up to whole seconds.
        cpu_devices: number of CPU devices of every process. Above 0, the service is
            open, and this function publishes the devices of all processes. With 0 the
            processes of an open service must call `publish_devices`.
        is_open: whether the service is open although `cpu_devices` is 0.
    """
    check_version()
    from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

    limit_s = max(1, math.ceil(heartbeat_s))
    service = _jax.get_distributed_runtime_service(
        address,
        num_processes,
        heartbeat_timeout=limit_s,
        shutdown_timeout=5,
        recoverable=True,
    )
    if cpu_devices or is_open:

        def connect_once(index: int) -> None:
            client = _jax.get_distributed_runtime_client(
                address, index, init_timeout=60, heartbeat_timeout=limit_s
            )
            client.connect()  # returns when all have connected
            if index == 0 and cpu_devices:
                topology = _cpu_topology(num_processes, cpu_devices)
                client.key_value_set_bytes(_TOPOLOGY, topology)

        with ThreadPoolExecutor(num_processes) as threads:
            list(threads.map(connect_once, range(num_processes)))
    return service


_TOPOLOGY = "cpu:global_topology/cpu"
"""Key of JAX's coordination service that holds the CPU devices of all processes."""
_PER_PROCESS = 2048
"""Difference between the ids of the first CPU devices of two successive processes."""


def _cpu_topology(num_processes: int, cpu_devices: int) -> bytes:
    """Encodes XLA's GlobalTopologyProto of `num_processes` processes on CPU.

    Each process has `cpu_devices` devices.
    """
    nodes = b""
    for index in range(num_processes):
        node = _encoded(1, index) + _encoded(2, b"dtft")
        for number in range(cpu_devices):
            at = index * _PER_PROCESS + number
            node += _encoded(
                3,
                _encoded(1, number)
                + _encoded(4, at)
                + _encoded(8, b"cpu")
                + _encoded(9, f"CpuDevice(id={at})".encode())
                + _encoded(10, f"cpu:{at}".encode()),
            )
        nodes += _encoded(1, node)
    return nodes


_GPU_PLATFORMS = ("cuda", "rocm")
_NODE, _BOOT, _DEVICE = 1, 2, 3
"""Field numbers in XLA's LocalTopologyProto: index of the process, its boot id, and a
device (repeated)."""
_DEVICE_ID, _PARTITION = 4, 5
"""Field numbers in XLA's DeviceProto: the device's id among the devices of all
processes, and the number of its machine."""
_PLACED = (_DEVICE_ID, _PARTITION)


def publish_devices(index: int, num_processes: int, found: threading.Event) -> None:
    """Publishes the devices of all processes in an open coordination service.

    JAX has process 0 publish the devices, but an open service has no process 0 (see
    `start_coordination_service`). Every process is assumed to have the same devices as
    this one.

    While JAX looks for devices, it waits for the published devices of each platform
    (such as CUDA and CPU). So call this function on another thread. It returns once
    `found` is set.

    Args:
        index: index of this process.
        num_processes: number of processes of the service, with the unused index 0.
        found: the caller sets it when JAX has found the devices.
    """
    check_version()
    from jax._src import distributed

    client: Any = distributed.global_state.client
    published = set[str]()
    while not found.wait(0.01):
        for platform in ("cpu", *_GPU_PLATFORMS):
            local = client.key_value_dir_get_bytes(f"{platform}:local_topology")
            for key, own in local:
                name = key.replace("local", "global").rpartition("/")[0]
                if key.endswith(f"/{index}") and name not in published:
                    every = topology_like(own, num_processes, platform)
                    # Another process may have published the same.
                    client.key_value_set_bytes(name, every, allow_overwrite=True)
                    published.add(name)


def topology_like(own: bytes, num_processes: int, platform: str) -> bytes:
    """Encodes XLA's GlobalTopologyProto of processes that all have the same devices.

    Args:
        own: encoded LocalTopologyProto of one process; each of the other processes has
            the same devices.
        num_processes: number of processes.
        platform: XLA's name of the platform, such as "cuda". For "cpu" only the number
            of devices is taken from `own`.
    """
    fields = list(_fields(own))
    devices = [value for number, value, _ in fields if number == _DEVICE]
    if platform == "cpu":
        return _cpu_topology(num_processes, len(devices))
    topology = b""
    for index in range(num_processes):
        at, node = index * len(devices), _encoded(_NODE, index)
        for number, value, whole in fields:
            if number == _BOOT:
                node += _encoded(_BOOT, value + f"-{index}".encode())
            elif number == _DEVICE:
                rest = [(it, part) for it, _, part in _fields(value)]
                device = b"".join(it for n, it in rest if n not in _PLACED)
                device += _encoded(_DEVICE_ID, at) + _encoded(_PARTITION, index)
                node += _encoded(_DEVICE, device)
                at += 1
            elif number != _NODE:
                node += whole
        topology += _encoded(1, node)
    return topology


def _fields(message: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """Yields the fields of an encoded protocol buffer.

    Each field is a tuple: its number, the bytes of its content, and all its bytes (tag
    and length included). In the example, the content of field 1 is the number 300 as a
    varint.

    >>> list(_fields(_encoded(1, 300) + _encoded(4, b"ab")))
    [(1, b'\\xac\\x02', b'\\x08\\xac\\x02'), (4, b'ab', b'"\\x02ab')]
    """
    at = 0
    while at < len(message):
        begin, (tag, at) = at, _read_varint(message, at)
        content = at
        match tag & 7:
            case 0:
                at = _read_varint(message, at)[1]
            case 1:
                at += 8
            case 2:
                size, content = _read_varint(message, at)
                at = content + size
            case 5:
                at += 4
            case kind:
                raise ValueError(f"field {tag >> 3} of XLA's topology has kind {kind}")
        yield tag >> 3, message[content:at], message[begin:at]


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    """Decodes the varint at position `at`; returns it and the position after it."""
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def give_up_process(address: str, index: int) -> None:
    """Makes the coordination service count a process as replaced.

    The service must be open: a process may join at any time
    (`start_coordination_service`). This function connects with the index of the process
    and disconnects again. If the process still runs, JAX ends it. Collectives that it
    shares with other processes end with an error.

    Args:
        address: host:port of the service.
        index: index of the process to replace.
    """
    check_version()
    from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

    client = _jax.get_distributed_runtime_client(
        address,
        index,
        init_timeout=5,
        shutdown_timeout=1,
        heartbeat_timeout=10,
        shutdown_on_destruction=False,
    )
    client.connect()
    client.shutdown()


def know_processes(indices: Sequence[int], timeout_s: float) -> None:
    """Tells XLA the incarnations of the processes that share the next collectives.

    JAX identifies each process that connects by a new number, its incarnation, also if
    the process has the index of a dead one. On GPUs XLA aborts a collective once one of
    its processes has died or was replaced, but only if XLA knew the incarnation of that
    process. Returns when all processes in `indices` have called this function. All must
    be connected to the same coordination service.

    `timeout_s` does not limit the wait for a process that is connected but does not
    call this function, because JAX has no such limit.

    Args:
        indices: indices of the processes, including this one.
        timeout_s: longest wait for processes that are not connected, in seconds.

    Raises:
        TimeoutError: a process was not connected in time.
    """
    check_version()
    from jax._src import distributed

    client: Any = distributed.global_state.client
    until = time.monotonic() + timeout_s
    while missing := set(indices) - client.get_live_nodes(sorted(indices)).keys():
        if time.monotonic() > until:
            raise TimeoutError(f"processes {sorted(missing)} of the world did not come")
        time.sleep(0.01)


def _encoded(number: int, value: int | bytes) -> bytes:
    """Encodes a field of a protocol buffer; returns b"" for the integer 0.

    0 is the default of an integer field. `number` is the field's number in the message.
    """
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value) if value else b""
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    low, rest = value & 0x7F, value >> 7
    return bytes([low | 0x80]) + _varint(rest) if rest else bytes([low])


def join_world(
    address: str,
    *,
    process_id: int,
    num_processes: int,
    heartbeat_s: float,
    timeout_s: float,
) -> None:
    """Connects this process to a coordination service that is already running.

    Replaces `jax.distributed.initialize`, which would start a service in process 0.
    Also sets options of JAX: recoverable processes, no preemption service, and gloo for
    collectives on CPU.

    Args:
        address: host:port of the coordination service.
        process_id: index of this process, 0 to num_processes - 1; from 1 if the service
            is open (`start_coordination_service`).
        num_processes: number of indices of the service, which never changes.
        heartbeat_s: heartbeat timeout of JAX in seconds, rounded up to whole seconds.
        timeout_s: longest wait for the service, in seconds.
    """
    check_version()
    from jax._src import distributed
    from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

    jax.config.update("jax_enable_recoverability", True)
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    client = _jax.get_distributed_runtime_client(
        address,
        process_id,
        init_timeout=math.ceil(timeout_s),
        use_compression=True,
        heartbeat_timeout=max(1, math.ceil(heartbeat_s)),
    )
    client.connect()
    state = distributed.global_state
    state.client = client
    state.process_id = process_id
    state.num_processes = num_processes
    state.coordinator_address = address


def write_compilation_cache(process_id: int, *, writes: bool) -> None:
    """Sets whether this process writes to JAX's persistent compilation cache.

    JAX writes only in process 0, but no process of an open coordination service
    (`start_coordination_service`) has index 0. So this function sets the index that
    JAX's cache reads to 0 in a process that writes. JAX also reads this index while it
    looks for devices, so call the function only afterwards. `jax.process_index()` does
    not change.

    Args:
        process_id: true index of this process.
        writes: whether the process writes.
    """
    check_version()
    from jax._src import distributed

    distributed.global_state.process_id = 0 if writes else process_id


def share_cached_programs() -> None:
    """Lets processes share CPU programs in JAX's compilation cache.

    JAX's key of a CPU program includes the ids of its devices, and a fingerprint that
    differs between processes. So each process would compile the same program again.
    Afterwards the key has the processor's features instead of both. This is safe on
    CPU, because XLA sets the devices of a CPU program when it loads the program. Call
    this function only in a process whose platform is CPU.

    Also makes the writing of an entry atomic, so that other processes never read a part
    of an entry.
    """
    check_version()
    from jax._src import cache_key, lru_cache

    hashed = cache_key._hash_serialized_compile_options
    put_locked, read = lru_cache.LRUCache.put, lru_cache.LRUCache.get

    def hash_without_devices(
        hash_obj: Any, compile_options: Any, strip_device_assignment: bool = False
    ) -> None:
        del strip_device_assignment
        hashed(hash_obj, compile_options, strip_device_assignment=True)

    def put(self: Any, key: str, value: bytes) -> None:
        if self.eviction_enabled:  # then readers and writers take a lock
            put_locked(self, key, value)
            return
        entry = self.path / f"{key}-cache"
        if entry.exists():
            return
        part = self.path / f"{key}.{os.getpid()}.{threading.get_native_id()}.part"
        try:
            part.write_bytes(value)
            part.replace(entry)
        except OSError:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            raise

    def get(self: Any, key: str) -> bytes | None:
        _read.looked, _read.entry = True, read(self, key)
        return _read.entry

    def hash_processor(hash_obj: Any, accelerators: Any) -> None:
        del accelerators
        hash_obj.update(_processor().encode())

    cache_key._hash_serialized_compile_options = hash_without_devices
    cache_key._hash_accelerator_config = hash_processor
    lru_cache.LRUCache.put, lru_cache.LRUCache.get = put, get


class _Read(threading.local):
    """The entry that a thread has read last from JAX's compilation cache.

    Each thread has its own `entry` and `looked`. `PortableProgram` resets them before
    it compiles. `looked` is whether the thread has looked for an entry since then.
    """

    looked = False
    entry: bytes | None = None
    """The entry; None if the cache had none, or if the thread has read none yet."""


_read = _Read()


class PortableProgram:
    """A compiled CPU program that can be loaded for other devices.

    This saves tracing, lowering and compiling the function for these other devices.
    """

    def __init__(self, lowered: jax.stages.Lowered) -> None:
        """Compiles a function, or loads it from JAX's compilation cache.

        Args:
            lowered: a function that was lowered for a mesh of CPU devices, and not
                compiled before.
        """
        check_version()
        _read.looked, _read.entry = False, None
        self.compiled: jax.stages.Compiled = lowered.compile()
        """The program for the devices that the function was lowered for."""
        # XLA cannot serialize a program again that it has loaded, so the entry is kept.
        self._entry, _read.entry = _read.entry, None
        cached = bool(jax.config.jax_compilation_cache_dir)  # pyright: ignore[reportAttributeAccessIssue]
        self._has_bytes = _read.looked or not cached
        """Whether the program can be serialized: from its cache entry or by XLA."""
        self._lock = threading.Lock()
        self._pickled: bytes | None = None

    def on(self, own: Sequence[Any], others: Sequence[Any]) -> jax.stages.Compiled:
        """Loads the program for other devices.

        Args:
            own: the devices that the function was lowered for, in mesh order.
            others: the devices to load the program for; as many, in mesh order.

        Raises:
            ValueError: the function closes over arrays; or JAX has a compilation cache,
                and `share_cached_programs` was not called before the program was
                compiled.
        """
        program: Any = self.compiled
        if not self._has_bytes:
            raise ValueError(
                "the program may have been loaded from JAX's compilation cache, and "
                "its entry was not kept. Call share_cached_programs before it is "
                "compiled."
            )
        if program._params.const_args:
            raise ValueError(
                "the program closes over arrays, which stay on their devices. Make "
                "them arguments of the function."
            )
        with self._lock:
            if self._pickled is None:
                self._pickled = self._pickle(program)
        places = dict(zip((it.id for it in own), others, strict=True))
        unloaded, arguments = _Unpickler(self._pickled, places).load()
        return jax.stages.Compiled(
            unloaded.load(),
            [],
            program.in_tree.unflatten(arguments),
            program.out_tree,
            no_kwargs=program._no_kwargs,
        )

    def _pickle(self, program: Any) -> bytes:
        from jax._src import compilation_cache

        content = None
        if self._entry is not None:
            entry = compilation_cache.decompress_executable(self._entry)
            content, _ = compilation_cache.extract_executable_and_time(entry)
            self._entry = None
        pickled = io.BytesIO()
        arguments = jax.tree.leaves(program.args_info)
        unloaded = program._executable._unloaded_executable
        _Pickler(pickled, content).dump((unloaded, arguments))
        return pickled.getvalue()


class _Pickler(pickle.Pickler):
    """Pickles a compiled JAX program; devices are pickled as their ids."""

    def __init__(self, file: io.BytesIO, content: bytes | None) -> None:
        """Takes the file to write to, and the program in XLA's serialized form.

        `content` is the serialized program; None: the pickler serializes the program
        itself.
        """
        super().__init__(file)
        self._content = content

    def persistent_id(self, obj: Any) -> tuple[str, Any] | None:
        from jax._src.lib import (
            _jax,  # pyright: ignore[reportPrivateImportUsage]
            xla_client,  # pyright: ignore[reportPrivateImportUsage]
        )

        if isinstance(obj, (xla_client.LoadedExecutable, _jax.Executable)):
            content = self._content
            return "program", obj.serialize() if content is None else content
        if isinstance(obj, xla_client.Device):
            return "device", obj.id
        if isinstance(obj, xla_client.Client):
            return "client", None
        return None


class _Unpickler(pickle.Unpickler):
    """Unpickles what `_Pickler` wrote, with other devices.

    Each pickled device is replaced by the device that `places` has for its id.
    """

    def __init__(self, pickled: bytes, places: Mapping[int, Any]) -> None:
        """Takes the bytes that `_Pickler` wrote, and the new devices.

        `places` maps the id of each pickled device to the device that replaces it.
        """
        super().__init__(io.BytesIO(pickled))
        self._places = places

    def persistent_load(self, pid: Any) -> Any:
        from jax._src.lib import (
            xla_client,  # pyright: ignore[reportPrivateImportUsage]
        )
        from jax.extend.backend import get_compile_options

        kind, value = pid
        devices: list[Any] = list(self._places.values())
        client = devices[0].client
        if kind == "device":
            return self._places[value]
        if kind == "client":
            return client
        options = get_compile_options(
            num_replicas=1,
            num_partitions=len(devices),
            device_assignment=np.asarray(devices, dtype=object).reshape(1, -1),
            backend=client,
        )
        where = xla_client.DeviceList(tuple(devices))
        return client.deserialize_executable(value, where, options)


@functools.cache
def _processor() -> str:
    """Describes this host's processor: its architecture and instruction sets."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith(("flags", "features")):
                return f"{os.uname().machine} {line}"
    return os.uname().machine


def told_by(teller: int, key: str, text: str, timeout_s: float) -> str:
    """Broadcasts a text from process `teller` to other processes; returns this text.

    Uses the key-value store of JAX's coordination service. A collective would time out
    if `teller` needs minutes to produce the text. In a process that is not connected to
    a service, returns `text`.

    Args:
        teller: index of the process whose text is broadcast.
        key: name of the text; may be used only once in the life of the service.
        text: the text to broadcast in process `teller`; ignored in other processes.
        timeout_s: longest wait of the other processes for the text, in seconds.

    Raises:
        jax.errors.JaxRuntimeError: the text did not come in time.
    """
    check_version()
    from jax._src import distributed

    client = distributed.global_state.client
    if client is None:
        return text
    if jax.process_index() == teller:
        _set_and_tell(client, key, text)
        return text
    return client.blocking_key_value_get(key, math.ceil(1e3 * timeout_s))


def meet(
    name: str,
    processes: Sequence[int],
    timeout_s: float,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Waits until every process in `processes` has called this function.

    Each process sets a key of JAX's coordination service and waits for the keys of the
    other processes. Returns at once if `processes` has only one index, or if this
    process is not connected to a service.

    Args:
        name: name of the meeting; may be used only once in the life of the service.
        processes: indices of the processes; this process must be one of them.
        timeout_s: longest wait in seconds.
        check: called repeatedly during the wait; may raise an error to end it.

    Raises:
        TimeoutError: another process did not call the function in time.
    """
    check_version()
    from jax._src import distributed

    client = distributed.global_state.client
    if client is None or len(processes) == 1:
        return
    until = time.monotonic() + timeout_s
    _set_and_tell(client, f"{name}/{jax.process_index()}", "1")
    for process in processes:
        while not _is_set(client, f"{name}/{process}"):
            check()
            if time.monotonic() > until:
                raise TimeoutError(f"not all processes came to {name} in time")


_CHECK_S = 0.05
"""Longest wait for a key of the coordination service between two checks, in seconds."""


def _is_set(client: Any, key: str) -> bool:
    """Waits up to 50 ms (`_CHECK_S`) for a key; returns whether the key is set."""
    try:
        client.blocking_key_value_get(key, round(1e3 * _CHECK_S))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" in str(error):
            return False
        raise
    return True


_listeners: list[Callable[[str, bytes], None]] = []


def tell_of_keys(listener: Callable[[str, bytes], None]) -> None:
    """Registers a function that is called for each key that this process sets.

    It is called only for keys of the coordination service that `meet` or `told_by` set,
    as `listener(key, value)`, after the key is set and on the same thread. It must not
    block.
    """
    _listeners.append(listener)


def _set_and_tell(client: Any, key: str, text: str) -> None:
    client.key_value_set(key, text, allow_overwrite=True)
    for listener in _listeners:
        listener(key, text.encode())


def service_keys(directory: str) -> dict[str, bytes]:
    """Returns the coordination service's keys under `directory/`, with their values.

    Returns {} in a process that is not connected to a service.
    """
    check_version()
    from jax._src import distributed

    client = distributed.global_state.client
    return dict(client.key_value_dir_get_bytes(directory)) if client is not None else {}


def delete_service_keys(directory: str) -> None:
    """Deletes the coordination service's keys under `directory/`.

    Does nothing in a process that is not connected to a service.
    """
    check_version()
    from jax._src import distributed

    client = distributed.global_state.client
    if client is not None:
        client.key_value_delete(f"{directory}/")


def set_service_key(key: str, value: bytes) -> None:
    """Sets a key of the coordination service; overwrites a value that it has.

    Does nothing in a process that is not connected to a service.
    """
    check_version()
    from jax._src import distributed

    client = distributed.global_state.client
    if client is not None:
        client.key_value_set_bytes(key, value, allow_overwrite=True)


def cpu_buffer(array: jax.Array) -> memoryview:
    """Returns the bytes of a CPU array as a view that holds no reference to the array.

    The array must be computed already, and be on a single device. `np.asarray` would
    keep a reference to the array, which cancels donation. The view is valid only until
    the array is deleted or donated: use it at once.
    """
    size = array.size * array.dtype.itemsize
    address = array.unsafe_buffer_pointer()
    return memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")


def order_of_dims(array: jax.Array) -> tuple[int, ...] | None:
    """Returns the dims of an array in their order in memory, slowest-varying first.

    Returns None for row-major order. The array must be on a single device.
    """
    # `array.format` makes several objects, which is slow for a state of many leaves.
    found = getattr(array, "_pjrt_layout", None)
    if found is not None:
        return _order_of(found)
    layout = array.format.layout  # pyright: ignore[reportAttributeAccessIssue]
    return None if layout is None else _unless_row_major(layout.major_to_minor)


@functools.lru_cache(maxsize=256)
def _order_of(layout: Any) -> tuple[int, ...] | None:
    from jax.experimental.layout import Layout

    return _unless_row_major(Layout.from_pjrt_layout(layout).major_to_minor)


def _unless_row_major(order: tuple[int, ...]) -> tuple[int, ...] | None:
    return None if order == tuple(range(len(order))) else order


def compile_module(
    module: bytes, devices: Sequence[Any], options: Mapping[str, Any]
) -> Any:
    """Compiles a lowered `jit` function for the given devices, as `jit` would.

    Args:
        module: StableHLO with shardings, as MLIR bytecode of this version of JAX.
        devices: devices in mesh order. They may be devices of a topology description,
            which this machine need not have.
        options: XLA compiler options, such as `{"xla_backend_optimization_level": 0}`.

    Returns:
        XLA's executable, with `hlo_modules()` and `get_compiled_memory_stats()`.
    """
    check_version()
    from jax._src.interpreters import mlir
    from jax._src.lib import (
        _jax,  # pyright: ignore[reportPrivateImportUsage]
        xla_client,  # pyright: ignore[reportPrivateImportUsage]
    )
    from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
    from jax.extend.backend import get_compile_options

    with mlir.make_ir_context():
        parsed = ir.Module.parse(module)
        settings = get_compile_options(
            num_replicas=1,
            num_partitions=len(devices),
            device_assignment=np.asarray(devices, dtype=object).reshape(1, -1),
            env_options_overrides=dict(options),
            backend=devices[0].client,
        )
        arguments, results = _is_placed(parsed, ir)
        build = settings.executable_build_options
        build.allow_spmd_sharding_propagation_to_parameters = [
            not placed for placed in arguments
        ]
        build.allow_spmd_sharding_propagation_to_output = [
            not placed for placed in results
        ]
        where = xla_client.DeviceList(tuple(devices))
        client = devices[0].client
        only = isinstance(client, _jax.CompileOnlyPyClient)
        compile_ = client.compile if only else client.compile_and_load
        return compile_(parsed, executable_devices=where, compile_options=settings)


def scan_arguments(eqn: Any) -> tuple[int, int]:
    """Returns the number of constants and of carried values of a `scan`.

    `eqn` is the equation of the `scan` in a jaxpr. The constants are its first
    arguments, followed by the carry. Older versions of JAX have both numbers as
    parameters of the equation. JAX 0.12 has the parameter `ft_in` instead, the trees of
    the arguments; there this function counts them.
    """
    if "ft_in" in eqn.params:
        constants, carry, _ = eqn.params["ft_in"].unpack()
        return len(constants), len(carry)
    return eqn.params["num_consts"], eqn.params["num_carry"]


@functools.cache
def is_cudnn_installed() -> bool:
    """Whether JAX finds cuDNN on this machine.

    Checks once per process; `cudnn_assumed` does not change the answer.
    """
    from jax._src.cudnn import fused_attention_stablehlo as attention

    try:
        attention.check_cudnn_version()
    except RuntimeError:
        return False
    return True


_ASSUMED_CUDNN = 91000
"""Version of cuDNN (9.10) for which attention is traced on a machine without cuDNN."""
_ASSUMING = threading.Lock()
_assumers: list[tuple[Any, Any]] = []
"""For each running `with` block of `cudnn_assumed`, JAX's own two functions that check
cuDNN; the last block to end restores them."""


@contextlib.contextmanager
def cudnn_assumed() -> Iterator[None]:
    """Makes JAX trace cuDNN's attention in a `with` block, on a machine without cuDNN.

    JAX refuses to trace cuDNN's attention without cuDNN, although tracing runs no
    kernel. In the block, JAX assumes cuDNN 9.10 and accepts any compute capability.
    Several threads may be in a block at once; the last to leave restores JAX. On a
    machine with cuDNN the block changes nothing.
    """
    check_version()
    from jax._src.cudnn import fused_attention_stablehlo as attention

    if is_cudnn_installed():
        yield
        return
    with _ASSUMING:
        found = attention.check_cudnn_version, attention.check_compute_capability
        _assumers.append(_assumers[0] if _assumers else found)
        attention.check_cudnn_version = lambda: _ASSUMED_CUDNN
        attention.check_compute_capability = lambda capability: True
    try:
        yield
    finally:
        with _ASSUMING:
            found = _assumers.pop()
            if not _assumers:
                attention.check_cudnn_version, attention.check_compute_capability = (
                    found
                )


def _is_placed(module: Any, ir: Any) -> tuple[list[bool], list[bool]]:
    """Returns which arguments and which results of `module`'s `main` have a sharding.

    `module` is an MLIR module, and `ir` is the Python module `jaxlib.mlir.ir`. Each
    list has one bool per argument or result.
    """
    main = next(
        op for op in module.body.operations if op.attributes["sym_name"].value == "main"
    )

    def placed(attributes: str, count: int) -> list[bool]:
        if attributes not in main.attributes:
            return [False] * count
        return [
            "sdy.sharding" in one or "mhlo.sharding" in one
            for one in ir.ArrayAttr(main.attributes[attributes])
        ]

    kind = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value)
    return (
        placed("arg_attrs", len(kind.inputs)),
        placed("res_attrs", len(kind.results)),
    )
