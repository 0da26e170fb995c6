//! Tests of settings and weights that cannot be gathered in FP8.

use super::*;
use crate::nn::fp8::WeightQuantizer;

fn refused(config: &DataParallelConfig, ranks: usize, path: Option<&str>) -> String {
    let run = |groups: &ParallelContext| {
        let (model, layers) = net::model(Recipe::Current, groups);
        let weight = path
            .map(|path| -> (String, Arc<dyn WeightQuantizer>) { (path.into(), layers[0].clone()) });
        let weights = weight.into_iter().collect();
        Ok(DistributedDataParallel::with_weights(model, groups, config, weights).map(drop)?)
    };
    over(1, ranks, run).unwrap_err().to_string()
}

#[test]
fn invalid_settings_and_weights_are_named() {
    let config = |number| with_fp8_gather(&stage(number));
    for (config, ranks, path, expected) in [
        (
            config(0),
            2,
            Some("first"),
            "requires zero_stage = 1 or 2, but zero_stage = 0",
        ),
        (
            config(3),
            2,
            Some("first"),
            "requires zero_stage = 1 or 2, but zero_stage = 3",
        ),
        (config(1), 1, Some("first"), "the data axis has 1 ranks"),
        (
            config(1),
            2,
            None,
            "the model has none; choose an FP8 recipe",
        ),
        (
            config(1),
            2,
            Some("fourth"),
            "the model has no matrix fourth",
        ),
        (config(2), 2, Some("shift"), "the model has no matrix shift"),
    ] {
        let error = refused(&config, ranks, path);
        assert!(error.contains(expected), "{error}");
    }
}

/// A pipeline stage may have no FP8 weights, as long as another stage has some.
#[test]
fn a_stage_without_fp8_weights_is_accepted() {
    let mesh = ParallelConfig::new().with_data(2).with_pipeline(2);
    let run = |rank| {
        let groups = ParallelContext::new(&mesh, &rank)?;
        let (model, layers) = net::model(Recipe::Current, &groups);
        let weights = match groups.pipeline().rank() {
            0 => vec![],
            _ => net::named(&layers),
        };
        let config = with_fp8_gather(&stage(1));
        DistributedDataParallel::with_weights(model, &groups, &config, weights)?;
        Ok::<_, RankError>(())
    };
    World::threads(4).unwrap().run(run).unwrap();
}
