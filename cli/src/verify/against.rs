//! Implements `burn-megatron verify --against`, which compares with a step that another framework computed.

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use burn::tensor::{DType, Device, TensorData};
use burn_megatron::checkpoint::{ElementType, LoadTolerance, MODEL, TensorSlice, TensorSource};
use burn_megatron::comm::{ParallelContext, World};
use burn_megatron::data_parallel::{DataParallelConfig, Precision};
use burn_megatron::mesh::ParallelConfig;
use burn_megatron::nn::ModelBuilder;
use burn_megatron::regular_file;
use burn_megatron::text_table::Table;
use burn_megatron_data::{DataError, Dataset, IGNORE, Sample, Samples, Sampling};
use burn_megatron_train::metrics::{HeldOutMetrics, StepMetrics, StepTiming};
use burn_megatron_train::{Observer, ObserverError, StepGradients, TrainConfig};
use burn_megatron_verify::devices::relative_difference;
use serde::Deserialize;
use toml::Table as Settings;

use crate::error::Error;
use crate::family::{Families, Model};
use crate::terminal;

/// Contents of `step.json` in the folder.
#[derive(Deserialize)]
struct Step {
    /// Tokens of shape `[rows, seq]`.
    tokens: Vec<Vec<i32>>,
    /// Targets of shape `[rows, seq]`. -100 means no target.
    targets: Vec<Vec<i32>>,
    /// The mean loss over the targets.
    loss: f64,
    /// The type in which the step was computed.
    dtype: String,
}

/// The target value that PyTorch ignores.
const TORCH_IGNORE: i32 = -100;

/// The minimum scale of the loss. The rounding error of a loss does not vanish with the loss.
const LOSS_SCALE: f64 = 1e-2;

/// Maximum size of `step.json` in bytes.
const STEP_BYTES: u64 = 1 << 30;

/// Step of the model in f64.
struct Own {
    loss: f64,
    /// The gradients with the keys of their parameters.
    gradients: Vec<(String, Vec<f64>)>,
}

/// Compares the step in `folder` with a step of burn-megatron in f64. The exit code is 0 if loss and gradients
/// agree.
pub fn run(folder: &Path, tolerance: Option<f64>, families: &Families) -> Result<ExitCode, Error> {
    let step = Step::read(&folder.join("step.json"))?;
    let (model, weights) = families.hf(folder)?.open(folder)?;
    let gradients = folder.join("gradients");
    let (other, gradients) = families.hf(&gradients)?.open(&gradients)?;
    if !model.equals(&*other) {
        return Err(format!(
            "{}: the config.json next to the gradients describes another model",
            folder.display()
        )
        .into());
    }
    step.check(&model, folder)?;
    let tolerance = tolerance.unwrap_or(match step.dtype.as_str() {
        "bfloat16" | "float16" => 5e-2,
        _ => 1e-4,
    });
    let foreign_loss = step.loss;
    let targets = step.targets.iter().flatten();
    let targets = targets.filter(|target| **target != TORCH_IGNORE).count();
    let own = own_step(&model, &*weights, step)?;
    let mut rows = vec![
        ["", "relative difference", "verdict"]
            .map(String::from)
            .to_vec(),
    ];
    let mut passes = true;
    let mut row = |name: &str, relative: f64| {
        let is_close = relative <= tolerance;
        passes &= is_close;
        let verdict = if is_close { "pass" } else { "FAIL" };
        rows.push(vec![name.into(), format!("{relative:.1e}"), verdict.into()]);
    };
    row(
        "loss",
        relative_difference(&[foreign_loss], &[own.loss], LOSS_SCALE),
    );
    let read = own
        .gradients
        .iter()
        .map(|(key, _)| values(&*gradients, key));
    let foreign: Vec<Vec<f64>> = read.collect::<Result<_, _>>()?;
    let largest = |values: &Vec<f64>| values.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
    let scale = 1e-2 * foreign.iter().map(largest).fold(0.0, f64::max);
    for ((key, own), foreign) in own.gradients.iter().zip(&foreign) {
        let name = key.split_once('/').map_or(key.as_str(), |(_, path)| path);
        row(name, relative_difference(foreign, own, scale));
    }
    println!(
        "{}, on {targets} targets of {}",
        model.describe(),
        folder.display()
    );
    println!(
        "loss {:.9} there, {:.9} here; bound {tolerance:.1e}",
        foreign_loss, own.loss
    );
    println!(
        "{}",
        Table::new(rows).with_left([0, 2]).fit(terminal::width())
    );
    println!(
        "{}",
        if passes {
            "the step agrees"
        } else {
            "the step DIFFERS"
        }
    );
    Ok(if passes {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

impl Step {
    fn read(path: &Path) -> Result<Self, Error> {
        let named = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
        let text = regular_file::read_text(path, STEP_BYTES).map_err(|error| {
            format!(
                "{}; cli/foreign/transformers_step.py writes it",
                named(&error)
            )
        })?;
        serde_json::from_str(&text).map_err(|error| named(&error).into())
    }

    /// Checks the shapes, and that tokens are within the vocabulary.
    fn check(&self, model: &Model, folder: &Path) -> Result<(), Error> {
        let wrong = |what: String| -> Result<(), Error> {
            Err(format!("{}: {what}", folder.join("step.json").display()).into())
        };
        let seq = self.tokens.first().map_or(0, Vec::len);
        let rows = self.tokens.len();
        if seq == 0 || seq > model.context() {
            let context = model.context();
            return wrong(format!(
                "rows of {seq} tokens: expected 1 to {context}, the model's context"
            ));
        }
        let all = self.tokens.iter().chain(&self.targets);
        if self.targets.len() != rows || all.clone().any(|row| row.len() != seq) {
            return wrong(format!(
                "expected {rows} rows of {seq} tokens and the same number of targets"
            ));
        }
        let vocabulary = model.vocabulary();
        let is_token = |token: &i32| usize::try_from(*token).is_ok_and(|token| token < vocabulary);
        let targets = self.targets.iter().flatten();
        let targets: Vec<_> = targets.filter(|target| **target != TORCH_IGNORE).collect();
        if let Some(token) = self
            .tokens
            .iter()
            .flatten()
            .chain(targets.iter().copied())
            .find(|it| !is_token(it))
        {
            return wrong(format!(
                "token {token} is not below {vocabulary}, the model's vocabulary"
            ));
        }
        if targets.is_empty() {
            return wrong("no target: expected one or more that is not -100".into());
        }
        Ok(())
    }
}

/// Computes one step on one rank, in f64 without dropout.
fn own_step(model: &Model, weights: &dyn TensorSource, step: Step) -> Result<Own, Error> {
    let rows = step.tokens.len();
    let mut off = Settings::new();
    for dropout in ["dropout", "attention_dropout"] {
        off.insert(dropout.into(), 0.0.into());
    }
    let model = model.with_settings(off)?;
    let config = TrainConfig {
        steps: 1,
        micro_batch_size: rows,
        global_batch_size: rows,
        sequence_length: step.tokens.first().map(Vec::len),
        warmup_steps: 0,
        clip: f64::INFINITY,
        held_out_samples: 1,
        data_parallel: DataParallelConfig {
            precision: Precision::F64,
            ..DataParallelConfig::default()
        },
        ..TrainConfig::default()
    };
    let data = Rows {
        step: Arc::new(step),
        vocabulary: model.vocabulary(),
    };
    let mut own = World::threads(1)?.run(|rank| {
        let groups = ParallelContext::new(&ParallelConfig::new(), &rank)?;
        let builder = ModelBuilder::with(&groups, &Device::flex(), config.seed, DType::F64);
        let mut trainer = model.trainer(builder, &config)?;
        trainer.load_weights(weights, LoadTolerance::default())?;
        let mut seen = Seen::default();
        trainer.fit(&data, &mut seen)?;
        Ok::<_, Error>(seen)
    })?;
    let Seen { loss, gradients } = own.swap_remove(0);
    Ok(Own { loss, gradients })
}

#[derive(Default)]
struct Seen {
    loss: f64,
    gradients: Vec<(String, Vec<f64>)>,
}

impl Observer for Seen {
    fn gradients(&mut self, gradients: &StepGradients<'_>) -> Result<(), ObserverError> {
        let keys = gradients.table.entries().iter();
        let keys = keys.map(|entry| format!("{MODEL}{}", entry.path));
        let values = gradients.full().into_iter();
        let values = values.map(|gradient| gradient.into_data().iter::<f64>().collect());
        self.gradients = keys.zip(values).collect();
        Ok(())
    }

    fn step(&mut self, metrics: &StepMetrics, _: &StepTiming) -> Result<(), ObserverError> {
        self.loss = metrics.loss;
        Ok(())
    }

    fn held_out(&mut self, _: &HeldOutMetrics) -> Result<(), ObserverError> {
        Ok(())
    }
}

/// Rows of the step, in order.
#[derive(Clone)]
struct Rows {
    step: Arc<Step>,
    vocabulary: usize,
}

impl Samples for Rows {
    fn seq(&self) -> usize {
        self.step.tokens[0].len()
    }

    fn sample(&self, number: u64) -> Result<Sample, DataError> {
        let row = number as usize % self.step.tokens.len();
        let target = |target: &i32| {
            if *target == TORCH_IGNORE {
                IGNORE
            } else {
                *target
            }
        };
        Ok(Sample {
            tokens: self.step.tokens[row].clone(),
            targets: self.step.targets[row].iter().map(target).collect(),
            documents: vec![],
            padding: 0,
        })
    }
}

impl Dataset for Rows {
    fn describe(&self) -> String {
        "the rows of the step".into()
    }

    fn fingerprint(&self) -> u64 {
        0
    }

    fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    fn training(&self, _: &Sampling) -> Result<Arc<dyn Samples>, DataError> {
        Ok(Arc::new(self.clone()))
    }

    fn held_out(&self, _: usize, max: usize) -> Result<Vec<Sample>, DataError> {
        (0..max as u64).map(|number| self.sample(number)).collect()
    }
}

/// Returns the values of a tensor.
fn values(source: &dyn TensorSource, key: &str) -> Result<Vec<f64>, Error> {
    let missing = || format!("{}: it has no gradient for {key}", source.name());
    let meta = source.tensor(key).ok_or_else(missing)?;
    let dtype = match meta.dtype {
        ElementType::F64 => DType::F64,
        ElementType::F32 => DType::F32,
        ElementType::F16 => DType::F16,
        ElementType::Bf16 => DType::BF16,
        other => {
            return Err(format!("{}: {key} is {other:?}: expected floats", source.name()).into());
        }
    };
    let bytes = source.read(key, &TensorSlice::whole(&meta.shape))?;
    let data = TensorData::from_bytes_vec(bytes, meta.shape, dtype);
    Ok(data.iter::<f64>().collect())
}
