"""Times generation with transformers on the CPU, for comparison with `burn-megatron-bench generate`.

The benchmark starts this script. The model has random weights of the same shape. The script prints "ready" with its
versions. Then it reads batch sizes, one per line, and prints the seconds of one generation for each."""

import json
import sys
import time

import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel

settings = json.loads(sys.argv[1])
torch.set_num_threads(settings["threads"])
torch.manual_seed(0)
transformers.logging.set_verbosity_error()
shape = GPT2Config(
    vocab_size=settings["vocabulary"],
    n_positions=settings["context"],
    n_embd=settings["hidden"],
    n_layer=settings["layers"],
    n_head=settings["heads"],
    bos_token_id=None,
    eos_token_id=None,
)
model = GPT2LMHeadModel(shape).eval()
new = settings["tokens"]


def generate(batch):
    prompt = torch.randint(0, settings["vocabulary"], (batch, settings["prompt"]))
    start = time.perf_counter()
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=new,
        do_sample=False,
        use_cache=True,
        pad_token_id=0,
    )
    seconds = time.perf_counter() - start
    assert out.shape == (batch, settings["prompt"] + new), out.shape
    return seconds


print(f"ready transformers {transformers.__version__}, torch {torch.__version__}", flush=True)
with torch.inference_mode():
    for line in sys.stdin:
        print(generate(int(line)), flush=True)
