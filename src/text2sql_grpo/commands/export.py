import shlex
from pathlib import Path
from typing import Literal

from text2sql_grpo.commands.options import writing_to
from text2sql_grpo.errors import ConfigError, ModelError, needs_extra


def export(
    model: Path,
    *,
    to: Literal["gguf", "ollama", "vllm", "mlx"],
    out: Path | None = None,
    quantization: Literal["q8_0", "f16", "bf16"] = "q8_0",
) -> int:
    """Write a merged model for another server, checked, and print the command that starts it.

    The token ids of a conversation must be the same in the model and in the file: a different prompt is why
    exported models answer worse. Example: `text2sql-grpo export runs/my/merged --to gguf`

    Args:
        model: Folder of a merged model, such as RUN/merged.
        to: gguf for llama.cpp, ollama for the same with a Modelfile; vllm and mlx read the folder itself.
        out: Folder to write; default: NAME-gguf or NAME-ollama next to the model.
        quantization: Type of the matrices in a GGUF file.
    """
    if (model / "adapter_config.json").is_file():
        raise ModelError(f"{model} is an adapter: merge it first, text2sql-grpo merge --adapter {model}")
    from text2sql_grpo.publishing.upload_checks import check_model_folder

    check_model_folder(model)
    name = shlex.quote(str(model))
    if to in ("vllm", "mlx"):
        if out is not None:
            raise ConfigError(f"--out has no effect: {to} reads the merged folder itself")
        print(f"vllm serve {name}" if to == "vllm" else f"mlx_lm.server --model {name}")
        return 0
    folder = out or model.resolve().parent / f"{model.resolve().name}-{to}"
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--out exists and is not an empty folder: {folder}")
    with needs_extra("gguf", "export"):
        from text2sql_grpo.models.gguf_export import modelfile, write_gguf
    from transformers import AutoTokenizer

    from text2sql_grpo.files import write_text

    file = f"model-{quantization}.gguf"
    text = modelfile(file, AutoTokenizer.from_pretrained(str(model))) if to == "ollama" else ""
    with writing_to(folder):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--out cannot be written: {error}") from error
        write_gguf(model, folder / file, quantization)
        if text:
            write_text(folder / "Modelfile", text)
    print(f"{folder / file}: {(folder / file).stat().st_size / 2**20:.0f} MiB, same tokens as the model")
    if to == "ollama":
        print(f"cd {shlex.quote(str(folder))} && ollama create text2sql -f Modelfile && ollama run text2sql")
    else:
        print(f"llama-server -m {shlex.quote(str(folder / file))} --jinja")
    return 0
