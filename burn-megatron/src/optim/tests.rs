//! Compares AdamW with its formula, and checks that the result does not depend on the split of the parameters.

use burn::module::{Module, Param};
use burn::tensor::{DType, Device, Tensor, TensorData};

use super::*;
use crate::comm::{ParallelContext, World};
use crate::data_parallel::{DataParallelConfig, DistributedDataParallel, Gradients};
use crate::kernel_selection::KernelChoices;
use crate::mesh::ParallelConfig;
use crate::nn::{
    Init, ModelBuilder, Norm, NormConfig, NormKind, ParallelAttention, ParallelAttentionConfig,
    ParallelModule, ParameterTable, VocabParallelEmbedding, VocabParallelEmbeddingConfig,
    Vocabulary,
};

type RankError = Box<dyn std::error::Error + Send + Sync>;

/// Parameters of all kinds: split with padding, replicated, and split with shared sections.
#[derive(Module, Debug)]
struct Mixed {
    embedding: VocabParallelEmbedding,
    norm: Norm,
    attention: ParallelAttention,
}

/// The embedding of 5 tokens is padded. The 2 KV groups are replicated over 4 ranks.
fn mixed(groups: &ParallelContext) -> Result<DistributedDataParallel<Mixed>, RankError> {
    mixed_with(groups, &KernelChoices::default())
}

fn mixed_with(
    groups: &ParallelContext,
    kernels: &KernelChoices,
) -> Result<DistributedDataParallel<Mixed>, RankError> {
    let (hidden, init) = (8, Init::Normal(0.3));
    let scope = ModelBuilder::with(groups, &Device::flex(), 7, DType::F64).with_kernels(kernels)?;
    let vocabulary = Vocabulary::padded(5, 1, groups.place().size);
    let attention = ParallelAttentionConfig {
        hidden,
        heads: 4,
        groups: 2,
        head_width: 2,
        bias: true,
        qkv_bias: true,
        qk_norm: None,
        window: None,
        sinks: false,
        scale: None,
        soft_cap: None,
        dropout: 0.0,
        init,
        output_init: init,
        sequence: 64,
    };
    let embedding = scope.child("embedding");
    let model = Mixed {
        embedding: VocabParallelEmbeddingConfig::new(vocabulary, hidden)
            .with_init(init)
            .init(&embedding)?,
        norm: NormConfig::new(NormKind::Layer, hidden, 1e-5).init(&scope.child("norm")),
        attention: attention.init(&scope.child("attention"))?,
    };
    Ok(DistributedDataParallel::with(
        scope.finish(model)?,
        groups,
        &config(),
    )?)
}

/// The second bucket starts in the middle, so that some parameters span several buckets.
fn config() -> DataParallelConfig {
    DataParallelConfig {
        bucket_size: Some(100),
        ..DataParallelConfig::default()
    }
}

fn wave(len: usize, phase: f64) -> Vec<f64> {
    (0..len)
        .map(|i| (phase + 1.7 * i as f64).sin() * 0.5)
        .collect()
}

/// Returns the full gradient of each parameter at a step.
fn full_gradients(table: &ParameterTable, step: usize) -> Vec<Vec<f64>> {
    let gradient = |(i, entry): (usize, &crate::nn::ParameterEntry)| {
        wave(entry.len(), 10.0 * step as f64 + i as f64)
    };
    table.entries().iter().enumerate().map(gradient).collect()
}

/// Returns this rank's part of the gradients.
fn gradients<M: Module>(ddp: &DistributedDataParallel<M>, step: usize) -> Gradients {
    let (table, rank) = (ddp.table(), ddp.groups().mesh_rank());
    let parts = table.entries().iter().zip(full_gradients(table, step));
    let part = parts.map(|(entry, whole)| entry.part(&whole, rank));
    ddp.gradients_of(part.map(tensor).collect(), 1).unwrap()
}

fn tensor(values: Vec<f64>) -> Tensor<1> {
    let len = values.len();
    Tensor::from_data(
        TensorData::new(values, [len]),
        (&Device::flex(), DType::F64),
    )
}

fn weights<M: Module>(ddp: &DistributedDataParallel<M>) -> Vec<Vec<f64>> {
    let values = |tensor: Tensor<1>| tensor.into_data().try_into_vec().unwrap();
    ddp.parameters().into_iter().map(values).collect()
}

/// Runs `f` on the ranks of a mesh.
fn over<T: Send>(
    tensor: usize,
    data: usize,
    f: impl Fn(&ParallelContext) -> Result<T, RankError> + Sync,
) -> Vec<T> {
    let config = ParallelConfig::new().with_tensor(tensor).with_data(data);
    let run = |rank| f(&ParallelContext::new(&config, &rank)?);
    World::threads(tensor * data).unwrap().run(run).unwrap()
}

/// Applies algorithm 2 of Loshchilov and Hutter 2019 to one element.
fn adamw(config: &AdamWConfig, rate: f64, decay: f64, mut w: f64, gradients: &[f64]) -> f64 {
    let (mut m, mut v) = (0.0, 0.0);
    for (t, g) in gradients.iter().enumerate() {
        m = config.beta1 * m + (1.0 - config.beta1) * g;
        v = config.beta2 * v + (1.0 - config.beta2) * g * g;
        let corrected = |moment: f64, beta: f64| moment / (1.0 - beta.powi(t as i32 + 1));
        let (m, v) = (corrected(m, config.beta1), corrected(v, config.beta2));
        w -= rate * (m / (v.sqrt() + config.epsilon) + decay * w);
    }
    w
}

const STEPS: usize = 4;
const RATE: f64 = 0.05;

#[test]
fn adamw_follows_its_formula_and_decays_matrices_alone() {
    #[derive(Module, Debug)]
    struct Pair {
        matrix: Param<Tensor<2>>,
        vector: Param<Tensor<1>>,
    }
    let module = Pair {
        matrix: Param::from_tensor(tensor(wave(6, 0.3)).reshape([2, 3])),
        vector: Param::from_tensor(tensor(wave(3, 0.9))),
    };
    let model = ParallelModule::replicated(module);
    let mut ddp = DistributedDataParallel::new(model, &ParallelContext::single()).unwrap();
    let before = weights(&ddp);
    let config = AdamWConfig {
        weight_decay: 0.3,
        ..AdamWConfig::default()
    };
    let mut optimizer = ParallelAdamW::new(&config, &ddp).unwrap();
    for step in 0..STEPS {
        let gradients = gradients(&ddp, step);
        optimizer.step(RATE, &mut ddp, gradients);
    }
    let steps: Vec<_> = (0..STEPS)
        .map(|step| full_gradients(ddp.table(), step))
        .collect();
    for (i, after) in weights(&ddp).into_iter().enumerate() {
        for (k, found) in after.into_iter().enumerate() {
            let gradients: Vec<f64> = steps.iter().map(|step| step[i][k]).collect();
            let decay = [config.weight_decay, 0.0][i];
            let expected = adamw(&config, RATE, decay, before[i][k], &gradients);
            // Burn rounds the settings to f32.
            assert!(
                (found - expected).abs() < 1e-6,
                "{i} {k}: {found} is not {expected}"
            );
            let other = adamw(&config, RATE, 0.3 - decay, before[i][k], &gradients);
            assert!(
                (found - other).abs() > 1e-4,
                "{i} {k} would pass with the other decay"
            );
        }
    }
}

#[test]
fn norms_and_biases_are_not_decayed() {
    let ddp = mixed(&ParallelContext::single()).unwrap();
    let decayed = ddp.table().entries().iter().filter(|entry| entry.decay);
    let decayed: Vec<_> = decayed.map(|entry| entry.path.as_str()).collect();
    let matrices = [
        "embedding.weight",
        "attention.qkv.weight",
        "attention.output.weight",
    ];
    assert_eq!(decayed, matrices);
}

#[test]
fn a_split_model_steps_as_a_whole_one() {
    let run = |groups: &ParallelContext| {
        let mut ddp = mixed(groups)?;
        let mut optimizer = ParallelAdamW::new(&AdamWConfig::default(), &ddp)?;
        for step in 0..STEPS {
            let gradients = gradients(&ddp, step);
            optimizer.step(RATE, &mut ddp, gradients);
        }
        Ok((
            weights(&ddp),
            ddp.table().clone(),
            groups.mesh_rank().clone(),
        ))
    };
    let whole = over(1, 1, run).remove(0).0;
    for ranks in [2, 4] {
        let parts = over(ranks, 1, run);
        for (i, entry) in parts[0].1.entries().iter().enumerate() {
            let parts = parts
                .iter()
                .map(|(part, _, rank)| (rank.clone(), &part[i][..]));
            let assembled = entry.assemble(parts);
            assert_eq!(assembled, whole[i], "{} over {ranks} ranks", entry.path);
        }
    }
}

#[test]
fn the_norm_counts_every_element_once() {
    for (tensor, data) in [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)] {
        let norms = over(tensor, data, |groups| {
            let ddp = mixed(groups)?;
            let table = ddp.table();
            let norm = global_norm(&gradients(&ddp, 0), &ddp)?;
            let all = full_gradients(table, 0).into_iter().flatten();
            Ok((norm, all.map(|x| x * x).sum::<f64>().sqrt()))
        });
        for (norm, expected) in &norms {
            assert!(
                (norm - expected).abs() < 1e-12 * expected,
                "{norm} is not {expected}"
            );
            assert_eq!(norm.to_bits(), norms[0].0.to_bits(), "ranks agree");
        }
    }
}

#[test]
fn scaled_gradients_have_the_norm_they_are_clipped_to() {
    let norms = over(2, 1, |groups| {
        let ddp = mixed(groups)?;
        let mut gradients = gradients(&ddp, 0);
        let norm = global_norm(&gradients, &ddp)?;
        gradients.scale(0.25 / norm);
        Ok(global_norm(&gradients, &ddp)?)
    });
    for norm in norms {
        assert!((norm - 0.25).abs() < 1e-15);
    }
}

#[test]
fn a_value_that_is_not_finite_is_reported_on_all_ranks() {
    for odd in [None, Some(0), Some(2), Some(3)] {
        for value in [f64::NAN, f64::INFINITY] {
            let found = over(2, 2, |groups| {
                let ddp = mixed(groups)?;
                let mut gradients = gradients(&ddp, 0);
                if odd == Some(groups.rank()) {
                    gradients.scale(value);
                }
                let norm = global_norm(&gradients, &ddp)?;
                Ok(all_finite(norm.is_finite(), groups)?)
            });
            assert_eq!(found, [odd.is_none(); 4], "{value} on rank {odd:?}");
        }
    }
}

#[test]
fn invalid_settings_are_refused_by_the_constructor() {
    let usual = AdamWConfig::default;
    for (config, says) in [
        (
            AdamWConfig {
                beta1: 1.0,
                ..usual()
            },
            "invalid optimizer setting beta1 = 1: expected at least 0 and below 1 in 32 bits",
        ),
        (
            AdamWConfig {
                beta2: -1e-3,
                ..usual()
            },
            "invalid optimizer setting beta2 = -0.001",
        ),
        // This beta is 1 after rounding to f32.
        (
            AdamWConfig {
                beta2: 1.0 - 1e-12,
                ..usual()
            },
            "expected at least 0 and below 1",
        ),
        (
            AdamWConfig {
                epsilon: 0.0,
                ..usual()
            },
            "epsilon = 0: expected above 0",
        ),
        (
            AdamWConfig {
                epsilon: f64::NAN,
                ..usual()
            },
            "epsilon = NaN: expected",
        ),
        (
            AdamWConfig {
                weight_decay: -0.1,
                ..usual()
            },
            "weight_decay = -0.1: expected",
        ),
        (
            AdamWConfig {
                weight_decay: f64::INFINITY,
                ..usual()
            },
            "weight_decay = inf: expected",
        ),
    ] {
        let ddp = mixed(&ParallelContext::single()).unwrap();
        let error = ParallelAdamW::new(&config, &ddp)
            .map(drop)
            .unwrap_err()
            .to_string();
        assert!(error.contains(says), "{says}: {error}");
    }
    let least = AdamWConfig {
        beta1: 0.0,
        beta2: 0.0,
        weight_decay: 0.0,
        ..usual()
    };
    assert!(least.check().is_ok());
}
