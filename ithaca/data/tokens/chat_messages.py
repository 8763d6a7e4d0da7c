"""Messages and tools of a conversation in the form that chat templates take, and checks of their use.

Role names of other datasets are translated, strings of JSON parsed, and content in parts joined if all parts are text.
Images, sound and other parts are refused by message and part.

Invariant: a message's content is text; no template writes a list or a mapping as Python's repr.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ithaca.data.sources.read_records import json_list
from ithaca.errors import RowError

Message = dict[str, Any]
Span = tuple[int, int]
_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}


def read_messages(value: object) -> list[Message]:
    """Return messages as templates take them.

    `from` / `value` and other role names are translated; a string of JSON that holds a list is parsed.
    """
    items = json_list(value) if isinstance(value, str) else value
    if not isinstance(items, Sequence):
        raise RowError(f"a conversation is a {type(value).__name__}: a list of messages is needed")
    if not items:
        raise RowError("the conversation is empty")
    return [_message(item, number) for number, item in enumerate(items)]


def read_tools(value: object) -> list[Any] | None:
    """Return tools as templates take them: a list, or a string of JSON that holds one; None for an empty string."""
    if value is None or value == "":
        return None
    items = json_list(value) if isinstance(value, str) else value
    if not isinstance(items, list):
        raise RowError(f"'tools' is a {type(value).__name__}: a list is needed, or a string of JSON that holds one")
    return items or None


def _message(item: object, number: int) -> Message:
    if not isinstance(item, Mapping):
        raise RowError(f"message {number} is a {type(item).__name__}: an object with role and content is needed")
    message = {key: inner for key, inner in item.items() if inner is not None}
    role = message.pop("from", None) or message.get("role")
    content = message.pop("value", None) if "content" not in message else message["content"]
    if not isinstance(role, str):
        raise RowError(f"message {number} has no role, only {', '.join(map(str, item)) or 'nothing'}")
    where = f"message {number} ({role})"
    if isinstance(content, list | tuple):
        content = "".join(_text_of(part, at, where) for at, part in enumerate(content)) if content else None
    if content is None and not message.get("tool_calls"):
        raise RowError(f"{where} has no content")
    if not isinstance(content, str | None):
        raise RowError(f"the content of {where} is a {type(content).__name__}, text is needed")
    return message | {"role": _ROLES.get(role, role), "content": "" if content is None else content}


def _text_of(part: object, number: int, where: str) -> str:
    if not isinstance(part, Mapping):
        raise RowError(f"part {number} of {where} is a {type(part).__name__}: an object with type and text is needed")
    kind, text = part.get("type", "text"), part.get("text")
    if kind != "text":
        raise RowError(f"part {number} of {where} is of type {kind!r}: only text is trained on")
    if not isinstance(text, str):
        raise RowError(f"part {number} of {where} has no text, but a {type(text).__name__}")
    return text


def is_learned(message: Message) -> bool:
    """False if the message's `weight` (OpenAI's files) or `train` (axolotl's) leaves it out of the loss."""
    weight, train = message.get("weight", 1), message.get("train", True)
    if isinstance(weight, str | list | Mapping) or weight not in (0, 1):
        raise RowError(f"a message's weight is {weight!r}: 0 or 1 is needed")
    if not isinstance(train, bool):
        raise RowError(f"a message's train is {train!r}: true or false is needed")
    return bool(weight) and train


def left_out_spans(messages: Sequence[Message], spans: Sequence[Span]) -> list[Span]:
    """Return the spans of the assistant's turns that are not learned. `spans`: one for each of its messages."""
    learned = [is_learned(message) for message in messages if message["role"] == "assistant"]
    if all(learned):
        return []
    if not any(learned):
        raise RowError("every message of the assistant has weight 0 or train false: nothing to learn")
    if len(learned) != len(spans):
        raise RowError("weight 0 or train false, and the template does not mark one turn for each of the assistant's")
    return [span for span, learns in zip(spans, learned, strict=True) if not learns]


def check_no_repr(text: str, messages: Sequence[Message], tools: Any) -> None:
    """Raise RowError if the template wrote a list or mapping of the conversation as Python's repr, not as JSON."""
    if "{'" not in text and "['" not in text:
        return
    contents = [message["content"] for message in messages]
    for value in _containers([messages, tools]):
        printed = str(value)
        if printed in text and printed != json.dumps(value, default=str, ensure_ascii=False):
            # A message may quote Python itself.
            if any(printed in content for content in contents):
                continue
            raise RowError(
                f"the chat template writes {printed[:60]!r} as Python prints it: use its filter `tojson`, or give text"
            )


def _containers(value: Any) -> Iterator[Any]:
    """Yield the non-empty lists and mappings within a value, inner ones too."""
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    for each in inner:
        if isinstance(each, Mapping | list | tuple) and each:
            yield each
            yield from _containers(each)
