//! Delayed scaling on the device: records the largest magnitude (amax) of each tensor, and computes scales from these
//! magnitudes.
//!
//! All quantized operands of a model share two buffers. Each operand has a slot in both buffers:
//!
//! - The log holds the largest magnitudes of the current step. [`quantize_logged`](super::quantize_logged) updates the
//!   log.
//! - The state holds the scales and the largest magnitudes of earlier steps (the amax history). Quantizers read the
//!   scales with [`Scaling::Element`](super::Scaling::Element).
//!
//! Call [`next_scales`] at the end of a step to compute the scales of the next step. The formulas follow Transformer
//! Engine (Micikevicius et al. 2022, arXiv:2209.05433).

use std::ops::Range;
use std::sync::Arc;

use burn::backend::DispatchDevice;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use super::check;
use crate::KernelError;
use crate::cpu::slice;
use crate::error::{F32, accept, check_shape, check_type};
use crate::launch::{SimpleOp, Spec, exactly, launch, launch_one};

mod cpu;
#[cfg(feature = "cubecl")]
pub(crate) mod kernel;
#[cfg(test)]
mod tests;

pub(super) use cpu::log_entry;

/// The number of elements per slot in a log. The elements are the largest magnitude, the number of saturated values,
/// and the number of all values. A value is saturated if its scaled magnitude exceeds the largest value of the format.
/// See [`empty_log`].
pub const LOG_COLUMNS: usize = 3;

/// The values of a slot that has not received a tensor.
const NOTHING: [f32; LOG_COLUMNS] = [-1.0, 0.0, 0.0];

/// The rule that computes the scale of an operand from its amax history.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScaleRule {
    /// The length of the amax history, at least 1.
    pub history: usize,
    /// The numerator in `scale = numerator / amax`: the largest value of the format, reduced by the margin.
    pub numerator: f32,
    /// Whether `amax` is the most recent magnitude of the history. Otherwise `amax` is the largest magnitude of the
    /// history.
    pub most_recent: bool,
}

/// The [`ScaleRule`]s of all slots, stored on a device. Create them once and use them in all steps. A slot without a
/// rule keeps its scale.
///
/// The state is `[length]` in f32. It holds the scales of all slots, followed by the [amax history](Self::history) of
/// each slot with a rule, newest first.
#[derive(Clone, Debug)]
pub struct ScaleRules {
    rules: Arc<[Option<ScaleRule>]>,
    /// The start of each slot's history, followed by the end of the last history.
    starts: Arc<[usize]>,
    /// On CubeCL devices `[4 * slots]`: the start and the length of the history, the bits of the numerator, and whether
    /// the most recent magnitude is used.
    table: Option<Tensor<1, Int>>,
}

impl ScaleRules {
    /// Creates the rules of all slots for buffers on `device`.
    pub fn new(rules: impl IntoIterator<Item = Option<ScaleRule>>, device: &Device) -> Self {
        let rules: Arc<[_]> = rules.into_iter().collect();
        let mut starts = vec![rules.len()];
        for rule in rules.iter() {
            starts.push(starts[starts.len() - 1] + rule.map_or(0, |rule| rule.history));
        }
        let device = device.clone().inner();
        let on_cpu = matches!(device.as_dispatch(), DispatchDevice::Flex(_));
        let row = |(rule, start): (&Option<ScaleRule>, &usize)| {
            let (history, numerator, most_recent) = rule.map_or((0, 0, 0), |rule| {
                let recent = u32::from(rule.most_recent);
                (rule.history as u32, rule.numerator.to_bits(), recent)
            });
            // The kernel reads the numbers as unsigned numbers.
            [*start as u32, history, numerator, most_recent].map(|number| number as i32)
        };
        let table = (!on_cpu && !rules.is_empty()).then(|| {
            let numbers: Vec<i32> = rules.iter().zip(&starts).flat_map(row).collect();
            let shape = [numbers.len()];
            Tensor::from_data(TensorData::new(numbers, shape), (&device, DType::I32))
        });
        Self {
            rules,
            starts: starts.into(),
            table,
        }
    }

    /// Returns the number of slots.
    pub fn slots(&self) -> usize {
        self.rules.len()
    }

    /// Returns the range of a slot's amax history in the state.
    ///
    /// # Panics
    ///
    /// Panics if the slot does not exist.
    pub fn history(&self, slot: usize) -> Range<usize> {
        self.starts[slot]..self.starts[slot + 1]
    }

    /// Returns the number of elements of the state.
    pub fn state_len(&self) -> usize {
        self.starts[self.slots()]
    }
}

/// Creates an empty log, `[LOG_COLUMNS * slots]` in f32. The largest magnitude of a slot is -1 before the slot receives
/// a tensor. It is NaN after a tensor with a NaN. Counts up to 2^24 are exact. Larger counts are rounded.
pub fn empty_log(slots: usize, device: &Device) -> Tensor<1> {
    let numbers: Vec<f32> = NOTHING.repeat(slots);
    let shape = [numbers.len()];
    Tensor::from_data(TensorData::new(numbers, shape), (device, DType::F32))
}

/// Adds the statistics [`seen`](super::Quantized::seen) of a quantizer to entry `slot` of `log`. `elements` is the
/// number of values that were quantized.
///
/// If `seen` has one element, which is the largest magnitude, no value counts as saturated. The log is updated in place
/// if no other tensor shares its memory. On CubeCL devices, the function launches one kernel.
///
/// # Panics
///
/// Panics with a [`KernelError`] if the log has no entry `slot`, or if `seen` is not `[1]` or `[2]` in f32.
pub fn log_magnitude(log: Tensor<1>, slot: usize, seen: Tensor<1>, elements: usize) -> Tensor<1> {
    const NAME: &str = "log_magnitude";
    accept(check::entry(NAME, &log, slot));
    accept(check_type(NAME, "magnitude", seen.dtype(), F32));
    let [length] = seen.dims();
    accept(check_shape(NAME, matches!(length, 1 | 2), || {
        format!("a magnitude of {length} numbers: expected 1 or 2")
    }));
    let op = SimpleOp {
        name: NAME,
        parameters: (slot, elements),
        outputs: vec![Spec::of(&log)],
        cpu: |&(slot, elements), mut inputs| {
            let log = inputs.remove(0);
            let seen = slice::<f32>(&inputs[0]);
            let seen = [seen[0], seen.get(1).copied().unwrap_or(0.0)];
            vec![log_entry(log, slot, seen, elements as f32)]
        },
        #[cfg(feature = "cubecl")]
        cube: |&(slot, elements), inputs| vec![kernel::log(inputs, slot, elements)],
    };
    let inputs = vec![log.into_dispatch(), seen.into_dispatch()];
    Tensor::from_dispatch(launch_one(op, inputs))
}

/// The result of [`next_scales`].
#[derive(Clone, Debug)]
pub struct NextScales {
    /// The state for the next step.
    pub state: Tensor<1>,
    /// An empty log for the next step.
    pub log: Tensor<1>,
    /// Two counts per slot, summed over all ranks, `[2 * slots]` in f32: the number of saturated values and the number
    /// of all values.
    pub counts: Tensor<1>,
}

/// Computes the scales of the next step from the logs of all ranks. Call it at the end of a step.
///
/// `logs` holds the concatenated logs, `[ranks * LOG_COLUMNS * slots]`.
///
/// If a slot has received a tensor on any rank, the largest magnitude of all ranks is added to its history. The largest
/// magnitude is NaN if it is NaN on any rank.
///
/// ```text
/// amax  = the last magnitude of the history, or the largest finite magnitude of the history
/// scale = numerator / amax    if the last magnitude is finite and amax above 0, else the previous scale
/// ```
///
/// If the quotient `numerator / amax` is infinite, the scale is the largest finite f32. If the last magnitude is
/// infinite or NaN, the scale does not change. Later steps ignore such a magnitude. Otherwise, a single overflow due to
/// loss scaling would keep the scale unchanged for the length of the history. If a slot has not received a tensor on
/// any rank, its scale and its history do not change.
///
/// On CubeCL devices, the function launches one kernel. See [`quantize`](fn@super::quantize) for the accuracy of the
/// division.
///
/// # Panics
///
/// Panics with a [`KernelError`] if the length of `logs` or `state` does not match `rules`, or if `logs` or `state` is
/// not f32.
pub fn next_scales(logs: Tensor<1>, state: Tensor<1>, rules: &ScaleRules) -> NextScales {
    accept(check_lengths(&logs, &state, rules));
    let (slots, flat) = (rules.slots(), |count| Spec::new([count], DType::F32));
    let op = SimpleOp {
        name: "next_scales",
        parameters: rules.clone(),
        outputs: vec![Spec::of(&state), flat(LOG_COLUMNS * slots), flat(2 * slots)],
        cpu: |rules, inputs| cpu::next_scales(rules, &inputs[0], &inputs[1]),
        #[cfg(feature = "cubecl")]
        cube: kernel::next_scales,
    };
    let mut inputs = vec![logs.into_dispatch(), state.into_dispatch()];
    inputs.extend(rules.table.clone().map(Tensor::into_dispatch));
    let [state, log, counts] = exactly(launch(op, inputs)).map(Tensor::from_dispatch);
    NextScales { state, log, counts }
}

fn check_lengths(
    logs: &Tensor<1>,
    state: &Tensor<1>,
    rules: &ScaleRules,
) -> Result<(), KernelError> {
    const NAME: &str = "next_scales";
    check_type(NAME, "logs", logs.dtype(), F32)?;
    check_type(NAME, "state", state.dtype(), F32)?;
    let ([logs], [state], slots) = (logs.dims(), state.dims(), rules.slots());
    let row = LOG_COLUMNS * slots;
    let whole = row > 0 && logs > 0 && logs.is_multiple_of(row);
    check_shape(NAME, whole, || {
        format!("logs of {logs} numbers for {slots} slots: expected a multiple of {row} above 0")
    })?;
    let expected = rules.state_len();
    check_shape(NAME, state == expected, || {
        format!("a state of {state} numbers: expected {expected} for these rules")
    })
}
