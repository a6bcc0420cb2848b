from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from text2sql_grpo.bundled import is_bundled
from text2sql_grpo.commands import options
from text2sql_grpo.commands.options import Count
from text2sql_grpo.config import load_config
from text2sql_grpo.errors import ConfigError, ModelError
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
        adapter: Folder of the adapter or full model, or a run folder; data/start is the package's.
        out: Folder to write; default: 'merged' next to the adapter.
        base: Folder or Hub id of the base; default: the one the adapter names.
        dtype: Type of the merged weights.
        quantization: Quantization of the base in training; auto: that of config.yaml next to the adapter.
        num_samples: Held-out questions to answer before and after.
        config: YAML with these questions; default: config.yaml next to the adapter.
    """
    from text2sql_grpo.models.sources import local_folder

    found = local_folder(adapter, ("adapter", "model"))
    out = out or (adapter if is_bundled(adapter) else found).parent / "merged"
    run, adapter = None, found
    if num_samples is not None:
        run = load_config(config or config_around(str(adapter)), settings)
    elif config or settings:
        raise ConfigError("--config and settings need --num_samples")
    with options.writing_to(out):
        console = options.quiet_console(highlight=False)
        from text2sql_grpo.evaluation.bench import Bench
        from text2sql_grpo.publishing.merging import merge_adapter

        if run is None:
            report = merge_adapter(adapter, out, base=base, dtype=dtype, quantization=quantization)
            console.print(str(report), soft_wrap=True)
            return 0
        if not (adapter / "adapter_config.json").is_file():
            raise ModelError(
                f"--num_samples compares an adapter with its merged model, but {adapter} holds none"
            )
        from text2sql_grpo.run.held_out import check_merge

        with Bench.open(run) as bench:
            bench.held_out()  # fail before the work if there are none
            report = merge_adapter(adapter, out, base=base, dtype=dtype, quantization=quantization)
            console.print(str(report), soft_wrap=True)
            check_merge(
                adapter,
                out,
                bench,
                console,
                num_samples=num_samples or 1,
                base=str(report.base),
                dtype=run.model.dtype if report.is_four_bit else "auto",
                quantization="4bit" if report.is_four_bit else "none",
            )
    return 0
