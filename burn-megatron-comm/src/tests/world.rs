//! Tests of the start and end of worlds: sizes, threads, pools and spans.

use std::collections::HashMap;
use std::fs;
use std::sync::{Arc, Mutex};
use std::thread;

use insta::assert_snapshot;
use rayon::prelude::*;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

use super::*;

#[test]
fn sizes_are_checked() {
    assert!(matches!(World::threads(0), Err(WorldError::NoRanks)));
    let error = World::threads(1025).unwrap_err();
    assert_snapshot!(
        error,
        @"invalid number of ranks 1025: expected at most 1024 as threads of one process"
    );
    let none = World::threads(1).unwrap().compute_threads(0);
    assert!(matches!(
        none.run(|_| Ok::<_, CommError>(())),
        Err(WorldError::NoComputeThreads)
    ));
    let many = World::threads(1).unwrap().compute_threads(1_000_000_000);
    assert_snapshot!(
        many.run(|_| Ok::<_, CommError>(())).unwrap_err(),
        @"invalid number of compute threads 1000000000: expected at most 1024 per rank"
    );
    assert_eq!(World::threads(1024).unwrap().size(), 1024);
}

#[test]
fn results_come_in_rank_order_and_a_world_runs_again() {
    let world = World::threads(5).unwrap();
    for _ in 0..2 {
        let results = world.run(|rank| {
            assert_eq!((rank.size(), rank.communicator().rank()), (5, rank.rank()));
            rank.communicator().barrier()?;
            Ok::<_, CommError>(rank.rank() * 10)
        });
        assert_eq!(results.unwrap(), [0, 10, 20, 30, 40]);
    }
}

#[test]
fn each_rank_computes_in_its_own_pool() {
    let results = World::threads(3).unwrap().compute_threads(2).run(|rank| {
        assert_eq!(rank.compute_threads(), 2);
        assert_eq!(rayon::current_num_threads(), 2);
        let name = format!("rank-{}", rank.rank());
        assert_eq!(thread::current().name(), Some(name.as_str()));
        let names: Vec<_> = (0..200)
            .into_par_iter()
            .map(|_| thread::current().name().map(str::to_owned))
            .collect();
        assert!(names.iter().all(|n| n.as_deref() == Some(name.as_str())));
        // A parallel loop of one rank runs while the other ranks block their pools in a call.
        if rank.rank() == 0 {
            let total: u64 = (0..10_000u64).into_par_iter().sum();
            assert_eq!(total, 49_995_000);
        }
        rank.communicator().barrier()
    });
    results.unwrap();
}

/// Returns the number of threads of this process with this name, which no other test uses.
fn threads_named(name: &str) -> usize {
    let tasks = fs::read_dir("/proc/self/task").unwrap();
    let names = tasks.filter_map(|task| fs::read_to_string(task.ok()?.path().join("comm")).ok());
    names.filter(|found| found.trim() == name).count()
}

#[test]
#[cfg(target_os = "linux")]
fn no_thread_and_no_communicator_survives() {
    for fail in [false, true] {
        let left = Mutex::new(Vec::new());
        let world = World::threads(40).unwrap().compute_threads(2);
        // A file has no subfolder, so the failure leaves no call log behind.
        let world = world.call_log_dir(std::env::current_exe().unwrap().join("none"));
        let result = world.run(|rank| {
            let comm = rank.communicator();
            let group = comm.split("odd", &[(0..20).collect(), (20..40).collect()])?;
            left.lock()
                .unwrap()
                .extend([Arc::downgrade(&comm), Arc::downgrade(&group)]);
            drop(comm.start_all_gather(vec![0u8].into())?);
            comm.barrier()?;
            if rank.rank() == 39 {
                // A thread sets its name after it has started.
                wait_until("its threads run", || threads_named("rank-39") >= 3);
                if fail {
                    return Err(CommError::Engine {
                        engine: "test".into(),
                        message: "x".into(),
                    });
                }
            }
            Ok(())
        });
        assert_eq!(result.is_err(), fail);
        // The kernel lists a thread for a moment after it has been joined.
        wait_until("no thread survives", || threads_named("rank-39") == 0);
        let left = left.into_inner().unwrap();
        assert_eq!(left.len(), 80);
        assert!(left.iter().all(|comm| comm.upgrade().is_none()));
    }
}

/// A subscriber that counts spans by their name and by the operation in their fields.
#[derive(Clone, Default)]
struct Spans(Arc<Mutex<HashMap<(String, String), usize>>>);

impl Subscriber for Spans {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }
    fn new_span(&self, span: &Attributes<'_>) -> Id {
        let mut fields = Vec::new();
        span.record(
            &mut |field: &tracing::field::Field, value: &dyn std::fmt::Debug| {
                fields.push(format!("{}={value:?}", field.name()));
            },
        );
        let key = (span.metadata().name().to_owned(), fields.join(" "));
        *self.0.lock().unwrap().entry(key).or_default() += 1;
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, _: &Event<'_>) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

#[test]
fn every_call_has_a_span_for_its_start_and_its_wait() {
    // With a single subscriber, a thread of another test without a subscriber could reach a span first. This would
    // disable the span for all threads.
    let _second = tracing::Dispatch::new(Spans::default());
    let calls = || {
        World::threads(2)
            .unwrap()
            .run(|rank| {
                let comm = rank.communicator();
                comm.all_reduce(vec![0f32; 3].into(), ReduceOp::Sum)?;
                comm.send(vec![0u8].into(), 1 - rank.rank())?;
                comm.receive(1 - rank.rank(), DType::U8, 1).map(drop)
            })
            .unwrap();
    };
    // Such a thread must not reach a span first while the second subscriber is added, either.
    calls();
    tracing::callsite::rebuild_interest_cache();
    let spans = Spans::default();
    tracing::subscriber::with_default(spans.clone(), calls);
    let spans = spans.0.lock().unwrap();
    for fields in [
        r#"op="all_reduce" group="world" len=3 dtype="f32""#,
        r#"op="send" group="world" len=1 dtype="u8""#,
        r#"op="receive" group="world" len=1 dtype="u8""#,
    ] {
        for name in ["collective.start", "collective.wait"] {
            assert_eq!(
                spans.get(&(name.to_owned(), fields.to_owned())),
                Some(&2),
                "{spans:?}"
            );
        }
    }
}
