//! Batches: their rows, documents, padding and parts.

use super::super::{Batch, DataError, IGNORE, Padding, Sample};
use burn_megatron::mesh::ContextSplit;

fn sample(tokens: &[i32], targets: &[i32], documents: &[usize]) -> Sample {
    Sample {
        tokens: tokens.to_vec(),
        targets: targets.to_vec(),
        documents: documents.to_vec(),
        padding: 0,
    }
}

#[test]
fn a_batch_refuses_no_rows_and_unequal_rows() {
    let two = sample(&[97, 98], &[98, IGNORE], &[]);
    let batch = Batch::new([two.clone(), two.clone()]).expect("equal rows");
    assert_eq!((batch.rows, batch.seq, batch.counted()), (2, 2, 2));
    assert_eq!(batch.tokens(), [97, 98, 97, 98]);
    assert_eq!(batch.targets, [98, -1, 98, -1]);

    assert!(matches!(Batch::new([]), Err(DataError::NoRows)));
    let refused = Batch::new([two, sample(&[97], &[98], &[])]);
    assert!(matches!(
        refused,
        Err(DataError::UnequalRows {
            row: 1,
            length: 1,
            seq: 2
        })
    ));
    assert!(Batch::new([sample(&[97, 98], &[98], &[])]).is_err());
}

#[test]
fn documents_are_counted_over_all_rows() {
    let (whole, cut) = (
        sample(&[1; 4], &[2; 4], &[]),
        sample(&[1; 4], &[2; 4], &[0, 3]),
    );
    assert_eq!(
        Batch::new([whole.clone(), whole.clone()])
            .unwrap()
            .documents,
        None
    );
    let batch = Batch::new([whole, cut.clone(), cut]).unwrap();
    assert_eq!(batch.documents, Some(vec![0, 4, 7, 8, 11, 12]));
}

/// Documents that are split separately are padded to complete chunks. Padding has no targets, and tokens stay in their
/// rows.
#[test]
fn documents_are_padded_to_be_split() {
    let sample = Sample {
        tokens: (1..9).collect(),
        targets: (2..10).collect(),
        documents: vec![0, 5],
        padding: 0,
    };
    let part = |rank| {
        let batch = Batch::new([sample.clone()]).unwrap();
        let split = ContextSplit::ZigzagPerDocument;
        batch.in_context(split, (rank, 2), 1).unwrap()
    };
    let parts = [0, 1].map(part);
    assert_eq!(parts[0].tokens(), [1, 2, 0, 0, 6, 0]);
    assert_eq!(parts[1].tokens(), [3, 4, 5, 0, 7, 8]);
    assert_eq!(parts[0].targets, [2, 3, IGNORE, IGNORE, 7, IGNORE]);
    assert_eq!(parts[1].targets, [4, 5, 6, IGNORE, 8, 9]);
    assert!(parts.iter().all(|part| part.counted_of_rows() == 8));
    assert!(
        parts
            .iter()
            .all(|part| part.padding() == Padding { added: 4, all: 12 })
    );
    assert_eq!(parts.iter().map(Batch::counted).sum::<u64>(), 8);
    let real = parts.each_ref().map(|part| part.real().unwrap());
    let is_real = |of: &str| of.bytes().map(|byte| byte == b'x').collect::<Vec<_>>();
    assert_eq!(real[0].is_real(), is_real("xx..x."));
    assert_eq!(real[1].is_real(), is_real("xxx.xx"));
    assert!(real.iter().all(|real| real.in_rows() == [8]));
}

/// Padding tokens of samples stay padding after the batch is changed or split.
#[test]
fn a_batch_knows_the_padding_of_its_samples() {
    let sample = |padding: usize| Sample {
        tokens: (1..9).collect(),
        targets: (2..10).collect(),
        documents: vec![0, 4],
        padding,
    };
    let is_real = |of: &str| of.bytes().map(|byte| byte == b'x').collect::<Vec<_>>();
    assert_eq!(Batch::new([sample(0), sample(0)]).unwrap().real(), None);
    let batch = Batch::new([sample(0), sample(5)]).unwrap();
    let real = batch.real().unwrap().clone();
    assert_eq!(real.is_real(), is_real("xxxxxxxxxxx....."));
    assert_eq!(real.in_rows(), [8, 3]);
    let striped = batch.clone().in_context(ContextSplit::Striped, (1, 2), 1);
    let striped = striped.unwrap().real().unwrap().clone();
    assert_eq!(striped.is_real(), is_real("xxxxx..."));
    assert_eq!(striped.in_rows(), [8, 3]);
    let moved = batch
        .documents_in_context(&[8..12, 0..4], (0, 1), 1)
        .unwrap();
    assert_eq!(moved.real().unwrap().is_real(), is_real("xxx.xxxx"));
    let short = batch.clone().in_rows_of(4);
    assert_eq!(short.real().unwrap().in_rows(), [4, 4, 3, 0]);
    // At a depth of multi-token prediction, tokens are also padding if the later token is not a real token of the same
    // document.
    let further = batch.with_further_tokens(1);
    let further = further.further()[0].real().unwrap();
    assert_eq!(further.is_real(), is_real("xxx.xxx.xx......"));
    assert_eq!(further.in_rows(), [6, 2]);
}

/// Documents of different rows are packed into one row, and each document is split over the ranks that share it.
#[test]
fn documents_of_a_batch_are_shared() {
    let sample = |first: i32, documents| Sample {
        tokens: (first..first + 8).collect(),
        targets: (first + 1..first + 9).collect(),
        documents,
        padding: 0,
    };
    let batch = Batch::new([sample(1, vec![0, 5]), sample(11, vec![0, 8])]).unwrap();
    let documents = batch.document_ranges();
    assert_eq!(documents, [0..5, 5..8, 8..16]);
    let chosen = [documents[2].clone(), documents[1].clone()];
    let part = |rank| batch.documents_in_context(&chosen, (rank, 2), 1).unwrap();
    let parts = [0, 1].map(part);
    assert_eq!(parts[0].tokens(), [11, 12, 17, 18, 6, 0]);
    assert_eq!(parts[1].tokens(), [13, 14, 15, 16, 7, 8]);
    assert_eq!(parts[0].targets, [12, 13, 18, 19, 7, IGNORE]);
    assert_eq!(parts[1].targets, [14, 15, 16, 17, 8, 9]);
    assert!(parts.iter().all(|part| part.counted_of_rows() == 11));
    assert_eq!(parts[0].padding(), Padding { added: 1, all: 12 });
    // A single rank also has a shard. Its number of tokens is a multiple of the number of tensor ranks. No document
    // consists only of padding.
    let whole = |documents: &[_]| batch.documents_in_context(documents, (0, 1), 4).unwrap();
    let short = whole(&documents[1..2]);
    assert_eq!((short.tokens(), short.counted()), (&[6, 7, 8, 0][..], 3));
    assert_eq!(short.shard.unwrap().ranks(), 1);
    assert_eq!((whole(&[]).seq, whole(&[]).counted()), (4, 0));
}

/// The tokens of each depth are from the same document, even if they are in the part of another rank.
#[test]
fn further_tokens_stay_in_their_document() {
    let sample = Sample {
        tokens: (1..9).collect(),
        targets: (2..10).collect(),
        documents: vec![0, 5],
        padding: 0,
    };
    let batch = || Batch::new([sample.clone()]).unwrap();
    let whole = batch().with_further_tokens(2);
    let [first, second] = whole.further() else {
        panic!("two depths")
    };
    assert_eq!(first.tokens(), [2, 3, 4, 5, 0, 7, 8, 0]);
    assert_eq!(first.targets(), [3, 4, 5, 6, IGNORE, 8, 9, IGNORE]);
    assert_eq!(second.tokens(), [3, 4, 5, 0, 0, 8, 0, 0]);
    assert_eq!(
        second.targets(),
        [4, 5, 6, IGNORE, IGNORE, 9, IGNORE, IGNORE]
    );
    // A depth that is larger than the length of a document has no tokens.
    let long = batch().with_further_tokens(4);
    assert_eq!(long.further()[3].tokens(), [5, 0, 0, 0, 0, 0, 0, 0]);
    let rows = whole.in_rows_of(4).with_further_tokens(1);
    assert_eq!(rows.further()[0].tokens(), [2, 3, 4, 0, 0, 7, 8, 0]);
    let part = |rank| {
        let split = ContextSplit::ZigzagPerDocument;
        let batch = batch().with_further_tokens(1);
        batch.in_context(split, (rank, 2), 1).unwrap()
    };
    let [one, other] = [0, 1].map(part);
    let (one, other) = (&one.further()[0], &other.further()[0]);
    assert_eq!(one.tokens(), [2, 3, 0, 0, 7, 0]);
    assert_eq!(other.tokens(), [4, 5, 0, 0, 8, 0]);
    assert_eq!(one.targets(), [3, 4, IGNORE, IGNORE, 8, IGNORE]);
    assert_eq!(other.targets(), [5, 6, IGNORE, IGNORE, 9, IGNORE]);
}

#[test]
fn rows_that_cannot_be_split_are_refused() {
    let sample = Sample {
        tokens: vec![1; 10],
        targets: vec![2; 10],
        documents: vec![],
        padding: 0,
    };
    let batch = Batch::new([sample]).unwrap();
    let error = batch.in_context(ContextSplit::Zigzag, (0, 2), 1);
    insta::assert_snapshot!(
        error.unwrap_err(),
        @"a sequence of 10 tokens cannot be split over context = 2 ranks by the zigzag split: expected a multiple of 4, \
          such as 8 or 12"
    );
}
