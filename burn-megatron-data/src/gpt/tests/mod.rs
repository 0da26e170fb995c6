use std::sync::Arc;

use serde_json::Value;

use super::{Epochs, FiniteSamples, GptDataset, GptOptions, RandomState, Split, SplitPart};
use crate::fixtures::{cases, of, open, written};
use crate::{IGNORE, Sample, Samples};
use burn_megatron_test_support::TestFolder;

mod cache;

#[test]
fn shuffles_are_those_of_numpy() {
    for case in of::<Vec<Value>>(cases("random_state"), "shuffles") {
        let mut state = RandomState::new(of(&case, "seed"));
        let (first, second): (Vec<i32>, Vec<i32>) = (of(&case, "first"), of(&case, "second"));
        for wanted in [first, second] {
            let mut values: Vec<i32> = (0..wanted.len() as i32).collect();
            state.shuffle(&mut values);
            assert_eq!(values, wanted, "{}", case["seed"]);
        }
    }
}

#[test]
fn numbers_of_more_than_32_bits_are_those_of_numpy() {
    for case in of::<Vec<Value>>(cases("random_state"), "wide") {
        let mut state = RandomState::new(of(&case, "seed"));
        let max = of(&case, "max");
        let drawn: Vec<u64> = (0..50).map(|_| state.up_to(max)).collect();
        assert_eq!(drawn, of::<Vec<u64>>(&case, "drawn"));
    }
    let state = &mut RandomState::new(1);
    assert_eq!(state.up_to(0), 0);
    // Shuffling zero or one value draws no random number.
    assert_eq!(state.next_u32(), RandomState::new(1).next_u32());
}

#[test]
fn splits_are_those_of_the_reference() {
    for case in cases("splits").as_array().unwrap() {
        let split: Split = of::<String>(case, "split").parse().unwrap();
        let ranges: Vec<Option<[usize; 2]>> = of(case, "ranges");
        for (part, wanted) in [SplitPart::Train, SplitPart::Valid, SplitPart::Test]
            .into_iter()
            .zip(ranges)
        {
            let range = split.range(part, of(case, "total"));
            assert_eq!(
                range.map(|range| [range.start, range.end]),
                wanted,
                "{case}"
            );
        }
    }
    assert_eq!(Split::default(), "969,30,1".parse().unwrap());
    for wrong in ["", "1,2,3,4", "a", "-1,2", "0,0,0", "nan", "inf"] {
        let error = wrong.parse::<Split>().unwrap_err().to_string();
        assert!(error.contains(&format!("'{wrong}'")), "{error}");
    }
}

/// Returns the data set of a case, and the case.
fn data_sets() -> impl Iterator<Item = (GptDataset, &'static Value)> {
    cases("gpt").as_array().unwrap().iter().map(|case| {
        let split: Split = of::<String>(case, "split").parse().unwrap();
        let part = match of::<String>(case, "part").as_str() {
            "train" => SplitPart::Train,
            "valid" => SplitPart::Valid,
            _ => SplitPart::Test,
        };
        let options = GptOptions {
            eod: Some(0),
            eod_mask_loss: of(case, "eod_mask_loss"),
            reset_attention: of(case, "reset"),
            drop_last: of(case, "drop_last"),
            extra_token: of(case, "extra_token"),
            ..GptOptions::new(of(case, "seq"), of(case, "seed"))
        };
        let file = open(&of::<String>(case, "file"));
        let samples = of(case, "samples");
        let dataset = GptDataset::new(file, &split, part, samples, &options, None);
        (dataset.unwrap(), case)
    })
}

#[test]
fn indices_are_those_of_the_reference() {
    for (dataset, case) in data_sets() {
        let indices = dataset.indices();
        for (ours, name) in [
            (&indices.documents, "document_index"),
            (&indices.samples, "sample_index"),
            (&indices.shuffle, "shuffle_index"),
        ] {
            let theirs: Vec<i64> = of(case, name);
            assert_eq!(ours.iter().collect::<Vec<_>>(), theirs, "{name} of {case}");
        }
    }
}

/// Returns the positions that are 0.
fn documents(positions: &[i64]) -> Vec<usize> {
    let begins = positions.iter().enumerate().filter(|(_, at)| **at == 0);
    begins.map(|(place, _)| place).collect()
}

#[test]
fn samples_are_those_of_the_reference() {
    for (dataset, case) in data_sets() {
        let items: Vec<(Vec<i32>, Vec<i32>, Vec<i64>)> = of(case, "items");
        assert!(items.len() > 4);
        for (number, (tokens, targets, positions)) in items.into_iter().enumerate() {
            let sample = dataset.sample(number as u64).unwrap();
            assert_eq!(sample.tokens, tokens, "tokens of {number}: {case}");
            assert_eq!(sample.targets, targets, "targets of {number}: {case}");
            if of(case, "reset") {
                assert_eq!(sample.documents, documents(&positions))
            } else {
                assert_eq!(sample.documents, [] as [usize; 0])
            }
        }
    }
}

#[test]
fn the_last_epoch_is_shuffled_alone_below_80_percent() {
    // An epoch has 10 samples. If 8 samples of the last epoch are used, it is shuffled with the other epochs. If 7 are
    // used, it is shuffled separately.
    let epochs = |wanted| Epochs::new(101, 10, 1, Some(wanted), true).unwrap();
    assert_eq!((epochs(10).count, epochs(10).before_last), (1, None));
    assert_eq!((epochs(27).count, epochs(27).before_last), (3, Some(20)));
    assert_eq!((epochs(28).count, epochs(28).before_last), (3, None));
    assert_eq!(epochs(28).samples, 30);
    let none = Epochs::new(101, 10, 1, None, true).unwrap();
    assert_eq!((none.count, none.samples), (1, 10));
    assert!(Epochs::new(101, 10, 1, Some(u64::MAX), true).is_err());
    assert!(Epochs::new(101, 1, 1, Some(u64::MAX / 2), true).is_err());
}

fn options(seq: usize) -> GptOptions {
    GptOptions::new(seq, 5)
}

fn all() -> Split {
    "1".parse().unwrap()
}

/// Returns a data set of documents with the given lengths.
fn over(lengths: &[usize], samples: Option<u64>, options: &GptOptions) -> GptDataset {
    let folder = TestFolder::new();
    let file = written(&folder, "x", lengths);
    GptDataset::new(file, &all(), SplitPart::Train, samples, options, None).unwrap()
}

#[test]
fn every_token_is_a_target_once_in_an_epoch() {
    let lengths: Vec<usize> = (0..97).map(|x| x * 31 % 23).collect();
    let total: usize = lengths.iter().sum();
    let dataset = over(&lengths, None, &options(7));
    assert_eq!(dataset.count() as usize, (total - 1) / 7);
    let mut seen = vec![0; total];
    for number in 0..dataset.count() {
        for target in dataset.sample(number).unwrap().targets {
            seen[target as usize] += 1;
        }
    }
    // The first token of all tokens is not a target, and neither are the remaining tokens at the end.
    assert!(seen.iter().all(|count| *count <= 1));
    assert_eq!(seen.iter().sum::<usize>(), dataset.count() as usize * 7);
}

#[test]
fn a_sample_is_a_function_of_its_number() {
    let lengths = [13; 20];
    let whole = over(&lengths, Some(64), &options(8));
    // The samples are the same for any number of ranks and any first sample.
    for ranks in [1, 2, 4] {
        for first in [0, 16, 40] {
            for rank in 0..ranks {
                let share = 8 / ranks;
                let numbers = first + rank * share..first + (rank + 1) * share;
                let batch = whole.batch(numbers.clone()).unwrap();
                let one_by_one = numbers.flat_map(|number| whole.sample(number).unwrap().tokens);
                assert_eq!(batch.tokens(), one_by_one.collect::<Vec<_>>());
            }
        }
    }
    let count = whole.count();
    assert!(count >= 64);
    let error = whole.sample(count).unwrap_err().to_string();
    assert_eq!(
        error,
        format!("invalid sample number {count}: expected a number below {count}")
    );
}

#[test]
fn what_does_not_suffice_is_refused() {
    let folder = TestFolder::new();
    let file = written(&folder, "x", &[5, 5, 5]);
    let with = |split: &str, part, options: &GptOptions| {
        let split = split.parse().unwrap();
        let dataset = GptDataset::new(Arc::clone(&file), &split, part, None, options, None);
        dataset.err().expect("opening fails").to_string()
    };
    let error = with("1", SplitPart::Train, &options(15));
    assert!(
        error.contains("has 15 tokens in 3 sequences") && error.contains("needs 16"),
        "{error}"
    );
    let error = with("969,30,1", SplitPart::Valid, &options(2));
    assert!(
        error.contains(
            "there are 3 documents, and a split never divides a document: give more documents"
        ),
        "{error}"
    );
    let error = with("1", SplitPart::Valid, &options(2));
    assert!(
        error.contains("the split 1,0,0 has no valid part"),
        "{error}"
    );
    let error = with("100,1", SplitPart::Valid, &options(2));
    assert!(
        error.contains("the valid part") && error.contains("0 tokens in 0"),
        "{error}"
    );
    assert!(with("1", SplitPart::Train, &options(0)).contains("sequence length 0"));
    let large = GptOptions::new(2, 1 << 32);
    assert!(with("1", SplitPart::Train, &large).contains("a seed of 4294967296 is too large"));
    let eod = GptOptions {
        eod_mask_loss: true,
        ..options(2)
    };
    assert!(with("1", SplitPart::Train, &eod).contains("eod_mask_loss requires the token"));
}

#[test]
fn a_token_beyond_the_vocabulary_is_found() {
    let with = |vocabulary| GptOptions {
        vocabulary: Some(vocabulary),
        ..options(4)
    };
    let dataset = over(&[9], None, &with(9));
    assert!((0..2).all(|number| dataset.sample(number).is_ok()));
    let dataset = over(&[9], None, &with(8));
    let errors: Vec<_> = (0..2)
        .filter_map(|number| dataset.sample(number).err())
        .map(|error| error.to_string())
        .collect();
    assert_eq!(errors.len(), 1);
    assert!(
        errors[0].contains("token 8, but the vocabulary has 8"),
        "{}",
        errors[0]
    );
}

#[test]
fn what_is_filled_up_has_no_loss() {
    let folder = TestFolder::new();
    let file = written(&folder, "x", &[3, 3]);
    let options = GptOptions {
        drop_last: false,
        ..options(4)
    };
    let part = SplitPart::Valid;
    let dataset =
        GptDataset::new(file, &"0,1".parse().unwrap(), part, None, &options, None).unwrap();
    let samples: Vec<Sample> = (0..2)
        .map(|number| dataset.sample(number).unwrap())
        .collect();
    let short = samples
        .iter()
        .find(|sample| sample.targets[1] == IGNORE)
        .expect("6 tokens are one sample and a target");
    assert_eq!(short.targets[1..], [IGNORE; 3]);
    assert_eq!(short.tokens[2..], [0; 2]);
    assert_eq!(short.padding, 2);
    assert_eq!(dataset.count(), 2);
}
