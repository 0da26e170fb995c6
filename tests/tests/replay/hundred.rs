//! Tests of bit flips at random positions.

use std::collections::BTreeMap;

use burn_megatron_comm_testing::fault_injection::FlipTarget;
use burn_megatron_tests::Text;
use burn_megatron_train::Verdict;

use super::{RankEnd, Run, STEPS};

/// A generator of pseudorandom numbers.
struct Draws(u64);

impl Draws {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end.max(1)
    }
}

/// 100 flips at random positions must each be attributed, and 100 runs without a flip must report nothing. It takes
/// minutes: `cargo test -p burn-megatron-tests --test main a_hundred_flips -- --ignored --nocapture`.
#[test]
#[ignore = "takes minutes"]
fn a_hundred_flips_are_attributed_and_a_hundred_clean_runs_are_silent() {
    let text = Text::new();
    let all = [
        "dp2-mb2",
        "tp2-sp-mb2",
        "tp2-dp2-mb2-z1",
        "dp2-mb2-z2",
        "dp2-mb2-z3",
        "dp4-mb2",
        "pp2-mb2/1f1b",
        "ep2-dp2-mb2",
        "ep2-epoverlap-dp2-mb1",
    ];
    let experts = 2;
    let mut draws = Draws(1);
    let mut counts = BTreeMap::new();
    for layout in all {
        // A run in which no step is computed twice, and a run in which each step is computed twice.
        let [once, twice] = [100, 1].map(|every| {
            let mut run = Run::new(layout);
            run.config.check_replay_every = Some(every);
            run.run(&text).unwrap()
        });
        let of_rank = |(once, twice): (&RankEnd, &RankEnd)| {
            let steps = STEPS as u64;
            let more = |at: usize| twice.counted[at] - once.counted[at];
            // One additional run per step, another run of the first step, and a call that compares.
            let [activations, gradients] = [0, 1].map(|at| more(at) / (steps + 1));
            [activations, gradients, (more(2) - steps) / (steps + 1)]
        };
        let of_ranks: Vec<_> = once.iter().zip(&twice).map(of_rank).collect();
        println!("{layout}: per rank and run, activations, gradients, calls: {of_ranks:?}");
        counts.insert(layout, of_ranks);
    }
    let mut found = BTreeMap::<String, usize>::new();
    for number in 0..100 {
        let target = FlipTarget::ALL[number % 5];
        // The row counts that experts exchange are not tensors, and are checked in another way.
        let layouts = match target {
            FlipTarget::Collective => &all[..all.len() - experts],
            _ => &all[..],
        };
        let layout = layouts[draws.below(layouts.len() as u64) as usize];
        let rank = draws.below(counts[layout].len() as u64) as usize;
        let [activations, gradients, calls] = counts[layout][rank];
        // In the first or the second run of the step.
        let call = match target {
            FlipTarget::Activation => draws.below(2 * activations),
            FlipTarget::Gradient => draws.below(2 * gradients),
            // The first call of a pipeline compares the shapes of its transfers, which checks the call.
            FlipTarget::Collective if layout.starts_with("pp") => 1 + draws.below(calls - 1),
            FlipTarget::Collective => draws.below(calls),
            FlipTarget::Weight | FlipTarget::Optimizer => draws.below(6),
        };
        let (step, element, bit) = (2 + draws.below(3), draws.below(1 << 20), draws.below(32));
        let fault = format!(
            "bit-flip:{}:{element}:{bit}@rank={rank},step={step},call={call}",
            target.name()
        );
        let error = Run::new(layout).with_faults(&[&fault]).error(&text);
        println!("{layout} {fault}: {error}");
        // A message that changes in transit is reported with its receiver.
        let names = [format!("on rank {rank} "), format!("from rank {rank} to ")];
        let on_rank = names.iter().any(|name| error.message.contains(name));
        let kind = match target {
            FlipTarget::Activation => error.message.contains(" the forward of "),
            FlipTarget::Gradient => error.message.contains(" the backward of "),
            FlipTarget::Weight => error.message.contains(" the weights of "),
            FlipTarget::Optimizer => error.message.contains(" adamw."),
            FlipTarget::Collective => error.message.contains(" over "),
        };
        let verdict = if target.is_state() {
            Verdict::StateChanged
        } else {
            Verdict::Transient
        };
        assert!(on_rank && kind, "{layout} {fault}: {error}");
        assert_eq!(
            (error.step as u64, error.verdict),
            (step, verdict),
            "{fault}"
        );
        *found.entry(target.name().into()).or_default() += 1;
    }
    println!("attributed: {found:?}");
    for number in 0..100u64 {
        let layout = all[number as usize % all.len()];
        let mut run = Run::new(layout);
        run.config.seed = number;
        run.run(&text).unwrap();
    }
    println!("100 clean runs were silent");
}
