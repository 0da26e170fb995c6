//! Builds all test binaries with one call of cargo. The test binaries are then run one by one.
//!
//! cargo rebuilds every dependency if the selected packages and features change. Each selection costs minutes.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::process::read_quietly;

/// The option that makes cargo list the files that it built.
const MESSAGES: &str = "--message-format=json-render-diagnostics";

/// The tests of a library, a program or a file of tests.
#[derive(Clone, Debug, PartialEq)]
pub struct TestBinary {
    /// The name of the target: `burn_megatron`, `gpu_zero`.
    pub name: String,
    /// The folder of the package. cargo runs the tests in this folder.
    folder: PathBuf,
    file: PathBuf,
}

impl TestBinary {
    /// Returns a command that runs the binary as cargo does. A snapshot that differs fails, and no file is written
    /// for `cargo insta`.
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.file);
        command
            .current_dir(&self.folder)
            .env("CARGO_MANIFEST_DIR", &self.folder)
            .env("INSTA_UPDATE", "no");
        command
    }

    pub fn file(&self) -> &Path {
        &self.file
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }
}

/// Runs a cargo command that builds, and returns the test binaries that it built.
pub fn build(mut cargo: Command) -> Result<Vec<TestBinary>, String> {
    let mut built = Vec::new();
    read_quietly(cargo.arg(MESSAGES), |line| built.extend(parse(line)))?;
    Ok(built)
}

/// Returns the test binary in a message from cargo, or `None` for any other message.
fn parse(message: &str) -> Option<TestBinary> {
    let message: Value = serde_json::from_str(message).ok()?;
    let is_test = message["profile"]["test"] == true;
    let manifest = Path::new(message["manifest_path"].as_str()?);
    Some(TestBinary {
        name: message["target"]["name"].as_str()?.into(),
        folder: manifest.parent()?.into(),
        file: message["executable"].as_str()?.into(),
    })
    .filter(|_| is_test)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_are_read_from_cargos_messages() {
        let message = |test: bool, file: &str| {
            format!(
                r#"{{"manifest_path":"/p/Cargo.toml","target":{{"name":"gpu"}},"profile":{{"test":{test}}},"executable":{file}}}"#
            )
        };
        let messages = [
            message(false, r#""/t/gpu""#),
            message(true, r#""/t/gpu-1""#),
            message(true, "null"),
            "no JSON".into(),
        ];
        let built: Vec<_> = messages.iter().filter_map(|line| parse(line)).collect();
        let expected = TestBinary {
            name: "gpu".into(),
            folder: "/p".into(),
            file: "/t/gpu-1".into(),
        };
        assert_eq!(built, [expected]);
    }
}
