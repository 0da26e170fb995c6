//! Finds programs like a shell.

use std::path::{Path, PathBuf};

use burn_megatron::comm::probe;

use super::error::LaunchError;

/// Returns the program at a path, or the program of this name on PATH.
pub fn find(program: &Path) -> Result<PathBuf, LaunchError> {
    let failed = |reason: &str| LaunchError::Program {
        program: program.to_owned(),
        reason: reason.to_owned(),
    };
    if program.components().count() == 1 && !program.to_string_lossy().contains('/') {
        return probe::program_on_path(program).ok_or_else(|| failed("it is not on PATH"));
    }
    match (program.is_file(), program.is_dir()) {
        (true, _) if probe::is_program(program) => Ok(program.to_owned()),
        (true, _) => Err(failed("it is not executable; chmod +x makes it so")),
        (_, true) => Err(failed("it is a folder")),
        (false, false) => Err(failed("there is no such file")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_found_or_the_reason_is_given() {
        assert_eq!(find(Path::new("/bin/sh")).unwrap(), Path::new("/bin/sh"));
        assert!(find(Path::new("sh")).unwrap().is_absolute());
        for (program, reason) in [
            ("no-such-program-anywhere", "it is not on PATH"),
            ("/no/such/program", "there is no such file"),
            ("/tmp", "it is a folder"),
            ("/etc/passwd", "it is not executable; chmod +x makes it so"),
        ] {
            let error = find(Path::new(program)).unwrap_err();
            assert_eq!(
                error.to_string(),
                format!("the program {program} cannot be started: {reason}")
            );
            assert_eq!(error.exit_code(), 127);
        }
    }
}
