use super::*;
use crate::schedule::WsdTail;

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
        let scaled = train.scaled(steps);
        scaled
            .learning_rates()
            .unwrap_or_else(|error| panic!("{steps}: {error}"));
        let ends = scaled.batch_warmup.iter().map(|part| part.until_step);
        assert!(ends.is_sorted_by(|a, b| a < b), "{steps}");
        let parts = scaled.batch_warmup.len() + scaled.sequence_warmup.len();
        assert!(parts == 4 || steps < 6, "{steps}: {parts}");
    }
    assert_eq!(train.scaled(600), train);
    assert_eq!(train.scaled(4).warmup_steps, 3);
}
