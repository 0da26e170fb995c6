//! Calls on tensors that stay on their device, checked, numbered and logged like all others.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;

use burn::tensor::{Device, Tensor};

use super::ProcessCommunicator;
use super::on_device::{DeviceFlight, DeviceTransport, device_type};
use super::slot::Slot;
use super::visit::Visit;
use crate::call::{Call, Signature};
use crate::device::{DevicePending, OnDevice};
use crate::error::CommError;

impl OnDevice for ProcessCommunicator {
    fn takes(&self, device: &Device) -> bool {
        let transport = self.world.transport().device();
        transport.is_some_and(|transport| transport.takes(device))
    }

    fn start(&self, calls: Vec<(Call, Tensor<1>)>) -> Result<Vec<DevicePending>, CommError> {
        let engine = self.world.transport();
        let failed = |message: String| CommError::Engine {
            engine: engine.name().into(),
            message,
        };
        let transport = engine.device();
        let transport =
            transport.ok_or_else(|| failed("tensors go through host memory here".into()))?;
        let mut signatures = Vec::with_capacity(calls.len());
        for (call, input) in &calls {
            let (dtype, len) = (input.dtype(), input.dims()[0]);
            let dtype = device_type(dtype)
                .ok_or_else(|| failed(format!("a tensor of {dtype:?} cannot be sent")))?;
            call.check_sizes(&self.group, dtype, len)?;
            if self.is_own(call) && matches!(call, Call::Send { .. } | Call::Receive { .. }) {
                return Err(failed(
                    "a rank's messages to itself stay on the host".into(),
                ));
            }
            signatures.push(Arc::new(Signature::sized(call.clone(), dtype, len)));
        }
        self.world.check()?;
        // A group of one has nobody to exchange anything with.
        match self.group.size() {
            1 => Ok(self.keep(calls, &signatures)),
            _ => self.hand_over(transport, calls, signatures),
        }
    }
}

impl ProcessCommunicator {
    fn keep(
        &self,
        calls: Vec<(Call, Tensor<1>)>,
        signatures: &[Arc<Signature>],
    ) -> Vec<DevicePending> {
        let inputs = calls.into_iter().map(|(_, input)| input);
        let keep = |(input, signature): (Tensor<1>, &Arc<Signature>)| {
            let visit = self.visit(signature);
            DevicePending::new(move || {
                visit.complete();
                Ok(input)
            })
        };
        inputs.zip(signatures).map(keep).collect()
    }

    fn hand_over(
        &self,
        transport: &dyn DeviceTransport,
        calls: Vec<(Call, Tensor<1>)>,
        signatures: Vec<Arc<Signature>>,
    ) -> Result<Vec<DevicePending>, CommError> {
        let mut jobs = Vec::with_capacity(calls.len());
        let mut watched = Vec::with_capacity(calls.len());
        for ((_, input), signature) in calls.into_iter().zip(signatures) {
            let visit = self.visit(&signature);
            let passed = Arc::new(Slot::default());
            jobs.push(visit.device_job(input, &passed));
            watched.push((visit, passed));
        }
        let flights = transport.start_on_device(jobs)?.into_iter();
        let handle = |(flight, (visit, passed)): (DeviceFlight, (Visit, Arc<Slot>))| {
            self.world.overdue().watch(visit.clone(), passed);
            DevicePending::new(move || {
                visit.launched(&flight.launched)?;
                (flight.result)()
            })
        };
        Ok(flights.zip(watched).map(handle).collect())
    }
}

/// Watches the deadlines of calls that nobody waits for on the host: a rank whose device stands still is
/// in the driver, and hears nothing.
#[derive(Debug)]
pub(crate) struct Overdue {
    calls: Sender<(Visit, Arc<Slot>)>,
}

impl Overdue {
    /// Starts the watch.
    ///
    /// # Errors
    /// What the operating system says if there is no thread to be had.
    pub fn start() -> io::Result<Self> {
        let (calls, watched) = mpsc::channel();
        let builder = thread::Builder::new().name("overdue".into());
        builder.spawn(move || watch_all(&watched))?;
        Ok(Self { calls })
    }

    fn watch(&self, visit: Visit, passed: Arc<Slot>) {
        // The thread ends only after a call has failed, and with it the world.
        let _ = self.calls.send((visit, passed));
    }
}

/// The device passes the calls about in the order of their start, so one after the other will do.
fn watch_all(calls: &Receiver<(Visit, Arc<Slot>)>) {
    for (visit, passed) in calls {
        match visit.launched(&passed) {
            Ok(()) => visit.complete(),
            Err(error) => return visit.world.fail_by(&error),
        }
    }
}
