//! Tests every layer on two and four ranks against one rank.

use burn::module::Module;
use burn::tensor::{DType, Int, Tensor};

use super::case::{Case, TestTensor, replicated};
use super::{autodiff, over, values};
use crate::nn::*;

/// The sizes `[batch, seq, width]` of the tests, which all differ.
const BATCH: usize = 2;
const SEQ: usize = 8;
const HIDDEN: usize = 12;

fn shape(width: usize) -> [usize; 3] {
    [BATCH, SEQ, width]
}

fn whole(width: usize) -> TestTensor<'static> {
    TestTensor {
        shape: shape(width),
        placement: &replicated,
    }
}

/// Returns a sequence that is split or replicated.
fn sequence(width: usize, cut: bool) -> TestTensor<'static> {
    if cut {
        TestTensor {
            shape: shape(width),
            placement: &|n| Placement::split(1, SEQ, n),
        }
    } else {
        whole(width)
    }
}

const INIT: Init = Init::Normal(0.5);

#[test]
fn column_parallel_linear() {
    for (bias, sequence_parallel, gather) in [
        (true, false, false),
        (false, false, true),
        (true, true, false),
        (true, true, true),
    ] {
        let config = ColumnParallelLinearConfig::new(HIDDEN, 20)
            .with_init(INIT)
            .with_bias(bias)
            .with_gather_output(gather);
        let split = TestTensor {
            shape: shape(20),
            placement: &|n| Placement::split(2, 20, n),
        };
        let case = Case {
            input: sequence(HIDDEN, sequence_parallel),
            output: if gather { whole(20) } else { split },
            build: &|builder| config.init(&builder.with_sequence_parallel(sequence_parallel)),
            forward: &|layer: &ColumnParallelLinear, x| layer.forward(x),
        };
        case.check(&format!(
            "{config:?}, sequence parallel {sequence_parallel}"
        ));
    }
}

#[test]
fn column_parallel_linear_with_sections() {
    let section = |units, shared| OutputSection::new("heads".into(), units, 3).with_shared(shared);
    for groups in [4, 2, 1] {
        for sequence_parallel in [false, true] {
            let sections = vec![
                section(8, false),
                section(groups, true),
                section(groups, true),
            ];
            let config = ColumnParallelLinearConfig::new(HIDDEN, (8 + 2 * groups) * 3)
                .with_sections(sections)
                .with_init(INIT);
            let parts = |units: usize, n: usize| Section {
                size: units * 3,
                parts: units.min(n),
            };
            let case = Case {
                input: sequence(HIDDEN, sequence_parallel),
                output: TestTensor {
                    shape: shape((8 + 2 * groups) * 3),
                    placement: &|n| Placement::Split {
                        dim: 2,
                        sections: vec![parts(8, n), parts(groups, n), parts(groups, n)],
                    },
                },
                build: &|builder| config.init(&builder.with_sequence_parallel(sequence_parallel)),
                forward: &|layer: &ColumnParallelLinear, x| layer.forward(x),
            };
            case.check(&format!(
                "{config:?}, sequence parallel {sequence_parallel}"
            ));
        }
    }
}

#[test]
fn row_parallel_linear() {
    for (bias, split, sequence_parallel) in [
        (true, true, false),
        (false, true, true),
        (true, false, false),
        (true, false, true),
    ] {
        let config = RowParallelLinearConfig::new(16, HIDDEN)
            .with_init(INIT)
            .with_bias(bias)
            .with_input_is_split(split);
        let features = TestTensor {
            shape: shape(16),
            placement: &|n| Placement::split(2, 16, n),
        };
        let case = Case {
            input: if split { features } else { whole(16) },
            output: sequence(HIDDEN, sequence_parallel),
            build: &|builder| config.init(&builder.with_sequence_parallel(sequence_parallel)),
            forward: &|layer: &RowParallelLinear, x| layer.forward(x),
        };
        case.check(&format!(
            "{config:?}, sequence parallel {sequence_parallel}"
        ));
    }
}

#[test]
fn row_parallel_linear_hands_its_bias_back() {
    for sequence_parallel in [false, true] {
        let config = RowParallelLinearConfig::new(16, HIDDEN).with_init(INIT);
        let case = Case {
            input: TestTensor {
                shape: shape(16),
                placement: &|n| Placement::split(2, 16, n),
            },
            output: sequence(HIDDEN, sequence_parallel),
            build: &|builder| config.init(&builder.with_sequence_parallel(sequence_parallel)),
            forward: &|layer: &RowParallelLinear, x| {
                let (y, bias) = layer.forward_without_bias(x.clone());
                let added = layer.forward(x) - y.clone();
                let bias = bias.expect("there is a bias").into_tensor().unsqueeze();
                assert!((added - bias.clone()).abs().max().into_scalar::<f64>() < 1e-13);
                // The bias is used differently than in `forward`.
                y * bias
            },
        };
        case.check(&format!(
            "{config:?}, sequence parallel {sequence_parallel}"
        ));
    }
}

/// Returns the tokens of the complete batch. Each of the 10 tokens is on some rank.
fn tokens() -> Tensor<2, Int> {
    let tokens: Vec<i64> = (0..BATCH * SEQ).map(|i| (7 * i as i64 + 3) % 10).collect();
    Tensor::<1, Int>::from_data(tokens.as_slice(), &autodiff()).reshape([BATCH, SEQ])
}

fn embedding(
    builder: &ModelBuilder,
    sequence_parallel: bool,
) -> Result<VocabParallelEmbedding, BuildError> {
    let vocabulary = Vocabulary::padded(10, 4, builder.place().size);
    VocabParallelEmbeddingConfig::new(vocabulary, HIDDEN)
        .with_init(INIT)
        .init(&builder.with_sequence_parallel(sequence_parallel))
}

#[test]
fn vocab_parallel_embedding() {
    for sequence_parallel in [false, true] {
        let case = Case {
            input: sequence(HIDDEN, sequence_parallel),
            output: sequence(HIDDEN, sequence_parallel),
            build: &|builder| embedding(builder, sequence_parallel),
            forward: &|layer: &VocabParallelEmbedding, x| layer.forward(tokens()) * x,
        };
        case.check(&format!("sequence parallel {sequence_parallel}"));
    }
}

#[test]
fn padding_of_an_embedding_is_zero_and_stays_so() {
    over(4, |groups| {
        let builder = ModelBuilder::with(&groups, &autodiff(), 7, DType::F64);
        let layer = embedding(&builder, false).unwrap();
        let gradients = layer.forward(tokens()).sum().backward();
        let weight = layer.weight.val();
        let gradient = values(weight.grad(&gradients).unwrap());
        let weight = values(weight.inner());
        let first = builder.place().index * 4;
        for (i, (w, g)) in weight.iter().zip(&gradient).enumerate() {
            let padding = first + i / HIDDEN >= 10;
            assert_eq!(
                (*w == 0.0, *g == 0.0),
                (padding, padding),
                "row {}",
                first + i / HIDDEN
            );
        }
    });
}

#[test]
fn learned_positions() {
    for sequence_parallel in [false, true] {
        let case = Case {
            input: sequence(HIDDEN, sequence_parallel),
            output: sequence(HIDDEN, sequence_parallel),
            build: &|builder| {
                let layer = LearnedPositionsConfig::new(SEQ + 3, HIDDEN)
                    .with_init(INIT)
                    .init(&builder.with_sequence_parallel(sequence_parallel));
                Ok(layer)
            },
            forward: &|layer: &LearnedPositions, x: Tensor<3>| {
                let y = layer.forward(x.clone());
                y * x
            },
        };
        case.check(&format!("sequence parallel {sequence_parallel}"));
    }
}

#[derive(Module, Debug)]
struct Ends {
    embedding: VocabParallelEmbedding,
    output: OutputLayer,
}

#[test]
fn output_layer_with_a_weight_of_its_own_and_with_the_embeddings() {
    for (tied, sequence_parallel) in [(false, false), (false, true), (true, false), (true, true)] {
        let case = Case {
            input: sequence(HIDDEN, sequence_parallel),
            output: TestTensor {
                shape: shape(10),
                placement: &|n| Placement::split(2, Vocabulary::padded(10, 4, n).padded, n),
            },
            build: &|builder| {
                let vocabulary = Vocabulary::padded(10, 4, builder.place().size);
                let at = builder
                    .child("output")
                    .with_sequence_parallel(sequence_parallel);
                let output = OutputLayerConfig::new(vocabulary, HIDDEN)
                    .with_init(INIT)
                    .with_tied(tied)
                    .init(&at)?;
                let embedding = embedding(&builder.child("embedding"), sequence_parallel)?;
                Ok(Ends { embedding, output })
            },
            forward: &|ends: &Ends, x| {
                ends.output
                    .forward(ends.embedding.forward(tokens()) * x, &ends.embedding)
            },
        };
        case.check(&format!(
            "tied {tied}, sequence parallel {sequence_parallel}"
        ));
    }
}

#[test]
fn norms() {
    for kind in [NormKind::Layer, NormKind::Rms] {
        for sequence_parallel in [false, true] {
            let case = Case {
                input: sequence(HIDDEN, sequence_parallel),
                output: sequence(HIDDEN, sequence_parallel),
                build: &|builder| {
                    let builder = builder.with_sequence_parallel(sequence_parallel);
                    Ok(NormConfig::new(kind, HIDDEN, 1e-5).init(&builder))
                },
                forward: &|layer: &Norm, x| layer.forward(x),
            };
            case.check(&format!("{kind:?}, sequence parallel {sequence_parallel}"));
        }
    }
}

#[test]
fn attention() {
    // Multi-head attention, grouped-query attention (with one key-value head per rank, and with fewer key-value heads
    // than ranks), and multi-query attention.
    for (groups, turned, dropout, sequence_parallel, bias) in [
        (8, false, 0.0, false, true),
        (4, true, 0.0, true, false),
        (2, true, 0.3, false, true),
        (2, false, 0.3, true, true),
        (1, true, 0.3, true, true),
        (1, false, 0.0, false, true),
    ] {
        let config = ParallelAttentionConfig {
            hidden: HIDDEN,
            heads: 8,
            groups,
            head_width: 4,
            bias,
            qkv_bias: bias,
            qk_norm: None,
            window: None,
            sinks: false,
            scale: None,
            soft_cap: None,
            dropout,
            init: INIT,
            output_init: INIT,
            sequence: 64,
        };
        let rotary = turned.then(|| super::rotary(SEQ, 4, 100.0, DType::F64));
        let case = Case {
            input: sequence(HIDDEN, sequence_parallel),
            output: sequence(HIDDEN, sequence_parallel),
            build: &|builder| config.init(&builder.with_sequence_parallel(sequence_parallel)),
            forward: &|layer: &ParallelAttention, x| layer.forward(x, rotary.as_ref()),
        };
        case.check(&format!(
            "{config:?}, sequence parallel {sequence_parallel}"
        ));
    }
}

#[test]
fn mlp() {
    for (activation, bias) in [
        (Activation::Gelu, false),
        (Activation::GeluTanh, true),
        (Activation::SwiGlu, true),
    ] {
        for sequence_parallel in [false, true] {
            let config = ParallelMlpConfig {
                hidden: HIDDEN,
                width: 20,
                activation,
                bias,
                init: INIT,
                output_init: INIT,
            };
            let case = Case {
                input: sequence(HIDDEN, sequence_parallel),
                output: sequence(HIDDEN, sequence_parallel),
                build: &|builder| config.init(&builder.with_sequence_parallel(sequence_parallel)),
                forward: &|layer: &ParallelMlp, x| layer.forward(x),
            };
            case.check(&format!(
                "{config:?}, sequence parallel {sequence_parallel}"
            ));
        }
    }
}
