"""Writes one step of Megatron, for `burn-megatron verify --against FOLDER`.

Call `save_step` in a training script, on every rank, after the backward of a step and `finalize_model_grads`, before the
optimizer's step. `bridge` is the `AutoBridge` of Megatron-Bridge that made the model: gradients leave through the same conversion as
weights, as it only concatenates, transposes and permutes. Turn dropout off. Needs Megatron-Bridge.
"""

import json
import pathlib

import torch


def save_step(bridge, model, tokens, targets, loss, folder):
    """`model`: the list of model chunks; `tokens` and `targets` `[rows, seq]`, -100 for no target; `loss`: the mean over targets."""
    folder = pathlib.Path(folder)
    bridge.save_hf_pretrained(model, folder)
    parameters = [parameter for chunk in model for parameter in chunk.parameters()]
    weights = [parameter.data.clone() for parameter in parameters]
    for parameter in parameters:
        gradient = getattr(parameter, "main_grad", parameter.grad)
        parameter.data.copy_(torch.zeros_like(parameter) if gradient is None else gradient)
    bridge.save_hf_pretrained(model, folder / "gradients")
    for parameter, weight in zip(parameters, weights):
        parameter.data.copy_(weight)
    if torch.distributed.get_rank() == 0:
        dtype = str(parameters[0].dtype).removeprefix("torch.")
        step = {"tokens": tokens.tolist(), "targets": targets.tolist(), "loss": float(loss), "dtype": dtype}
        (folder / "step.json").write_text(json.dumps(step))
