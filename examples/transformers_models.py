"""transformers' generate() on fi's kernels, beside transformers' own attention: tokens and tokens/s.

    python examples/transformers_models.py [FOLDER] [--device cpu|cuda] [--replace] [--new-tokens N] [--json]

FOLDER is a checkpoint that AutoModelForCausalLM loads. Without it, small models with random weights of six families
run: Llama, Qwen3, Mistral (a window in every layer), Gemma 2 (windows and soft caps), Gemma 3 (windows) and gpt-oss
(windows and sinks). A row shows how many tokens of fi and of sdpa equal those of eager attention (in 16 bits a near tie
may end either way, and all tokens after it differ), and the tokens/s of sdpa (eager where a model does not support it)
and of fi, each the best of three runs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import torch

import fi_core.integrations.transformers as fi

SHAPE: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096, "initializer_range": 0.08,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {}),
    "mistral": ("Mistral", {"sliding_window": 32}),
    "gemma2": ("Gemma2", {"sliding_window": 32, "attn_logit_softcapping": 20.0, "query_pre_attn_scalar": 64}),
    "gemma3": ("Gemma3", {"sliding_window": 32, "query_pre_attn_scalar": 64}),
    "gpt-oss": ("GptOss", {"sliding_window": 32, "num_local_experts": 4, "num_experts_per_tok": 2}),
}


def small(name: str, device: str, dtype: torch.dtype, **shape: Any) -> Any:
    """A model of a family with random weights, those of norms and sinks too."""
    import transformers

    family, options = FAMILIES[name]
    kind = "TextConfig" if family == "Gemma3" else "Config"
    config = getattr(transformers, f"{family}{kind}")(**SHAPE | options | shape)
    torch.manual_seed(1)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, 0.5, 0.3)
    return model.to(device, dtype)


def load(folder: str, device: str, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().to(device)


@torch.inference_mode()
def generate(model: Any, ids: torch.Tensor, mask: torch.Tensor, new_tokens: int) -> torch.Tensor:
    options = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    return model.generate(ids, attention_mask=mask, **options)[:, ids.shape[1] :]


def row(name: str, model: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Tokens and speed of a batch of prompts, one of which is padded on the left."""
    ids = torch.randint(1, min(256, model.config.get_text_config().vocab_size), (options.batch_size, options.prompt))
    mask = torch.ones_like(ids)
    mask[1:2, : options.prompt // 3] = 0
    ids, mask = ids.to(model.device), mask.to(model.device)
    tokens, speed = {}, {}
    for way in ("eager", "sdpa", "fi"):
        if way == "sdpa" and not model._supports_sdpa:
            continue
        model.set_attn_implementation(way)
        replaced = fi.replace(model) if way == "fi" and options.replace else None
        generate(model, ids, mask, min(2, options.new_tokens))  # loads kernels
        seconds = []
        for _ in range(3):
            begin = time.perf_counter()
            tokens[way] = generate(model, ids, mask, options.new_tokens).cpu()
            seconds.append(time.perf_counter() - begin)
        speed[way] = tokens[way].numel() / min(seconds)
    equal = {way: int((tokens[way] == tokens["eager"]).sum()) for way in tokens}
    best = speed.get("sdpa", speed["eager"])
    return {
        "model": name, "tokens": tokens["fi"].numel(), "equal": equal["fi"], "sdpa equal": equal.get("sdpa"),
        "sdpa tokens/s": round(best, 1), "fi tokens/s": round(speed["fi"], 1), "ratio": round(speed["fi"] / best, 3),
        "replaced": replaced,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", nargs="?", help="a checkpoint; default: small models with random weights")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--families", default=",".join(FAMILIES), help="of the small models")
    parser.add_argument("--batch-size", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=48, help="tokens of a prompt")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--replace", action="store_true", help="replace norms, rotary embedding and MLPs, too")
    parser.add_argument("--json", action="store_true", help="print one JSON object for each model")
    options = parser.parse_args()
    dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
    fi.register()
    torch.manual_seed(0)
    for name in [options.folder] if options.folder else options.families.split(","):
        model = load(name, options.device, dtype) if options.folder else small(name, options.device, dtype)
        found = row(name, model, options)
        if options.json:
            print(json.dumps(found), flush=True)
        else:
            print(", ".join(f"{key} {value}" for key, value in found.items() if value is not None), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
