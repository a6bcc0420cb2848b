"""The served agent: first token, users at once, memory.

    python benchmarks/serving.py [--quick] [--model M] [--minutes N]

One database with a schema of about 2,000 tokens, a real model (smollm2-135m), greedy, in this process. It
prints the seconds to the first token of the first question and of the second, whose schema is in the cache;
the time of 16 users at once, and of the same questions one after the other; resident memory. With --minutes,
4 users ask for so long, and time, processor time and memory of the first and the last fifth are compared:
processor time is comparable on a busy machine too. The last line is JSON.
"""

import argparse
import json
import os
import sqlite3
import tempfile
import threading
import time
from collections import defaultdict
from contextlib import closing
from pathlib import Path
from statistics import fmean, median
from typing import Any

import psutil

from text2sql_grpo.evaluation.bench import Environment
from text2sql_grpo.evaluation.sampler import open_sampler
from text2sql_grpo.models.loaded_policy import load_policy
from text2sql_grpo.serving.agent import Agent
from text2sql_grpo.serving.live_engine import LocalEngine

USERS = 16
TABLES, COLUMNS = 12, 14  # about 2,000 tokens as a compact schema


def make_database(path: Path) -> Path:
    """Write a database of many tables."""
    with closing(sqlite3.connect(path)) as connection:
        for table in range(TABLES):
            columns = ", ".join(f"measure_{table}_{column} INTEGER" for column in range(COLUMNS))
            connection.execute(f"CREATE TABLE station_{table} (id INTEGER PRIMARY KEY, {columns})")
        connection.commit()
    return path


def opened(environment: Environment, model: str) -> LocalEngine:
    """Engine of a model on an environment, greedy."""
    sampler = open_sampler(
        load_policy(model),
        environment.sessions,
        temperature=0.0,
        engine="auto",
        batch_size=USERS,
        bf16=None,
        template_options=None,
    )
    return LocalEngine(sampler, environment.sessions)


def first_tokens(path: Path, model: str) -> dict[str, float]:
    """Seconds to the first token of two questions."""
    with Environment(
        path, test_databases=0, schema_text="compact", instructions=False, max_turn_tokens=1
    ) as one:
        engine = opened(one, model)
        agent, found = Agent(engine=engine, environment=one, database=path.stem), {}
        for name in ("first", "second", "third"):
            started = time.monotonic()
            reply = agent.ask(f"How many stations are there, {name}?")
            found[f"{name}_token_s"] = round(time.monotonic() - started, 3)
        found["prompt_tokens"] = reply.prompt_tokens
        engine.close()
    return found


def at_once(agent: Agent, users: int) -> tuple[float, float]:
    """Seconds and processor seconds of a question by each user at once."""
    started, cpu = time.monotonic(), time.process_time()
    threads = [
        threading.Thread(target=agent.ask, args=(f"Highest measure_{i}_3 of station_{i}?",))
        for i in range(users)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.monotonic() - started, time.process_time() - cpu


def load(agent: Agent, minutes: float, users: int = 4) -> dict[str, float]:
    """Users ask one question after the other; figures of the first and the last fifth of the time."""
    end, times = time.monotonic() + 60 * minutes, defaultdict[int, list[float]](list)
    memory, used = {}, {-1: time.process_time()}
    process = psutil.Process()

    def ask(user: int) -> None:
        number = 0
        while (now := time.monotonic()) < end:
            part = min(4, int(5 * (1 - (end - now) / (60 * minutes))))
            agent.ask(f"Sum of measure_{number % TABLES}_{user} of station_{number % TABLES}, {number}?")
            times[part].append(time.monotonic() - now)
            memory[part], used[part] = process.memory_info().rss, time.process_time()
            number += 1

    threads = [threading.Thread(target=ask, args=(user,)) for user in range(users)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {
        "minutes": minutes,
        "questions": sum(map(len, times.values())),
        "first_s": round(median(times[0]), 3),
        "last_s": round(median(times[4]), 3),
        "first_cpu_s": round((used[0] - used[-1]) / len(times[0]), 3),
        "last_cpu_s": round((used[4] - used[3]) / len(times[4]), 3),
        "first_mib": round(memory[0] / 2**20),
        "last_mib": round(memory[4] / 2**20),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="4 users instead of 16")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--minutes", type=float, default=0.0, help="load of 4 users; 0 for none")
    given = parser.parse_args()
    users = 4 if given.quick else USERS
    with tempfile.TemporaryDirectory() as folder:
        path = make_database(Path(folder) / "stations.sqlite")
        record: dict[str, object] = {
            "benchmark": "serving",
            "model": given.model,
            **first_tokens(path, given.model),
        }
        settings: dict[str, Any] = {"schema_text": "compact", "instructions": False}
        settings |= {"max_turns": 2, "max_turn_tokens": 48}
        with Environment(path, test_databases=0, **settings) as environment:
            engine = opened(environment, given.model)
            agent = Agent(environment, engine, path.stem)
            agent.ask("How many?")  # the schema is in the cache from here on
            alone = [at_once(agent, 1) for _ in range(users)]
            wall, cpu = at_once(agent, users)
            record |= {
                "users": users,
                "together_s": round(wall, 2),
                "alone_s": round(sum(seconds for seconds, _ in alone), 2),
                "cpu_ratio": round(sum(own for _, own in alone) / cpu, 2),
                "mean_alone_s": round(fmean(seconds for seconds, _ in alone), 2),
                "resident_mib": round(psutil.Process(os.getpid()).memory_info().rss / 2**20),
            }
            if given.minutes:
                record |= load(agent, given.minutes)
            engine.close()
    for name, value in record.items():
        print(f"{name:16} {value}")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
