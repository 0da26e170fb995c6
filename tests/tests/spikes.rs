//! Tests of steps that are skipped because their loss or gradient norm is a spike.

use burn_megatron::checkpoint::{Checkpoint, MODEL, TensorSlice, TensorSource};
use burn_megatron::optim::{SpikeConfig, SpikeWindow};
use burn_megatron_train::metrics::SkipReason;

use super::resume::run::{Case, Folder, assert_same, lines};

/// The limit is so narrow that the noise of small batches sometimes exceeds it.
const SPIKES: SpikeConfig = SpikeConfig {
    sigmas: 0.5,
    window: 4,
};

const STEPS: usize = 12;

fn case(layout: &str) -> Case {
    let mut case = Case::gpt(layout);
    case.train.steps = STEPS;
    case.train.evaluate_every = None;
    case.train.skip_spikes = Some(SPIKES);
    case.every = Some(1);
    case
}

#[test]
fn a_spike_leaves_the_weights_and_is_skipped_again_after_a_resume() {
    let folder = Folder::new();
    for layout in ["tp1-mb4", "tp2-dp2-mb3-z2", "pp2-dp2-mb1/1f1b"] {
        let [whole, half] = ["whole", "half"]
            .map(|end| folder.join(&format!("{end}-{}", layout.replace('/', "-"))));
        let seen = case(layout).run(None, STEPS, Some(&whole));
        let mut window = SpikeWindow::default();
        let weights = |step: usize| {
            let checkpoint = Checkpoint::open(whole.join(format!("step-{step:08}"))).unwrap();
            let keys = checkpoint
                .keys()
                .into_iter()
                .filter(|key| key.starts_with(MODEL));
            let read = |key: String| {
                let shape = checkpoint.tensor(&key).unwrap().shape;
                checkpoint.read(&key, &TensorSlice::whole(&shape)).unwrap()
            };
            keys.map(read).collect::<Vec<_>>()
        };
        let mut skipped = 0;
        for step in &seen[0].steps {
            let spike = window.is_spike(&SPIKES, step.loss, step.gradient_norm);
            window.push(&SPIKES, step.loss, step.gradient_norm);
            assert_eq!(
                step.skip_reason,
                spike.then_some(SkipReason::Spike),
                "{layout}: {step:?}"
            );
            skipped += usize::from(spike);
            if step.step > 1 {
                assert_eq!(
                    weights(step.step) == weights(step.step - 1),
                    spike,
                    "{layout}: {step:?}"
                );
            }
        }
        assert!(
            (1..STEPS / 2).contains(&skipped),
            "{layout}: {skipped} were skipped"
        );
        let middle = STEPS / 2;
        case(layout).run(None, middle, Some(&half));
        let resumed = case(layout).run(Some(&half), STEPS, Some(&half));
        assert_eq!(
            lines(&resumed[0].steps),
            lines(&seen[0].steps[middle..]),
            "{layout}"
        );
        assert_same(layout, &whole, &half);
    }
}
