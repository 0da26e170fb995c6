//! The outcome of a training step, computed on the device: whether the step is taken or skipped, and the scalars that
//! the optimizer uses. The host can therefore launch the optimizer without waiting for the gradients.

use std::sync::Arc;

use burn::backend::flex::FlexTensor;
use burn::tensor::{DType, Device, Tensor};

use super::AdamWStep;
use super::update::StepScalars;
use crate::KernelError;
use crate::cpu::{Element, Real, for_float, slice, vector};
use crate::error::{accept, check_shape};
use crate::launch::{SimpleOp, Spec, launch_one};

const NAME: &str = "step_outcome";

/// Column indices of the statistics that [`step_outcome`] reads. The statistics have one row per rank. The last columns
/// of a row hold the losses.
pub mod columns {
    /// The largest sum of squares of any checked gradient. It is not finite if an element of a checked gradient is not
    /// finite.
    pub const LARGEST: usize = 0;
    /// The first of two columns with sums of squares, from which the gradient norm is computed. The sums include only
    /// the gradient elements for which this rank is responsible.
    pub const SQUARES: usize = 1;
    /// The number of tokens of the rank, divided by [`TOKENS_UNIT`] and rounded down.
    pub const TOKENS_HIGH: usize = 3;
    /// The number of tokens of the rank modulo [`TOKENS_UNIT`].
    pub const TOKENS_LOW: usize = 4;
    /// The number of columns that this module defines. A row may have other columns after these columns, followed by
    /// the losses.
    pub const COUNT: usize = 5;
    /// The divisor that splits the number of tokens into [`TOKENS_HIGH`] and [`TOKENS_LOW`]. With this split, sums of
    /// token counts over 16384 ranks are exact in f32 up to 2^34 tokens.
    pub const TOKENS_UNIT: u64 = 1024;
}

/// Indices of the elements of an outcome, and the values of the element [`KIND`](elements::KIND).
pub mod elements {
    /// The kind of the outcome: [`TAKEN`], [`NOT_FINITE`] or [`NO_TARGETS`].
    pub const KIND: usize = 0;
    /// The factor that multiplies the gradient: the clip factor divided by the number of tokens and by the loss scale.
    pub const FACTOR: usize = 1;
    /// The step size, `rate / (1 - beta1^t)`.
    pub const SIZE: usize = 2;
    /// The factor that multiplies the gradient, without gradient clipping.
    pub const UNCLIPPED: usize = 3;
    /// The factor that multiplies the square root of the second moment, `1 / sqrt(1 - beta2^t)`.
    pub const ROOT: usize = 4;
    /// The weight decay of the step, `rate * weight_decay`.
    pub const DECAY: usize = 5;
    /// The norm of the gradient before clipping.
    pub const NORM: usize = 6;
    /// The number of elements of an outcome.
    pub const COUNT: usize = 7;

    /// Kind of an outcome: the step is taken.
    pub const TAKEN: f64 = 0.0;
    /// Kind of an outcome: a loss or a gradient is not finite, or a gradient exceeds
    /// [`OutcomeRule::limit`](super::OutcomeRule::limit). The step is skipped.
    pub const NOT_FINITE: f64 = 1.0;
    /// Kind of an outcome: no token contributes to the loss. The step is skipped.
    pub const NO_TARGETS: f64 = 2.0;
}

/// The order in which floating-point values are added, as a tree of partial sums.
#[derive(Clone, Debug, PartialEq)]
pub enum SumOrder {
    /// A single value, given by its index in the list of values.
    Element(usize),
    /// The terms are added one after the other.
    InOrder(Vec<SumOrder>),
    /// Adjacent terms are added in pairs, then the results are added in pairs, and so on. If the number of terms is
    /// odd, the last term is carried over to the next round.
    Pairwise(Vec<SumOrder>),
}

impl SumOrder {
    /// Returns the sum of `values` in this order.
    pub fn sum(&self, values: &[f64]) -> f64 {
        match self {
            Self::Element(index) => values[*index],
            Self::InOrder(parts) => parts.iter().map(|part| part.sum(values)).sum(),
            Self::Pairwise(parts) => {
                let mut sums: Vec<f64> = parts.iter().map(|part| part.sum(values)).collect();
                while sums.len() > 1 {
                    sums = sums.chunks(2).map(|pair| pair.iter().sum()).collect();
                }
                sums.into_iter().sum()
            }
        }
    }
}

/// Parameters of [`step_outcome`].
#[derive(Clone, Debug)]
pub struct OutcomeRule {
    /// The number of columns per rank, at least [`columns::COUNT`].
    pub columns: usize,
    /// The index of the first loss column. All columns from this index to the end of the row are losses. If a loss is
    /// not finite, the step is skipped.
    pub losses: usize,
    /// The order in which the CPU adds the sums of squares of all ranks. Other devices use a fixed order, which depends
    /// only on the number of ranks and columns.
    pub squares: Arc<SumOrder>,
    /// Whether the CPU rounds the square root of the sum of squares to f32.
    pub rounds_norm: bool,
    /// The largest allowed value in the column [`columns::LARGEST`]. If the value of a rank is larger, the step is
    /// skipped.
    pub limit: f64,
    /// The maximum gradient norm (gradient clipping).
    pub clip: f64,
    /// The loss scale of this step, with one value for each possible kind of the previous outcome, in the order
    /// `TAKEN`, `NOT_FINITE`, `NO_TARGETS`.
    pub loss_scales: [f64; 3],
    /// The hyperparameters of this step. The first element applies if the previous step was taken. The second element
    /// applies if the previous step was skipped.
    pub steps: [AdamWStep; 2],
}

/// Computes the outcome of a training step, a tensor of shape `[elements::COUNT]`.
///
/// `statistics` holds the statistics of all ranks, `[ranks * columns]`, with one row of [`columns`] per rank. `before`
/// is the outcome of the previous step. Both tensors are f64 on the CPU and f32 on other devices.
///
/// ```text
/// norm  = sqrt(sum of the squares) / tokens / loss scale
/// kind  = NO_TARGETS  without tokens
///         NOT_FINITE  if the norm or a loss is not finite, or a checked gradient is beyond the limit
///         TAKEN       otherwise
/// ```
///
/// # Panics
///
/// Panics with a [`KernelError`] if the length of `statistics` or `before` does not match `rule`.
pub fn step_outcome(statistics: Tensor<1>, before: Tensor<1>, rule: OutcomeRule) -> Tensor<1> {
    accept(check(&statistics, &before, &rule));
    let op = SimpleOp {
        name: NAME,
        outputs: vec![Spec::new([elements::COUNT], statistics.dtype())],
        parameters: rule,
        cpu: |rule, inputs| {
            let outcome = rule.outcome(&doubles(&inputs[0]), doubles(&inputs[1])[0]);
            vec![for_float!(inputs[0].dtype(), E => vector(outcome.map(narrow::<E>).to_vec()))]
        },
        #[cfg(feature = "cubecl")]
        cube: |rule, inputs| vec![super::kernel::step_outcome(inputs, rule)],
    };
    let inputs = vec![statistics.into_dispatch(), before.into_dispatch()];
    Tensor::from_dispatch(launch_one(op, inputs))
}

fn check(
    statistics: &Tensor<1>,
    before: &Tensor<1>,
    rule: &OutcomeRule,
) -> Result<(), KernelError> {
    rule.steps[0].check()?;
    rule.steps[1].check()?;
    let ([length], [elements]) = (statistics.dims(), before.dims());
    let columns = rule.columns;
    let (least, expected) = (columns::COUNT, elements::COUNT);
    let whole = columns >= least && length > 0 && length.is_multiple_of(columns);
    check_shape(NAME, whole, || {
        format!(
            "{length} statistics in rows of {columns} columns: expected whole rows of at least {least}"
        )
    })?;
    check_shape(NAME, elements == expected, || {
        format!("the previous outcome has {elements} elements: expected {expected}")
    })
}

/// Returns the elements of a tensor in f64.
pub(super) fn doubles(x: &FlexTensor) -> Vec<f64> {
    for_float!(x.dtype(), E => slice::<E>(x).iter().map(|x| x.wide().double()).collect())
}

fn narrow<E: Element>(value: f64) -> E {
    E::narrow(E::Wide::of(value))
}

impl OutcomeRule {
    /// Returns the part of an outcome that depends on the hyperparameters, for each element of [`steps`](Self::steps).
    pub(super) fn scalars(&self) -> [[f64; 3]; 2] {
        self.steps.map(|step| {
            let StepScalars {
                size, root, decay, ..
            } = StepScalars::new(&step, true);
            [size, root, decay]
        })
    }

    fn outcome(&self, statistics: &[f64], before: f64) -> [f64; elements::COUNT] {
        let rows = || statistics.chunks(self.columns);
        let sum = |column: usize| rows().map(|row| row[column]).sum::<f64>();
        let high = sum(columns::TOKENS_HIGH) * columns::TOKENS_UNIT as f64;
        let tokens = high + sum(columns::TOKENS_LOW);
        let unclipped = 1.0 / tokens.max(1.0) * (1.0 / self.loss_scales[before as usize]);
        let root = self.squares.sum(statistics).sqrt();
        let root = if self.rounds_norm {
            f64::from(root as f32)
        } else {
            root
        };
        let norm = root * unclipped;
        let is_valid = |row: &[f64]| {
            let largest = row[columns::LARGEST];
            let losses = &row[self.losses..];
            largest.is_finite() && largest <= self.limit && losses.iter().all(|x| x.is_finite())
        };
        let kind = if tokens == 0.0 {
            elements::NO_TARGETS
        } else if norm.is_finite() && rows().all(is_valid) {
            elements::TAKEN
        } else {
            elements::NOT_FINITE
        };
        let factor = if norm > self.clip {
            unclipped * (self.clip / norm)
        } else {
            unclipped
        };
        let [taken, skipped] = self.scalars();
        let [size, root, decay] = if before == elements::TAKEN {
            taken
        } else {
            skipped
        };
        [kind, factor, size, unclipped, root, decay, norm]
    }
}

impl StepScalars {
    /// Replaces some of the scalars by the values of an outcome. Returns `None` if the outcome is a skipped step.
    pub(super) fn with_outcome(self, outcome: &[f64], decays: bool) -> Option<Self> {
        (outcome[elements::KIND] == elements::TAKEN).then(|| Self {
            scale: outcome[elements::FACTOR],
            size: outcome[elements::SIZE],
            root: outcome[elements::ROOT],
            decay: if decays {
                outcome[elements::DECAY]
            } else {
                0.0
            },
            ..self
        })
    }
}

/// Returns the element type of statistics and outcomes on a device: f64 on the CPU, f32 on other devices.
pub fn statistics_dtype(device: &Device) -> DType {
    if *device == Device::flex() {
        DType::F64
    } else {
        DType::F32
    }
}
