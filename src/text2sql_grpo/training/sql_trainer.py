"""`SQLGRPOTrainer`: the parts of a step for questions over SQL databases."""

import copy
import sys
from functools import partial
from pathlib import Path
from typing import Any

from peft import PeftConfig, PeftModel
from rich.console import Console
from torch.optim import Optimizer
from transformers import BitsAndBytesConfig, PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
from transformers.trainer_utils import TrainOutput

from text2sql_grpo.config import LoraSettings, LossesConfig, ModelConfig, RolloutConfig
from text2sql_grpo.errors import ArgumentError, ConfigError, ModelError, check_type
from text2sql_grpo.evaluation.bench import Environment
from text2sql_grpo.models.hardware import device_type
from text2sql_grpo.models.loaded_policy import load_policy, name_base, resolved
from text2sql_grpo.models.sources import model_folder
from text2sql_grpo.publishing.merging import merge_adapter
from text2sql_grpo.reliability import ranks
from text2sql_grpo.reliability.checkpoints import find_whole, steps_done
from text2sql_grpo.reliability.signals import StopOnInterrupt
from text2sql_grpo.rewards import reward_mix
from text2sql_grpo.run_folder import ROLLOUTS, SCHEDULE, RunLog
from text2sql_grpo.training.arguments import SQLGRPOConfig
from text2sql_grpo.training.losses import open_losses
from text2sql_grpo.training.parts import Record, Select
from text2sql_grpo.training.play import SQLPlay
from text2sql_grpo.training.record import Episodes, Families
from text2sql_grpo.training.schedule import EvaluationSchedule
from text2sql_grpo.training.trainer import RolloutGRPOTrainer


class SQLGRPOTrainer(RolloutGRPOTrainer):
    """Trainer on questions over SQL databases; writes every episode to `rollouts.jsonl` of the output folder.

    Takes what `GRPOTrainer` takes, with an environment in place of its reward models and tools.

    Args:
        model: The policy; or its folder, Hub id or `.gguf` file.
        environment: Databases, sessions and grader.
        train_dataset: Questions with gold queries: a `datasets.Dataset`, a list of dicts, a file or a Hub id,
            see `load_examples`; or a list of `Example`.
        reward_funcs: Rewards in addition to the strict verdict, or in its place, see `reward_mix`; None for 1
            if the answer is right, also on the test databases, else 0.
        args: Training arguments; None for the defaults.
        eval_dataset: Questions that are answered greedily before the first step, every `args.eval_steps`
            steps and after the last step; see `evaluation_schedule.jsonl`.
        processing_class: Tokenizer; None for that of the model.
        peft_config: Adapter to train; None for all weights.
        quantization_config: Quantization of the base of an adapter.
        optimizers: Optimiser and learning-rate scheduler, as in transformers' `Trainer`.
        rollout: Engine of the rollouts.
        select: See `RolloutGRPOTrainer`; `training.selection` makes it of a config.
        losses: Cross-entropy in addition to GRPO's loss; None for none.

    Raises:
        RunError: Anything wrong with the model, the questions, the rewards or the arguments.
    """

    def __init__(
        self,
        model: PreTrainedModel | str | Path,
        environment: Environment,
        *,
        train_dataset: Any,
        reward_funcs: Any = None,
        args: SQLGRPOConfig | None = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        peft_config: PeftConfig | None = None,
        quantization_config: BitsAndBytesConfig | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        rollout: RolloutConfig | None = None,
        select: Select | None = None,
        losses: LossesConfig | None = None,
    ) -> None:
        for name, value, kind in (
            ("model", model, str | Path | PreTrainedModel | PeftModel),
            ("environment", environment, Environment),
            ("args", args, SQLGRPOConfig | None),
            ("processing_class", processing_class, PreTrainedTokenizerBase | None),
            ("peft_config", peft_config, PeftConfig | None),
            ("callbacks", callbacks, list | None),
            ("rollout", rollout, RolloutConfig | None),
            ("select", select, Select | None),
            ("losses", losses, LossesConfig | None),
        ):
            check_type(name, value, kind)
        args = copy.copy(args) if args else SQLGRPOConfig()  # the trainer writes into it
        self._is_base_in_memory = not isinstance(model, str | Path)
        rewards = reward_mix(reward_funcs)
        if args.eval_steps is not None and eval_dataset is None:
            raise ConfigError("eval_steps needs eval_dataset")
        environment.check_open()
        examples = environment.examples(train_dataset)
        args.check_questions(len(examples))
        held_out = [] if eval_dataset is None else environment.examples(eval_dataset)
        loaded = None
        if isinstance(model, str | Path):
            if quantization_config is None and not args.model_init_kwargs:
                settings = ModelConfig(str(model), lora=LoraSettings() if peft_config else None)
                dtype = resolved(settings, device_type()).dtype
                loaded = load_policy(str(model), dtype=dtype, is_trained=True)
                model, processing_class = loaded.model, processing_class or loaded.tokenizer
            else:
                model = model_folder(str(model))
        record: list[Record] = [Families(), Episodes(partial(RunLog(Path(args.output_dir)).write, ROLLOUTS))]
        try:
            super().__init__(
                model,
                args,
                num_questions=len(examples),
                play=SQLPlay(examples, environment.sessions, environment.judge(rewards)),
                rollout=rollout,
                select=select,
                teach=open_losses(losses or LossesConfig(), examples, environment.sessions),
                record=record,
                processing_class=processing_class,
                peft_config=peft_config,
                quantization_config=quantization_config,
                callbacks=callbacks,
                optimizers=optimizers,
            )
        except (ImportError, TypeError, ValueError) as error:  # of TRL, transformers or PEFT
            raise ArgumentError(f"cannot make the trainer: {error}") from error
        if loaded is not None:
            name_base(self.model, loaded)
        if (given := optimizers[0]) is not None:
            check_type("optimizers[0]", given, Optimizer)
            held = {id(weight) for group in given.param_groups for weight in group["params"]}
            if not any(id(weight) in held for weight in self.model.parameters() if weight.requires_grad):
                raise ArgumentError(
                    "optimizers holds none of the trained weights, so that nothing would be learned: hand in "
                    "a model with its adapter (peft.get_peft_model), and make the optimizer of its weights"
                )
        self.environment = environment
        if held_out:
            every = int(args.eval_steps or sys.maxsize)  # the last step is always evaluated
            self.add_callback(EvaluationSchedule(self, environment.answer, held_out, every=every))

    def train(self, resume_from_checkpoint: str | Path | bool | None = None, **options: Any) -> TrainOutput:
        """Train; after Ctrl-C or SIGTERM a checkpoint is saved before KeyboardInterrupt is raised.

        Args:
            resume_from_checkpoint: A checkpoint; True or `auto` for the newest undamaged one of the output
                folder, whose logs are cut back to its step. None starts afresh, in an unused folder.

        Raises:
            RunError: No such checkpoint, a used folder, or a failure of a reward, a server or the memory.
        """
        if any(isinstance(one, StopOnInterrupt) for one in self.callback_handler.callbacks):
            return super().train(resume_from_checkpoint, **options)  # the main job prepares the folder itself
        folder, checkpoint = Path(self.args.output_dir), None
        if resume_from_checkpoint:
            checkpoint = find_whole(folder, resume_from_checkpoint)
            if checkpoint.resolve().parent == folder.resolve() and ranks.is_main():
                RunLog(folder).cut_back(steps_done(checkpoint))
        elif any((folder / name).exists() for name in (ROLLOUTS, SCHEDULE)):
            raise ArgumentError(
                f"output_dir holds another training: {folder}; choose an unused folder, or resume with "
                "resume_from_checkpoint=True"
            )
        stopper = StopOnInterrupt(Console())
        self.add_callback(stopper)
        try:
            with stopper.listening():
                result = super().train(str(checkpoint) if checkpoint else None, **options)
        finally:
            self.remove_callback(stopper)
        if ranks.any_rank(stopper.is_stopping):
            raise KeyboardInterrupt
        return result

    def merge(self, out: Path | str) -> Path:
        """Save the trained weights, as `adapter` or `model` in the output folder, and merge them into `out`.

        A base that was handed in as an object is merged as it is in memory, since its folder may hold others.

        Args:
            out: A folder in the output folder, or one that does not exist.

        Raises:
            RunError: `out` holds something else, or see `merge_adapter`.
        """
        out, folder = Path(out), Path(self.args.output_dir)
        is_adapted = hasattr(self.model, "peft_config")
        trained = folder / ("adapter" if is_adapted else "model")
        base = Path(self.model.get_base_model().name_or_path if is_adapted else self.model.name_or_path)
        is_own = out.resolve().is_relative_to(folder.resolve())
        if (out.exists() and not is_own) or base.resolve() in (out.resolve(), trained.resolve()):
            raise ModelError(
                f"merging would overwrite another model ({out}, {trained}): choose another folder"
            )
        self.save_model(str(trained))
        is_four_bit = is_adapted and getattr(self.model.get_base_model(), "is_loaded_in_4bit", False)
        if ranks.is_main():
            if is_adapted and self._is_base_in_memory and not is_four_bit:
                trained = folder / "model"
                whole = copy.deepcopy(self.accelerator.unwrap_model(self.model)).cpu().float()
                whole.merge_and_unload(safe_merge=True).save_pretrained(trained)
                self.processing_class.save_pretrained(trained)
            merge_adapter(trained, out, quantization="4bit" if is_four_bit else "auto")
        ranks.barrier()
        return out
