"""`SQLTaskset`: a file of questions over a folder of databases; `SQLEnv`: its environment."""

from collections.abc import Iterator
from pathlib import Path

import verifiers.v1 as vf  # type: ignore[import-untyped, import-not-found, unused-ignore]

from text2sql_grpo.data.question_files import only_name, read_questions
from text2sql_grpo.integrations.verifiers.task import SQLTask, SQLTaskConfig, SQLTaskData


class SQLTasksetConfig(vf.TasksetConfig):
    """Questions of the taskset.

    Attributes:
        questions: JSONL or CSV, or the JSON of Spider or BIRD.
        task: Databases, environment, rewards and grading.
    """

    questions: Path = Path("data/questions/dev.jsonl")
    task: SQLTaskConfig = SQLTaskConfig()


class SQLTaskset(vf.Taskset[SQLTask, SQLTasksetConfig]):
    """Questions of a file. Golds are not run here: `vf-validate` runs them."""

    def load(self) -> Iterator[SQLTask]:
        """One task per question, in order.

        Raises:
            DataError: The file, a question or a database is wrong.
        """
        environment, _ = self.config.task.opened
        database = only_name(environment.databases)
        for example, _, has_gold_is_empty in read_questions(self.config.questions, database=database):
            *system, user = environment.sessions.session(example).start()
            yield SQLTask(
                SQLTaskData(
                    id=example.id,
                    name=f"{example.database}/{example.id}",
                    system_prompt=system[0]["content"] if system else None,
                    prompt=user["content"],
                    example=example,
                    gold_may_be_empty=example.gold_is_empty or not has_gold_is_empty,
                ),
                self.config.task,
            )


class SQLEnvConfig(vf.SingleAgentEnvConfig):
    """Config of `SingleAgentEnv` without a sandbox: the model's SQL runs only in the executor's workers."""

    agent: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())


class SQLEnv(vf.SingleAgentEnv, vf.Env[SQLEnvConfig]):
    """`SingleAgentEnv` whose runtime is not a cloud sandbox by default."""
