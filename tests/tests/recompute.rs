//! Recomputation changes no bit: losses, gradients and weights are those of a run that keeps everything.

use std::collections::BTreeMap;

use burn::tensor::{DType, Device, Tensor};
use burn_megatron::comm::{ParallelContext, World};
use burn_megatron::data_parallel::{DataParallelConfig, Precision, ZeroStage};
use burn_megatron::mesh::{ContextExchange, ParallelConfig, TpCommOverlap};
use burn_megatron::nn::fp8::{Fp8Config, Fp8Recipe};
use burn_megatron::nn::moe::{Capacity, KeepPolicy, RouterLoss, RouterLossKind};
use burn_megatron::nn::{
    Activation, ActivationOffload, ActivationUsage, ModelBuilder, NormKind, QkNorm, Recompute,
    RecomputeConfig, RecomputeLayers, RecomputeMethod, RecomputeModule,
};
use burn_megatron::pipeline::schedule::ScheduleKind;
use burn_megatron::train::metrics::{HeldOutMetrics, StepMetrics, StepTiming};
use burn_megatron::train::{
    ModelConfig, Observer, ObserverError, StepGradients, TrainConfig, Trainer,
};
use burn_megatron::verify::ModelSubject;
use burn_megatron_models::{MlaConfig, MoeConfig, Positions, TransformerConfig};
use burn_megatron_tests::pairwise::{Row, Settings, describe, pairwise, product, value};

type AnyError = Box<dyn std::error::Error + Send + Sync>;

const STEPS: usize = 3;
pub const LAYERS: usize = 4;
const MICRO_BATCHES: usize = 4;
/// Of a micro-batch.
const SAMPLES: usize = 1;

/// The values of each setting, by name.
const SETTINGS: Settings<5> = [
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

/// A row with names for its values.
#[derive(Clone, Copy)]
pub struct Case(Row<5>);

/// What a rank has seen of a run, as text of the same bits.
#[derive(Debug, PartialEq)]
struct Seen {
    steps: Vec<String>,
    /// By step: the gradients, in the order of the table.
    gradients: Vec<Vec<Vec<u64>>>,
    weights: Vec<Vec<u64>>,
    experts: Vec<String>,
}

fn bits(tensor: Tensor<1>) -> Vec<u64> {
    let values: Vec<f64> = tensor.cast(DType::F64).into_data().try_into_vec().unwrap();
    values.into_iter().map(f64::to_bits).collect()
}

impl Case {
    fn value(&self, setting: &str) -> &'static str {
        value(&SETTINGS, &self.0, setting)
    }

    fn schedule(&self) -> Option<ScheduleKind> {
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

    /// The stages of the layout.
    fn stages(&self) -> usize {
        match self.value("layout") {
            "interleaved" | "zb-v" | "dualpipe-v" => 4,
            _ if self.schedule().is_some() => 2,
            _ => 1,
        }
    }

    fn is_valid(&self) -> bool {
        let (mode, model) = (self.value("recompute"), self.value("model"));
        let has_experts = model == "experts";
        let of_stage = LAYERS / self.stages();
        [
            !has_experts && self.value("layout") == "ep2",
            of_stage < 2 && mode == "uniform 2",
            mode == "some in flight" && self.stages() == 1,
            // Both are computed from what is kept anyway.
            mode == "norm, activation" && self.value("offload") != "none",
            // The inputs of its projections are not those of a block.
            mode == "core attention" && model == "latent" && self.value("offload") != "none",
            // Layers in 8 bits have no exchanges in chunks.
            self.value("layout") == "tp2 ring" && self.value("type") == "fp8",
            // Dropout of the probabilities needs them in memory, which a ring has not.
            self.value("layout") == "cp2" && model == "gpt dropout",
        ]
        .iter()
        .all(|refused| !refused)
    }

    fn recompute(&self) -> RecomputeConfig {
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
            // One in the other.
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
            // Inputs have 512 bytes or more.
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
            // Of the streams alone: fused attention has none.
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

    fn train(&self, recompute: &RecomputeConfig) -> Vec<Seen> {
        let ranks = self.run(recompute).into_iter();
        ranks.map(|(seen, _)| seen).collect()
    }

    /// What each rank has seen, and the bytes of its inputs of recomputed blocks.
    fn run(&self, recompute: &RecomputeConfig) -> Vec<(Seen, ActivationUsage)> {
        let (layout, model) = (self.layout(), self.model());
        let (precision, fp8) = match self.value("type") {
            "f32" => (Precision::F32, None),
            "bf16" => (Precision::Bf16, None),
            _ => (
                Precision::F32,
                Some("delayed".parse::<Fp8Recipe>().unwrap()),
            ),
        };
        let fp8 = Fp8Config {
            recipe: fp8,
            ..Fp8Config::default()
        };
        let data = layout.data_size();
        let samples = ModelSubject {
            samples: SAMPLES * MICRO_BATCHES * data,
            ..ModelSubject::new(model.clone())
        };
        let config = TrainConfig {
            data_parallel: DataParallelConfig {
                precision,
                ..DataParallelConfig::default()
            },
            steps: STEPS,
            micro_batch_size: SAMPLES,
            global_batch_size: SAMPLES * MICRO_BATCHES * data,
            learning_rate: 1e-2,
            warmup_steps: 0,
            log_max_attention_logit: true,
            ..TrainConfig::default()
        };
        let ranks = layout.world_size().unwrap();
        let run = |rank| -> Result<_, AnyError> {
            let groups = ParallelContext::new(&layout, &rank)?;
            let device = Device::flex();
            let builder = ModelBuilder::with(&groups, &device, 3, precision.master())
                .with_compute_dtype(precision.of(precision.master()))
                .with_fp8(&fp8)?
                .with_recompute(recompute)?;
            let model = model.init_with(builder)?;
            let mut trainer = Trainer::new(model, &groups, &device, &config)?;
            let mut observer = Gradients::default();
            let (mut steps, mut experts) = (vec![], vec![]);
            for _ in 0..STEPS {
                let metrics = trainer.step(&samples, &mut observer)?;
                assert!(!metrics.skipped, "{metrics:?}");
                // `Debug` prints the shortest text that reads back as the same bits.
                steps.push(format!("{metrics:?}"));
                let router_step = trainer.router_step();
                let loads = router_step.loads().into_iter().map(|(path, load)| {
                    let tokens: Vec<i64> = load
                        .tokens
                        .into_data()
                        .convert::<i64>()
                        .try_into_vec()
                        .unwrap();
                    (path, tokens, load.pairs)
                });
                let losses = router_step.losses().into_iter();
                let losses = losses.map(|(key, loss)| (key, bits(loss)));
                experts.push(format!(
                    "{:?} {:?}",
                    loads.collect::<Vec<_>>(),
                    losses.collect::<Vec<_>>()
                ));
            }
            let recompute = trainer.model().recompute();
            check_usage(recompute);
            let seen = Seen {
                steps,
                gradients: observer.0,
                weights: trainer.model().parameters().into_iter().map(bits).collect(),
                experts,
            };
            Ok((seen, recompute.offloaded()))
        };
        World::threads(ranks).unwrap().run(run).unwrap()
    }
}

/// Checks that the budget was kept, and that every input was fetched.
fn check_usage(recompute: &Recompute) {
    let (used, offload) = (recompute.offloaded(), recompute.config().offload);
    assert!(used.host_peak <= offload.bytes, "{used:?}");
    assert_eq!((used.device, used.host), (0, 0), "{used:?}");
    assert_eq!(used.traffic.up, used.traffic.down, "{used:?}");
}

/// The gradients of each step, before they are clipped.
#[derive(Default)]
struct Gradients(Vec<Vec<Vec<u64>>>);

impl Observer for Gradients {
    fn gradients(&mut self, gradients: &StepGradients<'_>) -> Result<(), ObserverError> {
        let full = gradients.full().into_iter();
        self.0.push(full.map(bits).collect());
        Ok(())
    }

    fn step(&mut self, _: &StepMetrics, _: &StepTiming) -> Result<(), ObserverError> {
        Ok(())
    }

    fn held_out(&mut self, _: &HeldOutMetrics) -> Result<(), ObserverError> {
        Ok(())
    }
}

/// Compares runs with those that keep everything, each of which is made once.
#[derive(Default)]
struct Kept(BTreeMap<Vec<usize>, Vec<Seen>>);

impl Kept {
    /// What differs, if anything does.
    fn difference(&mut self, case: Case) -> Option<String> {
        let kept = self.0.entry(case.0[2..].to_vec());
        let kept = kept.or_insert_with(|| case.train(&RecomputeConfig::default()));
        let found = case.train(&case.recompute());
        let mut ranks = found.iter().zip(&*kept).enumerate();
        let what = ranks.find_map(|(rank, (found, kept))| {
            let bits = kept.gradients.iter().flatten().flatten();
            assert!(bits.clone().any(|bits| *bits != 0), "no gradient");
            let what = found.difference(kept)?;
            Some(format!("rank {rank}: {what}"))
        })?;
        Some(format!("{}: {what}", describe(&SETTINGS, &case.0)))
    }
}

impl Seen {
    fn difference(&self, kept: &Self) -> Option<String> {
        let steps = self.gradients.iter().zip(&kept.gradients).enumerate();
        let gradients = steps.flat_map(|(step, (found, kept))| {
            let parameters = found.iter().zip(kept).enumerate();
            let differing = parameters.filter(|(_, (found, kept))| found != kept);
            differing.map(move |(parameter, _)| format!("gradient {parameter} of step {step}"))
        });
        let mut gradients = gradients;
        if self.experts != kept.experts {
            Some("routers".into())
        } else if let Some(first) = gradients.next() {
            Some(first)
        } else if self.steps != kept.steps {
            Some("metrics".into())
        } else {
            (self.weights != kept.weights).then(|| "weights".into())
        }
    }
}

/// Settings of which only these differ from the first values.
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

#[test]
fn every_pair_of_settings_is_bit_equal_to_keeping_everything() {
    let all = product(&SETTINGS, |row| Case(*row).is_valid());
    let chosen = pairwise(&SETTINGS, &all);
    println!("{} of {} rows", chosen.len(), all.len());
    let mut kept = Kept::default();
    let differences = chosen.iter().filter_map(|row| kept.difference(Case(*row)));
    let differences = differences.inspect(|difference| println!("{difference}"));
    let differences: Vec<_> = differences.collect();
    assert!(differences.is_empty(), "{}", differences.join("\n"));
}

/// The load so far is that of the order of forwards, whichever micro-batches go forward a second time.
#[test]
fn a_global_loss_reads_the_same_loads_where_some_micro_batches_are_recomputed() {
    let case = case(&[
        ("recompute", "some in flight"),
        ("layout", "dualpipe-v"),
        ("model", "experts"),
        ("type", "bf16"),
    ]);
    assert_eq!(Kept::default().difference(case), None);
}

/// All inputs of a micro-batch but the last are on the host, of as many micro-batches as are in flight.
#[test]
fn inputs_are_on_the_host_between_forward_and_backward() {
    for (layout, micro_batches) in [("tp2", 1), ("1f1b", 2)] {
        let case = case(&[("offload", "all, 1 ahead"), ("layout", layout)]);
        let (_, used) = case.run(&case.recompute()).swap_remove(0);
        // [8 tokens, 16 features] in f32.
        let input = 8 * 16 * 4;
        let of_stage = (LAYERS / case.stages()) as u64;
        let host = micro_batches * (of_stage - 1) * input;
        assert_eq!(used.host_peak, host, "{layout}");
        // Those that stay, one on its way to the host, and one that returns.
        let device = (micro_batches + 2) * input;
        assert!(used.device_peak <= device, "{layout}: {used:?}");
        let all = (STEPS * MICRO_BATCHES) as u64 * (of_stage - 1) * input;
        assert_eq!(used.traffic.up, all, "{layout}");
    }
}
