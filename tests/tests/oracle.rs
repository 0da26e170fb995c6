//! Compares ten steps in f64 with an independent NumPy implementation, `tests/fixtures/oracle/make.py`. The runs use
//! clipping, warm-up, cosine decay, label smoothing, z-loss, masked targets and tied weights, in several layouts.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use burn::tensor::{DType, Device};
use burn_megatron::checkpoint::{
    Checkpoint, CheckpointError, CheckpointFolder, ElementType, LoadTolerance, TensorMeta,
    TensorSlice, TensorSource,
};
use burn_megatron::comm::{ParallelContext, World};
use burn_megatron::model::ModelConfig;
use burn_megatron::nn::{ModelBuilder, QkNorm};
use burn_megatron_data::{DataError, Dataset, Sample, Samples, Sampling};
use burn_megatron_models::{Positions, Transformer, TransformerConfig};
use burn_megatron_train::metrics::{HeldOutMetrics, StepMetrics, StepTiming};
use burn_megatron_train::{Observer, ObserverError, SaveConfig, Saver, TrainConfig, Trainer};
use burn_megatron_verify::Layout;
use safetensors::SafeTensors;

type AnyError = Box<dyn std::error::Error + Send + Sync>;

const VOCABULARY: usize = 19;
const SEQ: usize = 8;
const STEPS: usize = 10;
const ROWS: usize = 4;

/// The absolute tolerance of losses and weights, and the relative tolerance of norms and rates. Both sides compute in
/// f64 with different orders of sums. Differences up to 3e-14 occur.
const CLOSE: f64 = 1e-12;

/// The tolerance of a weight whose exact gradient is 0. Adam divides its rounding error, about 1e-16, by the epsilon
/// of 1e-8. Ten steps with rates that sum to less than 0.1 move the weight by up to 1e-9.
const ADRIFT: f64 = 1e-9;

/// The inputs and the results of NumPy.
struct Fixture(Vec<u8>);

impl Fixture {
    fn open(name: &str) -> Self {
        let fixtures = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/oracle");
        let path = PathBuf::from(fixtures).join(name);
        Self(fs::read(path.with_extension("safetensors")).unwrap())
    }

    fn tensors(&self) -> SafeTensors<'_> {
        SafeTensors::deserialize(&self.0).unwrap()
    }

    fn f64s(&self, name: &str) -> Vec<f64> {
        f64s(self.tensors().tensor(name).unwrap().data())
    }

    fn i32s(&self, name: &str) -> Vec<i32> {
        let tensors = self.tensors();
        let bytes = tensors.tensor(name).unwrap().data();
        let values = bytes.as_chunks().0.iter();
        values.map(|bytes| i32::from_le_bytes(*bytes)).collect()
    }
}

fn f64s(bytes: &[u8]) -> Vec<f64> {
    let values = bytes.as_chunks().0.iter();
    values.map(|bytes| f64::from_le_bytes(*bytes)).collect()
}

/// The weights before the first step, as a tensor source.
impl TensorSource for Fixture {
    fn name(&self) -> String {
        "the oracle's fixture".into()
    }

    fn keys(&self) -> Vec<String> {
        let tensors = self.tensors();
        let mut keys: Vec<_> = tensors.names().into_iter().map(String::from).collect();
        keys.sort();
        keys
    }

    fn tensor(&self, key: &str) -> Option<TensorMeta> {
        let tensors = self.tensors();
        Some(TensorMeta {
            key: key.into(),
            dtype: ElementType::F64,
            shape: tensors.tensor(key).ok()?.shape().to_vec(),
        })
    }

    fn read(&self, key: &str, slice: &TensorSlice) -> Result<Vec<u8>, CheckpointError> {
        let tensors = self.tensors();
        let tensor = tensors.tensor(key).unwrap();
        let runs = slice.runs(tensor.shape()).into_iter();
        let runs = runs.map(|run| &tensor.data()[8 * run.in_tensor..][..8 * run.len]);
        Ok(runs.collect::<Vec<_>>().concat())
    }
}

/// The samples of the fixture in order. The samples of the last step are held out.
struct Rows(Arc<Given>);

struct Given(Vec<Sample>);

impl Samples for Given {
    fn seq(&self) -> usize {
        SEQ
    }

    fn sample(&self, number: u64) -> Result<Sample, DataError> {
        Ok(self.0[number as usize].clone())
    }
}

impl Rows {
    fn new(fixture: &Fixture) -> Self {
        let (tokens, targets) = (fixture.i32s("tokens"), fixture.i32s("targets"));
        assert_eq!(tokens.len(), STEPS * ROWS * SEQ);
        let rows = tokens.chunks(SEQ).zip(targets.chunks(SEQ));
        let sample = |(tokens, targets): (&[i32], &[i32])| Sample {
            tokens: tokens.to_vec(),
            targets: targets.to_vec(),
            documents: vec![],
            padding: 0,
        };
        Self(Arc::new(Given(rows.map(sample).collect())))
    }
}

impl Dataset for Rows {
    fn describe(&self) -> String {
        "the oracle's samples".into()
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

    fn held_out(&self, _: usize, _: usize) -> Result<Vec<Sample>, DataError> {
        Ok(self.0.0[(STEPS - 1) * ROWS..].to_vec())
    }
}

#[derive(Clone, Default)]
struct Seen {
    steps: Vec<StepMetrics>,
    held_out: f64,
}

impl Observer for Seen {
    fn step(&mut self, metrics: &StepMetrics, _: &StepTiming) -> Result<(), ObserverError> {
        self.steps.push(*metrics);
        Ok(())
    }

    fn held_out(&mut self, metrics: &HeldOutMetrics) -> Result<(), ObserverError> {
        self.held_out = metrics.loss;
        Ok(())
    }
}

/// A model of the NumPy implementation, with its clipping norm.
struct Case {
    name: &'static str,
    model: TransformerConfig,
    clip: f64,
}

impl Case {
    fn gpt2() -> Self {
        let model = TransformerConfig {
            vocabulary: VOCABULARY,
            context: SEQ,
            hidden: 12,
            layers: 2,
            heads: 4,
            mlp_width: Some(20),
            label_smoothing: 0.1,
            z_loss: 1e-2,
            ..TransformerConfig::gpt2()
        };
        Self {
            name: "gpt2",
            model,
            clip: 2.0,
        }
    }

    fn llama() -> Self {
        let model = TransformerConfig {
            groups: Some(2),
            head_width: Some(4),
            norm_zero_centered: true,
            positions: Positions::rotary(100.0),
            qkv_bias: Some(true),
            qk_norm: Some(QkNorm::Heads),
            window: Some(5),
            ..Self::gpt2().model
        };
        let llama = TransformerConfig::llama();
        Self {
            name: "llama",
            model: TransformerConfig {
                norm: llama.norm,
                activation: llama.activation,
                bias: llama.bias,
                tied: llama.tied,
                ..model
            },
            clip: 4.0,
        }
    }

    fn config(&self, layout: &Layout) -> TrainConfig {
        TrainConfig {
            steps: STEPS,
            micro_batch_size: layout
                .micro_batch
                .unwrap_or(ROWS / layout.parallel.data_size()),
            global_batch_size: ROWS,
            learning_rate: 1e-2,
            min_learning_rate: 1e-3,
            warmup_steps: 3,
            clip: self.clip,
            data_parallel: layout.data_parallel(),
            held_out_samples: ROWS,
            ..TrainConfig::default()
        }
    }

    fn trainer(
        &self,
        layout: &Layout,
        groups: &ParallelContext,
    ) -> Result<Trainer<Transformer>, AnyError> {
        let (device, config) = (Device::flex(), self.config(layout));
        let scope = ModelBuilder::with(groups, &device, config.seed, DType::F64);
        let model = self.model.init_with(scope)?;
        Ok(Trainer::new(model, groups, &device, &config)?)
    }

    /// Trains on each rank and returns its observations. The last step is saved into `path`.
    fn train(&self, layout: &Layout, fixture: &Fixture, path: &Path) -> Vec<Seen> {
        let run = World::threads(layout.ranks()).unwrap().run(|rank| {
            let groups = ParallelContext::new(&layout.parallel, &rank)?;
            let mut trainer = self.trainer(layout, &groups)?;
            trainer.load_weights(fixture, LoadTolerance::default())?;
            trainer.save_with(Saver::open(SaveConfig::into_folder(path), &groups)?);
            let mut seen = Seen::default();
            trainer.fit(&Rows::new(fixture), &mut seen)?;
            Ok::<_, AnyError>(seen)
        });
        run.unwrap()
    }
}

/// Returns the largest difference. Each difference is divided by its scale.
fn apart(found: &[f64], expected: &[f64], scale: impl Fn(f64) -> f64) -> f64 {
    assert_eq!(found.len(), expected.len());
    let apart = found.iter().zip(expected);
    let apart = apart.map(|(found, expected)| (found - expected).abs() / scale(*expected));
    // NaN counts as infinite.
    apart.fold(0.0, |most, x| if x > most || x.is_nan() { x } else { most })
}

fn assert_equal_in_every_layout(case: &Case, layouts: &[&str]) {
    let fixture = Fixture::open(case.name);
    for layout in layouts {
        let what = format!("{}, {layout}", case.name);
        let folder = tempfile::tempdir().unwrap();
        for seen in case.train(&layout.parse().unwrap(), &fixture, folder.path()) {
            let series =
                |of: fn(&StepMetrics) -> f64| seen.steps.iter().map(of).collect::<Vec<_>>();
            assert!(seen.steps.iter().all(|step| !step.skipped));
            let losses = series(|step| step.loss);
            let losses = apart(&losses, &fixture.f64s("cross_entropy"), |_| 1.0);
            let objectives = series(|step| step.minimised.objective.unwrap());
            let objectives = apart(&objectives, &fixture.f64s("objective"), |_| 1.0);
            let norms = series(|step| step.gradient_norm);
            let norms = apart(&norms, &fixture.f64s("gradient_norm"), |norm| norm);
            let rates = series(|step| step.learning_rate);
            let rates = apart(&rates, &fixture.f64s("learning_rate"), |rate| rate);
            let held_out = apart(&[seen.held_out], &[fixture.f64s("held_out")[0]], |_| 1.0);
            println!(
                "{what}: losses {losses:.1e}, objectives {objectives:.1e}, norms {norms:.1e}, rates \
                 {rates:.1e}, held out {held_out:.1e} apart"
            );
            let all = [losses, objectives, norms, rates, held_out];
            assert!(all.iter().all(|apart| *apart < CLOSE), "{what}: {all:?}");
        }
        let latest = CheckpointFolder::open(folder.path()).unwrap().latest();
        let learned = case.model.positions == Positions::Learned;
        assert_weights(&what, &latest.unwrap().unwrap(), &fixture, learned);
    }
}

/// Checks the final weights, by their keys in the checkpoint. `learned` states that positions are learned, so that
/// attention keys are not rotated.
fn assert_weights(what: &str, checkpoint: &Checkpoint, fixture: &Fixture, learned: bool) {
    let keys = checkpoint.keys();
    let keys: Vec<_> = keys
        .iter()
        .filter_map(|key| key.strip_prefix("model/"))
        .collect();
    assert!(!keys.is_empty());
    for key in keys {
        let own = format!("model/{key}");
        let meta = checkpoint.tensor(&own).unwrap();
        assert_eq!(meta.dtype, ElementType::F64);
        let found = checkpoint
            .read(&own, &TensorSlice::whole(&meta.shape))
            .unwrap();
        let expected = fixture.f64s(&format!("final/{key}"));
        let found = f64s(&found);
        // A common offset of all keys cancels in the softmax, unless the keys are rotated.
        let keys = if learned && key.ends_with("attention.qkv.bias") {
            found.len() / 3..found.len() / 3 * 2
        } else {
            0..0
        };
        let pairs = found.iter().zip(&expected).enumerate();
        let apart = pairs.fold([0.0f64; 2], |mut most, (at, (found, expected))| {
            let most_here = &mut most[usize::from(keys.contains(&at))];
            *most_here = most_here.max((found - expected).abs());
            most
        });
        println!("{what}: {key} {apart:?} apart");
        assert!(
            found.iter().all(|weight| weight.is_finite()) && apart[0] < CLOSE && apart[1] < ADRIFT,
            "{what}: {key} is {apart:?} apart"
        );
    }
}

/// A model with tied weights, learned positions and biases. The vocabulary is padded if two ranks share it.
#[test]
fn gpt2() {
    let layouts = [
        "tp1",
        "tp2-sp-mb1",
        "pp2-mb1/1f1b",
        "dp2-z1-mb1",
        "dp2-z3",
        "tp2-sp-pp2-dp2-mb1-z1/1f1b",
        "tp4-mb2",
    ];
    assert_equal_in_every_layout(&Case::gpt2(), &layouts);
}

/// A model with grouped queries, normalized heads, a window, rotary positions, and norms stored as offsets from 1.
#[test]
fn llama() {
    let layouts = [
        "tp1",
        "tp2-sp-mb2",
        "pp2-mb1/zb-h1",
        "dp4-z2",
        "dp2-z3-mb1",
        "tp2-pp2-dp2-mb1-z1/1f1b",
    ];
    assert_equal_in_every_layout(&Case::llama(), &layouts);
}
