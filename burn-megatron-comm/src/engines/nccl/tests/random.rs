//! Random programs that are the same on every rank.

use std::sync::Arc;

use super::harness::TestSetup;
use super::programs::{same, values};
use crate::{Buffer, Communicator, DType, Pending, ReduceOp};

type Comm = Arc<dyn Communicator>;

/// The random number generator SplitMix64 (Steele et al. 2014, doi:10.1145/2660193.2660195).
pub struct Rng(pub u64);

impl Rng {
    pub fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ (x >> 31)) % n as u64) as usize
    }
}

/// Returns communicators of the whole world, of the even and the odd ranks, and of all ranks in reverse order.
fn groups(comm: &Comm) -> Vec<Comm> {
    let ranks = 0..comm.size();
    let (even, odd): (Vec<_>, Vec<_>) = ranks.clone().partition(|rank| rank % 2 == 0);
    let halves: Vec<_> = [even, odd].into_iter().filter(|g| !g.is_empty()).collect();
    let backwards = vec![ranks.rev().collect::<Vec<_>>()];
    vec![
        comm.clone(),
        comm.split("halves", &halves).unwrap(),
        comm.split("backwards", &backwards).unwrap(),
    ]
}

/// Starts one call of a group. Every rank draws the same numbers for the call.
fn call(group: &Comm, rng: &mut Rng, seed: usize) -> Pending {
    let (rank, size) = (group.group().world_rank(), group.size());
    let dtype = [DType::F32, DType::BF16, DType::I64, DType::U8][rng.below(4)];
    let op = [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min][rng.below(3)];
    let len = [0, 1, 3, 50, 2000][rng.below(5)];
    let input = |len| values(dtype, rank, seed, len);
    let (what, root) = (rng.below(6), rng.below(60));
    let started = match what {
        0 => group.start_all_reduce(input(len), op),
        1 => group.start_all_gather(input(len)),
        2 => group.start_reduce_scatter(input(len * size), op),
        3 => group.start_broadcast(input(len), root % size),
        4 => {
            let count = |from: usize, to: usize| (from * 3 + to + root) % 4;
            let own = group.rank();
            let send: Vec<_> = (0..size).map(|to| count(own, to)).collect();
            let receive = (0..size).map(|from| count(from, own)).collect();
            let len = send.iter().sum();
            group.start_all_to_all(input(len), send, receive)
        }
        // Messages of a rank to itself do not reach an engine.
        _ if size == 1 => group.start_all_reduce(input(len), op),
        _ => {
            let distance = 1 + root % (size - 1);
            let (to, from) = (group.rank() + distance, group.rank() + size - distance);
            let (to, from) = (to % size, from % size);
            drop(group.start_send(input(len), to).unwrap());
            group.start_receive(from, dtype, len)
        }
    };
    started.unwrap()
}

fn program(comm: &Comm, seed: u64) -> Vec<Buffer> {
    let mut rng = Rng(seed);
    let groups = groups(comm);
    let (mut waiting, mut results) = (vec![], vec![]);
    for step in 0..40 {
        let group = &groups[rng.below(groups.len())];
        waiting.push(call(group, &mut rng, step));
        // From time to time, waits for some call that need not be the oldest.
        if rng.below(5) == 0 {
            let at = rng.below(waiting.len());
            results.push(waiting.swap_remove(at).wait().unwrap());
        }
    }
    results.extend(waiting.into_iter().map(|pending| pending.wait().unwrap()));
    results
}

#[test]
fn random_programs_are_those_of_threads() {
    for ranks in 1..=4 {
        same(ranks, TestSetup::default(), |comm| {
            (0..25).flat_map(|seed| program(&comm, seed)).collect()
        });
    }
}
