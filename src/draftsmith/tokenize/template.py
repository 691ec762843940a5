"""The chat template: prompts as the server would render them, and which tokens of a finished chat
the target generates.

Supervised tokens are found by the template's own generation markers, or by rendering with and
without the answer and comparing token ids; never by searching for strings.
"""

import re
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from draftsmith.core import UserError


def render_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict],
    tools: list[dict] | None,
    template_kwargs: dict[str, Any],
    *,
    where: str,
) -> list[int]:
    """Token ids up to where the target begins its answer. Raises UserError when the template
    refuses.
    """
    if tools and not re.search(r"\btools\b", _template_text(tokenizer)):
        raise UserError(
            where=where,
            found="tools, and a chat template that drops them without a word",
            expected="a template that renders tools",
            remedy="Give the target's folder a chat_template.jinja that does, or leave the tools out.",
        )
    return _apply(
        tokenizer, messages, tools, template_kwargs, where=where, add_generation_prompt=True
    )["input_ids"]


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict],
    tools: list[dict] | None,
    template_kwargs: dict[str, Any],
    eos: list[int],
    *,
    where: str,
) -> tuple[list[int], list[int]]:
    """(input_ids, loss_mask) of a chat that ends with an assistant's answer; only that answer is
    supervised.

    The mask covers what the target would generate after the prompt, through the token that ends its
    turn (one of `eos`).
    """
    prompt = render_prompt(tokenizer, messages[:-1], tools, template_kwargs, where=where)
    marked = re.search(r"\{%-?\s*generation\b", _template_text(tokenizer)) is not None
    options = {"return_assistant_tokens_mask": True} if marked else {}
    out = _apply(tokenizer, messages, tools, template_kwargs, where=where, **options)
    ids = out["input_ids"]
    if ids[: len(prompt)] != prompt:
        raise UserError(
            where=where,
            found="a chat template whose finished chat does not begin with the prompt it answers",
            expected="the prompt's tokens as a prefix",
            remedy="Use regenerate.enabled: true, which keeps token ids and renders no answers.",
        )
    marks = out["assistant_masks"] if marked else [1] * len(ids)
    mask = [int(bool(mark) and i >= len(prompt)) for i, mark in enumerate(marks)]
    return _end_at_eos(ids, mask, eos)


def _end_at_eos(ids: list[int], mask: list[int], eos: list[int]) -> tuple[list[int], list[int]]:
    """What the template writes after the end of the turn (often a newline) is not the target's."""
    supervised = [i for i, bit in enumerate(mask) if bit]
    ends = [i for i in supervised if ids[i] in eos]
    last = ends[-1] if ends else (supervised[-1] if supervised else len(ids) - 1)
    return ids[: last + 1], mask[: last + 1]


def _template_text(tokenizer: PreTrainedTokenizerBase) -> str:
    template = tokenizer.chat_template
    return template if isinstance(template, str) else " ".join(template.values())


def _apply(
    tokenizer: Any,
    messages: list[dict],
    tools: list[dict] | None,
    template_kwargs: dict[str, Any],
    *,
    where: str,
    **options: Any,
) -> Any:
    try:
        return tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=True, return_dict=True, **options, **template_kwargs
        )
    except TemplateSyntaxError as error:
        raise UserError(
            where="target.model",
            found=f"a chat template with an error in its line {error.lineno}: {error.message}",
            expected="a template that compiles",
            remedy="Mend chat_template.jinja in a local copy of the model.",
        ) from error
    except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise UserError(
            where=where,
            found=f"a conversation that the chat template refuses ({type(error).__name__}: {error})",
            expected="roles and fields the target's template knows",
            remedy="Mend or delete the conversation, or set tokenize.template_kwargs.",
        ) from error
