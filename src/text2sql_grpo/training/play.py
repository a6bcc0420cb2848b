"""Rollouts with the current policy of a trainer, and play of questions over SQL databases."""

import logging
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import count
from typing import Any

from transformers import PreTrainedModel
from trl import GRPOTrainer

from text2sql_grpo import trl_compat
from text2sql_grpo.config import RolloutConfig
from text2sql_grpo.data.example import Example
from text2sql_grpo.data.shards import ExamplesOnDisk
from text2sql_grpo.environment.session import SQLEnvironment
from text2sql_grpo.reliability.ranks import any_reason, gather, is_distributed
from text2sql_grpo.rewards import Answer, Judge, episode_metrics
from text2sql_grpo.rollout.chat_format import ChatFormat
from text2sql_grpo.rollout.engine import Budgets, Continuations, Policy, SlotPolicy, run
from text2sql_grpo.rollout.policy import ModelPolicy, context_length, obstacle, plays_by_slots, trial_obstacle
from text2sql_grpo.rollout.sampling import Sampling
from text2sql_grpo.rollout.stages import Stages
from text2sql_grpo.rollout.turns import R, Session
from text2sql_grpo.training.parts import Judged, Play, Row

logger = logging.getLogger(__name__)


class Rollouts:
    """Rollouts of sessions with the current policy: by the engine `slots`, by `generate`, or by vLLM.

    Args:
        trainer: Complete, its model prepared.
        play: Its tools and budgets are used.

    Attributes:
        chat: Chat format of the policy.
        way: Name of the engine, with the reason if it is the slower one.
        plays_by_slots: True if the engine is `slots`. The first batch may show that it cannot be.
        on_episode: Callback during rollouts: number of finished episodes, number of episodes of this rank.
    """

    def __init__(self, trainer: GRPOTrainer, play: Play, config: RolloutConfig, *, stages: Stages) -> None:
        self._trainer, self._config, self.stages = trainer, config, stages
        self.on_episode: Callable[[int, int], None] = lambda done, total: None
        self.chat = ChatFormat(
            trainer.processing_class,
            tools=play.tools,
            eos_token_ids=trainer.eos_token_ids,
            template_options=trainer.args.chat_template_kwargs,
        )
        self.budgets = Budgets(play.max_turn_tokens, play.max_episode_tokens, context_length(trainer.model))
        self._vllm = VLLMPolicy(trainer) if trainer.use_vllm else None
        self._is_tried = False
        self._use_slots(slots_obstacle(trainer) or obstacle(trainer.accelerator.unwrap_model(trainer.model)))

    @property
    def step(self) -> int:
        """Number of optimiser steps done."""
        return int(self._trainer.state.global_step)

    def _use_slots(self, reason: str | None) -> None:
        """Choose the engine, by the reason against `slots`."""
        self.plays_by_slots = plays_by_slots(self._config.engine, reason)
        slower = f"generation: {reason or 'rollout.engine is generation'}"
        self.way = "slots" if self.plays_by_slots else slower

    def run(self, sessions: Sequence[Session[R]]) -> list[R]:
        """Play every session to its end; see `rollout.engine.run`."""
        over = count(1)

        def show(episode: R) -> None:
            self.on_episode(next(over), len(sessions))

        with self._policy() as policy, self.stages.of(decode=1):
            return run(sessions, policy, self.chat, self.budgets, on_end=show)

    @contextmanager
    def _policy(self) -> Iterator[Policy | SlotPolicy]:
        """Context of rollouts with the policy of the current weights."""
        if self._vllm is not None:
            with self._vllm.joined():
                yield self._vllm
            return
        with trl_compat.unwrapped_model(self._trainer) as model:
            if self.plays_by_slots and not self._is_tried:  # not before each rank has whole weights
                self._use_slots(any_reason(trial_obstacle(model)))
                self._is_tried = True
            yield self.policy(model)

    def policy(self, model: PreTrainedModel) -> Policy | SlotPolicy:
        """Make the policy of the current weights."""
        trainer = self._trainer
        if not self.plays_by_slots:
            size = trainer.args.per_device_train_batch_size * trainer.args.steps_per_generation
            return ModelPolicy(model, self.chat, sampling=trainer.generation_config, batch_size=size)
        sampling = Sampling(trainer.temperature, trainer.top_p, trainer.top_k, trainer.min_p)
        return SlotPolicy(model, sampling, max_slots=self._config.max_slots, stages=self.stages)


def slots_obstacle(trainer: GRPOTrainer) -> str | None:
    """Setting that the engine `slots` does not support; None if there is none."""
    args = trainer.args
    if trainer.use_vllm:
        return "vLLM generates"
    if trainer.repetition_penalty != 1.0 or args.generation_kwargs or args.cache_implementation:
        return "repetition_penalty, generation_kwargs or cache_implementation are set"
    return None


class VLLMPolicy:
    """TRL's vLLM, which continues token ids with the weights of the current step.

    A call is a collective where vLLM is a server or is shared by several ranks. It then needs the same number
    of prompts on each rank: ranks with fewer add fillers.
    """

    def __init__(self, trainer: GRPOTrainer) -> None:
        self._trainer = trainer
        shares = trainer.vllm_mode == "server" or trainer.args.vllm_tensor_parallel_size > 1
        self._is_collective = is_distributed() and shares
        self._sent_step = -1

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Context of rollouts: send new weights, and at its end join the calls of ranks that still play."""
        step = self._trainer.state.global_step
        if self._sent_step != step:
            self._trainer.vllm_generation.sync_weights()
            self._sent_step = step
        yield
        while self._is_collective and self._generate([], 1) is not None:
            pass

    def generate(self, prompts: list[list[int]], *, max_new_tokens: int) -> Continuations:
        """Continue each prompt by 1 to `max_new_tokens` tokens."""
        return self._generate(prompts, max_new_tokens) or Continuations([])

    def _generate(self, prompts: list[list[int]], max_new_tokens: int) -> Continuations | None:
        """Continue prompts; None if no rank has one left."""
        own = most = len(prompts)
        if self._is_collective:
            wanted = gather((own, max_new_tokens))
            most, max_new_tokens = (max(column) for column in zip(*wanted, strict=True))
        if most == 0:
            return None
        fillers = [[self._trainer.eos_token_ids[0]]] * (most - own)
        vllm = self._trainer.vllm_generation
        # TRL gives every turn the budget of a whole completion.
        with trl_compat.patched(vllm, max_completion_length=max_new_tokens):
            _, ids, log_probs, _ = vllm.generate(prompts=prompts + fillers, images=None, num_generations=1)
        # The sampled token's is the first of each position, None if vLLM gave NaN.
        sampled = [[math.nan if one[0] is None else one[0] for one in row] for row in log_probs[:own]]
        return Continuations([list(row) for row in ids[:own]], sampled)


class SQLPlay(Play):
    """Play of questions over SQL databases: sessions of an environment, judged at their end.

    Its metric `grading/changed_golds` is the number of gold queries whose rows changed between executions, on
    any rank.
    """

    def __init__(self, examples: Sequence[Example], environment: SQLEnvironment, judge: Judge) -> None:
        self._examples, self._environment, self._judge = examples, environment, judge
        settings = environment.settings
        self.tools = environment.tools if settings.protocol == "native" else None
        self.max_turn_tokens = settings.max_turn_tokens
        self.max_episode_tokens = settings.max_episode_tokens

    @cached_property
    def _checksum(self) -> int:
        """Checksum of the questions."""
        held = self._examples
        if isinstance(held, ExamplesOnDisk):
            return held.checksum
        return zlib.crc32(repr(list(held)).encode("utf-8", "surrogatepass"))

    def state_dict(self) -> dict[str, Any]:
        return {"questions": self._checksum}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.get("questions", self._checksum) != self._checksum:
            logger.warning("the training questions have changed since the checkpoint: those of now are asked")

    def play(self, questions: Sequence[int], rollouts: Rollouts) -> list[Row]:
        examples = [self._examples[number] for number in questions]
        self._environment = self._environment.counted_by(rollouts.chat.count_tokens)
        episodes = rollouts.run([self._environment.session(example) for example in examples])
        address = self._environment.databases.address
        with rollouts.stages.of(grade=1):
            answers = self._judge.judge_many([(one, address(one.example.database)) for one in episodes])
        changed = {gold for golds in gather(list(self._judge.grader.changed_golds)) for gold in golds}
        self.figures = {"grading/changed_golds": float(len(changed))}
        return [_row(number, answer) for number, answer in zip(questions, answers, strict=True)]


def _row(number: int, answer: Answer) -> Row:
    judged = Judged(
        question=number,
        scores=answer.scores,
        reward=answer.reward,
        stop_reason=str(answer.episode.stop_reason),
        verdict=None if answer.scores is None else answer.verdict.strict,
        metrics=episode_metrics(answer.episode, answer.verdict, answer.flags),
        family=answer.example.family,
        reason=answer.verdict.reason,
    )
    return Row(answer.episode, judged, answer.record())
