//! Device memory: the allocations and their addresses.
//!
//! Device memory is host memory with host addresses. A kernel may access it only inside the allocations at the time
//! of its launch.

mod pages;

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;

/// The beginning of the generic addresses of shared memory. The host has no memory at these addresses.
pub const SHARED: u64 = 0x7f00 << 48;
/// The beginning of the generic addresses of local memory.
pub const LOCAL: u64 = 0x7f01 << 48;
/// The beginning of the generic addresses of parameters.
pub const PARAMETERS: u64 = 0x7f02 << 48;
/// The number of addresses in each of these ranges.
pub const WINDOW: u64 = 1 << 48;

/// The alignment of all allocations, as in the driver.
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

/// An allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// The first address.
    pub start: u64,
    /// The length in bytes.
    pub bytes: usize,
    /// A unique number. A later allocation at the same address has another number.
    pub number: u64,
}

/// The allocations at one time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// The first address and the end of each allocation, in order.
    ranges: Vec<(u64, u64)>,
}

impl Memory {
    /// Allocates memory and fills it with ones, so that unwritten memory is NaN. A large allocation uses host memory
    /// only where it is written.
    ///
    /// Returns `None` if `limit` bytes would be exceeded, or if the host has no more memory.
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

    /// Frees an allocation. Returns whether an allocation begins at this address.
    pub fn free(&self, start: u64) -> bool {
        let mut state = self.state.lock();
        let Some(Allocation { bytes, .. }) = state.allocations.remove(&start) else {
            return false;
        };
        state.bytes -= bytes as u64;
        state.snapshot = None;
        // SAFETY: the memory was allocated with this size, and was removed from the table.
        unsafe { pages::free(start as *mut u8, bytes) };
        true
    }

    /// Returns the allocation that contains an address.
    pub fn allocation(&self, address: u64) -> Option<Allocation> {
        let state = self.state.lock();
        let (_, allocation) = state.allocations.range(..=address).next_back()?;
        let end = allocation.start + allocation.bytes as u64;
        (address < end).then_some(*allocation)
    }

    /// Returns the number of allocated bytes.
    pub fn bytes(&self) -> u64 {
        self.state.lock().bytes
    }

    /// Returns the current allocations.
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
    /// Returns whether all these bytes lie in one allocation.
    #[inline]
    pub fn holds(&self, address: u64, bytes: usize) -> bool {
        let end = address.checked_add(bytes as u64);
        matches!((self.find(address), end), (Some((_, _, last)), Some(end)) if end <= last)
    }

    /// Returns the number, the first address and the end of the last allocation that begins at or before an address.
    /// The address may lie behind this allocation.
    #[inline]
    pub fn find(&self, address: u64) -> Option<(usize, u64, u64)> {
        let after = self.ranges.partition_point(|(start, _)| *start <= address);
        let index = after.checked_sub(1)?;
        let (start, end) = self.ranges[index];
        Some((index, start, end))
    }

    /// Returns a text about the allocation that is nearest to an address.
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
            // The machine does not allow such a mapping.
            return;
        };
        for offset in [0, 1 << 20, (32 << 20) - 1, 32 << 20, 7 << 30, bytes - 1] {
            let at = (start as usize + offset) as *mut u8;
            // SAFETY: the address is inside the allocation.
            unsafe {
                assert_eq!(at.read(), 0xff);
                at.write(7);
                assert_eq!(at.read(), 7);
            }
        }
        // The same position in the next copy of the file.
        // SAFETY: the same as above.
        unsafe { assert_eq!(((start as usize + (64 << 20)) as *const u8).read(), 0xff) };
        assert!(memory.free(start));
    }
}
