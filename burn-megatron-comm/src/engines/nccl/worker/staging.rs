//! Which calls use registered buffers, and which buffer each uses.

use std::collections::HashSet;

use super::super::call::{CallMemory, NcclCall};
use super::super::communicator::{CommKey, NcclCommunicator};
use super::super::library::Addresses;
use super::super::registered::{RegisteredBuffer, Registration};
use super::NcclWorker;

/// Destination address, source address, bytes.
type CopyBack = (u64, u64, usize);

impl NcclWorker {
    /// Whether the registered buffers of these calls are ready, where they use any; registers what is missing.
    pub(super) fn staging_ready(&mut self, calls: &[NcclCall]) -> bool {
        let Registration::On(kind) = self.shared.registration() else {
            return true;
        };
        let shared = &self.shared;
        let mut ready = true;
        let mut in_use = BuffersInUse::default();
        for call in calls {
            let (Some(bytes), Some(communicator)) =
                (bytes_for(call), self.communicators.get_mut(&call.key))
            else {
                continue;
            };
            let Some(comm) = communicator.comm() else {
                continue;
            };
            let registered = match in_use.next(call.key, bytes, &communicator.staging) {
                Some(at) => Ok(at),
                // The ranks of a group register one buffer at a time, in one order.
                None if !ready => return false,
                None => {
                    RegisteredBuffer::begin(bytes, kind, comm, &shared.library).map(|staging| {
                        let at = communicator.staging.len();
                        communicator.staging.push(staging);
                        in_use.0.insert((call.key, at));
                        at
                    })
                }
            };
            let is_ready =
                registered.and_then(|at| communicator.staging[at].ready(comm, &shared.library));
            match is_ready {
                Ok(is_ready) => ready &= is_ready,
                Err(reason) => {
                    shared.disable_registration(reason);
                    return true;
                }
            }
        }
        ready
    }

    /// The addresses of the call: its own memory, or a registered buffer with a copy before and after.
    pub(super) fn through_staging(
        &self,
        call: &NcclCall,
        own: Addresses,
        communicator: &NcclCommunicator,
        in_use: &mut BuffersInUse,
    ) -> Result<(Addresses, Option<CopyBack>), String> {
        let staging = match self.shared.registration() {
            Registration::On(_) => bytes_for(call)
                .and_then(|bytes| in_use.next(call.key, bytes, &communicator.staging))
                .map(|at| &communicator.staging[at]),
            _ => None,
        };
        let Some(staging) = staging else {
            return Ok((own, None));
        };
        let used = staging.addresses(&call.plan, call.group.index());
        let [input, output] = call.plan.bytes();
        let driver = &self.shared.driver;
        // SAFETY: both have this length, and the stream executes in order.
        unsafe { driver.copy_on_device(used[0], own[0], input, communicator.stream) }?;
        Ok((used, Some((own[1], used[1], output))))
    }
}

/// The registered buffers that calls of one launch use.
#[derive(Default)]
pub(super) struct BuffersInUse(HashSet<(CommKey, usize)>);

impl BuffersInUse {
    /// The first unused buffer of this size.
    fn next(&mut self, key: CommKey, bytes: usize, staging: &[RegisteredBuffer]) -> Option<usize> {
        let mut fitting = (0..staging.len()).filter(|at| staging[*at].bytes() == bytes);
        let at = fitting.find(|at| !self.0.contains(&(key, *at)))?;
        self.0.insert((key, at));
        Some(at)
    }
}

/// The size of the registered buffer that a call uses; only tensors use one.
fn bytes_for(call: &NcclCall) -> Option<usize> {
    match call.memory {
        CallMemory::Tensor(_) => RegisteredBuffer::bytes_for(&call.plan),
        CallMemory::Host { .. } => None,
    }
}
