//! A small model, its data, and a run of them through `SupervisedTraining`.

use std::cell::Cell;
use std::env;
use std::path::Path;
use std::sync::Arc;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::InMemDataset;
use burn::lr_scheduler::constant::ConstantLr;
use burn::lr_scheduler::linear::LinearLrSchedulerConfig;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamGroup};
use burn::nn::{BatchNorm, BatchNormConfig};
use burn::optim::AdamWConfig;
use burn::tensor::activation::tanh;
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn::train::metric::LossMetric;
use burn::train::metric::store::{Aggregate, Direction, Split};
use burn::train::{
    InferenceStep, Interrupter, Learner, LearningResult, MetricEarlyStoppingStrategy,
    RegressionOutput, StoppingCondition, SupervisedTraining, TrainOutput, TrainStep,
};
use burn_megatron_learner::{MegatronStrategy, scale_loss};

/// The variable with the step in which a process aborts.
pub const ABORT_AT: &str = "BURN_MEGATRON_TEST_ABORT_AT";

thread_local! {
    /// The steps of a rank.
    static STEPS: Cell<usize> = const { Cell::new(0) };
}

/// Counts a step, and aborts the process in the step of [`ABORT_AT`].
fn count_step() {
    let step = STEPS.get() + 1;
    STEPS.set(step);
    if env::var(ABORT_AT).is_ok_and(|at| at == step.to_string()) {
        std::process::abort();
    }
}

pub const INPUTS: usize = 6;
pub const HIDDEN: usize = 8;

/// A function of `INPUTS` numbers.
#[derive(Module, Debug)]
pub struct Mlp {
    up: Param<Tensor<2>>,
    bias: Param<Tensor<1>>,
    down: Param<Tensor<2>>,
    norm: Option<BatchNorm>,
}

impl Mlp {
    pub fn new(dtype: DType, seed: usize) -> Self {
        Self::on(&Device::flex().autodiff(), dtype, seed)
    }

    pub fn on(device: &Device, dtype: DType, seed: usize) -> Self {
        let numbers = |of: usize, len: usize| -> Vec<f64> {
            (0..len)
                .map(|i| 0.6 * noise(100 * of + i + 1000 * seed))
                .collect()
        };
        let matrix = |of, rows: usize, columns: usize| {
            let data = TensorData::new(numbers(of, rows * columns), [rows, columns]);
            Param::from_tensor(Tensor::from_data(data, (device, dtype)))
        };
        let bias = TensorData::new(numbers(1, HIDDEN), [HIDDEN]);
        Self {
            up: matrix(0, INPUTS, HIDDEN),
            bias: Param::from_tensor(Tensor::from_data(bias, (device, dtype))),
            down: matrix(2, HIDDEN, 1),
            norm: None,
        }
    }

    fn forward(&self, batch: Inputs) -> RegressionOutput {
        let x = batch.x.cast(self.up.dtype());
        let hidden = x.matmul(self.up.val()) + self.bias.val().unsqueeze();
        let hidden = match &self.norm {
            Some(norm) => norm.forward(hidden),
            None => hidden,
        };
        let hidden = tanh(hidden);
        let output = hidden.matmul(self.down.val()).cast(batch.y.dtype());
        let loss = (output.clone() - batch.y.clone()).powi_scalar(2).mean();
        RegressionOutput::new(loss, output, batch.y)
    }

    /// Returns the same model with a bias that is not trained.
    pub fn with_frozen_bias(mut self) -> Self {
        self.bias = self.bias.set_require_grad(false);
        self
    }

    /// Returns the same model with a batch norm.
    pub fn with_norm(mut self) -> Self {
        let norm = BatchNormConfig::new(HIDDEN).init(&self.up.device());
        self.norm = Some(norm.map(&mut InDType(self.up.dtype())));
        self
    }

    /// Returns the parameters, and the running states of a batch norm.
    pub fn weights(&self) -> Vec<f64> {
        let mut all = Values(vec![]);
        self.valid().visit(&mut all);
        all.0
    }
}

struct InDType(DType);

impl ModuleMapper for InDType {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|value| {
            let is_trained = value.is_require_grad();
            value.cast(self.0).detach().set_require_grad(is_trained)
        })
    }
}

struct Values(Vec<f64>);

impl ModuleVisitor for Values {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.extend(param.val().into_data().iter::<f64>());
    }
}

impl TrainStep for Mlp {
    type Input = Inputs;
    type Output = RegressionOutput;

    fn step(&self, batch: Inputs) -> TrainOutput<RegressionOutput> {
        assert!(!batch.panics, "this batch is refused");
        count_step();
        let scaled = batch.scaled;
        let output = self.forward(batch);
        let loss = if scaled {
            scale_loss(output.loss.clone())
        } else {
            output.loss.clone()
        };
        TrainOutput::new(self, loss.backward(), output)
    }
}

impl InferenceStep for Mlp {
    type Input = Inputs;
    type Output = RegressionOutput;

    fn step(&self, batch: Inputs) -> RegressionOutput {
        self.forward(batch)
    }
}

/// Returns a number in `[-1, 1)`, different for each `i`.
fn noise(i: usize) -> f64 {
    2.0 * (43_758.547 * (12.9898 * i as f64).sin()).rem_euclid(1.0) - 1.0
}

/// A batch `[batch, INPUTS]` with its targets `[batch, 1]`.
#[derive(Clone, Debug)]
pub struct Inputs {
    pub x: Tensor<2>,
    pub y: Tensor<2>,
    panics: bool,
    scaled: bool,
}

#[derive(Clone, Debug)]
pub struct Item {
    x: Vec<f64>,
    y: f64,
    panics: bool,
}

impl Item {
    pub fn new(number: usize) -> Self {
        let x: Vec<_> = (0..INPUTS).map(|i| noise(INPUTS * number + i)).collect();
        let y = x.iter().sum::<f64>().sin();
        Self {
            x,
            y,
            panics: false,
        }
    }

    pub fn with_target(y: f64) -> Self {
        Self { y, ..Self::new(0) }
    }

    pub fn refused() -> Self {
        Self {
            panics: true,
            ..Self::new(0)
        }
    }
}

/// Makes batches in a dtype.
#[derive(Clone)]
struct Stack {
    dtype: DType,
    scaled: bool,
}

impl Batcher<Item, Inputs> for Stack {
    fn batch(&self, items: Vec<Item>, device: &Device) -> Inputs {
        let x: Vec<f64> = items.iter().flat_map(|item| item.x.clone()).collect();
        let y: Vec<f64> = items.iter().map(|item| item.y).collect();
        let on = (device, self.dtype);
        Inputs {
            x: Tensor::from_data(TensorData::new(x, [items.len(), INPUTS]), on),
            y: Tensor::from_data(TensorData::new(y, [items.len(), 1]), on),
            panics: items.iter().any(|item| item.panics),
            scaled: self.scaled,
        }
    }
}

/// A training run. `strategy` is the only difference from Burn's strategy on one device.
#[derive(Clone)]
pub struct Training {
    pub dtype: DType,
    pub seed: usize,
    pub items: Vec<Item>,
    pub batch: usize,
    pub epochs: usize,
    pub accumulation: Option<usize>,
    pub scaled: bool,
    /// Whether Burn saves its checkpoints.
    pub saves: bool,
    /// The epoch to resume from.
    pub resume: Option<usize>,
    pub interrupter: Option<Interrupter>,
    /// Whether the run ends with the first epoch in which the held-out loss does not grow.
    pub stops_early: bool,
    /// The learning rate of the bias, if it differs.
    pub bias_rate: Option<f64>,
    /// Whether the model has a batch norm.
    pub norm: bool,
}

impl Default for Training {
    fn default() -> Self {
        Self {
            dtype: DType::F64,
            seed: 1,
            items: (0..16).map(Item::new).collect(),
            batch: 4,
            epochs: 2,
            accumulation: None,
            scaled: false,
            saves: false,
            resume: None,
            interrupter: None,
            stops_early: false,
            bias_rate: None,
            norm: false,
        }
    }
}

impl Training {
    fn loader(&self, items: Vec<Item>) -> Arc<dyn DataLoader<Inputs>> {
        let stack = Stack {
            dtype: self.dtype,
            scaled: self.scaled,
        };
        let builder = DataLoaderBuilder::new(stack).batch_size(self.batch);
        builder.build(InMemDataset::new(items))
    }

    pub fn run_model(
        &self,
        model: Mlp,
        folder: &Path,
        strategy: Option<MegatronStrategy<Mlp>>,
    ) -> LearningResult<Mlp> {
        let held_out = (100..106).map(Item::new).collect();
        let mut training = SupervisedTraining::new(
            folder,
            self.loader(self.items.clone()),
            self.loader(held_out),
        )
        .metrics((LossMetric::new(),))
        .with_application_logger(None)
        .num_epochs(self.epochs);
        if let Some(accumulation) = self.accumulation {
            training = training.grads_accumulation(accumulation);
        }
        if let Some(interrupter) = &self.interrupter {
            training = training.with_interrupter(interrupter.clone());
        }
        if self.stops_early {
            training = training.early_stopping(MetricEarlyStoppingStrategy::new(
                &LossMetric::new(),
                Aggregate::Mean,
                Direction::Highest,
                Split::Valid,
                StoppingCondition::NoImprovementSince { n_epochs: 1 },
            ));
        }
        if self.saves {
            training = training.with_default_checkpointers();
        }
        if let Some(epoch) = self.resume {
            training = training.checkpoint(epoch);
        }
        if let Some(strategy) = strategy {
            training = training.with_training_strategy(strategy.into());
        }
        let optimizer = AdamWConfig::new().with_weight_decay(0.0).init();
        let mut rates = LinearLrSchedulerConfig::new(2e-2, 1e-3, 20).init().unwrap();
        if let Some(rate) = self.bias_rate {
            rates = rates.with_group(ParamGroup::from_path("bias"), ConstantLr::new(rate));
        }
        training.launch(Learner::new(model, optimizer, rates))
    }

    pub fn run(
        &self,
        folder: &Path,
        strategy: Option<MegatronStrategy<Mlp>>,
    ) -> LearningResult<Mlp> {
        let model = Mlp::new(self.dtype, self.seed);
        let model = if self.norm { model.with_norm() } else { model };
        self.run_model(model, folder, strategy)
    }

    /// Returns the weights after a run that must not fail.
    pub fn weights(&self, strategy: Option<MegatronStrategy<Mlp>>) -> Vec<f64> {
        let folder = tempfile::tempdir().unwrap();
        let result = self.run(folder.path(), strategy);
        assert!(result.error.is_none(), "{}", result.error.unwrap());
        result.model.weights()
    }

    /// Returns this training on one device. Its batches are the batches of all ranks of a step, one after the other.
    pub fn on_one_device(&self, ranks: usize) -> Self {
        let (all, batch) = (self.items.len(), self.batch);
        let part = |rank: usize| all * rank / ranks..all * (rank + 1) / ranks;
        let steps = part(ranks - 1).len().div_ceil(batch);
        let of_step = |step: usize| {
            (0..ranks).flat_map(move |rank| {
                let own = part(rank);
                own.skip(step * batch).take(batch)
            })
        };
        let order = (0..steps).flat_map(of_step);
        Self {
            items: order.map(|item| self.items[item].clone()).collect(),
            batch: ranks * batch,
            ..self.clone()
        }
    }
}

pub fn threads(ranks: usize) -> MegatronStrategy<Mlp> {
    MegatronStrategy::threads(ranks).unwrap()
}

/// Returns the largest difference.
pub fn difference(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let differences = a.iter().zip(b).map(|(a, b)| (a - b).abs());
    // NaN counts as the largest value.
    differences.fold(0.0, |most, of| if of <= most { most } else { of })
}
