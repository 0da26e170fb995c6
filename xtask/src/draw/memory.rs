//! Draws settings that save memory: `[memory]`.

use super::{Draft, Feature};

pub const FEATURES: &[Feature] = &[
    full,
    full_of_stages,
    selective,
    patterns,
    offload_optimizer,
    offload_activations,
];

impl Draft<'_> {
    fn may_recompute(&self) -> bool {
        let others = [
            "parallel.overlap_moe_expert_parallel_comm",
            "lora",
            "kernels",
        ];
        !self.has("memory.recompute") && !self.conflicts(&others)
    }

    fn layers_of_stage(&self) -> usize {
        self.layers / (self.axes.pipeline * self.axes.stages)
    }
}

fn full(draft: &mut Draft<'_>) -> bool {
    if !draft.may_recompute() {
        return false;
    }
    if draft.random.once_in(2) {
        let method = draft.random.one_of(&["uniform", "block"]);
        draft.set_text("memory.recompute.method", method);
        let layers = draft.random.within((1, draft.layers_of_stage()));
        draft.set("memory.recompute.layers", layers);
    }
    let is_deep = draft.axes.pipeline > 1 && draft.micro_batches > 1;
    if is_deep && draft.random.once_in(3) {
        draft.set("memory.recompute.micro_batches", 1);
    }
    draft.set_text("memory.recompute.granularity", "full")
}

fn full_of_stages(draft: &mut Draft<'_>) -> bool {
    let stages = draft.axes.pipeline * draft.axes.stages;
    if stages == 1 || !draft.may_recompute() {
        return false;
    }
    let layers = draft.random.within((1, draft.layers_of_stage()));
    let each = vec![layers.to_string(); stages].join(", ");
    draft.set("memory.recompute.layers", format_args!("[{each}]"));
    draft.set_text("memory.recompute.method", "block");
    draft.set_text("memory.recompute.granularity", "full")
}

fn selective(draft: &mut Draft<'_>) -> bool {
    if !draft.may_recompute() {
        return false;
    }
    let modules: &[&str] = match (draft.has("model.moe"), draft.is_latent()) {
        (false, false) => &[
            "\"norm\"",
            "\"activation\"",
            "\"norm\", \"activation\"",
            "\"mlp\"",
            "\"core_attention\"",
        ],
        (true, false) => &[
            "\"moe\"",
            "\"norm\"",
            "\"activation\"",
            "\"core_attention\"",
        ],
        (true, true) => &["\"moe\"", "\"mla_up_proj\"", "\"activation\""],
        (false, true) => &["\"mla_up_proj\"", "\"mlp\"", "\"activation\""],
    };
    let modules = draft.random.one_of(modules);
    let shared = if draft.has("model.moe.shared_width") {
        ", \"shared_experts\""
    } else {
        ""
    };
    let shared = if modules.contains("moe") { "" } else { shared };
    draft.set(
        "memory.recompute.modules",
        format_args!("[{modules}{shared}]"),
    );
    draft.set_text("memory.recompute.granularity", "selective")
}

fn patterns(draft: &mut Draft<'_>) -> bool {
    if !draft.may_recompute() {
        return false;
    }
    let pattern = draft
        .random
        .one_of(&["blocks.0", "blocks.*.attention", "blocks.*"]);
    draft.set("memory.recompute.patterns", format_args!("[{pattern:?}]"));
    draft.set_text("memory.recompute.granularity", "selective")
}

fn offload_optimizer(draft: &mut Draft<'_>) -> bool {
    let is_refused =
        draft.has("train.optimizer.name") && !draft.is("train.optimizer.name", "adamw");
    if is_refused || draft.conflicts(&["kernels.optimizer"]) {
        return false;
    }
    let fraction = draft.random.one_of(&["0.5", "1.0"]);
    draft.set("memory.offload.optimizer", fraction)
}

fn offload_activations(draft: &mut Draft<'_>) -> bool {
    if !draft.is("memory.recompute.granularity", "full") {
        return false;
    }
    if draft.random.once_in(2) {
        draft.set("memory.offload.prefetch", 2);
    }
    let bytes = draft.random.one_of(&[4096, 1_000_000]);
    draft.set("memory.offload.activations", bytes)
}
