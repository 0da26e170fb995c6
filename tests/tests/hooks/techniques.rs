//! Runs with each technique, and the same runs without its hook.

use std::sync::Arc;

use burn::tensor::Tensor;
use burn_megatron::comm::ParallelContext;
use burn_megatron::nn::fp8::Fp8Config;
use burn_megatron::optim::{EmaConfig, QkClipConfig, SpikeConfig};
use burn_megatron_data::{DataError, Dataset, Sample, Samples, Sampling};
use burn_megatron_models::Transformer;
use burn_megatron_train::expert_metrics::ExpertMetrics;
use burn_megatron_train::hooks::ORDER;
use burn_megatron_train::metrics::{HeldOutMetrics, StepMetrics, StepTiming};
use burn_megatron_train::{BatchWarmup, Observer, ObserverError, SequenceWarmup, Trainer};

use super::{SEQ, STEPS};
use crate::resume::run::{AnyError, Case};

/// Random tokens in documents of different lengths.
#[derive(Clone, Copy)]
pub struct Documents;

impl Samples for Documents {
    fn seq(&self) -> usize {
        SEQ
    }

    fn sample(&self, number: u64) -> Result<Sample, DataError> {
        let token = |at: usize| {
            let mixed = (number * 31 + at as u64 + 7).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            ((mixed >> 40) % 256) as i32
        };
        Ok(Sample {
            tokens: (0..SEQ).map(token).collect(),
            targets: (1..=SEQ).map(token).collect(),
            documents: vec![0, 3, 5 + number as usize % 4, 11],
            padding: 0,
        })
    }
}

impl Dataset for Documents {
    fn describe(&self) -> String {
        "random documents".into()
    }

    fn fingerprint(&self) -> u64 {
        1
    }

    fn vocabulary(&self) -> usize {
        256
    }

    fn training(&self, _: &Sampling) -> Result<Arc<dyn Samples>, DataError> {
        Ok(Arc::new(*self))
    }

    fn held_out(&self, _: usize, max: usize) -> Result<Vec<Sample>, DataError> {
        (0..max as u64)
            .map(|number| self.sample(1000 + number))
            .collect()
    }
}

/// All values that an observer receives, as text, so that NaN equals itself.
#[derive(Default)]
pub struct Seen(pub Vec<String>);

impl Observer for Seen {
    fn step(&mut self, metrics: &StepMetrics, _: &StepTiming) -> Result<(), ObserverError> {
        self.0.push(format!("{metrics:?}"));
        Ok(())
    }

    fn experts(&mut self, metrics: &ExpertMetrics) -> Result<(), ObserverError> {
        self.0.push(format!("{metrics:?}"));
        Ok(())
    }

    fn held_out(&mut self, metrics: &HeldOutMetrics) -> Result<(), ObserverError> {
        self.0.push(format!("{metrics:?}"));
        Ok(())
    }
}

pub fn short(mut case: Case) -> Case {
    case.train.steps = STEPS;
    case.train.global_batch_size = 4;
    case.train.held_out_samples = 2;
    case.train.evaluate_every = None;
    case
}

pub fn llama(layout: &str, change: impl FnOnce(&mut Case)) -> Case {
    let mut case = short(Case::llama(layout));
    change(&mut case);
    case
}

/// Returns a run with each technique.
pub fn techniques() -> Vec<(&'static str, Case)> {
    let same = |_: &mut Case| ();
    let experts = || short(Case::experts("tp1"));
    let batches = BatchWarmup {
        until_step: 2,
        global_batch_size: 2,
    };
    let rows = SequenceWarmup {
        until_step: 2,
        length: 8,
    };
    // The limit is so narrow that a larger loss or norm exceeds it.
    let spikes = SpikeConfig {
        sigmas: 1e-3,
        window: 4,
    };
    let ema = EmaConfig {
        decay: 0.9,
        evaluate: true,
    };
    let qk_clip = QkClipConfig {
        threshold: 1e-3,
        alpha: 0.3,
    };
    let fp8 = Fp8Config {
        recipe: Some("delayed".parse().unwrap()),
        ..Fp8Config::default()
    };
    vec![
        (
            "batch_warmup",
            llama("tp1", |case| case.train.batch_warmup = vec![batches]),
        ),
        (
            "sequence_warmup",
            llama("tp1", |case| case.train.sequence_warmup = vec![rows]),
        ),
        ("hybrid_context", llama("hybrid8-dp2-mb1", same)),
        (
            "spikes",
            llama("tp1", |case| case.train.skip_spikes = Some(spikes)),
        ),
        (
            "replay",
            llama("dp2", |case| case.train.check_replay_every = Some(2)),
        ),
        ("fp8_scales", llama("tp1", |case| case.fp8 = fp8)),
        ("expert_load", experts()),
        ("router_bias", experts()),
        (
            "zero_count",
            llama("tp1", |case| case.train.count_zeros = true),
        ),
        (
            "qk_clip",
            llama("tp2", |case| case.train.qk_clip = Some(qk_clip)),
        ),
        (
            "replica_check",
            llama("dp2", |case| case.train.check_replicas_every = Some(1)),
        ),
        ("ema", llama("tp1", |case| case.train.ema = Some(ema))),
    ]
}

/// Returns the trainer of a case. For the replica check, the learning rates of the ranks differ, so that their
/// weights differ.
pub fn trainer(
    name: &str,
    case: &Case,
    groups: &ParallelContext,
) -> Result<Trainer<Transformer>, AnyError> {
    let mut case = case.clone();
    if name == "replica_check" {
        case.train.learning_rate *= 1.0 + groups.rank() as f64;
    }
    let trainer = case.trainer(groups)?;
    assert!(trainer.hook_names().contains(&name), "{name}");
    Ok(trainer)
}

/// Returns the results of a run on each rank, or its error.
pub fn result(name: &str, case: &Case, removes: bool) -> Result<Vec<String>, String> {
    case.on_ranks(|groups| {
        let mut trainer = trainer(name, case, groups)?;
        if removes {
            trainer = trainer.without_hook(name)?;
            assert!(!trainer.hook_names().contains(&name), "{name}");
        }
        let mut seen = Seen::default();
        let outcome = trainer.fit(&Documents, &mut seen)?;
        let bits = |tensor: Tensor<1>| -> Vec<u64> {
            let values = tensor.into_data();
            values.iter::<f64>().map(f64::to_bits).collect()
        };
        let weights: Vec<_> = trainer.model().parameters().into_iter().map(bits).collect();
        let biases = trainer.model().routers().expert_biases().into_iter();
        let biases: Vec<_> = biases.map(|(_, bias)| bits(bias.value())).collect();
        let checked = outcome.replay_cost.map(|cost| cost.checked.count);
        let state = trainer.state();
        Ok(format!(
            "{seen:?} {weights:?} {biases:?} {checked:?} {state:?}",
            seen = seen.0
        ))
    })
}

#[test]
fn a_run_without_a_hook_is_a_run_without_its_technique() {
    let techniques = techniques();
    let named: Vec<_> = techniques.iter().map(|(name, _)| *name).collect();
    // CUDA graphs need a GPU. Another test runs their hook on the CPU.
    let on_cpu = ORDER
        .into_iter()
        .filter(|name| !["your own hooks", "cuda_graphs"].contains(name));
    assert_eq!(named, on_cpu.collect::<Vec<_>>());
    for (name, case) in techniques {
        let [with, again, without] =
            [false, false, true].map(|removes| result(name, &case, removes));
        if name == "replica_check" {
            let (error, _) = (with.unwrap_err(), without.unwrap());
            assert!(error.contains("replica"), "{error}");
            continue;
        }
        let with = with.unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(Ok(&with), again.as_ref(), "{name}");
        assert!(
            Ok(&with) != without.as_ref(),
            "{name} changes nothing: {with:?}"
        );
    }
}
