//! Runs commands: prints each before it starts, and turns its exit status into a `Result`.

use std::env;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

use serde_json::Value;

/// Returns a command for the cargo that runs this program, in the repository root.
pub fn cargo(root: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root).args(args);
    // `cargo run` sets these variables for xtask. A build script that depends on such a variable would rebuild
    // whenever cargo is called first with xtask and then without it.
    for (name, _) in env::vars_os() {
        let described = name.to_string_lossy();
        if described.starts_with("CARGO_PKG_") || described.starts_with("CARGO_MANIFEST_") {
            command.env_remove(&name);
        }
    }
    command
}

/// Runs a command until it ends. The error names the command and its exit status.
pub fn run(command: &mut Command) -> Result<(), String> {
    announce(command);
    let status = command.status().map_err(|e| not_started(command, &e))?;
    check_status(command, status)
}

/// Runs a command like [`run`], and passes each line of standard output to `on_line` after printing it.
pub fn run_reading(command: &mut Command, on_line: impl FnMut(&str)) -> Result<(), String> {
    run_copying(command, std::io::stdout(), on_line)
}

/// Runs a command like [`run`], and passes each line of standard output to `on_line` without printing it.
pub fn read_quietly(command: &mut Command, on_line: impl FnMut(&str)) -> Result<(), String> {
    run_copying(command, std::io::sink(), on_line)
}

fn run_copying(
    command: &mut Command,
    to: impl Write,
    on_line: impl FnMut(&str),
) -> Result<(), String> {
    announce(command);
    let mut child = command
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|e| not_started(command, &e))?;
    let output = child
        .stdout
        .take()
        .expect("standard output was asked for as a pipe");
    let copied = tee(output, to, on_line);
    let status = child
        .wait()
        .map_err(|e| format!("{}: {e}", describe(command)))?;
    check_status(command, status)?;
    copied.map_err(|e| format!("{}: its output: {e}", describe(command)))
}

/// Copies `from` to `to` line by line. Tests may print any bytes, so lines may not be UTF-8.
fn tee(from: impl Read, mut to: impl Write, mut on_line: impl FnMut(&str)) -> std::io::Result<()> {
    let mut from = BufReader::new(from);
    let mut line = Vec::new();
    while from.read_until(b'\n', &mut line)? > 0 {
        to.write_all(&line)?;
        to.flush()?;
        on_line(&String::from_utf8_lossy(&line));
        line.clear();
    }
    Ok(())
}

/// Returns the target folder of cargo.
pub fn target_folder(root: &Path) -> Result<PathBuf, String> {
    let mut command = cargo(root, &["metadata", "--no-deps", "--format-version", "1"]);
    let output = command
        .output()
        .map_err(|error| format!("cargo metadata could not start: {error}"))?;
    let metadata: Value = serde_json::from_slice(&output.stdout)
        .map_err(|error| format!("cargo metadata: {error}"))?;
    match metadata["target_directory"].as_str() {
        Some(folder) => Ok(folder.into()),
        None => Err("cargo metadata does not name the target folder".into()),
    }
}

/// Copies a folder with its content, except files that Python has compiled. The target folder may exist.
pub fn copy_folder(from: &Path, to: &Path) -> Result<(), String> {
    let failed = |error: std::io::Error| format!("{}: {error}", from.display());
    fs::create_dir_all(to).map_err(failed)?;
    for entry in fs::read_dir(from).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let (path, target) = (entry.path(), to.join(entry.file_name()));
        if path.is_dir() && entry.file_name() != "__pycache__" {
            copy_folder(&path, &target)?;
        } else if !path.is_dir() {
            fs::copy(&path, &target).map_err(failed)?;
        }
    }
    Ok(())
}

/// Returns the commit, or `unknown` without git.
pub fn commit(root: &Path) -> String {
    let mut git = Command::new("git");
    git.current_dir(root)
        .args(["describe", "--always", "--dirty"]);
    let output = git.output().ok().filter(|output| output.status.success());
    let commit = output.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
    commit.unwrap_or_else(|| "unknown".into())
}

fn announce(command: &Command) {
    println!("$ {}", describe(command));
}

/// Returns the command line, with the environment variables that are set for it.
fn describe(command: &Command) -> String {
    let variables = command.get_envs().filter_map(|(name, value)| {
        value.map(|value| format!("{}={}", name.display(), quoted(&value.to_string_lossy())))
    });
    let program = Path::new(command.get_program())
        .file_stem()
        .unwrap_or_default();
    let words = std::iter::once(program).chain(command.get_args());
    variables
        .chain(words.map(|w| quoted(&w.to_string_lossy())))
        .collect::<Vec<_>>()
        .join(" ")
}

fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_alphanumeric() || "-_=+./,:".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.into()
    } else {
        format!("'{word}'")
    }
}

fn not_started(command: &Command, error: &std::io::Error) -> String {
    format!("{} could not start: {error}", describe(command))
}

fn check_status(command: &Command, status: ExitStatus) -> Result<(), String> {
    if status.success() {
        Ok(())
    } else {
        Err(format!("{}: {status}", describe(command)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tee_copies_every_byte_and_reads_every_line() {
        let text = b"one\n\xff two\nthree without an end";
        let (mut copy, mut lines) = (Vec::new(), Vec::new());
        tee(&text[..], &mut copy, |line| lines.push(line.to_owned())).unwrap();
        assert_eq!(copy, text);
        assert_eq!(lines, ["one\n", "\u{fffd} two\n", "three without an end"]);
    }

    #[test]
    fn a_command_is_described_as_it_would_be_typed() {
        let mut command = Command::new("/somewhere/cargo");
        command
            .args(["test", "--test", "gpu*"])
            .env("FLAGS", "-D warnings")
            .env_remove("GONE");
        assert_eq!(
            describe(&command),
            "FLAGS='-D warnings' cargo test --test 'gpu*'"
        );
    }

    #[test]
    fn a_missing_program_is_named() {
        let error = run(&mut Command::new("no-such-program-anywhere")).unwrap_err();
        assert!(
            error.starts_with("no-such-program-anywhere could not start"),
            "{error}"
        );
    }
}
