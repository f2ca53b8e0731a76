"""What int8 weights change: the model's next-token distributions against exact float32 on the same GGUF file.

    python -m bench.cpu_quality MODEL.gguf

Variants are compared with `weights="none", dtype="float32"`: the file's own blocks (what `weights="auto"` does), with K
and V in int8 and in half precision, and the dequantized weights rounded to int8 anew (what `weights="int8"` does to
checkpoints that are not quantized). All round the inputs of every matrix to int8. Prints for each text the mean and
largest Kullback-Leibler divergence, perplexity of both, and how often the most likely token agrees; appends them to
bench/results/cpu_quality.jsonl.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from engine_core.attention.base import AttentionSpec
from engine_core.attention.select import make_attention, with_pool
from engine_core.batch import make_batch
from engine_core.layers.linear import WeightsMode
from engine_core.loader.checkpoint import Checkpoint, ModelBuilder
from engine_core.loader.select import open_checkpoint
from engine_core.loader.weights import Weight, dense
from engine_core.models.registry import model_class
from engine_core.plan import ScheduledRow, StepPlan
from engine_core.request import Request
from engine_core.text_side import TextSide
from ipc.messages import TextPrompt
from ipc.sampling import SamplingParams

RESULTS = Path(__file__).parent / "results" / "cpu_quality.jsonl"
ROOT = Path(__file__).parent.parent
TEXTS = {
    "prose": "The old lighthouse keeper climbed the stairs every evening, as his father had done before him. From the "
    "top he could see the fishing boats coming home, and he knew each of them by the colour of its sail. One night in "
    "October a boat he had never seen before came round the point, with no light and nobody at the helm. " * 2,
    "facts": "Water boils at one hundred degrees Celsius at sea level. The capital of France is Paris, which lies on "
    "the Seine. Photosynthesis turns carbon dioxide and water into sugar and oxygen. The speed of light in a vacuum is "
    "299,792,458 metres per second. In 1969 two astronauts walked on the Moon for the first time.",
    "code": (ROOT / "engine_core" / "request.py").read_text(),
    "other languages": "春天来了，花园里的花都开了。孩子们在草地上跑来跑去。 La bibliothèque ferme à dix-huit heures. "
    "Der Zug nach Hamburg fährt heute von Gleis sieben ab. El mercado abre todos los días menos el domingo.",
}


@dataclass(frozen=True)
class Dequantized:
    """A checkpoint with all its weights as float32."""

    inner: Checkpoint
    quantized: bool = False

    @property
    def config(self) -> object:
        return self.inner.config

    def take(self, name: str, shape: tuple[int, ...]) -> Weight:
        return dense([self.inner.take(name, shape)], torch.float32, torch.device("cpu"))

    def optional(self, name: str, shape: tuple[int, ...]) -> Weight | None:
        return self.inner.optional(name, shape)

    def unused(self) -> list[str]:
        return self.inner.unused()


@torch.inference_mode()
def log_probabilities(
    path: str, mode: WeightsMode, dequantize: bool, texts: dict[str, list[int]], kv_dtype: str = "auto"
) -> dict[str, torch.Tensor]:
    """float64 [tokens, vocabulary] for each text."""
    checkpoint: Checkpoint = open_checkpoint(path, "auto", 0)
    if dequantize:
        checkpoint = Dequantized(checkpoint)  # type: ignore[assignment]
    c, cpu = checkpoint.config, torch.device("cpu")
    model = model_class(c.architecture)(ModelBuilder(checkpoint, mode, torch.float32, cpu))
    spec = AttentionSpec(c.num_layers, c.num_heads, c.num_kv_heads, c.head_dim, 16, torch.float32, cpu)
    spec = with_pool("auto", spec, kv_dtype, rounds=mode == "int8", biased=c.qkv_bias)
    attention = make_attention("auto", spec)
    attention.allocate(max(map(len, texts.values())) // 16 + 1)
    out = {}
    for name, ids in texts.items():
        request = Request(0, ids, SamplingParams(), block_ids=list(range(len(ids) // 16 + 1)), slot=0)
        plan = StepPlan((ScheduledRow(request, 0, len(ids), True),), num_tokens=len(ids))
        hidden = model.forward(make_batch(plan, 16, cpu), attention)
        out[name] = torch.log_softmax(model.logits(hidden).double(), -1)
    return out


def compare(exact: torch.Tensor, other: torch.Tensor, ids: list[int]) -> dict[str, float]:
    divergence = (exact.exp() * (exact - other)).sum(-1)
    following = torch.tensor(ids[1:])[:, None]
    perplexity = [math.exp(-float(p[:-1].gather(1, following).mean())) for p in (exact, other)]
    return {
        "tokens": len(ids),
        "kl_mean": float(divergence.mean()),
        "kl_max": float(divergence.max()),
        "perplexity_exact": perplexity[0],
        "perplexity": perplexity[1],
        "top1_agreement": float((exact.argmax(-1) == other.argmax(-1)).double().mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    options = parser.parse_args()
    text_side = TextSide(options.model, None)
    texts = {name: text_side.encode(TextPrompt(text))[:400] for name, text in TEXTS.items()}
    exact = log_probabilities(options.model, "none", False, texts)
    print(f"{'':32}{'tokens':>7}{'KL mean':>10}{'KL max':>10}{'ppl exact':>11}{'ppl':>9}{'top-1':>8}")
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a") as file:
        for variant, dequantize, kv_dtype in (
            ("file's blocks", False, "auto"),
            ("KV in float16", False, "float16"),
            ("rounded to int8", True, "auto"),
        ):
            values = log_probabilities(options.model, "int8", dequantize, texts, kv_dtype)
            for name, ids in texts.items():
                row = compare(exact[name], values[name], ids)
                file.write(json.dumps({"variant": variant, "text": name, **row}) + "\n")
                print(
                    f"{variant:16}{name:16}{row['tokens']:7}{row['kl_mean']:10.1e}{row['kl_max']:10.1e}"
                    f"{row['perplexity_exact']:11.4f}{row['perplexity']:9.4f}{row['top1_agreement']:8.2%}"
                )


if __name__ == "__main__":
    main()
