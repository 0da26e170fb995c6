//! Device buffers with the magnitudes and scales of all operands of a model.

use burn::tensor::{DType, Device, Tensor, TensorData};
#[cfg(doc)]
use burn_megatron_kernels::fp8::NextScales;
use burn_megatron_kernels::fp8::{ScaleRule, ScaleRules, empty_log, next_scales};
use parking_lot::Mutex;

use super::history::ScaleState;
use super::operand::Operand;
use crate::comm::CommError;

/// The number of slots per layer, in the order of [`Operand::ALL`].
const OPERANDS: usize = Operand::ALL.len();

/// The log of the current step and the state of delayed scaling (see [`burn_megatron_kernels::fp8`]). They are not
/// copied to the host during a step.
#[derive(Debug, Default)]
pub(super) struct OperandBuffers(Mutex<Buffers>);

#[derive(Clone, Debug, Default)]
struct Buffers {
    rules: Vec<Option<ScaleRule>>,
    /// The device of the buffers, or the device on which they will be created.
    device: Option<Device>,
    /// The state on the device. `None` before its first use.
    state: Option<(ScaleRules, Tensor<1>)>,
    /// The log on the device. `None` if no tensor was recorded in this step.
    log: Option<Tensor<1>>,
    /// The state on the host, by slot. `is_stale` is true if the device has a newer state.
    host: Vec<ScaleState>,
    is_stale: bool,
}

/// A copy of the FP8 scaling state and of the magnitudes of the current step, taken by
/// [`Fp8::snapshot`](super::Fp8::snapshot).
#[derive(Debug)]
pub struct Fp8Snapshot {
    buffers: Buffers,
    /// The log on the host, because layers add to the device log in place.
    log: Option<TensorData>,
}

impl OperandBuffers {
    /// Returns a snapshot for [`restore_snapshot`](Self::restore_snapshot). Synchronizes with the device if magnitudes
    /// have been logged.
    pub fn snapshot(&self) -> Fp8Snapshot {
        let mut buffers = self.0.lock().clone();
        let log = buffers.log.take().map(|log| log.to_data());
        Fp8Snapshot { buffers, log }
    }

    /// Restores the state and the log of a snapshot.
    pub fn restore_snapshot(&self, snapshot: &Fp8Snapshot) {
        let mut own = self.0.lock();
        let log = snapshot.log.clone().zip(own.device.clone());
        let log = log.map(|(log, device)| {
            let dtype = log.dtype();
            Tensor::from_data(log, (&device, dtype))
        });
        *own = Buffers {
            rules: own.rules.clone(),
            device: own.device.clone(),
            log,
            ..snapshot.buffers.clone()
        };
    }

    /// Adds the slots of a layer on `device`, and returns the index of the first slot.
    pub fn add(&self, rules: [Option<ScaleRule>; OPERANDS], device: &Device) -> usize {
        let buffers = &mut *self.0.lock();
        buffers.drop_state();
        buffers.device.get_or_insert_with(|| device.clone().inner());
        if let Some(log) = buffers.log.take() {
            let more = empty_log(OPERANDS, &log.device());
            buffers.log = Some(Tensor::cat(vec![log, more], 0));
        }
        let first = buffers.rules.len();
        buffers.rules.extend(rules);
        let state =
            |rule: Option<ScaleRule>| ScaleState::first(rule.map_or(0, |rule| rule.history));
        buffers.host.extend(rules.map(state));
        first
    }

    /// Returns the scales on `device`, indexed by slot.
    pub fn scales(&self, device: &Device) -> Tensor<1> {
        let buffers = &mut *self.0.lock();
        buffers.move_to(device);
        buffers.state(device).1.clone()
    }

    /// Calls `add` to append magnitudes on `device` to the log. `add` gets the log as an argument, and returns the
    /// extended log.
    pub fn log<R>(&self, device: &Device, add: impl FnOnce(Tensor<1>) -> (R, Tensor<1>)) -> R {
        let buffers = &mut *self.0.lock();
        buffers.move_to(device);
        let log = buffers.take_log(device);
        let (result, log) = add(log);
        buffers.log = Some(log);
        result
    }

    /// Returns the states of a layer, given its first slot. Synchronizes with the device if the states on the device
    /// are newer.
    pub fn states(&self, first: usize) -> [ScaleState; OPERANDS] {
        let buffers = &mut *self.0.lock();
        buffers.read_state();
        std::array::from_fn(|operand| buffers.host[first + operand].clone())
    }

    /// Replaces the states of a layer.
    pub fn restore(&self, first: usize, states: [ScaleState; OPERANDS]) {
        let buffers = &mut *self.0.lock();
        buffers.drop_state();
        buffers.host.splice(first..first + OPERANDS, states);
    }

    /// Ends the step. `gather` gets the log of this rank and returns the logs of all ranks. Returns
    /// [`NextScales::counts`], or `None` without layers.
    pub fn end_step(
        &self,
        gather: impl FnOnce(Tensor<1>) -> Result<Tensor<1>, CommError>,
    ) -> Result<Option<Tensor<1>>, CommError> {
        let buffers = &mut *self.0.lock();
        let Some(device) = buffers.device.clone() else {
            return Ok(None);
        };
        let logs = gather(buffers.take_log(&device))?;
        let (rules, state) = buffers.state(&device);
        let next = next_scales(logs, state.clone(), rules);
        *state = next.state;
        buffers.log = Some(next.log);
        buffers.is_stale = buffers.rules.iter().any(Option::is_some);
        Ok(Some(next.counts))
    }
}

impl Buffers {
    fn take_log(&mut self, device: &Device) -> Tensor<1> {
        let slots = self.rules.len();
        let log = self.log.take();
        log.unwrap_or_else(|| empty_log(slots, device))
    }

    /// Moves the buffers to `device`, if the tensors of a layer were moved.
    fn move_to(&mut self, device: &Device) {
        if self.device.as_ref() != Some(device) {
            self.drop_state();
            self.log = self.log.take().map(|log| log.to_device(device));
            self.device = Some(device.clone());
        }
    }

    /// Returns the state on the device, and uploads it if needed.
    fn state(&mut self, device: &Device) -> &mut (ScaleRules, Tensor<1>) {
        let (rules, host) = (&self.rules, &self.host);
        self.state.get_or_insert_with(|| {
            let scales = host.iter().map(|state| state.scale);
            let histories = host.iter().flat_map(|state| state.history.iter().copied());
            let values: Vec<f32> = scales.chain(histories).map(f32::from_bits).collect();
            let data = TensorData::new(values, [scales_and_histories(host)]);
            let state = Tensor::from_data(data, (device, DType::F32));
            (ScaleRules::new(rules.iter().copied(), device), state)
        })
    }

    /// Reads the state to the host.
    fn read_state(&mut self) {
        if let Some((rules, state)) = self.state.as_ref().filter(|_| self.is_stale) {
            let values = state.clone().into_data();
            let bits: Vec<u32> = values.iter::<f32>().map(f32::to_bits).collect();
            for (slot, host) in self.host.iter_mut().enumerate() {
                *host = ScaleState {
                    scale: bits[slot],
                    history: bits[rules.history(slot)].to_vec(),
                };
            }
        }
        self.is_stale = false;
    }

    /// Drops the state on the device, and keeps it on the host.
    fn drop_state(&mut self) {
        self.read_state();
        self.state = None;
    }
}

fn scales_and_histories(states: &[ScaleState]) -> usize {
    states.iter().map(|state| 1 + state.history.len()).sum()
}
