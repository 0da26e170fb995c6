//! What cannot be gathered in 8 bits.

use super::*;
use crate::nn::fp8::WeightQuantizer;

fn refused(config: &DataParallelConfig, ranks: usize, path: Option<&str>) -> String {
    let run = |groups: &Groups| {
        let (model, layers) = net::model(Recipe::Current, groups);
        let weight = path
            .map(|path| -> (String, Arc<dyn WeightQuantizer>) { (path.into(), layers[0].clone()) });
        let weights = weight.into_iter().collect();
        Ok(DistributedDataParallel::with_weights(model, groups, config, weights).map(drop)?)
    };
    over(1, ranks, run).unwrap_err().to_string()
}

#[test]
fn settings_and_weights_that_do_not_fit_are_named() {
    let config = |number| in_8_bits(&stage(number));
    for (config, ranks, path, expected) in [
        (
            config(0),
            2,
            Some("first"),
            "zero_stage = 0 does not; 1 and 2 do",
        ),
        (
            config(3),
            2,
            Some("first"),
            "gathers them for one block at a time",
        ),
        (config(1), 1, Some("first"), "the data axis has 1 ranks"),
        (
            config(1),
            2,
            None,
            "the model has none; choose an 8-bit recipe",
        ),
        (
            config(1),
            2,
            Some("fourth"),
            "calls its weight fourth, and the model has no matrix there",
        ),
        (
            config(2),
            2,
            Some("shift"),
            "calls its weight shift, and the model has no matrix there",
        ),
    ] {
        let error = refused(&config, ranks, path);
        assert!(error.contains(expected), "{error}");
    }
}

/// A stage of a pipeline may have no 8-bit weight, as long as another has one.
#[test]
fn a_stage_without_8_bit_weights_comes_along() {
    let mesh = ParallelConfig::new().with_data(2).with_pipeline(2);
    let run = |rank| {
        let groups = Groups::new(&mesh, &rank)?;
        let (model, layers) = net::model(Recipe::Current, &groups);
        let weights = match groups.pipeline().rank() {
            0 => vec![],
            _ => net::named(&layers),
        };
        let config = in_8_bits(&stage(1));
        DistributedDataParallel::with_weights(model, &groups, &config, weights)?;
        Ok::<_, RankError>(())
    };
    World::threads(4).unwrap().run(run).unwrap();
}
