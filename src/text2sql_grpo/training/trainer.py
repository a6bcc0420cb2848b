"""`SQLGRPOTrainer`: TRL's GRPO over multi-turn episodes in a SQL environment, in the order of a step."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import torch
from datasets import Dataset
from peft import PeftConfig
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
from trl import GRPOTrainer

from text2sql_grpo.config import SelectionConfig
from text2sql_grpo.data.example import Example
from text2sql_grpo.environment.session import SQLEnvironment
from text2sql_grpo.errors import ConfigError, RunError
from text2sql_grpo.grading import Grader
from text2sql_grpo.reliability.ranks import any_reason, gather, is_distributed
from text2sql_grpo.rewards import Answer, Judge, RewardMix
from text2sql_grpo.rollout.chat_format import ChatFormat
from text2sql_grpo.rollout.engine import Budgets, Continuations, SlotPolicy, run
from text2sql_grpo.rollout.policy import context_length, obstacle, plays_by_slots, trial_obstacle
from text2sql_grpo.rollout.stages import Stages
from text2sql_grpo.rollout.turns import R, Session
from text2sql_grpo.run_folder import ROLLOUTS
from text2sql_grpo.training import trl_compat
from text2sql_grpo.training.advantages import (
    no_signal,
    token_advantages,
    tree_advantages,
    turn_advantages,
    turn_spans,
    zero_variance_by_prompt,
)
from text2sql_grpo.training.arguments import SQLGRPOConfig
from text2sql_grpo.training.bad_steps import BadSteps
from text2sql_grpo.training.checkpoints import Checkpoints
from text2sql_grpo.training.gradient_noise import GradientNoise
from text2sql_grpo.training.overlap import RolloutsAhead, current_player
from text2sql_grpo.training.quarantine import contradicted
from text2sql_grpo.training.run_log import RunLog, episode_metrics, family_metrics
from text2sql_grpo.training.scored import Played, Scored, Scores
from text2sql_grpo.training.selection import Selection
from text2sql_grpo.training.step_times import StepTimes
from text2sql_grpo.training.token_tree.update import LogProbs, LossTokens, TokenTreeUpdate
from text2sql_grpo.training.value_head import ValueHead, turn_states

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass
class StepState:
    """State that one override of the trainer leaves for a later one.

    Attributes:
        sampler: Sampler of prompts, for the whole run.
        batch: Prompt index of each rollout of the current generation batch, as TRL's sampler draws them.
        scored: Judged rollouts of the batch; None until they are played and after the batch is made.
        sampled: Masks of their completions, 1 for tokens that the loss may read; None with `scored`.
        micro_batch: Inputs of the loss; None until they are prepared.
        half: Half of `micro_batch`, trained on instead of it after out-of-memory; None for the whole.
        loss_weight: Weight of `half` in the loss of the micro-batch.
        is_forwarded: True once the loss of the micro-batch was computed.
        loss_tokens: Tokens that the current loss reads; None outside of `_compute_loss`.
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

    def clear_micro_batch(self) -> None:
        """Reset the fields of one micro-batch."""
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
        reward_weights: Weight of each named reward.
        tools: JSON schemas for the chat template; None for none.
        select: Makes the selection of questions from the size of a generation batch; None for TRL's
            shuffled epochs.
        write: Writes lines to the log of episodes; None for no log.
        options: Other arguments of `GRPOTrainer`.

    Attributes:
        on_episode: Callback during rollouts: number of finished episodes, number of episodes of this rank.
            Not called for batches that are played beside updates.
        selection: Selection of questions; None for TRL's shuffled epochs.
        ahead: Batches that are played beside updates; None if `staleness` is 0.
    """

    # A step, in the order in which TRL calls the methods; `StepState` holds what one leaves for another:
    # training_step                     each micro-batch; again for each half after out-of-memory
    #   _prepare_inputs                 plays and splits a generation batch when one is due
    #     _generate_and_score_completions
    #       _rollout                    (`rollout_func`)
    #         _play_selected            selects questions, others in place of zero-variance groups too;
    #                                   with `staleness` in a thread (`RolloutsAhead`), some batches earlier
    #           _play_batch             plays and judges; the subclass
    #             _play                 the rollout engine
    #       _named_reward               one reward function for each score
    #       _get_per_token_logps_and_entropies    old policy and reference, if needed
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
        select: Callable[..., Selection] | None = None,
        write: Callable[[Iterable[Mapping[str, Any]]], None] | None = None,
        **options: Any,
    ) -> None:
        self._step_state, self._write_records = StepState(), write
        self.on_episode: Callable[[int, int], None] = lambda done, total: None
        trl_compat.silence_masked_samples()
        args.reward_weights = list(reward_weights.values())
        blank = [{"role": "user", "content": ""}]
        super().__init__(
            model=model,
            reward_funcs=[_named_reward(name, logs_metrics=i == 0) for i, name in enumerate(reward_weights)],
            args=args,
            # Indices only: examples may lie on disk, and the session writes the prompt.
            train_dataset=Dataset.from_dict({"prompt": [blank] * num_prompts, "example": range(num_prompts)}),
            processing_class=processing_class,
            **options,
        )
        trl_compat.keep_one_hook(self.model)
        # Assigned here, not passed: TRL then neither warns nor requires a known template.
        self.rollout_func = self._rollout
        self._chat = ChatFormat(
            processing_class,
            tools=tools,
            eos_token_ids=self.eos_token_ids,
            template_options=args.chat_template_kwargs,
        )
        self._budgets = Budgets(args.max_turn_tokens, self.max_completion_length, context_length(self.model))
        reason = trl_compat.slots_obstacle(self) or obstacle(self.accelerator.unwrap_model(self.model))
        self._use_slots(reason)
        self._is_tried = False
        self.selection = select and select(
            batch_size=args.generation_batch_size // self.num_generations,
            num_generations=self.num_generations,
            seed=args.seed,
            shuffle=self.shuffle_dataset,
        )
        self._corrects_sampling = trl_compat.corrects_sampling(self, knows_log_probs=self._plays_by_slots)
        if args.staleness and self.selection is None:
            raise ConfigError("rollout.staleness needs a selection of questions, which this trainer lacks")
        self.ahead: RolloutsAhead | None = None
        if args.staleness:
            self.ahead = RolloutsAhead(self, self._play_selected, staleness=args.staleness)
        self._value_head: ValueHead | None = None
        self._noise = GradientNoise(self, every=args.gradient_noise_every)
        self._update = TokenTreeUpdate(
            self,
            is_wanted=args.shared_prefix,
            keeps_order=self.selection is not None and bool(self.selection.settings.strata),
            keeps_halves=self._noise.every > 0,
        )
        self._checkpoints, self._bad_steps = Checkpoints(self), BadSteps(self)
        self._times = StepTimes(self)
        for callback in (self._checkpoints, self._bad_steps, self._times):
            self.add_callback(callback)

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's sampler, whose order a resumed run needs."""
        self._step_state.sampler = super()._get_train_sampler(*args, **kwargs)
        return self._step_state.sampler

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Create transformers' schedule without the first step of a warm-up, whose learning rate is 0."""
        warmup_steps = self.args.get_warmup_steps(num_training_steps)
        if self.lr_scheduler is not None or warmup_steps == 0:
            return super().create_scheduler(num_training_steps, optimizer)
        with trl_compat.patched(self.args, warmup_steps=warmup_steps):
            scheduler = super().create_scheduler(num_training_steps + 1, optimizer)
        return trl_compat.without_first_step(scheduler)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Restore also the state that no checkpoint of TRL holds."""
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            trl_compat.draw_orders(self, self._step_state.sampler)
            self._checkpoints.restore(Path(checkpoint))
            if self._value_head is not None:
                self._value_head.load(Path(checkpoint))

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Add the gradient of one micro-batch; half by half if it does not fit into memory."""
        step, losses = self._step_state, list[torch.Tensor]()
        step.clear_micro_batch()
        if self.ahead:
            self.ahead.before_micro_batch()
        with self._bad_steps.attempt():
            losses.append(super().training_step(*args, **kwargs))
        for half, weight in self._bad_steps.halves(step.micro_batch, is_forwarded=step.is_forwarded):
            step.half, step.loss_weight = half, weight  # reached only after out-of-memory
            with self._bad_steps.attempt(is_last=True):
                losses.append(super().training_step(*args, **kwargs))
        step.clear_micro_batch()
        trl_compat.log_metric(self, "step/halved", float(len(losses) > 1))
        self._noise.add_micro_batch()
        return torch.stack(losses).sum()

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        """Return the micro-batch, or `StepState.half`."""
        step = self._step_state
        if step.half is not None:
            return step.half
        with self._update.splitting():
            inputs: dict[str, Any] = super()._prepare_inputs(generation_batch)
        step.micro_batch = inputs
        return inputs

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Play a generation batch; TRL's inputs of the loss, with advantages of turns."""
        step = self._step_state
        step.batch = [row["example"] for row in inputs]
        with trl_compat.correcting(self, is_on=False):  # `_rollout` begins it
            output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        assert step.scored is not None  # set by `_rollout`
        self._credit_turns(step.scored, output)
        self._log_families(step.scored, output["advantages"])
        if self.ahead and self.model.training and not self._corrects_sampling:
            # The policy that the ratio of the loss is to, as the episodes are older than the weights.
            output["old_per_token_logps"] = output["sampling_per_token_logps"]
        step.scored = step.sampled = None
        return output

    def _rollout(self, prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        """Play one generation batch and score it: TRL's `rollout_func`."""
        step = self._step_state
        if self.ahead and self.model.training:
            self._try_slots()
            with self._times.stages.of(wait=1):
                played = self.ahead.take()
        else:
            played = self._play_selected()
        self._log_played(played)
        self._compare_rewards(played)
        step.scored = scored = played.scored
        episodes, scores = scored.rollouts, scored.scores
        filler = [self._chat.turn_ids("")[-1]]  # TRL fails on an empty completion
        trl_compat.begin_correcting(self, is_on=self._corrects_sampling)
        step.sampled = [
            [0] * len(episode.completion_ids or filler) if score is None else episode.completion_mask or [0]
            for episode, score in zip(episodes, scores, strict=True)
        ]
        return {
            "prompt_ids": [episode.prompt_ids for episode in episodes],
            "completion_ids": [episode.completion_ids or filler for episode in episodes],
            "logprobs": trl_compat.sampling_log_probs(
                self, episodes, is_corrected=self._corrects_sampling or self.args.staleness > 0
            ),
            "env_mask": step.sampled,
            "scores": scores,
            "metrics": list(scored.metrics),
        }

    def _places(self, count: int) -> list[int]:
        """Index of the group of each episode of this rank; ranks hold consecutive parts of a batch."""
        first = self.accelerator.process_index * count
        return [row // self.num_generations for row in range(first, first + count)]

    def _play_selected(self) -> Played:
        """Play selected questions, and others in place of zero-variance groups, if configured."""
        selection, player = self.selection, current_player()
        batch = self._step_state.batch
        if selection is None or not self._is_training:
            scored = self._play_batch(batch)
            return Played(scored, batch, records=[*(scored.records or ())])
        done, total = trl_compat.generation_batches(self)
        with self._stages.of(select=1):
            selection.draw(progress=player.progress if player else done / max(1, total))
        places = self._places(self.args.per_device_train_batch_size * self.args.steps_per_generation)
        scored = self._play_batch([selection.batch[place] for place in places])
        records = [*(scored.records or ())]
        selection.observe(_of_all_ranks(scored.verdicts))
        while True:
            with self._stages.of(select=1):
                replaced = selection.replacements()
            if not replaced:
                break
            rows = [row for row, place in enumerate(places) if place in replaced]
            others = self._play_batch([replaced[places[row]] for row in rows])
            records += others.records or ()
            changed = selection.observe(_of_all_ranks(others.verdicts), replaced)
            scored = scored.with_rows(
                {row: i for i, row in enumerate(rows) if places[row] in changed}, others
            )
        drawn = list(selection.batch)
        return Played(
            scored,
            [drawn[place] for place in places],
            drawn=drawn,
            records=records,
            metrics=selection.metrics(),
        )

    def _log_played(self, played: Played) -> None:
        """Log a batch that is trained on now, the lines of its episodes in order of ranks."""
        for name, value in played.metrics.items():
            trl_compat.log_metric(self, name, value)
        self._times.ahead = played.seconds
        step = {"step": self.state.global_step}
        gathered = gather([record | step for record in played.records])
        if self._write_records is not None and self.accelerator.is_main_process:
            self._write_records(record for records in gathered for record in records)

    @property
    def _is_training(self) -> bool:
        return current_player() is not None or bool(self.model.training)

    @property
    def _stages(self) -> Stages:
        player = current_player()
        return player.stages if player else self._times.stages

    @abstractmethod
    def _play_batch(self, batch: Sequence[int]) -> Scored:
        """Play these prompts (indices) by `_play`, and judge them."""

    def _play(self, sessions: Sequence[Session[R]]) -> list[R]:
        over, fork = count(1), self.args.subtree_size if self._is_training else 1
        player = current_player()
        self._try_slots()

        def on_end(episode: R) -> None:
            if player is None:
                self.on_episode(next(over), len(sessions))

        if not self._plays_by_slots:
            with trl_compat.generating(self), self._times.stages.of(tools=1):  # `generate` decodes
                return run(sessions, self, self._chat, self._budgets, fork=fork, on_end=on_end)
        with self._playing_model() as model, self._stages.of(decode=1):
            policy = SlotPolicy(
                model,
                trl_compat.sampling(self),
                max_slots=self.args.max_slots,
                same_draws=self.args.same_draws,
                stages=self._stages,
            )
            if player is not None and self.ahead is not None:
                sampling = replace(policy.sampling, generator=player.generator)
                policy = replace(policy, sampling=sampling, before_pass=self.ahead.before_pass)
            return run(sessions, policy, self._chat, self._budgets, fork=fork, on_end=on_end)

    @contextmanager
    def _playing_model(self) -> Iterator[PreTrainedModel]:
        """Model that plays in this thread: the policy, or its copy."""
        player = current_player()
        if player is None:
            with trl_compat.unwrapped_model(self) as model:
                yield model
        else:
            with trl_compat.autocast(self, player.model):
                yield player.model

    def _try_slots(self) -> None:
        """Compare the engine `slots` with the model's own code, once, and fall back if they differ.

        Not before the first batch, when each rank has whole weights.
        """
        if not self._plays_by_slots or self._is_tried:
            return
        self._is_tried = True
        with trl_compat.unwrapped_model(self) as model:
            reason = any_reason(trial_obstacle(model))
        self._use_slots(reason)
        self._corrects_sampling = trl_compat.corrects_sampling(self, knows_log_probs=self._plays_by_slots)

    def _use_slots(self, reason: str | None) -> None:
        """Choose the engine, by the reason against `slots`."""
        self._plays_by_slots = plays_by_slots(self.args.engine, reason)
        if self._plays_by_slots:
            self._way = "slots"
        else:
            self._way = f"generation: {reason or 'rollout.engine is generation'}"
        if self.args.staleness and not self._plays_by_slots:
            raise ConfigError(f"rollout.staleness needs the engine slots, but rollouts are by {self._way}")

    @property
    def ways(self) -> dict[str, str]:
        """How `rollouts` are played and `updates` computed, with the reason if it is the slower way."""
        return {"rollouts": self._way, "updates": self._update.way}

    def generate(self, prompts: list[list[int]], *, max_new_tokens: int) -> Continuations:
        """Continue token ids with the current policy; makes the trainer a `Policy` of the engine."""
        with self._times.stages.of(decode=1):
            return trl_compat.generate(self, prompts, max_new_tokens=max_new_tokens) or Continuations([])

    def _compare_rewards(self, played: Played) -> None:
        """Mark rollouts of zero-variance groups; warn if the batch of all ranks has no gradient.

        Ranks wait here: rollouts last unequally long, and TRL's collectives have a time-out.
        """
        scored, batch = played.scored, played.prompts
        stops = (str(rollout.stop_reason) for rollout in scored.rollouts)
        gathered = gather(list(zip(batch, scored.rewards, stops, strict=True)))
        prompts, rewards, reasons = zip(*(row for rows in gathered for row in rows), strict=True)
        if played.drawn is not None and set(prompts) != set(played.drawn):
            raise RunError("ranks drew different questions: selection has another state on another rank")
        has_zero_variance = zero_variance_by_prompt(zip(prompts, rewards, strict=True))
        for row, prompt in zip(scored.metrics, batch, strict=True):
            row["group/no_spread"] = float(has_zero_variance[prompt])
        reason = no_signal(rewards, reasons, group_size=self.num_generations)
        has_turn_rewards = any(map(any, scored.turn_rewards or ())) or self._value_head is not None
        if reason and self.model.training and not has_turn_rewards and self.accelerator.is_main_process:
            logger.warning(f"step {self.state.global_step + 1} has no gradient: {reason}")

    def _credit_turns(self, scored: Scored, output: dict[str, Any]) -> None:
        """Set advantages per turn, by `turn_credit` or if any turn has a reward."""
        masks = [rollout.completion_mask for rollout in scored.rollouts]
        turns = [
            [*rewards, *[0.0] * (len(turn_spans(mask)) - len(rewards))]  # a cut turn has none
            for rewards, mask in zip(scored.turn_rewards or [[]] * len(masks), masks, strict=True)
        ]
        here = list(zip(scored.rewards, turns, strict=True))
        all_rows = [row for rows in gather(here) for row in rows]
        size = self.num_generations if self.model.training else self.num_generations_eval
        subtree, scale = self.args.subtree_size, self.scale_rewards
        if self._value_head is not None:
            states = [row for rows in gather(turn_states(self, output, masks)) for row in rows]
            is_training = self.model.training
            advantages = self._value_head.advantages(all_rows, states, scale=scale, is_training=is_training)
            trl_compat.log_metric(self, "value/loss", self._value_head.loss)
        elif subtree > 1 and self.model.training:
            advantages = tree_advantages(all_rows, group_size=size, subtree_size=subtree, scale=scale)
        elif any(reward for _, rewards in all_rows for reward in rewards):
            advantages = turn_advantages(all_rows, group_size=size, scale=scale)
        else:
            return
        first = self.accelerator.process_index * len(here)
        output["advantages"] = token_advantages(advantages[first : first + len(here)], masks, output)

    def _log_families(self, scored: Scored, advantages: torch.Tensor) -> None:
        """Log means by family over the generation batch of all ranks."""
        if scored.families is None or not self.model.training:
            return
        means = advantages.reshape(len(advantages), -1).mean(1).tolist()
        rows = zip(scored.families, scored.metrics, scored.rewards, means, strict=True)
        gathered = [row for rows in gather(list(rows)) for row in rows]
        for name, value in family_metrics(gathered).items():
            trl_compat.log_metric(self, name, value)

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        """Return TRL's loss of a micro-batch, or the weighted loss of one half of it."""
        step = self._step_state
        inputs, step.loss_tokens = self._update.narrowed(model, inputs)
        with trl_compat.correcting(self, is_on="importance_sampling_ratio" in inputs):
            loss: torch.Tensor = super()._compute_loss(model, inputs)
        if self.model.training:
            trl_compat.log_metric(self, "fast/rollouts", float(self._plays_by_slots))
            trl_compat.log_metric(self, "fast/updates", float(self._update.is_on))
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
        """Compute log-probs of completions; forward each distinct prefix once if the model allows it."""
        step, inputs = self._step_state, (model, input_ids, attention_mask)
        tokens = step.loss_tokens
        if self._update.check(*inputs, logits_to_keep):
            tokens = tokens or LossTokens.sampled(attention_mask[:, -logits_to_keep:], step.sampled)
            wanted = {name: options.get(name, False) for name in ("compute_entropy", "compute_aux_loss")}
            return self._update.log_probs(*inputs, tokens, batch_size=batch_size, **wanted)
        log_probs, *others = super()._get_per_token_logps_and_entropies(
            *inputs, logits_to_keep, batch_size, **options
        )
        if tokens is not None:  # 0 where `narrowed` zeroes the old and reference log-probs
            log_probs = log_probs.where(tokens.is_scored.bool(), 0.0)
        return log_probs, *others

    def train(self, *args: Any, **options: Any) -> Any:
        """Train, and drop the batches that are played ahead when training ends."""
        try:
            return super().train(*args, **options)
        finally:
            if self.ahead:
                self.ahead.close()

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save a checkpoint atomically."""
        with self._checkpoints.writing():
            super()._save_checkpoint(model, trial)
            if self._value_head is not None and self.args.should_save:
                folder = Path(self._get_output_dir(trial))
                self._value_head.save(folder / f"checkpoint-{self.state.global_step}")

    def save_whole_steps(self) -> int:
        """Save a checkpoint of the steps before one that failed, unless there is one; return their number.

        On one process only: the others may have failed elsewhere.
        """
        step = int(self.state.global_step)
        is_saved = (Path(self.args.output_dir) / f"checkpoint-{step}").is_dir()
        if step and not is_saved and not is_distributed():
            self._save_checkpoint(self.model, trial=None)
        return step

    def _get_output_dir(self, trial: Any) -> str:
        """Return the partial folder while a checkpoint is written, else the run folder."""
        return str(self._checkpoints.partial or super()._get_output_dir(trial))

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: `publishing` writes the model card, with data and accuracy."""


class SQLGRPOTrainer(RolloutGRPOTrainer):
    """Trainer on questions over SQL databases; logs every episode.

    Args:
        model: The policy, or its folder or Hub id.
        args: Training arguments.
        examples: Questions with golds that `load_examples` checked.
        environment: Environment of the sessions.
        rewards: Named scores and their weights.
        grader: Grader of submitted queries.
        run_log: Log of episodes; None for none.
        selection: Selection of questions (docs/selection.md); None for TRL's shuffled epochs.
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
        selection: SelectionConfig | None = None,
    ) -> None:
        select = None
        if selection not in (None, SelectionConfig()) or args.staleness:
            select = partial(Selection, examples, selection or SelectionConfig())
        super().__init__(
            model,
            args,
            num_prompts=len(examples),
            reward_weights=rewards.weights,
            tools=environment.tools if environment.settings.protocol == "native" else None,
            processing_class=processing_class,
            peft_config=peft_config,
            callbacks=callbacks,
            select=select,
            write=None if run_log is None else partial(run_log.write, ROLLOUTS),
        )
        self.environment = environment
        environment.count_tokens_by(self._chat.count_tokens)
        self._examples = examples
        self._judge = Judge(
            grader,
            environment.executor,
            rewards,
            max_rows_shown=environment.settings.observation.max_rows,
            scores_turns=args.turn_credit == "rewards",
        )
        if args.turn_credit == "gae":
            self._value_head = ValueHead(self.model.config.get_text_config().hidden_size, *rewards.bounds())

    def _play_batch(self, batch: Sequence[int]) -> Scored:
        examples = [self._examples[number] for number in batch]
        episodes = self._play([self.environment.session(example) for example in examples])
        address = self.environment.databases.address
        with self._stages.of(grade=1):
            answers = [self._judge.judge(one, address(one.example.database)) for one in episodes]
            self._quarantine(batch, answers)
        changed = {gold for golds in gather(list(self._judge.grader.changed_golds)) for gold in golds}
        return Scored(
            episodes,
            scores=[answer.scores for answer in answers],
            rewards=[answer.reward for answer in answers],
            metrics=[
                episode_metrics(answer.episode, answer.verdict, answer.flags, answer.turn_scores)
                | {"grading/changed_golds": float(len(changed))}
                for answer in answers
            ],
            records=[answer.record() for answer in answers],
            turn_rewards=[answer.turn_rewards for answer in answers],
            families=[example.family for example in examples],
            verdicts=[None if answer.scores is None else answer.verdict.strict for answer in answers],
        )

    def _quarantine(self, batch: Sequence[int], answers: Sequence[Answer]) -> None:
        """Take questions out of the draw whose answers contradict the gold, if so configured."""
        selection = self.selection
        if selection is None or not (selection.settings.quarantine_suspects and self._is_training):
            return
        for number in selection.quarantine(
            contradicted(batch, answers, self.environment, self._judge.grader)
        ):
            name = self._examples[number].id
            logger.warning("question %s is drawn no more: its answers contradict the gold", name)


def _of_all_ranks(values: Sequence[T] | None) -> list[T]:
    return [value for values in gather(values or ()) for value in values]


def _named_reward(name: str, *, logs_metrics: bool) -> Callable[..., list[float | None]]:
    """Make a TRL reward function that returns one of the scores of the rollout."""

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
