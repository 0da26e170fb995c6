//! Settings that `verify` tests on its small transformers.

use toml::Table;

use super::VerifyModel;
use crate::error::Error;
use crate::recipe::Recipe;
use crate::settings::keys::remove;

/// Settings that must not change the result: a name, a model and layouts in which they have an effect, and their keys
/// in TOML.
pub type SettingCase = (
    &'static str,
    VerifyModel,
    &'static [&'static str],
    &'static str,
);

pub const SETTINGS: [SettingCase; 30] = [
    (
        "overlap_grad_reduce = false",
        VerifyModel::Gpt,
        &["tp2-dp2-mb2", "dp4-mb1-z2"],
        "data_parallel.overlap_grad_reduce = false",
    ),
    (
        "hierarchical_reduce",
        VerifyModel::Llama,
        &[
            "dp4-mb1-node2",
            "tp2-dp4-mb1-node4",
            "pp2-dp4-mb2-node2/1f1b",
        ],
        "data_parallel = { hierarchical_reduce = true, bucket_size = 700 }",
    ),
    (
        "hierarchical_reduce of experts",
        VerifyModel::Mixtral,
        &["ep2-dp4-mb1-node2", "ep2-dp8-mb1-node4"],
        "data_parallel.hierarchical_reduce = true",
    ),
    (
        "overlap_param_gather",
        VerifyModel::Llama,
        &["dp4-mb1-z1", "tp2-dp2-mb2-z2", "pp2-dp2-mb1-z1/1f1b"],
        "data_parallel.overlap_param_gather = true",
    ),
    (
        "keep_gathered",
        VerifyModel::GptUntied,
        &["dp4-mb1-z3", "tp2-pp2-dp2-mb1-z3/1f1b"],
        "data_parallel.keep_gathered = true",
    ),
    (
        "bucket_size = 700",
        VerifyModel::LlamaTied,
        &["dp4-mb1", "tp2-dp2-mb2-z1", "dp4-mb1-z3"],
        "data_parallel.bucket_size = 700",
    ),
    (
        "context with dropout",
        VerifyModel::Gpt,
        &["cp2-allgather-dp1-mb2", "tp2-sp-cp2-alltoall-dp1-mb2"],
        "",
    ),
    (
        "context with a window",
        VerifyModel::LlamaTied,
        &["cp4-ring-dp1-mb4", "cp2-ring-striped-dp2-mb2"],
        "",
    ),
    (
        "tp_comm_overlap",
        VerifyModel::Llama,
        &[
            "tp2-sp-tpring-dp2-mb2",
            "tp4-sp-tpring-dp1-mb4",
            "tp4-sp-tpbulk2-dp1-mb4",
            "tp2-sp-tpbulk-pp2-dp2-mb1-z1/zb-h1",
            "tp2-sp-tpring-dp2-mb2-z3",
            "tp2-sp-tpbulk4-ep2-dp2-mb2",
        ],
        "",
    ),
    (
        "overlap_moe_expert_parallel_comm",
        VerifyModel::MixtralShared,
        &[
            "ep2-epoverlap-dp2-mb1",
            "tp2-sp-ep2-epoverlap-dp2-mb1-z2",
            "ep2-epoverlap-pp2-dp2-mb1/1f1b",
            "ep2-etp2-epoverlap-pp2-dp4-mb1-z1/interleaved",
            "ep2-epoverlap-pp2-dp2-mb1/dualpipe-v",
        ],
        "",
    ),
    (
        "pad_buckets",
        VerifyModel::Gpt,
        &["dp4-mb1-z1"],
        "data_parallel.pad_buckets = true",
    ),
    (
        "split by its ends",
        VerifyModel::LlamaTied,
        &["pp4-mb1/1f1b", "tp2-pp2-mb2/interleaved"],
        "parallel.split.ends = { first = 1, last = 1 }",
    ),
    (
        "split by a layout",
        VerifyModel::Gpt,
        &["pp2-dp2-mb1/1f1b"],
        "parallel.split.layout = 'Et*5|t*3,L'",
    ),
    (
        "defer_embedding_wgrad = 2",
        VerifyModel::Gpt,
        &["pp2-mb1/1f1b", "tp2-pp2-dp2-mb1-z1/gpipe"],
        "parallel.defer_embedding_wgrad = 2",
    ),
    (
        "receives_ahead = 0",
        VerifyModel::Gpt,
        &["pp2-mb1/1f1b", "tp2-pp2-dp2-mb1-z1/zb-v"],
        "parallel.receives_ahead = 0",
    ),
    (
        "receives_ahead = 3",
        VerifyModel::Llama,
        &["pp4-mb1/eager-1f1b", "tp2-pp2-dp2-mb1/interleaved"],
        "parallel.receives_ahead = 3",
    ),
    (
        "fp8_transfers",
        VerifyModel::Gpt,
        &["pp2-mb1/1f1b", "tp2-pp2-dp2-mb1-z1/interleaved"],
        "parallel.fp8_transfers = true",
    ),
    (
        "hybrid_context_parallel",
        VerifyModel::Llama,
        &["hybrid8-dp2-mb1", "tp2-sp-cp2-hybrid8-dp2-mb1-z1"],
        "",
    ),
    (
        "loss_chunk_size = 5",
        VerifyModel::Gpt,
        &["tp2-sp-dp2-mb2", "pp2-dp2-mb1/zb-h1", "dp4-mb2-z3"],
        "kernels.loss_chunk_size = 5",
    ),
    (
        "kernels unfused",
        VerifyModel::Llama,
        &["tp2-sp-dp2-mb1", "pp2-mb2/zb-h1", "dp4-mb1-z3"],
        "[kernels]
        norm = 'unfused'
        activation = 'unfused'
        dropout = 'unfused'
        rope = 'unfused'
        attention = 'unfused'
        softmax = 'unfused'
        loss = 'unfused'
        linear = 'unfused'
        optimizer = 'unfused'",
    ),
    (
        "kernels.epilogue_fusion",
        VerifyModel::Gpt,
        &["tp2-sp-dp2-mb2-z1", "tp2-pp2-mb2/zb-h1", "dp4-mb1-z3"],
        "kernels.epilogue_fusion = true",
    ),
    (
        "train.cuda_graph",
        VerifyModel::Gpt,
        &["dp4-mb1", "dp2-mb1-z1", "dp2-mb2-z2"],
        "train.cuda_graph = true",
    ),
    (
        "unclipped, with parameter groups",
        VerifyModel::GptUntied,
        &["tp2-sp-dp2-mb1-z1", "pp2-mb2/1f1b"],
        "[train]
        clip = inf
        [[train.optimizer.groups]]
        pattern = 'embedding.*'
        weight_decay = 0.0
        [[train.optimizer.groups]]
        pattern = 'blocks.*.mlp.**'
        learning_rate = 0.5",
    ),
    (
        "train.optimizer.name = \"muon\"",
        VerifyModel::Llama,
        &["tp2-sp-dp2-mb1-z1", "tp2-pp2-dp2-mb1-z3/1f1b"],
        "train.optimizer.name = 'muon'",
    ),
    (
        "train.qk_clip.threshold = 0.001",
        VerifyModel::LlamaTied,
        &["tp2-sp-dp2-mb1-z1", "tp2-pp2-dp2-mb1-z3/1f1b"],
        "train.qk_clip.threshold = 0.001",
    ),
    (
        "train.check_replay_every = 1",
        VerifyModel::Llama,
        &["tp2-sp-dp2-mb1-z1", "tp2-pp2-dp2-mb1-z3/1f1b"],
        "train.check_replay_every = 1",
    ),
    (
        "memory.offload.optimizer = 0.5",
        VerifyModel::Gpt,
        &["dp4-mb1", "tp2-dp2-mb2-z2", "tp2-pp2-dp2-mb1-z3/1f1b"],
        "data_parallel.bucket_size = 700\nmemory.offload.optimizer = 0.5",
    ),
    (
        "fp8 delayed, fp8_param_gather",
        VerifyModel::Llama,
        &["dp4-mb1-z1", "tp2-dp2-mb1-z2"],
        "fp8.recipe = 'delayed'\ndata_parallel.fp8_param_gather = true",
    ),
    (
        "model.moe.fp8_dispatch = \"f32\"",
        VerifyModel::Olmoe,
        FP8_DISPATCH_LAYOUTS,
        "model.moe = { dispatcher = 'flex', fp8_dispatch = 'f32' }",
    ),
    (
        "model.moe.fp8_dispatch = \"e8m0\"",
        VerifyModel::MixtralShared,
        FP8_DISPATCH_LAYOUTS,
        "model.moe = { dispatcher = 'flex', fp8_dispatch = 'e8m0' }",
    ),
];

/// Layouts on one node and on several nodes.
const FP8_DISPATCH_LAYOUTS: &[&str] = &[
    "ep2-dp2-mb2",
    "tp2-sp-ep2-etp2-dp2-mb2",
    "ep4-dp4-mb1-node2",
    "tp2-sp-ep4-dp4-mb1-z1-node4",
    "ep4-pp2-dp4-mb1-z1-node2/1f1b",
];

/// Sets the keys of a case in a recipe. For models without experts, the keys of experts are ignored.
pub fn apply(recipe: &Recipe, keys: &str) -> Result<Recipe, Error> {
    let mut keys: Table = keys.parse()?;
    let has_experts = recipe
        .model
        .as_transformer()
        .is_some_and(|config| config.moe.is_some());
    if !has_experts {
        remove(&mut keys, "model.moe");
    }
    recipe.with_keys(&keys)
}

/// Settings for 16-bit types with `--all`.
pub const IN_16_BITS: [SettingCase; 1] = [(
    "reduce_in_16_bits, moments = bf16",
    VerifyModel::Llama,
    &["dp4-mb1-z1", "tp2-dp2-mb2-z2", "dp4-mb1-z3"],
    "data_parallel = { reduce_in_16_bits = true, moments = 'bf16' }",
)];
