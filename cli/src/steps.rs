//! The settings that follow from the number of steps of a run.

use burn_megatron_train::TrainConfig;
use burn_megatron_train::schedule::LrStyle;

/// Keys of `[train]` that follow another one where a recipe leaves them out, and that one.
pub const ADAPTED: [(&str, &str); 5] = [
    ("warmup_steps", "steps"),
    ("schedule", "steps"),
    ("batch_warmup", "steps"),
    ("sequence_warmup", "steps"),
    ("min_learning_rate", "learning_rate"),
];

/// The settings for another number of steps: warm-up and decay in proportion. A part that rounds to no step is left out,
/// but for a decay, which has at least one.
pub fn scaled(train: &TrainConfig, steps: usize) -> TrainConfig {
    let before = train.steps.max(1) as u128;
    let part =
        |part: usize| usize::try_from(part as u128 * steps as u128 / before).unwrap_or(usize::MAX);
    let mut scaled = TrainConfig {
        steps,
        warmup_steps: part(train.warmup_steps),
        ..train.clone()
    };
    if let LrStyle::Wsd { decay_steps, .. } = &mut scaled.schedule {
        *decay_steps = part(*decay_steps).max(usize::from(*decay_steps > 0));
    }
    let mut end = 0;
    scaled.batch_warmup.retain_mut(|warmup| {
        warmup.until_step = part(warmup.until_step);
        let is_some = warmup.until_step > end;
        end = end.max(warmup.until_step);
        is_some
    });
    let mut end = 0;
    scaled.sequence_warmup.retain_mut(|warmup| {
        warmup.until_step = part(warmup.until_step);
        let is_some = warmup.until_step > end;
        end = end.max(warmup.until_step);
        is_some
    });
    scaled
}

#[cfg(test)]
mod tests {
    use burn_megatron_train::schedule::WsdTail;
    use burn_megatron_train::{BatchWarmup, SequenceWarmup};

    use super::*;

    #[test]
    fn every_number_of_steps_is_valid() {
        let parts = |of: [usize; 2]| of.map(|until_step| (until_step, until_step / 100));
        let train = TrainConfig {
            steps: 600,
            warmup_steps: 450,
            schedule: LrStyle::Wsd {
                decay_steps: 150,
                tail: WsdTail::Linear,
            },
            batch_warmup: parts([100, 300])
                .map(|(until_step, size)| BatchWarmup {
                    until_step,
                    global_batch_size: size,
                })
                .into(),
            sequence_warmup: parts([200, 400])
                .map(|(until_step, length)| SequenceWarmup { until_step, length })
                .into(),
            ..TrainConfig::default()
        };
        for steps in (1..=1200).step_by(7) {
            let scaled = scaled(&train, steps);
            scaled
                .learning_rates()
                .unwrap_or_else(|error| panic!("{steps}: {error}"));
            let ends = scaled.batch_warmup.iter().map(|part| part.until_step);
            assert!(ends.is_sorted_by(|a, b| a < b), "{steps}");
            let parts = scaled.batch_warmup.len() + scaled.sequence_warmup.len();
            assert!(parts == 4 || steps < 6, "{steps}: {parts}");
        }
        assert_eq!(scaled(&train, 600), train);
        assert_eq!(scaled(&train, 4).warmup_steps, 3);
    }
}
