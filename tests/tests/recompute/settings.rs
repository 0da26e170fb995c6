//! The settings of recomputation, layout and model.

use burn_megatron::data_parallel::ZeroStage;
use burn_megatron::mesh::{ContextExchange, ParallelConfig, TpCommOverlap};
use burn_megatron::nn::moe::{Capacity, KeepPolicy, RouterLoss, RouterLossKind};
use burn_megatron::nn::{
    Activation, ActivationOffload, NormKind, QkNorm, RecomputeConfig, RecomputeLayers,
    RecomputeMethod, RecomputeModule,
};
use burn_megatron::pipeline::schedule::ScheduleKind;
use burn_megatron_models::{MlaConfig, MoeConfig, Positions, TransformerConfig};
use burn_megatron_tests::pairwise::{Row, Settings, value};

use super::LAYERS;

/// The name and the values of each setting.
pub const SETTINGS: Settings<5> = [
    (
        "recompute",
        &[
            "uniform 1",
            "uniform 2",
            "per stage",
            "some in flight",
            "mlp or moe",
            "norm, mlp or moe",
            "core attention",
            "norm, activation",
            "patterns",
            "all parts",
        ],
    ),
    (
        "offload",
        &["none", "all, 1 ahead", "all, when needed", "1 KiB, 3 ahead"],
    ),
    (
        "layout",
        &[
            "tp2",
            "tp2 sp",
            "tp2 ring",
            "cp2",
            "ep2",
            "zero3",
            "gpipe",
            "1f1b",
            "interleaved",
            "zb-h1",
            "zb-v",
            "dualpipe-v",
        ],
    ),
    (
        "model",
        &["llama", "gpt", "gpt dropout", "experts", "latent"],
    ),
    ("type", &["f32", "bf16", "fp8"]),
];

/// A row with access to its values by name.
#[derive(Clone, Copy)]
pub struct Case(pub Row<5>);

impl Case {
    pub fn value(&self, setting: &str) -> &'static str {
        value(&SETTINGS, &self.0, setting)
    }

    pub fn schedule(&self) -> Option<ScheduleKind> {
        Some(match self.value("layout") {
            "gpipe" => ScheduleKind::GPipe,
            "1f1b" => ScheduleKind::OneFOneB,
            "interleaved" => ScheduleKind::Interleaved { group: None },
            "zb-h1" => ScheduleKind::ZbH1,
            "zb-v" => ScheduleKind::ZbV,
            "dualpipe-v" => ScheduleKind::DualPipeV,
            _ => return None,
        })
    }

    pub fn layout(&self) -> ParallelConfig {
        let layout = ParallelConfig::new().with_data(1);
        match self.value("layout") {
            "tp2" => layout.with_tensor(2),
            "tp2 ring" => layout
                .with_tensor(2)
                .with_sequence_parallel(true)
                .with_tp_comm_overlap(TpCommOverlap::Ring),
            "tp2 sp" => layout.with_tensor(2).with_sequence_parallel(true),
            "cp2" => ParallelConfig {
                context: 2,
                context_exchange: Some(match self.value("model") {
                    "latent" => ContextExchange::AllGather,
                    _ => ContextExchange::Ring,
                }),
                ..layout
            },
            "ep2" => layout.with_data(2).with_expert(2),
            "zero3" => ParallelConfig {
                zero_stage: ZeroStage::Parameters,
                ..layout.with_data(2)
            },
            _ => match self.schedule() {
                Some(kind) => ParallelConfig {
                    schedule: Some(kind.into()),
                    ..layout.with_pipeline(2)
                },
                None => layout,
            },
        }
    }

    /// Returns the number of stages of the layout.
    pub fn stages(&self) -> usize {
        match self.value("layout") {
            "interleaved" | "zb-v" | "dualpipe-v" => 4,
            _ if self.schedule().is_some() => 2,
            _ => 1,
        }
    }

    pub fn is_valid(&self) -> bool {
        let (mode, model) = (self.value("recompute"), self.value("model"));
        let has_experts = model == "experts";
        let of_stage = LAYERS / self.stages();
        [
            !has_experts && self.value("layout") == "ep2",
            of_stage < 2 && mode == "uniform 2",
            mode == "some in flight" && self.stages() == 1,
            // Both are recomputed from tensors that are kept anyway.
            mode == "norm, activation" && self.value("offload") != "none",
            // The inputs of its projections are not the inputs of a block.
            mode == "core attention" && model == "latent" && self.value("offload") != "none",
            // FP8 layers have no chunked exchanges.
            self.value("layout") == "tp2 ring" && self.value("type") == "fp8",
            // Dropout of the probabilities needs them in memory, which a ring does not have.
            self.value("layout") == "cp2" && model == "gpt dropout",
        ]
        .iter()
        .all(|refused| !refused)
    }

    pub fn recompute(&self) -> RecomputeConfig {
        use RecomputeModule::{
            Activation, CoreAttention, MlaUpProjection, Mlp, Moe, Norm, SharedExperts,
        };
        let has_experts = self.value("model") == "experts";
        let (attention, path) = match self.value("model") {
            "latent" => (MlaUpProjection, "blocks.*.mla"),
            _ => (CoreAttention, "blocks.*.attention"),
        };
        let mlp = if has_experts { Moe } else { Mlp };
        let full = RecomputeConfig::full;
        let config = match self.value("recompute") {
            "uniform 1" => full(RecomputeMethod::Uniform, 1),
            "uniform 2" => full(RecomputeMethod::Uniform, 2),
            "per stage" => RecomputeConfig {
                layers: Some(RecomputeLayers::PerStage(
                    (0..self.stages()).map(|stage| (stage + 1) % 2).collect(),
                )),
                ..full(RecomputeMethod::Block, 1)
            },
            "some in flight" => RecomputeConfig {
                micro_batches: Some(1),
                ..full(RecomputeMethod::Uniform, 1)
            },
            "mlp or moe" => RecomputeConfig::selective([mlp]),
            "norm, mlp or moe" => RecomputeConfig::selective([Norm, mlp]),
            "core attention" => RecomputeConfig::selective([attention]),
            "norm, activation" => RecomputeConfig::selective([Norm, Activation]),
            "patterns" => RecomputeConfig {
                patterns: vec!["blocks.1".into(), path.into()],
                ..RecomputeConfig::selective([])
            },
            // Nested modules.
            _ if has_experts => {
                RecomputeConfig::selective([Norm, Activation, Moe, SharedExperts, attention])
            }
            _ => RecomputeConfig::selective([Norm, Activation, Mlp, attention]),
        };
        RecomputeConfig {
            offload: self.offload(),
            ..config
        }
    }

    fn offload(&self) -> ActivationOffload {
        let (bytes, prefetch) = match self.value("offload") {
            "none" => (0, 1),
            "all, 1 ahead" => (1 << 30, 1),
            "all, when needed" => (1 << 30, 0),
            // Inputs have at least 512 bytes.
            _ => (1024, 3),
        };
        ActivationOffload { bytes, prefetch }
    }

    pub fn model(&self) -> TransformerConfig {
        let dropout = if self.value("model") == "gpt dropout" {
            0.2
        } else {
            0.0
        };
        let gpt = TransformerConfig {
            vocabulary: 21,
            context: 8,
            hidden: 16,
            layers: LAYERS,
            heads: 4,
            init_std: 0.2,
            dropout,
            attention_dropout: dropout,
            ..TransformerConfig::gpt2()
        };
        if self.value("model").starts_with("gpt") {
            return gpt;
        }
        let llama = TransformerConfig {
            groups: Some(2),
            norm: NormKind::Rms,
            activation: Activation::SwiGlu,
            positions: Positions::rotary(10_000.0),
            bias: false,
            tied: false,
            mlp_width: Some(24),
            qk_norm: Some(QkNorm::Whole),
            post_norms: true,
            logit_soft_cap: Some(2.0),
            // Only dropout of the streams: fused attention has no dropout.
            dropout: 0.1,
            ..gpt
        };
        match self.value("model") {
            "llama" => return llama,
            "latent" => {
                return TransformerConfig {
                    groups: None,
                    qk_norm: None,
                    mla: Some(MlaConfig {
                        q_rank: Some(12),
                        kv_rank: 8,
                        nope_width: 4,
                        rope_width: 4,
                        value_width: 4,
                        norm_epsilon: 1e-6,
                    }),
                    ..llama
                };
            }
            _ => {}
        }
        use RouterLossKind::{Balance, GlobalBalance, ZLoss};
        let loss = |kind| RouterLoss {
            kind,
            coefficient: 0.05,
        };
        TransformerConfig {
            bias: true,
            sinks: true,
            activation: Activation::ClampedSwiGlu,
            moe: Some(MoeConfig {
                router_bias: true,
                experts: 4,
                expert_width: Some(8),
                shared_width: Some(8),
                shared_gate: true,
                jitter: 0.1,
                losses: [Balance, GlobalBalance, ZLoss].map(loss).to_vec(),
                capacity: Some(Capacity {
                    factor: 1.0,
                    keep: KeepPolicy::LargestWeights,
                    pad: false,
                }),
                ..MoeConfig::default()
            }),
            ..llama
        }
    }
}

/// Returns the case with the given values. All other settings have their first value.
pub fn case(values: &[(&str, &str)]) -> Case {
    let mut row = [0; SETTINGS.len()];
    for (setting, value) in values {
        let index = SETTINGS.iter().position(|(name, _)| name == setting);
        let index = index.unwrap();
        let values = SETTINGS[index].1.iter();
        row[index] = values.clone().position(|known| known == value).unwrap();
    }
    Case(row)
}
