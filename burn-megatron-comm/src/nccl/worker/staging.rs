//! Which calls go through registered memory, and through which piece of it.

use std::collections::HashSet;

use super::super::item::{Item, Memory};
use super::super::lane::{Key, Lane};
use super::super::library::Addresses;
use super::super::registered::{Registration, Staging};
use super::Worker;

/// Address to, address from, bytes.
type CopyBack = (u64, u64, usize);

impl Worker {
    /// Whether the registered memory of these calls is there, where they use any; asks for what is missing.
    pub(super) fn staging_ready(&mut self, items: &[Item]) -> bool {
        let Registration::On(kind) = self.shared.registration() else {
            return true;
        };
        let shared = &self.shared;
        let mut ready = true;
        let mut taken = Taken::default();
        for item in items {
            let (Some(bytes), Some(lane)) = (bytes_for(item), self.lanes.get_mut(&item.key)) else {
                continue;
            };
            let Some(comm) = lane.comm() else {
                continue;
            };
            let begun = match taken.next(item.key, bytes, &lane.staging) {
                Some(at) => Ok(at),
                // The ranks of a group register one piece at a time, in one order.
                None if !ready => return false,
                None => Staging::begin(bytes, kind, comm, &shared.library).map(|staging| {
                    let at = lane.staging.len();
                    lane.staging.push(staging);
                    taken.0.insert((item.key, at));
                    at
                }),
            };
            let told = begun.and_then(|at| lane.staging[at].ready(comm, &shared.library));
            match told {
                Ok(there) => ready &= there,
                Err(reason) => {
                    shared.refuse_registration(reason);
                    return true;
                }
            }
        }
        ready
    }

    /// Where the call works: in its own memory, or in registered memory with a copy before and after.
    pub(super) fn through_staging(
        &self,
        item: &Item,
        own: Addresses,
        lane: &Lane,
        taken: &mut Taken,
    ) -> Result<(Addresses, Option<CopyBack>), String> {
        let staging = match self.shared.registration() {
            Registration::On(_) => bytes_for(item)
                .and_then(|bytes| taken.next(item.key, bytes, &lane.staging))
                .map(|at| &lane.staging[at]),
            _ => None,
        };
        let Some(staging) = staging else {
            return Ok((own, None));
        };
        let used = staging.addresses(&item.plan, item.group.index());
        let [input, output] = item.plan.bytes();
        let driver = &self.shared.driver;
        // SAFETY: both are so long, and the stream does one thing after the other.
        unsafe { driver.copy(used[0], own[0], input, lane.stream) }?;
        Ok((used, Some((own[1], used[1], output))))
    }
}

/// The pieces of registered memory that calls of one launch have taken.
#[derive(Default)]
pub(super) struct Taken(HashSet<(Key, usize)>);

impl Taken {
    /// The first free piece of so many bytes.
    fn next(&mut self, key: Key, bytes: usize, staging: &[Staging]) -> Option<usize> {
        let mut fitting = (0..staging.len()).filter(|at| staging[*at].bytes() == bytes);
        let at = fitting.find(|at| !self.0.contains(&(key, *at)))?;
        self.0.insert((key, at));
        Some(at)
    }
}

/// The registered memory that a call uses: that of tensors alone.
fn bytes_for(item: &Item) -> Option<usize> {
    match item.memory {
        Memory::Tensor(_) => Staging::bytes_for(&item.plan),
        Memory::Host { .. } => None,
    }
}
