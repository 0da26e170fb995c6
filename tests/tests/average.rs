//! Tests of the exponential moving average of the weights.

use burn_megatron::checkpoint::{
    AveragedWeights, Checkpoint, LoadTolerance, MODEL, TensorSlice, TensorSource,
};
use burn_megatron::optim::{EMA, EmaConfig};
use burn_megatron_tests::Text;

use super::resume::run::{Case, Folder};

const DECAY: f64 = 0.75;

fn case(layout: &str, evaluate: bool) -> Case {
    let mut case = Case::gpt(layout);
    case.every = Some(1);
    case.train.ema = Some(EmaConfig {
        decay: DECAY,
        evaluate,
    });
    case
}

fn values(checkpoint: &Checkpoint, key: &str) -> Vec<f32> {
    let meta = checkpoint.tensor(key).unwrap();
    let bytes = checkpoint
        .read(key, &TensorSlice::whole(&meta.shape))
        .unwrap();
    let (chunks, _) = bytes.as_chunks::<4>();
    chunks
        .iter()
        .map(|bytes| f32::from_le_bytes(*bytes))
        .collect()
}

/// The average of each step is computed from the average of the previous step and the new weights.
#[test]
fn it_follows_the_weights() {
    let folder = Folder::new();
    for layout in ["tp1-mb4", "tp2-pp2-dp2-mb1-z1/1f1b", "dp3-mb2-z3"] {
        let into = folder.join(&layout.replace('/', "-"));
        case(layout, false).run(None, 3, Some(&into));
        let steps =
            [1, 2, 3].map(|step| Checkpoint::open(into.join(format!("step-{step:08}"))).unwrap());
        let paths: Vec<_> = steps[0]
            .keys()
            .into_iter()
            .filter_map(|key| key.strip_prefix(EMA).map(String::from))
            .collect();
        assert!(paths.len() > 20, "{layout}");
        for both in steps.windows(2) {
            for path in &paths {
                let [old, new] =
                    [&both[0], &both[1]].map(|step| values(step, &format!("{EMA}{path}")));
                let weights = values(&both[1], &format!("{MODEL}{path}"));
                for ((old, new), weight) in old.into_iter().zip(new).zip(weights) {
                    let expected = DECAY * f64::from(old) + (1.0 - DECAY) * f64::from(weight);
                    assert!(
                        (f64::from(new) - expected).abs() < 1e-6,
                        "{layout} {path}: {new} is not {expected}"
                    );
                    assert!(new != weight || weight == old, "{layout} {path}");
                }
            }
        }
    }
}

/// Held-out text is evaluated with the average. The evaluation leaves the weights unchanged.
#[test]
fn it_is_evaluated_and_loaded_in_the_place_of_the_weights() {
    let folder = Folder::new();
    for layout in ["tp1-mb4", "dp2-mb3-z1", "dp3-mb2-z3"] {
        let into = folder.join(layout);
        let case = case(layout, true);
        case.run(None, 3, Some(&into));
        let text = Text::new();
        let text = text.open();
        let losses = case.on_ranks(|groups| {
            let checkpoint = Checkpoint::open(&into)?;
            let mut trainer = case.trainer(groups)?;
            trainer.load(&checkpoint, LoadTolerance::default())?;
            let own = trainer.evaluate(&text, 3)?.loss;
            let average = trainer.evaluate_average(&text)?.loss;
            let again = trainer.evaluate(&text, 3)?.loss;
            assert_eq!(own.to_bits(), again.to_bits(), "the weights are as before");
            let mut other = case.trainer(groups)?;
            let averaged = AveragedWeights::of(&checkpoint).expect("has an average");
            other.load_weights(&averaged, LoadTolerance::default())?;
            let loaded = other.evaluate(&text, 3)?.loss;
            // The average of the new trainer begins with the loaded weights.
            assert_eq!(
                other.evaluate_average(&text)?.loss.to_bits(),
                loaded.to_bits()
            );
            Ok([own, average, loaded])
        });
        for [own, average, loaded] in losses.unwrap() {
            assert_eq!(average.to_bits(), loaded.to_bits(), "{layout}");
            assert!(
                (own - average).abs() > 1e-4,
                "{layout}: {own} and {average}"
            );
        }
    }
}
