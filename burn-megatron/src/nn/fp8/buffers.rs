//! The magnitudes and scales of all operands of a model, in buffers on the device.

use burn::tensor::{DType, Device, Tensor, TensorData};
#[cfg(doc)]
use burn_megatron_kernels::fp8::NextScales;
use burn_megatron_kernels::fp8::{ScaleRule, ScaleRules, empty_log, next_scales};
use parking_lot::Mutex;

use super::history::ScaleState;
use super::operand::Operand;
use crate::comm::CommError;

/// The slots of a layer, in the order of [`Operand::ALL`].
const OPERANDS: usize = Operand::ALL.len();

/// The log of the present step and the state of delayed scaling, see [`burn_megatron_kernels::fp8`]. The
/// host makes copies of neither in a step.
#[derive(Debug, Default)]
pub(super) struct OperandBuffers(Mutex<Buffers>);

#[derive(Clone, Debug, Default)]
struct Buffers {
    rules: Vec<Option<ScaleRule>>,
    /// Where the buffers are, or will be at their first use.
    device: Option<Device>,
    /// None before its first use.
    state: Option<(ScaleRules, Tensor<1>)>,
    /// None if there was no tensor in this step.
    log: Option<Tensor<1>>,
    /// The state on the host, by slot, and whether the device has a newer one.
    host: Vec<ScaleState>,
    is_stale: bool,
}

/// The state and the log at one time.
#[derive(Debug)]
pub struct Fp8Snapshot {
    buffers: Buffers,
    /// On the host, as layers add to it in place.
    log: Option<TensorData>,
}

impl OperandBuffers {
    /// Returns the state that [`restore_snapshot`](Self::restore_snapshot) restores. Waits for the device if there is a
    /// log.
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

    /// Adds the slots of a layer on `device`, and returns the first one.
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

    /// The scales on `device`: that of a slot is the element with its number.
    pub fn scales(&self, device: &Device) -> Tensor<1> {
        let buffers = &mut *self.0.lock();
        buffers.move_to(device);
        buffers.state(device).1.clone()
    }

    /// Has `add` add magnitudes on `device` to the log, which it gets and returns.
    pub fn log<R>(&self, device: &Device, add: impl FnOnce(Tensor<1>) -> (R, Tensor<1>)) -> R {
        let buffers = &mut *self.0.lock();
        buffers.move_to(device);
        let log = buffers.take_log(device);
        let (result, log) = add(log);
        buffers.log = Some(log);
        result
    }

    /// The states of a layer, from its first slot on. Waits for the device if it has newer ones.
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

    /// Ends the step: `gather` gets the log of this rank, and returns those of all ranks. Returns
    /// [`NextScales::counts`]; `None` without layers.
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

    /// Moves the buffers, if they are elsewhere: with a layer whose tensors were moved.
    fn move_to(&mut self, device: &Device) {
        if self.device.as_ref() != Some(device) {
            self.drop_state();
            self.log = self.log.take().map(|log| log.to_device(device));
            self.device = Some(device.clone());
        }
    }

    /// The state on the device; uploads it if it is not there.
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

    /// Leaves the state on the host alone.
    fn drop_state(&mut self) {
        self.read_state();
        self.state = None;
    }
}

fn scales_and_histories(states: &[ScaleState]) -> usize {
    states.iter().map(|state| 1 + state.history.len()).sum()
}
