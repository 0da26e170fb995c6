//! In which order a step needs the blocks, learnt in its first run.

use crate::nn::door::Pass;

/// The order of the blocks of a step, from its first forward to its last backward.
///
/// A step uses its blocks in the same order each time, so that the one after the present one can be
/// brought ahead. Ranks that run the same program learn the same order.
#[derive(Debug, Default)]
pub(super) struct Order {
    /// The blocks of a step; a block that is used several times without another stands once.
    sequence: Vec<usize>,
    learnt: bool,
    in_step: bool,
    /// The place of the present block.
    at: Option<usize>,
    /// Fingerprint of what this step did.
    done: u64,
}

impl Order {
    /// A forward begins; the first one begins a step.
    pub fn begin(&mut self) {
        if self.in_step {
            return;
        }
        self.in_step = true;
        self.at = None;
        self.done = 0;
        if !self.learnt {
            self.sequence.clear();
        }
    }

    /// The step is over; returns the fingerprint of its order, which is the same on ranks that ran
    /// the same.
    pub fn end(&mut self) -> u64 {
        self.learnt |= self.in_step && !self.sequence.is_empty();
        self.in_step = false;
        self.at = None;
        std::mem::take(&mut self.done)
    }

    /// Block `block` of `blocks` is needed, and was not the present one: which will be needed next?
    pub fn next(&mut self, block: usize, blocks: usize, pass: Pass) -> Option<usize> {
        let neighbour = match pass {
            // Blocks are numbered in the order in which backward ends with them.
            Pass::Forward => block.checked_sub(1),
            Pass::Backward => Some(block + 1).filter(|next| *next < blocks),
        };
        if !self.in_step {
            return neighbour;
        }
        self.done = self
            .done
            .wrapping_mul(0x0000_0100_0000_01b3)
            .wrapping_add(block as u64 + 1);
        if !self.learnt {
            self.sequence.push(block);
            return neighbour;
        }
        let expected = self.at.map_or(0, |at| at + 1);
        let from_here = self.sequence.iter().skip(expected);
        let found = from_here
            .clone()
            .position(|next| *next == block)
            .map(|ahead| expected + ahead);
        self.at = found.or_else(|| self.sequence.iter().position(|other| *other == block));
        match self.at {
            Some(at) => self.sequence.get(at + 1).copied(),
            None => neighbour,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is brought ahead at each block of a step.
    fn step(order: &mut Order, blocks: &[(usize, Pass)]) -> (Vec<Option<usize>>, u64) {
        order.begin();
        let next = blocks
            .iter()
            .map(|(block, pass)| order.next(*block, 4, *pass));
        (next.collect(), order.end())
    }

    #[test]
    fn the_second_step_brings_what_the_first_one_needed() {
        use Pass::{Backward, Forward};
        // The last block is used at the end too, as a tied embedding is.
        let blocks = [
            (3, Forward),
            (2, Forward),
            (1, Forward),
            (0, Forward),
            (3, Forward),
            (0, Backward),
            (1, Backward),
            (2, Backward),
        ];
        let mut order = Order::default();
        let (first, print) = step(&mut order, &blocks);
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
            let (later, same) = step(&mut order, &blocks);
            let expected: Vec<_> = blocks[1..].iter().map(|(block, _)| Some(*block)).collect();
            assert_eq!(later, [expected, vec![None]].concat());
            assert_eq!(same, print);
        }
        // An evaluation in between learns and forgets nothing.
        assert_eq!(order.next(2, 4, Forward), Some(1));
        let (_, same) = step(&mut order, &blocks);
        assert_eq!(same, print);
        let (_, other) = step(&mut order, &blocks[..5]);
        assert_ne!(other, print);
    }

    #[test]
    fn a_block_out_of_order_is_found_again() {
        use Pass::Forward;
        let mut order = Order::default();
        step(
            &mut order,
            &[(3, Forward), (2, Forward), (1, Forward), (0, Forward)],
        );
        let (next, _) = step(&mut order, &[(3, Forward), (1, Forward), (3, Forward)]);
        assert_eq!(next, [Some(2), Some(0), Some(2)]);
    }
}
