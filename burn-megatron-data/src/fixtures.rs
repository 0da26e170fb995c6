//! Token files and expected values that the reference implementation made: see `tests/fixtures/data/make.py`.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use serde::de::DeserializeOwned;
use serde_json::Value;

use super::indexed::{IndexedDataset, IndexedDatasetBuilder, TokenType};
use burn_megatron_test_support::TestFolder;

/// Returns the path of a fixture.
pub(super) fn fixture(name: &str) -> PathBuf {
    let root = env!("CARGO_MANIFEST_DIR");
    [root, "tests/fixtures/data", name].iter().collect()
}

/// Returns the expected values of this name.
pub(super) fn cases(name: &str) -> &'static Value {
    static CASES: OnceLock<Value> = OnceLock::new();
    let cases = CASES.get_or_init(|| {
        let text = std::fs::read(fixture("cases.json")).expect("cases.json is readable");
        serde_json::from_slice(&text).expect("cases.json is JSON")
    });
    &cases[name]
}

/// Returns a value of a case.
pub(super) fn of<T: DeserializeOwned>(case: &Value, name: &str) -> T {
    let value = case[name].clone();
    serde_json::from_value(value).unwrap_or_else(|error| panic!("{name}: {error}"))
}

pub(super) fn open(name: &str) -> Arc<IndexedDataset> {
    Arc::new(IndexedDataset::open(&fixture(name)).expect("a file of the reference opens"))
}

/// Writes token files with documents of these lengths. Token `n` over all documents is `n % 50_000`.
pub(super) fn written(folder: &TestFolder, name: &str, lengths: &[usize]) -> Arc<IndexedDataset> {
    let prefix = folder.path().join(name);
    let mut writer = IndexedDatasetBuilder::create(&prefix, TokenType::I32).expect("writable");
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
    Arc::new(IndexedDataset::open(&prefix).expect("what was written opens"))
}
