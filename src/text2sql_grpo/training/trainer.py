"""`RolloutGRPOTrainer`: TRL's GRPO on generation batches of its own, made by parts."""

import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral
from pathlib import Path
from statistics import fmean
from typing import Any, NoReturn

import torch
from datasets import Dataset
from peft import PeftConfig
from transformers import BitsAndBytesConfig, PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
from transformers.trainer_utils import TrainOutput
from trl import GRPOTrainer

from text2sql_grpo import trl_compat
from text2sql_grpo.config import RolloutConfig
from text2sql_grpo.errors import ConfigError, RunError
from text2sql_grpo.models.hardware import plain_adapter_inputs
from text2sql_grpo.reliability.bad_steps import BadSteps
from text2sql_grpo.reliability.checkpoints import Checkpoints, find_whole
from text2sql_grpo.reliability.ranks import any_rank, gather, is_distributed
from text2sql_grpo.token_tree.update import TokenTreeUpdate
from text2sql_grpo.training.arguments import REFUSED, SQLGRPOConfig
from text2sql_grpo.training.credit import GroupCredit
from text2sql_grpo.training.log_probs import Inputs, other_log_probs
from text2sql_grpo.training.losses import Teach, joined
from text2sql_grpo.training.parts import Batch, Credit, Part, Play, Record, Select, placed
from text2sql_grpo.training.play import Rollouts
from text2sql_grpo.training.record import Rewards, StepTimes
from text2sql_grpo.training.selection import Shuffled
from text2sql_grpo.trl_compat import LogProbs

logger = logging.getLogger(__name__)


class RolloutGRPOTrainer(GRPOTrainer):
    """`GRPOTrainer` that makes its own generation batches, by parts, and keeps TRL's loss and loop.

    What changes: `generation_batch` in place of TRL's dataset, generation and reward functions. Observations
    are masked out of the loss and masked rollouts weigh nothing. The metrics of all parts are logged, and
    their states are in checkpoints: a resumed run ends as if it had never stopped.

    Args:
        model: The policy, or its folder or Hub id.
        num_questions: Number of training questions, which sets the length of an epoch.
        processing_class: Tokenizer; None for that of the model.
        select: Selects questions; None for shuffled epochs.
        teach: Cross-entropy in addition to GRPO's loss.
        credit: Computes advantages; None for GRPO's, of `Judged.reward`.
        record: Parts that log batches, in addition to the metrics of rewards and lengths.
    """

    def __init__(
        self,
        model: PreTrainedModel | str,
        args: SQLGRPOConfig,
        *,
        num_questions: int,
        play: Play,
        rollout: RolloutConfig | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        select: Select | None = None,
        teach: Sequence[Teach] = (),
        credit: Credit | None = None,
        record: Sequence[Record] = (),
        peft_config: PeftConfig | None = None,
        quantization_config: BitsAndBytesConfig | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
    ) -> None:
        args.check_questions(num_questions)
        args.max_completion_length = play.max_episode_tokens  # TRL's name
        super().__init__(
            model=model,
            reward_funcs=_judged_in_play,
            args=args,
            train_dataset=Dataset.from_dict({"question": range(num_questions)}),
            processing_class=processing_class,
            peft_config=peft_config,
            quantization_config=quantization_config,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        trl_compat.keep_one_hook(self.model)
        generator = torch.Generator().manual_seed(args.seed)
        self._num_questions = num_questions
        self.select = select or Shuffled(
            range(num_questions), generator=generator, shuffle=self.shuffle_dataset
        )
        self.play, self.teach = play, list(teach)
        self.credit = credit or GroupCredit(self.num_generations, self.scale_rewards)
        self.record = [Rewards(), *record]
        self._times = StepTimes(self.collect)
        self.rollouts = Rollouts(self, play, rollout or RolloutConfig(), stages=self._times.stages)
        self.update = TokenTreeUpdate(self, is_wanted=args.shared_prefix, keeps_order=self.select.keeps_order)
        self._checkpoints = Checkpoints(self)
        for callback in (self._checkpoints, BadSteps(self, self.collect), self._times):
            self.add_callback(callback)
        self._collected: dict[str, list[float]] = defaultdict(list)
        self._micro_batches: list[Inputs] = []
        # Episodes per micro-batch, micro-batches per generation batch, and iterations over it.
        self._batch_shape = [args.per_device_train_batch_size, args.steps_per_generation, self.num_iterations]
        self._num_groups = args.generation_batch_size // self.num_generations
        self._batch_lifetime = args.steps_per_generation * self.num_iterations  # micro-batches
        self._num_taken = 0  # micro-batches that were trained on
        self._known: LogProbs | None = None  # of the groups' rows, for TRL's loss

    def generation_batch(self) -> Inputs:
        """Make the inputs of the loss for one generation batch: a step of GRPO, in its order.

        Returns:
            TRL's contract with its loss: see `Batch.tensors`, `advantages` (B,) or (B, K), and log-probs
            (B, K) of the sampler, the old policy and the reference where the loss reads them; with losses
            in addition to GRPO's, see `joined`.
        """
        with self._times.stages.of(select=1):
            questions = self.select.draw(self._num_groups)
        batch = self.played(questions)
        for teach in self.teach:
            batch = teach.taught(batch, self)
        inputs = batch.tensors(
            pad_token_id=self.processing_class.pad_token_id,
            multiple=self.pad_to_multiple_of,
            device=self.accelerator.device,
        )
        inputs |= other_log_probs(self, batch, inputs)
        inputs["advantages"] = self.credit.advantages(batch, inputs, self)
        self.state.num_input_tokens_seen += sum(one.num_tokens for one in batch.judged)
        for record in self.record:
            record.record(batch, inputs, self.state.global_step)
        for part in self._parts.values():
            self.collect(part.metrics())
        return joined(batch, inputs, pad_token_id=self.processing_class.pad_token_id)

    def played(self, questions: Sequence[int]) -> Batch:
        """Play and judge a group of each of these questions, which are those of all ranks.

        Raises:
            RunError: They are not the questions of a batch, or ranks drew different ones.
        """
        drawn = questions
        questions = list(drawn) if isinstance(drawn, Iterable) else []
        are_known = all(isinstance(one, Integral) and 0 <= one < self._num_questions for one in questions)
        if len(questions) != self._num_groups or not are_known:
            raise RunError(
                f"{type(self.select).__name__}.draw must return {self._num_groups} numbers of questions, "
                f"each from 0 to {self._num_questions - 1}, got {drawn!r:.100}"
            )
        size = self.args.per_device_train_batch_size * self.args.steps_per_generation
        first = self.accelerator.process_index * size
        places = [row // self.num_generations for row in range(first, first + size)]
        rows = self.play.play([questions[place] for place in places], self.rollouts)
        batch = Batch.of([placed(row, place) for row, place in zip(rows, places, strict=True)])
        if {(one.place, one.question) for one in batch.judged} != set(enumerate(questions)):
            raise RunError(
                "ranks drew different questions: a part of the step has another state on another rank"
            )
        self.select.observe(batch.groups())
        return batch

    @property
    def _parts(self) -> dict[str, Part]:
        """Every part by the name under which checkpoints hold its state."""
        record = {f"record {number} {type(part).__name__}": part for number, part in enumerate(self.record)}
        teach = {f"teach {type(part).__name__}": part for part in self.teach}
        return {"select": self.select, "play": self.play, **teach, "credit": self.credit, **record}

    @property
    def ways(self) -> dict[str, str]:
        """How `rollouts` are played and `updates` computed, with the reason if it is the slower way."""
        return {"rollouts": self.rollouts.way, "updates": self.update.way}

    def _prepare_inputs(self, inputs: Any) -> Inputs:
        """Return the next micro-batch; of a new generation batch when the last one is used up.

        Raises:
            RunError: See `evaluate`.
        """
        if not self.model.training:
            self.evaluate()
        if self._num_taken % self._batch_lifetime == 0 or not self._micro_batches:
            self._micro_batches = self.update.split(self.generation_batch())
        return self._micro_batches[self._num_taken % len(self._micro_batches)]

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Add the gradient of one micro-batch."""
        # Around the backward pass too: checkpointed layers are computed again there, from the same inputs.
        is_plain = self.update.is_on and self.accelerator.native_amp
        with plain_adapter_inputs(self.model, is_autocast=is_plain):
            loss: torch.Tensor = super().training_step(*args, **kwargs)
        self._num_taken += 1
        return loss

    def _compute_loss(self, model: torch.nn.Module, inputs: Inputs) -> torch.Tensor:
        """Return TRL's loss of the groups' rows, and the cross-entropy, from one forward pass of all rows."""
        inputs = self.update.narrowed(model, inputs)
        log_probs, entropies, aux_loss = self.update.log_probs(
            model, inputs, compute_entropy=True, compute_aux_loss=self.aux_loss_enabled
        )
        count = int((~inputs["is_beside"]).sum()) if "is_beside" in inputs else len(log_probs)
        groups = {name: value[:count] if value.ndim else value for name, value in inputs.items()}
        self._known = log_probs[:count], None if entropies is None else entropies[:count], aux_loss
        loss: torch.Tensor = super()._compute_loss(model, groups)
        self._known = None
        if not any_rank(bool((groups["completion_mask"] * groups["tool_mask"]).any())):
            trl_compat.leave_out_token_means(self)  # 0 by TRL
        num_added = self.current_gradient_accumulation_steps  # micro-batches whose losses add up
        cross_entropy = torch.zeros_like(loss)
        if "ce_weights" in inputs:
            # TRL's normaliser of `dapo`.
            tokens = inputs["num_items_in_batch"].clamp(min=1) / self.accelerator.num_processes
            tokens = tokens * num_added / self.args.steps_per_generation
            cross_entropy = -(inputs["ce_weights"] * log_probs).sum() / tokens
        if self.teach:
            self.collect({"losses/ce": num_added * fmean(gather(float(cross_entropy.detach())))})
        self.collect(
            {"fast/rollouts": float(self.rollouts.plays_by_slots), "fast/updates": float(self.update.is_on)}
        )
        return loss + cross_entropy

    def _get_per_token_logps_and_entropies(self, *args: Any, **options: Any) -> LogProbs:
        """Return the log-probs that `_compute_loss` knows already; else TRL's."""
        return self._known or trl_compat.plain_outputs(self, *args, **options)

    def collect(self, metrics: Mapping[str, float]) -> None:
        """Add values to metrics, which are averaged until the next log.

        Raises:
            RunError: A value is not a number.
        """
        for name, value in metrics.items():
            try:
                self._collected[name].append(float(value))  # a checkpoint's JSON cannot hold NumPy's numbers
            except (TypeError, ValueError, RuntimeError) as error:
                raise RunError(f"the metric {name} must be a number, got {value!r:.80}") from error

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log with the metrics of all parts, as TRL averages its own: NaN does not count."""
        logs["num_tokens"] = float(self.state.num_input_tokens_seen)
        for name, values in self._collected.items():
            known = [value for value in values if not math.isnan(value)]
            logs[name] = sum(known) / len(known) if known else None  # type: ignore[assignment]
        self._collected.clear()
        super().log(logs, start_time)

    def state_dict(self) -> dict[str, Any]:
        """State between two steps that no checkpoint of TRL or transformers holds."""
        return {
            "batch_shape": self._batch_shape,
            "num_taken": self._num_taken,
            "micro_batches": self._micro_batches if self._num_taken % self._batch_lifetime else [],
            "parts": {name: part.state_dict() for name, part in self._parts.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; a pending batch of another shape is dropped."""
        micro_batches = self.state.global_step * self.args.gradient_accumulation_steps
        self._num_taken = micro_batches - micro_batches % self._batch_lifetime  # how far the run is
        if state["batch_shape"] == self._batch_shape:
            self._num_taken, self._micro_batches = state["num_taken"], state["micro_batches"]
        for name, part in self._parts.items():
            try:
                part.load_state_dict(state["parts"][name])
            except (KeyError, ValueError) as error:
                logger.warning(
                    "%s starts without state: the checkpoint holds that of another part (%s)", name, error
                )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load the weights of a checkpoint."""
        with _fitting(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Restore also the state that no checkpoint of TRL holds."""
        with _fitting(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self._checkpoints.restore(Path(checkpoint))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save a checkpoint atomically."""
        with self._checkpoints.writing():
            super()._save_checkpoint(model, trial)

    def _get_output_dir(self, trial: Any) -> str:
        """Return the partial folder while a checkpoint is written, else the run folder."""
        return str(self._checkpoints.partial or super()._get_output_dir(trial))

    def train(self, resume_from_checkpoint: str | Path | bool | None = None, **options: Any) -> TrainOutput:
        """Train like TRL's trainer; save the whole steps before a failure that the caller can fix.

        A checkpoint without a step left is loaded, and its step is the result. True and `auto` resume from
        the newest undamaged one of the output folder.

        Raises:
            ConfigError: There is no such checkpoint.
            RunError: A reward function failed or a server does not answer; a note names the checkpoint.
        """
        found = Path(str(resume_from_checkpoint)) if resume_from_checkpoint else None
        if resume_from_checkpoint in (True, "auto"):
            found = find_whole(Path(self.args.output_dir), "auto")
        if found and trl_compat.load_finished(self, found):
            return TrainOutput(self.state.global_step, 0.0, {})
        self._checkpoints.begun_at = None
        try:
            return super().train(found and str(found), **options)
        except Exception as error:
            if self._checkpoints.begun_at is None:  # before the first step
                raise
            error.add_note(self.saved_steps())
            raise

    def saved_steps(self) -> str:
        """Save the whole steps before a failure, and return the end of an error message about them.

        With several ranks nothing is saved: the others may have failed elsewhere.
        """
        step = int(self.state.global_step)
        is_saved = (Path(self.args.output_dir) / f"checkpoint-{step}").is_dir()
        if step == 0 or (is_distributed() and not is_saved):
            return "no checkpoint was saved"
        if not is_saved:
            if self._checkpoints.begun_at == step:  # else the step is done, and a callback failed
                self.load_state_dict(self._checkpoints.before_step)
            trl_compat.save_checkpoint(self)
        return (
            f"checkpoint-{step} holds the steps before: resume from it (--resume auto, "
            "or train(resume_from_checkpoint=True))"
        )

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: `publishing` writes the model card, with data and accuracy."""

    def evaluate(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse, as TRL's evaluation would read its dataset, not whole episodes."""
        raise RunError(
            "this trainer does not evaluate: use text2sql_grpo.evaluate(trainer, environment, questions), or "
            "eval_dataset with eval_steps (in a config, evaluation.every)"
        )

    def push_to_hub(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: TRL would send the output folder with `rollouts.jsonl`, and make the repository public."""
        raise RunError(f"push_to_hub is not supported: {REFUSED['push_to_hub']}")


@contextmanager
def _fitting(checkpoint: str | None) -> Iterator[None]:
    """Turn the failure of a load inside the context into an error that names the checkpoint."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if checkpoint is None or isinstance(error, torch.OutOfMemoryError):
            raise
        raise ConfigError(
            f"cannot resume from {checkpoint}: {str(error)[:300]}: train the same model and adapter "
            "(peft_config) as it holds, or start a new run in another folder"
        ) from error


def _judged_in_play(**_: Any) -> list[float | None]:
    """Stand where TRL requires a reward function; it is never called, as `Play` judges."""
    raise AssertionError
