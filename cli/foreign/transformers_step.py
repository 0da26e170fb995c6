#!/usr/bin/env python3
"""Writes one step of a model of transformers, for `burn-megatron verify --against FOLDER`.

    python3 transformers_step.py MODEL FOLDER [--dtype float32] [--rows 2] [--seq 16] [--seed 0]

FOLDER gets the weights of MODEL (a folder or a name), in `gradients/` the gradients under the same names, and in `step.json` the
tokens, the targets (-100 for none) and the mean loss. Needs torch and transformers.
"""

import argparse
import json
import pathlib

import torch
from transformers import AutoModelForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("folder", type=pathlib.Path)
parser.add_argument("--dtype", default="float32", choices=["float64", "float32", "bfloat16"])
parser.add_argument("--rows", type=int, default=2)
parser.add_argument("--seq", type=int, default=16)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

torch.manual_seed(args.seed)
model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).eval()
tokens = torch.randint(model.config.vocab_size, (args.rows, args.seq + 1))
inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
targets[:, ::5] = -100
logits = model(inputs).logits.flatten(0, 1)
loss = torch.nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=-100)
loss.backward()

model.save_pretrained(args.folder)
for parameter in model.parameters():
    parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
model.save_pretrained(args.folder / "gradients")
step = {"tokens": inputs.tolist(), "targets": targets.tolist(), "loss": loss.item(), "dtype": args.dtype}
(args.folder / "step.json").write_text(json.dumps(step))
