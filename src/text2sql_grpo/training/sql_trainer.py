"""`SQLGRPOTrainer`: the parts of a step for questions over SQL databases."""

from collections.abc import Sequence
from functools import partial

from peft import PeftConfig
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from text2sql_grpo.data.example import Example
from text2sql_grpo.environment.session import SQLEnvironment
from text2sql_grpo.grading import Grader
from text2sql_grpo.rewards import Judge, RewardMix
from text2sql_grpo.run_folder import ROLLOUTS, RunLog
from text2sql_grpo.training.arguments import SQLGRPOConfig
from text2sql_grpo.training.credit import GroupCredit
from text2sql_grpo.training.credit_gae import GAECredit
from text2sql_grpo.training.parts import Gate, Record, Select
from text2sql_grpo.training.play import SQLPlay
from text2sql_grpo.training.record import Episodes, Families
from text2sql_grpo.training.trainer import RolloutGRPOTrainer


class SQLGRPOTrainer(RolloutGRPOTrainer):
    """Trainer on questions over SQL databases; logs every episode.

    Args:
        model: The policy, or its folder or Hub id.
        args: Training arguments.
        examples: Questions with gold queries that `load_examples` checked.
        environment: Environment of the sessions.
        rewards: Named scores and their weights.
        grader: Grader of submitted queries.
        run_log: Log of episodes; None for none.
        select: See `RolloutGRPOTrainer`, like `gate`; `training.select` makes them of a config.
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
        select: Select | None = None,
        gate: Gate | None = None,
    ) -> None:
        judge = Judge(
            grader,
            environment.executor,
            rewards,
            max_rows_shown=environment.settings.observation.max_rows,
        )
        record: list[Record] = [Families()]
        if run_log is not None:
            record.append(Episodes(partial(run_log.write, ROLLOUTS)))
        super().__init__(
            model,
            args,
            num_questions=len(examples),
            play=SQLPlay(examples, environment, judge),
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
            callbacks=callbacks,
        )
        if args.turn_credit == "gae":
            width = self.model.config.get_text_config().hidden_size
            self.credit = GAECredit(width, *rewards.bounds(), scale=args.scale_rewards)
        self.environment = environment
        environment.count_tokens_by(self.rollouts.chat.count_tokens)
