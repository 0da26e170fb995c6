//! Checks that the results of a run are equal to the results of Burn without stages.

use super::*;

/// The loss, and the gradients of the weights and of the inputs.
struct Whole {
    loss: f64,
    weights: Vec<Vec<f64>>,
    inputs: Vec<Vec<f64>>,
}

fn whole(stages: usize, inputs: &[[usize; 2]]) -> Whole {
    let device = Device::flex().autodiff();
    let weights: Vec<_> = (0..stages)
        .map(|stage| weight(stage, &device).require_grad())
        .collect();
    let leaves: Vec<_> = (0..inputs.len())
        .map(|i| Tensor::from_inner(input(i, inputs[i])).require_grad())
        .collect();
    let losses = leaves.iter().map(|leaf| {
        let product = |x: Tensor<3>, w: &Tensor<2>| x.matmul(w.clone().unsqueeze());
        let y = weights.iter().fold(leaf.clone(), product);
        (y.clone() * y).sum()
    });
    let loss = losses.reduce(|a, b| a + b).unwrap();
    let gradients = loss.backward();
    Whole {
        loss: loss.into_scalar(),
        weights: weights
            .iter()
            .map(|w| values(w.grad(&gradients).unwrap()))
            .collect(),
        inputs: leaves
            .iter()
            .map(|leaf| values(leaf.grad(&gradients).unwrap()))
            .collect(),
    }
}

fn assert_close(found: &[f64], expected: &[f64], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(0f64, |max, x| max.max(x.abs()));
    for (found, expected) in found.iter().zip(expected) {
        let off = (found - expected).abs();
        assert!(off <= 1e-12 * largest, "{what}: {found} for {expected}");
    }
}

fn assert_right(schedule: &Schedule, inputs: &[[usize; 2]]) {
    let name = schedule.name();
    let expected = whole(schedule.stages(), inputs);
    let ranks = run(schedule, inputs, |run, chain| {
        let of_inputs = chain.input_gradients.lock().unwrap();
        let of_inputs = of_inputs.iter().map(|(i, g)| (*i, values(g.clone())));
        let of_inputs: Vec<_> = of_inputs.collect();
        (run.loss(), chain.gradients(), of_inputs)
    });
    let loss: f64 = ranks.iter().map(|(loss, ..)| loss).sum();
    assert_close(&[loss], &[expected.loss], name);
    let of_inputs: Vec<_> = ranks.iter().flat_map(|(.., inputs)| inputs).collect();
    assert_eq!(of_inputs.len(), inputs.len(), "{name}");
    for (micro_batch, gradient) in of_inputs {
        assert_close(gradient, &expected.inputs[*micro_batch], name);
    }
    let found = by_stage(ranks.into_iter().map(|(_, weights, _)| weights).collect());
    for (found, expected) in found.iter().zip(&expected.weights) {
        assert_close(found, expected, name);
    }
}

#[test]
fn micro_batches_may_have_any_shape() {
    let inputs: Vec<_> = (0..8).map(|i| [1 + i % 2, 1 + (i * 3) % 5]).collect();
    for kind in ScheduleKind::ALL {
        for ranks in [2, 4] {
            assert_right(&schedule(kind, ranks, inputs.len()), &inputs);
        }
    }
}

#[test]
fn fewer_micro_batches_than_ranks() {
    for kind in ScheduleKind::ALL {
        if !matches!(kind, ScheduleKind::Interleaved { .. }) {
            assert_right(&schedule(kind, 4, 3), &even(3));
        }
    }
}

#[test]
fn one_rank_runs_a_schedule_of_one() {
    assert_right(&schedule(ScheduleKind::OneFOneB, 1, 3), &even(3));
    assert_right(&schedule(ScheduleKind::ZbV, 1, 3), &even(3));
}

#[test]
fn a_loss_scale_scales_the_gradients_and_not_the_loss() {
    let run = |scale: f64| {
        let schedule = schedule(ScheduleKind::OneFOneB, 1, 3);
        let ranks = World::threads(1).unwrap().run(|rank| {
            let chain = Chain::new(&schedule, 0, &even(3));
            let comm = rank.communicator();
            let engine = Engine::new(&schedule, &comm, &Device::flex(), chain.sums.clone())?;
            let run = engine.with_loss_scale(scale).run(&chain)?;
            Ok::<_, RankError>((run.loss(), by_stage(vec![chain.gradients()])))
        });
        ranks.unwrap().swap_remove(0)
    };
    let ((loss, gradients), (same, scaled)) = (run(1.0), run(1024.0));
    assert_eq!(loss, same);
    for (gradient, scaled) in gradients.iter().flatten().zip(scaled.iter().flatten()) {
        assert_eq!(1024.0 * gradient, *scaled);
    }
}

#[test]
fn a_split_backward_has_the_bits_of_a_whole_one() {
    let bits = |kind| {
        let gradients = weight_gradients(&schedule(kind, 4, 8), &even(8));
        let bits = gradients.into_iter().flatten().map(f64::to_bits);
        bits.collect::<Vec<_>>()
    };
    let [
        gpipe,
        one_f_one_b,
        eager,
        interleaved,
        zb_h1,
        zb_v,
        dualpipe_v,
    ] = ScheduleKind::ALL.map(bits);
    assert_eq!(gpipe, one_f_one_b);
    assert_eq!(one_f_one_b, eager);
    assert_eq!(one_f_one_b, zb_h1);
    assert_eq!(interleaved, zb_v);
    assert_eq!(interleaved, dualpipe_v);
}

/// Asserts that weight gradients arrive, and reductions may start, in their own actions.
fn assert_in_order(schedule: &Schedule) {
    let seen = run(schedule, &even(8), |_, chain| {
        chain.sums.seen.lock().unwrap().clone()
    });
    for (rank, seen) in seen.iter().enumerate() {
        let expected = schedule.actions(rank).iter().flat_map(|action| {
            let weight = Seen::Weight(action.stage);
            let backward = Seen::Backward(action.stage, action.micro_batch);
            match action.kind {
                ActionKind::Backward => vec![weight, backward],
                ActionKind::InputGradient => vec![backward],
                ActionKind::WeightGradient => vec![weight],
                ActionKind::ReduceGradients => vec![Seen::Reduce(action.stage)],
                _ => vec![],
            }
        });
        let expected: Vec<_> = expected.collect();
        assert_eq!(*seen, expected, "{}, rank {rank}", schedule.name());
    }
}

#[test]
fn a_weight_gradient_arrives_in_its_own_action() {
    for kind in ScheduleKind::ALL {
        assert_in_order(&schedule(kind, 4, 8));
    }
}

/// Stages are placed as in an interleaved schedule, but each is reduced at the position in the table.
#[test]
fn a_table_is_reduced_at_its_own_positions() {
    let generated = schedule(ScheduleKind::Interleaved { group: None }, 4, 8);
    let earliest = generated.clone().with_reduce_gradients();
    let mut lists: Vec<_> = (0..4)
        .map(|rank| generated.actions(rank).to_vec())
        .collect();
    for list in &mut lists {
        let at_end = |action: &Action| action.kind == ActionKind::ReduceGradients;
        let (mut last, first): (Vec<_>, Vec<_>) = list.drain(..).partition(at_end);
        *list = first;
        list.append(&mut last);
    }
    let placement = (0..8).map(|stage| stage % 4).collect();
    let latest = Schedule::new("latest", placement, 8, lists).unwrap();
    for own in [earliest, latest] {
        assert_ne!(own.actions(1), generated.actions(1));
        let read = Schedule::from_csv(own.name(), &own.to_csv()).unwrap();
        assert_eq!(read, own);
        assert_in_order(&read);
    }
}

#[test]
fn a_pair_has_the_bits_of_its_parts() {
    let rows = "F 0 0,F 0 1,F 0 2,FB 0 3 0 0,B 0 1,B 0 2,B 0 3
        F 1 0,FB 1 1 1 0,FB 1 2 1 1,FB 1 3 1 2,B 1 3";
    let pairs = Schedule::from_csv("pairs", rows).unwrap();
    assert_right(&pairs, &even(4));
    let alone = weight_gradients(&schedule(ScheduleKind::OneFOneB, 2, 4), &even(4));
    assert_eq!(weight_gradients(&pairs, &even(4)), alone);
}

/// A first stage without trainable parameters, before a chain.
struct Frozen(Chain);

impl Stage for Frozen {
    fn forward(&self, stage: usize, micro_batch: usize, given: Option<Tensor<3>>) -> StageOutput {
        match given {
            None => StageOutput::Activation(input(micro_batch, [2, 4])),
            given => self.0.forward(stage, micro_batch, given),
        }
    }
}

#[test]
fn a_stage_may_have_no_trainable_parameters() {
    for kind in [ScheduleKind::OneFOneB, ScheduleKind::ZbH1] {
        let schedule = schedule(kind, 2, 4);
        let world = World::threads(2).unwrap();
        let gradients = world.run(|rank| {
            let comm = rank.communicator();
            let chain = Chain::new(&schedule, comm.rank(), &even(4));
            let sums = chain.sums.clone();
            let engine = Engine::new(&schedule, &comm, &Device::flex(), sums.clone())?;
            engine.run(&Frozen(chain))?;
            let of_last = &sums.weights.lock().unwrap()[0].1;
            Ok::<_, RankError>(of_last.clone().map(values))
        });
        let gradients = gradients.unwrap();
        assert_eq!(gradients[0], None);
        let w = weight(1, &Device::flex());
        let expected = (0..4).map(|i| {
            let x = input(i, [2, 4]).reshape([8, WIDTH]);
            x.clone().transpose().matmul(x.matmul(w.clone()) * 2.0)
        });
        let expected = values(expected.reduce(|a, b| a + b).unwrap());
        assert_close(gradients[1].as_ref().unwrap(), &expected, "the last stage");
    }
}

#[test]
fn deferring_the_last_weight_gradient_is_bit_equal() {
    let kinds = [
        ScheduleKind::GPipe,
        ScheduleKind::OneFOneB,
        ScheduleKind::Interleaved { group: None },
    ];
    for kind in kinds {
        let schedule = schedule(kind, 4, 8);
        let last = schedule.stages() - 1;
        let expected = weight_gradients(&schedule, &even(8));
        for limit in [0, 1, 3, 100] {
            let ranks = World::threads(4).unwrap().run(|rank| {
                let comm = rank.communicator();
                let chain = Chain::new(&schedule, comm.rank(), &even(8));
                let sums = chain.sums.clone();
                let index = chain.own.len() - 1;
                let engine = Engine::new(&schedule, &comm, &Device::flex(), sums.clone())?
                    .with_deferred_wgrad(Some(DeferredWgrad { index, limit }));
                engine.run(&chain)?;
                let seen = sums.seen.lock().unwrap();
                let late = seen.iter().rev().take_while(|s| **s == Seen::Weight(last));
                Ok::<_, RankError>((chain.gradients(), late.count()))
            });
            let (gradients, late): (Vec<_>, Vec<_>) = ranks.unwrap().into_iter().unzip();
            assert_eq!(by_stage(gradients), expected, "{kind}, limit {limit}");
            if limit == 0 || limit >= 8 {
                assert_eq!(late[3], 8, "{kind}: all wait for the end");
            }
        }
    }
}
