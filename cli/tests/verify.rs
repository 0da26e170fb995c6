//! Tests `burn-megatron verify` with `--faults` and `--against`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use burn_megatron_verify::faults::find_published;

fn verify(flag: &str, folder: Option<&Path>) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_burn-megatron"));
    command.args(["verify", flag]).args(folder);
    command.output().unwrap()
}

fn text(output: &Output) -> String {
    let of = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    of(&output.stdout) + &of(&output.stderr)
}

/// Checks that the page of the book contains the rows of the list, with the same checks and differences.
#[test]
fn published_defects_are_found_as_the_book_says() {
    let page = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../docs/src/published_defects.md"
    );
    let page = fs::read_to_string(page).unwrap();
    let found = find_published(|_| ()).unwrap();
    let rows: Vec<_> = found.iter().map(|fault| fault.markdown()).collect();
    for (fault, row) in found.iter().zip(&rows) {
        assert!(fault.is_found(), "{fault}");
        assert!(
            page.contains(row),
            "the page lacks this row; all are\n{}",
            rows.join("\n")
        );
    }
    let in_page = page.lines().filter(|line| line.starts_with("| ["));
    assert_eq!(in_page.count(), rows.len());
}

/// Creates a folder with the weights of a fixture, and a step of `cli/foreign/transformers_step.py` with these
/// weights.
fn foreign(name: &str, at: &Path) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let weights = root.join("../models/tests/fixtures/hf").join(name);
    let step = root.join("tests/fixtures/foreign").join(name);
    let folder = at.join(name);
    fs::create_dir_all(folder.join("gradients")).unwrap();
    for file in ["config.json", "model.safetensors"] {
        fs::copy(weights.join(file), folder.join(file)).unwrap();
    }
    fs::copy(
        weights.join("config.json"),
        folder.join("gradients/config.json"),
    )
    .unwrap();
    for file in ["step.json", "gradients/model.safetensors"] {
        fs::copy(step.join(file), folder.join(file)).unwrap();
    }
    folder
}

#[test]
fn a_step_of_transformers_agrees() {
    let temp = tempfile::tempdir().unwrap();
    for name in ["llama2", "gpt2"] {
        let output = verify("--against", Some(&foreign(name, temp.path())));
        let text = text(&output);
        assert!(
            output.status.success() && text.contains("the step agrees"),
            "{text}"
        );
    }
}

#[test]
fn a_wrong_gradient_and_a_wrong_loss_are_found() {
    let temp = tempfile::tempdir().unwrap();
    let folder = foreign("llama2", temp.path());
    let file = folder.join("gradients/model.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    // The last tensors of the file belong to the last layer. The changed values give a wrong gradient.
    let end = bytes.len();
    for value in bytes[end - 4 * 32..].chunks_mut(4) {
        let wrong = f32::from_le_bytes(value.try_into().unwrap()) + 0.01;
        value.copy_from_slice(&wrong.to_le_bytes());
    }
    fs::write(&file, bytes).unwrap();
    let output = verify("--against", Some(&folder));
    let printed = text(&output);
    assert!(!output.status.success(), "{printed}");
    let wrong: Vec<_> = printed
        .lines()
        .filter(|line| line.contains("FAIL"))
        .collect();
    assert_eq!(wrong.len(), 1, "{printed}");
    assert!(!wrong[0].contains("loss"), "{printed}");

    let folder = foreign("gpt2", temp.path());
    let file = folder.join("step.json");
    let step = fs::read_to_string(&file).unwrap();
    fs::write(&file, step.replace("\"loss\": 4", "\"loss\": 5")).unwrap();
    let printed = text(&verify("--against", Some(&folder)));
    let wrong: Vec<_> = printed
        .lines()
        .filter(|line| line.contains("FAIL"))
        .collect();
    assert!(wrong.len() == 1 && wrong[0].contains("loss"), "{printed}");
}

#[test]
fn a_folder_without_a_step_says_what_writes_it() {
    let temp = tempfile::tempdir().unwrap();
    let folder = foreign("gpt2", temp.path());
    fs::remove_file(folder.join("step.json")).unwrap();
    let printed = text(&verify("--against", Some(&folder)));
    assert!(printed.contains("transformers_step.py"), "{printed}");
    fs::write(
        folder.join("step.json"),
        r#"{"tokens": [[1, 99]], "targets": [[1, 2]], "loss": 1.0, "dtype": "float32"}"#,
    )
    .unwrap();
    let printed = text(&verify("--against", Some(&folder)));
    assert!(printed.contains("token 99 is not below 61"), "{printed}");
}
