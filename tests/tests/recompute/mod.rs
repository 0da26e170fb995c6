//! Tests that recomputation changes no bit: losses, gradients and weights equal a run without recomputation.

use std::collections::BTreeMap;

use burn::tensor::{DType, Device, Tensor};
use burn_megatron::comm::{ParallelContext, World};
use burn_megatron::data_parallel::{DataParallelConfig, Precision};
use burn_megatron::model::ModelConfig;
use burn_megatron::nn::fp8::{Fp8Config, Fp8Recipe};
use burn_megatron::nn::{ActivationUsage, ModelBuilder, Recompute, RecomputeConfig};
use burn_megatron_tests::pairwise::{describe, pairwise, product};
use burn_megatron_train::metrics::{HeldOutMetrics, StepMetrics, StepTiming};
use burn_megatron_train::{Observer, ObserverError, StepGradients, TrainConfig, Trainer};
use burn_megatron_verify::ModelSubject;

mod settings;

pub use settings::case;
use settings::{Case, SETTINGS};

type AnyError = Box<dyn std::error::Error + Send + Sync>;

const STEPS: usize = 3;
pub const LAYERS: usize = 4;
const MICRO_BATCHES: usize = 4;
/// The number of samples per micro-batch.
const SAMPLES: usize = 1;

/// The results of a rank as text that has the same bits.
#[derive(Debug, PartialEq)]
struct Seen {
    steps: Vec<String>,
    /// The gradients of each step, in the order of the table.
    gradients: Vec<Vec<Vec<u64>>>,
    weights: Vec<Vec<u64>>,
    experts: Vec<String>,
}

fn bits(tensor: Tensor<1>) -> Vec<u64> {
    let values: Vec<f64> = tensor.cast(DType::F64).into_data().try_into_vec().unwrap();
    values.into_iter().map(f64::to_bits).collect()
}

impl Case {
    fn train(&self, recompute: &RecomputeConfig) -> Vec<Seen> {
        let ranks = self.run(recompute).into_iter();
        ranks.map(|(seen, _)| seen).collect()
    }

    /// Returns the results of each rank, and the bytes of its inputs of recomputed blocks.
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
                // `Debug` prints the shortest text that parses to the same bits.
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

/// The gradients of each step before clipping.
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

/// Compares runs with runs without recomputation. Each run without recomputation is executed once.
#[derive(Default)]
struct Kept(BTreeMap<Vec<usize>, Vec<Seen>>);

impl Kept {
    /// Returns the first difference, or `None`.
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

#[test]
#[ignore = "slow: run by the nightly workflow, next to fuzz-layouts"]
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

/// The accumulated load follows the order of the forward passes, independent of the micro-batches that are
/// recomputed.
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

/// All inputs of a micro-batch except the last one are on the host, for all micro-batches in flight.
#[test]
fn inputs_are_on_the_host_between_forward_and_backward() {
    for (layout, micro_batches) in [("tp2", 1), ("1f1b", 2)] {
        let case = case(&[("offload", "all, 1 ahead"), ("layout", layout)]);
        let (_, used) = case.run(&case.recompute()).swap_remove(0);
        // Shape [8 tokens, 16 features] in f32.
        let input = 8 * 16 * 4;
        let of_stage = (LAYERS / case.stages()) as u64;
        let host = micro_batches * (of_stage - 1) * input;
        assert_eq!(used.host_peak, host, "{layout}");
        // Inputs that stay, one input on its way to the host, and one input on its way back.
        let device = (micro_batches + 2) * input;
        assert!(used.device_peak <= device, "{layout}: {used:?}");
        let all = (STEPS * MICRO_BATCHES) as u64 * (of_stage - 1) * input;
        assert_eq!(used.traffic.up, all, "{layout}");
    }
}
