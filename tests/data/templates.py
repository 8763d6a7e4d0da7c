"""Chat templates in four common styles, without generation marks, and tokenizers that know their special tokens.

`said(style, messages)` writes a conversation by hand, piece by piece, each with its loss mask; templates and masks are
compared with it.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

LLAMA = (
    "{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    " + message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}"
    "{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# Thinking is kept after the last question only; calls of tools and their answers as Qwen3 writes them.
QWEN = r"""{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- if ns.searching and message.role == "user" %}
        {%- set ns.searching = false %}{%- set ns.last = (messages|length - 1) - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<|im_start|>assistant\n<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}
            {{- '<|im_start|>assistant\n' + content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if (loop.first and content) or (not loop.first) %}{{- '\n' }}{%- endif %}
            {{- '<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\n<tool_response>\n' + content + '\n</tool_response><|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
_ALTERNATE = (
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}" + _ALTERNATE + "{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}"
    "{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}" + _ALTERNATE + "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}"
    "{% else %}{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
TEMPLATES = {"llama": LLAMA, "qwen": QWEN, "mistral": MISTRAL, "gemma": GEMMA}
SPECIALS = {
    "llama": ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "qwen": ["<|im_start|>", "<|im_end|>"],
    "mistral": ["<s>", "</s>"],
    "gemma": ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"],
}
_CORPUS = [
    "Hello! How are you today? The answer is 42.\n\n",
    "def f(x):\n    return x\n\n",
    " [/INST] [INST] think\n",
] * 20


def style_tokenizer(style: str, *, template: bool = True) -> PreTrainedTokenizerFast:
    """A byte-level BPE with merges that cross blanks and line ends, and the style's special tokens."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        _CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    names = SPECIALS[style]
    inner.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    end = "<|im_end|>" if style == "qwen" else names[1]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token=names[0], eos_token=end)
    tokenizer.chat_template = TEMPLATES[style] if template else None
    return tokenizer


def said(style: str, messages: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    """The conversation in pieces, learned or not."""
    questions = [place for place, message in enumerate(messages) if message["role"] == "user"]
    pieces: list[tuple[str, bool]] = [] if style == "qwen" else [(SPECIALS[style][0], False)]
    for place, message in enumerate(messages):
        role, content = message["role"], message["content"]
        learned = role == "assistant"
        if style == "llama":
            pieces += [
                (f"<|start_header_id|>{role}<|end_header_id|>\n\n", False),
                (content.strip() + "<|eot_id|>", learned),
            ]
        elif style == "gemma":
            name = "model" if learned else role
            pieces += [(f"<start_of_turn>{name}\n", False), (content.strip() + "<end_of_turn>", learned), ("\n", False)]
        elif style == "mistral":
            pieces += [(f" {content}</s>", True)] if learned else [(f"[INST] {content} [/INST]", False)]
        else:
            thought, _, rest = content.rpartition("</think>") if learned else ("", "", content)
            if learned and place > questions[-1]:
                thought = thought.rpartition("<think>")[2].strip("\n")
                rest = f"<think>\n{thought}\n</think>\n\n" + rest.lstrip("\n")
            elif thought:
                rest = rest.lstrip("\n")
            pieces += [(f"<|im_start|>{role}\n", False), (rest + "<|im_end|>", learned), ("\n", False)]
    return pieces
