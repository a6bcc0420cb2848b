"""The policy of a run, read from a folder or the Hub, and its LoRA adapter."""

import dataclasses
import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import find_adapter_config_file, is_flash_attn_2_available

from text2sql_grpo.config import ModelConfig, load_config
from text2sql_grpo.errors import ModelError, install_command
from text2sql_grpo.files import read_json
from text2sql_grpo.models.hardware import check_fits, device_type, has_fast_bf16, inference_dtype
from text2sql_grpo.models.sources import readable_folder, split_revision
from text2sql_grpo.rollout.chat_format import ChatFormat
from text2sql_grpo.rollout.policy import obstacle
from text2sql_grpo.run_folder import find_config

if TYPE_CHECKING:  # slow to import, and most verbs load no adapter
    from peft import LoraConfig, PeftModel

logger = logging.getLogger(__name__)

_PROBE_TEXT = "SELECT 'Zoë',  12.50 FROM t\n\tWHERE id=2024 AND n >= 7 -- naïve 日本 😀 ½"


@dataclass(frozen=True)
class LoadedPolicy:
    """A model with its tokenizer.

    Attributes:
        folder: The path that it was loaded by, for `model_folder`.
        template_options: Variables of the chat template in its training; None for none.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    folder: str
    template_options: dict[str, Any] | None = None

    def ready(self) -> PreTrainedModel:
        """The model on the device of the run, in evaluation mode."""
        if not getattr(self.model, "is_quantized", False):  # a quantised model is on its device already
            self.model.to(device_type())
        return self.model.eval()


def load_policy(
    path: str,
    *,
    dtype: str = "auto",
    quantization: str = "none",
    attn_implementation: str = "auto",
    copies: int = 1,
    is_trained: bool = False,
) -> LoadedPolicy:
    """Read a model and its tokenizer from a folder, a GGUF file or the Hub.

    An adapter is put on the base that its config names, in 4 bits if its run trained it on these.

    Args:
        path: Model, adapter, checkpoint or run folder; see `model_folder`.
        dtype: Type of the weights; `auto` for the stored one, or for inference `inference_dtype`.
        quantization: `none`, or `4bit` for NF4 with double quantisation, placed on the device of the run.
        attn_implementation: `auto` takes FlashAttention where it is installed and this project's own
            attention cannot serve the model (see `rollout.policy.obstacle`), else transformers' choice.
        copies: See `check_fits`.
        is_trained: The weights are going to be trained, for which they must be a whole model.

    Raises:
        ModelError: Nothing readable there, too little memory, no chat template, or 4-bit loading is not
            possible here.
    """
    options: dict[str, Any] = {"dtype": dtype}
    if attn_implementation != "auto":
        options["attn_implementation"] = attn_implementation
    if quantization == "4bit":
        options |= _four_bit_options(dtype)
    try:
        folder = readable_folder(path)
        adapter = find_adapter_config_file(folder)
        if adapter is not None and not is_trained:
            return _load_adapted(path, Path(adapter).parent, attn_implementation=attn_implementation)
        if adapter is not None:
            raise ModelError(f"cannot train on from an adapter: {path}; merge it, or set sft.adapter to it")
        tokenizer = AutoTokenizer.from_pretrained(folder)
        if quantization == "none":
            config, device = AutoConfig.from_pretrained(folder), device_type()
            if dtype == "auto" and not is_trained:
                options["dtype"] = dtype = inference_dtype(config, device=device)
            check_fits(path, config, dtype=dtype, device=device, copies=copies)
        model = AutoModelForCausalLM.from_pretrained(folder, **options)
    except torch.OutOfMemoryError as error:
        raise ModelError(f"the model does not fit into memory: {error} ({path})") from error
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        reason = str(error).partition("\n")[0]
        raise ModelError(
            f"cannot read the model {path}: {reason}; name a folder, GGUF file or Hub id"
        ) from error
    ChatFormat(tokenizer)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    is_half_on_gpu = device_type() == "cuda" and model.dtype != torch.float32
    if attn_implementation == "auto" and is_half_on_gpu and obstacle(model) and is_flash_attn_2_available():
        model.set_attn_implementation("flash_attention_2")
    for module in model.modules():
        # bitsandbytes packs 4-bit weights on a CPU when they are first evaluated; then no gradient passes.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return LoadedPolicy(model, tokenizer, path)


def _load_adapted(path: str, adapter: Path, *, attn_implementation: str) -> LoadedPolicy:
    """Load the base of an adapter, and put the adapter on it.

    Raises:
        ModelError: The base is not named or cannot be read, or weights of one have no place in the other.
    """
    named = base_of(read_json(adapter / "adapter_config.json"))
    if not named:
        raise ModelError(f"the adapter does not name its base: {path}; merge it with --base")
    config = find_config(path)
    trained = ModelConfig(named) if config is None else load_config(config).model
    dtype, quantization = ("auto", "none") if trained.quantization != "4bit" else (trained.dtype, "4bit")
    try:
        base = load_policy(
            named, dtype=dtype, quantization=quantization, attn_implementation=attn_implementation
        )
    except ModelError as error:
        raise ModelError(f"cannot load the base of the adapter {path}: {error}") from error
    model = with_saved_adapter(base.model, adapter, named)
    has_tokenizer = (adapter / "tokenizer_config.json").is_file()
    tokenizer = AutoTokenizer.from_pretrained(adapter) if has_tokenizer else base.tokenizer
    return LoadedPolicy(model, tokenizer, path)


def with_saved_adapter(model: PreTrainedModel, adapter: Path, base: str) -> "PeftModel":
    """Put a saved adapter on its base.

    Args:
        base: Name of the base, for errors.

    Raises:
        ModelError: Weights of one have no place in the other.
    """
    from peft import PeftConfig, PeftModelForCausalLM

    adapted = PeftModelForCausalLM(model, PeftConfig.from_pretrained(str(adapter)))
    # PeftModel.from_pretrained makes the same two calls but drops the list of unexpected keys.
    result = adapted.load_adapter(str(adapter), "default")
    if misfits := [*result.missing_keys, *result.unexpected_keys]:
        raise ModelError(
            f"the adapter {adapter} does not fit {base}: {len(misfits)} weights of one have no place in the "
            f"other, such as {misfits[0]}"
        )
    return adapted


def base_of(adapter_config: dict[str, Any]) -> str | None:
    """Path of an adapter's base for `model_folder`, with its revision."""
    path, revision = (adapter_config.get(name) for name in ("base_model_name_or_path", "revision"))
    return f"{path}@{revision}" if path and revision else path


def resolved(settings: ModelConfig, device: str) -> ModelConfig:
    """Settings with dtype and quantization decided for a kind of device, for the run folder to record."""
    dtype, quantization = settings.dtype, settings.quantization
    if dtype == "auto":
        # Full training keeps float32 weights: updates are smaller than a step of bfloat16.
        dtype = "float32" if settings.lora is None else _frozen_dtype(device)
    if quantization == "auto":
        reason = four_bit_obstacle(device)
        quantization = "none" if reason else "4bit"
        if reason:
            logger.warning(f"LoRA on {dtype} weights, not on 4-bit ones: {reason}")
    return dataclasses.replace(settings, dtype=dtype, quantization=quantization)


def _frozen_dtype(device: str) -> Literal["float32", "bfloat16", "float16"]:
    if device == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
    is_slow = device == "mps" or (device == "cpu" and not has_fast_bf16())
    return "float32" if is_slow else "bfloat16"


def four_bit_obstacle(device: str) -> str | None:
    """Why weights cannot be held in 4 bits on this kind of device; None if they can."""
    if os.environ.get("DISABLE_BITSANDBYTES", "0") not in ("", "0"):
        return "DISABLE_BITSANDBYTES=1 is set"
    try:
        import bitsandbytes
    except ImportError:
        command = install_command("bitsandbytes")
        return f"it needs the package bitsandbytes, which is not installed ({command}; not on every platform)"
    if device not in bitsandbytes.supported_torch_devices:
        return f"bitsandbytes {bitsandbytes.__version__} does not run on {device}"
    return None


def _four_bit_options(dtype: str) -> dict[str, Any]:
    device = device_type()
    if reason := four_bit_obstacle(device):
        raise ModelError(f"model.quantization 4bit: {reason}; set quantization: auto or none")
    place = f"{device}:{os.environ.get('LOCAL_RANK', '0')}" if device == "cuda" else device
    return {
        "quantization_config": BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16 if dtype == "auto" else getattr(torch, dtype),
        ),
        "device_map": {"": place},
    }


_LAYER = re.compile(r"\.(?:layers|h|blocks|block|layer)\.(\d+)\.")
_WIDE = 2048
# Linear layers of attention, also of DeepSeek's latent one; PEFT passes over those that a model lacks.
_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
_ATTENTION += ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"]


def lora_config(settings: ModelConfig, model: PreTrainedConfig) -> "LoraConfig | None":
    """PEFT's config of the adapter; None trains all weights.

    Where the settings are silent: all linear layers but the head, as adapters on attention alone learn less
    (Dettmers et al. 2023, arXiv:2305.14314, sec. 4; Schulman et al. 2025, "LoRA Without Regret"), and of
    mixtures of experts the attention layers, since a router must not be adapted and experts are no linear
    layers in transformers. Rank 16, for RL learns little per episode (ibid.), 32 for narrow models.
    """
    if settings.lora is None:
        return None
    from peft import LoraConfig

    text = model.get_text_config()
    has_experts = any(getattr(text, name, None) for name in ("num_experts", "num_local_experts"))
    family = _ATTENTION if has_experts else "all-linear"
    rank = settings.lora.r or (16 if text.hidden_size >= _WIDE else 32)
    return LoraConfig(
        r=rank,
        lora_alpha=settings.lora.lora_alpha or 2 * rank,
        target_modules=settings.lora.target_modules or family,
        lora_dropout=0.0,  # Generation runs in train mode, so a dropout would change what the policy samples.
        task_type="CAUSAL_LM",
    )


def with_adapter(model: PreTrainedModel, adapter: "LoraConfig") -> "PeftModel":
    """Put a new adapter on a model.

    Raises:
        ModelError: PEFT refuses this adapter for this model.
    """
    from peft import get_peft_model

    try:
        return get_peft_model(model, adapter)
    except ValueError as error:
        raise ModelError(
            f"LoRA cannot be put on this model: {error}; name its layers in model.lora.target_modules"
        ) from error


def freeze_layers(model: torch.nn.Module, count: int) -> None:
    """Leave the first layers, with their part of an adapter, out of what is trained."""
    for name, weight in model.named_parameters():
        found = _LAYER.search(name)
        if found and int(found[1]) < count:
            weight.requires_grad_(False)


def check_saved_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path, source: Path | str) -> None:
    """Refuse a folder from which a tokenizer is read otherwise than it was saved there.

    Args:
        source: Origin of the tokenizer, for the error.

    Raises:
        ModelError: Token ids of a probe text, or the chat template, differ.
    """
    saved = AutoTokenizer.from_pretrained(folder)
    if saved(_PROBE_TEXT)["input_ids"] != tokenizer(_PROBE_TEXT)["input_ids"]:
        raise ModelError(f"the saved tokenizer encodes the probe text differently from {source}")
    if saved.chat_template != tokenizer.chat_template:
        raise ModelError(f"the saved chat template differs from that of {source}")


def name_base(model: torch.nn.Module, policy: LoadedPolicy) -> None:
    """Have a model's adapters name their base as the config does, not a folder of this machine's cache."""
    for adapter in getattr(model, "peft_config", {}).values():
        adapter.base_model_name_or_path, adapter.revision = split_revision(policy.folder)
