//! Tests of shorter rows in the first steps of a run.

use burn::tensor::Device;
use burn_megatron::comm::ParallelContext;
use burn_megatron::optim::LossScale;
use burn_megatron_data::{DataError, Sample, Samples};
use burn_megatron_tests::TransformerSubject;
use burn_megatron_tests::{small_gpt, small_llama};
use burn_megatron_train::metrics::StepMetrics;
use burn_megatron_train::{NoopObserver, SequenceWarmup, TrainConfig, Trainer};
use burn_megatron_verify::{Subject, VerifyOptions, verify};

/// The samples of a subject, cut into rows.
struct CutSamples {
    whole: TransformerSubject,
    length: usize,
}

impl Samples for CutSamples {
    fn seq(&self) -> usize {
        self.length
    }

    fn sample(&self, number: u64) -> Result<Sample, DataError> {
        let rows = self.whole.seq() / self.length;
        let sample = self.whole.sample(number / rows as u64)?;
        let start = number as usize % rows * self.length;
        let row = start..start + self.length;
        let inside = |at: &&usize| row.contains(at) && **at > start;
        let documents = sample.documents.iter().filter(inside);
        let real = sample.tokens.len() - sample.padding;
        Ok(Sample {
            tokens: sample.tokens[row.clone()].to_vec(),
            targets: sample.targets[row.clone()].to_vec(),
            documents: if sample.documents.is_empty() {
                vec![]
            } else {
                [0].into_iter()
                    .chain(documents.map(|at| at - start))
                    .collect()
            },
            padding: row.end.saturating_sub(real).min(self.length),
        })
    }
}

/// Returns the steps of a run on one rank.
fn steps(
    subject: &TransformerSubject,
    samples: &dyn Samples,
    config: &TrainConfig,
) -> Vec<StepMetrics> {
    let (groups, device) = (ParallelContext::single(), Device::flex());
    let model = subject.build(&groups, &device).unwrap();
    let mut trainer = Trainer::new(model, &groups, &device, config).unwrap();
    let step = |_| trainer.step(samples, &mut NoopObserver).unwrap();
    (0..config.steps).map(step).collect()
}

/// Tests with dropout, whose masks also depend on the rows.
#[test]
fn its_rows_are_those_of_samples_of_their_length() {
    for (subject, packed) in [(small_gpt(), false), (small_llama(), true)] {
        let subject = TransformerSubject { packed, ..subject };
        let config = TrainConfig {
            steps: 3,
            micro_batch_size: 2,
            global_batch_size: subject.samples,
            warmup_steps: 0,
            loss_scale: Some(LossScale::None),
            ..TrainConfig::default()
        };
        let warm = TrainConfig {
            sequence_warmup: vec![SequenceWarmup {
                until_step: 2,
                length: 4,
            }],
            ..config.clone()
        };
        let cut = TrainConfig {
            sequence_length: Some(4),
            micro_batch_size: 4,
            global_batch_size: 2 * subject.samples,
            ..config.clone()
        };
        let found = steps(&subject, &subject, &warm);
        let whole = subject.clone();
        let expected = steps(&subject, &CutSamples { whole, length: 4 }, &cut);
        assert_eq!(found[..2], expected[..2]);
        let unlike = steps(&subject, &subject, &config);
        assert_ne!(found[0].loss, unlike[0].loss);
        assert_ne!(
            found[2].loss, expected[2].loss,
            "the third step has whole rows"
        );
    }
}

#[test]
fn it_is_the_same_in_every_layout() {
    let layouts = [
        "tp2-sp-dp2",
        "cp2-ring-dp1",
        "tp2-sp-cp2-alltoall-dp1",
        "cp2-dp2-mb1-z3",
        "pp2-dp2-mb1/1f1b",
    ];
    let layouts = layouts.map(|layout| layout.parse().unwrap());
    let options = VerifyOptions {
        train: TrainConfig {
            sequence_warmup: vec![SequenceWarmup {
                until_step: 3,
                length: 4,
            }],
            ..VerifyOptions::default().train
        },
        ..VerifyOptions::default()
    };
    for packed in [false, true] {
        let subject = TransformerSubject {
            packed,
            ..small_llama()
        };
        let report = verify(&subject, &layouts, &options).unwrap();
        assert!(report.passes(), "packed {packed}:\n{report}");
    }
}
