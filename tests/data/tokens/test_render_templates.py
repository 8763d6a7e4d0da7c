"""Tests of chat templates of unknown origin: ended if they loop or grow, off the main thread too, exact otherwise."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ithaca.data.tokens import render_templates
from ithaca.data.tokens.chat import ChatEncoder
from ithaca.data.tokens.render_templates import RenderJob, RenderLimits, Template
from ithaca.errors import DataError
from ithaca.models.files.embedded import embedded_tokenizer
from tests.data.corpus import prepared, write_lines
from tests.data.templates import TEMPLATES, style_tokenizer
from tests.data.tokens.test_chat import CONVERSATION, random_conversation

TOKENIZER = embedded_tokenizer()
HOSTILE = {
    "endless loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a loop over a growing list": "{% set x = [1] %}{% for i in range(99999) %}{{ (x * 99999)|sum }}{% endfor %}",
    "a long text": "{{ 'x' * 10**9 }}",
    "a longer text": "{{ 'x' * 10**13 }}",
    "doubling": "{% set n = namespace(s='xx') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}{{ n.s }}",
    "doubling lists": "{% set n = namespace(s=[1]) %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}{{ n.s }}",
    "join": "{{ range(100000)|join('x' * 100000) }}",
    "center": "{{ 'a'|center(10**12) }}",
    "format": "{{ '%100000000000d' % 1 }}",
    "replace": "{% set n = namespace(s='a') %}{% for i in range(60) %}{% set n.s = n.s|replace('a', 'aa') %}{% endfor %}",
    "calls without end": "{% macro f(x) %}{% for i in range(99999) %}{{ f(x + 1) if x < 9 }}{% endfor %}{% endmacro %}{{ f(1) }}",
    "powers": "{% for i in range(99999) %}{% set x = (7 + i) ** (10 ** 6) %}{% endfor %}",
}
SMALL = RenderLimits(seconds=0.5, memory=300 << 20, letters=1 << 20)


QUICK = ("endless loops", "a longer text")


@pytest.mark.parametrize("names", [QUICK, pytest.param(tuple(HOSTILE), marks=pytest.mark.slow)], ids=["few", "all"])
def test_endless_template_is_ended_off_the_main_thread(names: tuple[str, ...]) -> None:
    results: dict[str, str] = {}

    def ask() -> None:
        for name in names:
            template = Template(TOKENIZER, HOSTILE[name], "the chat template of models/x", SMALL)
            try:
                results[name] = str(template.render([RenderJob(CONVERSATION)]))
            except DataError as error:
                results[name] = str(error)
        kind = Template(TOKENIZER, TOKENIZER.chat_template, "ours", SMALL)
        results["after"] = kind.render([RenderJob(CONVERSATION)])[0].text

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join(500)
    assert not thread.is_alive()
    assert results.pop("after") == TOKENIZER.apply_chat_template(CONVERSATION, tokenize=False)
    for name in names:
        assert results[name].startswith("the chat template of models/x takes more than "), name
        assert any(bound in results[name] for bound in ("seconds of computing", "GiB of memory", "letters of text")), (
            name
        )


def test_recursive_template_is_a_refusal() -> None:
    source = "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}"
    (answer,) = Template(TOKENIZER, source, "x", SMALL).render([RenderJob(CONVERSATION)])
    assert "recursion" in answer.refused


@pytest.mark.slow
def test_endless_template_of_a_run_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render_templates, "LIMITS", SMALL)
    file = write_lines(tmp_path / "chat.jsonl", [{"messages": CONVERSATION}])
    endless = "{% generation %}" + HOSTILE["endless loops"] + "{% endgeneration %}"
    with pytest.raises(DataError, match=r"^data\.chat_template takes more than 0\.5 seconds of computing"):
        prepared(tmp_path, file, chat_template=endless)
    (tmp_path / "bad.jinja").write_text(endless, encoding="utf-8")
    with pytest.raises(DataError, match=r"^data\.chat_template \(.*bad\.jinja\) takes more than"):
        prepared(tmp_path, file, chat_template=str(tmp_path / "bad.jinja"))
    own = embedded_tokenizer()
    own.chat_template, own.name_or_path = endless, "models/bad"
    with pytest.raises(DataError, match=r"^the chat template of models/bad takes more than"):
        ChatEncoder.make(own, None, "assistant")


def test_dead_renderer_is_reported_and_replaced() -> None:
    template = Template(TOKENIZER, TOKENIZER.chat_template, "x")
    text = template.render([RenderJob(CONVERSATION)])[0].text
    process = render_templates._renderer()._process
    assert process is not None
    os.kill(process.pid, signal.SIGSEGV)
    with pytest.raises(DataError, match="ended the process that rendered it"):
        template.render([RenderJob(CONVERSATION)])
    assert template.render([RenderJob(CONVERSATION)])[0].text == text


@pytest.mark.parametrize("style", [*TEMPLATES, "embedded"])
def test_text_and_generations_equal_transformers(style: str) -> None:
    tokenizer = TOKENIZER if style == "embedded" else style_tokenizer(style)
    rng = random.Random(11)
    template = Template(tokenizer, tokenizer.chat_template, "x")
    for _ in range(15):
        messages = random_conversation(rng)
        text, prompt = template.render([RenderJob(messages), RenderJob(messages, prompt=True)])
        assert text.text == tokenizer.apply_chat_template(messages, tokenize=False)
        assert prompt.text == tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        if style == "embedded":
            ids, learn = ChatEncoder.make(tokenizer, None, "assistant")(messages)
            theirs: Any = tokenizer.apply_chat_template(
                messages, return_dict=True, return_assistant_tokens_mask=True, tokenize=True
            )
            assert ids.tolist() == theirs["input_ids"]
            assert learn is not None
            assert np.array_equal(learn, np.array(theirs["assistant_masks"], bool))


def test_unpicklable_values_make_a_bad_row() -> None:
    deep: Any = "x"
    for _ in range(5000):
        deep = [deep]
    (answer,) = Template(TOKENIZER, TOKENIZER.chat_template, "x").render(
        [RenderJob([{**CONVERSATION[0], "more": deep}])]
    )
    assert "nested too deeply" in answer.refused or "recursion" in answer.refused


def test_renderer_answers_in_json() -> None:
    """The process that runs a stranger's program answers in JSON, not in pickles."""
    sent = json.dumps([{"text": "\ud800", "spans": [[0, 1]]}])
    assert json.loads(sent)[0]["text"] == "\ud800"
