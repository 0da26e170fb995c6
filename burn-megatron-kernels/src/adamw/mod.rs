//! AdamW over a flat buffer in one kernel launch, and sums of squares for the gradient norm.
//!
//! AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) computes the following update at step `t`, where `g` is the
//! scaled gradient:
//!
//! ```text
//! m = beta1 m + (1 - beta1) g             m' = m / (1 - beta1^t)
//! v = beta2 v + (1 - beta2) g^2           v' = v / (1 - beta2^t)
//! w = w - rate (m' / (sqrt(v') + epsilon) + weight_decay w)
//! ```
//!
//! Every element is read once and written once. The same kernel also writes a copy of the weights in the compute type
//! of the model. 16-bit values are converted to f32 for the computation.
//!
//! Each element depends only on its own values. A non-finite gradient element therefore makes only its own weight NaN.
//! If a buffer is split into several buffers, the results are bitwise identical.
//!
//! With an epsilon of 0, the denominator `sqrt(v') + epsilon` is 0 for elements whose gradient was always 0. In this
//! case the fraction `m' / (sqrt(v') + epsilon)` is defined as 0, and only weight decay changes the weight.
//!
//! The operations are not differentiable: autodiff does not record them.

use burn::tensor::{DType, Tensor};

use crate::KernelError;
use crate::cpu::wide;
use crate::error::{F32, accept, check_option, check_shape, check_type};
use crate::launch::launch;

pub mod composed;
mod cpu;
#[cfg(feature = "cubecl")]
mod kernel;
pub mod outcome;
mod segments;
mod squares;
#[cfg(test)]
mod tests;
mod update;

#[cfg(feature = "cubecl")]
pub(crate) use kernel::aot_instances;
pub use outcome::{OutcomeRule, SumOrder, step_outcome};
pub use segments::{SEGMENT_ALIGNMENT, Segments, largest_sums_of_squares};
pub use squares::{sum_of_squares, sum_of_squares_of};

const NAME: &str = "adamw";

/// The block size of [`Decay::Blocks`]: the number of consecutive elements that share one weight decay factor.
pub const DECAY_BLOCK: usize = 64;

/// Hyperparameters of one step. Changing them does not compile a new kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWStep {
    /// The learning rate.
    pub rate: f64,
    /// The decay rate of the first moment, in [0, 1).
    pub beta1: f64,
    /// The decay rate of the second moment, in [0, 1).
    pub beta2: f64,
    /// The number added to the square root of the second moment. It must be at least 0.
    pub epsilon: f64,
    /// The decoupled weight decay. It must be at least 0.
    pub weight_decay: f64,
    /// The step number, starting at 1, used for bias correction.
    pub step: u64,
    /// The factor that multiplies the gradient: the clip factor divided by the loss scale.
    pub gradient_scale: f64,
}

/// Weights and moments of the optimizer, in flat buffers of equal length.
#[derive(Clone, Debug)]
pub struct AdamWBuffers {
    /// The master weights, in f32. For verification they may be f64.
    pub master: Tensor<1>,
    /// The first moment, in the type of the master weights or in bf16.
    pub first: Tensor<1>,
    /// The second moment, in the same type as the first moment.
    pub second: Tensor<1>,
}

/// Selects the weights to which weight decay applies, and optionally scales the learning rate of some weights.
#[derive(Clone, Debug)]
#[allow(
    clippy::large_enum_variant,
    reason = "there is one of them, for one step"
)]
pub enum Decay {
    /// Weight decay applies to all weights.
    All,
    /// Weight decay applies to no weights.
    None,
    /// Each block of elements has its own factors for weight decay and learning rate, so that one buffer can hold
    /// several parameter groups. Parameter groups must start at multiples of 64.
    Blocks(Blocks),
}

/// Factors of weight decay and learning rate, one per block of [`DECAY_BLOCK`] elements.
///
/// The buffer may be any range of a larger buffer. The tensors `decay` and `rate` are f32 with the shape
/// `[ceil((first + length) / 64)]`, where `length` is the number of elements of the buffer. Element `i` of the buffer
/// uses the factor with index `(first + i) / 64`.
#[derive(Clone, Debug)]
pub struct Blocks {
    /// The weight decay factor of each block.
    pub decay: Tensor<1>,
    /// The learning rate factor of each block. The factor multiplies the whole update of the weights, including weight
    /// decay. `None` means 1 everywhere.
    pub rate: Option<Tensor<1>>,
    /// The position of the buffer's first element within its block. It must be less than 64.
    pub first: usize,
}

impl Blocks {
    /// Creates the factors for a buffer whose first element is the first element of a block. The learning rate factor
    /// is 1.
    pub fn new(decay: Tensor<1>) -> Self {
        Self {
            decay,
            rate: None,
            first: 0,
        }
    }
}

impl AdamWStep {
    /// Checks the hyperparameters.
    fn check(&self) -> Result<(), KernelError> {
        check_option(NAME, self.step > 0, "step", 0, "1 for the first step")?;
        let rate = self.rate;
        check_option(NAME, rate.is_finite(), "rate", rate, "a finite number")?;
        for (name, beta) in [("beta1", self.beta1), ("beta2", self.beta2)] {
            let (fits, expected) = (
                (0.0..1.0).contains(&beta),
                "a number from 0 up to but not including 1",
            );
            check_option(NAME, fits, name, beta, expected)?;
        }
        for (name, value) in [
            ("epsilon", self.epsilon),
            ("weight_decay", self.weight_decay),
        ] {
            let fits = value.is_finite() && value >= 0.0;
            check_option(NAME, fits, name, value, "a finite number from 0")?;
        }
        Ok(())
    }
}

/// Applies one AdamW step to flat buffers. See the [module](self) for the formula.
///
/// Returns the updated buffers, and the updated `model` if it is given. `model` is a copy of the weights in the compute
/// type of the model, `[elements]`. The old values of `model` are not read. A buffer is updated in place if no other
/// tensor shares its memory. Otherwise it is copied.
///
/// `gradient` and `model` are f32, f16 or bf16. If the master weights are f64, all buffers must be f64.
///
/// # Panics
///
/// Panics with a [`KernelError`] if the lengths or types of the buffers do not match, or if a hyperparameter is out of
/// range.
///
/// # Example
///
/// ```
/// use burn::tensor::{DType, Device, Tensor};
/// use burn_megatron_kernels::adamw::{AdamWBuffers, AdamWStep, Decay, adamw};
///
/// let device = Device::flex();
/// let buffers = AdamWBuffers {
///     master: Tensor::ones([128], &device),
///     first: Tensor::zeros([128], &device),
///     second: Tensor::zeros([128], &device),
/// };
/// let step = AdamWStep {
///     rate: 0.25,
///     beta1: 0.9,
///     beta2: 0.95,
///     epsilon: 0.0,
///     weight_decay: 0.0,
///     step: 1,
///     gradient_scale: 1.0,
/// };
/// let gradient = Tensor::full([128], 3.0, &device);
/// let model = Tensor::empty([128], (&device, DType::BF16));
/// let (buffers, model) = adamw(buffers, gradient, &Decay::None, &step, Some(model));
/// // The size of the first step is the learning rate, for any gradient.
/// let weight = buffers.master.slice([0..1]).into_scalar::<f32>();
/// assert!((weight - 0.75).abs() < 1e-6);
/// assert_eq!(model.unwrap().dims(), [128]);
/// ```
pub fn adamw(
    buffers: AdamWBuffers,
    gradient: Tensor<1>,
    decay: &Decay,
    step: &AdamWStep,
    model: Option<Tensor<1>>,
) -> (AdamWBuffers, Option<Tensor<1>>) {
    update(buffers, gradient, decay, step, None, model)
}

/// Applies [`adamw`] with the `outcome` that [`step_outcome`] computed on the device. The values of `outcome` replace
/// the learning rate, the step number and the gradient scale of `step`.
///
/// If `outcome` skips the step, weights and moments do not change, and `model` becomes a copy of the weights.
///
/// # Panics
///
/// Panics in the same cases as [`adamw`], and with a [`KernelError`] if `outcome` has the wrong length.
pub fn adamw_with_outcome(
    buffers: AdamWBuffers,
    gradient: Tensor<1>,
    decay: &Decay,
    step: &AdamWStep,
    outcome: Tensor<1>,
    model: Option<Tensor<1>>,
) -> (AdamWBuffers, Option<Tensor<1>>) {
    update(buffers, gradient, decay, step, Some(outcome), model)
}

fn update(
    buffers: AdamWBuffers,
    gradient: Tensor<1>,
    decay: &Decay,
    step: &AdamWStep,
    outcome: Option<Tensor<1>>,
    model: Option<Tensor<1>>,
) -> (AdamWBuffers, Option<Tensor<1>>) {
    accept(check(&buffers, &gradient, decay, step, model.as_ref()));
    accept(outcome.as_ref().map_or(Ok(()), check_outcome));
    let update = update::AdamWOp::new(step, decay, outcome.is_some(), model.is_some());
    let AdamWBuffers {
        master,
        first,
        second,
    } = buffers;
    let mut inputs = vec![
        master.into_dispatch(),
        first.into_dispatch(),
        second.into_dispatch(),
        gradient.into_dispatch(),
    ];
    inputs.extend(outcome.map(Tensor::into_dispatch));
    if let Decay::Blocks(blocks) = decay {
        inputs.push(blocks.decay.clone().into_dispatch());
        inputs.extend(blocks.rate.clone().map(Tensor::into_dispatch));
    }
    inputs.extend(model.map(Tensor::into_dispatch));
    let mut outputs = launch(update, inputs)
        .into_iter()
        .map(Tensor::from_dispatch);
    let mut next = || outputs.next();
    match (next(), next(), next()) {
        (Some(master), Some(first), Some(second)) => (
            AdamWBuffers {
                master,
                first,
                second,
            },
            next(),
        ),
        _ => unreachable!("the kernel has three outputs or four"),
    }
}

fn check(
    buffers: &AdamWBuffers,
    gradient: &Tensor<1>,
    decay: &Decay,
    step: &AdamWStep,
    model: Option<&Tensor<1>>,
) -> Result<(), KernelError> {
    step.check()?;
    let AdamWBuffers {
        master,
        first,
        second,
    } = buffers;
    let lengths = [master, first, second, gradient].map(|tensor| tensor.dims()[0]);
    let [length, ..] = lengths;
    check_shape(NAME, lengths == [length; 4], || {
        let [master, first, second, gradient] = lengths;
        format!(
            "the weights have {master} elements, the first moment {first}, the second {second}, the gradient \
             {gradient}: expected equal lengths"
        )
    })?;
    let [weights, moment, second, gradient] = [master, first, second, gradient].map(Tensor::dtype);
    let option = |fits, name, value: DType, expected| {
        let value = format_args!("{value:?} with weights in {weights:?}");
        check_option(NAME, fits, name, value, expected)
    };
    let own = match weights {
        DType::F32 => "the type of the weights, F16 or BF16",
        _ => "F64",
    };
    let fits = matches!(weights, DType::F32 | DType::F64);
    option(fits, "type of the weights", weights, "F32 or F64")?;
    let fits = moment == weights || (moment, weights) == (DType::BF16, DType::F32);
    let expected = "the type of the weights, or BF16 if the weights are F32";
    option(fits, "type of the first moment", moment, expected)?;
    let (fits, expected) = (second == moment, "the type of the first moment");
    option(fits, "type of the second moment", second, expected)?;
    let fits = wide(gradient) == weights;
    option(fits, "type of the gradient", gradient, own)?;
    if let Some(model) = model {
        let [given] = model.dims();
        check_shape(NAME, given == length, || {
            format!("the copy has {given} elements, the weights have {length}")
        })?;
        let dtype = model.dtype();
        option(wide(dtype) == weights, "type of the model", dtype, own)?;
    }
    match decay {
        Decay::Blocks(blocks) => check_blocks(blocks, length),
        Decay::All | Decay::None => Ok(()),
    }
}

fn check_outcome(outcome: &Tensor<1>) -> Result<(), KernelError> {
    let ([length], expected) = (outcome.dims(), outcome::elements::COUNT);
    check_shape(NAME, length == expected, || {
        format!("the outcome has {length} elements: expected {expected}")
    })
}

fn check_blocks(blocks: &Blocks, length: usize) -> Result<(), KernelError> {
    let Blocks { decay, rate, first } = blocks;
    let name = "offset of the first element in its block";
    check_option(NAME, *first < DECAY_BLOCK, name, first, "a number below 64")?;
    let count = (first + length).div_ceil(DECAY_BLOCK);
    let decay = ("decay", "type of the decay's factors", decay);
    let rate = rate.as_ref();
    let rate = rate.map(|rate| ("rate", "type of the rate's factors", rate));
    for (name, of_type, factors) in std::iter::once(decay).chain(rate) {
        let [given] = factors.dims();
        check_shape(NAME, given == count, || {
            format!(
                "{given} {name} factors for {length} elements in blocks of {DECAY_BLOCK}, from element {first} of the \
                 first block: expected {count}"
            )
        })?;
        check_type(NAME, of_type, factors.dtype(), F32)?;
    }
    Ok(())
}
