"""`SQLGRPOTrainer`: TRL's GRPO over multi-turn episodes in a SQL environment, in the order of a step."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import PeftConfig
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
from trl import GRPOTrainer

from text2sql_grpo.data.example import Example
from text2sql_grpo.environment.episode import Rollout
from text2sql_grpo.environment.session import SQLEnvironment
from text2sql_grpo.grading import Grader
from text2sql_grpo.reliability.ranks import gather
from text2sql_grpo.rewards import Answer, Judge, RewardMix
from text2sql_grpo.rollout.chat_format import ChatFormat
from text2sql_grpo.rollout.engine import Budgets, Continuations, SlotPolicy, run
from text2sql_grpo.rollout.policy import context_length, obstacle, plays_by_slots
from text2sql_grpo.rollout.turns import R, Session
from text2sql_grpo.training import trl_compat
from text2sql_grpo.training.advantages import no_signal, spread, turn_advantages, without_spread
from text2sql_grpo.training.arguments import SQLGRPOConfig
from text2sql_grpo.training.bad_steps import BadSteps
from text2sql_grpo.training.checkpoints import Checkpoints
from text2sql_grpo.training.gradient_noise import GradientNoise
from text2sql_grpo.training.run_log import RunLog, episode_metrics, family_metrics
from text2sql_grpo.training.selection import Selection
from text2sql_grpo.training.shared_prefix_update import LogProbs, LossTokens, SharedPrefixUpdate

logger = logging.getLogger(__name__)

Scores = dict[str, float] | None


@dataclass(frozen=True)
class Scored:
    """The rollouts of one generation batch, judged; one entry of each list per rollout.

    Attributes:
        scores: Of each named reward; None for a rollout that must not be trained on.
        rewards: Their weighted sums.
        metrics: Facts that are averaged over the batch and logged.
        families: Of each rollout, the family of its question; None where there are no families.
        turn_rewards: Of each rollout, what each of its sampled turns earned besides; None for none.
    """

    rollouts: Sequence[Rollout]
    scores: Sequence[Scores]
    rewards: Sequence[float | None]
    metrics: Sequence[dict[str, float]]
    turn_rewards: Sequence[Sequence[float]] | None = None
    families: Sequence[str] | None = None


@dataclass
class StepState:
    """What one override of the trainer leaves for a later one.

    Attributes:
        sampler: Draws the questions of the whole run.
        batch: Numbers of the prompts of the generation batch in the making, one for each rollout.
        scored: Its rollouts, judged; None before.
        sampled: Of each of them, 1 for tokens that the loss may read; None when the batch is made.
        micro_batch: Inputs of the loss; None before they are there.
        half: The half of them to learn from instead, after memory ran out; None for the whole.
        loss_weight: Weight of this half in the loss of the micro-batch.
        is_forwarded: Whether the loss of the micro-batch was computed.
        loss_tokens: Log-probs that the loss being computed reads; None while none is.
    """

    sampler: Any = None
    batch: list[int] = field(default_factory=list)
    scored: Scored | None = None
    sampled: list[list[int]] | None = None
    micro_batch: dict[str, Any] | None = None
    half: dict[str, Any] | None = None
    loss_weight: float = 1.0
    is_forwarded: bool = False
    loss_tokens: LossTokens | None = None

    def forget_micro_batch(self) -> None:
        """Make room for the next one."""
        self.micro_batch = self.half = self.loss_tokens = None
        self.loss_weight, self.is_forwarded = 1.0, False


class RolloutGRPOTrainer(GRPOTrainer, ABC):
    """`GRPOTrainer` whose completions are whole rollouts of this package's engine; a subclass plays them.

    What changes: rollouts come from the engine through TRL's `rollout_func`, observations are masked out of
    the loss, each named reward is a TRL reward function of its own (so each is logged), masked rollouts weigh
    nothing, and turns may have advantages of their own. Checkpoints are whole or not there, and a resumed run
    ends as if it had never stopped; a step that cannot be taken is skipped or halved, and counted.

    Args:
        model: The policy, or its folder or Hub id.
        args: Training arguments.
        num_prompts: Number of prompts; the dataset holds their indices.
        reward_weights: Of each named reward.
        tools: JSON schemas that the chat template shows; None for none.
        selection: Which prompts a step plays; None for TRL's shuffled epochs.
        options: Other arguments of `GRPOTrainer`.

    Attributes:
        on_episode: Called during rollouts with the number of episodes that are over and of all of this rank.
    """

    # A step, in the order in which TRL calls the methods; what one leaves for another is in `StepState`:
    # training_step                     each micro-batch; once more for each half if memory runs out
    #   _prepare_inputs                 plays and splits a generation batch when it is time
    #     _generate_and_score_completions
    #       _rollout                    (`rollout_func`)
    #         _play_batch               plays and judges; the subclass
    #           _play                   the rollout engine
    #       _named_reward               one reward function for each score
    #       _get_per_token_logps_and_entropies    of the old policy and the reference, if needed
    #       _credit_turns               advantages of turns
    #   _compute_loss
    #     _get_per_token_logps_and_entropies      with gradient
    # BadSteps.on_pre_optimizer_step    drops a gradient that is not finite
    # _save_checkpoint, _get_output_dir

    def __init__(
        self,
        model: PreTrainedModel | str,
        args: SQLGRPOConfig,
        *,
        num_prompts: int,
        reward_weights: Mapping[str, float],
        tools: list[dict[str, Any]] | None,
        processing_class: PreTrainedTokenizerBase,
        selection: Selection | None = None,
        **options: Any,
    ) -> None:
        self._step_state = StepState()
        self._selection = selection
        self.on_episode: Callable[[int, int], None] = lambda done, total: None
        trl_compat.silence_masked_samples()
        args.reward_weights = list(reward_weights.values())
        blank = [{"role": "user", "content": ""}]
        super().__init__(
            model=model,
            reward_funcs=[_named_reward(name, logs_metrics=i == 0) for i, name in enumerate(reward_weights)],
            args=args,
            # Numbers of examples, which may lie on disk; what TRL calls the prompt is the session's to write.
            train_dataset=Dataset.from_dict({"prompt": [blank] * num_prompts, "example": range(num_prompts)}),
            processing_class=processing_class,
            **options,
        )
        # Assigned here, not passed: TRL then neither warns nor demands a template that it knows.
        self.rollout_func = self._rollout
        self._chat = ChatFormat(
            processing_class,
            tools=tools,
            eos_token_ids=self.eos_token_ids,
            template_options=args.chat_template_kwargs,
        )
        self._budgets = Budgets(args.max_turn_tokens, self.max_completion_length, context_length(self.model))
        reason = trl_compat.slots_obstacle(self) or obstacle(self.accelerator.unwrap_model(self.model))
        self._plays_by_slots = plays_by_slots(args.engine, reason)
        self._noise = GradientNoise(self, every=args.gradient_noise_every)
        self._update = SharedPrefixUpdate(
            self,
            is_wanted=args.shared_prefix,
            keeps_order=selection is not None,
            keeps_halves=self._noise.every > 0,
        )
        self._checkpoints, self._bad_steps = Checkpoints(self), BadSteps(self)
        self.add_callback(self._checkpoints)
        self.add_callback(self._bad_steps)

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's sampler, or that of the selection."""
        sampler = super()._get_train_sampler(*args, **kwargs)
        if self._selection is not None:
            sampler = self._selection.sampler(sampler, shuffle=self.shuffle_dataset)
        self._step_state.sampler = sampler
        return sampler

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """As transformers', but without the first step of a warm-up, whose learning rate is 0."""
        warmup_steps = self.args.get_warmup_steps(num_training_steps)
        if self.lr_scheduler is not None or warmup_steps == 0:
            return super().create_scheduler(num_training_steps, optimizer)
        with trl_compat.patched(self.args, warmup_steps=warmup_steps):
            scheduler = super().create_scheduler(num_training_steps + 1, optimizer)
        return trl_compat.without_first_step(scheduler)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Also restore what TRL would lose of a resumed run."""
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            trl_compat.draw_orders(self, self._step_state.sampler)
            self._checkpoints.restore(Path(checkpoint))

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Add the gradient of one micro-batch; half by half if it does not fit into memory."""
        step, losses = self._step_state, list[torch.Tensor]()
        step.forget_micro_batch()
        with self._bad_steps.attempt():
            losses.append(super().training_step(*args, **kwargs))
        for half, weight in self._bad_steps.halves(step.micro_batch, is_forwarded=step.is_forwarded):
            step.half, step.loss_weight = half, weight  # never reached if there was memory enough
            with self._bad_steps.attempt(is_last=True):
                losses.append(super().training_step(*args, **kwargs))
        step.forget_micro_batch()
        trl_compat.log_metric(self, "step/halved", float(len(losses) > 1))
        self._noise.add_micro_batch()
        return torch.stack(losses).sum()

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        """The micro-batch, or the half of it to learn from."""
        step = self._step_state
        if step.half is not None:
            return step.half
        with self._update.splitting():
            inputs: dict[str, Any] = super()._prepare_inputs(generation_batch)
        step.micro_batch = inputs
        return inputs

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's generation batch of these prompts, with advantages of turns."""
        step = self._step_state
        step.batch = [row["example"] for row in inputs]
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        assert step.scored is not None  # by `_rollout`
        self._credit_turns(step.scored, output)
        self._log_families(step.scored, output["advantages"])
        step.scored = step.sampled = None
        return output

    def _rollout(self, prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        """TRL's `rollout_func`: the rollouts of one generation batch, with their scores."""
        step = self._step_state
        step.scored = scored = self._play_batch(step.batch)
        self._warn_of_no_signal(scored)
        episodes, scores = scored.rollouts, scored.scores
        filler = [self._chat.turn_ids("")[-1]]  # TRL cannot take an empty completion.
        step.sampled = [
            [0] * len(episode.completion_ids or filler) if score is None else episode.completion_mask or [0]
            for episode, score in zip(episodes, scores, strict=True)
        ]
        return {
            "prompt_ids": [episode.prompt_ids for episode in episodes],
            "completion_ids": [episode.completion_ids or filler for episode in episodes],
            "logprobs": trl_compat.sampling_log_probs(self, episodes),
            "env_mask": step.sampled,
            "scores": scores,
            "metrics": list(scored.metrics),
        }

    @abstractmethod
    def _play_batch(self, batch: Sequence[int]) -> Scored:
        """The rollouts of these prompts, by number, played by `_play` and judged."""

    def _play(self, sessions: Sequence[Session[R]]) -> list[R]:
        over = count(1)

        def on_end(episode: R) -> None:
            self.on_episode(next(over), len(sessions))

        if not self._plays_by_slots:
            with trl_compat.generating(self):
                return run(sessions, self, self._chat, self._budgets, on_end=on_end)
        with trl_compat.unwrapped_model(self) as model:
            policy = SlotPolicy(model, trl_compat.sampling(self), max_slots=self.args.max_slots)
            return run(sessions, policy, self._chat, self._budgets, on_end=on_end)

    def generate(self, prompts: list[list[int]], *, max_new_tokens: int) -> Continuations:
        """Continue token ids with the current policy: the trainer is a `Policy` of the engine."""
        return trl_compat.generate(self, prompts, max_new_tokens=max_new_tokens) or Continuations([])

    def _warn_of_no_signal(self, scored: Scored) -> None:
        """Log why a generation batch of all ranks has no gradient, where it has none.

        Ranks wait here: rollouts last unequally long, and TRL's collectives have a time-out.
        """
        stops = (str(rollout.stop_reason) for rollout in scored.rollouts)
        everybody = gather(list(zip(scored.rewards, stops, strict=True)))
        rewards, reasons = zip(*(row for rows in everybody for row in rows), strict=True)
        reason = no_signal(rewards, reasons, group_size=self.num_generations)
        has_turn_rewards = any(map(any, scored.turn_rewards or ()))
        if reason and self.model.training and not has_turn_rewards and self.accelerator.is_main_process:
            logger.warning(f"step {self.state.global_step + 1} has nothing to learn from: {reason}")

    def _credit_turns(self, scored: Scored, output: dict[str, Any]) -> None:
        """Give turns their own advantages, where any of them earned something."""
        if scored.turn_rewards is None:
            return
        here = list(zip(scored.rewards, scored.turn_rewards, strict=True))
        all_rows = [row for rows in gather(here) for row in rows]
        if not any(reward for _, turns in all_rows for reward in turns):
            return
        size = self.num_generations if self.model.training else self.num_generations_eval
        advantages = turn_advantages(all_rows, group_size=size, scale=self.scale_rewards)
        first = self.accelerator.process_index * len(here)
        mine = advantages[first : first + len(here)]
        output["advantages"] = spread(mine, [rollout.completion_mask for rollout in scored.rollouts], output)

    def _log_families(self, scored: Scored, advantages: torch.Tensor) -> None:
        """Log means by family over the generation batch of all ranks."""
        if scored.families is None or not self.model.training:
            return
        means = advantages.reshape(len(advantages), -1).mean(1).tolist()
        rows = zip(scored.families, scored.metrics, scored.rewards, means, strict=True)
        everybody = [row for rows in gather(list(rows)) for row in rows]
        for name, value in family_metrics(everybody).items():
            trl_compat.log_metric(self, name, value)

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        """TRL's loss of a micro-batch, or what one half of it adds to that."""
        step = self._step_state
        inputs, step.loss_tokens = self._update.narrowed(inputs)
        loss: torch.Tensor = super()._compute_loss(model, inputs)
        step.loss_tokens, step.is_forwarded = None, True
        return loss * step.loss_weight

    def _get_per_token_logps_and_entropies(
        self,
        model: torch.nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **options: Any,
    ) -> LogProbs:
        """Log-probs of completions, each distinct prompt forwarded once where the model allows it."""
        step, inputs = self._step_state, (model, input_ids, attention_mask)
        tokens = step.loss_tokens
        if self._update.is_on:
            tokens = tokens or LossTokens.sampled(attention_mask[:, -logits_to_keep:], step.sampled)
            has_entropy = options.get("compute_entropy", False)
            return self._update.log_probs(*inputs, tokens, batch_size=batch_size, compute_entropy=has_entropy)
        log_probs, *others = super()._get_per_token_logps_and_entropies(
            *inputs, logits_to_keep, batch_size, **options
        )
        if tokens is not None:  # 0 where those are 0 that they are compared with: `narrowed`
            log_probs = log_probs.where(tokens.is_scored.bool(), 0.0)
        return log_probs, *others

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """A checkpoint that is whole or not there."""
        with self._checkpoints.writing():
            super()._save_checkpoint(model, trial)

    def _get_output_dir(self, trial: Any) -> str:
        """Where transformers saves: aside while a checkpoint is written."""
        return str(self._checkpoints.partial or super()._get_output_dir(trial))

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """No card beside the checkpoints: `publishing` writes one, with data and accuracy."""


class SQLGRPOTrainer(RolloutGRPOTrainer):
    """Trains on questions: an episode looks, reads, and submits a query. Every one is written to the log.

    Args:
        model: The policy, or its folder or Hub id.
        args: Training arguments.
        examples: Questions; golds are expected to have been checked by `load_examples`.
        environment: Makes their sessions.
        rewards: Named scores and their weights.
        grader: Judges submitted queries.
        run_log: Where episodes are written; None to write none.
        strata: Share of each named family in a step (see `selection.strata`); None for shuffled epochs.
    """

    def __init__(
        self,
        model: PreTrainedModel | str,
        args: SQLGRPOConfig,
        *,
        examples: Sequence[Example],
        environment: SQLEnvironment,
        rewards: RewardMix,
        grader: Grader,
        processing_class: PreTrainedTokenizerBase,
        peft_config: PeftConfig | None = None,
        callbacks: list[TrainerCallback] | None = None,
        run_log: RunLog | None = None,
        strata: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(
            model,
            args,
            num_prompts=len(examples),
            reward_weights=rewards.weights,
            tools=environment.tools if environment.settings.protocol == "native" else None,
            processing_class=processing_class,
            peft_config=peft_config,
            callbacks=callbacks,
            selection=Selection([example.family for example in examples], strata) if strata else None,
        )
        self.environment = environment
        environment.count_tokens_by(self._chat.count_tokens)
        self._examples = examples
        max_rows = environment.settings.observation.max_rows
        self._judge = Judge(grader, environment.executor, rewards, max_rows_shown=max_rows)
        self._run_log = run_log

    def _play_batch(self, batch: Sequence[int]) -> Scored:
        examples = [self._examples[number] for number in batch]
        episodes = self._play([self.environment.session(example) for example in examples])
        path = self.environment.databases.path
        answers = [self._judge.judge(episode, path(episode.example.database)) for episode in episodes]
        self._write(answers)
        metrics = [episode_metrics(answer.episode, answer.verdict, answer.flags) for answer in answers]
        everybody = gather([(answer.example.id, answer.reward) for answer in answers])
        is_flat = without_spread(pair for pairs in everybody for pair in pairs)
        for row, example in zip(metrics, examples, strict=True):
            row["group/no_spread"] = float(is_flat[example.id])
        return Scored(
            episodes,
            scores=[answer.scores for answer in answers],
            rewards=[answer.reward for answer in answers],
            metrics=metrics,
            families=[example.family for example in examples],
        )

    def _write(self, answers: Sequence[Answer]) -> None:
        if self._run_log is None:
            return
        everybody = gather([answer.record() | {"step": self.state.global_step} for answer in answers])
        if self.accelerator.is_main_process:
            self._run_log.write_episodes(record for records in everybody for record in records)


def _named_reward(name: str, *, logs_metrics: bool) -> Callable[..., list[float | None]]:
    """A TRL reward function that hands out one of the scores made during the rollout."""

    def reward(
        scores: list[Scores],
        metrics: list[dict[str, float]],
        log_metric: Callable[[str, float], None],
        **_: Any,
    ) -> list[float | None]:
        if logs_metrics:
            for metric in metrics[0]:
                log_metric(metric, sum(row[metric] for row in metrics) / len(metrics))
        return [None if score is None else score[name] for score in scores]

    reward.__name__ = name
    return reward
