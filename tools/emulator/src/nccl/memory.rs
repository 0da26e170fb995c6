//! Registered memory, and windows.

use std::collections::BTreeMap;

use super::state::NcclState;
use super::{Failure, argument, usage};

/// Memory of `ncclMemAlloc`, and registrations.
#[derive(Debug, Default)]
pub(super) struct RegisteredMemory {
    /// The sizes in bytes by address.
    own: BTreeMap<u64, usize>,
    /// The communicator, the address and the length by handle.
    registered: BTreeMap<usize, (usize, u64, usize)>,
}

impl RegisteredMemory {
    pub(super) fn add(&mut self, address: u64, bytes: usize) {
        self.own.insert(address, bytes);
    }

    /// Removes memory that is not registered.
    pub(super) fn remove(&mut self, address: u64) -> Result<(), Failure> {
        let Some(bytes) = self.own.get(&address) else {
            return Err(argument(format!("{address:#x} is not of ncclMemAlloc")));
        };
        let end = address + *bytes as u64;
        let mut registered = self.registered.values();
        if registered.any(|(_, start, _)| (address..end).contains(start)) {
            return Err(usage(format!("{address:#x} is still registered")));
        }
        self.own.remove(&address);
        Ok(())
    }

    /// Returns whether all these bytes were allocated by `ncclMemAlloc`.
    pub(super) fn holds(&self, address: u64, bytes: usize) -> bool {
        let before = self.own.range(..=address).next_back();
        before.is_some_and(|(start, length)| address + bytes as u64 <= start + *length as u64)
    }
}

impl NcclState {
    pub(super) fn register(
        &mut self,
        comm: usize,
        address: u64,
        bytes: usize,
    ) -> Result<usize, Failure> {
        self.comm_mut(comm)?.registered += 1;
        let handle = self.number() << 4;
        let piece = (comm, address, bytes);
        self.pieces.registered.insert(handle, piece);
        Ok(handle)
    }

    pub(super) fn deregister(&mut self, comm: usize, handle: usize) -> Result<(), Failure> {
        let found = self.pieces.registered.get(&handle);
        if found.is_none_or(|(other, ..)| *other != comm) {
            return Err(argument(format!(
                "{handle:#x} is registered with another communicator"
            )));
        }
        self.pieces.registered.remove(&handle);
        self.comm_mut(comm)?.registered -= 1;
        Ok(())
    }
}
