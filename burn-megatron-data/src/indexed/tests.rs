use std::fs::{self, File};
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;

use proptest::prelude::*;

use super::{
    IndexHeader, IndexedDataset, IndexedDatasetBuilder, IndexedDatasetError, MalformedIndex,
    TokenType, bin_path, idx_path,
};
use crate::fixtures::{cases, fixture};
use burn_megatron_test_support::TestFolder;

fn documents() -> Vec<Vec<Vec<u32>>> {
    serde_json::from_value(cases("small").clone()).unwrap()
}

fn write(prefix: &Path, token_type: TokenType, documents: &[Vec<Vec<u32>>]) {
    let mut writer = IndexedDatasetBuilder::create(prefix, token_type).unwrap();
    for document in documents {
        for sequence in document {
            writer.sequence(sequence).unwrap();
        }
        writer.end_document();
    }
    writer.finish().unwrap();
}

fn names(folder: &TestFolder) -> Vec<String> {
    let entries = fs::read_dir(folder.path()).unwrap();
    let name = |entry: std::io::Result<fs::DirEntry>| entry.unwrap().file_name();
    let mut names: Vec<_> = entries
        .map(|entry| name(entry).into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn a_file_of_the_reference_is_read() {
    let file = IndexedDataset::open(&fixture("small")).unwrap();
    assert_eq!(file.token_type(), TokenType::U16);
    assert_eq!((file.sequences(), file.documents()), (5, 5));
    assert_eq!(file.tokens(), 11);
    for (number, document) in documents().iter().enumerate() {
        let sequences = file.document(number).unwrap();
        let read: Vec<_> = sequences
            .map(|number| file.sequence(number).unwrap())
            .collect();
        let wanted: Vec<Vec<i32>> = document
            .iter()
            .map(|sequence| sequence.iter().map(|token| *token as i32).collect())
            .collect();
        assert_eq!(read, wanted, "document {number}");
    }
    assert_eq!(file.document(5), None);
    assert_eq!(file.get(2, 1, 2).unwrap(), [6, 7]);
}

#[test]
fn what_is_written_is_what_the_reference_writes() {
    let folder = TestFolder::new();
    let prefix = folder.path().join("ours.v1");
    write(&prefix, TokenType::for_vocabulary(65_499), &documents());
    assert_eq!(names(&folder), ["ours.v1.bin", "ours.v1.idx"]);
    let equal = |path: fn(&Path) -> std::path::PathBuf| {
        let [ours, theirs] = [&prefix, &fixture("small")].map(|prefix| fs::read(path(prefix)));
        assert_eq!(ours.unwrap(), theirs.unwrap());
    };
    equal(bin_path);
    equal(idx_path);
}

#[test]
fn every_type_holds_its_tokens() {
    let folder = TestFolder::new();
    for token_type in [
        TokenType::U8,
        TokenType::I8,
        TokenType::I16,
        TokenType::U16,
        TokenType::I32,
        TokenType::I64,
    ] {
        assert_eq!(TokenType::from_code(token_type.code()), Ok(token_type));
        let most = token_type.max().min(i32::MAX as u64) as u32;
        let prefix = folder.path().join(format!("{token_type:?}"));
        write(&prefix, token_type, &[vec![vec![0, 1, most]]]);
        let file = IndexedDataset::open(&prefix).unwrap();
        assert_eq!(file.sequence(0).unwrap(), [0, 1, most as i32]);
        let bytes = fs::metadata(bin_path(&prefix)).unwrap().len();
        assert_eq!(bytes as usize, 3 * token_type.size());
    }
    assert_eq!(TokenType::for_vocabulary(65_499), TokenType::U16);
    assert_eq!(TokenType::for_vocabulary(65_500), TokenType::I32);
}

#[test]
fn a_token_that_does_not_fit_is_refused() {
    let folder = TestFolder::new();
    let prefix = folder.path().join("x");
    let mut writer = IndexedDatasetBuilder::create(&prefix, TokenType::U16).unwrap();
    let error = writer.document(&[1, 65_536]).unwrap_err().to_string();
    assert!(
        error.contains("token 65536") && error.contains("at most 65535"),
        "{error}"
    );
    writer.document(&[65_535]).unwrap();
    writer.finish().unwrap();
    assert_eq!(IndexedDataset::open(&prefix).unwrap().sequences(), 1);
}

#[test]
fn a_negative_token_is_no_token() {
    let folder = TestFolder::new();
    let prefix = folder.path().join("x");
    for (token_type, bytes) in [
        (TokenType::I32, &[1, 0, 0, 0, 255, 255, 255, 255][..]),
        (TokenType::I8, &[1, 255]),
        (
            TokenType::I64,
            &[1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0],
        ),
    ] {
        let mut writer = IndexedDatasetBuilder::replace(&prefix, token_type).unwrap();
        writer.document(&[1, 1]).unwrap();
        writer.finish().unwrap();
        fs::write(bin_path(&prefix), bytes).unwrap();
        let file = IndexedDataset::open(&prefix).unwrap();
        assert_eq!(file.get(0, 0, 1).unwrap(), [1]);
        let error = file.sequence(0).unwrap_err();
        assert!(
            matches!(error, IndexedDatasetError::BadToken { sequence: 0, .. }),
            "{error}"
        );
    }
}

#[test]
fn a_writer_that_is_dropped_leaves_nothing() {
    let folder = TestFolder::new();
    let prefix = folder.path().join("x");
    let mut writer = IndexedDatasetBuilder::create(&prefix, TokenType::I32).unwrap();
    writer.document(&[1; 400_000]).unwrap();
    assert!(!bin_path(&prefix).exists() && !idx_path(&prefix).exists());
    assert_eq!(names(&folder).len(), 1);
    drop(writer);
    assert_eq!(names(&folder), [] as [&str; 0]);
}

#[test]
fn what_is_there_is_kept_unless_it_is_to_be_replaced() {
    let folder = TestFolder::new();
    let prefix = folder.path().join("x");
    let early = IndexedDatasetBuilder::create(&prefix, TokenType::I32).unwrap();
    write(&prefix, TokenType::U8, &[vec![vec![1]]]);
    let refused = IndexedDatasetBuilder::create(&prefix, TokenType::I32)
        .err()
        .unwrap();
    assert!(
        matches!(refused, IndexedDatasetError::Exists(_)),
        "{refused}"
    );
    let late = early.finish().unwrap_err();
    assert!(matches!(late, IndexedDatasetError::Exists(_)), "{late}");
    assert_eq!(
        IndexedDataset::open(&prefix).unwrap().sequence(0).unwrap(),
        [1]
    );

    let mut writer = IndexedDatasetBuilder::replace(&prefix, TokenType::U16).unwrap();
    writer.document(&[2, 3]).unwrap();
    writer.finish().unwrap();
    assert_eq!(
        IndexedDataset::open(&prefix).unwrap().sequence(0).unwrap(),
        [2, 3]
    );
    assert_eq!(names(&folder), ["x.bin", "x.idx"]);
}

#[test]
fn files_are_joined() {
    let folder = TestFolder::new();
    let path = |name: &str| folder.path().join(name);
    let small = IndexedDataset::open(&fixture("small")).unwrap();
    let mut writer = IndexedDatasetBuilder::create(&path("joined"), TokenType::U16).unwrap();
    writer.append(&small).unwrap();
    writer.document(&[7]).unwrap();
    writer.append(&small).unwrap();
    writer.finish().unwrap();
    let twice = [documents(), vec![vec![vec![7]]], documents()].concat();
    write(&path("direct"), TokenType::U16, &twice);
    for path_of in [bin_path, idx_path] {
        let [joined, direct] = ["joined", "direct"].map(|name| fs::read(path_of(&path(name))));
        assert_eq!(joined.unwrap(), direct.unwrap());
    }

    let mut other = IndexedDatasetBuilder::create(&path("other"), TokenType::I32).unwrap();
    let error = other.append(&small).unwrap_err();
    assert!(
        matches!(error, IndexedDatasetError::OtherType { .. }),
        "{error}"
    );
    other.sequence(&[1]).unwrap();
    let error = other.finish().unwrap_err();
    assert!(
        matches!(
            error,
            IndexedDatasetError::OpenDocument { sequences: 1, .. }
        ),
        "{error}"
    );
    assert!(!path("other.bin").exists());
}

#[test]
fn no_tokens_at_all_are_a_file_too() {
    let folder = TestFolder::new();
    let prefix = folder.path().join("x");
    write(&prefix, TokenType::U16, &[]);
    let file = IndexedDataset::open(&prefix).unwrap();
    assert_eq!(
        (file.sequences(), file.documents(), file.tokens()),
        (0, 0, 0)
    );
    let error = file.sequence(0).unwrap_err();
    assert!(
        matches!(error, IndexedDatasetError::NoSuchSequence { .. }),
        "{error}"
    );
}

#[test]
fn tokens_past_the_end_of_a_sequence_are_refused() {
    let file = IndexedDataset::open(&fixture("small")).unwrap();
    for (offset, length) in [(0, 4), (3, 1), (4, 0), (usize::MAX, 2)] {
        let error = file.get(0, offset, length).unwrap_err();
        assert!(
            matches!(error, IndexedDatasetError::PastEnd { length: 3, .. }),
            "{error}"
        );
    }
    assert_eq!(file.get(0, 3, 0).unwrap(), [] as [i32; 0]);
}

/// A sparse .bin file of more than 4 GiB.
#[test]
fn tokens_beyond_4_gib_are_found() {
    let folder = TestFolder::new();
    let prefix = folder.path().join("x");
    let far: i64 = (4 << 30) + 10;
    let mut index = index_of(TokenType::U16, &[3, 2], &[0, far], &[0, 2]);
    let mut bin = File::create(bin_path(&prefix)).unwrap();
    bin.write_all(&[1, 0, 2, 0, 3, 0]).unwrap();
    bin.seek(SeekFrom::Start(far as u64)).unwrap();
    bin.write_all(&[4, 0, 5, 0]).unwrap();
    drop(bin);
    fs::write(idx_path(&prefix), &index).unwrap();
    let file = IndexedDataset::open(&prefix).unwrap();
    assert_eq!(file.sequence(0).unwrap(), [1, 2, 3]);
    assert_eq!(file.sequence(1).unwrap(), [4, 5]);
    assert_eq!(file.get(1, 1, 1).unwrap(), [5]);
    file.fingerprint();

    // One more token would exceed the end of the file.
    index[34 + 4] = 3;
    fs::write(idx_path(&prefix), &index).unwrap();
    let error = IndexedDataset::open(&prefix).unwrap_err().to_string();
    assert!(
        error.contains("sequence 1 has 3 tokens from byte 4294967306"),
        "{error}"
    );
    assert!(
        error.contains("4294967310 bytes") && error.contains("x.idx"),
        "{error}"
    );
}

/// Returns the bytes of an index.
fn index_of(
    token_type: TokenType,
    lengths: &[i32],
    pointers: &[i64],
    documents: &[i64],
) -> Vec<u8> {
    let mut bytes = b"MMIDIDX\0\0".to_vec();
    bytes.extend(1_u64.to_le_bytes());
    bytes.push(token_type.code());
    bytes.extend((lengths.len() as u64).to_le_bytes());
    bytes.extend((documents.len() as u64).to_le_bytes());
    bytes.extend(lengths.iter().flat_map(|length| length.to_le_bytes()));
    let longs = pointers.iter().chain(documents);
    bytes.extend(longs.flat_map(|long| long.to_le_bytes()));
    bytes
}

/// Parses and validates an index like opening the files.
fn check(index: &[u8], bin_bytes: u64) -> Result<u64, MalformedIndex> {
    IndexHeader::parse(index)?.check(index, bin_bytes)
}

#[test]
fn a_broken_index_says_what_is_wrong() {
    let whole = || index_of(TokenType::U16, &[3, 2], &[0, 6], &[0, 1, 2]);
    assert_eq!(check(&whole(), 10), Ok(5));
    let wrong = |lengths: &[i32], pointers: &[i64], documents: &[i64], part: &str| {
        let error = check(&index_of(TokenType::U16, lengths, pointers, documents), 10)
            .unwrap_err()
            .to_string();
        assert!(error.contains(part), "'{part}' in '{error}'");
    };
    wrong(&[3, -2], &[0, 6], &[0, 2], "sequence 1 has a length of -2");
    wrong(
        &[3, 3],
        &[0, 6],
        &[0, 2],
        "sequence 1 has 3 tokens from byte 6 on",
    );
    wrong(&[3, 2], &[0, -2], &[0, 2], "from byte -2 on");
    wrong(
        &[3, 2],
        &[0, i64::MAX],
        &[0, 2],
        "from byte 9223372036854775807 on",
    );
    wrong(&[3, 2], &[0, 6], &[1, 2], "document index 0 is 1");
    wrong(&[3, 2], &[0, 6], &[0, 2, 1, 2], "document index 2 is 1");
    wrong(&[3, 2], &[0, 6], &[0, 3, 2], "document index 1 is 3");
    wrong(&[3, 2], &[0, 6], &[0, 1], "document index 1 is 1");
    wrong(&[3, 2], &[0, 6], &[], "no document indices");

    let with = |at: usize, byte: u8| {
        let mut index = whole();
        index[at] = byte;
        check(&index, 10).unwrap_err()
    };
    assert_eq!(with(0, b'X'), MalformedIndex::Magic);
    assert_eq!(with(9, 2), MalformedIndex::Version(2));
    assert_eq!(with(17, 6), MalformedIndex::FloatTokens { code: 6 });
    assert_eq!(with(17, 9), MalformedIndex::Code { code: 9 });
    assert!(matches!(
        with(18, 3),
        MalformedIndex::Size { needed: 94, .. }
    ));
    // The counts are near 2^64. No memory is allocated for them.
    let mut index = whole();
    index[18..34].fill(255);
    let error = check(&index, 10).unwrap_err();
    assert!(matches!(error, MalformedIndex::Size { .. }), "{error}");
    for length in 0..whole().len() {
        check(&whole()[..length], 10).unwrap_err();
    }

    let modes = |modes: [u8; 2]| check(&[whole(), modes.to_vec()].concat(), 10);
    assert_eq!(modes([0, 0]), Ok(5));
    let other = MalformedIndex::Mode {
        sequence: 1,
        mode: 1,
    };
    assert_eq!(modes([0, 1]), Err(other));
}

#[test]
fn files_that_are_missing_or_cut_are_named() {
    let folder = TestFolder::new();
    let prefix = folder.path().join("x");
    let error = || IndexedDataset::open(&prefix).unwrap_err().to_string();
    assert!(error().contains("x.idx'"), "{}", error());
    fs::copy(idx_path(&fixture("small")), idx_path(&prefix)).unwrap();
    assert!(
        error().contains("there is no") && error().contains("x.bin'"),
        "{}",
        error()
    );
    let bin = fs::read(bin_path(&fixture("small"))).unwrap();
    fs::write(bin_path(&prefix), &bin[..bin.len() - 1]).unwrap();
    assert!(
        error().contains("sequence 4") && error().contains("21 bytes"),
        "{}",
        error()
    );
    fs::write(bin_path(&prefix), &bin).unwrap();
    let idx = fs::read(idx_path(&prefix)).unwrap();
    fs::write(idx_path(&prefix), &idx[..idx.len() - 1]).unwrap();
    assert!(
        error().contains("141 bytes") && error().contains("x.idx'"),
        "{}",
        error()
    );
}

#[test]
fn the_fingerprint_is_of_what_is_in_the_files() {
    let folder = TestFolder::new();
    let fingerprint = |name: &str, tokens: &[u32]| {
        let prefix = folder.path().join(name);
        write(&prefix, TokenType::U16, &[vec![tokens.to_vec()]]);
        IndexedDataset::open(&prefix).unwrap().fingerprint()
    };
    let first = fingerprint("a", &[1, 2, 3]);
    assert_eq!(first, fingerprint("b", &[1, 2, 3]));
    assert_ne!(first, fingerprint("c", &[1, 2, 4]));
    let mut long = vec![5; 2_000_000];
    let of_long = fingerprint("d", &long);
    *long.last_mut().unwrap() = 6;
    assert_ne!(of_long, fingerprint("e", &long));
}

proptest! {
    #[test]
    fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200), bin in any::<u64>()) {
        let _ = check(&bytes, bin);
    }

    #[test]
    fn a_changed_index_never_reads_past_the_tokens(
        changes in prop::collection::vec((17_usize..150, any::<u8>()), 1..4),
    ) {
        let lengths = [3, 2, 0, 5];
        let mut index = index_of(TokenType::U16, &lengths, &[0, 6, 10, 10], &[0, 1, 3, 4]);
        for (at, byte) in changes {
            let at = at % index.len();
            index[at] = byte;
        }
        if let Ok(header) = IndexHeader::parse(&index)
            && let Ok(tokens) = header.check(&index, 20)
        {
            // Sequences may overlap, but each sequence lies within the file.
            prop_assert!(tokens <= header.sequences as u64 * 20);
        }
    }
}
