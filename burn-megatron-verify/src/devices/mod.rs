//! Compares one training step of any Burn module on a device, such as a GPU, with the same step on the CPU in f64.
//!
//! [`check_device`] runs a forward and a backward on each device. It compares the loss and every gradient with
//! reference results from the CPU: see [`Oracle`].
//!
//! It also finds the module in which a difference starts. For this, it records the operations of the forward on Burn's
//! capture device, with the parameter that each operation reads. It then runs each operation separately on the device,
//! with inputs from the reference. The report names the first operation whose output differs from the reference. If
//! each single operation is correct but the step is not, the operations are run as a sequence, as in a program. In a
//! build with the feature `fusion`, the sequence is fused. Bisection then finds the first output of the sequence that
//! differs.
//!
//! Limitations of the report:
//!
//! - The module of an operation is the module whose parameter the operation reads. For an operation that reads no
//!   parameter, such as an activation function, it is the module whose parameter was read last.
//! - The operations are recorded without autodiff. For some layers, such as `Linear`, the forward with autodiff may use
//!   other operations. A difference in these operations can be seen only in the loss and the gradients.
//! - In the backward, only the gradients of parameters are compared, not single operations. The report names the first
//!   gradient that differs, in the order of the backward.
//! - A forward cannot be recorded if it reads the values of tensors, or if it uses a backend operation that the capture
//!   device does not support. In this case, the report states the reason, and only the loss and the gradients are
//!   compared.
//! - The check uses the kernels with which Burn was compiled. The feature `autotune`, which selects matrix
//!   multiplication kernels, cannot be changed at run time.

mod compare;
pub(crate) mod observed;
mod paths;
mod place;
mod report;
mod step;
mod trace;
mod types;

use burn::module::Module;
use burn::tensor::{DType, Device, Tensor};

use compare::Units;
use trace::Trace;

pub use compare::difference as relative_difference;
pub use place::Batch;
pub use report::{DeviceReport, DeviceRun, FirstDifference, GradientDifference, ReplayMode};

/// The reference of a device check: the dtype in which the CPU computes the expected results.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Oracle {
    /// The CPU computes in f64: parameters and batch are converted to f64. A module that creates f32 tensors cannot run
    /// in f64.
    #[default]
    F64,
    /// The CPU computes in the dtypes of the parameters and the batch. Single operations are still compared in f64,
    /// except functions that create f32 tensors.
    F32,
}

/// The options of [`check_device`].
#[derive(Clone, Debug)]
pub struct DeviceOptions {
    /// The dtype in which the CPU computes the reference.
    pub oracle: Oracle,
    /// A factor that every bound is multiplied with: see [`DeviceRun::bound`].
    pub margin: f64,
    /// Whether the single operations of the forward are also compared.
    pub observe: bool,
}

impl Default for DeviceOptions {
    fn default() -> Self {
        Self {
            oracle: Oracle::F64,
            margin: 1.0,
            observe: true,
        }
    }
}

/// An error of [`check_device`], if nothing could be compared. A failure on a device is not returned as an error.
/// Instead, the [`DeviceRun`] of this device does not pass.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceCheckError {
    /// The forward or the backward failed on the CPU, so that there is no reference.
    #[error("the reference run on the CPU in {dtype} failed: {reason}")]
    Oracle {
        /// The dtype of the reference.
        dtype: String,
        /// The message of the failure.
        reason: String,
    },
    /// The forward draws random numbers, so that two runs cannot be compared.
    #[error(
        "the forward draws random numbers ({operation}): expected a forward that returns the same result in every run. \
         Burn's dropout is off in this check: pass other noise as a part of the batch"
    )]
    Random {
        /// The random operation, or a description of the difference between two runs.
        operation: String,
    },
    /// The margin is not a positive number.
    #[error("invalid margin {0}: expected a positive number")]
    Margin(String),
}

/// Runs one training step of `model` on each device and on the CPU, and compares the results. See the [module
/// documentation](self).
///
/// `loss` computes the loss, of shape `[1]`, from a copy of the model and the batch. It is called once on each device,
/// once for the reference, and once for the recording. If the forward cannot be recorded, it is called once more on the
/// CPU. Gradients are computed in evaluation mode: dropout is off, and batch norms use their running statistics. The
/// model is not changed.
///
/// ```
/// use burn::nn::{Linear, LinearConfig};
/// use burn::tensor::{Device, Tensor};
/// use burn_megatron_verify::{DeviceOptions, check_device};
///
/// let device = Device::flex();
/// let model = LinearConfig::new(3, 2).init(&device);
/// let batch = Tensor::<2>::ones([4, 3], &device);
/// let loss = |model: &Linear, x: &Tensor<2>| model.forward(x.clone()).square().sum();
/// let report = check_device(&model, &batch, loss, &[device], &DeviceOptions::default())?;
/// assert!(report.passes(), "{report}");
/// # Ok::<(), burn_megatron_verify::devices::DeviceCheckError>(())
/// ```
///
/// # Errors
///
/// [`DeviceCheckError`] if the step fails on the CPU, if it draws random numbers, or if the margin is invalid.
pub fn check_device<M: Module, B: Batch>(
    model: &M,
    batch: &B,
    loss: impl Fn(&M, &B) -> Tensor<1>,
    devices: &[Device],
    options: &DeviceOptions,
) -> Result<DeviceReport, DeviceCheckError> {
    if !(options.margin.is_finite() && options.margin > 0.0) {
        return Err(DeviceCheckError::Margin(options.margin.to_string()));
    }
    let cpu = Device::flex();
    let dtype = match options.oracle {
        Oracle::F64 => Some(DType::F64),
        Oracle::F32 => None,
    };
    let run = |device: &Device, dtype| step::run(model, batch, &loss, device, dtype);
    let of_oracle = |reason: String| DeviceCheckError::Oracle {
        dtype: if dtype.is_some() {
            "f64"
        } else {
            "its own types"
        }
        .into(),
        reason: if dtype.is_some() {
            format!("{reason} (a module that creates f32 tensors requires Oracle::F32)")
        } else {
            reason
        },
    };
    let reference = run(&cpu, dtype).map_err(of_oracle)?;
    let trace = if options.observe {
        Trace::record(model, batch, &loss)
    } else {
        Err("not requested".into())
    };
    if let Some(operation) = trace.as_ref().ok().and_then(Trace::random) {
        return Err(DeviceCheckError::Random { operation });
    }
    if trace.is_err()
        && run(&cpu, dtype).map_err(of_oracle)?.loss.to_bits() != reference.loss.to_bits()
    {
        let operation = "two runs on the CPU have different losses".into();
        return Err(DeviceCheckError::Random { operation });
    }
    let runs = devices.iter().map(|device| {
        let units = Units::of(device, options.margin);
        let found = run(device, None);
        DeviceRun::new(device, &units, &reference, found, &trace)
    });
    Ok(DeviceReport {
        oracle: options.oracle,
        runs: runs.collect(),
    })
}
