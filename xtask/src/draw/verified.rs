//! Draws settings that a run on the CPU in f64 refuses, or settings that add rounding. Only `verify` compares them
//! with one rank.

use super::{Draft, Feature, Settings};

/// The keys and tables that only `verify` compares.
const KEYS: [&str; 5] = [
    "fp8",
    "parallel.fp8_transfers",
    "data_parallel.fp8_param_gather",
    "train.cuda_graph",
    "kernels.epilogue_fusion",
];

/// Returns whether only `verify` compares a recipe with one rank.
pub fn is_for_verify_alone(settings: &Settings) -> bool {
    KEYS.iter().any(|key| settings.has(key))
}

pub const FEATURES: &[Feature] = &[
    fp8,
    fp8,
    fp8_transfers,
    fp8_param_gather,
    cuda_graph,
    epilogue_fusion,
];

fn fp8(draft: &mut Draft<'_>) -> bool {
    // If a layout rounds different values, a router selects different experts. Groups by length have different
    // micro-batches than one rank, and scales depend on micro-batches.
    let others = [
        "parallel.tp_comm_overlap",
        "model.moe",
        "parallel.hybrid_context_parallel",
    ];
    if others.iter().any(|key| draft.has(key)) {
        return false;
    }
    let recipes = [
        "\"delayed\"",
        "\"current\"",
        "\"blockwise\"",
        "\"mxfp8\"",
        "{ delayed = { history = 2, margin = 1, amax = \"most-recent\" } }",
        "{ current = { power_of_two = true } }",
    ];
    let recipe = draft.random.one_of(&recipes);
    match draft.random.below(4) {
        0 if draft.layers > 2 => drop(draft.set("fp8.first_last_bf16", 1)),
        1 => drop(draft.set("fp8.save_activations", false)),
        2 if recipe.contains("delayed") => drop(draft.set_text("fp8.format", "e4m3")),
        _ => drop(draft.set(
            "fp8.layers",
            "[{ pattern = \"blocks.*.mlp.**\", recipe = \"current\" }]",
        )),
    }
    draft.set("fp8.recipe", recipe)
}

fn fp8_transfers(draft: &mut Draft<'_>) -> bool {
    draft.axes.pipeline > 1 && !draft.has("model.moe") && draft.set("parallel.fp8_transfers", true)
}

fn fp8_param_gather(draft: &mut Draft<'_>) -> bool {
    let is_refused = draft.conflicts(&["lora", "data_parallel.hsdp", "memory.offload"]);
    if is_refused || !draft.shards() || !fp8(draft) {
        return false;
    }
    draft.set_text("fp8.recipe", "delayed");
    draft.set("data_parallel.fp8_param_gather", true)
}

fn cuda_graph(draft: &mut Draft<'_>) -> bool {
    let axes = draft.axes;
    let is_refused = axes.pipeline * axes.tensor * axes.context > 1
        || draft.conflicts(&[
            "model.moe",
            "model.mtp",
            "memory",
            "lora",
            "parallel.hybrid_context_parallel",
        ]);
    !is_refused && draft.set("train.cuda_graph", true)
}

fn epilogue_fusion(draft: &mut Draft<'_>) -> bool {
    let is_refused = draft.conflicts(&["model.activation", "model.moe", "lora"]);
    let has_gelu = draft.is("model.family", "gpt2") && !is_refused;
    has_gelu && draft.set("kernels.epilogue_fusion", true)
}
