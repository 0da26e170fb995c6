//! The order in which a step uses its FSDP units, recorded in the first step.

use crate::nn::hook::Pass;

/// The order in which a step uses its FSDP units, from its first forward to its last backward.
///
/// Every step uses its units in the same order, so the unit after the current unit can be prefetched. Ranks
/// that run the same program record the same order.
#[derive(Debug, Default)]
pub(super) struct PrefetchOrder {
    /// The units of a step. Consecutive uses of one unit are one entry.
    sequence: Vec<usize>,
    recorded: bool,
    in_step: bool,
    /// The current unit, as an index into `sequence`.
    position: Option<usize>,
    /// A hash of the units that this step has used so far.
    fingerprint: u64,
}

impl PrefetchOrder {
    /// Begins a forward. The first forward of a step begins the step.
    pub fn begin_forward(&mut self) {
        if self.in_step {
            return;
        }
        self.in_step = true;
        self.position = None;
        self.fingerprint = 0;
        if !self.recorded {
            self.sequence.clear();
        }
    }

    /// Ends the step and returns a fingerprint of the order in which the step used its units. The fingerprint is equal
    /// on ranks that used the same units in the same order.
    pub fn end_step(&mut self) -> u64 {
        self.recorded |= self.in_step && !self.sequence.is_empty();
        self.in_step = false;
        self.position = None;
        std::mem::take(&mut self.fingerprint)
    }

    /// Makes `unit` the current unit and returns the unit to prefetch. `units` is the number of units.
    pub fn next(&mut self, unit: usize, units: usize, pass: Pass) -> Option<usize> {
        let adjacent = match pass {
            // Units are numbered in the order in which backward finishes them.
            Pass::Forward => unit.checked_sub(1),
            Pass::Backward => Some(unit + 1).filter(|next| *next < units),
        };
        if !self.in_step {
            return adjacent;
        }
        extend_fingerprint(&mut self.fingerprint, unit);
        if !self.recorded {
            self.sequence.push(unit);
            return adjacent;
        }
        let expected = self.position.map_or(0, |current| current + 1);
        let from_here = self.sequence.iter().skip(expected);
        let found = from_here
            .clone()
            .position(|next| *next == unit)
            .map(|ahead| expected + ahead);
        self.position = found.or_else(|| self.sequence.iter().position(|other| *other == unit));
        match self.position {
            Some(current) => self.sequence.get(current + 1).copied(),
            None => adjacent,
        }
    }
}

/// Adds a number to the hash of a sequence.
pub(super) fn extend_fingerprint(fingerprint: &mut u64, number: usize) {
    let hash = fingerprint.wrapping_mul(0x0000_0100_0000_01b3);
    *fingerprint = hash.wrapping_add(number as u64 + 1);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the unit that is prefetched at each unit of a step.
    fn step(order: &mut PrefetchOrder, units: &[(usize, Pass)]) -> (Vec<Option<usize>>, u64) {
        order.begin_forward();
        let next = units.iter().map(|(unit, pass)| order.next(*unit, 4, *pass));
        (next.collect(), order.end_step())
    }

    #[test]
    fn the_second_step_prefetches_what_the_first_one_used() {
        use Pass::{Backward, Forward};
        // The last unit is also used at the end, like a tied embedding.
        let units = [
            (3, Forward),
            (2, Forward),
            (1, Forward),
            (0, Forward),
            (3, Forward),
            (0, Backward),
            (1, Backward),
            (2, Backward),
        ];
        let mut order = PrefetchOrder::default();
        let (first, fingerprint) = step(&mut order, &units);
        assert_eq!(
            first,
            [
                Some(2),
                Some(1),
                Some(0),
                None,
                Some(2),
                Some(1),
                Some(2),
                Some(3)
            ]
        );
        for _ in 0..2 {
            let (later, same) = step(&mut order, &units);
            let expected: Vec<_> = units[1..].iter().map(|(unit, _)| Some(*unit)).collect();
            assert_eq!(later, [expected, vec![None]].concat());
            assert_eq!(same, fingerprint);
        }
        // An evaluation in between does not change the recorded order.
        assert_eq!(order.next(2, 4, Forward), Some(1));
        let (_, same) = step(&mut order, &units);
        assert_eq!(same, fingerprint);
        let (_, other) = step(&mut order, &units[..5]);
        assert_ne!(other, fingerprint);
    }

    #[test]
    fn a_block_out_of_order_is_found_again() {
        use Pass::Forward;
        let mut order = PrefetchOrder::default();
        step(
            &mut order,
            &[(3, Forward), (2, Forward), (1, Forward), (0, Forward)],
        );
        let (next, _) = step(&mut order, &[(3, Forward), (1, Forward), (3, Forward)]);
        assert_eq!(next, [Some(2), Some(0), Some(2)]);
    }
}
