//! Draws experts: `[model.moe]`, and the axes of the layout for experts.

use super::{Draft, Feature};

impl Draft<'_> {
    fn has_experts(&self) -> bool {
        self.has("model.moe")
    }

    fn expert_ranks(&self) -> usize {
        self.settings.number("parallel.expert").unwrap_or(1)
    }
}

/// Draws the number of experts and the number of ranks that share them.
pub fn base(draft: &mut Draft<'_>) {
    let axes = draft.axes;
    let ranks = axes.tensor * axes.sharing();
    let divides = |size: &usize| ranks.is_multiple_of(*size);
    let tensor = match draft.random.below(3) {
        0 => {
            let sizes: Vec<_> = [1, 2, 4].into_iter().filter(divides).collect();
            let size = draft.random.one_of(&sizes);
            draft.set("parallel.expert_tensor", size);
            size
        }
        _ => axes.tensor,
    };
    let sizes: Vec<_> = [1, 2, 2, 4]
        .into_iter()
        .filter(|size| divides(&(size * tensor)))
        .collect();
    let expert = draft.random.one_of(&sizes);
    if expert > 1 {
        draft.set("parallel.expert", expert);
    }
    let count = draft.random.one_of(&[4, 8]);
    let per_token = draft.random.one_of(&[1, 2, 2, 3]);
    draft.set("model.moe.experts", count);
    draft.set("model.moe.experts_per_token", per_token);
    draft.set("model.moe.expert_width", 8);
    if draft.is("model.family", "deepseek_v2") || draft.is("model.family", "deepseek_v3") {
        draft.set("model.moe.experts_per_token", 2);
        draft.set("model.moe.first_dense", usize::from(draft.layers > 1));
        draft.set("model.moe.shared_width", 8);
        set_groups(draft);
    }
}

/// Draws two groups. One of the groups is selected, so at least two experts remain.
fn set_groups(draft: &mut Draft<'_>) -> bool {
    let score = draft.random.one_of(&["\"max\"", "{ sum-of = 2 }"]);
    draft.set("model.moe.groups.groups", 2);
    draft.set("model.moe.groups.chosen", 1);
    draft.set("model.moe.groups.score", score)
}

pub const FEATURES: &[Feature] = &[
    every,
    first_dense,
    score,
    factor,
    choice,
    groups,
    bias_update_rate,
    jitter,
    router_bias,
    router_dtype,
    shared,
    losses,
    capacity,
    dispatcher,
    fp8_dispatch,
    overlap,
];

fn every(draft: &mut Draft<'_>) -> bool {
    draft.has_experts() && draft.layers > 1 && draft.set("model.moe.every", 2)
}

fn first_dense(draft: &mut Draft<'_>) -> bool {
    draft.has_experts() && draft.layers > 1 && draft.set("model.moe.first_dense", 1)
}

fn score(draft: &mut Draft<'_>) -> bool {
    let score = draft
        .random
        .one_of(&["softmax", "pre-softmax", "sigmoid", "sqrt-softplus"]);
    if draft.has_experts() && score == "sigmoid" {
        draft.set("model.moe.normalized", false);
    }
    draft.has_experts() && draft.set_text("model.moe.score", score)
}

fn factor(draft: &mut Draft<'_>) -> bool {
    draft.has_experts() && draft.set("model.moe.factor", 1.5)
}

fn choice(draft: &mut Draft<'_>) -> bool {
    let others = ["model.moe.groups", "model.moe.bias_update_rate"];
    let is_plain = draft.has_experts() && !draft.conflicts(&others);
    if !is_plain || draft.is("model.family", "deepseek_v3") {
        return false;
    }
    let choice = draft.random.one_of(&["sinkhorn", "round-robin"]);
    if choice == "sinkhorn" {
        draft.settings.remove("model.moe.capacity");
    }
    draft.set_text("model.moe.choice", choice)
}

fn groups(draft: &mut Draft<'_>) -> bool {
    let is_plain = draft.has_experts() && !draft.conflicts(&["model.moe.choice"]);
    let per_token = draft.settings.number("model.moe.experts_per_token");
    is_plain && per_token.is_some_and(|k| k <= 2) && set_groups(draft)
}

fn bias_update_rate(draft: &mut Draft<'_>) -> bool {
    draft.has_experts()
        && !draft.conflicts(&["model.moe.choice"])
        && draft.set("model.moe.bias_update_rate", 0.05)
}

fn jitter(draft: &mut Draft<'_>) -> bool {
    draft.has_experts() && draft.set("model.moe.jitter", 0.1)
}

fn router_bias(draft: &mut Draft<'_>) -> bool {
    draft.has_experts() && draft.set("model.moe.router_bias", true)
}

fn router_dtype(draft: &mut Draft<'_>) -> bool {
    draft.has_experts() && draft.set_text("model.moe.router_dtype", "f64")
}

fn shared(draft: &mut Draft<'_>) -> bool {
    if !draft.has_experts() {
        return false;
    }
    if draft.random.once_in(2) {
        draft.set("model.moe.shared_gate", true);
    }
    draft.set("model.moe.shared_width", 8)
}

/// Draws the losses of the router. A global balance is compared with one rank only if each rank has one micro-batch.
fn losses(draft: &mut Draft<'_>) -> bool {
    if !draft.has_experts() {
        return false;
    }
    let kinds: &[&str] = if draft.micro_batches == 1
        && !draft.has("model.moe.capacity")
        && !draft.has("model.moe.choice")
    {
        &["balance", "sequence-balance", "z-loss", "global-balance"]
    } else {
        &["balance", "sequence-balance", "z-loss"]
    };
    let kind = draft.random.one_of(kinds);
    let second = if kind == "balance" && draft.random.once_in(2) {
        ", { kind = \"z-loss\", coefficient = 0.01 }"
    } else {
        ""
    };
    draft.set(
        "model.moe.losses",
        format_args!("[{{ kind = \"{kind}\", coefficient = 0.05 }}{second}]"),
    )
}

/// Draws the expert capacity. Each rank drops tokens separately, so several ranks of a sequence drop different tokens
/// than one rank. An evaluation gives a data rank different samples than a step, so a micro-batch has one sample.
fn capacity(draft: &mut Draft<'_>) -> bool {
    let axes = draft.axes;
    let is_plain = axes.tensor * axes.context == 1 && !draft.has("model.moe.choice");
    if !draft.has_experts()
        || !is_plain
        || draft
            .settings
            .get("model.moe.losses")
            .is_some_and(|it| it.contains("global"))
    {
        return false;
    }
    let keep = draft.random.one_of(&["largest-weights", "first"]);
    let factor = draft.random.one_of(&["0.5", "1.0", "2.0"]);
    let is_padded = draft.random.once_in(2) && !draft.has("model.moe.dispatcher");
    draft.micro_batch_size = 1;
    draft.set("model.moe.capacity.pad", is_padded);
    draft.set("model.moe.capacity.factor", factor);
    draft.set_text("model.moe.capacity.keep", keep)
}

fn dispatcher(draft: &mut Draft<'_>) -> bool {
    if !draft.has_experts() || draft.is("model.moe.capacity.pad", "true") {
        return false;
    }
    let is_paired = draft.has("parallel.overlap_moe_expert_parallel_comm");
    let dispatcher = if is_paired {
        "flex"
    } else {
        draft.random.one_of(&["all-gather", "flex", "flex"])
    };
    draft.set_text("model.moe.dispatcher", dispatcher);
    let ranks = draft.axes.ranks();
    let node = draft.random.one_of(&[2, 4]);
    if dispatcher == "flex" && draft.random.once_in(2) && node < ranks && ranks.is_multiple_of(node)
    {
        draft.set("parallel.ranks_per_node", node);
    }
    true
}

/// Draws FP8 dispatch. A token is rounded once, independent of the ranks of its experts, so it has the same bits in
/// every layout.
fn fp8_dispatch(draft: &mut Draft<'_>) -> bool {
    if !draft.has_experts() || draft.is("model.moe.capacity.pad", "true") {
        return false;
    }
    draft.set_text("model.moe.dispatcher", "flex");
    let scales = draft.random.one_of(&["f32", "e8m0"]);
    draft.set_text("model.moe.fp8_dispatch", scales)
}

fn overlap(draft: &mut Draft<'_>) -> bool {
    let pairs = ["1f1b", "interleaved", "dualpipe-v"];
    let has_pairs =
        draft.axes.pipeline == 1 || pairs.iter().any(|it| draft.is("parallel.schedule", it));
    if draft.expert_ranks() == 1 || !has_pairs || draft.conflicts(&["memory.recompute"]) {
        return false;
    }
    if draft.is("model.moe.dispatcher", "all-gather") {
        return false;
    }
    if draft.axes.pipeline == 1 {
        draft.micro_batches = draft.micro_batches.max(2);
    }
    draft.set("parallel.overlap_moe_expert_parallel_comm", true)
}
