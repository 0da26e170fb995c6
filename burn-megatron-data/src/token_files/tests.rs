use std::fs;
use std::sync::Arc;

use serde_json::Value;

use super::{TokenFile, TokenFiles, TokenFilesConfig};
use crate::fixtures::{cases, fixture, of, written};
use crate::gpt::{IndexCache, SplitPart};
use crate::indexed::{bin_path, idx_path};
use crate::{Dataset, Sampling};
use burn_megatron_test_support::TestFolder;

fn file(name: &str, weight: Option<f64>) -> TokenFile {
    TokenFile {
        prefix: fixture(name),
        weight,
    }
}

/// Returns both corpora, with 80 % of them for training.
fn corpora(weights: [Option<f64>; 2]) -> TokenFilesConfig {
    let files = vec![file("a", weights[0]), file("b", weights[1])];
    TokenFilesConfig {
        split: "80,15,5".parse().unwrap(),
        vocabulary: Some(1000),
        ..TokenFilesConfig::new(files)
    }
}

fn error(config: TokenFilesConfig) -> String {
    let opened = config.open();
    opened.err().expect("opening fails").to_string()
}

fn sampling(samples: u64) -> Sampling {
    Sampling {
        seq: 16,
        seed: 1234,
        samples,
    }
}

#[test]
fn a_part_whose_share_is_0_has_no_samples() {
    let everything = TokenFilesConfig {
        split: "100,0,0".parse().unwrap(),
        ..corpora([None, None])
    };
    let data = everything.open().unwrap();
    data.training(&sampling(8)).unwrap();
    assert!(data.held_out(16, 4).unwrap().is_empty());
    assert!(data.test(16, 4).unwrap().is_empty());
    let without_test = TokenFilesConfig {
        split: "80,20,0".parse().unwrap(),
        ..corpora([None, None])
    };
    let data = without_test.open().unwrap();
    assert_eq!(data.held_out(16, 4).unwrap().len(), 4);
    assert!(data.test(16, 4).unwrap().is_empty());
}

#[test]
fn blended_samples_are_those_of_the_reference() {
    let folder = TestFolder::new();
    for case in cases("whole").as_array().unwrap() {
        let weights = match of::<Option<[f64; 2]>>(case, "weights") {
            Some(weights) => weights.map(Some),
            None => [None, None],
        };
        let cached = TokenFilesConfig {
            cache: Some(IndexCache::new(folder.path())),
            ..corpora(weights)
        };
        for config in [corpora(weights), cached] {
            let data = config.open().unwrap();
            let wanted = of(case, "samples");
            let samples = data.samples(SplitPart::Train, 16, 1234, wanted).unwrap();
            assert_eq!(samples.count(), of::<u64>(case, "count"));
            let items: Vec<(Vec<i32>, Vec<i32>, Value)> = of(case, "items");
            for (number, (tokens, targets, _)) in items.into_iter().enumerate() {
                let sample = samples.sample(number as u64).unwrap();
                assert_eq!(
                    (sample.tokens, sample.targets),
                    (tokens, targets),
                    "{number}: {case}"
                );
            }
        }
    }
}

#[test]
fn ranks_share_what_they_train_on() {
    let data = corpora([Some(1.0), Some(2.0)]).open().unwrap();
    let [first, second] = [100, 100].map(|samples| data.training(&sampling(samples)).unwrap());
    assert!(Arc::ptr_eq(&first, &second));
    let longer = data.training(&sampling(200)).unwrap();
    assert!(!Arc::ptr_eq(&first, &longer));
}

#[test]
fn the_parts_share_no_token() {
    let folder = TestFolder::new();
    written(&folder, "x", &[10; 100]);
    let config = |packing| TokenFilesConfig {
        split: "80,15,5".parse().unwrap(),
        vocabulary: Some(1000),
        packing,
        ..TokenFilesConfig::new(vec![TokenFile {
            prefix: folder.path().join("x"),
            weight: None,
        }])
    };
    for packing in [false, true] {
        let data = config(packing).open().unwrap();
        let training = data
            .training(&Sampling {
                seq: 9,
                seed: 1,
                samples: 60,
            })
            .unwrap();
        let training = (0..60).map(|number| training.sample(number).unwrap());
        let parts = [
            (training.collect::<Vec<_>>(), 0..800),
            (data.held_out(9, 99).unwrap(), 800..950),
            (data.test(9, 99).unwrap(), 950..1000),
        ];
        for (samples, tokens) in parts {
            assert!(samples.len() > 4);
            let targets = samples.iter().flat_map(|sample| &sample.targets);
            assert!(
                targets
                    .filter(|x| **x >= 0)
                    .all(|target| tokens.contains(target))
            );
            let documents = samples.iter().all(|sample| sample.documents.is_empty());
            assert_eq!(documents, !packing);
        }
    }
}

#[test]
fn held_out_samples_are_always_the_same() {
    let held_out = |weights| corpora(weights).open().unwrap().held_out(16, 7).unwrap();
    let weighted = held_out([Some(3.0), Some(1.0)]);
    assert_eq!(weighted.len(), 7);
    assert_eq!(weighted, held_out([Some(0.75), Some(0.25)]));
    assert_ne!(weighted, held_out([None, None]));
    let data = corpora([Some(3.0), Some(1.0)]).open().unwrap();
    assert_eq!(data.held_out(16, 0).unwrap(), []);
    // More samples are requested than exist. With weights, there are samples until the first file is exhausted. Without
    // weights, all samples are returned.
    let most = data.held_out(16, 10_000).unwrap();
    assert_eq!(most[..7], weighted);
    let all = corpora([None, None])
        .open()
        .unwrap()
        .held_out(16, 10_000)
        .unwrap();
    assert!(most.len() < all.len() && all.len() < 10_000);
}

#[test]
fn without_weights_no_sample_comes_twice() {
    let data = corpora([None, None]).open().unwrap();
    let error = data.training(&sampling(10_000)).err().unwrap().to_string();
    assert!(
        error.contains("and the run needs 10000") && error.contains("give weights"),
        "{error}"
    );
    // A single file is repeated.
    let one = TokenFilesConfig {
        vocabulary: Some(1000),
        ..TokenFilesConfig::new(vec![file("a", None)])
    };
    let samples = one.open().unwrap().training(&sampling(10_000)).unwrap();
    assert!(samples.sample(9_999).is_ok());
}

#[test]
fn the_fingerprint_follows_the_data_and_the_options() {
    let folder = TestFolder::new();
    let fingerprint = |config: TokenFilesConfig| config.open().unwrap().fingerprint();
    let base = || corpora([Some(1.0), Some(2.0)]);
    let first = fingerprint(base());
    assert_eq!(first, fingerprint(corpora([Some(2.0), Some(4.0)])));
    // The fingerprint does not depend on the path and the cache.
    let mut moved = base();
    for (path, name) in [(bin_path as fn(&_) -> _, "a.bin"), (idx_path, "a.idx")] {
        fs::copy(path(&fixture("a")), folder.path().join(name)).unwrap();
    }
    moved.files[0].prefix = folder.path().join("a");
    moved.cache = Some(IndexCache::new(folder.path()));
    assert_eq!(first, fingerprint(moved));

    let changes: [&dyn Fn(&mut TokenFilesConfig); 6] = [
        &|config| config.files.swap(0, 1),
        &|config| config.split = "80,10,10".parse().unwrap(),
        &|config| config.packing = true,
        &|config| config.drop_last = false,
        &|config| config.eod = Some(0),
        &|config| config.vocabulary = Some(1001),
    ];
    let mut all = vec![first];
    for change in changes {
        let mut config = base();
        change(&mut config);
        all.push(fingerprint(config));
    }
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), 7);
}

/// Writes token files with a sidecar of this text.
fn beside(folder: &TestFolder, name: &str, text: &str) -> TokenFile {
    written(folder, name, &[9; 30]);
    folder.write(&format!("{name}.json"), text);
    TokenFile {
        prefix: folder.path().join(name),
        weight: Some(1.0),
    }
}

#[test]
fn what_stands_beside_the_files_is_used() {
    let folder = TestFolder::new();
    let facts = r#""tokenizer": "t1", "vocabulary": 500, "eod": 8, "documents": 30, "other": [1]"#;
    let text =
        |tokens: u64, bytes: u64| format!(r#"{{{facts}, "tokens": {tokens}, "bytes": {bytes}}}"#);
    let first = beside(&folder, "first", &text(100, 300));
    let second = beside(&folder, "second", &text(100, 500));
    let open = |files| TokenFilesConfig {
        eod_mask_loss: true,
        ..TokenFilesConfig::new(files)
    };
    let data: TokenFiles = open(vec![first.clone(), second.clone()]).open().unwrap();
    assert_eq!(data.vocabulary(), 500);
    assert_eq!(data.bytes_per_token(), 4.0);
    let samples = data.training(&sampling(10)).unwrap();
    for sample in (0..10).map(|number| samples.sample(number).unwrap()) {
        for (token, target) in sample.tokens.iter().zip(&sample.targets) {
            assert_eq!(*target == -1, *token == 8);
        }
    }
    assert!(
        data.describe()
            .contains("540 tokens of a vocabulary of 500"),
        "{}",
        data.describe()
    );

    let third = beside(&folder, "third", &text(1, 1).replace("t1", "t2"));
    let refused = error(open(vec![first.clone(), second, third]));
    assert!(
        refused.contains("third' disagree on the tokenizer"),
        "{refused}"
    );
    // Properties that the sidecar of one file does not have are taken from the other sidecars.
    let silent = beside(&folder, "silent", "{}");
    let both = open(vec![silent, first.clone()]).open().unwrap();
    assert_eq!((both.vocabulary(), both.bytes_per_token()), (500, 1.0));
    let broken = beside(&folder, "broken", "{");
    assert!(error(open(vec![broken])).contains("broken.json'"));
    let large = beside(&folder, "large", r#"{"vocabulary": 9, "eod": 3000000000}"#);
    assert!(error(open(vec![large])).contains("large' is not a token"));
    let strange = beside(&folder, "strange", r#"{"vocabulary": "many"}"#);
    assert!(error(open(vec![strange])).contains("strange.json' does not describe"));
    let none = beside(&folder, "none", "{}");
    let refused = error(TokenFilesConfig::new(vec![none]));
    assert!(
        refused.contains("unknown vocabulary") && refused.contains("none.json"),
        "{refused}"
    );
}

#[test]
fn options_that_do_not_fit_are_refused() {
    assert!(error(corpora([Some(1.0), None])).contains("1 of 2 files have a weight"));
    assert!(error(corpora([Some(1.0), Some(-1.0)])).contains("invalid blend weights"));
    assert!(error(TokenFilesConfig::new(vec![])).contains("0 files"));
    let packed = TokenFilesConfig {
        packing: true,
        reset_attention: true,
        ..corpora([None, None])
    };
    let refused = error(packed);
    assert!(
        refused.contains("reset_attention conflicts with packing"),
        "{refused}"
    );
    let missing = TokenFilesConfig::new(vec![file("nothing", None)]);
    assert!(error(missing).contains("nothing.idx'"));
}
