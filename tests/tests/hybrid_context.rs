//! Tests that documents on groups of different size train as on one rank.

use std::sync::Arc;

use burn::tensor::Device;
use burn_megatron::comm::ParallelContext;
use burn_megatron::nn::{BuildError, ParallelModule};
use burn_megatron_data::{DataError, IGNORE, Sample, Samples};
use burn_megatron_models::{
    MlaConfig, MoeConfig, MtpConfig, Positions, Transformer, TransformerConfig,
};
use burn_megatron_verify::{ModelSubject, Subject, VerifyOptions, verify};

const SEQ: usize = 32;

/// The starts of the documents of each row, repeated in order. With 8 tokens per rank, a document is on one, two or
/// four ranks.
const DOCUMENTS: [&[usize]; 4] = [&[0], &[0, 25], &[0, 3, 5, 9, 20], &[0, 16]];

/// A model on documents of very different lengths.
struct Documents {
    model: ModelSubject<TransformerConfig>,
    /// The starts of the documents of each row, repeated in order.
    starts: &'static [&'static [usize]],
    /// The number of leading tokens that have targets.
    targets: usize,
}

struct Rows {
    samples: Arc<dyn Samples>,
    starts: &'static [&'static [usize]],
    targets: usize,
}

impl Samples for Rows {
    fn seq(&self) -> usize {
        self.samples.seq()
    }

    fn sample(&self, number: u64) -> Result<Sample, DataError> {
        let mut sample = self.samples.sample(number)?;
        // A step of four samples begins with a different row each time.
        sample.documents = self.starts[number as usize % 5 % self.starts.len()].to_vec();
        let without = sample.targets.iter_mut().skip(self.targets);
        without.for_each(|target| *target = IGNORE);
        Ok(sample)
    }
}

impl Subject for Documents {
    type Model = Transformer;

    fn build(
        &self,
        groups: &ParallelContext,
        device: &Device,
    ) -> Result<ParallelModule<Transformer>, BuildError> {
        self.model.build(groups, device)
    }

    fn samples(&self) -> usize {
        self.model.samples
    }

    fn data(&self, groups: &ParallelContext) -> Arc<dyn Samples> {
        Arc::new(Rows {
            samples: self.model.data(groups),
            starts: self.starts,
            targets: self.targets,
        })
    }

    fn layers(&self) -> usize {
        self.model.layers()
    }
}

fn model() -> TransformerConfig {
    TransformerConfig {
        vocabulary: 19,
        context: SEQ,
        hidden: 16,
        layers: 2,
        heads: 4,
        groups: Some(2),
        mlp_width: Some(12),
        init_std: 0.2,
        ..TransformerConfig::llama()
    }
}

fn subject(config: TransformerConfig) -> Documents {
    Documents {
        model: ModelSubject {
            samples: 4,
            ..ModelSubject::new(config)
        },
        starts: &DOCUMENTS,
        targets: SEQ,
    }
}

/// Returns options for two steps, since rounding differences grow with each step.
fn options() -> VerifyOptions {
    VerifyOptions {
        steps: 2,
        tolerance: 1e-12,
        ..VerifyOptions::default()
    }
}

#[track_caller]
fn check(subject: &Documents, layouts: &[&str]) {
    let layouts: Vec<_> = layouts.iter().map(|text| text.parse().unwrap()).collect();
    let report = verify(subject, &layouts, &options()).unwrap();
    assert!(report.passes(), "{report}");
}

#[test]
fn every_layout_trains_as_one_rank() {
    let layouts = [
        "hybrid32-dp1-mb1",
        // Rows of several samples that are longer than the model's context.
        "hybrid64-dp2-mb1",
        "hybrid16-dp2-mb1",
        "cp2-hybrid16-dp1-mb1",
        "allgather-hybrid8-dp4-mb1",
        "cp2-hybrid8-dp2-mb1-z1",
        "hybrid8-dp4-mb1-z3-hsdp2",
        "tp2-hybrid16-dp2-mb1-z2",
        "tp2-sp-cp2-hybrid8-dp2-mb1-z3",
    ];
    check(&subject(model()), &layouts);
}

/// A document of three tokens is on one rank, and the other ranks compute padding. A single sample is on all ranks.
#[test]
fn fewer_documents_than_ranks_train_as_on_one() {
    let mut few = Documents {
        starts: &[&[0, 3]],
        targets: 3,
        ..subject(model())
    };
    few.model.samples = 1;
    let layouts = ["cp4-hybrid8-dp1-mb1", "tp2-sp-cp4-hybrid32-dp1-mb1"];
    check(&few, &layouts);
    let one = Documents {
        starts: &[&[0]],
        targets: SEQ,
        ..few
    };
    check(&one, &layouts);
}

#[test]
fn positions_dropout_windows_and_further_tokens_are_those_of_the_documents() {
    let layout = ["cp2-hybrid8-dp2-mb1", "tp2-sp-hybrid16-dp2-mb1"];
    let learned = TransformerConfig {
        positions: Positions::Learned,
        dropout: 0.2,
        window: Some(6),
        ..model()
    };
    check(&subject(learned), &layout);
    let further = TransformerConfig {
        mtp: Some(MtpConfig::default()),
        ..model()
    };
    check(&subject(further), &layout);
}

#[test]
fn what_cannot_be_shared_is_refused() {
    let error = |config: TransformerConfig, layout: &str| {
        let layouts = [layout.parse().unwrap()];
        let error = verify(&subject(config), &layouts, &options()).unwrap_err();
        error.to_string()
    };
    for (layout, expected) in [
        ("pp2-hybrid16-dp2-mb1", "pipeline = 2: expected 1"),
        ("ep2-hybrid16-dp2-mb1", "expert = 2: expected 1"),
        (
            "cp2-alltoall-hybrid16-dp1-mb1",
            "expected ring or all-gather",
        ),
        ("cp2-striped-hybrid16-dp1-mb1", "expected zigzag"),
        ("hybrid16-dp2-mb2", "micro_batch_size = 2: expected 1"),
        (
            "tp2-sp-hybrid17-dp2-mb1",
            "expected a multiple of 2, such as 16",
        ),
        (
            "hybrid8-dp2-mb1",
            "a row has 32 tokens, and 2 ranks of context x data hold 16",
        ),
    ] {
        let error = error(model(), layout);
        assert!(error.contains(expected), "{layout}: {error}");
    }
    let short = TransformerConfig {
        context: SEQ - 1,
        ..model()
    };
    let padded = error(short, "hybrid16-dp2-mb1");
    assert!(
        padded.contains("expected a model with a context of at least 32, or rows of at most 28"),
        "{padded}"
    );
    let mla = MlaConfig {
        q_rank: None,
        kv_rank: 4,
        nope_width: 3,
        rope_width: 2,
        value_width: 2,
        norm_epsilon: 1e-6,
    };
    for (config, expected) in [
        (
            TransformerConfig {
                groups: None,
                mla: Some(mla),
                ..model()
            },
            "with latent attention",
        ),
        (
            TransformerConfig {
                moe: Some(MoeConfig {
                    experts: 2,
                    ..MoeConfig::default()
                }),
                ..model()
            },
            "with experts",
        ),
        (
            TransformerConfig {
                attention_dropout: 0.1,
                ..model()
            },
            "dropout acts on its probabilities",
        ),
    ] {
        let error = error(config, "hybrid16-dp2-mb1");
        assert!(error.contains(expected), "{error}");
    }
}
