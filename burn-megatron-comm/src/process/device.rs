//! Calls on tensors in device memory. They are checked, numbered and recorded in the same way as calls on host buffers.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;

use burn::tensor::{Device, Tensor};

use super::ProcessCommunicator;
use super::on_device::{DeviceTransport, InFlightDeviceCall, device_type};
use super::process_call::ProcessCall;
use super::result_slot::ResultSlot;
use crate::call::{Call, Signature};
use crate::device::{DeviceCommunicator, DevicePending};
use crate::error::CommError;

impl DeviceCommunicator for ProcessCommunicator {
    fn takes(&self, device: &Device) -> bool {
        let transport = self.world.transport.device();
        transport.is_some_and(|transport| transport.takes(device))
    }

    fn allows_early_receives(&self) -> bool {
        let transport = self.world.transport.device();
        transport.is_none_or(|transport| transport.allows_early_receives())
    }

    fn start(&self, calls: Vec<(Call, Tensor<1>)>) -> Result<Vec<DevicePending>, CommError> {
        let engine = &self.world.transport;
        let failed = |message: String| CommError::engine(engine.name(), message);
        let transport = engine.device();
        let transport = transport.ok_or_else(|| {
            failed("the engine does not support device tensors: expected host buffers".into())
        })?;
        let mut signatures = Vec::with_capacity(calls.len());
        for (call, input) in &calls {
            let (dtype, len) = (input.dtype(), input.dims()[0]);
            let dtype = device_type(dtype).ok_or_else(|| {
                failed(format!(
                    "invalid tensor type {dtype:?}: expected f64, f32, bf16 or f16"
                ))
            })?;
            call.check_sizes(&self.group, dtype, len)?;
            if self.is_local(call) && matches!(call, Call::Send { .. } | Call::Receive { .. }) {
                return Err(failed(
                    "invalid peer: a message of a rank to itself is not supported on device tensors".into(),
                ));
            }
            signatures.push(Arc::new(Signature::sized(call.clone(), dtype, len)));
        }
        self.world.check()?;
        if self.group.size() == 1 {
            Ok(self.return_inputs(calls, &signatures))
        } else {
            self.submit(transport, calls, signatures)
        }
    }
}

impl ProcessCommunicator {
    /// Completes calls of a group of one rank. Each call returns its input.
    fn return_inputs(
        &self,
        calls: Vec<(Call, Tensor<1>)>,
        signatures: &[Arc<Signature>],
    ) -> Vec<DevicePending> {
        let inputs = calls.into_iter().map(|(_, input)| input);
        let handle = |(input, signature): (Tensor<1>, &Arc<Signature>)| {
            let in_flight = self.begin(signature);
            DevicePending::new(move || {
                in_flight.complete();
                Ok(input)
            })
        };
        inputs.zip(signatures).map(handle).collect()
    }

    fn submit(
        &self,
        transport: &dyn DeviceTransport,
        calls: Vec<(Call, Tensor<1>)>,
        signatures: Vec<Arc<Signature>>,
    ) -> Result<Vec<DevicePending>, CommError> {
        let mut jobs = Vec::with_capacity(calls.len());
        let mut watched = Vec::with_capacity(calls.len());
        for ((_, input), signature) in calls.into_iter().zip(signatures) {
            let in_flight = self.begin(&signature);
            let passed = Arc::new(ResultSlot::default());
            jobs.push(in_flight.job(input, &passed));
            watched.push((in_flight, passed));
        }
        let launches = transport.start_on_device(jobs)?.into_iter();
        let handle = |(launch, (in_flight, passed)): (
            InFlightDeviceCall,
            (ProcessCall, Arc<ResultSlot>),
        )| {
            self.world.deadline_watcher.watch(in_flight.clone(), passed);
            DevicePending::new(move || {
                in_flight.wait_passed(&launch.launched)?;
                (launch.result)()
            })
        };
        Ok(launches.zip(watched).map(handle).collect())
    }
}

/// A thread that checks the timeouts of calls on the device. The thread of the rank does not wait for these calls, and
/// it may be blocked in the driver if the device hangs.
#[derive(Debug)]
pub(crate) struct DeadlineWatcher {
    calls: Sender<(ProcessCall, Arc<ResultSlot>)>,
}

impl DeadlineWatcher {
    /// Starts the thread.
    ///
    /// # Errors
    /// The error of the operating system if it cannot start the thread.
    pub fn start() -> io::Result<Self> {
        let (calls, watched) = mpsc::channel();
        let builder = thread::Builder::new().name("deadlines".into());
        builder.spawn(move || watch_all(&watched))?;
        Ok(Self { calls })
    }

    fn watch(&self, in_flight: ProcessCall, passed: Arc<ResultSlot>) {
        // The thread ends only after a call has failed, and the world with it.
        let _ = self.calls.send((in_flight, passed));
    }
}

/// Waits for the calls one after the other. This is sufficient because the device completes calls approximately in the
/// order in which they were started.
fn watch_all(calls: &Receiver<(ProcessCall, Arc<ResultSlot>)>) {
    for (in_flight, passed) in calls {
        match in_flight.wait_passed(&passed) {
            Ok(()) => in_flight.complete(),
            Err(error) => return in_flight.world.fail_with(&error),
        }
    }
}
