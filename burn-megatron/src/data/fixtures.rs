//! Token files and cases that the reference made, see `tests/fixtures/data/make.py`.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use serde::de::DeserializeOwned;
use serde_json::Value;

use super::indexed::{IndexedFile, IndexedWriter, TokenType};
use super::test_folder::TestFolder;

/// A file of the fixtures.
pub(super) fn fixture(name: &str) -> PathBuf {
    let root = env!("CARGO_MANIFEST_DIR");
    [root, "tests/fixtures/data", name].iter().collect()
}

/// What the reference made of something.
pub(super) fn cases(name: &str) -> &'static Value {
    static CASES: OnceLock<Value> = OnceLock::new();
    let cases = CASES.get_or_init(|| {
        let text = std::fs::read(fixture("cases.json")).expect("the cases are there");
        serde_json::from_slice(&text).expect("they are JSON")
    });
    &cases[name]
}

/// A value of a case.
pub(super) fn of<T: DeserializeOwned>(case: &Value, name: &str) -> T {
    let value = case[name].clone();
    serde_json::from_value(value).unwrap_or_else(|error| panic!("{name}: {error}"))
}

pub(super) fn open(name: &str) -> Arc<IndexedFile> {
    Arc::new(IndexedFile::open(&fixture(name)).expect("a file of the reference opens"))
}

/// Token files of documents of these lengths; token `n` of all of them is `n % 50_000`.
pub(super) fn written(folder: &TestFolder, name: &str, lengths: &[usize]) -> Arc<IndexedFile> {
    let prefix = folder.path().join(name);
    let mut writer = IndexedWriter::create(&prefix, TokenType::I32).expect("writable");
    let mut next = 0..;
    for length in lengths {
        let tokens: Vec<u32> = next
            .by_ref()
            .take(*length)
            .map(|x: u32| x % 50_000)
            .collect();
        writer.document(&tokens).expect("writable");
    }
    writer.finish().expect("writable");
    Arc::new(IndexedFile::open(&prefix).expect("what was written opens"))
}
