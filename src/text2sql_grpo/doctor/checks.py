"""Checks of `doctor` that need no model: machine, files, keys, databases, executor."""

import importlib.util
import os
import platform
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import get_token
from packaging.requirements import Requirement
from rich.text import Text

from text2sql_grpo.config import Config
from text2sql_grpo.data.databases import Databases, cache_folder
from text2sql_grpo.doctor.memory import Sharding
from text2sql_grpo.errors import ConfigError, RunError, install_command
from text2sql_grpo.files import parse_yaml
from text2sql_grpo.models.hardware import GIB, hardware
from text2sql_grpo.models.loaded_policy import four_bit_obstacle
from text2sql_grpo.phrases import many
from text2sql_grpo.reporting import trackers as tracking
from text2sql_grpo.run.stage import wrong_stages
from text2sql_grpo.sql import Limits, SQLExecutor
from text2sql_grpo.training.arguments import SQLGRPOConfig, wrong_combinations, wrong_launch

Status = Literal["ok", "note", "skipped", "problem"]
_PACKAGES = (
    *("torch", "transformers", "trl", "peft", "accelerate", "datasets"),
    *("bitsandbytes", "vllm", "deepspeed"),
)
_ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT COUNT(*) FROM n"
_WRITE = "CREATE TABLE doctor_was_here (a INTEGER)"


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Attributes:
        status: `problem` if a run would fail.
        text: Result in words, with a remedy if there is a problem.
        facts: Figures of the result, for `--json`.
        shown: Text to print below, without `--json`.
    """

    name: str
    status: Status
    text: str
    facts: dict[str, Any] = field(default_factory=dict)
    shown: Text | None = None


def read_launch(file: Path | None) -> Sharding:
    """Processes and sharding of a launch by an accelerate config; of one process for None.

    Raises:
        ConfigError: The file does not exist, or is not accelerate's.
    """
    if file is None:
        return Sharding()
    try:
        tree = parse_yaml(file.read_text(encoding="utf-8"))
        processes, kind = int(tree["num_processes"]), tree["distributed_type"]
        deepspeed, fsdp = tree.get("deepspeed_config") or {}, tree.get("fsdp_config") or {}
        stage = int(deepspeed.get("zero_stage", 3 if kind == "FSDP" else 0))
        variables = {
            "ACCELERATE_USE_FSDP": kind == "FSDP",
            "ACCELERATE_USE_DEEPSPEED": kind == "DEEPSPEED",
            "ACCELERATE_DEEPSPEED_ZERO_STAGE": stage,
            "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": deepspeed.get("zero3_save_16bit_model"),
            **{name.upper(): value for name, value in fsdp.items()},
        }
        return Sharding(
            processes,
            stage,
            offloads_states=deepspeed.get("offload_optimizer_device", "none") != "none",
            offloads_weights=deepspeed.get("offload_param_device", "none") != "none",
            variables={name: str(value) for name, value in variables.items()},
        )
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"not a config of accelerate: {error!r} ({file})") from error


def versions() -> Finding:
    """Compare installed versions with those that this package requires."""
    found = {name: metadata.version(name) for name in _PACKAGES if importlib.util.find_spec(name)}
    wrong = []
    with suppress(metadata.PackageNotFoundError):  # run from a checkout
        for requirement in map(Requirement, metadata.requires("text2sql-grpo") or []):
            version = found.get(requirement.name)
            if version and not requirement.specifier.contains(version, prereleases=True):
                wrong.append(f"{requirement.name} {version} (expected {requirement.specifier})")
    text = f"Python {platform.python_version()}, " + ", ".join(f"{n} {v}" for n, v in found.items())
    if wrong:
        text = f"wrong versions: {', '.join(wrong)}: pip install -r requirements_pinned.txt"
    facts = {"python": platform.python_version(), **found}
    return Finding("versions", "problem" if wrong else "ok", text, facts)


def device() -> Iterator[Finding]:
    """Describe the accelerator of the run and its memory."""
    facts = hardware()
    text = f"{facts['type']}, {facts['memory_bytes'] / GIB:.0f} GiB, {facts['cpu_cores']} CPU cores"
    if "name" in facts:
        text = f"{facts['devices']} x {facts['name']}, {text}"
    obstacle = four_bit_obstacle(facts["type"])
    facts["four_bit"] = obstacle is None
    text += "; 4-bit weights: " + ("yes" if obstacle is None else f"no, {obstacle}")
    yield Finding("device", "ok", text, facts)


def settings(config: Config, arguments: SQLGRPOConfig, sharding: Sharding) -> Finding:
    """Find settings that contradict each other or the launch."""
    is_qlora = config.model.quantization == "4bit"
    reasons = wrong_launch(sharding.variables, is_on_cpu=bool(arguments.use_cpu))
    reasons += wrong_combinations(arguments, sharding.processes, is_sharded=sharding.stage == 3)
    reasons += wrong_stages(config, sharding.processes, is_sharded=sharding.stage > 0)
    if arguments.use_vllm and importlib.util.find_spec("vllm") is None:
        reasons.append(f"grpo.use_vllm needs the package vllm: {install_command('vllm')}")
    if is_qlora and sharding.stage == 3:
        reasons.append("4-bit weights cannot be sharded: use DDP or ZeRO-2")
    mode = "QLoRA" if is_qlora else "full" if config.model.lora is None else "LoRA"
    text = f"{mode}, {config.model.dtype} weights, {many(sharding.processes, 'process')}"
    return Finding("settings", "problem" if reasons else "ok", "; ".join(reasons) or text, {"mode": mode})


def disk(config: Config, needed_bytes: int | None) -> Finding:
    """Check the disk space of the run folder and of the cache; None needed where the model is not known."""
    folders = {"run folder": config.run.output_dir, "cache": cache_folder("")}
    free = {}
    for name, folder in folders.items():
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        free[name] = shutil.disk_usage(existing).free
    text = ", ".join(f"{size / GIB:.0f} GiB free for the {name}" for name, size in free.items())
    status: Status = "ok"
    if needed_bytes is not None:
        text += f"; checkpoints and the merged model take about {needed_bytes / GIB:.1f} GiB"
        if needed_bytes > free["run folder"]:
            status = "problem"
            text += ": set run.output_dir to a larger disk or lower grpo.save_total_limit"
    return Finding("disk", status, text, {"free_bytes": free, "needed_bytes": needed_bytes})


def tokens(arguments: SQLGRPOConfig) -> Finding:
    """Check for keys of the Hub and of W&B; a run needs neither."""
    has_hub, has_wandb = get_token() is not None, bool(os.environ.get("WANDB_API_KEY"))
    parts = ["HF token found" if has_hub else "no HF token: pushing and gated models need HF_TOKEN in .env"]
    if "wandb" in arguments.report_to:
        parts.append(
            "W&B key found" if has_wandb else "no WANDB_API_KEY: W&B stays offline, in the run folder"
        )
    status: Status = "ok" if has_hub and (has_wandb or "wandb" not in arguments.report_to) else "note"
    return Finding("tokens", status, "; ".join(parts), {"hub": has_hub, "wandb": has_wandb})


def trackers(config: Config) -> Finding:
    """Check that the configured trackers are installed; note what stays on this machine."""
    names = tracking.trackers(config.grpo.get("report_to"))
    facts = {"trackers": names}
    try:
        tracking.check_installed(names)
    except ConfigError as error:
        return Finding("trackers", "problem", str(error), facts)
    if "weave" in names and not os.environ.get("WANDB_API_KEY"):
        text = f"{', '.join(names)}; no WANDB_API_KEY: nothing is sent to Weave, which has no offline mode"
        return Finding("trackers", "note", text, facts)
    return Finding("trackers", "ok", ", ".join(names) or "none", facts)


def mcp_server(config: Config) -> Iterator[Finding]:
    """Check that the MCP server starts, or answers, and has tools that the protocol can call."""
    server = config.environment.mcp
    if server is None:
        return
    from text2sql_grpo.integrations.mcp.environment import MCPEnvironment

    started = time.monotonic()
    with SQLExecutor(config.environment.limits, workers=1) as executor:
        opened = Databases(config.data.databases)
        environment = MCPEnvironment(opened, executor, config.environment, server=server)
    seconds = time.monotonic() - started
    environment.close()
    names = [tool["function"]["name"] for tool in environment.tools]
    facts = {"tools": names, "seconds": round(seconds, 2)}
    text = f"{server.command or server.url}: ready in {seconds:.1f} s, with {', '.join(names)}"
    yield Finding("mcp", "ok", text, facts)


def sandbox(executor: SQLExecutor) -> Finding:
    """Parts of the kernel's sandbox of SQL workers."""
    parts = executor.describe()["sandbox"]
    missing = [part for part, is_active in parts.items() if not is_active]
    if not missing:
        return Finding("sandbox", "ok", f"SQL workers run behind {', '.join(parts)}", parts)
    text = f"SQL workers run without {', '.join(missing)}; a Linux kernel from 5.13 on has them"
    return Finding("sandbox", "note", f"{text} (docs/security.md)", parts)


def databases(config: Config) -> Iterator[Finding]:
    """Check that databases can be read and not written, and that the executor's time limit holds."""
    opened = Databases(config.data.databases)
    names = opened.names()
    if not names:
        yield Finding("databases", "problem", f"no databases in {opened.shown}")
        return
    limits = Limits(timeout_s=min(0.5, config.environment.limits.timeout_s))
    with SQLExecutor(config.environment.limits, workers=2, cache_entries=0) as executor:
        errors = {name: _read_error(opened, name, executor) for name in names}
        failed = [f"{name}: {error}" for name, error in errors.items() if error]
        if failed:
            text = f"{len(failed)} of {len(names)} could not be read: {'; '.join(failed[:3])}"
            yield Finding("databases", "problem", text)
            return
        first = opened.address(names[0])
        write = executor.execute(first, _WRITE)
        if write.is_ok:
            yield Finding("databases", "problem", f"a write was not refused: {first}")
            return
        yield Finding(
            "databases",
            "ok",
            f"{len(names)} can be read, and a write was refused: {write.error}",
            {"databases": len(names), "write": write.status},
        )
        yield sandbox(executor)
        started = time.monotonic()
        rounds = 20
        for number in range(rounds):
            executor.execute(first, f"SELECT {number}")
        call_ms = (time.monotonic() - started) / rounds * 1000
        started = time.monotonic()
        endless = executor.execute(first, _ENDLESS, limits=limits)
        late_s = time.monotonic() - started - limits.timeout_s
    facts = {"call_ms": round(call_ms, 2), "late_s": round(late_s, 3), "endless": endless.status}
    is_stopped = endless.status == "timeout" and late_s < 2
    yield Finding(
        "executor",
        "ok" if is_stopped else "problem",
        f"a query takes {call_ms:.1f} ms; one without end was stopped {late_s:.2f} s after its limit"
        if is_stopped
        else f"a query without end was not stopped: {endless.status}, {late_s:.1f} s after its limit",
        facts,
    )


def _read_error(databases: Databases, name: str, executor: SQLExecutor) -> str:
    """Error of opening a database and reading from it; empty if both work."""
    try:
        return executor.execute(databases.address(name), "SELECT 1").error
    except RunError as error:
        return str(error)


def guarded(name: str, found: Iterator[Finding]) -> Iterator[Finding]:
    """Yield the findings of a check; turn a RunError into one."""
    try:
        yield from found
    except RunError as error:
        yield Finding(name, "problem", str(error))
