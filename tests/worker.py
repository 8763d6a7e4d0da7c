"""One rank of the pool, on its own side of the pipe: a process that takes calls until its parent closes.

Processes are forked from a template that has imported torch and Ithaca already (`fork_on_request`): importing takes seconds,
a fork milliseconds. The parent's side is ranks.py; the messages between the two are here. Values travel packed, tensors by value,
so that no shared memory and no file descriptor is in flight.

Invariant: each `Call` is answered by one `Returned`, or by one `Raised` and then one `Idle`.
"""

from __future__ import annotations

import gc
import io
import os
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache


@dataclass(frozen=True, slots=True)
class Call:
    """One call as a worker receives it. `payload` is `(fn, args, kwargs)`, packed."""

    generation: int
    world: int
    timeout: float
    payload: bytes


@dataclass(frozen=True, slots=True)
class Returned:
    """What one rank returned, packed."""

    payload: bytes


@dataclass(frozen=True, slots=True)
class Raised:
    """What one rank raised, as text: exceptions themselves need not survive pickling."""

    error: str
    message: str
    traceback: str = ""
    when: float = field(default_factory=time.monotonic)  # one clock for all processes of a machine

    def __str__(self) -> str:
        return f"{self.error}: {self.message}"


@dataclass(frozen=True, slots=True)
class Idle:
    """The worker has started, or has left its process group after a `Raised`: it waits for a call."""


def pack(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpack(payload: bytes) -> Any:
    return torch.load(io.BytesIO(payload), weights_only=False)


# A request to a template and its answer are two numbers each.
NUMBERS = struct.Struct("!qq")


def fork_on_request(descriptor: int) -> None:
    """Fork workers and wait for them, as the parent asks over a socket, until it closes.

    With a descriptor come (rank, port): the answer is (process id, 0). Without come (process id, seconds): the answer is
    (process id, exit status), after a kill where the process is alive that long after.
    """
    # Ctrl-C reaches the whole process group; the default action ends a worker even inside a collective.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    torch.set_num_threads(1)
    import_module("ithaca.parallelize")
    gc.collect()
    # What is imported stays: without this, the collection after every call walks over all of it, for 0.2 s a rank.
    gc.freeze()
    control = socket.socket(fileno=descriptor)
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, NUMBERS.size, 1)
        if not message:
            return
        first, second = NUMBERS.unpack(message)
        if not descriptors:
            control.sendall(NUMBERS.pack(first, _ended(first, second)))
            continue
        process = os.fork()
        if process == 0:
            control.close()
            try:
                serve(descriptors[0], first, second)
            finally:
                os._exit(1)
        os.close(descriptors[0])
        control.sendall(NUMBERS.pack(process, 0))


def _ended(process: int, patience: float) -> int:
    """Return the exit status of a child of this process, killed where it outlives its parent's patience."""
    deadline = time.monotonic() + patience
    try:
        while True:
            found, status = os.waitpid(process, os.WNOHANG)
            if found:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() >= deadline:
                os.kill(process, signal.SIGKILL)
            time.sleep(0.005)
    except ChildProcessError:
        # Waited for before: a process that died during a call.
        return 0


def serve(descriptor: int, rank: int, port: int) -> None:
    """The whole life of a worker: take calls from the parent until the connection closes."""
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    connection = Connection(descriptor)
    calls: SimpleQueue[Call] = SimpleQueue()
    threading.Thread(target=_receive, args=(connection, calls), daemon=True).start()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    connection.send(Idle())
    joined, imported = -1, len(sys.modules)
    while True:
        call = calls.get()
        try:
            if call.generation != joined:
                _leave()
                if len(sys.modules) > imported:
                    # By calls since, torch's compiler with them. Here no group is open that would stay for good.
                    gc.collect()
                    gc.freeze()
                    imported = len(sys.modules)
                _join(store, rank, call)
                joined = call.generation
            fn, args, kwargs = unpack(call.payload)
            # After the imports that this takes in a rank that is new: some draw numbers.
            torch.manual_seed(0)
            answer = Returned(pack(fn(*args, **kwargs)))
            del fn, args, kwargs
        except BaseException as error:  # SystemExit and pytest's own outcomes are answers too
            connection.send(Raised(type(error).__name__, str(error), traceback.format_exc()))
            # Frames in the traceback hold the mesh and its groups: without them, leaving closes the sockets.
            traceback.clear_frames(error.__traceback__)
            del error
            gc.collect()
            _leave()
            joined = -1
            connection.send(Idle())
        else:
            connection.send(answer)
            gc.collect()


def _receive(connection: Connection, calls: SimpleQueue[Call]) -> None:
    """Feed the queue. A thread of its own notices the parent's end while the main thread is in a collective."""
    while True:
        try:
            calls.put(connection.recv())
        except (EOFError, OSError):
            os._exit(0)


def _join(store: dist.TCPStore, rank: int, call: Call) -> None:
    launch = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": call.world, "LOCAL_WORLD_SIZE": call.world}
    os.environ.update({name: str(value) for name, value in launch.items()})
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(f"generation{call.generation}", store),
        rank=rank,
        world_size=call.world,
        timeout=timedelta(seconds=call.timeout),
    )


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
        # DTensor remembers results by mesh, and an equal mesh of the next group would be given the dead one's.
        _clear_sharding_prop_cache()
