//! The memory accesses of lanes. Each address is checked and counted. Accesses to shared memory are also checked for
//! races.

use super::shadow::Accessor;
use super::{Block, Fault, LANES, Lanes, Mask, Warp, banks};
use crate::memory::{LOCAL, PARAMETERS, SHARED, WINDOW};
use crate::ptx::Space;

/// Kind of a memory access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    Write,
    /// A read and a write, ordered with all other atomic accesses.
    Atomic,
}

impl Block<'_> {
    /// Replaces the address of each lane in the mask by the host address of these `bytes` (a power of two). The
    /// addresses of all other lanes are replaced by a valid address. The host addresses are valid until the next
    /// instruction, for reading, and for writing if the access writes.
    ///
    /// # Errors
    ///
    /// Returns an error if an address is not allocated or not aligned, or if the access races with another access.
    pub(crate) fn reach(
        &mut self,
        warp: &mut Warp,
        mask: Mask,
        space: Space,
        at: &mut Lanes,
        bytes: usize,
        access: Access,
    ) -> Result<(), Fault> {
        let first = at[mask.0.trailing_zeros() as usize % LANES];
        if mask != Mask::ALL {
            // Inactive lanes use the address of the first active lane, so that all lanes can be treated alike.
            for (lane, address) in at.iter_mut().enumerate() {
                *address = if mask.has(lane) { *address } else { first };
            }
        }
        let mut space = space;
        if space == Space::Generic {
            if at.iter().fold(0, |all, address| all | address ^ first) >= WINDOW {
                return self.reach_apart(warp, mask, at, bytes, access);
            }
            let start;
            (space, start) = resolve(space, first);
            at.iter_mut().for_each(|address| *address -= first - start);
        }
        if access != Access::Read && matches!(space, Space::Parameter | Space::Constant) {
            return Err(Fault::Undefined(format!("a store to {space:?} memory")));
        }
        let (mut low, mut high, mut bits) = (u64::MAX, 0, 0);
        for address in at.iter() {
            low = low.min(*address);
            high = high.max(*address);
            bits |= address;
        }
        if bits & (bytes as u64 - 1) != 0 {
            mask.lanes()
                .try_for_each(|lane| aligned(lane, space, at[lane], bytes))?;
        }
        let (start, apart) = match space {
            Space::Global | Space::Generic | Space::Constant => {
                self.inside(warp, mask, at, (low, high), bytes)?;
                if space != Space::Constant {
                    self.count(mask, at, bytes, access);
                }
                return Ok(());
            }
            Space::Shared => {
                within(mask, space, at, high, bytes, self.shared.bytes.len())?;
                self.count_shared(at, mask, bytes);
                if self.work.shadow.watches() {
                    self.watch(warp, mask, access, at, bytes)?;
                }
                (self.shared.bytes.as_mut_ptr(), 0)
            }
            Space::Local => {
                let size = warp.local.len() / LANES;
                within(mask, space, at, high, bytes, size)?;
                (warp.local.as_mut_ptr(), size)
            }
            Space::Parameter => {
                let parameters = self.launch.parameters;
                within(mask, space, at, high, bytes, parameters.len())?;
                (parameters.as_ptr().cast_mut(), 0)
            }
        };
        for (lane, address) in at.iter_mut().enumerate() {
            *address += start as u64 + (lane * apart) as u64;
        }
        Ok(())
    }

    /// The same as [`reach`](Self::reach), for lanes whose addresses lie in different spaces.
    fn reach_apart(
        &mut self,
        warp: &mut Warp,
        mask: Mask,
        at: &mut Lanes,
        bytes: usize,
        access: Access,
    ) -> Result<(), Fault> {
        let (mut left, named) = (mask.0, *at);
        while left != 0 {
            let first = named[left.trailing_zeros() as usize];
            let near = |lane: &usize| (named[*lane] ^ first) < WINDOW;
            let here = Mask(left).lanes().filter(near);
            let here = Mask(here.fold(0, |all, lane| all | 1 << lane));
            left &= !here.0;
            let mut found = named;
            self.reach(warp, here, Space::Generic, &mut found, bytes, access)?;
            here.lanes().for_each(|lane| at[lane] = found[lane]);
        }
        Ok(())
    }

    fn watch(
        &mut self,
        warp: &Warp,
        mask: Mask,
        access: Access,
        at: &Lanes,
        bytes: usize,
    ) -> Result<(), Fault> {
        let program = self.launch.program;
        mask.lanes().try_for_each(|lane| {
            let by = Accessor::new(warp, lane);
            self.work.shadow.touch(access, by, at[lane], bytes, program)
        })
    }

    fn watch_one(
        &mut self,
        warp: &Warp,
        lane: usize,
        access: Access,
        address: u64,
        bytes: usize,
    ) -> Result<(), Fault> {
        if !self.work.shadow.watches() {
            return Ok(());
        }
        let (by, program) = (Accessor::new(warp, lane), self.launch.program);
        self.work.shadow.touch(access, by, address, bytes, program)
    }

    /// Checks that lanes access allocated global memory.
    fn inside(
        &mut self,
        warp: &Warp,
        mask: Mask,
        at: &Lanes,
        (low, high): (u64, u64),
        bytes: usize,
    ) -> Result<(), Fault> {
        let memory = self.launch.memory;
        let holds = |(start, end): (u64, u64)| {
            low >= start
                && high
                    .checked_add(bytes as u64)
                    .is_some_and(|last| last <= end)
        };
        let range = &mut self.work.ranges[warp.at % 16];
        if holds(*range) {
            return Ok(());
        }
        if let Some((_, start, end)) = memory.find(low)
            && holds((start, end))
        {
            *range = (start, end);
            return Ok(());
        }
        for lane in mask.lanes() {
            self.global(lane, at[lane], bytes)?;
        }
        Ok(())
    }

    fn count(&mut self, mask: Mask, at: &Lanes, bytes: usize, access: Access) {
        let moved = (mask.count() * bytes) as u64;
        let sectors = banks::sectors(at);
        let counts = &mut self.counts;
        if access != Access::Write {
            counts.global_bytes.0 += moved;
            counts.global_sectors.0 += sectors;
        }
        if access != Access::Read {
            counts.global_bytes.1 += moved;
            counts.global_sectors.1 += sectors;
        }
        if self.work.ledger.counts() {
            mask.lanes()
                .for_each(|lane| self.note(at[lane], bytes, access));
        }
    }

    fn note(&mut self, address: u64, bytes: usize, access: Access) {
        let (ledger, memory) = (&mut self.work.ledger, self.launch.memory);
        if access != Access::Write {
            ledger.touch(memory, address, bytes, false);
        }
        if access != Access::Read {
            ledger.touch(memory, address, bytes, true);
        }
    }

    /// Returns whether stores to a space must be [compared](Self::compare) with the old values.
    #[inline]
    pub(crate) fn compares(&self, space: Space) -> bool {
        matches!(space, Space::Global | Space::Generic) && self.work.ledger.compares()
    }

    /// Records that a lane stores a value to global memory. `differs` states whether the value differs from the old
    /// value.
    ///
    /// # Errors
    ///
    /// Returns an error if the value differs, and if nothing orders this store after the previous store.
    pub(crate) fn compare(
        &mut self,
        warp: &Warp,
        address: u64,
        differs: bool,
    ) -> Result<(), Fault> {
        // A generic address may lie in the block's shared or local memory.
        if !self.launch.memory.holds(address, 1) {
            return Ok(());
        }
        let when = (self.position, self.shared.epoch);
        let program = self.launch.program;
        self.work
            .ledger
            .store(program, warp, when, address, differs)
    }

    /// Reads `out.len()` bytes (1 to 16, a power of two) of one lane.
    ///
    /// # Errors
    ///
    /// Returns an error if the address is not allocated or not aligned, or if the access races with another access.
    pub fn read(
        &mut self,
        warp: &Warp,
        lane: usize,
        space: Space,
        address: u64,
        out: &mut [u8],
    ) -> Result<(), Fault> {
        let (space, address) = resolve(space, address);
        aligned(lane, space, address, out.len())?;
        match space {
            Space::Shared => {
                let range = range(lane, space, address, out.len(), self.shared.bytes.len())?;
                self.watch_one(warp, lane, Access::Read, address, out.len())?;
                out.copy_from_slice(&self.shared.bytes[range]);
            }
            Space::Local => {
                let size = warp.local.len() / LANES;
                let range = range(lane, space, address, out.len(), size)?;
                out.copy_from_slice(&warp.local[lane * size..][range]);
            }
            Space::Parameter => {
                let parameters = self.launch.parameters;
                let range = range(lane, space, address, out.len(), parameters.len())?;
                out.copy_from_slice(&parameters[range]);
            }
            _ => {
                let source = self.global(lane, address, out.len())?;
                // SAFETY: the whole range is allocated and lives as long as the launch.
                unsafe { source.copy_to_nonoverlapping(out.as_mut_ptr(), out.len()) };
                if self.work.ledger.counts() {
                    self.note(address, out.len(), Access::Read);
                }
            }
        }
        Ok(())
    }

    /// Writes 1 to 16 bytes, a power of two, of one lane.
    ///
    /// # Errors
    ///
    /// The same as for [`read`](Self::read).
    pub fn write(
        &mut self,
        warp: &mut Warp,
        lane: usize,
        space: Space,
        address: u64,
        bytes: &[u8],
    ) -> Result<(), Fault> {
        let (space, address) = resolve(space, address);
        aligned(lane, space, address, bytes.len())?;
        match space {
            Space::Shared => {
                let range = range(lane, space, address, bytes.len(), self.shared.bytes.len())?;
                self.watch_one(warp, lane, Access::Write, address, bytes.len())?;
                self.shared.bytes[range].copy_from_slice(bytes);
            }
            Space::Local => {
                let size = warp.local.len() / LANES;
                let range = range(lane, space, address, bytes.len(), size)?;
                warp.local[lane * size..][range].copy_from_slice(bytes);
            }
            Space::Parameter | Space::Constant => {
                return Err(Fault::Undefined(format!("a store to {space:?} memory")));
            }
            _ => {
                let target = self.global(lane, address, bytes.len())?;
                // SAFETY: the same as for reading.
                unsafe { target.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
                if self.work.ledger.counts() {
                    self.note(address, bytes.len(), Access::Write);
                }
            }
        }
        Ok(())
    }

    /// Returns the host address of global memory after checking it.
    pub(crate) fn global(&self, lane: usize, address: u64, bytes: usize) -> Result<*mut u8, Fault> {
        if self.launch.memory.holds(address, bytes) {
            Ok(address as *mut u8)
        } else {
            Err(Fault::Address {
                lane,
                space: Space::Global,
                address,
                bytes,
                what: self.launch.memory.nearest(address),
            })
        }
    }

    /// Counts an access of a whole warp to shared memory.
    pub(crate) fn count_shared(&mut self, addresses: &Lanes, mask: Mask, bytes: usize) {
        self.counts.bank_conflicts += banks::conflicts(addresses, mask, bytes);
        self.counts.shared_wavefronts += banks::wavefronts(addresses, mask, bytes);
    }

    /// Counts an access to shared memory like [`count_shared`](Self::count_shared), for bytes in an order that the
    /// hardware chooses.
    pub(crate) fn count_shared_bytes(&mut self, bytes: usize) {
        self.counts.shared_wavefronts += banks::lines(bytes);
    }

    /// Counts an access of a whole warp to global memory that was made by [`read`](Self::read) and
    /// [`write`](Self::write). `addresses` are the addresses of the lanes in the mask, with `bytes` each.
    pub fn count_global(&mut self, addresses: &Lanes, mask: Mask, bytes: usize, store: bool) {
        let mut sectors: Vec<u64> = mask
            .lanes()
            .flat_map(|lane| {
                let last = addresses[lane] + bytes as u64 - 1;
                addresses[lane] >> banks::SECTOR..=last >> banks::SECTOR
            })
            .collect();
        sectors.sort_unstable();
        sectors.dedup();
        let (moved, touched) = ((mask.count() * bytes) as u64, sectors.len() as u64);
        let counts = &mut self.counts;
        let (of_bytes, of_sectors) = (&mut counts.global_bytes, &mut counts.global_sectors);
        if store {
            of_bytes.1 += moved;
            of_sectors.1 += touched;
        } else {
            of_bytes.0 += moved;
            of_sectors.0 += touched;
        }
    }
}

/// Returns the space and the address in this space for a generic address.
pub(crate) fn resolve(space: Space, address: u64) -> (Space, u64) {
    match (space, address & !(WINDOW - 1)) {
        (Space::Generic, SHARED) => (Space::Shared, address - SHARED),
        (Space::Generic, LOCAL) => (Space::Local, address - LOCAL),
        (Space::Generic, PARAMETERS) => (Space::Parameter, address - PARAMETERS),
        (Space::Generic, _) => (Space::Global, address),
        _ => (space, address),
    }
}

fn aligned(lane: usize, space: Space, address: u64, bytes: usize) -> Result<(), Fault> {
    if address.is_multiple_of(bytes as u64) {
        Ok(())
    } else {
        Err(Fault::Misaligned {
            lane,
            space,
            address,
            bytes,
        })
    }
}

/// Checks that lanes access only the first `size` bytes of a space. `high` is the last address.
fn within(
    mask: Mask,
    space: Space,
    at: &Lanes,
    high: u64,
    bytes: usize,
    size: usize,
) -> Result<(), Fault> {
    if high <= size as u64 && high + bytes as u64 <= size as u64 {
        return Ok(());
    }
    let outside = |lane: &usize| range(*lane, space, at[*lane], bytes, size).is_err();
    let lane = mask.lanes().find(outside).unwrap_or_default();
    range(lane, space, at[lane], bytes, size).map(|_| ())
}

fn range(
    lane: usize,
    space: Space,
    address: u64,
    bytes: usize,
    size: usize,
) -> Result<std::ops::Range<usize>, Fault> {
    let start = address as usize;
    match start.checked_add(bytes) {
        Some(end) if end <= size => Ok(start..end),
        _ => Err(Fault::Address {
            lane,
            space,
            address,
            bytes,
            what: format!("there are {size} bytes"),
        }),
    }
}
