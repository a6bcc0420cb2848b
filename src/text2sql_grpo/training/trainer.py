"""`SQLGRPOTrainer`: TRL's GRPO over multi-turn episodes in a SQL environment."""

from collections.abc import Mapping, Sequence

from peft import PeftConfig
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from text2sql_grpo.data.example import Example
from text2sql_grpo.environment.session import SQLEnvironment
from text2sql_grpo.grading import Grader
from text2sql_grpo.rewards import Answer, Judge, RewardMix
from text2sql_grpo.training.advantages import without_spread
from text2sql_grpo.training.arguments import SQLGRPOConfig
from text2sql_grpo.training.processes import gathered
from text2sql_grpo.training.rollout_trainer import RolloutGRPOTrainer, Scored
from text2sql_grpo.training.run_log import RunLog, episode_metrics
from text2sql_grpo.training.selection import Selection


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
        everybody = gathered([(answer.example.id, answer.reward) for answer in answers])
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
        everybody = gathered([answer.record() | {"step": self.state.global_step} for answer in answers])
        if self.accelerator.is_main_process:
            self._run_log.write_episodes(record for records in everybody for record in records)
