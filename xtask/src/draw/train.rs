//! Draws the training run: `[train]` without the optimizer, `[kernels]`, and `[sample]`.

use super::{Draft, Feature};

/// Draws a run of a few steps.
pub fn base(draft: &mut Draft<'_>) {
    let (steps, seed) = (draft.random.one_of(&[2, 2, 3]), draft.random.below(1000));
    let held_out = draft.random.within((1, 5));
    draft.set("train.steps", steps);
    draft.set("train.seed", seed);
    draft.set("train.warmup_steps", 1);
    draft.set("train.learning_rate", "3e-3");
    draft.set("train.held_out_samples", held_out);
    draft.set("sample.tokens", 0);
}

pub const FEATURES: &[Feature] = &[
    learning_rate,
    sequence_length,
    batch_warmup,
    sequence_warmup,
    check_replicas_every,
    check_replay_every,
    deterministic,
    log_num_zeros_in_grad,
    log_max_attention_logit,
    evaluate_every,
    sample,
    sample_with_limits,
    kernels,
    kernels,
    attention_kernel,
    loss_chunk_size,
];

fn learning_rate(draft: &mut Draft<'_>) -> bool {
    let schedules = [
        "\"linear\"",
        "\"inverse_sqrt\"",
        "{ wsd = { decay_steps = 1, tail = \"linear\" } }",
    ];
    let schedule = draft.random.one_of(&schedules);
    draft.set("train.min_learning_rate", "1e-4");
    draft.set("train.schedule", schedule)
}

fn sequence_length(draft: &mut Draft<'_>) -> bool {
    let least = 2 * draft.axes.context * draft.axes.tensor;
    let half = draft.sequence / 2;
    let fits = half.is_multiple_of(least) && !draft.has("parallel.max_seqlen_per_dp_cp_rank");
    let fits = fits && !draft.conflicts(&["train.sequence_warmup"]);
    fits && draft.set("train.sequence_length", half)
}

fn batch_warmup(draft: &mut Draft<'_>) -> bool {
    if draft.axes.pipeline > 1
        || draft.micro_batches == 1
        || draft.has("parallel.overlap_moe_expert_parallel_comm")
    {
        return false;
    }
    let samples = draft.axes.data * draft.micro_batch_size;
    draft.set(
        "train.batch_warmup",
        format_args!("[{{ until_step = 1, global_batch_size = {samples} }}]"),
    )
}

fn sequence_warmup(draft: &mut Draft<'_>) -> bool {
    let least = 2 * draft.axes.context * draft.axes.tensor;
    let half = draft.sequence / 2;
    let fits = half.is_multiple_of(least) && !draft.has("train.sequence_length");
    let is_refused = draft.has("parallel.hybrid_context_parallel") || draft.is_packed();
    fits && !is_refused
        && draft.set(
            "train.sequence_warmup",
            format_args!("[{{ until_step = 1, length = {half} }}]"),
        )
}

fn check_replicas_every(draft: &mut Draft<'_>) -> bool {
    draft.axes.tensor > 1 && draft.set("train.check_replicas_every", 1)
}

fn check_replay_every(draft: &mut Draft<'_>) -> bool {
    !draft.conflicts(&["parallel.hybrid_context_parallel"])
        && draft.set("train.check_replay_every", 1)
}

fn deterministic(draft: &mut Draft<'_>) -> bool {
    draft.set("train.deterministic", true)
}

fn log_num_zeros_in_grad(draft: &mut Draft<'_>) -> bool {
    draft.set("train.log_num_zeros_in_grad", true)
}

fn log_max_attention_logit(draft: &mut Draft<'_>) -> bool {
    !draft.is("parallel.context_split", "zigzag-per-document")
        && draft.set("train.log_max_attention_logit", true)
}

fn evaluate_every(draft: &mut Draft<'_>) -> bool {
    draft.set("train.evaluate_every", 1)
}

fn sample(draft: &mut Draft<'_>) -> bool {
    if draft.has("model.mtp") && draft.random.once_in(2) {
        draft.set("sample.speculative", true);
    }
    draft.set_text("sample.prompt", "fn");
    draft.set("sample.tokens", 5)
}

fn sample_with_limits(draft: &mut Draft<'_>) -> bool {
    sample(draft);
    draft.set("sample.temperature", 0.9);
    draft.set("sample.top_k", 40);
    draft.set("sample.top_p", 0.9);
    draft.set("sample.seed", 3);
    draft.set("sample.stop", "[\"zz\"]")
}

fn kernels(draft: &mut Draft<'_>) -> bool {
    let operations = [
        "norm",
        "activation",
        "dropout",
        "rope",
        "softmax",
        "loss",
        "linear",
        "optimizer",
    ];
    let operation = draft.random.one_of(&operations);
    let is_refused = draft.conflicts(&["parallel.hybrid_context_parallel", "memory"])
        || operation == "optimizer" && draft.has("train.optimizer.name")
        || operation == "loss" && draft.has("kernels.loss_chunk_size");
    !is_refused && draft.set_text(&format!("kernels.{operation}"), "unfused")
}

fn attention_kernel(draft: &mut Draft<'_>) -> bool {
    let is_refused = draft.needs_fused_attention() || draft.conflicts(&["memory"]);
    let choice = draft.random.one_of(&["unfused", "unfused", "portable"]);
    !is_refused && draft.set_text("kernels.attention", choice)
}

fn loss_chunk_size(draft: &mut Draft<'_>) -> bool {
    let size = draft.random.one_of(&[1, 5, 0]);
    !draft.conflicts(&["kernels.loss"]) && draft.set("kernels.loss_chunk_size", size)
}
