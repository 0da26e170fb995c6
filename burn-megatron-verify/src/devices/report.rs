//! The report of `check_device`.

use std::fmt;

use burn::tensor::{DType, Device};

use super::Oracle;
use super::compare::{CANCELLED, Scale, Units, difference, largest};
use super::step::Step;
use super::trace::Trace;

/// The runs of a step on devices.
#[derive(Clone, Debug)]
pub struct DeviceReport {
    /// The reference of the comparison.
    pub oracle: Oracle,
    /// By device.
    pub runs: Vec<DeviceRun>,
}

impl DeviceReport {
    /// Whether every device computes what the CPU does.
    pub fn passes(&self) -> bool {
        self.runs.iter().all(DeviceRun::passes)
    }
}

/// A step on a device, compared with that on the CPU.
#[derive(Clone, Debug)]
pub struct DeviceRun {
    /// The device.
    pub device: String,
    /// Why the step failed, if it did.
    pub failed: Option<String>,
    /// The losses: on the device, and on the CPU.
    pub loss: [f64; 2],
    /// The difference of the losses over the loss, or over a tenth of the norm of parameter times gradient if that norm is
    /// larger. A loss can cancel to zero too.
    pub loss_difference: f64,
    /// By parameter, in the order of the module.
    pub gradients: Vec<GradientDifference>,
    /// The largest relative difference of loss and gradients that passes: `2 sqrt(operations n) u`, where `n` is the longest sum of
    /// an operation and `u` the unit roundoff of the narrowest type, that of TF32 on CUDA where there are products.
    pub bound: f64,
    /// The operation where a difference begins.
    pub first: Option<FirstDifference>,
    /// The operations of the forward that were compared alone.
    pub operations: usize,
    /// Why the others were not compared, if some were not.
    pub not_observed: Option<String>,
    /// The parameters in the order of the forward; empty where it was not observed.
    order: Vec<String>,
}

/// The gradient of a parameter.
#[derive(Clone, Debug, PartialEq)]
pub struct GradientDifference {
    /// Its path.
    pub path: String,
    /// The largest difference of an element over the largest element; or over a tenth of the largest of all gradients, if that
    /// is larger, as gradients that cancel to nothing are rounding errors. Infinite if one has a gradient and the other not.
    pub relative: f64,
}

/// The mode in which an operation was run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplayMode {
    /// By itself, on inputs of the CPU.
    Single,
    /// After all before it, on their outputs.
    Sequence,
}

/// The first operation whose output differs.
#[derive(Clone, Debug, PartialEq)]
pub struct FirstDifference {
    /// The path of the module whose parameter it reads, or else whose parameter was read last; empty before the first, or if the
    /// parameter is the model's own.
    pub module: String,
    /// Its name, or that of a function with kernels of its own.
    pub operation: String,
    /// Its number in the forward, from 0.
    pub number: usize,
    /// The operations of the forward.
    pub operations: usize,
    /// The shape of its first output.
    pub shape: Vec<usize>,
    /// The largest difference over the largest element. For a sum or a product alone, the denominator is at least a
    /// tenth of its result on absolute values, as terms can cancel.
    pub relative: f64,
    /// The largest difference that rounding explains.
    pub bound: f64,
    /// The mode in which it was run.
    pub mode: ReplayMode,
    /// The fault, if it is not a difference.
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
        // A backward has about two operations for each of the forward.
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

    /// Whether the device computes what the CPU does.
    pub fn passes(&self) -> bool {
        self.failed.is_none()
            && self.first.is_none()
            && self.loss_difference <= self.bound
            && self.wrong_gradients().next().is_none()
    }

    /// The gradients that differ.
    pub fn wrong_gradients(&self) -> impl Iterator<Item = &GradientDifference> {
        self.gradients
            .iter()
            .filter(|it| it.relative.is_nan() || it.relative > self.bound)
    }

    /// The first gradient that differs, in the order of the backward, where the forward was observed.
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
                write!(f, ", alone: {relative:.1e} apart, bound {bound:.1e}")
            }
            (None, ReplayMode::Sequence) => {
                write!(
                    f,
                    ", after those before it, though each is right alone: {relative:.1e} apart, bound {bound:.1e}"
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
                "  loss {found:.9e}, on the CPU {expected:.9e}: {apart:.1e} apart"
            )?;
            let worst = self
                .gradients
                .iter()
                .max_by(|a, b| a.relative.total_cmp(&b.relative));
            if let Some(GradientDifference { path, relative }) = worst {
                let (wrong, all) = (self.wrong_gradients().count(), self.gradients.len());
                writeln!(
                    f,
                    "  gradients: {wrong} of {all} differ, most {path}: {relative:.1e} apart"
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
                    "  {agree} operations of the forward agree, others were not compared: {reason}"
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
