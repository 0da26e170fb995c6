//! Tests of the collectives over an in-memory transport. Tests of other engines also use parts of this module.

mod faults;
mod memory_p2p;
mod mismatch;
mod operations;
mod order;

pub mod communicator;
pub mod programs;

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use super::P2pCollectives;
use crate::process::Transport;
use crate::{Buffer, BufferPool, Communicator, DType};
use communicator::{CallTimeout, TestCommunicator};
use memory_p2p::MemoryNetwork;

/// A timeout that is long enough for every test that must succeed.
const TIMEOUT: Duration = Duration::from_secs(60);

/// One rank of a world with in-memory transports.
struct TestRank {
    rank: usize,
    world: Arc<dyn Communicator>,
    engine: Arc<P2pCollectives>,
}

/// Creates the engines of a world.
fn engines(network: &MemoryNetwork, size: usize) -> Vec<Arc<P2pCollectives>> {
    let open = |rank| {
        let transport = network.clone();
        let open = move || {
            Ok((
                transport.transport(rank),
                "a transport in memory".to_owned(),
            ))
        };
        Arc::new(P2pCollectives::launch("memory", Arc::default(), TIMEOUT, open).unwrap())
    };
    (0..size).map(open).collect()
}

/// Runs `f` on every rank without closing the world.
fn run_open<R: Send>(
    network: &MemoryNetwork,
    size: usize,
    timeout: Duration,
    f: impl Fn(&TestRank) -> R + Sync,
) -> Vec<R> {
    let engines = engines(network, size);
    thread::scope(|scope| {
        let f = &f;
        let start = |(rank, engine): (usize, Arc<P2pCollectives>)| {
            let transport: Arc<dyn Transport> = engine.clone();
            let world = TestCommunicator::world(transport, rank, size, CallTimeout(timeout));
            let this = TestRank {
                rank,
                world,
                engine,
            };
            scope.spawn(move || f(&this))
        };
        let ranks: Vec<_> = engines.into_iter().enumerate().map(start).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Runs `f` on every rank, closes the world, and checks that no message remains.
fn run<R: Send>(size: usize, delay_rate: u64, f: impl Fn(&TestRank) -> R + Sync) -> Vec<R> {
    let network = MemoryNetwork::new(size, delay_rate);
    let results = run_open(&network, size, TIMEOUT, |this| {
        let result = f(this);
        this.engine.close(TIMEOUT).unwrap();
        result
    });
    assert_eq!(network.left(), 0);
    results
}

fn zeros(len: usize) -> Buffer {
    Buffer::zeros(DType::F32, len)
}

fn pool(this: &TestRank) -> &Arc<BufferPool> {
    this.engine.pool()
}
