use std::fs;
use std::path::{Path, PathBuf};

use super::*;
use crate::flags::parse_text;

/// The flags as they are typed.
fn convert(flags: &str) -> Result<ExitCode, Error> {
    run(&parse_text(flags)?)
}

fn fixture(name: &str) -> PathBuf {
    let fixtures = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tests/fixtures/hf");
    Path::new(fixtures).join(name)
}

#[test]
fn there_and_back() {
    let folder = std::env::temp_dir().join(format!("convert-{}", std::process::id()));
    let at = |name: &str| folder.join(name).display().to_string();
    let (source, checkpoint, back) = (fixture("llama3"), at("checkpoint"), at("back"));
    convert(&format!("--from hf {} --to {checkpoint}", source.display())).unwrap();
    convert(&format!(
        "--from checkpoint {checkpoint} --to {back} --max-shard-size 30KB"
    ))
    .unwrap();
    let (a, b) = (
        HfFolder::open(&source).unwrap(),
        HfFolder::open(&back).unwrap(),
    );
    assert_eq!(a.config(), b.config());
    for key in a.keys() {
        let slice = burn_megatron::checkpoint::TensorSlice::whole(&a.tensor(&key).unwrap().shape);
        assert_eq!(a.read(&key, &slice).unwrap(), b.read(&key, &slice).unwrap());
    }
    assert!(
        Path::new(&back)
            .join("model.safetensors.index.json")
            .is_file()
    );
    let refusal = |flags: String| convert(&flags).unwrap_err().to_string();
    let error = refusal(format!("--from checkpoint {checkpoint} --to {back}"));
    assert!(
        error.starts_with("cannot write") && error.contains("back"),
        "{error}"
    );
    let error = refusal(format!("--from hf {} --to {checkpoint}", source.display()));
    assert!(
        error.starts_with("cannot write") && error.contains("checkpoint"),
        "{error}"
    );
    let error = refusal(format!("--from hf {back} --to {} --dtype bf16", at("x")));
    assert_eq!(error, "--dtype applies to --from checkpoint only");
    let error = refusal(format!("--from gguf {back} --to {}", at("x")));
    assert_eq!(error, "invalid --from gguf: expected hf or checkpoint");
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn sizes_have_units() {
    let sizes = ["7", "7B", "2KB", "3MB", "5GB"].map(|text| bytes(text).unwrap());
    assert_eq!(sizes, [7, 7, 2_000, 3_000_000, 5_000_000_000]);
    for text in ["", "GB", "0", "-1MB", "1.5GB", "1TB", "99999999999999GB"] {
        bytes(text).unwrap_err();
    }
}
