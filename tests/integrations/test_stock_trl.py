"""TRL's own trainer on this environment: its tool loop runs over real sessions; a script is the policy."""

import importlib.util
import runpy
import sqlite3
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import trl
from transformers import AutoTokenizer
from transformers.utils import get_json_schema
from trl import GRPOConfig, GRPOTrainer

from tests.scripted_policy import SHOP, ask
from tests.tiny_model import write_model
from tests.tiny_run import write_config
from text2sql_grpo.environment.episode import Episode
from text2sql_grpo.environment.protocols import TOOLS
from text2sql_grpo.environment.session import EnvironmentSettings
from text2sql_grpo.environment.tool_calls import call_text
from text2sql_grpo.errors import ConfigError, RunError
from text2sql_grpo.evaluation.bench import Environment
from text2sql_grpo.integrations.stock_trl import SQLTools, StockTRL, log_scores, stock_trl
from text2sql_grpo.rewards import RewardMix
from text2sql_grpo.sql import SQLExecutor

RIGHT = "SELECT staff FROM branch WHERE code = 'LIS-02'"
LISBON, BROKEN = ask("Lisbon?"), ask("Broken?", "SELECT absent FROM branch")
NATIVE = EnvironmentSettings(protocol="native", schema_text="compact", max_turns=2)
WEIGHTS = {"execution": 1.0, "turn_cost": 0.1}


def spec(folder: Path, settings: EnvironmentSettings = NATIVE, **weights: float) -> StockTRL:
    """The spec of two questions, the second with a broken gold."""
    (folder / "shop.sql").write_text(SHOP, "utf-8")
    environment = Environment(folder / "shop.sql", test_databases=0, **vars(settings))
    return stock_trl(
        environment.examples([LISBON, BROKEN], check_gold=False), environment, RewardMix(WEIGHTS | weights)
    )


@pytest.fixture
def tools(tmp_path: Path) -> SQLTools:
    """An episode about the first question."""
    begun = spec(tmp_path).environment_factory()
    begun.reset(**{"prompt": [], "example": 0})
    return begun


def logged(tools: SQLTools) -> tuple[list[float | None], dict[str, float]]:
    metrics: dict[str, float] = {}
    return log_scores([tools], metrics.__setitem__, completions=[]), metrics


def test_it_takes_rows_and_reward_functions_as_this_packages_trainer_does(tmp_path: Path) -> None:
    def brief(episode: Episode) -> float:
        return float(len(episode.final_sql or "") < 90)

    (tmp_path / "shop.sql").write_text(SHOP, "utf-8")
    environment = Environment(tmp_path / "shop.sql", test_databases=0, **vars(NATIVE))
    tools = stock_trl(
        [{"question": "Staff?", "sql": RIGHT}], environment, [(brief, 0.5)]
    ).environment_factory()
    tools.reset(example=0)
    tools.submit_sql(RIGHT)
    assert tools.get_reward() == 1.5
    with pytest.raises(ConfigError, match="environment must be"):
        stock_trl([], "shop.sql")  # type: ignore[arg-type]


def test_an_instance_runs_one_session_after_another(tools: SQLTools) -> None:
    assert tools.run_sql("SELECT city FROM branch") == (
        "city\nLisbon\nPorto\nNULL\n(1 turn left: call submit_sql with SELECT city FROM branch)"
    )
    assert tools.submit_sql(RIGHT) == "Submitted"
    assert "conversation is over" in tools.run_sql("SELECT 1")
    assert tools.get_reward() == pytest.approx(0.9)
    assert logged(tools) == ([0.0], {"score/execution": 1.0, "score/turn_cost": -1.0})

    tools.reset(example=0)
    tools.run_sql("SELECT 1")
    assert "conversation is over" in tools.run_sql("SELECT 2")  # the turn limit
    assert "conversation is over" in tools.submit_sql(RIGHT)
    assert tools.get_reward() == pytest.approx(-0.1)

    tools.reset(example=0)
    assert "got the arguments" in tools.run_sql(["SELECT 1"])  # type: ignore[arg-type]

    tools.reset(example=1)  # its gold fails
    tools.submit_sql(RIGHT)
    assert tools.get_reward() is None and logged(tools) == ([None], {})


@pytest.mark.parametrize("reward", [SQLTools.get_reward, logged])
def test_an_internal_error_stops_the_run(
    tools: SQLTools, reward: Callable[[SQLTools], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: Any, **__: Any) -> None:
        raise sqlite3.OperationalError("disk gone")

    monkeypatch.setattr(SQLExecutor, "execute", gone)
    with pytest.raises(sqlite3.OperationalError):
        tools.run_sql("SELECT 1")
    with pytest.raises(RunError, match="internal error in a SQL tool") as caught:
        reward(tools)
    assert "disk gone" in str(caught.value.__cause__)


def test_tools_are_described_as_in_our_own_training() -> None:
    for described, tool in zip(TOOLS, (SQLTools.run_sql, SQLTools.submit_sql), strict=True):
        schema = get_json_schema(tool)
        schema["function"].pop("return", None)
        assert schema == described


def test_what_trl_cannot_do_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(ConfigError, match="native"):
        spec(tmp_path / "a", EnvironmentSettings())
    (tmp_path / "b").mkdir()
    with pytest.raises(ConfigError, match="length_cost"):
        spec(tmp_path / "b", length_cost=0.1)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny random model with Qwen2.5's own chat template."""
    folder = write_model(tmp_path / "model", max_positions=8192)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    template = Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja"
    tokenizer.chat_template = template.read_text("utf-8")
    tokenizer.save_pretrained(folder)
    return folder


class Scripted(GRPOTrainer):
    """TRL's trainer, in which scripts write the turns; its tool loop, rewards and update are its own."""

    scripts: Sequence[Sequence[str]] = ()
    turn = -1

    def _generate_single_turn(self, prompt_ids: list[list[int]], *_: Any, **__: Any) -> Any:
        self.turn += 1
        turns = [script[self.turn] for script in self.scripts if self.turn < len(script)]
        assert len(turns) == len(prompt_ids)
        eos = self.processing_class.eos_token_id
        return [[*self.processing_class(text)["input_ids"], eos] for text in turns], None


@pytest.mark.thorough
def test_trls_own_loop_runs_the_tools_and_pays(tmp_path: Path, model: Path) -> None:
    args = GRPOConfig(
        output_dir=str(tmp_path / "run"),
        max_steps=1,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=2048,
        max_tool_calling_iterations=2,
        report_to="none",
        logging_steps=1,
        save_strategy="no",
        shuffle_dataset=False,
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
    )
    with pytest.warns(UserWarning, match="environment_factory"):
        trainer = Scripted(str(model), args=args, **vars(spec(tmp_path)))
    look, right = (call_text(name, {"sql": RIGHT}) for name in ("run_sql", "submit_sql"))
    wrong = call_text("submit_sql", {"sql": "SELECT 8"})
    trainer.scripts = [[look, right, "Done"], [right, "Done"], [wrong, "Done"], ["I do not know"]]
    trainer.train()
    (step, _) = trainer.state.log_history
    assert step["rewards/SQLTools/mean"] == pytest.approx((0.9 + 1.0 + 0.0 + 0.0) / 4)
    assert step["reward"] == step["rewards/SQLTools/mean"]
    assert step["score/execution"] == 0.5
    assert step["tools/call_frequency"] == 1.0 and step["tools/failure_frequency"] == 0.0
    assert step["grad_norm"] > 0


def test_the_example_names_a_mistake(
    tmp_path: Path, repo_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    write_model(tmp_path / "model")
    config = write_config(tmp_path, environment={"protocol": "native"}, grading={"test_databases": 0})
    example = repo_root / "examples" / "stock_trl.py"
    for model, cause in (("model", "tool calling"), ("nope", "Repo id")):
        words = ["--model", str(tmp_path / model), "--config", str(config), "--output-dir", str(tmp_path)]
        monkeypatch.setattr(sys, "argv", [str(example), *words])
        with pytest.raises(SystemExit, match=f"^error: .*{model}: .*{cause}"):
            runpy.run_path(str(example), run_name="__main__")


@pytest.mark.thorough
def test_the_example_runs(
    tmp_path: Path, model: Path, repo_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    (tmp_path / "data").mkdir()
    native = {"protocol": "native", "max_turns": 2, "max_turn_tokens": 8, "max_episode_tokens": 8}
    config = write_config(tmp_path / "data", environment=native, grading={"test_databases": 0})
    found = importlib.util.spec_from_file_location("example", repo_root / "examples" / "stock_trl.py")
    assert found is not None and found.loader is not None
    example = importlib.util.module_from_spec(found)
    found.loader.exec_module(example)
    run = tmp_path / "run"
    options = ["--config", str(config), "--output-dir", str(run), "--max-steps", "1"]
    trainer = example.main(["--model", str(model), *options])
    assert trainer.state.global_step == 1
    assert {"rewards/SQLTools/mean", "score/execution"} <= trainer.state.log_history[0].keys()
    assert (run / "checkpoint-1" / "model.safetensors").is_file()
