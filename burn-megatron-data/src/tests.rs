use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use proptest::prelude::*;

use burn_megatron_kernels::embedding::SortedLookups;

use super::documents::DocumentEnd;
use super::split::{choose_held_out, hash, split_bytes};
use super::{Batch, DataError, Dataset, Sample, Samples, TextData, TextPart};
use burn_megatron_test_support::TestFolder;

mod batch;

/// Returns a folder with one file of `content`.
fn one_file(content: &[u8]) -> (TestFolder, TextData) {
    let folder = TestFolder::new();
    folder.write("text", content);
    let text = TextData::open(&folder.path().join("text")).expect("a file with bytes opens");
    (folder, text)
}

fn error(result: Result<TextData, DataError>) -> String {
    result.expect_err("opening fails").to_string()
}

#[test]
fn a_single_file_holds_out_its_last_tenth() {
    let content: Vec<u8> = (0..100).collect();
    let (_folder, text) = one_file(&content);
    assert_eq!(text.training_bytes(), &content[..90]);
    assert_eq!(text.held_out_bytes(), &content[90..]);
}

#[test]
fn a_folder_is_searched_in_order_and_without_what_tools_made() {
    let folder = TestFolder::new();
    // All files have the same size, so exactly one of ten files is held out.
    for i in 0..9 {
        folder.write(&format!("b/{i}.md"), format!("file {i}"));
    }
    folder.write("a.RS", "a file");
    folder.write("empty.md", "");
    for skipped in [
        ".git/x.md",
        "target/x.md",
        "b/node_modules/x.md",
        "b/runs/x.txt",
        "x.json",
    ] {
        folder.write(skipped, "skipped");
    }
    let text = TextData::open(folder.path()).expect("the folder opens");
    assert_eq!(text.held_out_bytes().len(), 6);

    let training: Vec<&[u8]> = text.training_bytes().split(|&byte| byte == 0).collect();
    assert_eq!(training.len(), 9);
    assert!(
        training.is_sorted(),
        "the order is that of the relative paths"
    );
    let all: BTreeSet<&[u8]> = training
        .into_iter()
        .chain([text.held_out_bytes()])
        .collect();
    let expected: Vec<String> = ["a file".to_string()]
        .into_iter()
        .chain((0..9).map(|i| format!("file {i}")))
        .collect();
    assert_eq!(all, expected.iter().map(String::as_bytes).collect());

    let again = TextData::open(folder.path()).expect("the folder opens again");
    assert_eq!(
        (again.training_bytes(), again.held_out_bytes()),
        (text.training_bytes(), text.held_out_bytes())
    );

    let json = TextData::open_with(folder.path(), &["json"]).expect("one file of another kind");
    assert_eq!(json.training_bytes(), b"skippe");
}

#[test]
fn a_folder_named_like_a_skipped_one_can_be_opened_itself() {
    let folder = TestFolder::new();
    folder.write("runs/a.md", "0123456789");
    assert!(TextData::open(&folder.path().join("runs")).is_ok());
}

#[cfg(unix)]
#[test]
fn links_are_not_followed_below_the_folder() {
    let folder = TestFolder::new();
    folder.write("inside/a.md", "0123456789");
    folder.write("outside.md", "secret");
    let inside = folder.path().join("inside");
    std::os::unix::fs::symlink("../outside.md", inside.join("link.md")).expect("links exist");
    std::os::unix::fs::symlink("..", inside.join("loop")).expect("links exist");
    let text = TextData::open(&inside).expect("the folder opens");
    assert_eq!(
        (text.training_bytes(), text.held_out_bytes()),
        (&b"012345678"[..], &b"9"[..])
    );
}

#[test]
fn what_cannot_be_read_is_named() {
    let folder = TestFolder::new();
    folder.write("empty", "");
    folder.write("only/empty.md", "");
    folder.write("other/a.json", "{}");
    let path = |name: &str| folder.path().join(name);

    assert!(matches!(
        TextData::open(&path("none")),
        Err(DataError::Missing { .. })
    ));
    assert!(matches!(
        TextData::open(&path("empty")),
        Err(DataError::Empty { documents: 1, .. })
    ));
    assert!(matches!(
        TextData::open(&path("only")),
        Err(DataError::Empty { documents: 1, .. })
    ));
    let message = error(TextData::open(&path("other")));
    assert!(message.contains(".rs, .md, .txt"), "{message}");
    assert!(error(TextData::open(&path("none"))).contains("none"));
    #[cfg(unix)]
    assert!(matches!(
        TextData::open(Path::new("/dev/null")),
        Err(DataError::NotText { .. })
    ));
}

#[test]
fn a_text_shorter_than_the_sequence_says_what_is_there_and_what_is_needed() {
    let (_folder, text) = one_file(&[b'x'; 100]);
    assert!(text.samples(89, 0).is_ok());
    assert!(text.held_out(9, 1).is_ok());

    let message = text
        .samples(90, 0)
        .err()
        .expect("90 bytes are too few")
        .to_string();
    for part in [
        "training",
        "has 90 bytes",
        "length of 90",
        "at least 91",
        "at most 89",
    ] {
        assert!(message.contains(part), "'{part}' in '{message}'");
    }
    let refused = text.held_out(10, 1);
    assert!(matches!(
        refused,
        Err(DataError::TooShort {
            part: TextPart::HeldOut,
            bytes: 10,
            needed: 11,
            ..
        })
    ));
    assert!(matches!(text.samples(0, 0), Err(DataError::ZeroLength)));
    assert!(text.samples(usize::MAX, 0).is_err());
}

#[test]
fn one_byte_is_a_text_that_no_length_fits() {
    let (_folder, text) = one_file(b"x");
    let message = text
        .samples(1, 0)
        .err()
        .expect("0 bytes are too few")
        .to_string();
    assert!(message.contains("no sequence length fits"), "{message}");
}

#[test]
fn a_window_is_a_function_of_seed_and_sample() {
    let content: Vec<u8> = (0..=255).cycle().take(5000).collect();
    let (_folder, text) = one_file(&content);
    let sampler = text.samples(16, 7).expect("the text is long enough");
    for first in (0..160).step_by(8) {
        let batch = sampler.batch(first..first + 8).expect("8 rows");
        let halves = [
            sampler.batch(first..first + 4),
            sampler.batch(first + 4..first + 8),
        ]
        .map(Result::unwrap);
        assert_eq!(
            batch.tokens(),
            [halves[0].tokens(), halves[1].tokens()].concat()
        );
        assert_eq!(
            batch.targets,
            [&halves[0].targets[..], &halves[1].targets[..]].concat()
        );
        for sample in first..first + 8 {
            let window = sampler.sample(sample).unwrap();
            assert_eq!(window.tokens.len(), 16);
            assert_eq!(window.tokens[1..], window.targets[..15]);
        }
    }
    let other = text.samples(16, 8).expect("the text is long enough");
    assert_ne!(sampler.batch(0..8).unwrap(), other.batch(0..8).unwrap());
    assert_ne!(sampler.batch(0..8).unwrap(), sampler.batch(8..16).unwrap());
}

#[test]
fn the_windows_of_a_seed_do_not_change_between_releases() {
    let content: Vec<u8> = (0..=255).take(256).collect();
    let (_folder, text) = one_file(&content);
    let sampler = text.samples(8, 42).expect("the text is long enough");
    let starts: Vec<usize> = (0..6).map(|sample| sampler.start(sample)).collect();
    assert_eq!(starts, GOLDEN_STARTS);
}

/// Recomputed outside of this crate from the published constants of SplitMix64.
const GOLDEN_STARTS: [usize; 6] = [76, 211, 99, 218, 63, 203];

#[test]
fn every_start_is_reached_and_about_equally_often() {
    // Of 111 bytes, 100 are training bytes. Windows of 10 tokens have 90 start positions.
    let content: Vec<u8> = (0..111).collect();
    let (_folder, text) = one_file(&content);
    let sampler = text.samples(10, 1).expect("the text is long enough");
    assert_eq!(sampler.starts(), 90);
    let mut counts = vec![0_u32; sampler.starts()];
    for sample in 0..90_000 {
        counts[sampler.start(sample)] += 1;
    }
    // 1000 windows are expected at each start position. Chi-squared with 89 degrees of freedom exceeds 150 with a
    // probability of about 1 in 10^4.
    let chi_squared: f64 = counts
        .iter()
        .map(|&n| (f64::from(n) - 1000.0).powi(2) / 1000.0)
        .sum();
    assert!(chi_squared < 150.0, "{chi_squared}: {counts:?}");
}

#[test]
fn held_out_windows_are_spread_and_share_no_target() {
    let content: Vec<u8> = (0..250).cycle().take(1010).collect();
    let (_folder, text) = one_file(&content);
    let held_out = text.held_out_bytes(); // 101 bytes: 10 windows of 10 tokens, and one last target
    let all = text.held_out(10, 99).expect("the text is long enough");
    assert_eq!(all.len(), 10);
    let targets: Vec<u8> = all
        .iter()
        .flat_map(|window| &window.targets)
        .map(|target| *target as u8)
        .collect();
    assert_eq!(targets, held_out[1..]);

    let three = text.held_out(10, 3).expect("the text is long enough");
    assert_eq!(three, [0, 3, 6].map(|i: usize| all[i].clone()));
    assert_eq!(text.held_out(10, 0).expect("none is allowed"), []);
}

proptest! {
    #[test]
    fn both_parts_have_a_document_and_the_split_ignores_their_order(
        sizes in prop::collection::vec(1_usize..2000, 2..60),
        rotation in 0_usize..60,
    ) {
        let documents = |order: &[usize]| -> Vec<DocumentEnd> {
            let mut end = 0;
            let document = |&i: &usize| {
                end += sizes[i];
                DocumentEnd { hash: hash(format!("{i}.md").as_bytes()), end }
            };
            order.iter().map(document).collect()
        };
        let mut order: Vec<usize> = (0..sizes.len()).collect();
        let chosen = choose_held_out(&documents(&order));
        prop_assert!(chosen.contains(&true) && chosen.contains(&false));

        order.rotate_left(rotation % sizes.len());
        let rotated = choose_held_out(&documents(&order));
        for (place, &i) in order.iter().enumerate() {
            prop_assert_eq!(rotated[place], chosen[i]);
        }

        // The held-out share differs from a tenth by at most one document.
        let total: usize = sizes.iter().sum();
        let held_out: usize = sizes.iter().zip(&chosen).filter(|(_, c)| **c).map(|(s, _)| s).sum();
        let smallest = sizes.iter().min().copied().unwrap_or(0);
        prop_assert!(held_out <= (2 * (total / 10)).max(smallest));
        prop_assert!(held_out.abs_diff(total / 10) <= (total / 10).max(smallest));
    }

    #[test]
    fn splitting_bytes_loses_none(bytes in prop::collection::vec(any::<u8>(), 1..300)) {
        let (training, held_out) = split_bytes(&bytes, |_| true);
        prop_assert_eq!(held_out.len(), (bytes.len() / 10).max(1));
        prop_assert_eq!([training, held_out].concat(), bytes);
    }
}

#[test]
fn attention_can_stop_at_the_ends_of_files() {
    let folder = TestFolder::new();
    for (name, content) in [
        ("a.txt", "one"),
        ("b.txt", "two"),
        ("c.txt", "three and more"),
    ] {
        folder.write(name, content.as_bytes());
    }
    let text = TextData::open(folder.path()).unwrap();
    let starts = |text: &TextData| text.held_out(2, 3).unwrap()[0].documents.clone();
    assert!(starts(&text).is_empty());
    let text = text.with_reset_attention(true);
    assert_eq!(starts(&text), [0]);
    let length = text.training_bytes().len() - 1;
    let sample = text.samples(length, 1).unwrap().sample(0).unwrap();
    let end = sample.tokens.iter().position(|byte| *byte == 0).unwrap();
    assert_eq!(sample.documents, [0, end + 1]);
}

#[test]
fn a_batch_has_the_sorted_lookups_of_its_tokens() {
    let sample = |tokens: &[i32]| Sample {
        tokens: tokens.to_vec(),
        targets: tokens.to_vec(),
        documents: vec![],
        padding: 0,
    };
    let batch = Batch::new([sample(&[4, 1]), sample(&[1, 4])]).unwrap();
    assert_eq!(*batch.sorted(), Arc::new(SortedLookups::new(&[4, 1, 1, 4])));
}
