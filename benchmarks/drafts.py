"""Episodes of the quickstart's model with drafts of the next tokens beside those without.

The policy that GRPO starts from plays training questions, as in a step: in bfloat16, sampled by the same
numbers in both ways, turn about. A draft is checked in the pass that would decode one token, so both sample
the same tokens, up to passes of other shapes that round otherwise; episodes that differ are counted. The
last line is JSON; `cpu_ratio` is the processor time without drafts over that with them.

Run: OMP_NUM_THREADS=1 python benchmarks/drafts.py --quick     (8 questions x 4, one round)
     OMP_NUM_THREADS=1 python benchmarks/drafts.py             (8 questions x 8, two rounds)
     OMP_NUM_THREADS=1 python benchmarks/drafts.py --questions 60 --samples 1 --temperature 0
     OMP_NUM_THREADS=1 python benchmarks/drafts.py --config config/smollm2_spider.yaml --sft.adapter FOLDER
"""

import argparse
import json
import random
import time
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console

from text2sql_grpo.config import load_config
from text2sql_grpo.environment.episode import Episode
from text2sql_grpo.evaluation.bench import open_workbench
from text2sql_grpo.rollout import slots
from text2sql_grpo.rollout.engine import SlotPolicy, run
from text2sql_grpo.rollout.sampling import Sampling
from text2sql_grpo.run.pipeline import run_arguments
from text2sql_grpo.run.sft_stage import started_policy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--config", default="config/quickstart.yaml")
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8, help="episodes of a question")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="half of the episodes, one round")
    options, settings = parser.parse_known_args()
    if options.quick:
        options.samples, options.rounds = options.samples // 2, 1
    config = load_config(options.config, settings)
    bench = open_workbench(config)
    policy = started_policy(bench, run_arguments(config), Console())
    model, chat = policy.model.eval(), bench.chat(policy.tokenizer, policy.model)
    questions = random.Random(0).sample(list(bench.load(config.data.train)), options.questions)
    passes: list[int] = []
    logits = SlotPolicy.logits

    def counted(self: SlotPolicy, ids: torch.Tensor, *arguments: Any) -> torch.Tensor:
        passes.append(len(ids))
        return logits(self, ids, *arguments)

    def play(free_tokens: int) -> tuple[float, int, list[Episode]]:
        torch.manual_seed(1)
        passes.clear()
        sessions = [bench.environment.session(each) for each in questions for _ in range(options.samples)]
        slot_policy = SlotPolicy(model, Sampling(options.temperature))
        with (
            patch.object(slots, "_FREE_TOKENS", free_tokens),
            patch.object(SlotPolicy, "logits", counted),
            torch.autocast(model.device.type, torch.bfloat16),
        ):
            started = time.process_time()
            episodes = run(sessions, slot_policy, chat, bench.budgets(model))
            return time.process_time() - started, len(passes), episodes

    free = slots._FREE_TOKENS
    play(free)  # warms up, not timed
    plain, drafted = [], []
    for _ in range(options.rounds):
        plain.append(play(1))
        drafted.append(play(free))
    sides = {"without": min(plain, key=lambda played: played[0]), "with": min(drafted, key=lambda it: it[0])}
    for name, (seconds, count, episodes) in sides.items():
        tokens = sum(sum(episode.completion_mask) for episode in episodes)
        print(f"{name:7}  {seconds:6.1f} s of processor time, {count} passes, {tokens} tokens sampled")
    pairs = zip(sides["without"][2], sides["with"][2], strict=True)
    result = {
        "benchmark": "drafts",
        "config": str(options.config),
        "episodes": len(questions) * options.samples,
        "temperature": options.temperature,
        "cpu_ratio": round(sides["without"][0] / sides["with"][0], 3),
        "passes": {name: count for name, (_, count, _) in sides.items()},
        "episodes_that_differ": sum(one.completion_ids != other.completion_ids for one, other in pairs),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
