use proptest::prelude::*;

use super::{PackedSamples, pack};
use crate::fixtures::written;
use crate::gpt::{FiniteSamples, GptOptions, Split, SplitPart};
use crate::{Batch, IGNORE, Samples};
use burn_megatron_test_support::TestFolder;

fn all() -> Split {
    "1".parse().unwrap()
}

fn packed(lengths: &[usize], samples: Option<u64>, options: &GptOptions) -> PackedSamples {
    let folder = TestFolder::new();
    let file = written(&folder, "x", lengths);
    PackedSamples::new(file, &all(), SplitPart::Train, samples, options).unwrap()
}

#[test]
fn documents_stand_side_by_side() {
    // The sequences are the tokens 0 to 4, 5 to 7, and 8 to 17. The last sequence is cut after 8 tokens.
    let options = GptOptions::new(8, 1);
    let packed = packed(&[5, 3, 10], None, &options);
    assert_eq!((packed.rows(), packed.count()), (3, 3));
    assert_eq!(packed.fill_ratio(), 18.0 / 24.0);
    let mut rows: Vec<_> = (0..3).map(|row| packed.sample(row).unwrap()).collect();
    rows.sort_by_key(|row| row.tokens[0]);
    let [whole, cut, rest] = rows.try_into().unwrap();
    assert_eq!(whole.tokens, [0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(whole.targets, [1, 2, 3, 4, IGNORE, 6, 7, IGNORE]);
    assert_eq!(whole.documents, [0, 5]);
    // The rest of the sequence is in another row, but the last target of the segment is the first token of the rest.
    assert_eq!(cut.tokens, [8, 9, 10, 11, 12, 13, 14, 15]);
    assert_eq!(cut.targets, [9, 10, 11, 12, 13, 14, 15, 16]);
    assert_eq!(cut.documents, [0]);
    assert_eq!(rest.tokens, [16, 17, 0, 0, 0, 0, 0, 0]);
    assert_eq!(rest.targets[..2], [17, IGNORE]);
    assert_eq!(rest.targets[2..], [IGNORE; 6]);
    assert_eq!(rest.documents, [0, 2]);
    assert_eq!([whole.padding, cut.padding, rest.padding], [0, 0, 6]);
    let batch = Batch::new([whole, rest]).unwrap();
    assert_eq!(batch.documents, Some(vec![0, 5, 8, 10, 16]));
}

#[test]
fn the_end_of_a_document_can_have_no_loss() {
    let options = GptOptions {
        eod: Some(2),
        eod_mask_loss: true,
        ..GptOptions::new(6, 1)
    };
    let packed = packed(&[5], None, &options);
    let targets = packed.sample(0).unwrap().targets;
    assert_eq!(targets, [1, 2, IGNORE, 4, IGNORE, IGNORE]);
}

#[test]
fn epochs_differ_and_each_has_every_row() {
    let lengths: Vec<usize> = (1..60).collect();
    let packed = packed(&lengths, Some(70), &GptOptions::new(60, 3));
    let rows = packed.rows() as u64;
    assert_eq!(packed.count(), 70_u64.div_ceil(rows) * rows);
    let epoch = |epoch: u64| {
        let rows = (epoch * rows..(epoch + 1) * rows).map(|row| packed.sample(row).unwrap());
        rows.map(|row| row.tokens).collect::<Vec<_>>()
    };
    let (mut first, mut second) = (epoch(0), epoch(1));
    assert_ne!(first, second);
    first.sort();
    second.sort();
    assert_eq!(first, second);
    assert!(packed.sample(packed.count()).is_err());
    assert!(packed.fill_ratio() > 0.97, "{}", packed.fill_ratio());
}

#[test]
fn no_tokens_make_no_rows() {
    let folder = TestFolder::new();
    let file = written(&folder, "x", &[0, 0]);
    let error = PackedSamples::new(file, &all(), SplitPart::Train, None, &GptOptions::new(4, 1))
        .err()
        .unwrap()
        .to_string();
    assert!(error.contains("has 0 tokens in 2 sequences"), "{error}");
}

proptest! {
    #[test]
    fn every_token_has_one_place(lengths in prop::collection::vec(0_usize..40, 0..60), seq in 1_usize..20) {
        let rows = pack(lengths.iter().copied().enumerate(), seq);
        let mut seen: Vec<Vec<u32>> = lengths.iter().map(|length| vec![0; *length]).collect();
        for row in &rows {
            let filled: usize = row.iter().map(|segment| segment.length as usize).sum();
            prop_assert!(filled > 0 && filled <= seq);
            for segment in row {
                prop_assert!(segment.length > 0);
                let tokens = segment.offset..segment.offset + segment.length;
                tokens.for_each(|token| seen[segment.sequence as usize][token as usize] += 1);
            }
        }
        prop_assert!(seen.iter().flatten().all(|count| *count == 1));
        // Two rows that are at most half full would have been merged.
        let half = rows.iter().filter(|row| {
            2 * row.iter().map(|segment| segment.length as usize).sum::<usize>() <= seq
        });
        prop_assert!(half.count() <= 1);
    }
}
