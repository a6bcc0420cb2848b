from pathlib import Path
from typing import Literal

from text2sql_grpo.bundled import is_bundled
from text2sql_grpo.commands import options


def merge(
    *,
    adapter: Path,
    out: Path | None = None,
    base: str | None = None,
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    quantization: Literal["auto", "none", "4bit"] = "auto",
) -> int:
    """Merge a LoRA adapter into its base, checked.

    Example: `text2sql-grpo merge --adapter runs/my/adapter --out runs/my/merged`

    Args:
        adapter: Folder of the adapter or full model, or a run folder; data/start is the package's.
        out: Folder to write; default: 'merged' next to the adapter.
        base: Folder or Hub id of the base; default: the one the adapter names.
        dtype: Type of the merged weights.
        quantization: Quantization of the base in training; auto: that of config.yaml next to the adapter.
    """
    from text2sql_grpo.models.sources import local_folder

    found = local_folder(adapter, ("adapter", "model"))
    out = out or (adapter if is_bundled(adapter) else found).parent / "merged"
    with options.writing_to(out):
        console = options.quiet_console()
        console.print(f"Merging {found} ...", soft_wrap=True)
        from text2sql_grpo.publishing.merging import merge_adapter

        report = merge_adapter(found, out, base=base, dtype=dtype, quantization=quantization)
        console.print(str(report), soft_wrap=True)
    return 0
