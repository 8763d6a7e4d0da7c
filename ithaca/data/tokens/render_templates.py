"""Chat templates rendered in a process of their own, bounded in time, memory and length of output.

A template is a program that comes with a model's folder. Jinja's sandbox keeps it from files, not from endless loops
or from filling the memory, and no thread can be stopped in the middle of `'x' * 10**12`. So each Python process starts
one renderer, at the first conversation (about a second, without torch), and uses it for all sources.

    this process  --(tokenizer once; then messages, template, limits)-->  the renderer
                  <--(text and spans, or the reason why not)------------

The time limit counts the renderer's own CPU time: a busy machine refuses nothing that a free one accepts, and all ranks
decide alike. A template beyond a limit is a DataError with the template's name; a refusal in the template's own words
is the row's fault.

Invariant: the text is that of the tokenizer's own `apply_chat_template`.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import functools
import hashlib
import json
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from typing import IO, Any

from ithaca.constants import GIB
from ithaca.errors import DataError

_SIZE = struct.Struct("<Q")
_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from ithaca.data.tokens.render_templates import serve; serve()"
# Wall-clock limit as a multiple of the CPU seconds: a renderer that takes longer is not slow but blocked.
_PATIENCE = 30


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """Limits for one conversation: CPU seconds, bytes of memory beyond those of the messages, letters of output."""

    seconds: float = 20.0
    memory: int = 2 << 30
    letters: int = 1 << 26


LIMITS = RenderLimits()


@dataclass(frozen=True, slots=True)
class RenderJob:
    """One rendering. `prompt`: append the generation prompt. `track`: return the spans of `{% generation %}`."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    prompt: bool = False
    track: bool = False


@dataclass(frozen=True, slots=True)
class Rendered:
    """Text of a conversation and the letters within `{% generation %}`; or `refused`, the template's own words."""

    text: str = ""
    spans: tuple[tuple[int, int], ...] = ()
    refused: str = ""


class Template:
    """Chat template of a tokenizer. `name`: its name in messages."""

    def __init__(self, tokenizer: Any, source: str, name: str, limits: RenderLimits | None = None) -> None:
        self.tokenizer, self.source, self.name = tokenizer, source, name
        self.limits = limits or LIMITS

    def __getstate__(self) -> dict[str, Any]:
        # Without the cached pickle, which holds the tokenizer a second time.
        kept = ("tokenizer", "source", "name", "limits")
        return {key: value for key, value in self.__dict__.items() if key in kept}

    def render(self, jobs: Sequence[RenderJob]) -> list[Rendered]:
        """Return one answer for each job; DataError if the template exceeds a limit."""
        asked = [(job.messages, job.tools, job.prompt, job.track) for job in jobs]
        limits = (self.limits.seconds, self.limits.memory, self.limits.letters)
        try:
            request = pickle.dumps((self.key, self.source, asked, limits))
        except (RecursionError, pickle.PicklingError, TypeError, AttributeError) as error:
            return [Rendered(refused=f"its values are nested too deeply or no plain data: {error}")] * len(jobs)
        answers = _renderer().ask(self, request)
        over = next((answer["limit"] for answer in answers if "limit" in answer), None)
        if over is not None:
            raise self.over(over)
        return [
            Rendered(answer.get("text", ""), tuple(map(tuple, answer.get("spans", ()))), answer.get("refused", ""))
            for answer in answers
        ]

    def over(self, limit: str) -> DataError:
        """Return the error for a template that exceeds a limit."""
        bounds = {
            "time": f"{self.limits.seconds:g} seconds of computing",
            "memory": f"{self.limits.memory / GIB:g} GiB of memory",
            "output": f"{self.limits.letters:,} letters of text",
        }
        return DataError(
            f"{self.name} takes more than {bounds[limit]} for one conversation: set data.chat_template to one without "
            "endless loops, or take out the conversation that needs so much"
        )

    @functools.cached_property
    def pickled(self) -> bytes:
        return pickle.dumps(self.tokenizer)

    @functools.cached_property
    def key(self) -> str:
        return hashlib.blake2b(self.pickled, digest_size=16).hexdigest()


class _Renderer:
    """The renderer's process, and the keys of the tokenizers that it has."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._known: set[str] = set()

    def ask(self, template: Template, request: bytes) -> list[dict[str, Any]]:
        """Send a request, after the tokenizer if the process does not have it yet, and return the answers."""
        with self._lock:
            process = self._running()
            try:
                if template.key not in self._known:
                    _send(process.stdin, pickle.dumps((template.key, template.pickled)))
                    self._known.add(template.key)
                _send(process.stdin, request)
                if not wait([process.stdout], _PATIENCE * template.limits.seconds):  # type: ignore[list-item]
                    raise template.over("time")
                answers: list[dict[str, Any]] = json.loads(_receive(process.stdout))
            except (EOFError, BrokenPipeError):
                raise self._ended(template, process) from None
            except BaseException:
                # The pipe may still get this request's answer, which the next request would take for its own.
                self.close()
                raise
            if any("limit" in answer for answer in answers):
                self.close()
            return answers

    def _running(self) -> subprocess.Popen[bytes]:
        # After a fork the pipes belong to the parent's renderer: start a new one.
        if self._owner != os.getpid():
            self._process, self._owner = None, os.getpid()
        if self._process is None:
            words = [sys.executable, "-c", _START, json.dumps(sys.path)]
            self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self._known.clear()
        return self._process

    def _ended(self, template: Template, process: subprocess.Popen[bytes]) -> DataError:
        code = process.wait()
        self.close()
        if code == -signal.SIGPROF:
            return template.over("time")
        if code == -signal.SIGKILL:
            return template.over("memory")
        why = signal.Signals(-code).name if -code in set(signal.Signals) else f"status {code}"
        return DataError(
            f"{template.name} ended the process that rendered it ({why}): set data.chat_template to another"
        )

    def close(self) -> None:
        """End the process; the next conversation starts another."""
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]


@functools.cache
def _renderer() -> _Renderer:
    renderer = _Renderer()
    atexit.register(renderer.close)
    return renderer


def _send(pipe: IO[bytes] | None, message: bytes) -> None:
    assert pipe is not None
    pipe.write(_SIZE.pack(len(message)))
    pipe.write(message)
    pipe.flush()


def _receive(pipe: IO[bytes] | None) -> bytes:
    assert pipe is not None
    head = pipe.read(_SIZE.size)
    if len(head) < _SIZE.size:
        raise EOFError
    (size,) = _SIZE.unpack(head)
    message = pipe.read(size)
    if len(message) < size:
        raise EOFError
    return message


# The functions below run in the renderer.


def serve() -> None:
    """Answer requests until the other side closes its pipe; run by the renderer."""
    # Ctrl-C goes to the whole process group: the asking process handles it, and its end closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests, answers_pipe = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    # A template that prints writes to stderr, not into the answers.
    os.dup2(2, 1)
    tokenizers: dict[str, Any] = {}
    while True:
        try:
            message = pickle.loads(_receive(requests))
        except EOFError:
            return
        if len(message) == 2:
            key, pickled = message
            tokenizers[key] = pickle.loads(pickled)
            continue
        key, source, jobs, (seconds, memory, letters) = message
        with _bounded(seconds, memory):
            answers = [_answer(tokenizers[key], source, RenderJob(*job), letters) for job in jobs]
        _send(answers_pipe, json.dumps(answers).encode())


@contextlib.contextmanager
def _bounded(seconds: float, memory: int) -> Any:
    """Bound CPU time by a timer whose signal ends the process, and memory by the kernel's limit if it has one."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    try:
        with open("/proc/self/statm", encoding="ascii") as facts:
            now = int(facts.read().split()[0]) * resource.getpagesize()
        bound = now + memory
        resource.setrlimit(resource.RLIMIT_AS, (bound if hard == resource.RLIM_INFINITY else min(bound, hard), hard))
    except OSError:
        pass
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _answer(tokenizer: Any, source: str, job: RenderJob, letters: int) -> dict[str, Any]:
    try:
        spans: list[tuple[int, int]] = []
        text = _render(tokenizer, source, replace(job, track=False))
        if len(text) > letters:
            return {"limit": "output"}
        if job.track:
            spans = _generation_spans(tokenizer, source, job)
        return {"text": text, "spans": spans}
    except MemoryError:
        return {"limit": "memory"}
    except Exception as error:
        return {"refused": " ".join(str(error).split())[:200] or type(error).__name__}


def _render(tokenizer: Any, source: str, job: RenderJob) -> str:
    text: str = tokenizer.apply_chat_template(
        job.messages, tools=job.tools, chat_template=source, tokenize=False, add_generation_prompt=job.prompt
    )
    return text


class _Letters(dict[str, Any]):
    """Stand-in for an encoding whose tokens are letters.

    transformers asks for the token of the first and last letter of each generation in turn. The answers leave the mask
    empty, and `asked` has the letters.
    """

    def __init__(self) -> None:
        super().__init__(input_ids=[])
        self.asked: list[int] = []

    def char_to_token(self, _: int, letter: int) -> int:
        self.asked.append(letter)
        return len(self.asked) % 2


def _generation_spans(tokenizer: Any, source: str, job: RenderJob) -> list[tuple[int, int]]:
    found = _Letters()
    kind = type(tokenizer)
    reader = copy.copy(tokenizer)
    reader.__class__ = type(kind.__name__, (kind,), {"__call__": lambda *_, **__: found})
    reader.apply_chat_template(
        job.messages,
        tools=job.tools,
        chat_template=source,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
        add_generation_prompt=job.prompt,
    )
    return [(first, last + 1) for first, last in zip(found.asked[::2], found.asked[1::2], strict=True)]
