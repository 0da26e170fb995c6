//! Tests of smaller batches in the first steps of a run.

use burn::tensor::Device;
use burn_megatron::comm::ParallelContext;
use burn_megatron::optim::LossScale;
use burn_megatron_data::{DataError, Sample, Samples};
use burn_megatron_models::TransformerConfig;
use burn_megatron_tests::TransformerSubject;
use burn_megatron_tests::{small_gpt, without_dropout};
use burn_megatron_train::metrics::StepMetrics;
use burn_megatron_train::{BatchWarmup, NoopObserver, TrainConfig, Trainer};
use burn_megatron_verify::{Subject, VerifyOptions, verify};

/// The samples of a subject from number `first` on.
struct LaterSamples {
    subject: TransformerSubject,
    first: u64,
}

impl Samples for LaterSamples {
    fn seq(&self) -> usize {
        self.subject.seq()
    }

    fn sample(&self, number: u64) -> Result<Sample, DataError> {
        self.subject.sample(self.first + number)
    }
}

/// Returns the steps of a run on one rank. The learning rate is so small that the weights do not change.
fn steps(subject: &TransformerSubject, first: u64, config: &TrainConfig) -> Vec<StepMetrics> {
    let (groups, device) = (ParallelContext::single(), Device::flex());
    let model = subject.build(&groups, &device).unwrap();
    let mut trainer = Trainer::new(model, &groups, &device, config).unwrap();
    let samples = LaterSamples {
        subject: subject.clone(),
        first,
    };
    let step = |_| trainer.step(&samples, &mut NoopObserver).unwrap();
    (0..config.steps).map(step).collect()
}

/// Each step reads the samples after the samples of the previous step. The warm-up defines the number of samples.
#[test]
fn its_steps_are_those_of_smaller_batches() {
    // Dropout masks depend on the step.
    let subject = without_dropout(small_gpt());
    let config = TrainConfig {
        steps: 5,
        micro_batch_size: 2,
        global_batch_size: 8,
        learning_rate: 1e-300,
        min_learning_rate: 0.0,
        warmup_steps: 0,
        loss_scale: Some(LossScale::None),
        ..TrainConfig::default()
    };
    let part = |until_step, global_batch_size| BatchWarmup {
        until_step,
        global_batch_size,
    };
    let warm = TrainConfig {
        batch_warmup: vec![part(2, 2), part(3, 4)],
        ..config.clone()
    };
    let found = steps(&subject, 0, &warm);
    let mut first = 0;
    for (found, size) in found.iter().zip([2, 2, 4, 8, 8]) {
        let one = TrainConfig {
            steps: 1,
            global_batch_size: size,
            ..config.clone()
        };
        let expected = &steps(&subject, first, &one)[0];
        assert_eq!(
            (found.loss, found.gradient_norm, found.tokens),
            (expected.loss, expected.gradient_norm, expected.tokens),
            "step {}",
            found.step
        );
        first += size as u64;
    }
}

#[test]
fn it_is_the_same_in_every_layout() {
    let layouts = [
        "dp2-mb1",
        "tp2-sp-dp2-mb1-z1",
        "pp2-mb1/1f1b",
        "pp2-mb1/interleaved/v2",
        "pp2-dp2-mb1-z2/zb-h1",
        "cp2-dp2-mb1-z3",
    ];
    let layouts = layouts.map(|layout| layout.parse().unwrap());
    let options = VerifyOptions {
        train: TrainConfig {
            batch_warmup: vec![BatchWarmup {
                until_step: 3,
                global_batch_size: 4,
            }],
            ..VerifyOptions::default().train
        },
        // A micro-batch of the whole batch is larger than the first batches.
        same_micro_batches: true,
        ..VerifyOptions::default()
    };
    let gpt = without_dropout(small_gpt());
    let subject = TransformerSubject {
        samples: 8,
        config: TransformerConfig {
            layers: 4,
            ..gpt.config
        },
        ..gpt
    };
    let report = verify(&subject, &layouts, &options).unwrap();
    assert!(report.passes(), "{report}");
}
