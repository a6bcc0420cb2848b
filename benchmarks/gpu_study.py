"""A study of Qwen2.5-Coder on Spider on one GPU, in slices of minutes that go on where the last one stopped.

    python benchmarks/gpu_study.py split FILE FOLDER            parts of at most 59 MB, with SHA256SUMS
    python benchmarks/gpu_study.py join FOLDER FILE             the file of its parts, checked
    python benchmarks/gpu_study.py run --out FOLDER --model 0.5B=PATH --model 1.5B=PATH [--minutes 9]
    python benchmarks/gpu_study.py run --quick                  a trial of the code: config/test.yaml

`split` and `join` bring weights to a machine that takes small files alone. `run` does what is left of four
stages for each model, until its minutes are over: zero-shot answers to all of Spider dev, SFT, GRPO from it,
and the answers after each. It prints one line a stage, and the command for what is left. A stage that is cut
saves its step and goes on there; answers that are cut are asked again. Everything lies in `--out`, cache
included, so that the folder may move between machines. The last line is JSON: right answers by model and
stage, and what is left.

Spider is `spider/` of the working folder, or `--spider FOLDER`, as Spider publishes it. Settings are those of
`config/qwen2.5_coder_0.5b_cpu.yaml` and `SETTINGS`; `--section.key=value` changes one.
"""

import argparse
import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
CONFIG = REPOSITORY / "config" / "qwen2.5_coder_0.5b_cpu.yaml"
PART_BYTES = 59_000_000
SUMS = "SHA256SUMS"
SETTINGS = {
    "data.test_samples": None,  # all of dev
    "sft.max_steps": 160,
    "sft.batch_size": 24,
    "sft.group_size": 8,
    "sft.learning_rate": 2.0e-4,
    "sft.min_learning_rate_ratio": 0.05,
    "sft.evaluate_every": 80,
    "sft.save_steps": 20,
    "losses.gold": 0.3,  # the best arm of the quickstart: gold rows and kept answers
    "losses.kept": 0.5,
    "grpo.max_steps": 40,
    "evaluation.every": 20,
    "evaluation.schedule_samples": 178,
}
QUICK = {"sft.max_steps": 4, "grpo.max_steps": 1}
SAVE_S = 30.0  # a stage that is told to stop saves its step meanwhile
RESERVE_S = 20.0  # of a slice; nothing starts in it


def split(file: Path, folder: Path, part_bytes: int = PART_BYTES) -> list[Path]:
    """Write the parts of a file, with a SHA-256 of each and of the whole."""
    folder.mkdir(parents=True, exist_ok=True)
    whole, parts, sums = hashlib.sha256(), list[Path](), list[str]()
    with file.open("rb") as source:
        while data := source.read(part_bytes):
            whole.update(data)
            parts.append(folder / f"part{len(parts):03}")
            parts[-1].write_bytes(data)
            sums.append(f"{hashlib.sha256(data).hexdigest()}  {parts[-1].name}")
    (folder / SUMS).write_text("\n".join([*sums, f"{whole.hexdigest()}  whole"]) + "\n")
    return parts


def join(folder: Path, file: Path) -> None:
    """Write the file of parts, if each of them and the whole are what was split.

    Raises:
        SystemExit: A part is missing or another one; the file is not written.
    """
    if not (folder / SUMS).is_file():
        raise SystemExit(f"no {SUMS} in {folder}: name the folder that `split` wrote")
    lines = [line.split("  ") for line in (folder / SUMS).read_text().splitlines()]
    *sums, (whole_sum, _) = lines
    whole, partial = hashlib.sha256(), file.with_name(f"{file.name}.partial")
    with partial.open("wb") as target:
        for expected, name in sums:
            data = (folder / name).read_bytes() if (folder / name).is_file() else b""
            if hashlib.sha256(data).hexdigest() != expected:
                partial.unlink()
                raise SystemExit(f"{folder / name} is missing or not the part that was split: send it again")
            whole.update(data)
            target.write(data)
    if whole.hexdigest() != whole_sum:
        partial.unlink()
        raise SystemExit(f"the parts of {folder} are whole, but not those of one file: split it again")
    partial.replace(file)


class Study:
    """Stages of each model, and what is left of them.

    Args:
        out: Folder of the results.
        config: Config of all stages.
        settings: Changes of it, `--section.key=value` each.
        until: Time, of `time.monotonic`, at which a stage is told to stop.
    """

    def __init__(self, out: Path, config: Path, settings: Sequence[str], until: float) -> None:
        self.out, self._config, self._settings, self._until = out, config, settings, until

    def stages(self, name: str, path: str) -> dict[str, tuple[Path, list[str]]]:
        """File that each stage of a model leaves, and the command that makes it."""
        folder = self.out / name
        common = ["--config", str(self._config), *self._settings]
        train = [*common, f"--model.path={path}", f"--run.output_dir={folder / 'run'}"]
        train += ["--resume", "auto"] if any((folder / "run").glob("checkpoint-*")) else []
        zero = ["evaluate", *common, "--model_path", path, "--out", str(folder / "zero_shot.json")]
        return {
            "zero-shot": (folder / "zero_shot.json", zero),
            "SFT and GRPO": (folder / "run" / "merged" / "config.json", ["train", *train]),
        }

    def run(self, models: dict[str, str]) -> list[str]:
        """Do what is left, in order; return the names of stages that are left when the time is over."""
        left = list[str]()
        for name, path in models.items():
            for stage, (done, command) in self.stages(name, path).items():
                if not done.exists() and not (not left and self._stage(name, stage, done, command)):
                    left.append(f"{name} {stage}")
        return left

    def _stage(self, name: str, stage: str, done: Path, command: list[str]) -> bool:
        """Run a stage until the time is over; True if it is done."""
        seconds = self._until - time.monotonic() - RESERVE_S
        if seconds <= 0:
            return False
        log = self.out / name / "log.txt"
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = os.environ | {"TEXT2SQL_GRPO_CACHE": str(self.out.resolve() / "cache")}
        started = time.monotonic()
        with log.open("a", encoding="utf-8") as lines:
            print("$", shlex.join(["text2sql-grpo", *command]), file=lines, flush=True)
            process = subprocess.Popen(
                [sys.executable, "-m", "text2sql_grpo", *command],
                cwd=REPOSITORY,
                env=environment,
                stdout=lines,
                stderr=subprocess.STDOUT,
            )
            try:
                code = process.wait(timeout=seconds)
            except subprocess.TimeoutExpired:
                code = _stopped(process)
        print(
            f"{name}: {stage}, exit code {code} after {time.monotonic() - started:.0f} s ({log})", flush=True
        )
        if code not in (0, 130, -signal.SIGINT, -signal.SIGKILL):
            raise SystemExit(f"{stage} of {name} failed: see the end of {log}")
        return done.exists()

    def right(self, name: str) -> dict[str, Any]:
        """Strict accuracy of a model by stage and held-out set: right answers and questions."""
        folder = self.out / name
        read = [
            json.loads(file.read_text()) if file.is_file() else {}
            for file in (folder / "zero_shot.json", folder / "run" / "evaluation.json")
        ]
        zero_shot, run = read
        stages = {"zero-shot": zero_shot, "SFT": run.get("before", {}), "SFT and GRPO": run}
        return {
            stage: {one: _counts(scores["overall"]["strict"]) for one, scores in record["sets"].items()}
            for stage, record in stages.items()
            if "sets" in record
        }


def _counts(strict: dict[str, Any]) -> dict[str, Any]:
    return {name: strict[name] for name in ("correct", "total", "interval")}


def _stopped(process: "subprocess.Popen[bytes]") -> int:
    """Exit code of a stage that is told to stop; it is killed if that takes too long."""
    process.send_signal(signal.SIGINT)
    try:
        return process.wait(timeout=SAVE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def main(arguments: Sequence[str] | None = None) -> int:
    """Do one of the three; exit code 0, or 3 if stages are left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb, names in {"split": ("file", "folder"), "join": ("folder", "file")}.items():
        for name in names:
            (verbs.choices.get(verb) or verbs.add_parser(verb)).add_argument(name, type=Path)
    run = verbs.add_parser("run")
    run.add_argument("--out", type=Path, default=Path("runs/gpu_study"), help="folder of all that is made")
    run.add_argument("--model", action="append", default=[], metavar="NAME=PATH", help="may be given again")
    run.add_argument("--minutes", type=float, default=9.0, help="of this slice")
    run.add_argument("--spider", type=Path, default=Path("spider"), help="folder of Spider's files")
    run.add_argument("--quick", action="store_true", help="a trial of the code: config/test.yaml")
    given, changes = parser.parse_known_args(arguments)
    if given.verb == "split":
        print(f"{len(split(given.file, given.folder))} parts in {given.folder}, checked by {SUMS}")
        return 0
    if given.verb == "join":
        join(given.folder, given.file)
        print(given.file)
        return 0
    return _run(given, changes)


def _run(given: argparse.Namespace, changes: list[str]) -> int:
    until = time.monotonic() + 60 * given.minutes
    named = dict(one.split("=", 1) for one in given.model)
    models = {
        name: str(Path(path).resolve()) if Path(path).exists() else path for name, path in named.items()
    }
    data = given.spider.resolve()
    settings: dict[str, Any] = SETTINGS | {
        "data.databases": str(data / "database"),
        "data.train": str(data / "train_spider.json"),
        "data.test": {"dev": str(data / "dev.json")},
    }
    config = CONFIG
    if given.quick:
        config, settings = REPOSITORY / "config" / "test.yaml", QUICK
        models = {"tiny": str(given.out.resolve() / "tiny_model")}
        if not Path(models["tiny"]).exists():
            command = [sys.executable, "-m", "tests.tiny_model", models["tiny"]]
            subprocess.run(command, cwd=REPOSITORY, check=True)
    if not models:
        raise SystemExit("no model: add --model 0.5B=PATH, a folder, a GGUF file or an id of the Hub")
    options = [f"--{name}={json.dumps(value)}" for name, value in settings.items()] + changes
    study = Study(given.out.resolve(), config, options, until)
    left = study.run(models)
    if left:
        print(f"left: {', '.join(left)}: run the same command again")
    print(json.dumps({"right": {name: study.right(name) for name in models}, "left": left}))
    return 3 if left else 0


if __name__ == "__main__":
    sys.exit(main())
