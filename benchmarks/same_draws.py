"""Rollouts with `rollout.same_draws` beside those without, under tools of random delay: cost and equality.

Both play the script of `rollout.py` with the same weights, turn about. A tool sleeps for a random time,
another one in each run. Tokens are forced, log-probs are those of the model: if all log-probs of two runs are
equal bit for bit, the runs would have sampled the same tokens. The last line is JSON: the best wall-clock
time of each way, `cost` as the share by which `same_draws` takes longer, and the number of runs whose
log-probs differ from the first's.

Run: OMP_NUM_THREADS=1 python benchmarks/same_draws.py [--quick] [--tool_ms 20] [--size 2M]
"""

import argparse
import json
import random
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from llama_shapes import make_model
from rollout import Case, ForcedSampling, Script, SlowTool, make_tokenizer, prompt_texts

from text2sql_grpo.data.example import Example
from text2sql_grpo.environment.protocols import TOOLS
from text2sql_grpo.environment.session import EnvironmentSettings, SQLSession
from text2sql_grpo.environment.tools import ExecutorBackend
from text2sql_grpo.rollout.chat_format import ChatFormat
from text2sql_grpo.rollout.engine import Budgets, SlotPolicy, run


class RandomTool(SlowTool):
    """The tool of `rollout.py`, which takes between nothing and twice its time."""

    def execute(self, *arguments: Any, **options: Any) -> Any:
        return SlowTool(random.random() * 2 * self.seconds).execute(*arguments, **options)


@dataclass(frozen=True)
class Recorded(ForcedSampling):
    """Forced tokens with the log-probs that the model gives them."""

    def draw(self, logits: torch.Tensor, marks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return marks, logits.log_softmax(-1).gather(-1, marks[:, None])[:, 0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tool_ms", type=float, default=20.0)
    parser.add_argument("--size", default="2M")
    parser.add_argument("--prompt", type=int, default=1_000)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="short prompts, three runs of each way")
    options = parser.parse_args()
    if options.quick:
        options.prompt, options.runs = 300, 3
    case = Case(prompt=options.prompt, tool_ms=options.tool_ms, size=options.size)
    tokenizer = make_tokenizer()
    script, chat = Script(case, tokenizer), ChatFormat(tokenizer, tools=TOOLS)
    settings = EnvironmentSettings(protocol="native", instructions=False, max_turns=case.turns)
    tool: Any = RandomTool(case.tool_ms / 1_000)
    backend = ExecutorBackend(tool, Path("?"), settings.limits, settings.observation)
    said = tuple(tuple(token for turn in turns for token in turn) for turns in script.turns)
    policy = SlotPolicy(make_model(case.size, len(tokenizer)).eval(), Recorded(script=said))

    def session(text: str) -> SQLSession:
        example = Example(id="?", database="?", question=text, gold_sql="SELECT 1")
        return SQLSession(example, schema_text="", backend=backend, settings=settings)

    texts = prompt_texts(case, lambda text: len(chat.prompt_ids(session(text).start())))
    seconds: dict[bool, list[float]] = {True: [], False: []}
    found: dict[bool, list[list[list[float]]]] = {True: [], False: []}
    for _ in range(options.runs + 1):  # the first is not timed
        for same in (True, False):
            sessions = [session(text) for text in texts for _ in range(case.generations)]
            started = time.perf_counter()
            episodes = run(sessions, replace(policy, same_draws=same), chat, Budgets(200, 600, 16_384))
            seconds[same].append(time.perf_counter() - started)
            found[same].append([episode.log_probs for episode in episodes])
    best = {same: min(times[1:]) for same, times in seconds.items()}
    median = {same: sorted(times[1:])[options.runs // 2] for same, times in seconds.items()}
    print(
        json.dumps(
            {
                **vars(options),
                "same_draws_s": round(best[True], 3),
                "plain_s": round(best[False], 3),
                "cost": round(best[True] / best[False] - 1, 3),
                "cost_of_medians": round(median[True] / median[False] - 1, 3),
                "differing": sum(each != found[True][0] for each in found[True]),
                "differing_plain": sum(each != found[False][0] for each in found[False]),
            }
        )
    )


if __name__ == "__main__":
    main()
