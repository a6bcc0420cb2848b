"""Token ids of chats, without ever re-encoding sampled tokens.

The prompt is rendered once by the model's chat template. Between two assistant turns stands a bridge: the
template's text after one assistant turn, around the reply and before the next. It is cut out of a rendered
example, so any template that renders replies works; once for all replies if the template copies them
verbatim, else once for each.

Questions, schemas and replies are data: a control token spelled in them (`<|im_end|>` in a cell) is encoded
as text, never as the token, so that no data can end a turn or begin one.
"""

import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, cast

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from text2sql_grpo.environment.episode import Message
from text2sql_grpo.errors import ModelError

_ASSISTANT, _REPLY = "ASSISTANTxTURN", "ENVIRONMENTxREPLY"
_LOOKS_LIKE_CONTROL = re.compile(r"<[|\uff5c].*[|\uff5c]>")
_ODD_REPLY = " \n<a> & \"b\" 'c' \\ {{ d }} \u00e9|\n "  # trimmed or escaped by templates that do such things


class ChatFormat:
    """Encoder of prompts, turns and replies by a tokenizer and its chat template.

    Args:
        tools: JSON schemas of the tools, for the native protocol.
        eos_token_ids: Ids that end a turn besides the tokenizer's.
        template_options: Further variables of the chat template, such as `enable_thinking`.

    Raises:
        ModelError: No chat template, one that does not render the tools, one that drops replies, or no EOS
            token.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        tools: list[dict[str, Any]] | None = None,
        eos_token_ids: Sequence[int] = (),
        template_options: Mapping[str, Any] | None = None,
    ) -> None:
        if tokenizer.chat_template is None:
            raise ModelError(
                f"the tokenizer has no chat template ({tokenizer.name_or_path}): "
                "take an instruction-tuned model, or set tokenizer.chat_template"
            )
        if tokenizer.eos_token_id is None:
            raise ModelError(f"the tokenizer has no EOS token ({tokenizer.name_or_path})")
        self.tokenizer = tokenizer
        self.tools = tools
        self.eos_token_ids = frozenset([cast(int, tokenizer.eos_token_id), *eos_token_ids])
        self._template_options = dict(template_options or {})
        self._control = ControlTokens(tokenizer)
        self._lock = threading.Lock()  # a fast tokenizer is not thread-safe
        if tools and not self._shows_tools(tools):
            raise ModelError(
                "native tool calls need a chat template that renders tools, and this one renders none "
                f"({tokenizer.name_or_path}): set environment.protocol: tags, or take a model made for tools"
            )
        self._reply_role = self._role_of_replies("tool" if tools else "user")
        before, _, after = self._bridge(self._reply_role, _REPLY).partition(_REPLY)
        is_plain = self._bridge(self._reply_role, _ODD_REPLY) == before + _ODD_REPLY + after
        self._around_reply = (before, after) if is_plain else None

    def _shows_tools(self, tools: list[dict[str, Any]]) -> bool:
        """True if the template renders the schema of each tool, its name and its parameters."""
        rendered = self._render([{"role": "user", "content": "question"}])
        names: list[str] = []
        for function in (tool["function"] for tool in tools):
            names += [function["name"], *function.get("parameters", {}).get("properties", {})]
        return all(re.search(rf"\b{re.escape(name)}\b", rendered) for name in names)

    def count_tokens(self, text: str) -> int:
        """Number of tokens of a text by itself."""
        return len(self._encode(text))

    def prompt_ids(self, messages: list[Message]) -> list[int]:
        """Token ids of the prompt, with the template's generation prompt.

        Raises:
            ModelError: The template refuses these messages.
        """
        mark = _unused_character(message["content"] for message in messages)
        with self._lock:
            protected = [
                message | {"content": self._control.broken(message["content"], message["role"], mark)}
                for message in messages
            ]
        return self._encode(self._render(protected), mark)

    def bridge_ids(self, reply: Message, *, last_token_id: int) -> list[int]:
        """Token ids between an assistant turn and the next, with the reply inside.

        Args:
            reply: The environment's message; a user message if the template has no tool messages.
            last_token_id: Last sampled token; an end-of-turn token is not repeated.
        """
        mark = _unused_character([reply["content"]])
        with self._lock:
            content = self._control.broken(reply["content"], self._reply_role, mark)
        around = self._around_reply
        ids = self._encode(content.join(around) if around else self._bridge(self._reply_role, content), mark)
        if last_token_id in self.eos_token_ids and ids and ids[0] in self.eos_token_ids:
            return ids[1:]
        return ids

    def text(self, sampled_ids: Sequence[int]) -> str:
        """Text of one sampled turn, without the end-of-turn token."""
        ids = list(sampled_ids)
        if ids and ids[-1] in self.eos_token_ids:
            ids.pop()
        return cast(str, self.tokenizer.decode(ids, skip_special_tokens=False))

    def turn_ids(self, assistant_text: str) -> list[int]:
        """Token ids of a given assistant turn, end-of-turn token included."""
        return [*self._encode(assistant_text), cast(int, self.tokenizer.eos_token_id)]

    def _encode(self, text: str, mark: str | None = None) -> list[int]:
        """Token ids of a text; the parts between marks are encoded separately."""
        parts = [text] if mark is None else [part for part in text.split(mark) if part]
        options = {"add_special_tokens": False, "verbose": False}  # long prompts end by a limit
        with self._lock:
            return [i for part in parts for i in self.tokenizer(part, **options)["input_ids"]]

    def _render(self, messages: list[Message]) -> str:
        try:
            rendered = self.tokenizer.apply_chat_template(
                messages,
                tools=self.tools,
                tokenize=False,
                add_generation_prompt=True,
                **self._template_options,
            )
        except (TemplateError, TypeError) as error:
            roles = ", ".join(message["role"] for message in messages)
            hint = "; without system messages: environment.instructions: false" if "system" in roles else ""
            raise ModelError(
                f"the chat template cannot render the messages {roles}: {error} "
                f"({self.tokenizer.name_or_path}){hint}"
            ) from error
        return cast(str, rendered)

    def _bridge(self, role: str, reply: str) -> str:
        """Text of the template after an assistant turn that is answered by this reply."""
        chat = [
            {"role": "user", "content": "question"},
            {"role": "assistant", "content": _ASSISTANT},
            {"role": role, "content": reply},
        ]
        return self._render(chat).partition(_ASSISTANT)[2]

    def _role_of_replies(self, role: str) -> str:
        """Role of replies: this one, or `user` if the template refuses or drops tool messages."""
        try:
            if _REPLY in self._bridge(role, _REPLY):
                return role
        except ModelError:
            if role == "user":
                raise
        if role == "user":
            raise ModelError(
                "the chat template drops earlier assistant turns or the replies to them"
                f" ({self.tokenizer.name_or_path}): take another model or template"
            )
        return self._role_of_replies("user")


class ControlTokens:
    """Control tokens of a chat template, and the escaping of texts that spell one.

    Control tokens are the tokenizer's special ones, those that look like one (`<|..|>`), and added tokens
    in the chat template, such as `<tool_call>`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        template = str(tokenizer.chat_template)
        self._soft: dict[int, str] = {}
        self._hard = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
        for number, token in tokenizer.added_tokens_decoder.items():
            if token.special or _LOOKS_LIKE_CONTROL.fullmatch(token.content):
                self._hard[number] = token.content
            elif token.content.strip() and token.content in template:
                self._soft[number] = token.content

    def broken(self, text: str, role: str, mark: str) -> str:
        """Insert a mark into each control token that a message spells, alone or with its neighbours.

        Encoded part by part, it is the same text without control tokens.

        Args:
            role: An assistant's text is not changed; instructions may name `<think>` and its like.
            mark: A character that no text holds.
        """
        if role == "assistant" or not text:
            return text
        tokens = self._hard if role == "system" else self._hard | self._soft
        parts, done = [text], list[str]()
        while parts:
            part = parts.pop()
            cuts = [start + max(1, (end - start) // 2) for start, end in self._spans(part, tokens)]
            if not cuts:
                done.append(part)
                continue
            parts += [part[a:b] for a, b in pairwise([0, *cuts, len(part)]) if a < b]
        return _guarded(mark.join(reversed(done)), tokens.values(), mark)

    def _spans(self, text: str, tokens: Mapping[int, str]) -> list[tuple[int, int]]:
        """Spans of control tokens of two or more characters."""
        if not self._tokenizer.is_fast:
            spelled = "|".join(re.escape(token) for token in sorted(tokens.values(), key=len, reverse=True))
            return [found.span() for found in re.finditer(spelled, text) if len(found.group()) > 1]
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        found = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
        unknown = self._tokenizer.unk_token_id  # also the token of characters without one
        return [
            (start, end)
            for number, (start, end) in found
            if number in tokens
            and end - start > 1
            and (number != unknown or text[start:end].strip() == tokens[number])
        ]


def _guarded(text: str, tokens: Iterable[str], mark: str) -> str:
    """Insert a mark at an end of the text that the template's text could complete to a control token."""
    core = text.strip()
    sizes = [(token, size) for token in tokens for size in range(1, len(token))]
    ends = core.endswith(tuple(token[:size] for token, size in sizes))
    begins = core.startswith(tuple(token[size:] for token, size in sizes))
    start = len(text) - len(text.lstrip())
    return text[:start] + mark * begins + core + mark * ends + text[start + len(core) :]


def _unused_character(texts: Iterable[str]) -> str:
    """A character of Unicode's private use that no text holds."""
    used = set("".join(texts))
    return next(chr(code) for code in range(0xF0000, 0xFFFFE) if chr(code) not in used)
