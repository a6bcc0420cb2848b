"""From messages to token ids, without ever re-encoding what the policy sampled.

The prompt is rendered once by the model's own chat template. Between two assistant turns stands a
bridge: the text that the template puts after one assistant turn, around the reply and before the
next. It is derived once per template from a rendered example, so any template works.
"""

from collections.abc import Sequence
from typing import Any, cast

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from text2sql_grpo.environment.episode import Message
from text2sql_grpo.errors import ModelError

_ASSISTANT, _REPLY = "ASSISTANTxTURN", "ENVIRONMENTxREPLY"


class ChatFormat:
    """A tokenizer with its chat template, as the rollout engine needs it.

    Args:
        tokenizer: With a chat template.
        tools: JSON schemas of the tools, for the native protocol.
        eos_token_ids: Ids that end a turn besides the tokenizer's own.

    Raises:
        ModelError: No chat template, or one in which a reply cannot be found again.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        tools: list[dict[str, Any]] | None = None,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        if tokenizer.chat_template is None:
            raise ModelError(
                f"expected a tokenizer with a chat template, got none ({tokenizer.name_or_path}): "
                "take an instruction-tuned model, or set tokenizer.chat_template"
            )
        if tokenizer.eos_token_id is None:
            raise ModelError(f"expected a tokenizer with an EOS token, got none ({tokenizer.name_or_path})")
        self.tokenizer = tokenizer
        self.tools = tools
        self.eos_token_ids = frozenset([cast(int, tokenizer.eos_token_id), *eos_token_ids])
        self._bridges: dict[str, tuple[str, str]] = {}

    def prompt_ids(self, messages: list[Message]) -> list[int]:
        """Token ids of the prompt, up to where the assistant begins to write."""
        return self._encode(self._render(messages))

    def bridge_ids(self, reply: Message, *, last_token_id: int) -> list[int]:
        """Token ids between an assistant turn and the next, with the reply inside.

        Args:
            reply: The environment's message.
            last_token_id: Last sampled token; an end-of-turn token is not written twice.
        """
        if reply["role"] not in self._bridges:
            self._bridges[reply["role"]] = self._derive_bridge(reply["role"])
        before, after = self._bridges[reply["role"]]
        ids = self._encode(before + reply["content"] + after)
        if last_token_id in self.eos_token_ids and ids and ids[0] in self.eos_token_ids:
            return ids[1:]
        return ids

    def text(self, sampled_ids: Sequence[int]) -> str:
        """What the policy wrote in one turn, without the end-of-turn token."""
        ids = list(sampled_ids)
        if ids and ids[-1] in self.eos_token_ids:
            ids.pop()
        return cast(str, self.tokenizer.decode(ids, skip_special_tokens=False))

    def turn_ids(self, assistant_text: str) -> list[int]:
        """Token ids of an assistant turn that was written by a script, end-of-turn token included."""
        return [*self._encode(assistant_text), cast(int, self.tokenizer.eos_token_id)]

    def _encode(self, text: str) -> list[int]:
        return cast(list[int], self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _render(self, messages: list[Message]) -> str:
        rendered = self.tokenizer.apply_chat_template(
            messages, tools=self.tools, tokenize=False, add_generation_prompt=True
        )
        return cast(str, rendered)

    def _derive_bridge(self, role: str) -> tuple[str, str]:
        chat = [
            {"role": "user", "content": "question"},
            {"role": "assistant", "content": _ASSISTANT},
            {"role": role, "content": _REPLY},
        ]
        try:
            rendered = self._render(chat)
        except TemplateError as error:
            if role == "user":
                raise ModelError(f"the chat template cannot render a reply: {error}") from error
            return self._derive_bridge("user")  # A template without tool messages.
        _, found_turn, rest = rendered.rpartition(_ASSISTANT)
        before, found_reply, after = rest.partition(_REPLY)
        if not (found_turn and found_reply):
            if role == "user":
                raise ModelError("the chat template drops an earlier assistant turn or the reply to it")
            return self._derive_bridge("user")
        return before, after
