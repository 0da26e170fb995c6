//! Memory of the device: what is allocated, and where.
//!
//! It is the host's memory under the host's addresses. A kernel may touch it only inside of what is
//! allocated at its launch.

mod pages;

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;

/// Generic addresses of shared memory begin here, at a place where no host has memory.
pub const SHARED: u64 = 0x7f00 << 48;
/// Generic addresses of local memory.
pub const LOCAL: u64 = 0x7f01 << 48;
/// Generic addresses of parameters.
pub const PARAMETERS: u64 = 0x7f02 << 48;
/// The number of addresses of each of them.
pub const WINDOW: u64 = 1 << 48;

/// Every allocation begins at a multiple of this, as the driver's do.
pub const ALIGNMENT: usize = 512;

/// The memory of a device.
#[derive(Debug, Default)]
pub struct Memory {
    state: Mutex<AllocatorState>,
}

#[derive(Debug, Default)]
struct AllocatorState {
    allocations: BTreeMap<u64, Allocation>,
    /// The number of allocations so far.
    number: u64,
    bytes: u64,
    snapshot: Option<Arc<Snapshot>>,
}

/// One allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// Its first address.
    pub start: u64,
    /// Its length.
    pub bytes: usize,
    /// Which no other has, not even a later one at the same place.
    pub number: u64,
}

/// The allocations at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// First address and end of each allocation, in order.
    ranges: Vec<(u64, u64)>,
}

impl Memory {
    /// Allocates, and fills with ones: what is read before it is written is no number. Large
    /// allocations take memory of the host only where they are written.
    ///
    /// `None` if `limit` bytes would be exceeded, or the host has no more.
    pub fn allocate(&self, bytes: usize, limit: u64) -> Option<u64> {
        let bytes = bytes.max(1);
        let mut state = self.state.lock();
        if state.bytes.checked_add(bytes as u64)? > limit {
            return None;
        }
        let start = pages::allocate(bytes)? as u64;
        state.number += 1;
        let number = state.number;
        let allocation = Allocation {
            start,
            bytes,
            number,
        };
        state.allocations.insert(start, allocation);
        state.bytes += bytes as u64;
        state.snapshot = None;
        Some(start)
    }

    /// Frees. Whether there was an allocation that begins there.
    pub fn free(&self, start: u64) -> bool {
        let mut state = self.state.lock();
        let Some(Allocation { bytes, .. }) = state.allocations.remove(&start) else {
            return false;
        };
        state.bytes -= bytes as u64;
        state.snapshot = None;
        // SAFETY: allocated with this size, and taken out of the table.
        unsafe { pages::free(start as *mut u8, bytes) };
        true
    }

    /// The allocation that an address lies in.
    pub fn allocation(&self, address: u64) -> Option<Allocation> {
        let state = self.state.lock();
        let (_, allocation) = state.allocations.range(..=address).next_back()?;
        let end = allocation.start + allocation.bytes as u64;
        (address < end).then_some(*allocation)
    }

    /// Bytes that are allocated.
    pub fn bytes(&self) -> u64 {
        self.state.lock().bytes
    }

    /// Returns the present allocations.
    pub fn snapshot(&self) -> Arc<Snapshot> {
        let mut state = self.state.lock();
        let AllocatorState {
            allocations,
            snapshot,
            ..
        } = &mut *state;
        let make = || {
            let ranges = allocations
                .values()
                .map(|allocation| (allocation.start, allocation.start + allocation.bytes as u64));
            Arc::new(Snapshot {
                ranges: ranges.collect(),
            })
        };
        snapshot.get_or_insert_with(make).clone()
    }
}

impl Snapshot {
    /// Whether all these bytes lie in one allocation.
    #[inline]
    pub fn holds(&self, address: u64, bytes: usize) -> bool {
        let end = address.checked_add(bytes as u64);
        matches!((self.find(address), end), (Some((_, _, last)), Some(end)) if end <= last)
    }

    /// The last allocation that begins at an address or before: its number, first address and end,
    /// which the address may lie behind.
    #[inline]
    pub fn find(&self, address: u64) -> Option<(usize, u64, u64)> {
        let after = self.ranges.partition_point(|(start, _)| *start <= address);
        let index = after.checked_sub(1)?;
        let (start, end) = self.ranges[index];
        Some((index, start, end))
    }

    /// Returns the allocation that is nearest to an address, in words.
    pub fn nearest(&self, address: u64) -> String {
        match self.find(address) {
            Some((_, start, end)) => format!(
                "{} bytes behind the end of {} bytes at {start:#x}",
                address.wrapping_sub(end),
                end - start
            ),
            None => "below all that is allocated".into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allocates_and_frees() {
        let memory = Memory::default();
        let first = memory.allocate(100, 1000).expect("there is room");
        assert!(first.is_multiple_of(ALIGNMENT as u64));
        assert_eq!(memory.allocate(901, 1000), None);
        let second = memory.allocate(900, 1000).expect("there is room");
        assert_eq!(memory.bytes(), 1000);
        let snapshot = memory.snapshot();
        assert!(snapshot.holds(first, 100) && snapshot.holds(second + 899, 1));
        assert!(!snapshot.holds(first, 101) && !snapshot.holds(first + 100, 1));
        assert!(!snapshot.holds(0, 1) && !snapshot.holds(u64::MAX, 2));
        assert!(memory.free(first) && !memory.free(first) && !memory.free(second + 1));
        assert!(!memory.snapshot().holds(first, 1));
        assert_eq!(memory.bytes(), 900);
        let found = memory.allocation(second + 899).expect("it is allocated");
        assert_eq!((found.start, found.bytes, found.number), (second, 900, 2));
        assert_eq!(memory.allocation(second + 900), None);
        assert!(memory.free(second));
    }

    #[test]
    fn large_allocations_are_full_of_ones_and_cost_nothing() {
        let memory = Memory::default();
        let bytes = (40 << 30) + 12345;
        let Some(start) = memory.allocate(bytes, u64::MAX) else {
            // The machine allows no such mapping.
            return;
        };
        for offset in [0, 1 << 20, (32 << 20) - 1, 32 << 20, 7 << 30, bytes - 1] {
            let at = (start as usize + offset) as *mut u8;
            // SAFETY: inside of the allocation.
            unsafe {
                assert_eq!(at.read(), 0xff);
                at.write(7);
                assert_eq!(at.read(), 7);
            }
        }
        // The same place of the next copy of the file.
        // SAFETY: as above.
        unsafe { assert_eq!(((start as usize + (64 << 20)) as *const u8).read(), 0xff) };
        assert!(memory.free(start));
    }
}
