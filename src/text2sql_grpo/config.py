"""One dataclass tree for a whole run, read from YAML; unknown keys and wrong types are refused.

Any field can be set on the command line by its dotted name: `--environment.max_turns 3`.
"""

import dataclasses
import difflib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError

from text2sql_grpo.environment.observation import ObservationLimits
from text2sql_grpo.environment.session import EnvironmentSettings
from text2sql_grpo.errors import ConfigError
from text2sql_grpo.rewards import RewardMix
from text2sql_grpo.sql import Limits


@dataclass(frozen=True)
class RunConfig:
    """Where a run lives.

    Attributes:
        output_dir: The run folder; made if absent.
        seed: Of everything random in the run.
    """

    output_dir: Path = Path("runs/run")
    seed: int = 0


@dataclass(frozen=True)
class TinyPolicyConfig:
    """A policy made on the spot: a tokenizer and a small Llama.

    Attributes:
        vocab_size: Of the byte-level BPE tokenizer, special tokens included.
        hidden_size: Width; a multiple of twice `num_heads` (rotary positions turn pairs).
        max_positions: Longest context in tokens.
    """

    vocab_size: int = 1024
    hidden_size: int = 192
    num_layers: int = 4
    num_heads: int = 4
    intermediate_size: int = 512
    max_positions: int = 1024

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            _at_least(f.name, getattr(self, f.name), 1)
        if self.hidden_size % (2 * self.num_heads):
            multiple = f"2 * num_heads ({2 * self.num_heads})"
            raise ValueError(f"hidden_size must be a multiple of {multiple}, got {self.hidden_size}")


@dataclass(frozen=True)
class LoraSettings:
    """LoRA adapter; the fields are PEFT's. What is None is chosen by the model's family.

    Attributes:
        r: Rank.
        lora_alpha: None for twice the rank.
        target_modules: Names of the linear layers, or `all-linear`.
    """

    r: int | None = None
    lora_alpha: int | None = None
    target_modules: str | list[str] | None = None

    def __post_init__(self) -> None:
        _at_least("r", self.r, 1)
        _at_least("lora_alpha", self.lora_alpha, 1)


@dataclass(frozen=True)
class ModelConfig:
    """Which policy is trained, one of `path` and `tiny`, and how: all of it, LoRA, or LoRA on 4-bit weights.

    Attributes:
        path: A folder or a Hub id; None with `tiny`.
        tiny: A small policy made and warm-started on the spot; None with `path`.
        dtype: Of the weights. `auto`: float32 where all of them are trained or there is no accelerator, else
            bfloat16, or float16 on a GPU without it.
        quantization: `4bit` loads the frozen weights in 4 bits (NF4, double quantisation, bitsandbytes) and
            needs `lora`. `auto` does so where the platform can, and trains LoRA on plain weights where not.
        lora: Train an adapter instead of all weights; `{}` for the defaults of the model's family.
        attn_implementation: As transformers names it. `auto` takes FlashAttention where it is installed and
            this project's own attention, which reads a group's prompt once, cannot serve the model.
    """

    path: str | None = None
    tiny: TinyPolicyConfig | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    quantization: Literal["none", "4bit", "auto"] = "none"
    lora: LoraSettings | None = None
    attn_implementation: Literal["auto", "eager", "sdpa", "flash_attention_2"] = "auto"

    def __post_init__(self) -> None:
        if (self.path is None) == (self.tiny is None):
            raise ValueError(f"expected exactly one of path and tiny, got path={self.path} tiny={self.tiny}")
        if self.quantization != "none" and self.lora is None:
            raise ValueError(
                f"quantization {self.quantization} trains an adapter only: expected lora, got none"
            )
        if self.quantization != "none" and self.tiny is not None:
            raise ValueError(f"quantization {self.quantization} is for a model read from path, got tiny")


@dataclass(frozen=True)
class DataConfig:
    """Questions and databases.

    Attributes:
        databases: Folder of `.sql` or `.sqlite` files (Spider's layout too).
        train: Questions for reinforcement learning; every file of questions may be JSONL or CSV, or the
            JSON of Spider or BIRD. A folder of JSONL files or a pattern (`shards/*.jsonl`) is read from
            disk as it is used, so that it may hold any number of questions.
        demonstrations: Questions for the warm start; None without one.
        test: Held-out sets by name; each is reported by itself.
        quarantine: Ids of questions to leave out of training and warm start (JSONL, as `audit data` writes).
        train_samples: The first N training questions only; None for all.
        test_samples: N questions of each held-out set, evenly spaced; None for all.
    """

    databases: Path
    train: Path
    demonstrations: Path | None = None
    test: dict[str, Path] = field(default_factory=dict)
    quarantine: Path | None = None
    train_samples: int | None = None
    test_samples: int | None = None

    def __post_init__(self) -> None:
        for name in ("train_samples", "test_samples"):
            _at_least(name, getattr(self, name), 1)


@dataclass(frozen=True)
class WarmStartConfig:
    """Supervised training of a tiny policy on demonstrations, before reinforcement learning.

    Demonstrations are about the training databases and about renamed copies of them. First the policy
    practises: most look-up questions are looked up, so that reading schemas and observations is learned.
    Then it reads a log of both habits, looking first and answering at once, as people would leave it.

    Attributes:
        steps: Optimiser steps.
        practice_steps: The first of them, before the log.
        practice_look_share: Share of look-up questions that are looked up in practice.
        look_share: The same in the log.
        renamed_copies: Copies of each training database; 0 for none.
        copy_questions: Questions made for the copies.
        copy_share: Share of rows that ask about copies.
        rows_per_step: Rows of one step; each row is one database's prompt prefix.
        demonstrations_per_row: Demonstrations that share that prefix.
        learning_rate: Peak, of embeddings and norms (AdamW); cosine to a tenth after a short warm-up.
        matrix_learning_rate: The same, of weight matrices (Muon).
        min_forced_look_accuracy: Gate, in [0, 1]: with the look forced, the policy must answer this
            share of the look-up questions of some held-out set, or the run stops with the figure.
    """

    steps: int = 500
    practice_steps: int = 400
    practice_look_share: float = 0.6
    look_share: float = 0.3
    renamed_copies: int = 64
    copy_questions: int = 12_000
    copy_share: float = 0.5
    rows_per_step: int = 5
    demonstrations_per_row: int = 6
    learning_rate: float = 1e-3
    matrix_learning_rate: float = 5e-3
    min_forced_look_accuracy: float = 0.0

    def __post_init__(self) -> None:
        for name in ("steps", "copy_questions", "rows_per_step", "demonstrations_per_row"):
            _at_least(name, getattr(self, name), 1)
        _at_least("renamed_copies", self.renamed_copies, 0)
        if not 0 <= self.practice_steps <= self.steps:
            raise ValueError(f"practice_steps must be in 0..steps ({self.steps}), got {self.practice_steps}")
        for name in ("practice_look_share", "look_share", "copy_share", "min_forced_look_accuracy"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {getattr(self, name)}")


@dataclass(frozen=True)
class GradingConfig:
    """How answers are judged, in training and evaluation.

    Attributes:
        neighbours: Small variants of its database on which a right answer must agree with the gold too, at
            most so many for each gold; 0 judges on the database alone. They are made when a first answer
            is right, some tenths of a second for a gold, and kept in the cache folder.
    """

    neighbours: int = 4

    def __post_init__(self) -> None:
        _at_least("neighbours", self.neighbours, 0)


@dataclass(frozen=True)
class MCPConfig:
    """An MCP server whose tools are what the model may call; one of `command` and `url`.

    In both, `{database}` stands for the path of the question's database and `{name}` for its name.

    Attributes:
        command: Starts a server that speaks over its standard input and output.
        url: Of a server that speaks streamable HTTP.
        token_variable: Name of an environment variable: the bearer token for `url`; a `command` is given it
            in its own environment, which else holds little more than PATH and HOME.
        timeout_s: Until a call that is not answered is given up, > 0.
        connections: Open at the same time in one process, at most; each takes many calls at once.
    """

    command: str | None = None
    url: str | None = None
    token_variable: str | None = None
    timeout_s: float = 30.0
    connections: int = 4

    def __post_init__(self) -> None:
        if (self.command is None) == (self.url is None):
            raise ValueError(
                f"expected exactly one of command and url, got command={self.command} url={self.url}"
            )
        if not 0 < self.timeout_s < math.inf:
            raise ValueError(f"timeout_s must be a number > 0, got {self.timeout_s}")
        _at_least("connections", self.connections, 1)


@dataclass(frozen=True)
class EnvironmentConfig(EnvironmentSettings):
    """What the model sees and how long it may go on, and who answers it.

    Attributes:
        mcp: None to run queries in this process.
    """

    mcp: MCPConfig | None = None

    def settings(self) -> EnvironmentSettings:
        """What the model sees, which does not depend on who answers it."""
        names = [f.name for f in dataclasses.fields(EnvironmentSettings)]
        return EnvironmentSettings(**{name: getattr(self, name) for name in names})


@dataclass(frozen=True)
class RolloutConfig:
    """How episodes are played, in training and evaluation.

    Attributes:
        engine: `slots` computes nothing twice, for transformers models with full attention; `generation`
            plays turn by turn by TRL's own generation (vLLM too); `auto` takes `slots` where it can.
        max_slots: Training episodes side by side in the engine `slots`; None for as many as memory allows.
    """

    engine: Literal["auto", "slots", "generation"] = "auto"
    max_slots: int | None = None

    def __post_init__(self) -> None:
        _at_least("max_slots", self.max_slots, 1)


@dataclass(frozen=True)
class EvaluationConfig:
    """How held-out sets are answered.

    Attributes:
        temperature: 0 is greedy.
        batch_size: Sessions answered side by side.
        before_training: Also evaluate the policy before reinforcement learning.
        merge_samples: Held-out questions, in all, that a trained adapter answers before and after it is
            merged; answers that differ are counted. 0 for none.
    """

    temperature: float = 0.0
    batch_size: int = 64
    before_training: bool = True
    merge_samples: int = 16

    def __post_init__(self) -> None:
        _at_least("batch_size", self.batch_size, 1)
        _at_least("merge_samples", self.merge_samples, 0)
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be a number >= 0, got {self.temperature}")


@dataclass(frozen=True)
class AlertsConfig:
    """When somebody is told that training goes wrong; the means are over the last `window` logged steps.

    Alerts go to the terminal, to `webhook`, and to W&B where the run is tracked there. None is no limit.

    Attributes:
        webhook: Address that each alert is posted to as JSON (`text` is what Slack shows, `content` what
            Discord does). `$NAME` stands for an environment variable; the config is kept in the run folder,
            so a secret address belongs into one.
        window: Logged steps.
        min_reward: Below this mean reward.
        min_entropy: Below this mean entropy of the policy, in nats a token.
        max_kl: Above this mean KL to the reference; there is none without `grpo.beta`.
        max_dead_groups: Above this share of episodes whose group has one reward alone, in [0, 1].
        max_hack_rate: Above this share of answers that `hack/rate` counts, in [0, 1].
        stalled_s: No step was finished for so many seconds.
    """

    webhook: str | None = None
    window: int = 10
    min_reward: float | None = None
    min_entropy: float | None = 0.01
    max_kl: float | None = 10.0
    max_dead_groups: float | None = 0.95
    max_hack_rate: float | None = 0.2
    stalled_s: float | None = 1800.0

    def __post_init__(self) -> None:
        _at_least("window", self.window, 1)
        for name in ("max_dead_groups", "max_hack_rate"):
            limit = getattr(self, name)
            if limit is not None and not 0 <= limit <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {limit}")
        if self.stalled_s is not None and not self.stalled_s > 0:
            raise ValueError(f"stalled_s must be > 0, got {self.stalled_s}")


@dataclass(frozen=True)
class Config:
    """A whole run.

    Attributes:
        rewards: Weight of each named reward, and `preset`, `clip` and `on_error` (see `RewardMix`); checked
            so that no wrong answer can out-score a right one.
        grpo: Fields of `SQLGRPOConfig` (TRL's `GRPOConfig`), checked when training is set up.
        alerts: None for none.
    """

    model: ModelConfig
    data: DataConfig
    run: RunConfig = field(default_factory=RunConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    rewards: dict[str, Any] = field(default_factory=lambda: {"preset": "strict_neighbours"})
    grading: GradingConfig = field(default_factory=GradingConfig)
    warm_start: WarmStartConfig | None = None
    grpo: dict[str, Any] = field(default_factory=dict)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    alerts: AlertsConfig | None = None

    def __post_init__(self) -> None:
        environment = self.environment
        for name in ("max_turns", "max_turn_tokens", "max_episode_tokens", "max_schema_tokens"):
            _at_least(f"environment.{name}", getattr(environment, name), 1)
        for name, section in (("observation", environment.observation), ("limits", environment.limits)):
            for f in dataclasses.fields(section):
                if not getattr(section, f.name) > 0:
                    raise ValueError(
                        f"environment.{name}.{f.name} must be > 0, got {getattr(section, f.name)}"
                    )
        if self.warm_start is not None and (self.data.demonstrations is None or self.model.tiny is None):
            raise ValueError("warm_start needs data.demonstrations and model.tiny")
        rewards = RewardMix(self.rewards)
        if rewards.preset == "strict_neighbours" and not self.grading.neighbours:
            raise ValueError("rewards.preset strict_neighbours needs grading.neighbours >= 1, got 0")


def _at_least(name: str, value: int | None, low: int) -> None:
    if value is not None and value < low:
        raise ValueError(f"{name} must be >= {low}, got {value}")


_SECTIONS = (
    RunConfig,
    TinyPolicyConfig,
    LoraSettings,
    ModelConfig,
    DataConfig,
    WarmStartConfig,
    GradingConfig,
    RolloutConfig,
    EvaluationConfig,
    AlertsConfig,
    MCPConfig,
    EnvironmentConfig,
    ObservationLimits,
    Limits,
    Config,
)
for _section in _SECTIONS:
    setattr(_section, "__pydantic_config__", ConfigDict(extra="forbid"))  # noqa: B010 (no field of theirs)
_ADAPTER = TypeAdapter(Config)


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads `1e-4` as text; this loader reads it as the number that was meant."""


class _Dumper(yaml.SafeDumper):
    """Quotes text that `_Loader` would read as a number."""


for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
        list("-+.0123456789"),
    )


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """The config of a YAML file, with dotted overrides applied.

    Args:
        overrides: As on a command line: `["--run.seed", "1", "--grpo.max_steps=2"]`.

    Raises:
        ConfigError: No such file, no YAML, an unknown key, a wrong type or value, or rewards by
            which a wrong answer could out-score a right one. The text names file and key.
    """
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"expected a readable config file, got {error} ({path})") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"expected YAML, got {error} ({path})") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"expected a mapping of sections, got {type(tree).__name__} ({path})")
    for key, value in _parse_overrides(overrides):
        _set(tree, key, value)
    return parse_config(tree, source=str(path))


def parse_config(tree: dict[str, Any], *, source: str) -> Config:
    """The config of a tree of plain values.

    Raises:
        ConfigError: See `load_config`.
    """
    try:
        # JSON mode is strict about numbers and text, but still reads text as a path.
        return _ADAPTER.validate_json(json.dumps(tree, default=str), strict=True)
    except ValidationError as error:
        problems = "; ".join(_problem(tree, dict(detail)) for detail in error.errors())
        raise ConfigError(f"{problems} ({source})") from error
    except ConfigError as error:
        raise ConfigError(f"{error} ({source})") from error


def dump_config(config: Config) -> str:
    """The resolved config as YAML that `load_config` reads back to an equal config."""
    return yaml.dump(json.loads(_ADAPTER.dump_json(config)), Dumper=_Dumper, sort_keys=False)


def _problem(tree: dict[str, Any], detail: dict[str, Any]) -> str:
    where = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "unexpected_keyword_argument":
        known = _known_keys(detail["loc"])
        close = difflib.get_close_matches(str(detail["loc"][-1]), known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"
        return f"unknown key {where}: {hint}"
    if detail["type"] == "missing":
        return f"missing key {where}"
    if detail["type"] == "value_error":  # Raised by a section, with what came.
        message = str(detail["ctx"]["error"])
        return f"{where}: {message}" if where else message
    message = str(detail["msg"]).replace("Input should be", "must be").replace("an object", "a mapping")
    return f"{where} {message}, got {detail['input']!r}"


def _known_keys(location: tuple[Any, ...]) -> list[str]:
    """Names of the fields beside the one at `location`; its parents are sections of the tree."""
    fields = {"config": Config, "model": ModelConfig, "tiny": TinyPolicyConfig, "lora": LoraSettings}
    fields |= {"run": RunConfig, "data": DataConfig, "warm_start": WarmStartConfig}
    fields |= {"evaluation": EvaluationConfig, "environment": EnvironmentConfig, "mcp": MCPConfig}
    fields |= {"rollout": RolloutConfig, "grading": GradingConfig, "alerts": AlertsConfig}
    fields |= {"observation": ObservationLimits, "limits": Limits}
    parent = str(location[-2]) if len(location) > 1 else "config"
    return [f.name for f in dataclasses.fields(fields[parent])]


def _parse_overrides(arguments: Sequence[str]) -> list[tuple[str, Any]]:
    parsed, rest = [], list(arguments)
    while rest:
        flag = rest.pop(0)
        key, equals, text = flag.removeprefix("--").partition("=")
        if not flag.startswith("--") or (not equals and not rest):
            raise ConfigError(f"expected --section.key VALUE, got {flag!r} (command line)")
        text = text if equals else rest.pop(0)
        try:
            parsed.append((key, yaml.load(text, _Loader)))
        except yaml.YAMLError as error:
            raise ConfigError(f"expected a YAML value for --{key}, got {text!r} (command line)") from error
    return parsed


def _set(tree: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, last = dotted.split(".")
    for part in parents:
        if tree.get(part) is None:
            tree[part] = {}
        tree = tree[part]
        if not isinstance(tree, dict):
            raise ConfigError(f"expected a section before .{last}, got {tree!r} at {dotted} (command line)")
    tree[last] = value
