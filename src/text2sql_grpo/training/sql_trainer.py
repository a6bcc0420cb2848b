"""`SQLGRPOTrainer`: the parts of a step for questions over SQL databases."""

from functools import partial
from pathlib import Path
from typing import Any

from peft import PeftConfig
from transformers import BitsAndBytesConfig, PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from text2sql_grpo.config import LoraSettings, ModelConfig, RolloutConfig
from text2sql_grpo.errors import ConfigError
from text2sql_grpo.evaluation.bench import Environment
from text2sql_grpo.models.hardware import device_type
from text2sql_grpo.models.loaded_policy import load_policy, name_base, resolved
from text2sql_grpo.models.sources import model_folder
from text2sql_grpo.publishing.merging import merge_adapter
from text2sql_grpo.reliability import ranks
from text2sql_grpo.rewards import reward_mix
from text2sql_grpo.run_folder import ROLLOUTS, RunLog
from text2sql_grpo.training.arguments import SQLGRPOConfig
from text2sql_grpo.training.credit import GroupCredit
from text2sql_grpo.training.parts import Gate, Record, Select
from text2sql_grpo.training.play import SQLPlay
from text2sql_grpo.training.record import Episodes, Families
from text2sql_grpo.training.schedule import schedule_evaluations
from text2sql_grpo.training.trainer import RolloutGRPOTrainer


class SQLGRPOTrainer(RolloutGRPOTrainer):
    """Trainer on questions over SQL databases; writes every episode to `rollouts.jsonl` of the output folder.

    Takes what `GRPOTrainer` takes, with an environment in place of its reward models and tools.

    Args:
        model: The policy; or its folder, Hub id or `.gguf` file.
        environment: Databases, sessions and grader.
        train_dataset: Questions with gold queries: a `datasets.Dataset`, a list of dicts, a file or a Hub id,
            see `load_examples`; or examples that are checked already.
        reward_funcs: Rewards beside the strict verdict, or in its place, see `reward_mix`; None for 1 if the
            answer is right, also on the test databases, else 0.
        args: Training arguments; None for the defaults.
        eval_dataset: Questions that are answered greedily before the first step, every `args.eval_steps`
            steps and after the last step; see `evaluation_schedule.jsonl`.
        processing_class: Tokenizer; None for that of the model.
        peft_config: Adapter to train; None for all weights.
        quantization_config: Quantization of the base of an adapter.
        optimizers: Optimiser and learning-rate scheduler, as in transformers' `Trainer`.
        rollout: Engine of the rollouts.
        select: See `RolloutGRPOTrainer`, like `gate`; `training.select` makes them of a config.

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
        gate: Gate | None = None,
    ) -> None:
        args = args or SQLGRPOConfig()
        rewards = reward_mix(reward_funcs)
        if args.eval_steps is not None and eval_dataset is None:
            raise ConfigError("eval_steps needs eval_dataset")
        examples = environment.examples(train_dataset)
        args.check_questions(len(examples))
        held_out = [] if eval_dataset is None else environment.examples(eval_dataset)
        loaded = None
        if isinstance(model, str | Path):
            if quantization_config is None and not args.model_init_kwargs:
                settings = ModelConfig(str(model), lora=LoraSettings() if peft_config else None)
                loaded = load_policy(
                    str(model), dtype=resolved(settings, device_type()).dtype, is_trained=True
                )
                model, processing_class = loaded.model, processing_class or loaded.tokenizer
            else:
                model = model_folder(str(model))
        record: list[Record] = [Families(), Episodes(partial(RunLog(Path(args.output_dir)).write, ROLLOUTS))]
        super().__init__(
            model,
            args,
            num_questions=len(examples),
            play=SQLPlay(examples, environment.sessions, environment.judge(rewards)),
            rollout=rollout,
            select=select,
            gate=gate,
            credit=GroupCredit(
                rewards.weights,
                group_size=args.num_generations,
                scale=args.scale_rewards,
                normalizes_each=args.multi_objective_aggregation == "normalize_then_sum",
            ),
            record=record,
            processing_class=processing_class,
            peft_config=peft_config,
            quantization_config=quantization_config,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        if loaded is not None:
            name_base(self.model, loaded)
        self.environment = environment
        environment.sessions.count_tokens_by(self.rollouts.chat.count_tokens)
        if held_out:
            every = int(args.eval_steps or self.args.max_steps)
            schedule_evaluations(self, environment.answer, held_out, every=every)

    def merge(self, out: Path | str) -> Path:
        """Save the trained weights beside `out`, as `adapter` or `model`, and the merged model in it.

        Raises:
            RunError: See `merge_adapter`.
        """
        out = Path(out)
        is_adapted = hasattr(self.model, "peft_config")
        trained = out.parent / ("adapter" if is_adapted else "model")
        self.save_model(str(trained))
        if ranks.is_main():
            merge_adapter(trained, out)
        ranks.barrier()
        return out
