"""How far apart the code of one GRPO step lies: which functions of this package it enters, in which files.

A small run as in the main job (engine `slots`, real queries, grading with neighbours, update, logs) with
forced tokens: episodes look, fail and are right (`training_soak.py`). Its second step is traced, from the
micro-batch to the log, threads of tools included; it asks the same question as the first, whose schema and
neighbours are known by then. A function is noted at its first call. A switch is a call that is noted in
another file than the one before it in its thread: what a reader does who follows the step top to bottom.

Run: OMP_NUM_THREADS=1 python benchmarks/trace_step.py --quick      (seconds; without --quick the list, too)
The last line is JSON.
"""

import argparse
import itertools
import json
import logging
import sys
import tempfile
import threading
from collections import defaultdict
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from training_soak import soak_config, soak_trainer
from transformers.trainer_callback import TrainerCallback

import text2sql_grpo
from text2sql_grpo.evaluation.bench import open_workbench

PACKAGE = Path(text2sql_grpo.__file__).parent
NOT_FUNCTIONS = {"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>", "<module>"}


def is_spine(file: str) -> bool:
    """True for files that a reader of the step must read: the other subpackages have one entrance each."""
    return file.startswith("training/") or file == "rollout/engine.py"


class Trace(TrainerCallback):
    """Functions of this package in the order in which each thread first enters them, during one step.

    Attributes:
        entered: File and qualified name of each function, by thread.
    """

    def __init__(self, step: int) -> None:
        self.entered: dict[int, list[tuple[str, str]]] = defaultdict(list)
        self._step = step
        self._seen: set[CodeType] = set()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._step - 1:
            threading.setprofile(self._note)
            sys.setprofile(self._note)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_log = True

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or code in self._seen or code.co_name in NOT_FUNCTIONS:
            return
        self._seen.add(code)
        path = Path(code.co_filename)
        if path.is_relative_to(PACKAGE):
            name = path.relative_to(PACKAGE).as_posix()
            self.entered[threading.get_ident()].append((name, code.co_qualname))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="figures alone")
    options = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    trace = Trace(step=2)
    with tempfile.TemporaryDirectory() as name:
        config = soak_config(Path(name), questions=10)
        bench = open_workbench(config)
        example = bench.load(config.data.train)[0]
        trainer = soak_trainer(config, bench, [example], steps=2, callbacks=[trace])
        trainer.train()
        bench.executor.close()
    threads = list(trace.entered.values())
    if not options.quick:
        for functions in threads:
            for file, group in itertools.groupby(functions, key=lambda entry: entry[0]):
                print(f"{file}: {', '.join(function for _, function in group)}")
    entered = [entry for functions in threads for entry in functions]
    figures = {
        "functions": len(entered),
        "files": len({file for file, _ in entered}),
        "file_switches": sum(a[0] != b[0] for each in threads for a, b in itertools.pairwise(each)),
        "spine": len({entry for entry in entered if is_spine(entry[0])}),
    }
    print(json.dumps({"benchmark": "trace_step", **figures}))


if __name__ == "__main__":
    main()
