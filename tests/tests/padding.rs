//! Tests that padding changes nothing in any layout: neither the loss, nor the gradients, nor the reports of routers.

use burn::tensor::{DType, Device};
use burn_megatron::comm::{ParallelContext, World};
use burn_megatron::data_parallel::Precision;
use burn_megatron::mesh::ParallelConfig;
use burn_megatron::model::ModelConfig;
use burn_megatron::nn::ModelBuilder;
use burn_megatron::nn::moe::{
    Capacity, DispatcherKind, KeepPolicy, RouterChoice, RouterLoss, RouterLossKind, ScoreFunction,
};
use burn_megatron::optim::QkClipConfig;
use burn_megatron_data::{DataError, IGNORE, Sample, Samples};
use burn_megatron_models::{MoeConfig, MtpConfig, TransformerConfig};
use burn_megatron_tests::long_rope;
use burn_megatron_train::{NoopObserver, TrainConfig, Trainer};
use burn_megatron_verify::Layout;

const SAMPLES: usize = 4;

/// Conversations of 6 to 9 tokens, one in each row.
struct Conversations {
    seq: usize,
}

impl Samples for Conversations {
    fn seq(&self) -> usize {
        self.seq
    }

    fn sample(&self, number: u64) -> Result<Sample, DataError> {
        let real = 6 + number as usize % 4;
        let token = |at: usize| ((number as usize * 31 + at * at * 7 + 3) % 21) as i32;
        let mut sample = Sample {
            tokens: (0..real).map(token).collect(),
            targets: (1..=real).map(token).collect(),
            documents: if real < self.seq {
                vec![0, real]
            } else {
                vec![]
            },
            padding: self.seq - real,
        };
        sample.targets[..2].fill(IGNORE);
        sample.tokens.resize(self.seq, 0);
        sample.targets.resize(self.seq, IGNORE);
        Ok(sample)
    }
}

/// Returns the loss and the gradient norm of the second step. On one rank, it also returns the losses of the routers,
/// and the loads and pairs of the experts.
fn trained(moe: &MoeConfig, seq: usize, layout: &str) -> Vec<f64> {
    let layout: Layout = layout.parse().unwrap();
    let model = TransformerConfig {
        vocabulary: 21,
        context: 32,
        hidden: 16,
        layers: 2,
        heads: 4,
        groups: Some(2),
        // Some conversations are longer than the original context, and more of them are longer with padding.
        positions: long_rope(4, 7),
        init_std: 0.3,
        mtp: Some(MtpConfig::default()),
        moe: Some(moe.clone()),
        ..TransformerConfig::mixtral()
    };
    let mut config = TrainConfig {
        steps: 2,
        micro_batch_size: layout.micro_batch.unwrap(),
        global_batch_size: SAMPLES,
        sequence_length: Some(seq),
        warmup_steps: 0,
        // Clips every head by the largest logit of the real tokens.
        qk_clip: Some(QkClipConfig {
            threshold: 1e-3,
            alpha: 0.5,
        }),
        ..TrainConfig::default()
    };
    config.data_parallel.precision = Precision::F64;
    let ranks = layout.ranks();
    let parallel: ParallelConfig = layout.parallel;
    let run = World::threads(ranks).unwrap().run(|rank| {
        let (groups, device) = (ParallelContext::new(&parallel, &rank)?, Device::flex());
        let model = model.init_with(ModelBuilder::with(&groups, &device, 3, DType::F64))?;
        let mut trainer = Trainer::new(model, &groups, &device, &config)?;
        trainer.step(&Conversations { seq }, &mut NoopObserver)?;
        let step = trainer.step(&Conversations { seq }, &mut NoopObserver)?;
        let mut found = vec![step.loss, step.gradient_norm];
        if ranks == 1 {
            let reported = trainer.router_step();
            for sum in reported.losses().into_values() {
                found.extend(sum.into_data().iter::<f64>());
            }
            for load in reported.loads().into_values() {
                found.extend(load.tokens.into_data().iter::<f64>());
                found.push(load.pairs as f64);
            }
        }
        Ok::<_, Box<dyn std::error::Error + Send + Sync>>(found)
    });
    run.unwrap().swap_remove(0)
}

fn assert_near(what: &str, found: &[f64], expected: &[f64]) {
    for (found, expected) in found.iter().zip(expected) {
        let off = (found - expected).abs() / expected.abs().max(1e-3);
        assert!(off < 1e-10, "{what}: {found} is not {expected}");
    }
}

fn experts() -> MoeConfig {
    let loss = |kind| RouterLoss {
        kind,
        coefficient: 0.05,
    };
    use RouterLossKind::{Balance, SequenceBalance, ZLoss};
    MoeConfig {
        experts: 4,
        expert_width: Some(8),
        losses: [Balance, SequenceBalance, ZLoss].map(loss).to_vec(),
        bias_update_rate: Some(0.05),
        score: ScoreFunction::Sigmoid,
        ..MoeConfig::default()
    }
}

#[test]
fn the_length_of_rows_changes_nothing_of_experts() {
    let first = |factor, pad| {
        let keep = KeepPolicy::First;
        Some(Capacity { factor, keep, pad })
    };
    let sinkhorn = MoeConfig {
        choice: RouterChoice::Sinkhorn,
        score: ScoreFunction::PreSoftmax,
        losses: vec![],
        bias_update_rate: None,
        ..experts()
    };
    let round_robin = MoeConfig {
        choice: RouterChoice::RoundRobin,
        bias_update_rate: None,
        ..experts()
    };
    let capacity = |capacity| MoeConfig {
        capacity,
        ..experts()
    };
    let models = [
        experts(),
        sinkhorn,
        round_robin,
        capacity(first(0.8, false)),
        capacity(first(0.8, true)),
    ];
    for (number, moe) in models.iter().enumerate() {
        let expected = trained(moe, 9, "dp1-mb4");
        assert!(expected.len() > 10);
        for seq in [12, 32] {
            let found = trained(moe, seq, "dp1-mb4");
            assert_eq!(found.len(), expected.len());
            assert_near(&format!("model {number}, rows of {seq}"), &found, &expected);
        }
    }
}

#[test]
fn padded_rows_train_experts_as_on_one_rank() {
    let expected = trained(&experts(), 9, "dp1-mb2");
    for (number, layout) in [
        "tp2-sp-dp1-mb2",
        "tp4-dp1-mb2",
        "cp2-striped-dp1-mb2",
        "cp4-perdocument-dp1-mb2",
        "tp2-sp-cp2-perdocument-dp1-mb2",
        "pp2-dp1-mb2",
        "ep2-dp2-mb2",
        "cp2-ep2-dp1-mb2",
    ]
    .into_iter()
    .enumerate()
    {
        use DispatcherKind::{AllGather, AllToAll, Flex};
        let moe = MoeConfig {
            dispatcher: [AllToAll, AllGather, Flex][number % 3],
            ..experts()
        };
        // A rank with the last tokens of each row has only padding.
        assert_near(layout, &trained(&moe, 32, layout), &expected);
    }
}
