//! Settings that `verify` tries on its small transformers.

use burn_megatron::data_parallel::Moments;
use burn_megatron::kernel_selection::{EpilogueFusion, KernelChoice, KernelChoices};
use burn_megatron::nn::moe::{DispatcherKind, Fp8DispatchScales};
use burn_megatron::optim::{
    AdamWConfig, MuonConfig, OptimizerConfig, ParameterGroup, QkClipConfig,
};
use burn_megatron::pipeline::split::LayerSplit;

use super::VerifyModel;
use crate::family::Model;
use crate::recipe::Recipe;

/// A setting that must not change the result, with a model and layouts in which it has an effect.
pub type SettingCase = (
    &'static str,
    VerifyModel,
    &'static [&'static str],
    fn(&mut Recipe),
);

pub const SETTINGS: [SettingCase; 30] = [
    (
        "overlap_grad_reduce = false",
        VerifyModel::Gpt,
        &["tp2-dp2-mb2", "dp4-mb1-z2"],
        |recipe| recipe.data_parallel.overlap_grad_reduce = false,
    ),
    (
        "hierarchical_reduce",
        VerifyModel::Llama,
        &[
            "dp4-mb1-node2",
            "tp2-dp4-mb1-node4",
            "pp2-dp4-mb2-node2/1f1b",
        ],
        |recipe| {
            recipe.data_parallel.hierarchical_reduce = true;
            recipe.data_parallel.bucket_size = Some(700);
        },
    ),
    (
        "hierarchical_reduce of experts",
        VerifyModel::Mixtral,
        &["ep2-dp4-mb1-node2", "ep2-dp8-mb1-node4"],
        |recipe| recipe.data_parallel.hierarchical_reduce = true,
    ),
    (
        "overlap_param_gather",
        VerifyModel::Llama,
        &["dp4-mb1-z1", "tp2-dp2-mb2-z2", "pp2-dp2-mb1-z1/1f1b"],
        |recipe| recipe.data_parallel.overlap_param_gather = true,
    ),
    (
        "keep_gathered",
        VerifyModel::GptUntied,
        &["dp4-mb1-z3", "tp2-pp2-dp2-mb1-z3/1f1b"],
        |recipe| recipe.data_parallel.keep_gathered = true,
    ),
    (
        "bucket_size = 700",
        VerifyModel::LlamaTied,
        &["dp4-mb1", "tp2-dp2-mb2-z1", "dp4-mb1-z3"],
        |recipe| recipe.data_parallel.bucket_size = Some(700),
    ),
    (
        "context with dropout",
        VerifyModel::Gpt,
        &["cp2-allgather-dp1-mb2", "tp2-sp-cp2-alltoall-dp1-mb2"],
        |_| (),
    ),
    (
        "context with a window",
        VerifyModel::LlamaTied,
        &["cp4-ring-dp1-mb4", "cp2-ring-striped-dp2-mb2"],
        |_| (),
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
        |_| (),
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
        |_| (),
    ),
    ("pad_buckets", VerifyModel::Gpt, &["dp4-mb1-z1"], |recipe| {
        recipe.data_parallel.pad_buckets = true
    }),
    (
        "split by its ends",
        VerifyModel::LlamaTied,
        &["pp4-mb1/1f1b", "tp2-pp2-mb2/interleaved"],
        |recipe| {
            let (first, last) = (Some(1), Some(1));
            recipe.parallel.split = LayerSplit::Ends { first, last };
        },
    ),
    (
        "split by a layout",
        VerifyModel::Gpt,
        &["pp2-dp2-mb1/1f1b"],
        |recipe| recipe.parallel.split = LayerSplit::Layout("Et*5|t*3,L".into()),
    ),
    (
        "defer_embedding_wgrad = 2",
        VerifyModel::Gpt,
        &["pp2-mb1/1f1b", "tp2-pp2-dp2-mb1-z1/gpipe"],
        |recipe| recipe.parallel.defer_embedding_wgrad = Some(2),
    ),
    (
        "receives_ahead = 0",
        VerifyModel::Gpt,
        &["pp2-mb1/1f1b", "tp2-pp2-dp2-mb1-z1/zb-v"],
        |recipe| recipe.parallel.receives_ahead = Some(0),
    ),
    (
        "receives_ahead = 3",
        VerifyModel::Llama,
        &["pp4-mb1/eager-1f1b", "tp2-pp2-dp2-mb1/interleaved"],
        |recipe| recipe.parallel.receives_ahead = Some(3),
    ),
    (
        "fp8_transfers",
        VerifyModel::Gpt,
        &["pp2-mb1/1f1b", "tp2-pp2-dp2-mb1-z1/interleaved"],
        |recipe| recipe.parallel.fp8_transfers = true,
    ),
    (
        "hybrid_context_parallel",
        VerifyModel::Llama,
        &["hybrid8-dp2-mb1", "tp2-sp-cp2-hybrid8-dp2-mb1-z1"],
        |_| (),
    ),
    (
        "loss_chunk_size = 5",
        VerifyModel::Gpt,
        &["tp2-sp-dp2-mb2", "pp2-dp2-mb1/zb-h1", "dp4-mb2-z3"],
        |recipe| recipe.kernels.loss_chunk_size = Some(5),
    ),
    (
        "kernels unfused",
        VerifyModel::Llama,
        &["tp2-sp-dp2-mb1", "pp2-mb2/zb-h1", "dp4-mb1-z3"],
        |recipe| recipe.kernels = KernelChoices::all(KernelChoice::Unfused),
    ),
    (
        "kernels.epilogue_fusion",
        VerifyModel::Gpt,
        &["tp2-sp-dp2-mb2-z1", "tp2-pp2-mb2/zb-h1", "dp4-mb1-z3"],
        |recipe| recipe.kernels.epilogue_fusion = EpilogueFusion::On,
    ),
    (
        "train.cuda_graph",
        VerifyModel::Gpt,
        &["dp4-mb1", "dp2-mb1-z1", "dp2-mb2-z2"],
        |recipe| recipe.train.cuda_graph = true,
    ),
    (
        "unclipped, with parameter groups",
        VerifyModel::GptUntied,
        &["tp2-sp-dp2-mb1-z1", "pp2-mb2/1f1b"],
        |recipe| {
            recipe.train.clip = f64::INFINITY;
            let group = |pattern: &str, weight_decay, learning_rate| ParameterGroup {
                pattern: pattern.into(),
                weight_decay,
                learning_rate,
                optimizer: None,
            };
            recipe.train.optimizer = OptimizerConfig::AdamW(AdamWConfig {
                groups: vec![
                    group("embedding.*", Some(0.0), None),
                    group("blocks.*.mlp.**", None, Some(0.5)),
                ],
                ..AdamWConfig::default()
            });
        },
    ),
    (
        "train.optimizer.name = \"muon\"",
        VerifyModel::Llama,
        &["tp2-sp-dp2-mb1-z1", "tp2-pp2-dp2-mb1-z3/1f1b"],
        |recipe| recipe.train.optimizer = OptimizerConfig::Muon(MuonConfig::default()),
    ),
    (
        "train.qk_clip.threshold = 0.001",
        VerifyModel::LlamaTied,
        &["tp2-sp-dp2-mb1-z1", "tp2-pp2-dp2-mb1-z3/1f1b"],
        |recipe| {
            recipe.train.qk_clip = Some(QkClipConfig {
                threshold: 1e-3,
                ..QkClipConfig::default()
            });
        },
    ),
    (
        "train.check_replay_every = 1",
        VerifyModel::Llama,
        &["tp2-sp-dp2-mb1-z1", "tp2-pp2-dp2-mb1-z3/1f1b"],
        |recipe| recipe.train.check_replay_every = Some(1),
    ),
    (
        "memory.offload.optimizer = 0.5",
        VerifyModel::Gpt,
        &["dp4-mb1", "tp2-dp2-mb2-z2", "tp2-pp2-dp2-mb1-z3/1f1b"],
        |recipe| {
            recipe.data_parallel.bucket_size = Some(700);
            recipe.memory.offload.optimizer = 0.5;
        },
    ),
    (
        "fp8 delayed, fp8_param_gather",
        VerifyModel::Llama,
        &["dp4-mb1-z1", "tp2-dp2-mb1-z2"],
        |recipe| {
            recipe.fp8.recipe = "delayed".parse().ok();
            recipe.data_parallel.fp8_param_gather = true;
        },
    ),
    (
        "model.moe.fp8_dispatch = \"f32\"",
        VerifyModel::Olmoe,
        FP8_DISPATCH_LAYOUTS,
        |recipe| dispatch_in_8_bits(recipe, Fp8DispatchScales::F32),
    ),
    (
        "model.moe.fp8_dispatch = \"e8m0\"",
        VerifyModel::MixtralShared,
        FP8_DISPATCH_LAYOUTS,
        |recipe| dispatch_in_8_bits(recipe, Fp8DispatchScales::E8m0),
    ),
];

/// On one node and on two.
const FP8_DISPATCH_LAYOUTS: &[&str] = &[
    "ep2-dp2-mb2",
    "tp2-sp-ep2-etp2-dp2-mb2",
    "ep4-dp4-mb1-node2",
    "tp2-sp-ep4-dp4-mb1-z1-node4",
    "ep4-pp2-dp4-mb1-z1-node2/1f1b",
];

/// Tokens travel to experts in 8 bits, by the flex dispatcher. Models without experts stay as they are.
fn dispatch_in_8_bits(recipe: &mut Recipe, scales: Fp8DispatchScales) {
    let config = recipe.model.as_transformer().cloned();
    if let Some(mut config) = config
        && let Some(moe) = &mut config.moe
    {
        moe.dispatcher = DispatcherKind::Flex;
        moe.fp8_dispatch = Some(scales);
        recipe.model = Model::transformer(config);
    }
}

/// Settings for 16-bit types, for `--all`.
pub const IN_16_BITS: [SettingCase; 1] = [(
    "reduce_in_16_bits, moments = bf16",
    VerifyModel::Llama,
    &["dp4-mb1-z1", "tp2-dp2-mb2-z2", "dp4-mb1-z3"],
    |recipe| {
        recipe.data_parallel.reduce_in_16_bits = true;
        recipe.data_parallel.moments = Moments::Bf16;
    },
)];
