//! The selection of the registered memory of calls.

use std::collections::HashSet;

use super::super::call::{CallMemory, NcclCall};
use super::super::communicator::{CommKey, NcclCommunicator};
use super::super::library::{Addresses, Comm};
use super::super::registered::{RegisteredWindow, Registration, is_registered, window_bytes};
use super::NcclWorker;
use crate::nccl_config::RegisteredBuffers;

/// The destination address, the source address and the number of bytes of a copy.
type CopyBack = (u64, u64, usize);

impl NcclWorker {
    /// Returns whether the windows that these calls require are ready. Starts to register missing windows.
    pub(super) fn windows_ready(&mut self, calls: &[NcclCall]) -> bool {
        if !self.uses(RegisteredBuffers::Windows) {
            return true;
        }
        let shared = &self.shared;
        let mut ready = true;
        let mut in_use = WindowsInUse::default();
        for call in calls {
            let (Some(bytes), Some(communicator)) =
                (bytes_for(call), self.communicators.get_mut(&call.key))
            else {
                continue;
            };
            let Some(comm) = communicator.comm() else {
                continue;
            };
            let registered = match in_use.next(call.key, bytes, &communicator.windows) {
                Some(at) => Ok(at),
                // The ranks of a group register one window at a time, in the same order.
                None if !ready => return false,
                None => RegisteredWindow::begin(bytes, comm, &shared.library).map(|window| {
                    let at = communicator.windows.len();
                    communicator.windows.push(window);
                    in_use.0.insert((call.key, at));
                    at
                }),
            };
            let is_ready =
                registered.and_then(|at| communicator.windows[at].ready(comm, &shared.library));
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

    fn uses(&self, kind: RegisteredBuffers) -> bool {
        self.shared.registration() == Registration::On(kind)
    }

    /// Returns the addresses that the call uses. These are the addresses of the call's memory, or the addresses of a
    /// window. If the call uses a window, copies the input to the window and returns the copy of the result that must
    /// follow the call.
    pub(super) fn through_window(
        &self,
        call: &NcclCall,
        own: Addresses,
        communicator: &NcclCommunicator,
        in_use: &mut WindowsInUse,
    ) -> Result<(Addresses, Option<CopyBack>), String> {
        let bytes = bytes_for(call).filter(|_| self.uses(RegisteredBuffers::Windows));
        let window = bytes
            .and_then(|bytes| in_use.next(call.key, bytes, &communicator.windows))
            .map(|at| &communicator.windows[at]);
        let Some(window) = window else {
            return Ok((own, None));
        };
        let used = window.addresses(&call.plan, call.group.index());
        let [input, output] = call.plan.bytes();
        let driver = &self.shared.driver;
        // SAFETY: both addresses have this length, and the stream executes in order.
        unsafe { driver.copy_on_device(used[0], own[0], input, communicator.stream) }?;
        self.shared.copies.add(input);
        Ok((used, Some((own[1], used[1], output))))
    }

    /// Registers the allocations of a call on a large tensor, if the registration of allocations is enabled.
    pub(super) fn register_allocations(
        &mut self,
        call: &NcclCall,
        addresses: Addresses,
        comm: Comm,
    ) -> Result<(), String> {
        let is_tensor = matches!(call.memory, CallMemory::Tensor(_));
        if !is_tensor || !is_registered(&call.plan) || !self.uses(RegisteredBuffers::Allocations) {
            return Ok(());
        }
        let Some(communicator) = self.communicators.get_mut(&call.key) else {
            return Ok(());
        };
        let shared = &self.shared;
        for (address, bytes) in addresses.into_iter().zip(call.plan.bytes()) {
            if bytes > 0 {
                let allocations = &mut communicator.allocations;
                allocations.register(address, comm, &shared.library, &*shared.driver)?;
            }
        }
        Ok(())
    }
}

/// The windows that the calls of one launch already use.
#[derive(Default)]
pub(super) struct WindowsInUse(HashSet<(CommKey, usize)>);

impl WindowsInUse {
    /// Returns the first unused window with this size, and marks it as used.
    fn next(&mut self, key: CommKey, bytes: usize, windows: &[RegisteredWindow]) -> Option<usize> {
        let mut fitting = (0..windows.len()).filter(|at| windows[*at].bytes() == bytes);
        let at = fitting.find(|at| !self.0.contains(&(key, *at)))?;
        self.0.insert((key, at));
        Some(at)
    }
}

/// Returns the size of the window of a call. Only calls on tensors use windows.
fn bytes_for(call: &NcclCall) -> Option<usize> {
    match call.memory {
        CallMemory::Tensor(_) => window_bytes(&call.plan),
        CallMemory::Host { .. } => None,
    }
}
