//! The report of [`check_device`](super::check_device).

use std::fmt;

use burn::tensor::{DType, Device};

use super::Oracle;
use super::compare::{CANCELLED, Scale, Units, difference, largest};
use super::step::Step;
use super::trace::Trace;

/// The result of [`check_device`](super::check_device): the comparison of each device with the CPU.
#[derive(Clone, Debug)]
pub struct DeviceReport {
    /// The dtype in which the CPU computed the reference.
    pub oracle: Oracle,
    /// The results of the devices, in the order in which the devices were given.
    pub runs: Vec<DeviceRun>,
}

impl DeviceReport {
    /// Returns whether the results of all devices agree with the CPU.
    pub fn passes(&self) -> bool {
        self.runs.iter().all(DeviceRun::passes)
    }
}

/// The results of a training step on one device, compared with the same step on the CPU.
#[derive(Clone, Debug)]
pub struct DeviceRun {
    /// The name of the device.
    pub device: String,
    /// The error message if the step failed on the device, or `None`.
    pub failed: Option<String>,
    /// The loss on the device, followed by the loss on the CPU.
    pub loss: [f64; 2],
    /// The relative difference of the losses. The divisor is the loss, or a tenth of the norm of the elementwise
    /// products of parameters and gradients, whichever is larger. The second divisor is used because the terms of a
    /// loss can cancel to zero.
    pub loss_difference: f64,
    /// The difference of the gradient of each parameter, in the order of the module.
    pub gradients: Vec<GradientDifference>,
    /// The largest relative difference of the loss and the gradients that passes: `2 sqrt(operations n) u`. `n` is the
    /// number of terms of the longest sum in any operation, and `u` is the unit roundoff of the narrowest dtype. If
    /// there are matrix multiplications on CUDA, `u` is at least the unit roundoff of TF32.
    pub bound: f64,
    /// The first operation whose output differs, or `None`.
    pub first: Option<FirstDifference>,
    /// The number of operations of the forward that were compared separately.
    pub operations: usize,
    /// The reason why some operations were not compared, or `None` if all operations were compared.
    pub not_observed: Option<String>,
    /// The parameters in the order in which the forward reads them. Empty if the forward was not recorded.
    order: Vec<String>,
}

/// The difference of the gradient of one parameter.
#[derive(Clone, Debug, PartialEq)]
pub struct GradientDifference {
    /// The path of the parameter.
    pub path: String,
    /// The largest difference of an element, divided by a scale. The scale is the largest element of this gradient or a
    /// tenth of the largest element of all gradients, whichever is larger. The second value is needed because a
    /// gradient that cancels to zero consists only of rounding errors. The result is infinite if only one of the two
    /// runs has a gradient.
    pub relative: f64,
}

/// The way in which the operation was run on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplayMode {
    /// The operation was run separately, with inputs from the CPU.
    Single,
    /// The operation was run in a sequence after all previous operations, with their outputs as inputs.
    Sequence,
}

/// The first operation of the forward whose output differs from the reference.
#[derive(Clone, Debug, PartialEq)]
pub struct FirstDifference {
    /// The path of the module whose parameter the operation reads. If the operation reads no parameter, this is the
    /// path of the module whose parameter was read last. The path is empty for operations before the first parameter,
    /// and for parameters of the root module.
    pub module: String,
    /// The name of the operation, or of the function with custom kernels.
    pub operation: String,
    /// The index of the operation in the forward, from 0.
    pub number: usize,
    /// The total number of operations of the forward.
    pub operations: usize,
    /// The shape of the first output of the operation.
    pub shape: Vec<usize>,
    /// The largest difference of an element, divided by the largest element. Because the terms of a sum can cancel, the
    /// divisor has a lower bound for sums and matrix multiplications that are run separately. The lower bound is a
    /// tenth of the result of the same operation on the absolute values of the inputs.
    pub relative: f64,
    /// The largest relative difference that rounding errors can cause.
    pub bound: f64,
    /// The way in which the operation was run.
    pub mode: ReplayMode,
    /// The error message, if the operation failed instead of returning different values.
    pub reason: Option<String>,
}

impl DeviceRun {
    pub(super) fn new(
        device: &Device,
        units: &Units,
        reference: &Step,
        found: Result<Step, String>,
        trace: &Result<Trace, String>,
    ) -> Self {
        let (found, failed) = match found {
            Ok(found) => (found, None),
            Err(reason) => (
                Step {
                    loss: f64::NAN,
                    sensitivity: 0.0,
                    gradients: vec![],
                },
                Some(reason),
            ),
        };
        let known = trace.as_ref().ok();
        let unknown = Scale {
            longest_sum: 1024,
            narrowest: DType::F32,
            has_products: true,
        };
        let scale = known.map_or(unknown, Trace::scale);
        // The backward has about two operations per operation of the forward.
        let operations = known.map_or(16 * reference.gradients.len().max(1), |it| 3 * it.len());
        let mut run = Self {
            device: format!("{device:?}"),
            loss: [found.loss, reference.loss],
            loss_difference: difference(
                &[reference.loss],
                &[found.loss],
                CANCELLED * reference.sensitivity,
            ),
            gradients: if failed.is_some() {
                vec![]
            } else {
                differences(reference, &found)
            },
            bound: units.row(operations, &scale),
            first: None,
            operations: 0,
            not_observed: trace.as_ref().err().cloned(),
            order: known.map_or(vec![], |it| it.parameters.clone()),
            failed,
        };
        if let Some(trace) = known {
            let fails = !run.passes();
            let first = trace.alone(device, units, &mut run.operations);
            let first = first.and_then(|first| match first {
                None if fails => trace.in_a_row(device, units),
                first => Ok(first),
            });
            match first {
                Ok(first) => run.first = first,
                Err(reason) => run.not_observed = Some(reason),
            }
        }
        run
    }

    /// Returns whether the results of the device agree with the CPU.
    pub fn passes(&self) -> bool {
        self.failed.is_none()
            && self.first.is_none()
            && self.loss_difference <= self.bound
            && self.wrong_gradients().next().is_none()
    }

    /// Returns the gradients whose relative difference exceeds the bound.
    pub fn wrong_gradients(&self) -> impl Iterator<Item = &GradientDifference> {
        self.gradients
            .iter()
            .filter(|it| it.relative.is_nan() || it.relative > self.bound)
    }

    /// Returns the first gradient whose relative difference exceeds the bound, in the order of the backward. Returns
    /// `None` if the forward could not be recorded.
    pub fn first_wrong_gradient(&self) -> Option<&GradientDifference> {
        let order = self.order.iter().rev();
        let of = |path: &String| self.wrong_gradients().find(|it| it.path == *path);
        order.filter_map(of).next()
    }
}

fn differences(reference: &Step, found: &Step) -> Vec<GradientDifference> {
    let all = reference.gradients.iter().filter_map(|(_, it)| it.as_ref());
    let scale = CANCELLED * all.map(|it| largest(it)).fold(0.0, f64::max);
    let pairs = reference.gradients.iter().zip(&found.gradients);
    let relative =
        |(expected, found): (&Option<Vec<f64>>, &Option<Vec<f64>>)| match (expected, found) {
            (Some(expected), Some(found)) => difference(expected, found, scale),
            (None, None) => 0.0,
            _ => f64::INFINITY,
        };
    let pairs = pairs.map(|((path, expected), (_, found))| GradientDifference {
        path: path.clone(),
        relative: relative((expected, found)),
    });
    pairs.collect()
}

impl fmt::Display for FirstDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            module,
            operation,
            number,
            operations,
            shape,
            relative,
            bound,
            ..
        } = self;
        let place = match module.as_str() {
            "" => "outside of submodules".to_string(),
            module => format!("in or after `{module}`"),
        };
        let number = number + 1;
        write!(
            f,
            "{place}: {operation}, operation {number} of {operations}, output {shape:?}"
        )?;
        match (&self.reason, self.mode) {
            (Some(reason), _) => write!(f, ": {reason}"),
            (None, ReplayMode::Single) => {
                write!(
                    f,
                    ", run alone: relative difference {relative:.1e}, bound {bound:.1e}"
                )
            }
            (None, ReplayMode::Sequence) => {
                write!(
                    f,
                    ", run after the operations before it (each is correct when run alone): relative difference \
                     {relative:.1e}, bound {bound:.1e}"
                )
            }
        }
    }
}

impl fmt::Display for DeviceRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device, bound, .. } = self;
        let verdict = if self.passes() { "pass" } else { "FAIL" };
        writeln!(f, "{device}: {verdict}, bound {bound:.1e}")?;
        if let Some(reason) = &self.failed {
            writeln!(f, "  the step failed: {reason}")?;
        } else {
            let [found, expected] = self.loss;
            let apart = self.loss_difference;
            writeln!(
                f,
                "  loss {found:.9e}, on the CPU {expected:.9e}: relative difference {apart:.1e}"
            )?;
            let worst = self
                .gradients
                .iter()
                .max_by(|a, b| a.relative.total_cmp(&b.relative));
            if let Some(GradientDifference { path, relative }) = worst {
                let (wrong, all) = (self.wrong_gradients().count(), self.gradients.len());
                writeln!(
                    f,
                    "  gradients: {wrong} of {all} differ; largest relative difference {relative:.1e}, of {path}"
                )?;
            }
        }
        match (&self.first, &self.not_observed) {
            (Some(first), _) => writeln!(f, "  first output that differs: {first}")?,
            (None, Some(reason)) if self.operations == 0 => {
                writeln!(f, "  operations were not compared: {reason}")?;
            }
            (None, Some(reason)) => {
                let agree = self.operations;
                writeln!(
                    f,
                    "  {agree} operations of the forward agree; the others were not compared: {reason}"
                )?;
            }
            (None, None) => writeln!(f, "  {} operations of the forward agree", self.operations)?,
        }
        match (&self.first, self.first_wrong_gradient()) {
            (None, Some(wrong)) => {
                writeln!(
                    f,
                    "  first gradient that differs in the backward: {}",
                    wrong.path
                )
            }
            _ => Ok(()),
        }
    }
}

impl fmt::Display for DeviceReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.runs.iter().try_for_each(|run| run.fmt(f))
    }
}
