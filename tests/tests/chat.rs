//! Tests of the loss of answers only. Ranks and micro-batches have very different numbers of targets.

use burn::tensor::{DType, Device};
use burn_megatron::comm::{ParallelContext, World};
use burn_megatron::data_parallel::{Precision, ZeroStage};
use burn_megatron::mesh::ParallelConfig;
use burn_megatron::model::ModelConfig;
use burn_megatron::nn::ModelBuilder;
use burn_megatron_data::{DataError, IGNORE, Sample, Samples};
use burn_megatron_models::TransformerConfig;
use burn_megatron_tests::small_llama;
use burn_megatron_train::metrics::{HeldOutMetrics, SkipReason, StepMetrics, StepTiming};
use burn_megatron_train::{Observer, ObserverError, StepGradients, TrainConfig, Trainer};

const SEQ: usize = 8;

/// The number of targets of the eight samples in each step. With two ranks, the first rank has few targets, and none
/// in the second step. The third step has no targets.
const COUNTED: [[usize; 8]; 4] = [
    [1, 0, 0, 0, 8, 8, 7, 8],
    [0, 0, 0, 0, 3, 0, 0, 5],
    [0; 8],
    [8, 1, 0, 2, 0, 0, 0, 1],
];

/// Rows of two documents. Only the last tokens have targets.
struct Answers;

impl Samples for Answers {
    fn seq(&self) -> usize {
        SEQ
    }

    fn sample(&self, number: u64) -> Result<Sample, DataError> {
        let number = number as usize;
        let counted = COUNTED[number / 8][number % 8];
        let token = |place: usize| ((number * 31 + place * place * 7 + 3) % 21) as i32;
        let target = |place| {
            if place + counted < SEQ {
                IGNORE
            } else {
                token(place + 1)
            }
        };
        Ok(Sample {
            tokens: (0..SEQ).map(token).collect(),
            targets: (0..SEQ).map(target).collect(),
            documents: vec![0, 1 + number % (SEQ - 1)],
            padding: 0,
        })
    }
}

#[derive(Default)]
struct Gradients(Vec<Vec<f64>>);

impl Observer for Gradients {
    fn gradients(&mut self, gradients: &StepGradients<'_>) -> Result<(), ObserverError> {
        let full = gradients.full().into_iter();
        let values =
            full.flat_map(|gradient| gradient.into_data().iter::<f64>().collect::<Vec<_>>());
        self.0.push(values.collect());
        Ok(())
    }

    fn step(&mut self, _: &StepMetrics, _: &StepTiming) -> Result<(), ObserverError> {
        Ok(())
    }

    fn held_out(&mut self, _: &HeldOutMetrics) -> Result<(), ObserverError> {
        Ok(())
    }
}

/// Returns the metrics and the gradients of each step on the first rank.
fn train(
    layout: &ParallelConfig,
    zero: ZeroStage,
    micro: usize,
) -> (Vec<StepMetrics>, Vec<Vec<f64>>) {
    let mut config = TrainConfig {
        steps: COUNTED.len(),
        micro_batch_size: micro,
        global_batch_size: 8,
        warmup_steps: 0,
        // AdamW turns rounding differences into updates of this size.
        learning_rate: 1e-13,
        min_learning_rate: 1e-13,
        ..TrainConfig::default()
    };
    config.data_parallel.zero_stage = zero;
    config.data_parallel.precision = Precision::F64;
    let model = TransformerConfig {
        dropout: 0.0,
        attention_dropout: 0.0,
        ..small_llama().config
    };
    let layout = ParallelConfig {
        zero_stage: zero,
        ..layout.clone()
    };
    let ranks = layout.data_size() * layout.context;
    let run = World::threads(ranks).unwrap().run(|rank| {
        let (groups, device) = (ParallelContext::new(&layout, &rank)?, Device::flex());
        let model = model.init_with(ModelBuilder::with(&groups, &device, 3, DType::F64))?;
        let mut trainer = Trainer::new(model, &groups, &device, &config)?;
        let mut seen = Gradients::default();
        let steps = COUNTED.iter().map(|_| trainer.step(&Answers, &mut seen));
        let steps: Vec<_> = steps.collect::<Result<_, _>>()?;
        Ok::<_, Box<dyn std::error::Error + Send + Sync>>((steps, seen.0))
    });
    run.unwrap().swap_remove(0)
}

#[test]
fn every_answer_token_of_a_step_weighs_the_same_on_all_ranks() {
    let one = ParallelConfig::new().with_data(1);
    let (steps, gradients) = train(&one, ZeroStage::Replicated, 8);
    let counted: Vec<_> = COUNTED
        .map(|step| step.iter().sum::<usize>() as u64)
        .to_vec();
    assert_eq!(
        steps.iter().map(|step| step.tokens).collect::<Vec<_>>(),
        counted
    );
    assert_eq!(steps[2].skip_reason, Some(SkipReason::NoTargets));
    let context = ParallelConfig {
        context: 2,
        ..ParallelConfig::new().with_data(2)
    };
    for (layout, zero, micro) in [
        (&one, ZeroStage::Replicated, 1),
        (
            &ParallelConfig::new().with_data(2),
            ZeroStage::Replicated,
            4,
        ),
        (&ParallelConfig::new().with_data(2), ZeroStage::Gradients, 1),
        (
            &ParallelConfig::new().with_data(4),
            ZeroStage::Parameters,
            1,
        ),
        (&context, ZeroStage::Replicated, 2),
    ] {
        let what = format!("data {:?}, ZeRO-{zero}, {micro}", layout.data);
        let (found, own) = train(layout, zero, micro);
        for (step, (found, expected)) in found.iter().zip(&steps).enumerate() {
            assert_eq!(
                (found.tokens, found.skip_reason),
                (expected.tokens, expected.skip_reason)
            );
            let apart = (found.loss - expected.loss).abs();
            assert!(
                apart < 1e-12 || expected.loss.is_nan(),
                "{what}, step {step}: {apart}"
            );
        }
        for (step, (found, expected)) in own.iter().zip(&gradients).enumerate() {
            let largest = expected.iter().fold(0.0f64, |most, x| most.max(x.abs()));
            assert!(largest > 0.0 || counted[step] == 0);
            assert_eq!(found.len(), expected.len());
            for (found, expected) in found.iter().zip(expected) {
                let apart = (found - expected).abs();
                assert!(
                    apart <= 1e-10 * largest,
                    "{what}, step {step}: {found} and {expected}"
                );
            }
        }
    }
}
