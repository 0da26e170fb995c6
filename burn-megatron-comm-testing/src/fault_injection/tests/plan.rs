//! Tests of the calls and tensors at which the faults of a plan trigger.

use super::*;

/// Returns the numbers of the calls at which a rank with these faults fails. The rank runs `steps` steps of 5 calls.
fn triggered(faults: &[&str], steps: Option<u64>, together: bool) -> (Vec<String>, Vec<Fault>) {
    let faults: Vec<Fault> = faults.iter().map(|fault| fault.parse().unwrap()).collect();
    let plan = Arc::new(FaultPlan::new(faults));
    let solo: Arc<dyn Communicator> = Arc::new(SingleRank::new("world"));
    let comm = inject(solo, Arc::clone(&plan));
    let part = comm.split("part", &[vec![0]]).unwrap();
    let call = || (Call::AllGather, Buffer::from(vec![1f32]));
    let mut errors = Vec::new();
    for step in 0..steps.unwrap_or(1) {
        if steps.is_some() {
            comm.begin_step(step);
        }
        if together {
            errors.extend(
                part.start_all(vec![call(), call(), call(), call(), call()])
                    .err(),
            )
        } else {
            let each = [&comm, &part, &comm, &part, &comm];
            let started = each.map(|comm| comm.start(call().0, call().1).err());
            errors.extend(started.into_iter().flatten());
        }
    }
    let texts = errors.iter().map(ToString::to_string);
    (texts.collect(), plan.not_triggered(0))
}

#[test]
fn calls_are_counted_over_all_groups() {
    for together in [false, true] {
        let (errors, left) = triggered(
            &["error@rank=0,call=3", "error@rank=1,call=0"],
            None,
            together,
        );
        assert_eq!(errors.len(), 1, "{errors:?}");
        assert!(
            errors[0].contains("rank 0, call 3: all_gather of 1 f32"),
            "{errors:?}"
        );
        assert!(left.is_empty());
        let faults = [
            "error@rank=0,step=1,call=2",
            "error@rank=0,call=12",
            "error@rank=0,step=1,call=7",
        ];
        let (errors, left) = triggered(&faults, Some(3), together);
        assert_eq!(errors.len(), 2, "{errors:?}");
        assert!(
            errors[0].contains("step 1, call 2 (7 since the start)"),
            "{errors:?}"
        );
        assert!(
            errors[1].contains("step 2, call 2 (12 since the start)"),
            "{errors:?}"
        );
        assert_eq!(left, [faults[2].parse().unwrap()]);
    }
}

#[test]
fn a_plan_knows_its_ranks() {
    let plan = FaultPlan::new(vec![
        "never-starts@rank=2".parse().unwrap(),
        "error@rank=1,call=0".parse().unwrap(),
    ]);
    assert_eq!(
        [0, 1, 2].map(|rank| plan.never_starts(rank)),
        [false, false, true]
    );
    assert!(plan.not_triggered(2).is_empty());
    assert!(plan.check(3).is_ok());
    insta::assert_snapshot!(
        plan.check(2).unwrap_err(),
        @"invalid fault never-starts@rank=2: the world has 2 ranks; expected rank 0 to 1"
    );
    // `never-starts` does not affect a call.
    let solo: Arc<dyn Communicator> = Arc::new(SingleRank::new("world"));
    let plan = FaultPlan::new(vec!["never-starts@rank=0".parse().unwrap()]);
    assert_eq!(inject(solo, Arc::new(plan)).barrier(), Ok(()));
}

#[test]
fn flips_of_tensors_are_counted_apart_from_calls() {
    let faults = [
        "bit-flip:activation:1:2@rank=0,step=2,call=1",
        "bit-flip:gradient@rank=0,call=2",
        "bit-flip:weight@rank=0,step=2,call=3",
        "bit-flip:optimizer@rank=1,step=2,call=3",
    ];
    let plan = FaultPlan::new(faults.map(|fault| fault.parse().unwrap()).into());
    let next = |target| plan.next_tensor(0, target).is_some();
    plan.begin_step(1);
    assert!(!plan.has(0, plan.count(3)));
    assert_eq!([(); 2].map(|()| next(FlipTarget::Activation)), [false; 2]);
    assert_eq!([(); 2].map(|()| next(FlipTarget::Gradient)), [false; 2]);
    assert_eq!(plan.of_state(0, FlipTarget::Weight, 9), []);
    plan.begin_step(2);
    assert_eq!(
        [(); 3].map(|()| next(FlipTarget::Activation)),
        [false, true, false]
    );
    assert!(next(FlipTarget::Gradient), "the third since the start");
    assert_eq!(
        plan.of_state(0, FlipTarget::Weight, 3),
        [],
        "has no tensor 3"
    );
    let flip = "bit-flip:weight".parse().unwrap();
    assert_eq!(plan.of_state(0, FlipTarget::Weight, 4), [(3, flip)]);
    assert_eq!(plan.of_state(0, FlipTarget::Weight, 4), [], "once");
    assert_eq!(plan.not_triggered(0), []);
    assert_eq!(plan.not_triggered(1).len(), 1);
    assert_eq!(plan.counted(FlipTarget::Activation), 5);
    assert_eq!(plan.counted(FlipTarget::Collective), 3);
}
