"""Chat templates: transformers renders them, in Jinja's sandbox. A template is data that somebody else wrote."""

from __future__ import annotations

import re
from typing import Any

MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""Before what the assistant says, in templates that mark it."""


def render_chat(
    template: str, messages: list[dict[str, Any]], special: dict[str, str], prompt: bool = False
) -> tuple[str, list[tuple[int, int]]]:
    """The text of a conversation, and the spans of characters that the template marks as the assistant's.

    special: special tokens by name, such as eos_token. prompt: ends with what stands before an answer. Raises
    `ValueError` for whatever the template raises."""
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        texts, spans = render_jinja_template(
            [messages],
            chat_template=template,
            return_assistant_tokens_mask=bool(MARKERS.search(template)),
            add_generation_prompt=prompt,
            **special,
        )
    except Exception as error:  # anything that code of others runs into
        raise ValueError(f"the chat template fails: {error}") from error
    return texts[0], [(start, end) for start, end in spans[0]] if spans else []
