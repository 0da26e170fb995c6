//! The exchange over a wire in memory. What the engines share is used by their tests too.

mod agreement;
mod faults;
mod operations;
mod order;
mod wire;

pub mod end;
pub mod programs;

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use super::Exchange;
use crate::process::Transport;
use crate::{Buffer, BufferPool, Communicator, DType};
use end::{End, Patience};
use wire::Hub;

/// Long enough for every test that is to succeed.
const PATIENCE: Duration = Duration::from_secs(60);

/// One rank of a world in memory.
struct Member {
    rank: usize,
    world: Arc<dyn Communicator>,
    exchange: Arc<Exchange>,
}

/// The exchanges of a world.
fn exchanges(hub: &Hub, size: usize) -> Vec<Arc<Exchange>> {
    let open = |rank| {
        let wire = hub.clone();
        let open = move || Ok((wire.wire(rank), "a wire in memory".to_owned()));
        Arc::new(Exchange::launch("memory", Arc::default(), PATIENCE, open).unwrap())
    };
    (0..size).map(open).collect()
}

/// Runs `f` on every rank, without closing anything.
fn run_open<R: Send>(
    hub: &Hub,
    size: usize,
    patience: Duration,
    f: impl Fn(&Member) -> R + Sync,
) -> Vec<R> {
    let exchanges = exchanges(hub, size);
    thread::scope(|scope| {
        let f = &f;
        let start = |(rank, exchange): (usize, Arc<Exchange>)| {
            let transport: Arc<dyn Transport> = exchange.clone();
            let world = End::world(transport, rank, size, Patience(patience));
            let member = Member {
                rank,
                world,
                exchange,
            };
            scope.spawn(move || f(&member))
        };
        let ranks: Vec<_> = exchanges.into_iter().enumerate().map(start).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Runs `f` on every rank, closes the world and looks whether anything was left behind.
fn run<R: Send>(size: usize, laziness: u64, f: impl Fn(&Member) -> R + Sync) -> Vec<R> {
    let hub = Hub::new(size, laziness);
    let results = run_open(&hub, size, PATIENCE, |member| {
        let result = f(member);
        member.exchange.close(PATIENCE).unwrap();
        result
    });
    assert_eq!(hub.left(), 0);
    results
}

fn zeros(len: usize) -> Buffer {
    Buffer::zeros(DType::F32, len)
}

fn pool(member: &Member) -> &Arc<BufferPool> {
    member.exchange.pool()
}
