//! The state of a barrier in shared memory.
//!
//! The specification defines only the size of the object, 64 bits. The emulator uses these fields, lowest bit first:
//! pending bytes (21 bits, signed), pending arrivals (20), arrivals per phase (20), the parity of the phase, and two
//! bits that mark an initialized object.

use crate::machine::Fault;

/// The exclusive limit of arrivals and of bytes.
const LIMIT: u32 = 1 << 20;
/// The value of the two highest bits of an initialized object.
const VALID: u64 = 0b01;

/// A barrier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Barrier {
    /// Pending bytes. The number is negative if bytes arrived before they were expected.
    pub bytes: i32,
    /// Pending arrivals.
    pub pending: u32,
    /// Arrivals per phase.
    pub expected: u32,
    /// The parity of the current phase.
    pub parity: u64,
}

impl Barrier {
    pub fn new(count: u64) -> Result<Self, Fault> {
        match u32::try_from(count) {
            Ok(count @ 1..LIMIT) => Ok(Self {
                bytes: 0,
                pending: count,
                expected: count,
                parity: 0,
            }),
            _ => Err(undefined(format!("an mbarrier of {count} arrivals"))),
        }
    }

    pub fn of(bits: u64) -> Result<Self, Fault> {
        match bits >> 62 {
            VALID => Ok(Self {
                bytes: (bits as i32) << 11 >> 11,
                pending: (bits >> 21) as u32 & (LIMIT - 1),
                expected: (bits >> 41) as u32 & (LIMIT - 1),
                parity: bits >> 61 & 1,
            }),
            _ => Err(undefined(format!(
                "{bits:#x} is not an mbarrier: was it initialised?"
            ))),
        }
    }

    pub fn bits(self) -> u64 {
        let bytes = u64::from(self.bytes as u32 & (2 * LIMIT - 1));
        let counts = u64::from(self.pending) << 21 | u64::from(self.expected) << 41;
        bytes | counts | self.parity << 61 | VALID << 62
    }

    pub fn expect(&mut self, bytes: i64) -> Result<(), Fault> {
        let sum = i64::from(self.bytes) + bytes;
        if sum.unsigned_abs() < u64::from(LIMIT) {
            self.bytes = sum as i32;
            Ok(())
        } else {
            Err(undefined(format!("an mbarrier waits for {sum} bytes")))
        }
    }

    pub fn arrive(&mut self, count: u32) -> Result<(), Fault> {
        self.pending = self.pending.checked_sub(count).ok_or_else(|| {
            let (pending, all) = (self.pending, self.expected);
            undefined(format!(
                "{count} arrive where {pending} of {all} are still to come"
            ))
        })?;
        Ok(())
    }

    /// Expects one additional arrival.
    pub fn announce(&mut self) -> Result<(), Fault> {
        self.pending += 1;
        if self.pending < LIMIT {
            Ok(())
        } else {
            Err(undefined("too many arrivals at an mbarrier".into()))
        }
    }

    /// Begins the next phase if no arrivals and no bytes are pending.
    pub fn turn(&mut self) {
        if (self.pending, self.bytes) == (0, 0) {
            self.pending = self.expected;
            self.parity ^= 1;
        }
    }
}

pub(super) fn undefined(what: String) -> Fault {
    Fault::Undefined(what)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_barrier_is_its_bits() {
        for (bytes, pending, expected, parity) in [
            (0, 1, 1, 0),
            (-1, 5, 9, 1),
            (1 - (1 << 20), 0, (1 << 20) - 1, 1),
            ((1 << 20) - 1, 7, 7, 0),
        ] {
            let barrier = Barrier {
                bytes,
                pending,
                expected,
                parity,
            };
            assert_eq!(Barrier::of(barrier.bits()), Ok(barrier));
        }
        assert!(Barrier::of(u64::MAX).is_err() && Barrier::of(0).is_err());
        assert!(Barrier::new(0).is_err() && Barrier::new(1 << 20).is_err());
    }

    #[test]
    fn a_phase_ends_with_its_last_arrival_and_its_last_byte() -> Result<(), Fault> {
        let mut barrier = Barrier::new(2)?;
        barrier.arrive(1)?;
        barrier.turn();
        assert_eq!((barrier.parity, barrier.pending), (0, 1));
        barrier.expect(64)?;
        barrier.arrive(1)?;
        barrier.turn();
        assert_eq!(barrier.parity, 0);
        assert!(barrier.clone().arrive(1).is_err());
        barrier.expect(-64)?;
        barrier.turn();
        assert_eq!((barrier.parity, barrier.pending), (1, 2));
        assert!(barrier.expect(1 << 20).is_err());
        Ok(())
    }
}
