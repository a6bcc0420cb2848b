"""`SQLHarness`: the loop between a served model and a `SQLSession`, in this process."""

import asyncio
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI, DefaultAsyncHttpxClient, omit

from text2sql_grpo.environment.tool_calls import reply_messages
from text2sql_grpo.errors import RunError
from text2sql_grpo.integrations.verifiers.traces import OUT_OF_TOKENS, is_cut, turn_text


class SQLHarness(vf.Harness[vf.HarnessConfig]):
    """Harness of a `SQLTask`; the session decides what the model may see and do, as in training."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Play turns until the session or the token budget ends the episode; sets the stop condition.

        Raises:
            RunError: An MCP server died; verifiers then marks the trace as not ok.
        """
        session, environment = trace.state.session, trace.state.environment
        settings = environment.settings
        session.start()
        system, prompt = self.resolve_text_prompt(data)
        messages: list[Any] = [{"role": "system", "content": system}] if system is not None else []
        messages.append({"role": "user", "content": prompt})
        tools = environment.tools if settings.protocol == "native" else omit
        # The endpoint is verifiers' server on this machine; loading certificates for it takes 25 ms.
        http = DefaultAsyncHttpxClient(verify=endpoint.startswith("https:"))
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, timeout=None, http_client=http) as client:
            while trace.stop_condition is None:
                left = settings.max_episode_tokens - _written(trace)
                completion = await client.chat.completions.create(
                    model=ctx.model,
                    messages=messages,
                    tools=tools,
                    max_tokens=max(1, min(settings.max_turn_tokens, left)),
                )
                turn = trace.assistant_messages[-1]
                text = turn_text(turn)
                is_whole = settings.max_turn_tokens < left and session.holds_action(text)
                if (is_cut(trace) and not is_whole) or _written(trace) > settings.max_episode_tokens:
                    trace.stop(OUT_OF_TOKENS)
                    break
                reply = await asyncio.to_thread(session.step, text)
                if session.episode.stop_reason == "error":
                    raise RunError(f"the MCP server died ({data.name})")
                if reply is None:
                    trace.stop(session.episode.stop_reason)
                    break
                messages.append(completion.choices[0].message.model_dump(exclude_none=True))
                messages += reply_messages(turn.tool_calls, reply["content"])
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


def _written(trace: vf.Trace) -> int:
    """Tokens after the prompt, observations included; 0 if the endpoint does not count them."""
    usages = [call.usage for call in trace.calls if call.error is None]
    if not usages or None in usages:
        return 0
    return int(usages[-1].input_tokens + usages[-1].completion_tokens - usages[0].input_tokens)
