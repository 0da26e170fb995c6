//! Runs ranks that are normally processes as threads of one process.

use std::net::TcpListener;
use std::thread;

use burn_megatron_comm::{Address, Launch, Launcher};

/// Calls `join` on `ranks` threads, one per rank. Returns the results in rank order. The ranks use a rendezvous on a
/// free port of this machine.
///
/// With NCCL, a process can run several ranks. See [`World::processes`](burn_megatron_comm::World::processes).
///
/// # Panics
///
/// If no port is free, or if a rank panics.
pub fn join_as_threads<T: Send>(ranks: usize, join: impl Fn(Launch) -> T + Sync) -> Vec<T> {
    let free = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
    let port = free.expect("a free port").port();
    let launch = |rank| Launch {
        launcher: Launcher::Manual,
        rank,
        world_size: ranks,
        local_rank: rank,
        local_world_size: ranks,
        rendezvous: Some(Address::new("127.0.0.1", port).expect("an address")),
        job: Some("threads".into()),
        token: None,
    };
    thread::scope(|scope| {
        let start = |rank| {
            let (join, launch) = (&join, launch(rank));
            scope.spawn(move || join(launch))
        };
        let ranks: Vec<_> = (0..ranks).map(start).collect();
        let joined = ranks.into_iter().map(|rank| rank.join());
        joined
            .map(|result| result.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    })
}
