//! Tests that Hugging Face checkpoints compute the same results as with `transformers`, in every layout.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_megatron::checkpoint::LoadTolerance;
use burn_megatron::comm::{ParallelContext, World};
use burn_megatron::data_parallel::ZeroStage;
use burn_megatron::mesh::ParallelConfig;
use burn_megatron::model::{LanguageModel, ModelConfig};
use burn_megatron::nn::ModelBuilder;
use burn_megatron::pipeline::engine::{ForwardOptions, forward_only};
use burn_megatron_data::{DataError, Dataset, Sample, Samples, Sampling};
use burn_megatron_models::hf::HfFolder;
use burn_megatron_train::metrics::{HeldOutMetrics, StepMetrics, StepTiming};
use burn_megatron_train::schedule::LrStyle;
use burn_megatron_train::{Observer, ObserverError, TrainConfig, Trainer};
use safetensors::SafeTensors;

pub(super) type AnyError = Box<dyn std::error::Error + Send + Sync>;

pub(super) const SEQ: usize = 24;
/// The number of tokens of rows that are shorter than the original context of LongRoPE.
const SHORT: usize = 12;
const ROWS: usize = 4;
const STEPS: usize = 20;
const VOCABULARY: usize = 61;
/// The size of an f32 element in bytes.
const ELEMENT: usize = 4;

/// A checkpoint, and the results of `transformers` with this checkpoint from its `make.py`.
struct Fixture {
    folder: HfFolder,
    /// Shape `[2, SEQ]`.
    tokens: Vec<i32>,
    /// The numbers of leading tokens of each row for which the fixture has logits.
    lengths: Vec<usize>,
    /// Shape `[2, length, VOCABULARY]` for each length.
    logits: Vec<f32>,
    /// Shape `[STEPS, ROWS, SEQ + 1]`.
    batches: Vec<i32>,
    /// Shape `[STEPS]`.
    losses: Vec<f64>,
    /// The losses of multi-token prediction, times their weight. Empty, or of shape `[STEPS]`.
    further: Vec<f64>,
}

impl Fixture {
    fn open(name: &str) -> Self {
        let fixtures = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tests/fixtures/hf");
        let path = PathBuf::from(fixtures).join(name);
        let expected = fs::read(path.join("expected.safetensors")).unwrap();
        let expected = SafeTensors::deserialize(&expected).unwrap();
        let bytes = |name| expected.tensor(name).unwrap().data();
        fn of<const N: usize, T>(bytes: &[u8], read: fn([u8; N]) -> T) -> Vec<T> {
            bytes.as_chunks().0.iter().copied().map(read).collect()
        }
        let short = expected.tensor("short").ok();
        let lengths = [Some(SEQ), short.as_ref().map(|_| SHORT)];
        let mut logits = of(bytes("logits"), f32::from_le_bytes);
        let short = short.iter();
        logits.extend(short.flat_map(|short| of(short.data(), f32::from_le_bytes)));
        let fixture = Self {
            folder: HfFolder::open(&path).unwrap(),
            tokens: of(bytes("tokens"), i32::from_le_bytes),
            lengths: lengths.into_iter().flatten().collect(),
            logits,
            batches: of(bytes("batches"), i32::from_le_bytes),
            losses: of(bytes("losses"), f64::from_le_bytes),
            further: match expected.tensor("further") {
                Ok(further) => of(further.data(), f64::from_le_bytes),
                Err(_) => vec![],
            },
        };
        let tokens = 2 * fixture.lengths.iter().sum::<usize>();
        assert_eq!(fixture.logits.len(), tokens * VOCABULARY);
        assert_eq!(fixture.batches.len(), STEPS * ROWS * (SEQ + 1));
        fixture
    }
}

/// The given sequences, in order.
pub(super) struct Sequences(Arc<Rows>);

struct Rows(Vec<Sample>);

impl Samples for Rows {
    fn seq(&self) -> usize {
        SEQ
    }

    fn sample(&self, number: u64) -> Result<Sample, DataError> {
        Ok(self.0[number as usize].clone())
    }
}

impl Sequences {
    pub fn new(tokens: &[i32]) -> Self {
        let rows = tokens.chunks(SEQ + 1).map(|row| Sample {
            tokens: row[..SEQ].to_vec(),
            targets: row[1..].to_vec(),
            documents: vec![],
            padding: 0,
        });
        Self(Arc::new(Rows(rows.collect())))
    }
}

impl Dataset for Sequences {
    fn describe(&self) -> String {
        "given sequences".into()
    }

    fn fingerprint(&self) -> u64 {
        0
    }

    fn vocabulary(&self) -> usize {
        VOCABULARY
    }

    fn training(&self, sampling: &Sampling) -> Result<Arc<dyn Samples>, DataError> {
        assert_eq!(sampling.samples as usize, STEPS * ROWS);
        Ok(self.0.clone())
    }

    fn held_out(&self, _: usize, max: usize) -> Result<Vec<Sample>, DataError> {
        Ok(self.0.0[..max].to_vec())
    }
}

#[derive(Default)]
pub(super) struct Losses {
    pub own: Vec<f64>,
    pub further: Vec<f64>,
}

impl Observer for Losses {
    fn step(&mut self, metrics: &StepMetrics, _: &StepTiming) -> Result<(), ObserverError> {
        self.own.push(metrics.loss);
        self.further.extend(metrics.minimised.further_tokens);
        Ok(())
    }

    fn held_out(&mut self, _: &HeldOutMetrics) -> Result<(), ObserverError> {
        Ok(())
    }
}

pub(super) fn config() -> TrainConfig {
    TrainConfig {
        steps: STEPS,
        micro_batch_size: 1,
        global_batch_size: ROWS,
        sequence_length: Some(SEQ),
        learning_rate: 1e-3,
        min_learning_rate: 0.0,
        warmup_steps: 0,
        schedule: LrStyle::Constant,
        clip: 1e9,
        held_out_samples: 1,
        ..TrainConfig::default()
    }
}

/// Returns the number of bytes that each rank reads from a folder, and the number of bytes of its parameters.
fn bytes_read(name: &str, layout: &ParallelConfig, zero: ZeroStage) -> Vec<[u64; 2]> {
    let run = World::threads(layout.tensor * layout.pipeline * layout.data_size())
        .unwrap()
        .run(|rank| -> Result<_, AnyError> {
            let groups = ParallelContext::new(layout, &rank)?;
            let folder = Fixture::open(name).folder;
            let (device, mut config) = (Device::flex(), config());
            config.data_parallel.zero_stage = zero;
            let scope = ModelBuilder::new(&groups, &device);
            let model = folder.config().model.init_with(scope)?;
            let mut trainer = Trainer::new(model, &groups, &device, &config)?;
            trainer.load_weights(&folder, LoadTolerance::default())?;
            let table = trainer.model().table();
            let sizes = table.entries().iter().map(|entry| {
                let shape = entry.local_shape(groups.mesh_rank());
                shape.iter().product::<usize>() * ELEMENT
            });
            Ok([folder.bytes_read(), sizes.sum::<usize>() as u64])
        });
    run.unwrap()
}

/// A rank reads each of its parameters once. With ZeRO, the ranks of a data group share the reading.
#[test]
fn each_rank_reads_its_own_bytes() {
    let layout = || ParallelConfig::new();
    let split = layout()
        .with_tensor(2)
        .with_sequence_parallel(true)
        .with_pipeline(2)
        .with_data(2)
        .with_expert(2)
        .with_expert_tensor(1);
    let read = bytes_read("mixtral", &split, ZeroStage::Replicated);
    // The file contains no padding. The last tensor rank has one row of padding.
    let row = (32 * ELEMENT) as u64;
    for [read, own] in &read {
        assert!(read == own || read + row == *own, "{read} of {own}");
    }
    let [[whole, _]] = bytes_read("mixtral", &layout(), ZeroStage::Replicated)[..] else {
        panic!("one rank")
    };
    assert!(read[0][0] < whole / 3, "{read:?} of {whole}");
    let zero = layout().with_data(2);
    for stage in [ZeroStage::Optimizer, ZeroStage::Parameters] {
        let read = bytes_read("mixtral", &zero, stage);
        let sum: u64 = read.iter().map(|[read, _]| read).sum();
        assert_eq!(sum, whole, "{stage:?}");
        assert!(
            read.iter().all(|[read, _]| *read < whole * 3 / 5),
            "{read:?}"
        );
    }
}

/// Returns the results of each rank: the logits if it has the last stage and whole sequences, and the losses.
fn compute(fixture: &Fixture, layout: &ParallelConfig) -> Vec<(Option<Vec<f32>>, Losses)> {
    let pipeline = layout.pipeline;
    let model = &fixture.folder.config().model;
    let run = World::threads(layout.tensor * layout.context * pipeline * layout.data_size())
        .unwrap()
        .run(|rank| -> Result<_, AnyError> {
            let groups = ParallelContext::new(layout, &rank)?;
            let (device, config) = (Device::flex(), config());
            let scope = ModelBuilder::new(&groups, &device);
            let mut trainer = Trainer::new(model.init_with(scope)?, &groups, &device, &config)?;
            // One stage per rank.
            let placement: Vec<_> = (0..pipeline).collect();
            trainer.load_weights(&fixture.folder, LoadTolerance::default())?;
            let tokens = TensorData::new(fixture.tokens.clone(), [2, SEQ]);
            let tokens = Tensor::<2, Int>::from_data(tokens, &device);
            let module = trainer.model().module();
            // A rank of a context group has a part of the tokens.
            let mut logits = None;
            for length in fixture.lengths.iter().filter(|_| layout.context == 1) {
                let tokens = tokens.clone().narrow(1, 0, *length);
                let run = |stage, input| module.hidden(stage, input, tokens.clone().into());
                let options = ForwardOptions::default();
                let hidden = forward_only(&placement, groups.pipeline(), &device, options, run)?;
                if let Some(hidden) = hidden {
                    let found = module.logits_of(hidden).into_data();
                    logits
                        .get_or_insert_with(Vec::new)
                        .extend(found.iter::<f32>());
                }
            }
            let mut losses = Losses::default();
            trainer.fit(&Sequences::new(&fixture.batches), &mut losses)?;
            Ok((logits, losses))
        });
    run.unwrap()
}

/// Returns the largest distance between two rows of numbers.
pub(super) fn apart<T: Into<f64> + Copy>(a: &[T], b: &[T]) -> f64 {
    assert_eq!(a.len(), b.len());
    let apart = a
        .iter()
        .zip(b)
        .map(|(a, b)| ((*a).into() - (*b).into()).abs());
    // NaN counts as infinite.
    apart.fold(0.0, |most, x| if x > most || x.is_nan() { x } else { most })
}

fn assert_equal_in_every_layout(name: &str) {
    let layouts = [(1, 1), (2, 1), (1, 2), (2, 2)].map(|(tensor, pipeline)| {
        ParallelConfig::new()
            .with_tensor(tensor)
            .with_sequence_parallel(tensor * pipeline == 4)
            .with_pipeline(pipeline)
    });
    assert_equal(name, &layouts);
}

fn assert_equal(name: &str, layouts: &[ParallelConfig]) {
    let fixture = Fixture::open(name);
    for layout in layouts {
        let mut seen = 0;
        for (logits, losses) in compute(&fixture, layout) {
            let layout = format!("{name}, {layout:?}");
            if let Some(logits) = logits {
                let apart = apart(&logits, &fixture.logits);
                println!("{layout}: logits {apart:.1e} apart");
                assert!(apart < 1e-5, "{layout}: logits {apart} apart");
                seen += 1;
            }
            let Losses { own, further } = losses;
            for (what, found, expected) in [
                ("losses", own, &fixture.losses),
                ("losses of further tokens", further, &fixture.further),
            ] {
                let apart = apart(&found, expected);
                println!("{layout}: {what} {apart:.1e} apart");
                assert!(apart < 1e-5, "{layout}: {what} {apart} apart: {found:?}");
            }
        }
        let logits = if layout.context == 1 { 1 } else { 0 };
        assert_eq!(seen, logits * layout.tensor * layout.data_size());
    }
}

#[test]
fn gpt2() {
    assert_equal_in_every_layout("gpt2");
}

/// A model with tied weights, and biases everywhere.
#[test]
fn llama2() {
    assert_equal_in_every_layout("llama2");
}

/// A model with scaled rotary positions and an untied output, in three files.
#[test]
fn llama3() {
    assert_equal_in_every_layout("llama3");
}

/// A model with biases in attention only, and YaRN with an explicit factor of cosines and sines.
#[test]
fn llama_with_yarn() {
    assert_equal_in_every_layout("llama-yarn");
}

/// Rows that are shorter and longer than the original context.
#[test]
fn llama_with_longrope() {
    assert_equal_in_every_layout("llama-longrope");
}

/// A window that is shorter than the sequence, in bf16.
#[test]
fn mistral() {
    assert_equal_in_every_layout("mistral");
}

/// A model with tied weights, and biases of queries, keys and values.
#[test]
fn qwen2() {
    assert_equal_in_every_layout("qwen2");
}

/// A model with normalized heads that are together wider than the residual stream.
#[test]
fn qwen3() {
    assert_equal_in_every_layout("qwen3");
}

/// Compares on 1, 2 and 4 expert ranks, with experts and their width split, and with a pipeline.
fn assert_equal_with_experts(name: &str) {
    let on = |expert| ParallelConfig::new().with_data(expert).with_expert(expert);
    let sequence = |layout: ParallelConfig| layout.with_tensor(2).with_sequence_parallel(true);
    assert_equal(
        name,
        &[
            on(1),
            on(2),
            on(4),
            sequence(on(1)),
            sequence(on(2).with_expert_tensor(1)),
            on(2).with_pipeline(2),
        ],
    );
}

#[test]
fn mixtral() {
    assert_equal_with_experts("mixtral");
}

/// A model in bf16 whose first block has no experts, and whose router weights do not sum to 1.
#[test]
fn qwen3_moe() {
    assert_equal_with_experts("qwen3-moe");
}

/// A model in bf16 with norms over all heads together. Their means are over all tensor ranks. Router weights do not
/// sum to 1, and attention has biases.
#[test]
fn olmoe() {
    assert_equal_with_experts("olmoe");
    assert_equal("olmoe", &[ParallelConfig::new().with_context(2)]);
}

/// Compares on one rank, tensor 2 with sequence parallelism, pipeline 2, and context 2.
fn assert_equal_on_each_axis(name: &str) {
    let one = ParallelConfig::new;
    assert_equal(
        name,
        &[
            one(),
            one().with_tensor(2).with_sequence_parallel(true),
            one().with_pipeline(2),
            one().with_context(2),
        ],
    );
}

/// A model in bf16 with windows in every second block, soft caps, norms of the outputs of branches, and a scaled
/// embedding.
#[test]
fn gemma2() {
    assert_equal_on_each_axis("gemma2");
}

/// A model in bf16 with norms of heads and two bases of rotary positions. One of the bases is scaled.
#[test]
fn gemma3() {
    assert_equal_on_each_axis("gemma3");
}

/// Compares on one rank, tensor 2, expert 2, pipeline 2 and context 2.
fn assert_equal_on_every_axis(name: &str) {
    let one = ParallelConfig::new;
    assert_equal(
        name,
        &[
            one(),
            one().with_tensor(2).with_sequence_parallel(true),
            one().with_data(2).with_expert(2),
            one().with_pipeline(2),
            one().with_context(2),
        ],
    );
}

/// A model in bf16 with latent attention without a latent of queries. YaRN scales the scores. Groups are scored by
/// their maximum, and router weights have a factor.
#[test]
fn deepseek_v2() {
    assert_equal_on_every_axis("deepseek-v2");
}

/// A model with a latent of queries. Router weights are sigmoids with biases that are not normalized, and groups are
/// scored by the sum of two.
#[test]
fn deepseek_v3() {
    assert_equal_on_every_axis("deepseek-v3");
}

/// The same model with prediction of the token after the next. `mtp.py` computes its block and norms.
#[test]
fn deepseek_v3_with_further_tokens() {
    assert_equal_on_every_axis("deepseek-v3-mtp");
}

/// A model in bf16 with attention sinks, windows in every second block, and experts with biases. The expert width
/// differs from the width of the residual stream.
#[test]
fn gpt_oss() {
    assert_equal_on_every_axis("gpt-oss");
}
