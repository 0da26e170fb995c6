//! Tests that expert exchanges that overlap with another micro-batch give the same bits as without overlap.

use std::fs;
use std::path::PathBuf;

use burn::tensor::{DType, Device};
use burn_megatron::comm::{ParallelContext, World};
use burn_megatron::data_parallel::{DataParallelConfig, Precision, ZeroStage};
use burn_megatron::mesh::ParallelConfig;
use burn_megatron::model::ModelConfig;
use burn_megatron::nn::fp8::{DelayedScaling, Fp8Config, Fp8Recipe};
use burn_megatron::nn::moe::{
    Capacity, DispatcherKind, Fp8DispatchScales, KeepPolicy, RouterLoss, RouterLossKind,
};
use burn_megatron::nn::{
    ModelBuilder, RecomputeConfig, RecomputeGranularity, RecomputeLayers, RecomputeModule,
};
use burn_megatron::pipeline::engine::ActionEvent;
use burn_megatron::pipeline::schedule::{ActionKind, ScheduleKind};
use burn_megatron_data::TextData;
use burn_megatron_models::{MoeConfig, MtpConfig, TransformerConfig};
use burn_megatron_train::metrics::{HeldOutMetrics, StepMetrics, StepTiming};
use burn_megatron_train::{Observer, ObserverError, StepGradients, TrainConfig, Trainer};

type AnyError = Box<dyn std::error::Error + Send + Sync>;

/// A run of a few steps with four micro-batches each.
#[derive(Clone)]
struct Run {
    layout: ParallelConfig,
    model: TransformerConfig,
    precision: Precision,
    fp8: Fp8Config,
    recompute: RecomputeConfig,
    defer_embedding_wgrad: Option<usize>,
}

/// Returns a model whose first block has no experts. Every other block has experts, with all features that share
/// their input.
fn model() -> TransformerConfig {
    let loss = |kind| RouterLoss {
        kind,
        coefficient: 0.1,
    };
    TransformerConfig {
        context: 16,
        hidden: 16,
        layers: 4,
        heads: 2,
        groups: Some(1),
        dropout: 0.05,
        tied: true,
        moe: Some(MoeConfig {
            experts: 4,
            expert_width: Some(8),
            every: 2,
            first_dense: 1,
            shared_width: Some(8),
            losses: vec![loss(RouterLossKind::Balance), loss(RouterLossKind::ZLoss)],
            ..MoeConfig::default()
        }),
        ..TransformerConfig::mixtral()
    }
}

/// Returns a model with only experts in every block.
fn plain_experts() -> TransformerConfig {
    TransformerConfig {
        moe: Some(MoeConfig {
            experts: 4,
            expert_width: Some(8),
            ..MoeConfig::default()
        }),
        ..model()
    }
}

impl Run {
    fn new(layout: ParallelConfig) -> Self {
        Self {
            layout,
            model: model(),
            precision: Precision::F32,
            fp8: Fp8Config::default(),
            recompute: RecomputeConfig::default(),
            defer_embedding_wgrad: None,
        }
    }

    fn experts(mut self, change: impl FnOnce(&mut MoeConfig)) -> Self {
        if let Some(moe) = &mut self.model.moe {
            change(moe);
        }
        self
    }

    fn train_config(&self) -> TrainConfig {
        TrainConfig {
            data_parallel: DataParallelConfig {
                precision: self.precision,
                zero_stage: self.layout.zero_stage,
                bucket_size: (self.layout.zero_stage < ZeroStage::Parameters).then_some(500),
                ..DataParallelConfig::default()
            },
            steps: 2,
            warmup_steps: 1,
            micro_batch_size: 1,
            global_batch_size: 4 * self.layout.data_size(),
            held_out_samples: 1,
            ..TrainConfig::default()
        }
    }

    /// Trains on each rank. Returns its results, and the number of paired forward nodes in the last step.
    fn train(&self, overlap: bool) -> Result<Vec<(Seen, usize)>, AnyError> {
        let layout = ParallelConfig {
            defer_embedding_wgrad: self.defer_embedding_wgrad,
            ..self
                .layout
                .clone()
                .with_overlap_moe_expert_parallel_comm(overlap)
        };
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
        assert!(fs::metadata(&folder)?.is_dir());
        let (text, config) = (TextData::open(&folder)?, self.train_config());
        let world = World::threads(layout.world_size().unwrap())?;
        let run = world.run(|rank| -> Result<_, AnyError> {
            let groups = ParallelContext::new(&layout, &rank)?;
            let device = Device::flex();
            let dtype = match self.precision {
                Precision::F64 => DType::F64,
                _ => DType::F32,
            };
            let scope = ModelBuilder::with(&groups, &device, 0, dtype);
            let scope = scope.with_fp8(&self.fp8)?.with_recompute(&self.recompute)?;
            let model = self.model.init_with(scope)?;
            let mut trainer = Trainer::new(model, &groups, &device, &config)?;
            let mut seen = Seen::default();
            trainer.fit(&text, &mut seen)?;
            let events = trainer.events();
            for two in events.windows(2) {
                assert!(two[0].start <= two[0].end && two[0].end <= two[1].start);
            }
            let is_node = |event: &&ActionEvent| event.action.kind == ActionKind::PairedForward;
            Ok((seen, events.iter().filter(is_node).count()))
        });
        Ok(run?)
    }

    /// Asserts that overlap changes no bit, and that every rank has pairs with overlap and no pairs without it.
    /// Returns the number of paired forward nodes of the first rank.
    #[track_caller]
    fn assert_same_bits(&self, what: &str) -> usize {
        let [plain, overlapped] = [false, true].map(|overlap| self.train(overlap).expect(what));
        for (rank, (plain, overlapped)) in plain.iter().zip(&overlapped).enumerate() {
            assert!(
                plain.1 == 0 && overlapped.1 > 0,
                "{what}, rank {rank}: pairs"
            );
            assert!(!plain.0.gradients.is_empty(), "{what}");
            assert!(plain.0 == overlapped.0, "{what}, rank {rank}: other bits");
        }
        overlapped[0].1
    }
}

/// The bits of the gradients of each step, and its metrics.
#[derive(Clone, Debug, Default, PartialEq)]
struct Seen {
    gradients: Vec<Vec<u64>>,
    steps: Vec<String>,
}

impl Observer for Seen {
    fn gradients(&mut self, gradients: &StepGradients<'_>) -> Result<(), ObserverError> {
        for gradient in gradients.full() {
            let values = gradient.cast(DType::F64).into_data();
            let values: Vec<f64> = values.try_into_vec()?;
            self.gradients
                .push(values.into_iter().map(f64::to_bits).collect());
        }
        Ok(())
    }

    fn step(&mut self, metrics: &StepMetrics, _: &StepTiming) -> Result<(), ObserverError> {
        self.steps.push(format!("{metrics:?}"));
        Ok(())
    }

    fn held_out(&mut self, metrics: &HeldOutMetrics) -> Result<(), ObserverError> {
        self.steps.push(format!("{metrics:?}"));
        Ok(())
    }
}

fn layout() -> ParallelConfig {
    ParallelConfig::new().with_data(2).with_expert(2)
}

#[test]
fn one_stage_has_the_same_bits() {
    Run::new(layout()).assert_same_bits("blocks without experts, shared experts and losses");
    let run = Run {
        model: plain_experts(),
        ..Run::new(layout())
    };
    // Three pairs of a forward pass. Each of four layers has two exchanges and one exchange of row counts.
    let nodes = run.assert_same_bits("experts in every block");
    assert_eq!(nodes, 3 * (3 * 4 + 1));
    for precision in [Precision::F64, Precision::Bf16] {
        let run = Run {
            precision,
            ..Run::new(layout())
        };
        run.assert_same_bits(&format!("{precision:?}"));
    }
    let eight_bits = Run {
        fp8: Fp8Config {
            recipe: Some(Fp8Recipe::Delayed(DelayedScaling::default())),
            ..Fp8Config::default()
        },
        ..Run::new(layout())
    };
    eight_bits.assert_same_bits("products in 8 bits");
}

#[test]
fn pipelines_have_the_same_bits() {
    for kind in [
        ScheduleKind::OneFOneB,
        ScheduleKind::Interleaved { group: None },
        ScheduleKind::DualPipeV,
    ] {
        let layout = layout().with_pipeline(2).with_schedule(kind);
        let mut run = Run::new(layout);
        run.assert_same_bits(&kind.to_string());
        if !kind.splits_backward() {
            run.defer_embedding_wgrad = Some(1);
            run.assert_same_bits(&format!("{kind} with a deferred weight gradient"));
        }
    }
}

#[test]
fn every_dispatcher_has_the_same_bits() {
    let flex = |run: Run| run.experts(|moe| moe.dispatcher = DispatcherKind::Flex);
    flex(Run::new(layout())).assert_same_bits("flex");
    let eight_bits = |moe: &mut MoeConfig| moe.fp8_dispatch = Some(Fp8DispatchScales::F32);
    flex(Run::new(layout()))
        .experts(eight_bits)
        .assert_same_bits("flex in 8 bits");
    let nodes = ParallelConfig::new()
        .with_data(4)
        .with_expert(4)
        .with_ranks_per_node(2);
    flex(Run::new(nodes)).assert_same_bits("flex over nodes");
    let capacity = |moe: &mut MoeConfig| {
        moe.capacity = Some(Capacity {
            factor: 0.75,
            keep: KeepPolicy::LargestWeights,
            pad: true,
        });
    };
    Run::new(layout())
        .experts(capacity)
        .assert_same_bits("a padded capacity");
}

#[test]
fn other_axes_have_the_same_bits() {
    let shared = ParallelConfig::new()
        .with_data(4)
        .with_expert(2)
        .with_expert_tensor(2);
    Run::new(shared).assert_same_bits("experts over two ranks");
    let tensor = layout().with_tensor(2);
    Run::new(tensor.clone()).assert_same_bits("ranks with the same tokens");
    Run::new(tensor.with_sequence_parallel(true)).assert_same_bits("sequence parallelism");
    for stage in [
        ZeroStage::Optimizer,
        ZeroStage::Gradients,
        ZeroStage::Parameters,
    ] {
        let layout = ParallelConfig::new()
            .with_data(4)
            .with_expert(2)
            .with_zero_stage(stage);
        Run::new(layout).assert_same_bits(&format!("ZeRO-{stage}"));
    }
}

#[test]
fn recomputed_modules_and_further_tokens_have_the_same_bits() {
    let modules = [RecomputeModule::CoreAttention, RecomputeModule::Activation];
    let run = Run {
        recompute: RecomputeConfig::selective(modules),
        ..Run::new(layout())
    };
    run.assert_same_bits("recomputed modules");
    let model = TransformerConfig {
        mtp: Some(MtpConfig::default()),
        ..model()
    };
    let run = Run {
        model,
        ..Run::new(layout())
    };
    run.assert_same_bits("further tokens");
}

#[test]
fn what_cannot_overlap_is_refused() {
    let refused = |run: &Run| run.train(true).expect_err("refused").to_string();
    let full = Run {
        recompute: RecomputeConfig {
            granularity: RecomputeGranularity::Full,
            layers: Some(RecomputeLayers::Each(1)),
            ..RecomputeConfig::default()
        },
        ..Run::new(layout())
    };
    let message = refused(&full);
    let expected = "granularity = \"full\" with overlap_moe_expert_parallel_comm";
    assert!(message.contains(expected), "{message}");
    let gathers = Run::new(layout()).experts(|moe| moe.dispatcher = DispatcherKind::AllGather);
    let message = refused(&gathers);
    assert!(
        message.contains("expected the all-to-all or the flex dispatcher"),
        "{message}"
    );
    let alone = Run::new(ParallelConfig::new().with_data(2));
    let message = refused(&alone);
    assert!(
        message.contains("set expert (--ep) to 2 or more"),
        "{message}"
    );
    let gpipe = layout().with_pipeline(2).with_schedule(ScheduleKind::GPipe);
    let message = refused(&Run::new(gpipe));
    assert!(
        message.contains("expected 1f1b, interleaved or dualpipe-v"),
        "{message}"
    );
}
