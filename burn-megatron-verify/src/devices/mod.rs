//! Compares one step of any Burn module on a device with the same step on the CPU in f64.
//!
//! [`check_device`] runs a forward and a backward on each device. It compares the loss and every gradient with the
//! results of an [`Oracle`] on the CPU.
//!
//! To find the module where a difference starts, it records the operations of the forward on Burn's capture device,
//! with the parameter that each operation reads. It runs them one at a time on the device, with the values of the
//! oracle as inputs. The report names the first operation whose output differs from the oracle. If each operation is
//! correct alone but the step is not, the operations run in a row, as in a program (fused, in a build with `fusion`).
//! Bisection then finds the first output that differs.
//!
//! Limitations of the report:
//!
//! - An operation belongs to the module of the parameter that it reads. An operation without a parameter, such as an
//!   activation, belongs to the module of the parameter that was read last.
//! - The operations are recorded without autodiff. For some layers, such as `Linear`, autodiff may use other
//!   operations. A difference in these operations is only visible in the loss and the gradients.
//! - The backward is compared by the gradients of parameters. The report names the first gradient that differs in the
//!   order of the backward, but no operation.
//! - A forward cannot be recorded if it reads values of tensors, or if it uses a backend operation that the capture
//!   device does not support. The report gives the reason, and compares only the loss and the gradients.
//! - The kernels are the kernels of the build. Whether products are tuned (`autotune`) is decided when Burn is
//!   compiled.

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

/// The reference of a comparison: the type in which the CPU computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Oracle {
    /// Parameters and batch are converted to f64. A module that creates f32 tensors cannot run in f64.
    #[default]
    F64,
    /// Parameters and batch keep their types. Single operations are still compared in f64, except functions that create
    /// f32 tensors, which run in their own types.
    F32,
}

/// The options of [`check_device`].
#[derive(Clone, Debug)]
pub struct DeviceOptions {
    /// The reference of the comparison.
    pub oracle: Oracle,
    /// A factor on every bound: see [`DeviceRun::bound`].
    pub margin: f64,
    /// Whether the operations of the forward are also compared.
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

/// Reasons why nothing could be compared. A failure on a device is not an error, but a run that does not pass.
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
        /// The operation, or a description of the difference.
        operation: String,
    },
    /// The margin is not a positive number.
    #[error("invalid margin {0}: expected a positive number")]
    Margin(String),
}

/// Runs one step of `model` on each device and on the CPU, and compares the results: see the [module](self).
///
/// `loss` computes the loss, of shape `[1]`, from a copy of the model and the batch. It is called once for each device,
/// for the oracle, and for the recording. If the forward cannot be recorded, it is called once more on the CPU. The
/// model is evaluated with gradients: dropout is off, and batch norms use their running statistics. The model is not
/// changed.
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
/// [`DeviceCheckError`] if there is no reference to compare with.
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
