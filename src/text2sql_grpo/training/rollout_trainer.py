"""TRL's GRPO over whole multi-turn rollouts of our engine."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import PeftConfig
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
from trl import GRPOTrainer

from text2sql_grpo.environment.episode import Rollout
from text2sql_grpo.rollout.chat_format import ChatFormat
from text2sql_grpo.rollout.engine import Budgets, Continuations, SlotPolicy, run
from text2sql_grpo.rollout.policy import context_length, obstacle, plays_by_slots
from text2sql_grpo.rollout.turns import R, Session
from text2sql_grpo.training import trl_compat
from text2sql_grpo.training.advantages import no_signal, spread, turn_advantages
from text2sql_grpo.training.arguments import SQLGRPOConfig
from text2sql_grpo.training.bad_steps import BadSteps
from text2sql_grpo.training.checkpoints import Checkpoints
from text2sql_grpo.training.gradient_noise import GradientNoise
from text2sql_grpo.training.processes import gathered, wait
from text2sql_grpo.training.run_log import family_metrics
from text2sql_grpo.training.selection import Selection
from text2sql_grpo.training.shared_prefix_update import LogProbs, SharedPrefixUpdate

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


class RolloutGRPOTrainer(GRPOTrainer, ABC):
    """`GRPOTrainer` whose completions are whole rollouts of our engine; what is played, a subclass says.

    What changes: rollouts come from our engine through TRL's `rollout_func`, observations are
    masked out of the loss, each named reward is a TRL reward function of its own (so each is
    logged), masked rollouts weigh nothing, and turns may have advantages of their own. Checkpoints are
    whole or not there, and a run that goes on from one ends as if it had never stopped; a step that
    cannot be taken is skipped or halved, and counted.

    Args:
        model: The policy, or its folder or Hub id.
        args: Training arguments.
        num_prompts: What is trained on is known by its number, 0 to this.
        reward_weights: Of each named reward.
        tools: JSON schemas that the chat template shows; None for none.
        selection: Which prompts a step plays; None for TRL's shuffled epochs.

    Attributes:
        on_episode: Called during rollouts with the number of episodes that are over and of all of this rank.
    """

    def __init__(
        self,
        model: PreTrainedModel | str,
        args: SQLGRPOConfig,
        *,
        num_prompts: int,
        reward_weights: Mapping[str, float],
        tools: list[dict[str, Any]] | None,
        processing_class: PreTrainedTokenizerBase,
        peft_config: PeftConfig | None = None,
        callbacks: list[TrainerCallback] | None = None,
        selection: Selection | None = None,
    ) -> None:
        self._selection = selection
        self.on_episode: Callable[[int, int], None] = lambda done, total: None
        trl_compat.silence_masked_samples()
        args.reward_weights = list(reward_weights.values())
        super().__init__(
            model=model,
            reward_funcs=[_named_reward(name, logs_metrics=i == 0) for i, name in enumerate(reward_weights)],
            args=args,
            # Numbers of examples, which may lie on disk; what TRL calls the prompt is the session's to write.
            train_dataset=Dataset.from_dict(
                {
                    "prompt": [[{"role": "user", "content": ""}]] * num_prompts,
                    "example": range(num_prompts),
                }
            ),
            processing_class=processing_class,
            peft_config=peft_config,
            callbacks=callbacks,
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
        self._batch: list[int] = []
        self._scored: Scored | None = None
        self._sampler: Any = None
        self._checkpoints, self._bad_steps = Checkpoints(self), BadSteps(self)
        self.add_callback(self._checkpoints)
        self.add_callback(self._bad_steps)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self._batch = [row["example"] for row in inputs]
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        self._credit_turns(output)
        self._log_families(output["advantages"])
        self._scored = None
        self._update.sampled = None
        return output

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        sampler = super()._get_train_sampler(*args, **kwargs)
        if self._selection is not None:
            sampler = self._selection.sampler(sampler, shuffle=self.shuffle_dataset)
        self._sampler = sampler
        return sampler

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """As transformers', but without the first step of a warm-up, whose learning rate is 0."""
        warmup_steps = self.args.get_warmup_steps(num_training_steps)
        if self.lr_scheduler is not None or warmup_steps == 0:
            return super().create_scheduler(num_training_steps, optimizer)
        before, self.args.warmup_steps = self.args.warmup_steps, warmup_steps
        try:
            scheduler = super().create_scheduler(num_training_steps + 1, optimizer)
        finally:
            self.args.warmup_steps = before
        return trl_compat.without_first_step(scheduler)

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._checkpoints.partial or super()._get_output_dir(trial))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        with self._checkpoints.writing():
            super()._save_checkpoint(model, trial)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            trl_compat.draw_orders(self, self._sampler)
            self._checkpoints.restore(Path(checkpoint))

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Learns from one micro-batch; in halves if it does not fit into memory."""
        step = super().training_step
        loss = self._bad_steps.learn(lambda: step(*args, **kwargs))
        self._noise.add_micro_batch()
        return loss

    def compute_loss(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """TRL's loss of a micro-batch, or the part that a half of it has in that."""
        compute = super().compute_loss
        return self._bad_steps.loss(lambda: compute(*args, **kwargs))

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        prepare = super()._prepare_inputs
        with self._update.splitting():
            return self._bad_steps.inputs(lambda: prepare(generation_batch))

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        with self._update.scoring(inputs) as inputs:
            loss: torch.Tensor = super()._compute_loss(model, inputs)
            return loss

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> LogProbs:
        return self._update.log_probs(super()._get_per_token_logps_and_entropies, *args, **kwargs)

    def generate(self, prompts: list[list[int]], *, max_new_tokens: int) -> Continuations:
        """Continues token ids with the current policy: the trainer is the `Policy` of `generation`."""
        return trl_compat.generate(self, prompts, max_new_tokens=max_new_tokens)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """No card beside the checkpoints: `publishing` writes one, with data and accuracy."""

    @abstractmethod
    def _play_batch(self, batch: Sequence[int]) -> Scored:
        """The rollouts of these prompts, by number, played by `_play` and judged."""

    def _rollout(self, prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        """TRL's `rollout_func`: the rollouts of one generation batch, with their scores."""
        self._scored = scored = self._play_batch(self._batch)
        wait()  # rollouts last unequally long, and TRL's own meetings have a time-out
        self._warn_of_no_signal(scored)
        episodes, scores = scored.rollouts, scored.scores
        filler = [self._chat.turn_ids("")[-1]]  # TRL cannot take an empty completion.
        trained = [
            score is not None and bool(episode.completion_ids)
            for episode, score in zip(episodes, scores, strict=True)
        ]
        self._update.sampled = [
            episode.completion_mask if is_trained else [0] * max(1, len(episode.completion_ids))
            for episode, is_trained in zip(episodes, trained, strict=True)
        ]
        return {
            "prompt_ids": [episode.prompt_ids for episode in episodes],
            "completion_ids": [episode.completion_ids or filler for episode in episodes],
            "logprobs": trl_compat.sampling_log_probs(self, episodes),
            "env_mask": self._update.sampled,
            "scores": scores,
            "metrics": list(scored.metrics),
        }

    def _warn_of_no_signal(self, scored: Scored) -> None:
        """Log why a generation batch of all ranks has no gradient, where it has none."""
        stops = (str(rollout.stop_reason) for rollout in scored.rollouts)
        everybody = gathered(list(zip(scored.rewards, stops, strict=True)))
        rewards, reasons = zip(*(row for rows in everybody for row in rows), strict=True)
        reason = no_signal(rewards, reasons, group_size=self.num_generations)
        has_turn_rewards = any(map(any, scored.turn_rewards or ()))
        if reason and self.model.training and not has_turn_rewards and self.accelerator.is_main_process:
            logger.warning(f"step {self.state.global_step + 1} has nothing to learn from: {reason}")

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

    def _log_families(self, advantages: torch.Tensor) -> None:
        """Log means by family over the generation batch of all ranks."""
        scored = self._scored
        if scored is None or scored.families is None or not self.model.training:
            return
        means = advantages.reshape(len(advantages), -1).mean(1).tolist()
        rows = zip(scored.families, scored.metrics, scored.rewards, means, strict=True)
        everybody = [row for rows in gathered(list(rows)) for row in rows]
        for name, value in family_metrics(everybody).items():
            trl_compat.log_metric(self, name, value)

    def _credit_turns(self, output: dict[str, Any]) -> None:
        """Gives turns their own advantages, where any of them earned something."""
        scored = self._scored
        if scored is None or scored.turn_rewards is None:
            return
        here = list(zip(scored.rewards, scored.turn_rewards, strict=True))
        all_rows = [row for rows in gathered(here) for row in rows]
        if not any(reward for _, turns in all_rows for reward in turns):
            return
        size = self.num_generations if self.model.training else self.num_generations_eval
        advantages = turn_advantages(all_rows, group_size=size, scale=self.scale_rewards)
        first = self.accelerator.process_index * len(here)
        mine = advantages[first : first + len(here)]
        output["advantages"] = spread(mine, [rollout.completion_mask for rollout in scored.rollouts], output)


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
