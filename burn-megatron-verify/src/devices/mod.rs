//! One step of any Burn module on a device, against the CPU in f64.
//!
//! [`check_device`] runs a forward and a backward on each device and compares the loss and every gradient with those of
//! an [`Oracle`] on the CPU. To name the module where a difference begins, it records the operations of the forward on
//! Burn's capture device, with the parameter that each reads, and runs them one at a time on the device, on the values that
//! the oracle has there: the first whose output differs from the oracle's is named. If each is right alone but not the
//! step, the operations run in a row, as a program runs them (fused, in a build with `fusion`), and the first output that
//! differs is found by bisection.
//!
//! The limits of the report:
//!
//! - An operation belongs to the module of the parameter that it reads; one that reads none, such as an activation, to that of
//!   the parameter read last.
//! - Operations are those without autodiff: where Burn has one for a layer, such as `Linear`, its autodiff may compute with others.
//!   A difference that only these have shows in the loss and the gradients.
//! - Of the backward there are the gradients of parameters: the first that differs in its order is named, no operation.
//! - A forward that reads values of tensors, or that uses an operation of a backend that the capture device has not, cannot be
//!   recorded. The report says so, and compares the loss and gradients.
//! - Kernels are those of the build: whether products are tuned (`autotune`) is decided when Burn is compiled.

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

/// The reference of a comparison: the CPU, in this type.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Oracle {
    /// Parameters and batch are f64. A module that makes tensors of its own in f32 cannot run so.
    #[default]
    F64,
    /// Parameters and batch have the types that they have. Operations alone are compared in f64 nevertheless, but for
    /// functions with tensors of their own in f32, which run in their types.
    F32,
}

/// The options of [`check_device`].
#[derive(Clone, Debug)]
pub struct DeviceOptions {
    /// The reference of the comparison.
    pub oracle: Oracle,
    /// A factor of every bound: see [`DeviceRun::bound`].
    pub margin: f64,
    /// Whether the operations of the forward are compared too.
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

/// Why nothing could be compared. A device that fails is no error, but a run that does not pass.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceCheckError {
    /// The forward or the backward failed on the CPU.
    #[error("the step fails on the CPU in {dtype}, which devices are compared with: {reason}")]
    Oracle {
        /// The type of the oracle.
        dtype: String,
        /// The message of the model.
        reason: String,
    },
    /// The forward draws random numbers.
    #[error(
        "the forward draws random numbers ({operation}): expected a step that is the same on every run. Dropout of Burn is \
         off here; pass noise with the batch"
    )]
    Random {
        /// The operation, or what differed.
        operation: String,
    },
    /// A margin that is not a positive number.
    #[error("invalid margin {0}: expected a positive number")]
    Margin(String),
}

/// Runs one step of `model` on each device and on the CPU, and compares: see the [module](self).
///
/// `loss` computes the loss, `[1]`, of a copy of the model and the batch; it is called once for each device, for the oracle, and for
/// the recording. The model is evaluated with gradients: Burn's dropout is off, and norms of batches use their running
/// statistics. It stays as it is.
///
/// # Errors
///
/// [`DeviceCheckError`] if there is nothing to compare with.
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
        Err("not asked for".into())
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
