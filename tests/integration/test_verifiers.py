"""verifiers' own commands over a served policy say of every question what our evaluation says."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.chat_endpoint import greedy, served
from tests.tiny_run import QUESTIONS, json_lines, write_config
from tests.verifiers_commands import run_command
from text2sql_grpo.config import Config, load_config
from text2sql_grpo.evaluation.bench import Workbench, open_workbench
from text2sql_grpo.evaluation.summary import answer_questions
from text2sql_grpo.models.loaded_policy import LoadedPolicy, load_policy
from text2sql_grpo.rewards import Answer
from text2sql_grpo.rollout.policy import model_policy

pytestmark = pytest.mark.skipif(
    find_spec("verifiers") is None, reason="needs verifiers (pip install text2sql-grpo[verifiers])"
)


def commands(config: Config, url: str) -> list[list[str]]:
    """`vf-validate`, `vf-eval` and `vf-replay` on the config's questions, each into its own folder."""
    environment = config.environment
    settings = {
        "questions": config.data.train,
        "task.databases": config.data.databases,
        "task.environment.schema_text": environment.schema_text,
        "task.environment.instructions": str(environment.instructions),
        "task.environment.max_turns": environment.max_turns,
        "task.environment.max_turn_tokens": environment.max_turn_tokens,
        "task.environment.max_episode_tokens": environment.max_episode_tokens,
        **{f"task.reward_mix.{name}": weight for name, weight in config.rewards.items()},
    }

    def flags(prefix: str) -> list[str]:
        return [text for name, value in settings.items() for text in (f"--{prefix}.{name}", str(value))]

    here = ["--no-rich", "--output-dir", "outputs", "--run.dir"]
    client = ["--model", "tiny", "--client.base-url", url, "--client.api-key-var", "NO_KEY"]
    return [
        [
            "vf-validate",
            "text2sql-grpo",
            *flags("taskset"),
            "--runtime.type",
            "subprocess",
            *here,
            "validate",
        ],
        ["vf-eval", "text2sql-grpo", *flags("env.taskset"), *client, "--no-push", *here, "eval"],
        ["vf-replay", "outputs/eval", "--no-rich", "--output-dir", "outputs/replay"],
    ]


def traces(folder: Path) -> dict[str, Any]:
    """The traces of a run by the id of their question."""
    episodes = json_lines(folder / "traces.jsonl")
    return {trace["task"]["data"]["id"]: trace for episode in episodes for trace in episode["traces"]}


def own_answers(bench: Workbench, policy: LoadedPolicy) -> dict[str, Answer]:
    model = policy.model.eval()
    chat = bench.chat(policy.tokenizer, model)
    examples = bench.test["test_values"]
    answers = answer_questions(
        examples, model_policy(model, chat), chat, bench.environment, bench.grader, bench.budgets(model)
    )
    return {answer.example.id: answer for answer in answers}


def test_all_commands_agree_with_our_evaluation_on_every_question(tmp_path: Path, started_model: str) -> None:
    config = load_config(write_config(tmp_path, model={"path": started_model, "dtype": "float32"}))
    bench = open_workbench(config)
    policy = load_policy(started_model, dtype="float32")
    expected = own_answers(bench, policy)
    right = {name for name, answer in expected.items() if answer.verdict.strict}
    assert 0 < len(right) < len(QUESTIONS), "a policy that is always right or wrong shows little"
    assert any(len(answer.episode.actions) > 1 for answer in expected.values())

    with served(greedy(policy.model, bench.chat(policy.tokenizer, policy.model))) as url:
        from text2sql_grpo.integrations.verifiers.task import open_bench

        for name, *arguments in commands(config, url):
            open_bench.cache_clear()  # what the package remembers
            run_command(tmp_path, name, *arguments)

    checked = json.loads((tmp_path / "outputs" / "validate" / "summary.json").read_text("utf-8"))
    assert checked["outcomes"]["valid"] == checked["total"] == len(QUESTIONS)
    played, replayed = traces(tmp_path / "outputs" / "eval"), traces(tmp_path / "outputs" / "replay")
    assert played.keys() == replayed.keys() == expected.keys()
    for name, trace in played.items():
        assert trace["ok"], trace["errors"]
        _compare(trace, expected[name])
        assert (replayed[name]["rewards"], replayed[name]["metrics"]) == (trace["rewards"], trace["metrics"])


def _compare(trace: dict[str, Any], answer: Answer) -> None:
    """A trace tells the same story as an episode of ours, and scores alike."""
    episode = answer.episode
    said = [node["message"]["content"] for node in trace["nodes"]]
    is_cut = episode.stop_reason == "budget"  # then its last turn is no message of ours
    assert (said[:-1] if is_cut else said) == [message["content"] for message in episode.messages]
    assert trace["stop_condition"] == ("max_total_tokens" if is_cut else episode.stop_reason)
    looks = sum(action.kind == "run_sql" for action in episode.actions)
    assert trace["metrics"] == {
        "strict": answer.verdict.strict,
        "official": answer.verdict.official,
        "looks": looks,
        **vars(answer.official),
    }
