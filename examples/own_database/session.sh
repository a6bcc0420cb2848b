#!/usr/bin/env bash
# From a database to a model that answers, each command with its seconds.
#
#   bash examples/own_database/session.sh NAME DATABASE [QUESTION]
#
# DATABASE is a file, a folder of CSV files or a URL; NAME a folder to write. If NAME/verified.jsonl holds reviewed
# questions (text2sql-grpo review NAME --file NAME/questions/test_values.jsonl), the models before and after training
# answer them too. Each step is skipped where its output is there, so that the session can be run again.
set -euo pipefail
name=$1 database=$2 question=${3:-}

TIMEFORMAT="[%R s by the clock, %U s of processor]"

step() { # FILE COMMAND..: run it unless FILE exists
    local file=$1
    shift
    [ -e "$file" ] && return
    echo "\$ $*"
    time "$@"
    echo
}

step "$name/config.yaml" text2sql-grpo init "$database" --out "$name"
step "$name/start/config.json" text2sql-grpo merge --adapter data/start --out "$name/start"
step "$name/run/merged/config.json" text2sql-grpo train --config "$name/config.yaml"
if [ -e "$name/verified.jsonl" ]; then
    for model in start run/merged; do
        step "$name/reviewed_${model%%/*}.json" text2sql-grpo evaluate --config "$name/config.yaml" \
            --model_path "$name/$model" --data.test "{reviewed: $name/verified.jsonl}" \
            --out "$name/reviewed_${model%%/*}.json"
    done
    step "$name/none" text2sql-grpo review "$name" --summary
fi
if [ -n "$question" ]; then
    step "$name/none" text2sql-grpo ask "$question" --model "$name/run/merged" --db "$database"
fi
