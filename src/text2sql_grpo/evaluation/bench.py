"""`Environment`, the databases that a model is trained and evaluated on, and `Bench`, that of a config.

`Environment.answer` is the only way in which questions are answered, outside of a step of training.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from text2sql_grpo.checked import Positive, Seed, Temperature, checked
from text2sql_grpo.config import Config, EnvironmentConfig, EvaluationConfig, GradingConfig, RolloutConfig
from text2sql_grpo.data.databases import WHAT_IS_READ, Databases
from text2sql_grpo.data.example import Example, folded
from text2sql_grpo.data.loading import load_examples, read_quarantine
from text2sql_grpo.data.shards import ExamplesOnDisk, load_shards, shard_files
from text2sql_grpo.environment.episode import CURES, Episode
from text2sql_grpo.environment.session import EnvironmentSettings, SQLEnvironment
from text2sql_grpo.errors import ConfigError, DataError, ModelError, RunError, check_type
from text2sql_grpo.evaluation.endpoint import Endpoint, served_episodes
from text2sql_grpo.evaluation.evidence import with_evidence
from text2sql_grpo.evaluation.published import with_published
from text2sql_grpo.rewards import Answer, Judge, RewardMix, open_grader, reward_mix
from text2sql_grpo.sql import ExecutionOutcome, SQLExecutor
from text2sql_grpo.sql.address import Database

if TYPE_CHECKING:  # load torch, which grading and verifiers can do without
    from text2sql_grpo.evaluation.sampler import Sampler
    from text2sql_grpo.models.loaded_policy import LoadedPolicy

    Model = LoadedPolicy | Sampler | Endpoint

T = TypeVar("T")


@checked
class Sampling:
    """Bounds of the sampling of answers; see `Environment.answer`."""

    samples: Positive = 1
    temperature: Temperature = 0.0
    seed: Seed = 0


class UnansweredError(RunError):
    """An endpoint gave no answer to some questions; those to the others were handed over."""


@dataclass(frozen=True)
class Asked:
    """Episode of a question without a gold query, and the outcome of its final query; None without one."""

    episode: Episode
    result: ExecutionOutcome | None

    @property
    def failure(self) -> str:
        """Reason why there is no result; empty if there is one."""
        if self.result is None:
            reason = str(self.episode.stop_reason)
            cure = f" ({CURES[reason]})" if reason in CURES else ""
            return f"no final SQL: the episode stopped with {reason}{cure}"
        return "" if self.result.is_ok else f"the final SQL failed: {self.result.error}"


class Environment:
    """Databases, the executor of their SQL, the sessions of a model, and the grader of its answers.

    A context manager: its end stops the worker processes.

    Args:
        databases: A file, a folder, a URL, or a mapping of names to these; see `Databases`.
        test_databases: Maximum number of test databases of each gold query, see `GradingConfig`; 0 for none.
        server_url: PostgreSQL server for these, see `GradingConfig`.
        hide: Tables and columns that the model never sees; see `DataConfig`.
        fields: Fields of `EnvironmentConfig`: `max_turns=4`, `protocol="native"`.

    Attributes:
        databases: The databases by name.
        executor: Runs SQL that a model wrote.
        sessions: Makes the session of a question.
        grader: Grades a query against a gold query.

    Raises:
        ConfigError: A field is unknown or its value is wrong, or `mcp` names no usable server.
        DataError: There is no database.
    """

    def __init__(
        self,
        databases: Database | Mapping[str, Database],
        *,
        test_databases: int = 4,
        server_url: str | None = None,
        nulls: Literal["observed", "declared"] = "observed",
        hide: Sequence[str] = ("personal",),
        **fields: Any,
    ) -> None:
        config = EnvironmentConfig(**fields)
        grading = GradingConfig(test_databases=test_databases, server_url=server_url, nulls=nulls)
        self.databases = Databases(databases)
        if not self.databases.names():
            raise DataError(f"no databases in {self.databases.shown}: give {WHAT_IS_READ}")
        self._is_open = True
        self._checked: dict[int, Example] = {}  # by `id`: the objects that `examples` returned
        self.executor = SQLExecutor(config.limits)
        if config.mcp is None:
            self.sessions = SQLEnvironment(self.databases, self.executor, config, hide=hide)
        else:
            from text2sql_grpo.integrations.mcp.environment import MCPEnvironment

            self.sessions = MCPEnvironment(
                self.databases, self.executor, config, server=config.mcp, hide=hide
            )
        self.grader = open_grader(self.executor, **vars(grading))

    @classmethod
    def of(cls, config: Config) -> Self:
        """Open the environment of a config."""
        data = config.data
        return cls(data.databases, hide=data.hide, **vars(config.grading), **vars(config.environment))

    @property
    def settings(self) -> EnvironmentSettings:
        """Prompt, turns and limits of an episode."""
        return self.sessions.settings

    def judge(self, rewards: RewardMix | None = None) -> Judge:
        """Make the judge of episodes; without rewards, it gives verdicts alone."""
        shown = self.settings.observation.max_rows
        return Judge(self.grader, self.executor, rewards, max_rows_shown=shown)

    def examples(self, source: Any, **options: Any) -> Sequence[Example]:
        """Questions with checked gold queries, see `load_examples`; those of this environment as they are."""
        if isinstance(source, ExamplesOnDisk):
            return source
        is_checked = isinstance(source, list | tuple) and {*map(id, source)} <= self._checked.keys()
        if is_checked and source and not options:
            return list(source)
        found = load_examples(source, self.databases, self.executor, refusal=self.refusal, **options)
        self._checked |= {id(one): one for one in found}
        return found

    def refusal(self, database: str, sql: str) -> str:
        """Why a gold query cannot be used, as it reads something hidden; empty if it does not."""
        return self.sessions.hidden(database).refusal(sql)

    def answer(
        self,
        questions: Sequence[Example],
        model: "Model | str | Path",
        *,
        samples: int = 1,
        temperature: float = 0.0,
        seed: int = 0,
        rewards: RewardMix | None = None,
        rollout: RolloutConfig | None = None,
        evaluation: EvaluationConfig | None = None,
        template_options: dict[str, Any] | None = None,
        on_answer: Callable[[int, Answer], None] | None = None,
    ) -> list[Answer]:
        """Answer questions by the sessions and the engine of training, and judge the answers meanwhile.

        Args:
            model: See `opened_model`.
            samples: Answers of each question.
            temperature: 0 is greedy.
            seed: Random seed of sampling.
            rewards: Named scores of the answers; None for verdicts alone, with the published ones.
            rollout: Engine of a local model.
            evaluation: Its batch size and precision are used, for a local model.
            template_options: Variables of the chat template of a local model; None for those of a trainer.
            on_answer: Called with the index of each answer in the list that is returned, and the answer, in
                one thread of its own.

        Returns:
            The answers, those to one question next to each other.

        Raises:
            UnansweredError: An endpoint failed for some questions, after `on_answer` got all others.
            RunError: See `served_episodes` and `Judge.judge`.
        """
        self.check_open()
        check_type("rollout", rollout, RolloutConfig | None)
        check_type("evaluation", evaluation, EvaluationConfig | None)
        check_type("template_options", template_options, dict | None)
        samples = Sampling(samples=samples, temperature=temperature, seed=seed).samples
        examples = [example for example in questions for _ in range(samples)]
        judge = self.judge(None if rewards is None else reward_mix(rewards))
        found, errors = dict[int, Future[Answer]](), list[Exception]()

        def judged(place: int, episode: Episode) -> Answer:
            try:
                database = self.databases.address(episode.example.database)
                answer = judge.judge(episode, database)
                if rewards is None:
                    answer = with_published(answer, self.executor, database)
                    answer = with_evidence(answer, self.sessions, self.grader, database)
                if on_answer is not None:
                    on_answer(place, answer)
            except Exception as error:
                errors.append(error)
                raise
            return answer

        with ThreadPoolExecutor(1, thread_name_prefix="judge") as thread:

            def on_end(place: int, episode: Episode) -> None:
                if errors:
                    raise errors[0]  # at once, before more is played for nothing
                found[place] = thread.submit(judged, place, episode)

            failures = self._roll_out(
                examples,
                model,
                on_end,
                temperature=temperature,
                seed=seed,
                rollout=rollout,
                evaluation=evaluation,
                template_options=template_options,
            )
            answers = {place: future.result() for place, future in found.items()}
        if failures:
            raise UnansweredError(
                f"{len(failures)} of {len(examples)} questions were not answered, the first: {failures[0]}; "
                "run the command again when the endpoint answers"
            )
        return [answers[place] for place in range(len(examples))]

    def ask(self, question: str, model: "Model | str | Path", *, database: str | None = None) -> Asked:
        """Answer one question that has no gold query, greedily, and run the final query.

        Args:
            model: A model folder, an adapter, a run folder or a Hub id; or a loaded one.
            database: Name of the database; None for the only one.

        Raises:
            DataError: The question is empty, or it could be about several databases.
            ModelError: There is no such model.
        """
        self.check_open()
        if not isinstance(question, str) or not question.strip():
            raise DataError(f"the question is empty or no text: {question!r}")
        names = self.databases.names()
        if database is None and len(names) != 1:
            raise DataError(f"one database is needed, got {len(names)} ({self.databases.shown}): name it")
        example = Example("question", database or names[0], question, gold_sql="")
        self.sessions.schema_text(example.database)  # fails before a model is loaded, which takes longer
        episodes: list[Episode] = []
        failures = self._roll_out([example], model, lambda place, episode: episodes.append(episode))
        if failures:
            raise UnansweredError(failures[0])
        (episode,) = episodes
        if episode.final_sql is None:
            return Asked(episode, None)
        return Asked(episode, self.sessions.guarded(example.database).run(episode.final_sql))

    def _roll_out(
        self,
        examples: Sequence[Example],
        model: "Model | str | Path",
        on_end: Callable[[int, Episode], None],
        *,
        temperature: float = 0.0,
        seed: int = 0,
        rollout: RolloutConfig | None = None,
        evaluation: EvaluationConfig | None = None,
        template_options: dict[str, Any] | None = None,
    ) -> list[str]:
        """Hand over an episode of each example with its index; return failures of an endpoint."""
        model = opened_model(model)
        if isinstance(model, Endpoint):
            return served_episodes(
                examples, self.sessions, model, temperature=temperature, seed=seed, on_end=on_end
            )
        from text2sql_grpo.evaluation.sampler import Sampler, local_episodes, open_sampler, undisturbed

        with undisturbed(model.model):
            if not isinstance(model, Sampler):
                rollout, evaluation = rollout or RolloutConfig(), evaluation or EvaluationConfig()
                model = open_sampler(
                    model,
                    self.sessions,
                    temperature=temperature,
                    engine=rollout.engine,
                    batch_size=evaluation.batch_size,
                    bf16=evaluation.bf16,
                    template_options=template_options,
                )
            local_episodes(examples, self.sessions, model, seed=seed if temperature else None, on_end=on_end)
        return []

    def close(self) -> None:
        """End the servers of the tools, and the worker processes."""
        self._is_open = False
        try:
            self.sessions.close()
        finally:
            self.executor.close()

    def check_open(self) -> None:
        """Refuse to go on after `close`.

        Raises:
            ConfigError: The environment is closed.
        """
        if not self._is_open:
            raise ConfigError("the environment is closed: open another, or use it within its `with`")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def opened_model(model: Any) -> "Model":
    """Load a model that is given by its folder or Hub id; find the tokenizer of one that is loaded.

    Args:
        model: A folder, an adapter, a run folder or a Hub id; a trainer; a model of transformers or PEFT; an
            `Endpoint`; or what this function made.

    Raises:
        ModelError: It is none of these, or cannot be read.
    """
    if isinstance(model, Endpoint):
        return model
    from transformers import AutoTokenizer, Trainer

    from text2sql_grpo.evaluation.sampler import Sampler
    from text2sql_grpo.models.loaded_policy import LoadedPolicy, load_policy

    if isinstance(model, str | Path):
        return load_policy(str(model))
    if isinstance(model, LoadedPolicy | Sampler):
        return model
    if isinstance(model, Trainer):
        options = getattr(model.args, "chat_template_kwargs", None)
        return LoadedPolicy(model.accelerator.unwrap_model(model.model), model.processing_class, "", options)
    name = getattr(model, "name_or_path", None)
    if name is None:
        raise ModelError(f"a model must be a folder, a Hub id or a loaded one, got {type(model).__name__}")
    try:
        return LoadedPolicy(model, AutoTokenizer.from_pretrained(name), name)
    except (OSError, ValueError) as error:
        raise ModelError(f"the loaded model has no tokenizer: {error} ({name})") from error


@dataclass(frozen=True)
class Bench:
    """A config with its open environment and held-out questions: all of a run that needs no model.

    Attributes:
        test: Held-out questions by the name of their set.
        dev: Held-out questions for evaluations during training; none without a schedule.
    """

    config: Config
    environment: Environment
    test: dict[str, list[Example]]
    dev: Sequence[Example] = ()

    @classmethod
    def open(cls, config: Config) -> Self:
        """Open the databases and read the held-out questions.

        Raises:
            DataError: A folder, file, question or gold query is wrong.
            ConfigError: `environment.mcp` names no usable server.
        """
        environment = Environment.of(config)
        left_out = quarantined(config)

        def held_out(path: Any, names: Sequence[str] = ()) -> Sequence[Example]:
            return environment.examples(
                path,
                leave_out=left_out,
                leaves_out_large=True,
                keep=lambda example: not names or example.database in names,
            )

        dev: Sequence[Example] = []
        if config.evaluation.every is not None:
            names = config.data.dev_databases
            dev = held_out(config.data.dev or config.data.train, names)
            if not dev:
                raise DataError(
                    f"no question of {config.data.train} is on data.dev_databases ({', '.join(names)})"
                )
        return cls(
            config=config,
            environment=environment,
            test={name: list(held_out(path)) for name, path in config.data.test.items()},
            dev=evenly_spaced(dev, config.evaluation.schedule_samples),
        )

    def load(self, path: Path | str, *, limit: int | None = None) -> Sequence[Example]:
        """Load training questions with checked golds, but for those in quarantine or on `dev_databases`.

        Questions of a file are held in memory; those of a folder or a pattern of files stay on disk.

        Raises:
            DataError: A file, question or gold is wrong, or none is left.
        """
        files, left_out = shard_files(path), quarantined(self.config)
        held_out = self.config.data.dev_databases
        environment = self.environment
        if files == [path]:
            examples = environment.examples(
                path,
                limit=limit,
                leave_out=left_out,
                leaves_out_large=True,
                keep=lambda example: example.database not in held_out,
            )
            if not examples:
                raise DataError(f"every question of {path} is on one of data.dev_databases")
            return examples
        if held_out:
            raise DataError(f"data.dev_databases needs questions in one file, got several: {path}")
        return load_shards(
            files,
            environment.databases,
            environment.executor,
            limit=limit,
            leave_out=left_out,
            refusal=environment.refusal,
        )

    def shared(self, questions: Sequence[Example], path: Path | str) -> str:
        """Warning about held-out questions that are among these training questions of `path`.

        Empty if none is, and of questions on disk, as all would be read.
        """
        if isinstance(questions, ExamplesOnDisk):
            return ""
        data = self.config.data
        held_out = [(f"data.test.{name}", data.test[name], each) for name, each in self.test.items()]
        sets = [*held_out, ("data.dev", data.dev or data.train, self.dev)]
        seen = {(one.database, folded(one.question)) for one in questions}
        found = []
        for name, file, examples in sets:
            count = sum((one.database, folded(one.question)) in seen for one in examples)
            if count:
                found.append(f"{count} of {len(examples)} of {name} ({file})")
        if not found:
            return ""
        return (
            f"held-out questions are also training questions ({path}): {', '.join(found)}: leave them out of "
            "one of the files, as accuracy on them does not show what was learned"
        )

    def held_out(self, sets: Sequence[str] | None = None) -> dict[str, list[Example]]:
        """Held-out sets of these names; all of the config for None.

        Raises:
            ConfigError: See `DataConfig.held_out`.
        """
        return {name: self.test[name] for name in self.config.data.held_out(sets)}

    def answer(self, questions: Sequence[Example], model: "Model", **options: Any) -> list[Answer]:
        """Answer questions with the config's engine, batch size and precision; see `Environment.answer`."""
        config = self.config
        return self.environment.answer(
            questions,
            model,
            rollout=config.rollout,
            evaluation=config.evaluation,
            template_options=config.grpo.get("chat_template_kwargs"),
            **options,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.environment.close()


def quarantined(config: Config) -> frozenset[str]:
    """Ids of the questions that a run leaves out."""
    return frozenset() if config.data.quarantine is None else read_quarantine(config.data.quarantine)


def evenly_spaced(examples: Sequence[T], count: int | None) -> list[T]:
    """`count` examples spread over the whole list, in order; all for None or if there are fewer."""
    if count is None or count >= len(examples):
        return list(examples)
    return [examples[i * len(examples) // count] for i in range(count)]
