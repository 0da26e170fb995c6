//! Tests of the call log, and of the positions of the ranks in an error.

use std::env;
use std::fs;
use std::path::PathBuf;
use std::process;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use insta::assert_snapshot;
use serde_json::Value;

use super::*;
use crate::report::flight_recorder::FlightRecorder;
use burn_megatron_rendezvous::RankPosition;

/// The flight recorders of a world's ranks.
type Recorders = [OnceLock<Arc<FlightRecorder>>; 5];

/// Waits until the ranks in `ranks` are blocked in the call.
fn await_blocked(recorders: &Recorders, ranks: &[usize], call: &str) {
    let is_blocked = |rank: &usize| match recorders[*rank].get().map(|recorder| recorder.position())
    {
        Some(RankPosition::Waiting(current)) => current.contains(call),
        _ => false,
    };
    wait_until("they wait", || ranks.iter().all(is_blocked));
}

/// A temporary folder that is removed at the end of the test.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let folder = env::temp_dir().join(format!("burn-megatron-{}-{name}", process::id()));
        let _ = fs::remove_dir_all(&folder);
        Self(folder)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn a_failure_writes_the_calls_of_all_ranks_and_their_positions() {
    let folder = Folder::new("log");
    let world = World::threads(5).unwrap().call_log_dir(&folder.0);
    let recorders = Recorders::default();
    let error = world.run(|rank| {
        let (own, comm) = (rank.rank(), rank.communicator());
        recorders[own].get_or_init(|| rank.recorder().clone());
        let tensor = comm.split("tensor", &[vec![0, 1], vec![2, 3], vec![4]])?;
        let data = comm.split("data", &[vec![0, 1, 2], vec![3, 4]])?;
        match own {
            0 | 1 | 4 => data.barrier()?,
            2 => {
                await_blocked(&recorders, &[0, 1, 4], "barrier");
                await_blocked(&recorders, &[3], "receive");
                let _unfetched = tensor.start_all_gather(vec![0f32; 4].into())?;
                raise(CommError::Engine {
                    engine: "test".into(),
                    message: "cable".into(),
                });
            }
            3 => tensor.receive(0, DType::BF16, 6).map(drop)?,
            _ => unreachable!(),
        }
        Ok::<_, CommError>(())
    });
    let WorldError::RankFailed {
        rank,
        message,
        positions,
        call_log,
        ..
    } = error.unwrap_err()
    else {
        panic!("a rank has failed")
    };
    assert_eq!((rank, message.as_str()), (2, "test: cable"));
    assert_snapshot!(
        positions,
        @"ranks 0, 1 are at call 0 barrier over data [0, 1, 2]; \
          rank 2 failed having started call 0 all_gather of 4 f32 over tensor [2, 3]; \
          rank 3 is at message 0 receive of 6 bf16 from rank 2 over tensor [2, 3]; \
          rank 4 is at call 0 barrier over data [3, 4]"
    );
    let text = fs::read_to_string(call_log.unwrap()).unwrap();
    let lines: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(lines[0]["verdict"], positions.as_str());
    assert_eq!(
        (&lines[0]["failed_rank"], &lines[0]["world"]),
        (&Value::from(2), &Value::from(5))
    );
    let calls = |rank: usize| lines[1..].iter().filter(move |line| line["rank"] == rank);
    assert_eq!(
        [0, 1, 2, 3, 4].map(|rank| calls(rank).count()),
        [3, 3, 3, 3, 3]
    );
    let received = calls(3).next_back().unwrap();
    assert_eq!(received["operation"], "receive");
    assert_eq!(received["group"], "tensor");
    assert_eq!(received["ranks"], "2, 3");
    assert_eq!(received["call"], "receive of 6 bf16 from rank 2");
    assert_eq!(
        (&received["len"], &received["dtype"]),
        (&Value::from(6), &Value::from("bf16"))
    );
    assert!(received["started"].as_f64().unwrap() > 0.0);
    assert!(received["completed"].is_null());
    assert!(calls(3).next().unwrap()["completed"].is_f64());
}

#[test]
fn the_positions_report_returned_ranks() {
    let folder = Folder::new("returned");
    let world = World::threads(2).unwrap().call_log_dir(&folder.0);
    let error = world.run(|rank| match rank.rank() {
        0 => rank.communicator().receive(1, DType::U8, 1).map(drop),
        _ => Ok(()),
    });
    let WorldError::RankFailed { positions, .. } = error.unwrap_err() else {
        panic!()
    };
    assert_snapshot!(
        positions,
        @"rank 0 failed at message 0 receive of 1 u8 from rank 1 over world [0, 1]; rank 1 has returned"
    );
}

#[test]
fn the_positions_report_the_rank_behind() {
    let folder = Folder::new("behind");
    let world = World::threads(4).unwrap().call_log_dir(&folder.0);
    let (recorders, decided) = (Recorders::default(), Arc::new(AtomicBool::new(false)));
    let world = world
        .deadline(Duration::from_millis(200))
        .first_deadline(TIMEOUT);
    let error = world.run(|rank| {
        let (own, comm) = (rank.rank(), rank.communicator());
        recorders[own].get_or_init(|| rank.recorder().clone());
        let late = |error| Late(error, decided.clone());
        comm.all_gather(vec![0f32; 4096].into()).map_err(late)?;
        if own == 2 {
            wait_until("the failure is decided", || decided.load(Ordering::SeqCst));
            return Ok(());
        }
        let result = comm.barrier();
        // The rank with the first expired deadline fails only after the other ranks wait too.
        await_blocked(&recorders, &[0, 1, 3], "barrier");
        result.map_err(late)
    });
    let WorldError::RankFailed {
        rank, positions, ..
    } = error.unwrap_err()
    else {
        panic!()
    };
    let waiting: Vec<_> = [0, 1, 3]
        .into_iter()
        .filter(|other| *other != rank)
        .collect();
    let mut clauses: Vec<_> = positions.split("; ").collect();
    clauses.sort_unstable();
    let over = "over world [0, 1, 2, 3]";
    let mut wanted = [
        format!("rank 2 is past call 0 all_gather of 4096 f32 {over}"),
        format!("rank {rank} failed at call 1 barrier {over}"),
        format!(
            "ranks {}, {} are at call 1 barrier {over}",
            waiting[0], waiting[1]
        ),
    ];
    wanted.sort_unstable();
    assert_eq!(clauses, wanted);
}

/// An error that records when it is dropped. It is dropped if it is not the first error in its world. At that time, the
/// failure of the world has been decided.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Late(CommError, Arc<AtomicBool>);

impl Drop for Late {
    fn drop(&mut self) {
        self.1.store(true, Ordering::SeqCst);
    }
}

#[test]
fn each_world_has_a_file_of_its_own() {
    let folder = Folder::new("own");
    let world = World::threads(1)
        .unwrap()
        .call_log_dir(folder.0.join("made/on/demand"));
    let fail = || world.run(|_| Err::<(), _>("no")).unwrap_err();
    let (first, second) = (fail(), fail());
    let path = |error: &WorldError| match error {
        WorldError::RankFailed {
            call_log: Ok(path), ..
        } => path.clone(),
        other => panic!("{other}"),
    };
    assert_ne!(path(&first), path(&second));
    assert!(path(&first).is_file() && path(&second).is_file());
    let wanted = format!("call log: {}", path(&first).display());
    assert!(first.to_string().ends_with(&wanted), "{first}");
}

#[test]
fn a_log_that_cannot_be_written_does_not_hide_the_failure() {
    let folder = Folder::new("file");
    fs::write(&folder.0, "no folder").unwrap();
    let world = World::threads(2)
        .unwrap()
        .call_log_dir(folder.0.join("below"));
    let error = world.run(|rank| match rank.rank() {
        0 => Err("the real reason"),
        _ => Ok(()),
    });
    fs::remove_file(&folder.0).unwrap();
    let text = error.unwrap_err().to_string();
    assert!(
        text.starts_with("rank 0 failed: the real reason\n"),
        "{text}"
    );
    assert!(
        text.contains("the call log could not be written: "),
        "{text}"
    );
}

#[test]
fn the_last_calls_are_kept() {
    let results = World::threads(1).unwrap().run(|rank| {
        for _ in 0..CALLS_KEPT + 10 {
            rank.communicator().all_gather(vec![1u8].into())?;
        }
        Ok::<_, CommError>(rank.recent_calls())
    });
    let calls = results.unwrap().remove(0);
    assert_eq!(calls.len(), CALLS_KEPT);
    assert_eq!(
        (calls[0].sequence, calls[CALLS_KEPT - 1].sequence),
        (10, CALLS_KEPT as u64 + 9)
    );
    assert!(
        calls
            .iter()
            .all(|call| call.completed.is_some_and(|time| time >= call.started))
    );
}
