//! Tests of invalid schedules, and of the state after a rank has failed.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;
use crate::comm::{WorldError, raise};

/// A chain that fails in one action.
struct Failing<'a> {
    chain: Chain,
    at: Action,
    fail: &'a (dyn Fn() + Sync),
}

impl Failing<'_> {
    fn check(&self, kind: ActionKind, stage: usize, micro_batch: usize) {
        if self.at == Action::new(kind, stage, micro_batch) {
            (self.fail)();
        }
    }
}

impl Stage for Failing<'_> {
    fn forward(&self, stage: usize, micro_batch: usize, given: Option<Tensor<3>>) -> StageOutput {
        self.check(ActionKind::Forward, stage, micro_batch);
        self.chain.forward(stage, micro_batch, given)
    }

    fn after_backward(&self, stage: usize, micro_batch: usize, leaves: &mut Gradients) {
        for kind in [ActionKind::Backward, ActionKind::InputGradient] {
            self.check(kind, stage, micro_batch);
        }
        self.chain.after_backward(stage, micro_batch, leaves);
    }
}

/// Returns the error of the world, the error of each rank, and whether sinks are still deferring.
fn failed(
    kind: ScheduleKind,
    at: Action,
    fail: &(dyn Fn() + Sync),
) -> (WorldError, Vec<(usize, EngineError)>) {
    let schedule = schedule(kind, 4, 8);
    let errors = Mutex::new(vec![]);
    let result = World::threads(4).unwrap().run(|rank| {
        let comm = rank.communicator();
        let chain = Chain::new(&schedule, comm.rank(), &even(8));
        let sums = chain.sums.clone();
        let engine = Engine::new(&schedule, &comm, &Device::flex(), sums.clone())?;
        let run = engine.run(&Failing { chain, at, fail });
        if let Err(error) = &run {
            errors.lock().unwrap().push((comm.rank(), error.clone()));
        }
        assert!(sums.deferred.lock().unwrap().is_none());
        Ok::<_, RankError>(run.map(drop)?)
    });
    (result.unwrap_err(), errors.into_inner().unwrap())
}

/// Asserts that all ranks ended with an error that names their current action.
fn assert_named(kind: ScheduleKind, at: Action, fail: &(dyn Fn() + Sync), reason: &str) {
    let (error, ranks) = failed(kind, at, fail);
    let first = error.to_string();
    let dead = schedule(kind, 4, 8).rank_of(at.stage);
    let place = format!("pipeline rank {dead}, {}: ", at.describe());
    assert!(first.contains(&place), "{first:?} does not name {place:?}");
    assert!(first.contains(reason), "{first:?} does not say {reason:?}");
    assert!(matches!(error, WorldError::RankFailed { rank, .. } if rank == dead));
    assert!(ranks.iter().any(|(rank, _)| *rank == dead));
    for (rank, error) in ranks.iter().filter(|(rank, _)| *rank != dead) {
        match error {
            EngineError::Action {
                rank: named,
                action,
                source,
            } => {
                assert_eq!(named, rank);
                assert!(action.kind.is_receive() || action.kind.is_send(), "{error}");
                let CommError::PeerFailed { rank, message } = &**source else {
                    panic!("{error}");
                };
                assert_eq!(*rank, dead);
                assert!(message.contains(&place), "{message}");
            }
            // This rank has not started, or has run all its actions.
            EngineError::Begin { .. } | EngineError::Send { .. } => {}
            _ => panic!("{error}"),
        }
    }
}

#[test]
fn a_stage_that_panics_ends_all_ranks() {
    let fail = || panic!("out of luck");
    let forward = Action::new(ActionKind::Forward, 2, 3);
    for kind in ScheduleKind::ALL {
        assert_named(kind, forward, &fail, "panicked: out of luck");
    }
    let backward = Action::new(ActionKind::Backward, 1, 2);
    assert_named(ScheduleKind::OneFOneB, backward, &fail, "out of luck");
    let input = Action::new(ActionKind::InputGradient, 1, 2);
    assert_named(ScheduleKind::ZbH1, input, &fail, "out of luck");
}

#[test]
fn a_stage_that_raises_an_error_ends_all_ranks() {
    let fail = || {
        raise(CommError::Engine {
            engine: "cable".into(),
            message: "cut".into(),
        })
    };
    let forward = Action::new(ActionKind::Forward, 3, 5);
    assert_named(ScheduleKind::OneFOneB, forward, &fail, "cable: cut");
    assert_named(ScheduleKind::DualPipeV, forward, &fail, "cable: cut");
}

/// A sink in which the reduction of stage 1 cannot start.
struct NoSum(Arc<Sums>);

impl GradientSink for NoSum {
    fn expect(&self, index: usize) {
        self.0.expect(index);
    }

    fn accumulate(&self, index: usize, gradient: Tensor<1>) {
        self.0.accumulate(index, gradient);
    }

    fn accumulate_later(&self, index: usize, gradient: WeightGradientFn) {
        self.0.accumulate_later(index, gradient);
    }
}

impl DeferringSink for NoSum {
    fn set_deferring(&self, deferring: bool) {
        self.0.set_deferring(deferring);
    }

    fn take_deferred(&self) -> Vec<Deferred> {
        self.0.take_deferred()
    }

    fn close_stage(&self, stage: usize) {
        assert!(stage == 0, "no sum of stage {stage}");
    }
}

#[test]
fn a_reduction_that_cannot_start_names_its_action() {
    let schedule = schedule(ScheduleKind::OneFOneB, 2, 4);
    let result = World::threads(2).unwrap().run(|rank| {
        let comm = rank.communicator();
        let chain = Chain::new(&schedule, comm.rank(), &even(4));
        let sink = NoSum(chain.sums.clone());
        let engine = Engine::new(&schedule, &comm, &Device::flex(), Arc::new(sink))?;
        Ok::<_, RankError>(engine.run(&chain).map(drop)?)
    });
    let expected =
        "pipeline rank 1, reducing the gradients of stage 1: panicked: no sum of stage 1";
    assert!(result.unwrap_err().to_string().contains(expected));
}

#[test]
fn a_missing_rank_is_named() {
    let schedule = schedule(ScheduleKind::OneFOneB, 2, 2);
    let result = World::threads(2).unwrap().run(|rank| {
        let comm = rank.communicator();
        if comm.rank() == 1 {
            return Ok(());
        }
        let chain = Chain::new(&schedule, 0, &even(2));
        let sums = chain.sums.clone();
        let engine = Engine::new(&schedule, &comm, &Device::flex(), sums.clone())?;
        Ok::<_, RankError>(engine.run(&chain).map(drop)?)
    });
    let message = result.unwrap_err().to_string();
    let expected = "pipeline rank 0, receiving the gradient of stage 0, micro-batch 0: rank 1 has";
    assert!(message.contains(expected), "{message}");
}

/// Returns the error of an engine for `schedule` over two ranks.
fn refused(schedule: &Schedule) -> EngineError {
    let built = AtomicUsize::new(0);
    let errors = World::threads(2).unwrap().run(|rank| {
        let sums = Sums::default();
        let comm = rank.communicator();
        let error = match Engine::new(schedule, &comm, &Device::flex(), Arc::new(sums)) {
            Ok(_) => {
                built.fetch_add(1, Ordering::Relaxed);
                None
            }
            Err(error) => Some(error),
        };
        Ok::<_, CommError>(error)
    });
    assert_eq!(built.into_inner(), 0);
    errors.unwrap().remove(0).unwrap()
}

#[test]
fn a_schedule_that_breaks_a_rule_is_refused() {
    let valid = schedule(ScheduleKind::OneFOneB, 2, 2);
    let mut lists: Vec<_> = (0..2).map(|rank| valid.actions(rank).to_vec()).collect();
    let at = lists[1]
        .iter()
        .position(|action| action.kind == ActionKind::Backward)
        .unwrap();
    let action = lists[1].remove(at);
    lists[1].insert(0, action);
    let broken = Schedule::new("broken", vec![0, 1], 2, lists).unwrap();
    let error = refused(&broken);
    let EngineError::Invalid(invalid) = &error else {
        panic!("{error}");
    };
    assert_eq!((invalid.rank, invalid.position), (1, 0));
    assert!(
        error
            .to_string()
            .contains("backward of stage 1, micro-batch 0")
    );
}

#[test]
fn a_schedule_for_other_ranks_is_refused() {
    let error = refused(&schedule(ScheduleKind::GPipe, 4, 4));
    insta::assert_snapshot!(error, @"the schedule is for 4 ranks, but the pipeline has 2");
}
