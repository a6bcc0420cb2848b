from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from text2sql_grpo.commands import options
from text2sql_grpo.commands.options import Count
from text2sql_grpo.errors import ConfigError
from text2sql_grpo.run_folder import config_around


def merge(
    *,
    adapter: Path,
    out: Path | None = None,
    base: str | None = None,
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    quantization: Literal["auto", "none", "4bit"] = "auto",
    num_samples: Count | None = None,
    config: Path | None = None,
    settings: Sequence[str] = (),
) -> int:
    """Merge a LoRA adapter into its base, checked.

    Args:
        adapter: Folder of the adapter or full model.
        out: Folder to write; default: 'merged' beside the adapter.
        base: Folder or Hub id of the base; default: the one the adapter names.
        dtype: Type of the merged weights.
        quantization: Quantization of the base in training; auto: that of config.yaml beside the adapter.
        num_samples: Held-out questions to answer before and after.
        config: YAML with these questions; default: config.yaml beside the adapter.
    """
    run = None
    if num_samples is not None:
        run = options.read_config(config or config_around(str(adapter)), settings)
    elif config or settings:
        raise ConfigError("--config and settings need --num_samples")
    out = out or adapter.parent / "merged"
    with options.writing_to(out):
        console = options.quiet_console(highlight=False)
        from text2sql_grpo.jobs import merge as job

        job.merge(
            adapter,
            out,
            base=base,
            dtype=dtype,
            quantization=quantization,
            config=run,
            num_samples=num_samples,
            console=console,
        )
    return 0
