use std::sync::Arc;

use insta::assert_snapshot;
use serde_json::Value;

use super::{
    BlendedDataset, build_blending_indices, build_exhaustive_blending_indices, normalize, sizes,
};
use crate::Samples;
use crate::fixtures::{cases, of, written};
use crate::gpt::{FiniteSamples, GptDataset, GptOptions, IndexCache, SplitPart};
use burn_megatron_test_support::TestFolder;

/// Floats are stored as text, because the JSON parser may not preserve the last bit.
fn floats(case: &Value, name: &str) -> Vec<f64> {
    let texts: Vec<String> = of(case, name);
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

#[test]
fn weighted_blends_are_those_of_the_reference() {
    for case in of::<Vec<Value>>(cases("blends"), "weighted") {
        let weights = normalize(&floats(&case, "weights")).unwrap();
        assert_eq!(weights, floats(&case, "normalized"), "to the bit");
        let (datasets, samples) = build_blending_indices(&weights, of(&case, "size"));
        assert_eq!(datasets, of::<Vec<i16>>(&case, "datasets"));
        assert_eq!(samples, of::<Vec<i64>>(&case, "samples"));
        assert_eq!(
            sizes(&weights, of(&case, "size")),
            of::<Vec<(u64, u64)>>(&case, "sizes")
        );
    }
}

#[test]
fn exhaustive_blends_are_those_of_the_reference() {
    for case in of::<Vec<Value>>(cases("blends"), "exhaustive") {
        let (datasets, samples) =
            build_exhaustive_blending_indices(&of::<Vec<u64>>(&case, "counts"));
        assert_eq!(datasets, of::<Vec<i16>>(&case, "datasets"));
        assert_eq!(samples, of::<Vec<i64>>(&case, "samples"));
    }
    // A data set without samples contributes no samples.
    let (datasets, samples) = build_exhaustive_blending_indices(&[2, 0, 1]);
    assert_eq!(datasets.iter().filter(|number| **number == 1).count(), 0);
    assert_eq!(samples.len(), 3);
    assert!(build_exhaustive_blending_indices(&[0]).0.is_empty());
}

#[test]
fn weights_that_say_nothing_are_refused() {
    for wrong in [
        &[0.0, 0.0][..],
        &[-1.0, 2.0],
        &[f64::NAN],
        &[f64::INFINITY, 1.0],
        &[f64::MAX; 2],
    ] {
        let error = normalize(wrong).unwrap_err().to_string();
        assert!(error.contains("invalid blend weights"), "{error}");
    }
    assert!(
        normalize(&[])
            .unwrap_err()
            .to_string()
            .starts_with("cannot blend 0 files")
    );
    assert!(normalize(&vec![1.0; 40_000]).is_err());
}

/// Returns data sets of 5, 10 and 20 samples.
fn parts() -> (TestFolder, Vec<Arc<dyn FiniteSamples>>) {
    let folder = TestFolder::new();
    let part = |samples: usize| {
        let file = written(&folder, &format!("{samples}"), &[4 * samples + 1]);
        let options = GptOptions::new(4, 1);
        let part = GptDataset::new(
            file,
            &"1".parse().unwrap(),
            SplitPart::Train,
            None,
            &options,
            None,
        );
        Arc::new(part.unwrap()) as Arc<dyn FiniteSamples>
    };
    let parts = [5, 10, 20].map(part).to_vec();
    (folder, parts)
}

#[test]
fn a_sample_is_that_of_its_data_set() {
    let (folder, parts) = parts();
    let cache = IndexCache::new(&folder.path().join("cache"));
    let weights = [0.25, 0.25, 0.5];
    let (datasets, samples) = build_blending_indices(&weights, 20);
    for cache in [None, Some(&cache), Some(&cache)] {
        let blended = BlendedDataset::weighted(parts.clone(), &weights, 20, cache).unwrap();
        assert_eq!((blended.count(), blended.seq()), (20, 4));
        assert_eq!(blended.taken(), [5, 5, 10]);
        for number in 0..20 {
            let part = &parts[datasets[number] as usize];
            let wanted = part.sample(samples[number] as u64).unwrap();
            assert_eq!(blended.sample(number as u64).unwrap(), wanted);
        }
        assert!(blended.sample(20).is_err());
    }
    let all = BlendedDataset::exhaustive(parts, None).unwrap();
    assert_eq!((all.taken(), all.count()), (vec![5, 10, 20], 35));
}

#[test]
fn a_blend_takes_no_more_than_there_is() {
    let (_folder, parts) = parts();
    let blended = |parts, weights: &[f64], size| {
        let blended = BlendedDataset::weighted(parts, weights, size, None);
        blended.err().expect("the blend fails").to_string()
    };
    let error = blended(parts.clone(), &[0.5, 0.25, 0.25], 12);
    assert_snapshot!(error, @"the blend takes 6 samples from data set 0, which has 5");
    assert!(blended(parts.clone(), &[1.0], 1).contains("invalid blend weights"));
    assert!(blended(vec![], &[], 1).contains("0 files"));

    let folder = TestFolder::new();
    let file = written(&folder, "x", &[50]);
    let other = GptDataset::new(
        file,
        &"1".parse().unwrap(),
        SplitPart::Train,
        None,
        &GptOptions::new(5, 1),
        None,
    );
    let mixed = vec![Arc::clone(&parts[0]), Arc::new(other.unwrap())];
    let error = blended(mixed, &[0.5, 0.5], 2);
    assert_snapshot!(error, @"data set 1 has samples of 5 tokens, but the samples of the first data set have 4");
}
