"""`SQLGRPOTrainer`: TRL's GRPO over multi-turn episodes in a SQL environment."""

from collections.abc import Mapping, Sequence

from peft import PeftConfig
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from text2sql_grpo.data.example import Example
from text2sql_grpo.environment.episode import Episode
from text2sql_grpo.environment.session import SQLEnvironment
from text2sql_grpo.grading import Grader, Verdict
from text2sql_grpo.rewards import Results, RewardMix, episode_flags
from text2sql_grpo.training.arguments import SQLGRPOConfig
from text2sql_grpo.training.processes import gathered
from text2sql_grpo.training.rollout_trainer import RolloutGRPOTrainer, Scored, Scores, without_spread
from text2sql_grpo.training.run_log import RunLog, episode_metrics, episode_record
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
        self._rewards = rewards
        self._grader = grader
        self._run_log = run_log

    def _play_batch(self, batch: Sequence[int]) -> Scored:
        examples = [self._examples[number] for number in batch]
        episodes = self._play([self.environment.session(example) for example in examples])
        verdicts = [self._grade(episode) for episode in episodes]
        scores = [
            self._rewards.score(e, v, self._results(e)) for e, v in zip(episodes, verdicts, strict=True)
        ]
        rewards = [None if score is None else self._rewards.total(score) for score in scores]
        max_rows = self.environment.settings.observation.max_rows
        flags = [
            episode_flags(e, v, max_rows_shown=max_rows) for e, v in zip(episodes, verdicts, strict=True)
        ]
        self._write(episodes, verdicts, scores, rewards, flags)
        metrics = [episode_metrics(*facts) for facts in zip(episodes, verdicts, flags, strict=True)]
        everybody = gathered(
            [(example.id, reward) for example, reward in zip(examples, rewards, strict=True)]
        )
        is_flat = without_spread(pair for pairs in everybody for pair in pairs)
        for row, example in zip(metrics, examples, strict=True):
            row["group/no_spread"] = float(is_flat[example.id])
        families = [example.family for example in examples]
        return Scored(episodes, scores, rewards, metrics, families=families)

    def _grade(self, episode: Episode) -> Verdict:
        example = episode.example
        database = self.environment.databases.path(example.database)
        return self._grader.grade(
            database, example.gold_sql, episode.final_sql, other_golds=example.other_golds
        )

    def _results(self, episode: Episode) -> Results:
        database = self.environment.databases.path(episode.example.database)
        return Results(self.environment.executor, database, episode)

    def _write(
        self,
        episodes: list[Episode],
        verdicts: list[Verdict],
        scores: list[Scores],
        rewards: list[float | None],
        flags: list[tuple[str, ...]],
    ) -> None:
        if self._run_log is None:
            return
        step = {"step": self.state.global_step}
        records = [
            episode_record(episode, verdict, score, reward=reward, flags=flag) | step
            for episode, verdict, score, reward, flag in zip(
                episodes, verdicts, scores, rewards, flags, strict=True
            )
        ]
        everybody = gathered(records)
        if self.accelerator.is_main_process:
            self._run_log.write_episodes(record for records in everybody for record in records)
