//! Compares the outputs of the upcycled model with the outputs of the dense model, in f64.

use std::collections::BTreeMap;

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_megatron::checkpoint::{
    ElementType, LoadTolerance, MODEL, TensorMeta, TensorSlice, TensorSource, load_weights,
};
use burn_megatron::comm::ParallelContext;
use burn_megatron::data_parallel::DistributedDataParallel;
use burn_megatron::kernels::philox::Stream;
use burn_megatron::model::LanguageModel;
use burn_megatron::nn::ModelBuilder;

use super::*;

const TOKENS: [usize; 2] = [2, 8];

/// A source of tensors in memory.
struct Memory {
    dtype: ElementType,
    tensors: BTreeMap<String, (Vec<usize>, Vec<f64>)>,
}

impl Memory {
    /// Creates random weights of a model, with norms around 1.
    fn new(model: &TransformerConfig) -> Self {
        let parameters = model.init_with(builder().outline()).unwrap();
        let entries = parameters.table.entries().iter().enumerate();
        let tensors = entries.map(|(number, entry)| {
            let mean = f64::from(entry.path.contains("norm") && entry.path.ends_with("weight"));
            let mut values = vec![mean; entry.len()];
            let stream = Stream::new(1, number as u64);
            stream.normals(0, entry.len(), |i, x| values[i] += 0.3 * x);
            let key = format!("{MODEL}{}", entry.path);
            (key, (entry.shape.clone(), values))
        });
        Self {
            dtype: ElementType::F64,
            tensors: tensors.collect(),
        }
    }

    fn values(&mut self, path: &str) -> &mut Vec<f64> {
        let key = format!("{MODEL}{path}");
        &mut self.tensors.get_mut(&key).unwrap().1
    }
}

impl TensorSource for Memory {
    fn name(&self) -> String {
        "memory".into()
    }

    fn keys(&self) -> Vec<String> {
        self.tensors.keys().cloned().collect()
    }

    fn tensor(&self, key: &str) -> Option<TensorMeta> {
        let (shape, _) = self.tensors.get(key)?;
        Some(TensorMeta {
            key: key.into(),
            dtype: self.dtype,
            shape: shape.clone(),
        })
    }

    fn read(&self, key: &str, slice: &TensorSlice) -> Result<Vec<u8>, CheckpointError> {
        let (shape, values) = &self.tensors[key];
        assert!(slice.fits(shape), "{key} {slice}");
        let runs = slice.runs(shape).into_iter();
        let part: Vec<_> = runs
            .flat_map(|run| &values[run.in_tensor..run.in_tensor + run.len])
            .copied()
            .collect();
        let data = TensorData::new(part, [slice.len()]).convert_dtype(self.dtype.dtype());
        Ok(data.bytes().to_vec())
    }
}

fn builder() -> ModelBuilder {
    ModelBuilder::with(&ParallelContext::single(), &Device::flex(), 0, DType::F64)
}

fn logits(model: &TransformerConfig, weights: &dyn TensorSource) -> Vec<f64> {
    let module = model.init_with(builder()).unwrap();
    let mut ddp = DistributedDataParallel::new(module, &ParallelContext::single()).unwrap();
    load_weights(&mut ddp, weights, LoadTolerance::default()).unwrap();
    let tokens: Vec<i32> = (0..16).map(|i| i * i * 7 % 19).collect();
    let tokens = TensorData::new(tokens, TOKENS);
    let tokens = Tensor::<2, Int>::from_data(tokens, &Device::flex());
    let module = ddp.module();
    let logits = module.logits_of(module.hidden(0, None, tokens.into()));
    logits.into_data().iter::<f64>().collect()
}

fn dense(activation: Activation, bias: bool) -> TransformerConfig {
    TransformerConfig {
        vocabulary: 19,
        context: 8,
        hidden: 16,
        layers: 2,
        mlp_width: Some(12),
        init_std: 0.4,
        activation,
        bias,
        ..TransformerConfig::llama()
    }
}

fn upcycle(experts: usize, granularity: usize, experts_per_token: usize) -> UpcycleConfig {
    UpcycleConfig {
        moe: MoeConfig {
            experts,
            experts_per_token,
            ..MoeConfig::default()
        },
        granularity,
        seed: 5,
    }
}

fn with_score(score: ScoreFunction, config: UpcycleConfig) -> UpcycleConfig {
    let moe = MoeConfig {
        score,
        ..config.moe
    };
    UpcycleConfig { moe, ..config }
}

fn after_dense(first_dense: usize, config: UpcycleConfig) -> UpcycleConfig {
    let moe = MoeConfig {
        first_dense,
        ..config.moe
    };
    UpcycleConfig { moe, ..config }
}

/// Returns the largest difference between two lists of logits, relative to the largest logit.
fn apart(found: &[f64], wanted: &[f64]) -> f64 {
    let largest = |values: &mut dyn Iterator<Item = f64>| {
        // The result is infinite if a difference is NaN.
        values.fold(0.0, |most: f64, x| if x <= most { most } else { x })
    };
    let pairs = found.iter().zip(wanted);
    let difference = largest(&mut pairs.map(|(a, b)| (a - b).abs()));
    difference / largest(&mut wanted.iter().map(|x| x.abs()))
}

#[track_caller]
fn assert_same(model: &TransformerConfig, config: &UpcycleConfig) {
    let memory = Memory::new(model);
    let upcycled = Upcycled::new(&memory, model, config).unwrap();
    let (found, wanted) = (logits(upcycled.model(), &upcycled), logits(model, &memory));
    let apart = apart(&found, &wanted);
    assert!(apart < 1e-12, "{config:?}: {apart}");
    assert_eq!(config.difference(), None);
}

#[test]
fn normalised_weights_of_whole_copies_change_nothing() {
    let gated = dense(Activation::SwiGlu, false);
    for (experts, granularity, k) in [
        (4, 1, 2),
        (4, 1, 3),
        (4, 1, 4),
        (8, 2, 2),
        (8, 2, 4),
        (12, 3, 6),
        (4, 4, 4),
    ] {
        assert_same(&gated, &upcycle(experts, granularity, k));
    }
    for score in [ScoreFunction::Sigmoid, ScoreFunction::SqrtSoftplus] {
        let config = with_score(score, upcycle(8, 2, 4));
        assert_same(&gated, &config);
    }
}

#[test]
fn every_activation_with_and_without_biases() {
    for activation in [
        Activation::Gelu,
        Activation::SquaredRelu,
        Activation::GeGlu,
        Activation::QuickGeGlu,
        Activation::ClampedSwiGlu,
    ] {
        for bias in [false, true] {
            assert_same(&dense(activation, bias), &upcycle(8, 2, 4));
        }
    }
}

/// If the output layer is tied, it has no separate weight, neither before nor after upcycling.
#[test]
fn tied_embeddings() {
    let model = TransformerConfig {
        tied: true,
        ..dense(Activation::SwiGlu, false)
    };
    assert_same(&model, &upcycle(8, 2, 4));
    let memory = Memory::new(&model);
    let upcycled = Upcycled::new(&memory, &model, &upcycle(8, 2, 4)).unwrap();
    assert!(upcycled.model().tied);
    let keys = upcycled.keys();
    assert!(keys.contains(&format!("{MODEL}embedding.weight")));
    let output = format!("{MODEL}output");
    assert!(!keys.iter().any(|key| key.starts_with(&output)), "{keys:?}");
}

#[test]
fn some_blocks_stay_dense() {
    let model = dense(Activation::SwiGlu, false);
    let config = after_dense(1, upcycle(4, 2, 2));
    assert_same(&model, &config);
    let upcycled = config.model(&model).unwrap();
    let widths = |model: &TransformerConfig| {
        let moe = model.moe.as_ref().unwrap();
        (model.mlp_width, moe.expert_width)
    };
    assert_eq!(widths(&upcycled), (Some(12), Some(6)));
    let all = upcycle(4, 2, 2).model(&model).unwrap();
    assert_eq!(widths(&all), (Some(6), Some(6)));
}

/// Returns a model in which all router scores are equal, so that the first experts are selected.
fn without_router(activation: Activation) -> TransformerConfig {
    TransformerConfig {
        init_std: 0.0,
        ..dense(activation, true)
    }
}

/// If all scores are equal, the weight of each expert is 1 / E.
#[test]
fn weights_that_are_not_normalised_are_scaled_for_equal_scores() {
    for (experts, granularity, k) in [(4, 1, 1), (4, 1, 2), (8, 2, 4)] {
        let config = with_score(ScoreFunction::PreSoftmax, upcycle(experts, granularity, k));
        let model = without_router(Activation::SwiGlu);
        let memory = Memory::new(&model);
        let upcycled = Upcycled::new(&memory, &model, &config).unwrap();
        let (found, wanted) = (logits(upcycled.model(), &upcycled), logits(&model, &memory));
        assert!(apart(&found, &wanted) < 1e-12, "{config:?}");
        let difference = config.difference().unwrap();
        assert_eq!(difference.per_score, Some(experts as f64 / k as f64));
        assert_eq!(difference.slices, [1.0; 2]);
    }
}

/// Two of the three selected experts have the first slice.
#[test]
fn slices_that_are_chosen_unevenly_count_as_said() {
    let model = without_router(Activation::Gelu);
    let config = upcycle(4, 2, 3);
    let difference = config.difference().unwrap();
    let [least, most] = difference.slices;
    assert_eq!([least, most], [2.0 / 3.0, 4.0 / 3.0]);
    let said = "slices of an MLP are weighted by 0.67 and 1.33 for equal scores, because the experts per token are not a \
         multiple of the granularity";
    assert_eq!(difference.to_string(), said);
    let mut memory = Memory::new(&model);
    let upcycled = Upcycled::new(&memory, &model, &config).unwrap();
    let found = logits(upcycled.model(), &upcycled);
    assert!(apart(&found, &logits(&model, &memory)) > 1e-2);
    for block in 0..2 {
        let down = memory.values(&format!("blocks.{block}.mlp.down.weight"));
        let half = down.len() / 2;
        down[..half].iter_mut().for_each(|x| *x *= most);
        down[half..].iter_mut().for_each(|x| *x *= least);
    }
    assert!(apart(&found, &logits(&model, &memory)) < 1e-12);
}

#[test]
fn experts_are_slices_of_the_mlp() {
    let model = dense(Activation::SwiGlu, true);
    let mut memory = Memory::new(&model);
    let config = upcycle(6, 3, 3);
    let upcycled = Upcycled::new(&memory, &model, &config).unwrap();
    let read = |path: &str, offset: &[usize], shape: &[usize]| {
        let slice = TensorSlice {
            offset: offset.to_vec(),
            shape: shape.to_vec(),
        };
        let bytes = upcycled.read(&format!("{MODEL}blocks.1.moe.{path}"), &slice);
        let data = TensorData::from_bytes_vec(bytes.unwrap(), [slice.len()], DType::F64);
        data.iter::<f64>().collect::<Vec<_>>()
    };
    // Experts 3 to 5 are the second copy of the MLP. The slice contains the last two columns of the gate of expert 5,
    // and the first column of its up projection.
    let found = read("experts.up", &[5, 7, 2], &[1, 1, 3]);
    let whole = read("experts.up", &[0, 0, 0], &[6, 16, 8]);
    let router = read("router.gate", &[3, 0], &[1, 6]);
    let lower = read("experts.down", &[4, 1, 2], &[1, 1, 3]);
    let bias = read("experts.down_bias", &[2, 3], &[1, 2]);
    let up = memory.values("blocks.1.mlp.up.weight").clone();
    let row = &up[7 * 24..8 * 24];
    // The outputs must be multiplied by 3. The up projection is multiplied by 2, and the down projection by the
    // remaining factor.
    assert_eq!(found, [row[10], row[11], 2.0 * row[20]]);
    let down = memory.values("blocks.1.mlp.down.weight");
    let from = (4 + 1) * 16 + 2;
    assert_eq!(lower, [0, 1, 2].map(|i| 1.5 * down[from + i]));
    let at = (5 * 16 + 7) * 8 + 2;
    assert_eq!(found, whole[at..at + 3]);
    assert_eq!(router[..3], [router[0]; 3]);
    assert_eq!(router[3..], [router[3]; 3]);
    assert_ne!(router[0], router[3]);
    assert_eq!(bias, memory.values("blocks.1.mlp.down.bias")[3..5]);
}

/// The router has the first columns of the router of a new model with this seed, and each column is repeated.
#[test]
fn the_router_is_a_fresh_one() {
    let model = dense(Activation::SwiGlu, false);
    let memory = Memory::new(&model);
    let config = upcycle(4, 2, 2);
    let upcycled = Upcycled::new(&memory, &model, &config).unwrap();
    let root = ModelBuilder::with(&ParallelContext::single(), &Device::flex(), 5, DType::F64);
    let path = "blocks.0.moe.router.gate";
    let stream = Stream::new(root.child(path).stream_key(), 0);
    let mut fresh = vec![0.0; 16 * 4];
    stream.normals(0, 64, |i, x| fresh[i] = 0.4 * x);
    let rows = fresh.chunks(4);
    let wanted: Vec<_> = rows
        .flat_map(|row| [row[0], row[0], row[1], row[1]])
        .collect();
    let bytes = upcycled.read(&format!("{MODEL}{path}"), &TensorSlice::whole(&[16, 4]));
    let found = TensorData::from_bytes_vec(bytes.unwrap(), [64], DType::F64);
    assert_eq!(found.iter::<f64>().collect::<Vec<_>>(), wanted);
}

#[test]
fn elements_are_rounded_once_and_must_not_overflow() {
    let model = dense(Activation::Gelu, false);
    let mut memory = Memory::new(&model);
    memory.dtype = ElementType::F16;
    memory.values("blocks.0.mlp.down.weight")[1] = 40_000.0;
    let upcycled = Upcycled::new(&memory, &model, &upcycle(4, 2, 2)).unwrap();
    let key = format!("{MODEL}blocks.0.moe.experts.down");
    assert_eq!(upcycled.tensor(&key).unwrap().dtype, ElementType::F16);
    let read = |expert| {
        let slice = TensorSlice {
            offset: vec![expert, 0, 0],
            shape: vec![1, 6, 16],
        };
        upcycled.read(&key, &slice)
    };
    read(1).unwrap();
    let error = read(2).unwrap_err().to_string();
    let said = "memory: model/blocks.0.mlp.down.weight overflows f16 in an expert";
    assert_eq!(error, said);
}

#[test]
fn sizes_that_do_not_fit_are_refused() {
    let model = dense(Activation::SwiGlu, false);
    let refusal = |model: &TransformerConfig, config: UpcycleConfig| {
        let error = config.model(model).unwrap_err();
        error.to_string()
    };
    let pre = |config| with_score(ScoreFunction::PreSoftmax, config);
    let last = after_dense(2, upcycle(4, 2, 2));
    for (config, said) in [
        (
            upcycle(10, 5, 5),
            "model: an MLP of width 12 cannot be cut into granularity = 5 slices: expected 1, 2, 3, 4, 6, 12",
        ),
        (
            upcycle(7, 2, 2),
            "model: 7 experts are not a multiple of granularity = 2: expected 6 or 8",
        ),
        (
            upcycle(2, 3, 2),
            "model: 2 experts are not a multiple of granularity = 3: expected 3",
        ),
        (
            upcycle(4, 2, 5),
            "invalid experts_per_token = 5: expected 1 to the 4 experts",
        ),
        (
            upcycle(4, 1, 1),
            "is its score, which is not normalised: expected the score pre-softmax, or at least 2",
        ),
        (pre(upcycle(0, 1, 1)), "invalid moe.experts = 0"),
        (
            last,
            "model: first_dense = 2 leaves none of the 2 blocks: expected at most 1",
        ),
    ] {
        let error = refusal(&model, config);
        assert!(error.contains(said), "{error}");
    }
    let error = refusal(&TransformerConfig::mixtral(), upcycle(8, 1, 2));
    insta::assert_snapshot!(error, @"model: it has 8 experts already: expected a dense model");
}

#[test]
fn tensors_that_are_not_those_of_the_model_are_refused() {
    let model = dense(Activation::SwiGlu, false);
    let refusal = |change: &dyn Fn(&mut Memory)| {
        let mut memory = Memory::new(&model);
        change(&mut memory);
        let upcycled = Upcycled::new(&memory, &model, &upcycle(4, 2, 2));
        upcycled.err().unwrap().to_string()
    };
    let down = "model/blocks.0.mlp.down.weight";
    let error = refusal(&|memory| drop(memory.tensors.remove(down).unwrap()));
    assert_eq!(error, format!("memory has no {down}"));
    let error = refusal(&|memory| memory.tensors.get_mut(down).unwrap().0 = vec![16, 12]);
    assert!(
        error.contains("[16, 12] in memory, and [12, 16]"),
        "{error}"
    );
    let error = refusal(&|memory| {
        let odd = (vec![1], vec![0.0]);
        memory.tensors.insert("model/odd".into(), odd);
    });
    assert!(error.contains("memory has model/odd"), "{error}");
}
